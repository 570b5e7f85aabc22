// The CPU loops, included once per instruction set by gelu_cpu.cpp, inside a namespace of its own.
//
// Half types are widened into a small buffer that stays in the first-level cache, so that the arithmetic loop is the
// same for all types. The tail of an array runs through a padded buffer: an element's result never depends on where
// it lies or on the number of threads.

#include "gelu_math.h"

constexpr int kBlock = 64;  // elements; a whole number of vectors of every type

using Float = float;
using Double = double;
struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

// The arithmetic: whole vectors of float with AVX-512 and AVX2, of double with AVX-512, whose instructions round, scale
// and estimate reciprocals; else scalars, which the compiler vectorises.
template <class Policy>
struct Scalar : Policy {
  static constexpr int kLanes = 1;
  GELU_FN static typename Policy::R get(const typename Policy::R* p) { return *p; }
  GELU_FN static void put(typename Policy::R* p, typename Policy::R v) { *p = v; }
};

#if GELU_ISA >= 256
// Several vectors go through every step side by side. One alone is a chain of forty instructions that each wait for the
// one before, and the processor's scheduler is too small to hold enough of such chains to stay busy.
constexpr int kSide = 2;
template <class V>
struct Side {
  V v[kSide];
};
#define GELU_EACH(expression)                                \
  Side<V> out;                                               \
  _Pragma("GCC unroll 8") for (int i = 0; i < kSide; ++i) out.v[i] = (expression); \
  return out;
template <class V>
GELU_FN Side<V> operator+(Side<V> a, Side<V> b) {
  GELU_EACH(a.v[i] + b.v[i])
}
template <class V>
GELU_FN Side<V> operator-(Side<V> a, Side<V> b) {
  GELU_EACH(a.v[i] - b.v[i])
}
template <class V>
GELU_FN Side<V> operator*(Side<V> a, Side<V> b) {
  GELU_EACH(a.v[i] * b.v[i])
}
template <class V>
GELU_FN Side<V> operator-(Side<V> a) {
  GELU_EACH(-a.v[i])
}

#endif

