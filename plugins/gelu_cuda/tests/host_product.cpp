// The gradient of a weight under ASan and UBSan, with tiles in plain loops, on buffers of exactly the size they need,
// against sums in double.
#include "product_kernels.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

static uint16_t rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static float value(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

int main() {
  __builtin_cpu_init();
  if (!product::available()) return std::printf("none\n"), 0;
  int failures = 0;
#ifdef PRODUCT_X86
  // M, N, K, distance of the rows of a beyond M, threads
  const int shapes[][5] = {{1, 1, 1, 0, 1},    {32, 32, 32, 0, 1},   {33, 31, 65, 3, 2},   {5, 300, 40, 0, 3},
                           {600, 17, 33, 1, 2}, {70, 290, 1030, 0, 2}, {16, 64, 513, 16, 4}, {40, 3, 2048, 0, 1}};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const auto& s : shapes)
    for (const bool add : {false, true}) {
      const int M = s[0], N = s[1], K = s[2], stride = M + s[3];
      const size_t size = (size_t)(K - 1) * stride + M;  // the last row has nothing behind it
      std::unique_ptr<uint16_t[]> a(new uint16_t[size]), b(new uint16_t[(size_t)K * N]);
      std::unique_ptr<float[]> out(new float[(size_t)M * N]), sums(new float[M]);
      for (size_t i = 0; i < size; ++i) a[i] = rounded(normal(random));
      for (int i = 0; i < K * N; ++i) b[i] = rounded(normal(random));
      for (int i = 0; i < M * N; ++i) out[i] = 2;
      for (int i = 0; i < M; ++i) sums[i] = 3;
      const int threads = s[4];
      product::weight_gradient(M, N, K, {a.get(), stride}, {b.get(), N}, out.get(), sums.get(), add, threads,
                               [&](long n, const auto& work) {
                                 for (int t = 0; t < threads; ++t) work(n * t / threads, n * (t + 1) / threads);
                               });
      double worst = 0;
      for (int m = 0; m < M; ++m) {
        double sum = add ? 3 : 0;
        for (int k = 0; k < K; ++k) sum += value(a[(size_t)k * stride + m]);
        worst = std::fmax(worst, std::fabs(sums[m] - sum) / std::sqrt(K));
        for (int n = 0; n < N; ++n) {
          double want = add ? 2 : 0;
          for (int k = 0; k < K; ++k) want += (double)value(a[(size_t)k * stride + m]) * value(b[(size_t)k * N + n]);
          const double away = std::fabs(out[(size_t)m * N + n] - want) / std::sqrt(K);
          if (!(away <= worst)) worst = away;  // also where it is no number
        }
      }
      if (!(worst < 1e-5)) std::printf("M=%d N=%d K=%d add=%d: %.2g\n", M, N, K, add, worst), ++failures;
    }
#endif
  if (!failures) std::printf("ok\n");
  return failures != 0;
}
