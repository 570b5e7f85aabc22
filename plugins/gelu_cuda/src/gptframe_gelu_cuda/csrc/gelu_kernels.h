// The CUDA kernels. Their bodies are ordinary functions of (block, thread), which also compile for the host: the tests
// loop over them under sanitizers and compare the launch arithmetic with what the device would see.
#pragma once

#if defined(__CUDACC__)
#define GELU_FN __host__ __device__ __forceinline__
#define GELU_FMAF ::fmaf
#define GELU_FMA ::fma
#else
#define GELU_FN inline
#define GELU_FMAF __builtin_fmaf
#define GELU_FMA __builtin_fma
#endif

namespace gelu_cuda {

#include "gelu_math.h"

using Float = float;
using Double = double;
struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

#if defined(__CUDA_ARCH__)
GELU_FN float capped(float x) {  // fminf would lose a NaN
  float m;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(fabsf(x)), "f"(12.0f));
  return m;
}
#endif

// 16-bit types: two special-function instructions, each good to about 2^-22. An input below -10 gives 0 in place of a
// result below 2^-122.
struct QuickFloat : ScalarFloat<false> {
  static constexpr GeluStyle kStyle = kSigned;
#if defined(__CUDA_ARCH__)
  GELU_FN static float magnitude(float x) { return capped(x); }
  GELU_FN static float exp2(float t) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    return e;
  }
  GELU_FN static float reciprocal(float q) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(q));
    return r;
  }
#else
  GELU_FN static float exp2(float t) { return __builtin_exp2f(t); }
#endif
};

// float and double: the polynomials, as on the CPU; the reciprocal by Newton steps, since 1/q with 1 <= q <= 2 needs
// none of the special cases of a division.
struct ExactFloat : ScalarFloat<true> {
#if defined(__CUDA_ARCH__)
  GELU_FN static float magnitude(float x) { return capped(x); }
  GELU_FN static float reciprocal(float q) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(q));
    return fmaf(r, fmaf(-q, r, 1.0f), r);
  }
#endif
};
struct ExactDouble : ScalarDouble {
#if defined(__CUDA_ARCH__)
  GELU_FN static double reciprocal(double q) {
    double r;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(q));  // about 2^-20
    r = ::fma(r, ::fma(-q, r, 1.0), r);
    return ::fma(r, ::fma(-q, r, 1.0), r);
  }
#endif
};

// How a type is computed (M) and in which type it is held meanwhile (W).
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

GELU_FN float widen(float v) { return v; }
GELU_FN double widen(double v) { return v; }
GELU_FN float widen(BFloat16 v) { return gelu_bits<float>((unsigned)v.bits << 16); }
GELU_FN void narrow(float v, float& to) { to = v; }
GELU_FN void narrow(double v, double& to) { to = v; }
#if defined(__CUDA_ARCH__)
GELU_FN float widen(Half v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
}
GELU_FN void narrow(float v, Half& to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(v)); }
GELU_FN void narrow(float v, BFloat16& to) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(v)); }
GELU_FN unsigned narrow_pair(float low, float high, Half) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
GELU_FN unsigned narrow_pair(float low, float high, BFloat16) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
GELU_FN float widen(Half v) {
  const unsigned sign = (unsigned)(v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu;
  const float scaled = gelu_bits<float>(rest << 13) * 5.192296858534828e33f;  // 2^112
  const unsigned bits = rest >= 0x7c00u ? 0x7f800000u | (rest << 13) : gelu_bits<unsigned>(scaled);
  return gelu_bits<float>(bits | sign);
}
GELU_FN void narrow(float v, Half& to) {
  const unsigned u = gelu_bits<unsigned>(v), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  const unsigned small = gelu_bits<unsigned>(gelu_bits<float>(rest) + 0.5f) - 0x3f000000u;
  const unsigned normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  const unsigned large = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
  to.bits = (unsigned short)(sign | (rest < 0x38800000u ? small : (rest < 0x477ff000u ? normal : large)));
}
GELU_FN void narrow(float v, BFloat16& to) {
  const unsigned u = gelu_bits<unsigned>(v), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  to.bits = (unsigned short)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}
#endif

// V elements, moved as one 128-bit access where V*sizeof(T) is 16.
template <class T, int V>
struct alignas(V * sizeof(T)) Pack {
  T at[V];
};

struct alignas(16) Quad {
  unsigned w[4];
};

// Whole 128-bit accesses where a pack consists of them (a float bias beside a 16-bit x takes two), else one by one.
template <class T, int V>
GELU_FN Pack<T, V> load(const T* p, long long pack) {
  Pack<T, V> to;
  if constexpr (sizeof(to) % 16 == 0) {
    constexpr int kQuads = sizeof(to) / 16;
    struct Quads {
      Quad q[kQuads];
    } quads;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) quads.q[i] = reinterpret_cast<const Quad*>(p)[pack * kQuads + i];
    to = gelu_bits<Pack<T, V>>(quads);
  } else {
    for (int j = 0; j < V; ++j) to.at[j] = p[pack * V + j];
  }
  return to;
}

