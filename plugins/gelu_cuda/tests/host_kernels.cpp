// The CUDA kernels without a GPU, first way: their bodies compiled for the host and looped over blocks and threads, to
// be run under ASan and UBSan. Buffers have exactly the size they need, so that one element too far is caught, as is a
// vector access that is not aligned. Values are compared with the tanh formula in long double.
#include "gelu_kernels.h"

#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace gelu_cuda;

static int failures = 0;
#define EXPECT(what, ...)          \
  if (!(what)) {                   \
    std::printf(__VA_ARGS__);      \
    std::printf("\n");             \
    if (++failures > 10) exit(1);  \
  }

template <class T>
struct Exact {  // n elements, 16-byte aligned plus `shift` elements, and not a byte more
  Exact(long long n, int shift = 0) : n(n) {
    if (posix_memalign(&block, 16, (n + shift) * sizeof(T) + (n + shift == 0))) abort();
    p = (T*)block + shift;
    std::memset((void*)p, 0xAB, n * sizeof(T));
  }
  ~Exact() { free(block); }
  Exact(const Exact&) = delete;
  void* block;
  T* p;
  long long n;
};

template <class T>
void fill(Exact<T>& to, unsigned seed, double scale) {
  for (long long i = 0; i < to.n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    narrow((typename Widen<T>::W)(((seed >> 8) / 8388608.0 - 1.0) * scale), to.p[i]);
  }
}

// The formula with tanh, and its derivatives.
static long double reference(int order, long double x) {
  const long double k = sqrtl(2.0L / acosl(-1.0L)), c = 0.044715L, u = k * (x + c * x * x * x), t = tanhl(u);
  const long double du = k * (1 + 3 * c * x * x), ddu = 6 * k * c * x, sech = 1 - t * t;
  if (order == 0) return 0.5L * x * (1 + t);
  if (order == 1) return 0.5L * (1 + t) + 0.5L * x * sech * du;
  return sech * du + 0.5L * x * (sech * ddu - 2 * t * sech * du * du);
}

template <class T>
double relative() {
  return sizeof(T) == 8 ? 1e-13 : sizeof(T) == 4 ? 1e-6 : std::is_same<T, Half>::value ? 0x1p-10 : 0x1p-7;
}

template <class Op, class T, int V>
void check_elementwise(const char* name, int order, long long n, int shift) {
  Exact<T> a(n, shift), b(n, shift), c(n, shift), out(n, shift);
  fill(a, 1, Op::kInputs == 1 ? 5 : 1);
  fill(b, 2, Op::kInputs == 2 ? 5 : 1);
  fill(c, 3, 5);
  const long long blocks = elementwise_blocks<Op, V>(n);
  if (n)
    for (long long block = 0; block < blocks; ++block)
      for (int thread = 0; thread < kThreads; ++thread)
        elementwise<Op, T, V>(out.p, a.p, Op::kInputs > 1 ? b.p : nullptr, Op::kInputs > 2 ? c.p : nullptr, n, block,
                              thread);
  for (long long i = 0; i < n; ++i) {
    const long double x = widen((Op::kInputs == 1 ? a : Op::kInputs == 2 ? b : c).p[i]);
    long double want = reference(order, x);
    if (Op::kInputs > 1) want *= widen(a.p[i]);
    if (Op::kInputs > 2) want *= widen(b.p[i]);
    const long double error = fabsl(widen(out.p[i]) - want);
    // The derivatives cancel beside their zeros.
    EXPECT(error <= relative<T>() * (fabsl(want) + (order ? 0.3L : 1e-3L)), "%s<V=%d> n=%lld i=%lld x=%Lg: %g, not %Lg", name, V, n, i,
           x, (double)widen(out.p[i]), want);
  }
}

