// The CPU loops under ASan and UBSan: every instruction set that this processor has, every type, odd lengths, buffers of
// exactly the size they need, at any alignment. Values are compared with the tanh formula in long double.
#include "gelu_cpu_variants.h"

#include <cmath>
#include <cstdio>
#include <vector>

static int failures = 0;

static long double reference(int order, long double x) {
  const long double k = sqrtl(2.0L / acosl(-1.0L)), c = 0.044715L, u = k * (x + c * x * x * x), t = tanhl(u);
  const long double du = k * (1 + 3 * c * x * x), ddu = 6 * k * c * x, sech = 1 - t * t;
  if (order == 0) return 0.5L * x * (1 + t);
  if (order == 1) return 0.5L * (1 + t) + 0.5L * x * sech * du;
  return sech * du + 0.5L * x * (sech * ddu - 2 * t * sech * du * du);
}

// Row of the table: 0 float, 1 double, 2 half, 3 bfloat16, and 4 and 5 the last two with a float bias.
static int size_of(int type) { return type == 1 ? 8 : type == 0 ? 4 : 2; }
static int bias_type(int row) { return row >= 4 ? 0 : row; }
static int value_type(int row) { return row >= 4 ? row - 2 : row; }

static double get(const unsigned char* p, int type) {
  if (type == 1) return *(const double*)p;
  if (type == 0) return *(const float*)p;
  unsigned short bits;
  std::memcpy(&bits, p, 2);
  if (type == 3) {
    const unsigned wide = (unsigned)bits << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// A value that every type holds exactly.
static void put(unsigned char* p, int type, double v) {
  if (type == 1) *(double*)p = v;
  else if (type == 0) *(float*)p = (float)v;
  else {
    unsigned short bits;
    if (type == 3) {
      const float f = (float)v;
      unsigned wide;
      std::memcpy(&wide, &f, 4);
      bits = (unsigned short)(wide >> 16);
    } else {
      int exponent;
      const double m = std::frexp(std::fabs(v), &exponent);
      bits = v == 0 ? 0 : (unsigned short)(((exponent + 14) << 10) | ((int)(m * 2048) - 1024));
      bits |= v < 0 ? 0x8000 : 0;
    }
    std::memcpy(p, &bits, 2);
  }
}

struct Array {  // on the heap, to the byte; `shift` elements off the allocation's alignment
  Array(long long n, int type, int shift = 0) : type(type), block(new unsigned char[(n + shift) * size_of(type)]) {
    p = block + shift * size_of(type);
    std::memset(p, 0, n * size_of(type));
  }
  ~Array() { delete[] block; }
  double operator[](long long i) const { return get(p + i * size_of(type), type); }
  void fill(long long n, int step) {
    for (long long i = 0; i < n; ++i) put(p + i * size_of(type), type, ((i * step) % 41 - 20) * 0.25);
  }
  int type;
  unsigned char *block, *p;
};

static void expect(const char* variant, const char* what, int row, long long i, double got, long double want) {
  const int type = value_type(row);
  const double relative = type == 1 ? 1e-13 : type == 0 ? 1e-6 : type == 2 ? 0x1p-10 : 0x1p-7;
  if (fabsl(got - want) <= relative * (fabsl(want) + 0.3L)) return;
  std::printf("%s %s row %d element %lld: %g, not %Lg\n", variant, what, row, i, got, want);
  if (++failures > 10) std::exit(1);
}

static void check(const char* name, const Loops* table) {
  for (int row = 0; row < 4; ++row)
    for (long long n : {0, 1, 7, 63, 64, 65, 200})
      for (int shift : {0, 1}) {
        Array x(n, row, shift), g(n, row, shift), gg(n, row, shift), y(n, row, shift), d(n, row, shift), c(n, row, shift);
        x.fill(n, 7);
        g.fill(n, 3);
        gg.fill(n, 5);
        table[row].forward(x.p, y.p, n);
        table[row].backward(g.p, x.p, d.p, n);
        table[row].double_backward(gg.p, g.p, x.p, c.p, n);
        for (long long i = 0; i < n; ++i) {
          expect(name, "forward", row, i, y[i], reference(0, x[i]));
          expect(name, "backward", row, i, d[i], g[i] * reference(1, x[i]));
          expect(name, "double backward", row, i, c[i], gg[i] * g[i] * reference(2, x[i]));
        }
      }
  for (int row = 0; row < 6; ++row)
    for (long long columns : {1, 63, 64, 130})
      for (long long rows : {1, 3}) {
        const int type = value_type(row), wide = type == 1 ? 1 : 0;
        const long long n = rows * columns;
        Array x(n, type), g(n, type), y(n, type), d(n, type), b(columns, bias_type(row)), sum(columns, wide);
        x.fill(n, 7);
        g.fill(n, 3);
        b.fill(columns, 2);
        table[row].bias_forward(x.p, b.p, y.p, rows, columns);
        table[row].bias_backward(g.p, x.p, b.p, d.p, sum.p, rows, columns);
        for (long long j = 0; j < columns; ++j) {
          long double total = 0;
          for (long long i = 0; i < rows; ++i) {
            const long double v = (long double)x[i * columns + j] + b[j], slope = g[i * columns + j] * reference(1, v);
            expect(name, "bias forward", row, i * columns + j, y[i * columns + j], reference(0, v));
            expect(name, "bias backward", row, i * columns + j, d[i * columns + j], slope);
            total += slope;
          }
          expect(name, "bias gradient", wide ? 1 : 0, j, sum[j], total);
        }
      }
}

int main() {
  check("baseline", baseline_table);
#ifdef GELU_X86_VARIANTS
  const Variant widest = choose();
  if (std::strcmp(widest.name, "baseline")) check("avx2", avx2_table);
  if (!std::strcmp(widest.name, "avx512")) check("avx512", avx512_table);
#endif
  if (!failures) std::printf("ok\n");
  return failures != 0;
}