#if GELU_ISA == 512
template <bool Exact>
struct VectorFloat {
  using V = __m512;
  using R = Side<V>;
  static constexpr GeluStyle kStyle = Exact ? kExact : kQuick;
  static constexpr int kLanes = 16 * kSide;
  GELU_FN static R get(const float* p) { GELU_EACH(_mm512_loadu_ps(p + 16 * i)) }
  GELU_FN static void put(float* p, R r) {
    _Pragma("GCC unroll 8") for (int i = 0; i < kSide; ++i) _mm512_storeu_ps(p + 16 * i, r.v[i]);
  }
  GELU_FN static R c(double v) { GELU_EACH(_mm512_set1_ps((float)v)) }
  GELU_FN static R fma(R a, R b, R d) { GELU_EACH(_mm512_fmadd_ps(a.v[i], b.v[i], d.v[i])) }
  GELU_FN static R positive(R x, R a, R b) {
    GELU_EACH(_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v[i], _mm512_setzero_ps(), _CMP_GT_OQ), b.v[i], a.v[i]))
  }
  // The minimum returns its second operand where that is a NaN.
  GELU_FN static R magnitude(R x) { GELU_EACH(_mm512_min_ps(_mm512_set1_ps(12), _mm512_abs_ps(x.v[i]))) }
  GELU_FN static R exp2(R t) {
    const R n = rounded(t), f = t - n;
    const R p = Exact ? gelu_exp2_degree6<VectorFloat>(f) : gelu_exp2_degree5<VectorFloat>(f);
    GELU_EACH(_mm512_scalef_ps(p.v[i], n.v[i]))
  }
  GELU_FN static R rounded(R t) {
    GELU_EACH(_mm512_roundscale_ps(t.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
  }
  GELU_FN static R reciprocal(R q) {  // 14 bits, then one Newton step
    const R r = estimate(q);
    return fma(r, fma(-q, r, c(1)), r);
  }
  GELU_FN static R estimate(R q) { GELU_EACH(_mm512_rcp14_ps(q.v[i])) }
};

struct VectorDouble {
  using V = __m512d;
  using R = Side<V>;
  static constexpr GeluStyle kStyle = kExact;
  static constexpr int kLanes = 8 * kSide;
  GELU_FN static R get(const double* p) { GELU_EACH(_mm512_loadu_pd(p + 8 * i)) }
  GELU_FN static void put(double* p, R r) {
    _Pragma("GCC unroll 8") for (int i = 0; i < kSide; ++i) _mm512_storeu_pd(p + 8 * i, r.v[i]);
  }
  GELU_FN static R c(double v) { GELU_EACH(_mm512_set1_pd(v)) }
  GELU_FN static R fma(R a, R b, R d) { GELU_EACH(_mm512_fmadd_pd(a.v[i], b.v[i], d.v[i])) }
  GELU_FN static R positive(R x, R a, R b) {
    GELU_EACH(_mm512_mask_blend_pd(_mm512_cmp_pd_mask(x.v[i], _mm512_setzero_pd(), _CMP_GT_OQ), b.v[i], a.v[i]))
  }
  GELU_FN static R magnitude(R x) { GELU_EACH(_mm512_min_pd(_mm512_set1_pd(24), _mm512_abs_pd(x.v[i]))) }
  GELU_FN static R exp2(R t) {
    const R n = rounded(t), p = gelu_exp2_degree11<VectorDouble>(t - n);
    GELU_EACH(_mm512_scalef_pd(p.v[i], n.v[i]))
  }
  GELU_FN static R rounded(R t) {
    GELU_EACH(_mm512_roundscale_pd(t.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
  }
  GELU_FN static R reciprocal(R q) {  // 14 bits, then two Newton steps
    R r = estimate(q);
    r = fma(r, fma(-q, r, c(1)), r);
    return fma(r, fma(-q, r, c(1)), r);
  }
  GELU_FN static R estimate(R q) { GELU_EACH(_mm512_rcp14_pd(q.v[i])) }
};
using ExactFloat = VectorFloat<true>;
using QuickFloat = VectorFloat<false>;
using ExactDouble = VectorDouble;
#elif GELU_ISA == 256
template <bool Exact>
struct VectorFloat {
  using V = __m256;
  using R = Side<V>;
  static constexpr GeluStyle kStyle = Exact ? kExact : kQuick;
  static constexpr int kLanes = 8 * kSide;
  GELU_FN static R get(const float* p) { GELU_EACH(_mm256_loadu_ps(p + 8 * i)) }
  GELU_FN static void put(float* p, R r) {
    _Pragma("GCC unroll 8") for (int i = 0; i < kSide; ++i) _mm256_storeu_ps(p + 8 * i, r.v[i]);
  }
  GELU_FN static R c(double v) { GELU_EACH(_mm256_set1_ps((float)v)) }
  GELU_FN static R fma(R a, R b, R d) { GELU_EACH(_mm256_fmadd_ps(a.v[i], b.v[i], d.v[i])) }
  GELU_FN static R positive(R x, R a, R b) {
    GELU_EACH(_mm256_blendv_ps(b.v[i], a.v[i], _mm256_cmp_ps(x.v[i], _mm256_setzero_ps(), _CMP_GT_OQ)))
  }
  // The minimum returns its second operand where that is a NaN.
  GELU_FN static R magnitude(R x) {
    GELU_EACH(_mm256_min_ps(_mm256_set1_ps(12), _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v[i])))
  }
  // As ScalarFloat's, with 254 = 2 * 127 in the shift: half of the sum is one factor's exponent, the rest the other's.
  GELU_FN static R exp2(R t) {
    const R shifted = c(12582912.0 + 254) + t, f = t - (shifted - c(12582912.0 + 254));
    const R p = Exact ? gelu_exp2_degree6<VectorFloat>(f) : gelu_exp2_degree5<VectorFloat>(f);
    GELU_EACH(scaled(p.v[i], _mm256_castps_si256(shifted.v[i])))
  }
  GELU_FN static V scaled(V p, __m256i n) {
    const __m256i half = _mm256_srli_epi32(n, 1), rest = _mm256_sub_epi32(n, half);
    return p * _mm256_castsi256_ps(_mm256_slli_epi32(half, 23)) * _mm256_castsi256_ps(_mm256_slli_epi32(rest, 23));
  }
  GELU_FN static R reciprocal(R q) { GELU_EACH(_mm256_set1_ps(1) / q.v[i]) }
};
using ExactFloat = VectorFloat<true>;
using QuickFloat = VectorFloat<false>;
using ExactDouble = Scalar<ScalarDouble>;
#else
using ExactFloat = Scalar<ScalarFloat<true>>;
using QuickFloat = Scalar<ScalarFloat<false>>;
using ExactDouble = Scalar<ScalarDouble>;
#endif
#undef GELU_EACH

// How a type is computed (M), and in which type it is held meanwhile (W).
template <class T>
struct Widen {
  using M = QuickFloat;
  using W = float;
};
template <>
struct Widen<float> {
  using M = ExactFloat;
  using W = float;
};
template <>
struct Widen<double> {
  using M = ExactDouble;
  using W = double;
};

// A block is read through load(from, buffer) and written through target(to, buffer) and store(values, to): float and
// double work in place, half types by way of the buffer.
template <class W>
GELU_FN const W* load(const W* from, W*) {
  return from;
}
template <class W>
GELU_FN W* target(W* to, W*) {
  return to;
}
template <class T, class W>
GELU_FN W* target(T*, W* buffer) {
  return buffer;
}
template <class W>
GELU_FN void store(const W*, W*) {}

#if GELU_ISA == 256
GELU_FN const float* load(const BFloat16* from, float* to) {
  for (int i = 0; i < kBlock; i += 8) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + i)));
    _mm256_store_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
  }
  return to;
}
GELU_FN __m256i rounded_to_bf16(__m256 v) {  // as below, in the lower half of each element
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  const __m256 bits = _mm256_blendv_ps(_mm256_castsi256_ps(up), quiet, nan);
  return _mm256_srli_epi32(_mm256_castps_si256(bits), 16);
}
GELU_FN void store(const float* from, BFloat16* to) {
  for (int i = 0; i < kBlock; i += 16) {
    const __m256i low = rounded_to_bf16(_mm256_load_ps(from + i)), high = rounded_to_bf16(_mm256_load_ps(from + i + 8));
    // Packing works on halves of 128 bits: the quarters come out as 0, 2, 1, 3.
    _mm256_storeu_si256((__m256i*)(to + i), _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
  }
}
#else
GELU_FN const float* load(const BFloat16* from, float* to) {
  for (int i = 0; i < kBlock; ++i) to[i] = gelu_bits<float>((unsigned)from[i].bits << 16);
  return to;
}

// Round to nearest even on the bits (the hardware instruction of AVX512_BF16 would flush denormals).
GELU_FN void store(const float* from, BFloat16* to) {
  for (int i = 0; i < kBlock; ++i) {
    const unsigned u = gelu_bits<unsigned>(from[i]);
    const unsigned rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    to[i].bits = (unsigned short)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}
#endif

#if GELU_ISA == 512
GELU_FN const float* load(const Half* from, float* to) {
  for (int i = 0; i < kBlock; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
  return to;
}
GELU_FN void store(const float* from, Half* to) {
  for (int i = 0; i < kBlock; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
}
#elif GELU_ISA == 256
GELU_FN const float* load(const Half* from, float* to) {
  for (int i = 0; i < kBlock; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
  return to;
}
GELU_FN void store(const float* from, Half* to) {
  for (int i = 0; i < kBlock; i += 8)
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
}
#else
GELU_FN const float* load(const Half* from, float* to) {
  for (int i = 0; i < kBlock; ++i) {
    const unsigned sign = (unsigned)(from[i].bits & 0x8000u) << 16, rest = from[i].bits & 0x7fffu;
    // Shifted into place, the value is 2^-112 of what it should be; denormals are scaled correctly as well.
    const float scaled = gelu_bits<float>(rest << 13) * 5.192296858534828e33f;
    const unsigned bits = rest >= 0x7c00u ? 0x7f800000u | (rest << 13) : gelu_bits<unsigned>(scaled);
    to[i] = gelu_bits<float>(bits | sign);
  }
  return to;
}
GELU_FN void store(const float* from, Half* to) {
  for (int i = 0; i < kBlock; ++i) {
    const unsigned u = gelu_bits<unsigned>(from[i]), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    // Denormals of the half type: adding 0.5 lets the float adder round at 2^-24.
    const unsigned small = gelu_bits<unsigned>(gelu_bits<float>(rest) + 0.5f) - 0x3f000000u;
    const unsigned normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    const unsigned large = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
    to[i].bits = (unsigned short)(sign | (rest < 0x38800000u ? small : (rest < 0x477ff000u ? normal : large)));
  }
}
#endif

// Copies `n` < kBlock elements into a zeroed block, and back.
template <class T>
GELU_FN void pad(const T* from, T* block, long long n) {
  __builtin_memset((void*)block, 0, kBlock * sizeof(T));
  __builtin_memcpy((void*)block, (const void*)from, (unsigned long)n * sizeof(T));
}
template <class T>
GELU_FN void unpad(const T* block, T* to, long long n) {
  __builtin_memcpy((void*)to, (const void*)block, (unsigned long)n * sizeof(T));
}

// Fetches the block that lies 4 KiB further on, to be read (0) or written (1). The loads of a block come too late for
// the hardware's own prefetcher to hide the memory behind the arithmetic. Past the end of an array it does nothing.
template <int Write, class T>
GELU_FN void ahead(const T* p) {
  for (int i = 0; i < (int)(kBlock * sizeof(T)); i += 64) __builtin_prefetch((const char*)p + 4096 + i, Write, 3);
}

template <class T>
GELU_FN void forward_block(const T* px, T* py) {
  ahead<0>(px);
  ahead<1>(py);
  using M = typename Widen<T>::M;
  using W = typename Widen<T>::W;
  alignas(64) W bx[kBlock], by[kBlock];
  const W* x = load(px, bx);
  W* y = target(py, by);
  for (int i = 0; i < kBlock; i += M::kLanes) M::put(y + i, gelu_value<M>(M::get(x + i)));
  store(y, py);
}

template <class T>
GELU_FN void backward_block(const T* pg, const T* px, T* pd) {
  ahead<0>(px);
  ahead<0>(pg);
  ahead<1>(pd);
  using M = typename Widen<T>::M;
  using W = typename Widen<T>::W;
  alignas(64) W bx[kBlock], bg[kBlock], bd[kBlock];
  const W *x = load(px, bx), *g = load(pg, bg);
  W* d = target(pd, bd);
  for (int i = 0; i < kBlock; i += M::kLanes) M::put(d + i, M::get(g + i) * gelu_slope<M>(M::get(x + i)));
  store(d, pd);
}

template <class T>
GELU_FN void double_backward_block(const T* pgg, const T* pg, const T* px, T* pd) {
  ahead<0>(px);
  ahead<0>(pg);
  ahead<0>(pgg);
  ahead<1>(pd);
  using M = typename Widen<T>::M;
  using W = typename Widen<T>::W;
  alignas(64) W bx[kBlock], bg[kBlock], bgg[kBlock], bd[kBlock];
  const W *x = load(px, bx), *g = load(pg, bg), *gg = load(pgg, bgg);
  W* d = target(pd, bd);
  for (int i = 0; i < kBlock; i += M::kLanes)
    M::put(d + i, M::get(gg + i) * M::get(g + i) * gelu_curvature<M>(M::get(x + i)));
  store(d, pd);
}

template <class T>
void forward(const T* x, T* y, long long n) {
  long long i = 0;
  for (; i + kBlock <= n; i += kBlock) forward_block(x + i, y + i);
  if (i < n) {
    T in[kBlock], out[kBlock];
    pad(x + i, in, n - i);
    forward_block(in, out);
    unpad(out, y + i, n - i);
  }
}

template <class T>
void backward(const T* g, const T* x, T* dx, long long n) {
  long long i = 0;
  for (; i + kBlock <= n; i += kBlock) backward_block(g + i, x + i, dx + i);
  if (i < n) {
    T in[kBlock], grad[kBlock], out[kBlock];
    pad(x + i, in, n - i);
    pad(g + i, grad, n - i);
    backward_block(grad, in, out);
    unpad(out, dx + i, n - i);
  }
}

template <class T>
void double_backward(const T* gg, const T* g, const T* x, T* dx, long long n) {
  long long i = 0;
  for (; i + kBlock <= n; i += kBlock) double_backward_block(gg + i, g + i, x + i, dx + i);
  if (i < n) {
    T in[kBlock], grad[kBlock], gradgrad[kBlock], out[kBlock];
    pad(x + i, in, n - i);
    pad(g + i, grad, n - i);
    pad(gg + i, gradgrad, n - i);
    double_backward_block(gradgrad, grad, in, out);
    unpad(out, dx + i, n - i);
  }
}

// y = gelu(x + bias) on a block of one row; the sum is not rounded to T.
template <class T, class B>
GELU_FN void bias_forward_block(const T* px, const B* pb, T* py) {
  ahead<0>(px);
  ahead<1>(py);
  using M = typename Widen<T>::M;
  using W = typename Widen<T>::W;
  alignas(64) W bx[kBlock], bb[kBlock], by[kBlock];
  const W *x = load(px, bx), *b = load(pb, bb);
  W* y = target(py, by);
  for (int i = 0; i < kBlock; i += M::kLanes) M::put(y + i, gelu_value<M>(M::get(x + i) + M::get(b + i)));
  store(y, py);
}

// dx = g * gelu'(x + bias); sum += dx, before dx is rounded to T.
template <class T, class B>
GELU_FN void bias_backward_block(const T* pg, const T* px, const B* pb, T* pd, typename Widen<T>::W* sum) {
  ahead<0>(px);
  ahead<0>(pg);
  ahead<1>(pd);
  using M = typename Widen<T>::M;
  using W = typename Widen<T>::W;
  alignas(64) W bx[kBlock], bg[kBlock], bb[kBlock], bd[kBlock];
  const W *x = load(px, bx), *g = load(pg, bg), *b = load(pb, bb);
  W* d = target(pd, bd);
  for (int i = 0; i < kBlock; i += M::kLanes) {
    const typename M::R v = M::get(g + i) * gelu_slope<M>(M::get(x + i) + M::get(b + i));
    M::put(d + i, v);
    M::put(sum + i, M::get(sum + i) + v);
  }
  store(d, pd);
}

template <class T, class B>
void bias_forward(const T* x, const B* bias, T* y, long long rows, long long columns) {
  for (long long row = 0; row < rows; ++row, x += columns, y += columns) {
    long long i = 0;
    for (; i + kBlock <= columns; i += kBlock) bias_forward_block(x + i, bias + i, y + i);
    if (i < columns) {
      T in[kBlock], out[kBlock];
      B add[kBlock];
      pad(x + i, in, columns - i);
      pad(bias + i, add, columns - i);
      bias_forward_block(in, add, out);
      unpad(out, y + i, columns - i);
    }
  }
}

// sum[columns] += the column sums of dx over these rows.
template <class T, class B>
void bias_backward(const T* g, const T* x, const B* bias, T* dx, typename Widen<T>::W* sum, long long rows,
                   long long columns) {
  using R = typename Widen<T>::W;
  for (long long row = 0; row < rows; ++row, g += columns, x += columns, dx += columns) {
    long long i = 0;
    for (; i + kBlock <= columns; i += kBlock) bias_backward_block(g + i, x + i, bias + i, dx + i, sum + i);
    if (i < columns) {
      T in[kBlock], grad[kBlock], out[kBlock];
      B add[kBlock];
      R part[kBlock];
      pad(x + i, in, columns - i);
      pad(g + i, grad, columns - i);
      pad(bias + i, add, columns - i);
      pad(sum + i, part, columns - i);
      bias_backward_block(grad, in, add, out, part);
      unpad(out, dx + i, columns - i);
      unpad(part, sum + i, columns - i);
    }
  }
}
