// The attention under ASan and UBSan: every instruction set that this processor has, and AMX with emulated tiles, on
// buffers of exactly the size they need, against the formula and its derivatives in double.
#include "attention_kernels.h"

#include <cstdio>
#include <random>

using namespace attention;

static float value(float x) { return x; }
static float value(BFloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
static void set(float x, float* y) { *y = x; }
static void set(float x, BFloat16* y) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  y->bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class S>
double worst_error(const Loops<S>& loops, bool with_tiles, Problem p, std::mt19937& random) {
  const int B = p.B, H = p.H, Hk = p.Hk, T = p.T, D = p.D;
  std::normal_distribution<float> normal;
  // [B, H, T, D] as q, k, v, out, grad, dq, dk, dv; results are laid out as [B, T, H, D]
  std::vector<S> t[8];
  const int heads[8] = {H, Hk, Hk, H, H, H, Hk, Hk};
  for (int i = 0; i < 8; ++i) {
    t[i].resize((size_t)B * heads[i] * T * D);
    for (S& x : t[i]) set(normal(random), &x);
  }
  std::vector<int32_t> first((size_t)B * T);
  if (p.first) {
    for (int i = 0; i < B * T; ++i) first[i] = i % T == 0 ? 0 : random() % 9 == 0 ? i % T : first[i - 1];
    p.first = first.data();
  }
  std::vector<float> lse((size_t)B * H * T);
  p.natural = 1 / std::sqrt((float)D);
  p.scale = p.natural * 1.44269504f;
  const auto plain = [&](int i) { return Strided<S>{t[i].data(), (long)heads[i] * T * D, (long)T * D, D}; };
  const auto swapped = [&](int i) { return Strided<S>{t[i].data(), (long)heads[i] * T * D, D, (long)heads[i] * D}; };
  const Strided<S> in[3] = {plain(0), plain(1), plain(2)};
  S* const results[3] = {t[5].data(), t[6].data(), t[7].data()};
  Arena arena;
  if (with_tiles) tiles::begin();
  for (int task = 0; task < B * Hk; ++task) {
    arena.reset();
    loops.forward(p, in, t[3].data(), lse.data(), task, arena);
  }
  Arena other;
  for (int task = 0; task < B * Hk; ++task) {
    other.reset();
    loops.backward(p, in, swapped(3), plain(4), lse.data(), results, task, other);
  }
  if (with_tiles) tiles::end();

  double worst = 0;
  const auto compare = [&](double got, double want, double size) {
    const double away = std::fabs(got - want) / (size + 1);
    if (!(away <= worst)) worst = away;  // also where it is no number
  };
  for (int b = 0; b < B; ++b)
    for (int hk = 0; hk < Hk; ++hk) {
      std::vector<double> dk((size_t)T * D), dv((size_t)T * D);
      for (int h = hk * (H / Hk); h < (hk + 1) * (H / Hk); ++h)
        for (int r = 0; r < T; ++r) {
          int from = p.first ? first[b * T + r] : 0;
          if (p.window && r - p.window + 1 > from) from = r - p.window + 1;
          std::vector<double> e(T), out(D), dq(D);
          double total = 0, delta = 0;
          for (int c = from; c <= r; ++c) {
            double s = 0;
            for (int d = 0; d < D; ++d) s += (double)value(in[0].at(b, h)[r * D + d]) * value(in[1].at(b, hk)[c * D + d]);
            total += e[c] = std::exp(s * p.natural);
          }
          for (int c = from; c <= r; ++c)
            for (int d = 0; d < D; ++d) out[d] += e[c] / total * value(in[2].at(b, hk)[c * D + d]);
          const S* g = plain(4).at(b, h) + r * D;
          for (int d = 0; d < D; ++d) delta += out[d] * value(g[d]);
          for (int c = from; c <= r; ++c) {
            double dp = 0;
            for (int d = 0; d < D; ++d) dp += (double)value(g[d]) * value(in[2].at(b, hk)[c * D + d]);
            const double pattern = e[c] / total, ds = pattern * (dp - delta) * p.natural;
            for (int d = 0; d < D; ++d) {
              dq[d] += ds * value(in[1].at(b, hk)[c * D + d]);
              dk[c * D + d] += ds * value(in[0].at(b, h)[r * D + d]);
              dv[c * D + d] += pattern * value(g[d]);
            }
          }
          for (int d = 0; d < D; ++d) {
            compare(value(swapped(3).at(b, h)[(long)r * H * D + d]), out[d], std::fabs(out[d]));
            compare(value(swapped(5).at(b, h)[(long)r * H * D + d]), dq[d], std::fabs(dq[d]));
          }
        }
      for (int c = 0; c < T; ++c)
        for (int d = 0; d < D; ++d) {
          compare(value(swapped(6).at(b, hk)[(long)c * Hk * D + d]), dk[c * D + d], std::fabs(dk[c * D + d]));
          compare(value(swapped(7).at(b, hk)[(long)c * Hk * D + d]), dv[c * D + d], std::fabs(dv[c * D + d]));
        }
    }
  return worst;
}

int main() {
  // B, H, Hk, T, D, window, documents, rows, columns
  const int shapes[][9] = {{1, 1, 1, 1, 16, 0, 0, 16, 16},    {2, 2, 2, 37, 16, 0, 0, 48, 48},
                           {1, 4, 2, 70, 32, 0, 0, 64, 64},   {1, 2, 1, 150, 64, 0, 0, 64, 128},
                           {2, 1, 1, 100, 48, 7, 0, 64, 64},  {1, 3, 1, 130, 80, 0, 1, 64, 64},
                           {1, 2, 2, 200, 64, 40, 1, 64, 128}, {1, 1, 1, 65, 128, 64, 0, 64, 64}};
  int failures = 0;
  for (const Variant& one : variants())
    for (const auto& s : shapes) {
      std::mt19937 random(1);
      Problem p{};
      const int32_t some = 0;
      p.B = s[0], p.H = s[1], p.Hk = s[2], p.T = s[3], p.D = s[4], p.window = s[5], p.first = s[6] ? &some : nullptr;
      p.rows = s[7], p.columns = s[8];
      const double single = worst_error(one.single, one.tiles, p, random), half = worst_error(one.half, one.tiles, p, random);
      if (!(single < 3e-6) || !(half < 2e-2)) {
        std::printf("%s T=%d D=%d window=%d: float32 %.2g, bfloat16 %.2g\n", one.name, p.T, p.D, p.window, single, half);
        ++failures;
      }
    }
  if (!failures) {
    for (const Variant& one : variants()) std::printf("%s ", one.name);
    std::printf("ok\n");
  }
  return failures != 0;
}