// Rounds V values to T and stores them.
template <class T, int V, class W>
GELU_FN void store(T* p, long long pack, const W* from) {
  Quad quad;
  if constexpr (sizeof(T) * V == 16) {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) quad.w[i] = narrow_pair(from[2 * i], from[2 * i + 1], T{});
    } else
#endif
    {
      Pack<T, V> y;
#pragma unroll
      for (int j = 0; j < V; ++j) narrow(from[j], y.at[j]);
      quad = gelu_bits<Quad>(y);
    }
    reinterpret_cast<Quad*>(p)[pack] = quad;
  } else {
    for (int j = 0; j < V; ++j) narrow(from[j], p[pack * V + j]);
  }
}

constexpr int kThreads = 256;
constexpr int kLanes = 32;                  // columns of packs in a bias tile
constexpr int kRowLanes = kThreads / kLanes;  // rows worked on at once in a bias tile

// ---- elementwise: out = op(in0, in1, in2) ----

struct Forward {
  static constexpr int kInputs = 1;
  template <class T>
  GELU_FN static typename Widen<T>::W apply(T x, T, T) {
    return gelu_value<typename Widen<T>::M>(widen(x));
  }
};
struct Backward {  // in0 = gradient, in1 = x
  static constexpr int kInputs = 2;
  template <class T>
  GELU_FN static typename Widen<T>::W apply(T g, T x, T) {
    return widen(g) * gelu_slope<typename Widen<T>::M>(widen(x));
  }
};
struct DoubleBackward {  // in0 = gradient of the gradient, in1 = gradient, in2 = x
  static constexpr int kInputs = 3;
  template <class T>
  GELU_FN static typename Widen<T>::W apply(T gg, T g, T x) {
    return widen(gg) * widen(g) * gelu_curvature<typename Widen<T>::M>(widen(x));
  }
};

// Packs a thread works on: two loads in flight hide more of the memory's latency than one.
template <class Op>
constexpr int kUnroll = Op::kInputs == 1 ? 2 : 1;

template <class Op, int V>
GELU_FN long long elementwise_blocks(long long n) {
  const long long packs = n / V > 0 ? n / V : 1;
  return (packs + kThreads * kUnroll<Op> - 1) / (kThreads * kUnroll<Op>);
}

template <class Op, class T, int V>
GELU_FN void elementwise(T* out, const T* in0, const T* in1, const T* in2, long long n, long long block, int thread) {
  constexpr int U = kUnroll<Op>;
  const long long packs = n / V;
  const long long first = block * (kThreads * U) + thread;
  Pack<T, V> a[U], b[U], c[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const long long i = first + u * kThreads;
    if (i < packs) {
      a[u] = load<T, V>(in0, i);
      if (Op::kInputs > 1) b[u] = load<T, V>(in1, i);
      if (Op::kInputs > 2) c[u] = load<T, V>(in2, i);
    }
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const long long i = first + u * kThreads;
    if (i < packs) {
      typename Widen<T>::W y[V];
#pragma unroll
      for (int j = 0; j < V; ++j) y[j] = Op::template apply<T>(a[u].at[j], b[u].at[j], c[u].at[j]);
      store<T, V>(out, i, y);
    }
  }
  if (V > 1) {  // fewer than V elements are left: the first threads of the first block take one each
    const long long i = packs * V + first;
    if (block == 0 && i < n) {
      const T z{};
      narrow(Op::template apply<T>(in0[i], Op::kInputs > 1 ? in1[i] : z, Op::kInputs > 2 ? in2[i] : z), out[i]);
    }
  }
}

// ---- with a bias along rows: tiles of kLanes packs times a run of rows ----