template <class T, class B, int V>
void check_bias(const char* name, long long rows, long long columns) {
  using W = typename Widen<T>::W;
  Exact<T> g(rows * columns), x(rows * columns), y(rows * columns), dx(rows * columns);
  Exact<B> bias(columns), db(columns);
  fill(g, 4, 1);
  fill(x, 5, 4);
  fill(bias, 6, 1);
  const Tiling t = tiling(rows, columns, V);
  Exact<W> partial(t.chunks * columns);
  for (unsigned block = 0; block < t.chunks * t.tiles; ++block) {
    for (int thread = 0; thread < kThreads; ++thread)
      bias_forward<T, B, V>(y.p, x.p, bias.p, rows, columns, t, block, thread);
    std::vector<W> shared(kThreads * V);
    for (int thread = 0; thread < kThreads; ++thread)
      bias_backward<T, B, V>(dx.p, g.p, x.p, bias.p, shared.data(), rows, columns, t, block, thread);
    for (int thread = 0; thread < kThreads; ++thread)
      bias_backward_sums<W, V>(partial.p, shared.data(), columns, t, block, thread);
  }
  for (long long block = 0; block < (columns + kLanes - 1) / kLanes; ++block) {
    std::vector<W> shared(kThreads);
    for (int thread = 0; thread < kThreads; ++thread) reduce<W>(partial.p, shared.data(), t.chunks, columns, block, thread);
    for (int thread = 0; thread < kThreads; ++thread) reduce_sums<W, B>(db.p, shared.data(), columns, block, thread);
  }
  for (long long j = 0; j < columns; ++j) {
    long double sum = 0, size = 0;
    for (long long i = 0; i < rows; ++i) {
      const long long at = i * columns + j;
      const long double v = (long double)widen(x.p[at]) + widen(bias.p[j]);
      const long double want = reference(0, v), slope = reference(1, v) * widen(g.p[at]);
      EXPECT(fabsl(widen(y.p[at]) - want) <= relative<T>() * (fabsl(want) + 1e-3L), "%s<V=%d> forward [%lld,%lld]",
             name, V, i, j);
      EXPECT(fabsl(widen(dx.p[at]) - slope) <= relative<T>() * (fabsl(slope) + 0.3L), "%s<V=%d> backward [%lld,%lld]",
             name, V, i, j);
      sum += slope;
      size += fabsl(slope);
    }
    const long double bound = relative<B>() * fabsl(sum) + (sizeof(W) == 8 ? 1e-14L : 1e-6L) * size + 1e-6L * (sizeof(W) == 4);
    EXPECT(fabsl(widen(db.p[j]) - sum) <= bound, "%s<V=%d> bias gradient [%lld]: %g, not %Lg", name, V, j,
           (double)widen(db.p[j]), sum);
  }
}

// The last block of more than 2^32 elements, in memory that is reserved and not filled.
static void check_large() {
  const long long n = (1LL << 32) + 4099;
  auto map = [&] {
    void* p = mmap(nullptr, n * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      std::printf("mmap of %lld bytes failed\n", n * 2);
      exit(2);
    }
    return (BFloat16*)p;
  };
  BFloat16 *x = map(), *y = map();
  for (long long i = n - 4099; i < n; ++i) narrow((float)(i % 7) - 3.0f, x[i]);
  const long long blocks = elementwise_blocks<Forward, 8>(n);
  for (int thread = 0; thread < kThreads; ++thread) {
    elementwise<Forward, BFloat16, 8>(y, x, (BFloat16*)nullptr, (BFloat16*)nullptr, n, 0, thread);
    for (long long block = blocks - 2; block < blocks; ++block)
      elementwise<Forward, BFloat16, 8>(y, x, (BFloat16*)nullptr, (BFloat16*)nullptr, n, block, thread);
  }
  for (long long i = n - 4099; i < n; ++i) {
    const long double want = reference(0, widen(x[i]));
    EXPECT(fabsl(widen(y[i]) - want) <= 0x1p-7 * (fabsl(want) + 1e-3L), "large: element %lld", i);
  }
  // Every block below the limit of a grid, every element below the limit of a 64-bit index.
  EXPECT((elementwise_blocks<Forward, 8>(1LL << 42) <= 0x7fffffffLL), "2^42 elements need too many blocks");
}

template <class T, int V>
void check_type(const char* name) {
  for (long long n : {0LL, 1LL, (long long)V - 1, (long long)V, (long long)V + 1, 255LL, 4096LL, 4096LL + V + 1, 9001LL}) {
    check_elementwise<Forward, T, V>(name, 0, n, 0);
    check_elementwise<Backward, T, V>(name, 1, n, 0);
    check_elementwise<DoubleBackward, T, V>(name, 2, n, 0);
    check_elementwise<Forward, T, 1>(name, 0, n, 1);  // one element off the alignment: the single variant
    check_elementwise<Backward, T, 1>(name, 1, n, 1);
  }
}

template <class T, class B, int V>
void check_bias_type(const char* name) {
  for (long long rows : {1LL, 7LL, 33LL, 130LL}) {
    check_bias<T, B, V>(name, rows, V);
    check_bias<T, B, V>(name, rows, 32 * V + V);
    check_bias<T, B, 1>(name, rows, 37);
  }
  check_bias<T, B, V>(name, 40000, V);  // more rows than 2048 blocks of sixteen
}

#ifndef QUICK
#define QUICK 0
#endif

int main() {
  check_type<BFloat16, 8>("bf16");
  check_type<float, 4>("f32");
#if !QUICK
  check_type<double, 2>("f64");
  check_type<Half, 8>("f16");
  check_bias_type<BFloat16, BFloat16, 8>("bf16, bias bf16");
  check_bias_type<BFloat16, float, 8>("bf16, bias f32");
  check_bias_type<Half, float, 8>("f16, bias f32");
  check_bias_type<Half, Half, 8>("f16, bias f16");
  check_bias_type<float, float, 4>("f32");
  check_bias_type<double, double, 2>("f64");
  check_large();
#endif
  if (!failures) std::printf("ok\n");
  return failures != 0;
}