// How [rows, columns] is cut. It depends on the shape alone, so that the order of summation, and with it every bit of
// the bias gradient, is the same on every device.
struct Tiling {
  unsigned tiles;  // along the columns
  long long rows_per_block;
  long long chunks;  // along the rows
};
inline Tiling tiling(long long rows, long long columns, int V) {
  Tiling t;
  const long long tiles = (columns + kLanes * V - 1) / (kLanes * V);
  t.tiles = (unsigned)tiles;
  const long long wanted = 2048 / tiles > 0 ? 2048 / tiles : 1;  // about two waves of the largest devices
  const long long share = (rows + wanted - 1) / wanted;
  t.rows_per_block = (share + kRowLanes - 1) / kRowLanes * kRowLanes;
  if (t.rows_per_block < 2 * kRowLanes) t.rows_per_block = 2 * kRowLanes;
  t.chunks = (rows + t.rows_per_block - 1) / t.rows_per_block;
  return t;
}

template <class T, class B, int V>
GELU_FN void bias_forward(T* out, const T* x, const B* bias, long long rows, long long columns, Tiling t,
                          unsigned block, int thread) {
  const long long pack = (long long)(block % t.tiles) * kLanes + thread % kLanes, packs = columns / V;
  if (pack >= packs) return;
  const Pack<B, V> bias_pack = load<B, V>(bias, pack);
  typename Widen<T>::W b[V];
#pragma unroll
  for (int j = 0; j < V; ++j) b[j] = widen(bias_pack.at[j]);
  const long long begin = (long long)(block / t.tiles) * t.rows_per_block;
  const long long end = begin + t.rows_per_block < rows ? begin + t.rows_per_block : rows;
#pragma unroll 2
  for (long long row = begin + thread / kLanes; row < end; row += kRowLanes) {
    const Pack<T, V> a = load<T, V>(x, row * packs + pack);
    typename Widen<T>::W y[V];
#pragma unroll
    for (int j = 0; j < V; ++j) y[j] = gelu_value<typename Widen<T>::M>(widen(a.at[j]) + b[j]);
    store<T, V>(out, row * packs + pack, y);
  }
}

// First half, up to the barrier: dx, and each thread's column sums into shared[kRowLanes][V][kLanes].
template <class T, class B, int V>
GELU_FN void bias_backward(T* dx, const T* g, const T* x, const B* bias, typename Widen<T>::W* shared, long long rows,
                           long long columns, Tiling t, unsigned block, int thread) {
  using W = typename Widen<T>::W;
  const long long pack = (long long)(block % t.tiles) * kLanes + thread % kLanes, packs = columns / V;
  W sum[V];
#pragma unroll
  for (int j = 0; j < V; ++j) sum[j] = 0;
  if (pack < packs) {
    const Pack<B, V> bias_pack = load<B, V>(bias, pack);
    W b[V];
#pragma unroll
    for (int j = 0; j < V; ++j) b[j] = widen(bias_pack.at[j]);
    const long long begin = (long long)(block / t.tiles) * t.rows_per_block;
    const long long end = begin + t.rows_per_block < rows ? begin + t.rows_per_block : rows;
#pragma unroll 2
    for (long long row = begin + thread / kLanes; row < end; row += kRowLanes) {
      const Pack<T, V> a = load<T, V>(x, row * packs + pack), h = load<T, V>(g, row * packs + pack);
      W y[V];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        y[j] = widen(h.at[j]) * gelu_slope<typename Widen<T>::M>(widen(a.at[j]) + b[j]);
        sum[j] += y[j];
      }
      store<T, V>(dx, row * packs + pack, y);
    }
  }
#pragma unroll
  for (int j = 0; j < V; ++j) shared[(thread / kLanes * V + j) * kLanes + thread % kLanes] = sum[j];
}

// Second half: the row lanes' sums, in order, into partial[chunks][columns].
template <class W, int V>
GELU_FN void bias_backward_sums(W* partial, const W* shared, long long columns, Tiling t, unsigned block, int thread) {
  for (int k = thread; k < kLanes * V; k += kThreads) {
    const int j = k / kLanes, lane = k % kLanes;
    const long long column = ((long long)(block % t.tiles) * kLanes + lane) * V + j;
    W sum = 0;
    for (int r = 0; r < kRowLanes; ++r) sum += shared[(r * V + j) * kLanes + lane];
    if (column < columns) partial[(long long)(block / t.tiles) * columns + column] = sum;
  }
}

// partial[chunks][columns] -> bias gradient, one column a lane.
template <class W>
GELU_FN void reduce(const W* partial, W* shared, long long chunks, long long columns, long long block, int thread) {
  const long long column = block * kLanes + thread % kLanes;
  W sum = 0;
  if (column < columns)
    for (long long c = thread / kLanes; c < chunks; c += kRowLanes) sum += partial[c * columns + column];
  shared[thread] = sum;
}
template <class W, class B>
GELU_FN void reduce_sums(B* out, const W* shared, long long columns, long long block, int thread) {
  const long long column = block * kLanes + thread;
  if (thread >= kLanes || column >= columns) return;
  W sum = 0;
  for (int r = 0; r < kRowLanes; ++r) sum += shared[r * kLanes + thread];
  narrow(sum, out[column]);
}

#if defined(__CUDACC__)

// Names are plain, so that the tests can pick a kernel out of the PTX and the SASS. V is the pack of the vectorised
// variant (16 bytes); variant "v1" takes pointers or widths that are not multiples of 16 bytes.
#define GELU_ELEMENTWISE(NAME, OP, T, V, BLOCKS)                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)                                                  \
      NAME(T* out, const T* in0, const T* in1, const T* in2, long long n) {                                       \
    elementwise<OP, T, V>(out, in0, in1, in2, n, (long long)blockIdx.x, (int)threadIdx.x);                        \
  }
#define GELU_BIAS(NAME, T, B, V)                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads, 6)                                                       \
      gelu_bias_forward_##NAME(T* out, const T* x, const B* bias, long long rows, long long columns, Tiling t) {  \
    bias_forward<T, B, V>(out, x, bias, rows, columns, t, blockIdx.x, (int)threadIdx.x);                          \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads, 4)                                                       \
      gelu_bias_backward_##NAME(T* dx, const T* g, const T* x, const B* bias, Widen<T>::W* partial,               \
                                long long rows, long long columns, Tiling t) {                                    \
    __shared__ Widen<T>::W shared[kThreads * V];                                                                  \
    bias_backward<T, B, V>(dx, g, x, bias, shared, rows, columns, t, blockIdx.x, (int)threadIdx.x);               \
    __syncthreads();                                                                                              \
    bias_backward_sums<Widen<T>::W, V>(partial, shared, columns, t, blockIdx.x, (int)threadIdx.x);                \
  }
#define GELU_REDUCE(NAME, W, B)                                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      gelu_reduce_##NAME(B* out, const W* partial, long long chunks, long long columns) {                         \
    __shared__ W shared[kThreads];                                                                                \
    reduce<W>(partial, shared, chunks, columns, (long long)blockIdx.x, (int)threadIdx.x);                         \
    __syncthreads();                                                                                              \
    reduce_sums<W, B>(out, shared, columns, (long long)blockIdx.x, (int)threadIdx.x);                             \
  }
#define GELU_TYPE(NAME, T, V)                                                  \
  GELU_ELEMENTWISE(gelu_forward_##NAME##_vec, Forward, T, V, 8)                \
  GELU_ELEMENTWISE(gelu_forward_##NAME##_v1, Forward, T, 1, 8)                 \
  GELU_ELEMENTWISE(gelu_backward_##NAME##_vec, Backward, T, V, 8)              \
  GELU_ELEMENTWISE(gelu_backward_##NAME##_v1, Backward, T, 1, 8)               \
  GELU_ELEMENTWISE(gelu_double_backward_##NAME##_vec, DoubleBackward, T, V, 6) \
  GELU_ELEMENTWISE(gelu_double_backward_##NAME##_v1, DoubleBackward, T, 1, 6)

GELU_TYPE(f32, Float, 4)
GELU_TYPE(f64, Double, 2)
GELU_TYPE(f16, Half, 8)
GELU_TYPE(bf16, BFloat16, 8)
GELU_BIAS(f32_f32_vec, Float, Float, 4)
GELU_BIAS(f32_f32_v1, Float, Float, 1)
GELU_BIAS(f64_f64_vec, Double, Double, 2)
GELU_BIAS(f64_f64_v1, Double, Double, 1)
GELU_BIAS(f16_f16_vec, Half, Half, 8)
GELU_BIAS(f16_f16_v1, Half, Half, 1)
GELU_BIAS(f16_f32_vec, Half, Float, 8)
GELU_BIAS(f16_f32_v1, Half, Float, 1)
GELU_BIAS(bf16_bf16_vec, BFloat16, BFloat16, 8)
GELU_BIAS(bf16_bf16_v1, BFloat16, BFloat16, 1)
GELU_BIAS(bf16_f32_vec, BFloat16, Float, 8)
GELU_BIAS(bf16_f32_v1, BFloat16, Float, 1)
GELU_REDUCE(f32, Float, Float)
GELU_REDUCE(f64, Double, Double)
GELU_REDUCE(f16, Float, Half)
GELU_REDUCE(bf16, Float, BFloat16)

#endif

}  // namespace gelu_cuda
