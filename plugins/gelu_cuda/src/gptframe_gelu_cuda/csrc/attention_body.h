// Causal attention on a CPU, blockwise (Dao, 2023: FlashAttention-2), included once per instruction set inside a namespace.
//
// All of it is products of small dense blocks, C[M,N] += A[M,K] B[K,N], and one pass over the scores between them. The
// unit of K is a float, or a pair of bfloat16 in 32 bits where the instructions multiply such pairs (kPack = 2). A block
// of R rows with D features exists in two forms, and in the transposes of both:
//
//     whole    [R, D / kPack]    pairs of neighbouring features
//     paired   [R / kPack, D]    pairs of neighbouring rows
//
// Blocks are padded to their full size with zero rows, so that no product has a tail.

constexpr int kTileRows = 6;

#if ATTENTION_ISA == 512
constexpr int kLanes = 16, kTileVectors = 4;
using V = __m512;
ATTENTION_FN V all(float x) { return _mm512_set1_ps(x); }
ATTENTION_FN V load(const float* p) { return _mm512_loadu_ps(p); }
ATTENTION_FN void store(float* p, V x) { _mm512_storeu_ps(p, x); }
ATTENTION_FN V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
ATTENTION_FN V larger(V a, V b) { return _mm512_max_ps(a, b); }  // b where one of them is a NaN
ATTENTION_FN V rounded(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ATTENTION_FN V scaled(V x, V n) { return _mm512_scalef_ps(x, n); }  // x 2^n
ATTENTION_FN float sum(V x) { return _mm512_reduce_add_ps(x); }
ATTENTION_FN float largest(V x) { return _mm512_reduce_max_ps(x); }
// x in the columns `from` up to, not including, `to`, else -inf; the first lane is `column`.
ATTENTION_FN V visible(V x, int column, int from, int to) {
  const __m512i i = _mm512_add_epi32(_mm512_set1_epi32(column),
                                     _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __mmask16 in =
      _mm512_cmpge_epi32_mask(i, _mm512_set1_epi32(from)) & _mm512_cmplt_epi32_mask(i, _mm512_set1_epi32(to));
  return _mm512_mask_blend_ps(in, all(-INFINITY), x);
}
#else
constexpr int kLanes = 8, kTileVectors = 2;
using V = __m256;
ATTENTION_FN V all(float x) { return _mm256_set1_ps(x); }
ATTENTION_FN V load(const float* p) { return _mm256_loadu_ps(p); }
ATTENTION_FN void store(float* p, V x) { _mm256_storeu_ps(p, x); }
ATTENTION_FN V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
ATTENTION_FN V larger(V a, V b) { return _mm256_max_ps(a, b); }
ATTENTION_FN V rounded(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ATTENTION_FN V scaled(V x, V n) {  // by two factors, as n may lie below the smallest exponent
  const __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
  const V a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const V b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23));
  return x * a * b;
}
ATTENTION_FN float sum(V x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
ATTENTION_FN float largest(V x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
ATTENTION_FN V visible(V x, int column, int from, int to) {
  const __m256i i = _mm256_add_epi32(_mm256_set1_epi32(column), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from), i),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(to), i));
  return _mm256_blendv_ps(all(-INFINITY), x, _mm256_castsi256_ps(in));
}
#endif

// 2^t with a relative error of 1.6e-7, by a polynomial of degree 5 (least largest relative error on [-1/2, 1/2]).
ATTENTION_FN V exp2(V t) {
  t = larger(all(-160), t);  // keeps a NaN
  const V n = rounded(t), f = t - n;
  V p = fma(all(0.00132647269f), f, all(0.009671512661f));
  p = fma(p, f, all(0.05550733744f));
  p = fma(p, f, all(0.2402224208f));
  p = fma(p, f, all(0.6931469776f));
  return scaled(fma(p, f, all(1)), n);
}

ATTENTION_FN float wide(float x) { return x; }
ATTENTION_FN float wide(BFloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
ATTENTION_FN void narrow(float x, float* y) { *y = x; }
ATTENTION_FN void narrow(float x, BFloat16* y) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  y->bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#if ATTENTION_PAIRS
constexpr int kPack = 2;
using Unit = uint32_t;
ATTENTION_FN V several(const Unit* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
ATTENTION_FN V repeated(const Unit* p) { return _mm512_castsi512_ps(_mm512_set1_epi32((int)*p)); }
ATTENTION_FN V multiply(V a, V b, V c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
// Sixteen columns of two rows: as they are, and paired.
struct Two {
  __m512i rows, paired;
};
ATTENTION_FN Two rounded(V above, V below) {
  const __m512i rows = (__m512i)_mm512_cvtne2ps_pbh(below, above);
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return {rows, _mm512_permutexvar_epi16(_mm512_load_si512(order), rows)};
}
#else
constexpr int kPack = 1;
using Unit = float;
ATTENTION_FN V several(const Unit* p) { return load(p); }
ATTENTION_FN V repeated(const Unit* p) { return all(*p); }
ATTENTION_FN V multiply(V a, V b, V c) { return fma(a, b, c); }
#endif

template <int M, int N>
ATTENTION_FN void tile(int K, const Unit* a, int lda, const Unit* b, int ldb, float* c, int ldc, bool add) {
  V sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = add ? load(c + m * ldc + n * kLanes) : all(0);
  for (int k = 0; k < K; ++k) {
    V row[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) row[n] = several(b + (long)k * ldb + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const V x = repeated(a + (long)m * lda + k);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = multiply(x, row[n], sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(c + m * ldc + n * kLanes, sums[m][n]);
}

template <int N>
__attribute__((noinline)) void strip(int M, int K, const Unit* a, int lda, const Unit* b, int ldb, float* c, int ldc,
                                     bool add) {
  int m = 0;
  for (; m + kTileRows <= M; m += kTileRows)
    tile<kTileRows, N>(K, a + (long)m * lda, lda, b, ldb, c + (long)m * ldc, ldc, add);
  for (; m < M; m += 2) tile<2, N>(K, a + (long)m * lda, lda, b, ldb, c + (long)m * ldc, ldc, add);
}

// C[M,N] = A[M,K] B[K,N], or += with `add`; leading dimensions in units. M is even, N a multiple of 16.
void product(int M, int N, int K, const Unit* a, int lda, const Unit* b, int ldb, float* c, int ldc, bool add) {
#if ATTENTION_TILES
  if (M % 16 == 0 && K % 16 == 0) return tiles::product(M, N, K, a, lda, b, ldb, c, ldc, add);
#endif
  int n = 0;
  for (; n + kTileVectors * kLanes <= N; n += kTileVectors * kLanes)
    strip<kTileVectors>(M, K, a, lda, b + n, ldb, c + n, ldc, add);
#if ATTENTION_ISA == 512
  if (N - n == 48) strip<3>(M, K, a, lda, b + n, ldb, c + n, ldc, add);
  if (N - n == 32) strip<2>(M, K, a, lda, b + n, ldb, c + n, ldc, add);
  if (N - n == 16) strip<1>(M, K, a, lda, b + n, ldb, c + n, ldc, add);
#endif
}

// out[C,R] = in[R,C]; R and C are multiples of 8.
template <class U>
void transpose(const U* in, int R, int C, U* out) {
  static_assert(sizeof(U) == 4);
  for (int r = 0; r < R; r += 8)
    for (int c = 0; c < C; c += 8) {
      __m256 x[8], y[8];
      for (int i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps((const float*)in + (long)(r + i) * C + c);
      for (int i = 0; i < 4; ++i) {
        y[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
      }
      for (int i = 0; i < 2; ++i)
        for (int h = 0; h < 2; ++h) {
          const __m256 p = y[4 * i + h], q = y[4 * i + 2 + h];
          x[4 * i + 2 * h] = _mm256_shuffle_ps(p, q, 0x44);
          x[4 * i + 2 * h + 1] = _mm256_shuffle_ps(p, q, 0xee);
        }
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps((float*)out + (long)(c + i) * R + r, _mm256_permute2f128_ps(x[i], x[4 + i], 0x20));
        _mm256_storeu_ps((float*)out + (long)(c + 4 + i) * R + r, _mm256_permute2f128_ps(x[i], x[4 + i], 0x31));
      }
    }
}

// `count` rows of x, padded to R, as `whole` and `paired`; either may be null.
template <class S>
void pack(const S* x, long stride, int count, int R, int D, Unit* whole, Unit* paired) {
  for (int r = 0; r < R; ++r) {
    const S* row = r < count ? x + r * stride : nullptr;
#if ATTENTION_PAIRS
    if (whole) {
      if (row)
        memcpy(whole + (long)r * D / 2, row, D * 2);
      else
        memset(whole + (long)r * D / 2, 0, D * 2);
    }
    if (paired && r % 2 == 0) {
      Unit* to = paired + (long)(r / 2) * D;
      const S* next = r + 1 < count ? row + stride : nullptr;
      for (int d = 0; d < D; ++d)
        to[d] = (row ? (uint32_t)row[d].bits : 0u) | (next ? (uint32_t)next[d].bits << 16 : 0u);
    }
#else
    Unit* to = (whole ? whole : paired) + (long)r * D;
    if (row)
      for (int d = 0; d < D; ++d) to[d] = wide(row[d]);
    else
      memset(to, 0, D * 4);
#endif
  }
}

template <class S>
void unpack(const float* x, int D, int count, float factor, S* y, long stride) {
  for (int r = 0; r < count; ++r)
    for (int d = 0; d < D; ++d) narrow(x[(long)r * D + d] * factor, y + r * stride + d);
}

// Which keys the queries of a block see: `least` is the first that any of them sees, `most` the first that all see.
struct Range {
  int least, most;
};
ATTENTION_FN int first_key(const Problem& p, int b, int row) {
  row = row < p.T ? row : p.T - 1;
  int first = p.first ? p.first[(long)b * p.T + row] : 0;
  if (p.window && row - p.window + 1 > first) first = row - p.window + 1;
  return first;
}
inline Range seen(const Problem& p, int b, int row, int rows) {
  Range range{p.T, 0};
  for (int r = row; r < row + rows; ++r) {
    const int first = first_key(p, b, r);
    range.least = first < range.least ? first : range.least;
    range.most = first > range.most ? first : range.most;
  }
  return range;
}

// A block of scores, [rows, columns], in place: softmax numerators of this block, with the running maximum of each row's
// scores and the sum of its numerators; the factor that is due to what was there before goes to `fade`. The maximum is
// taken off before scaling, so that it leaves exactly 0 however large the scores are.
void soften(const Problem& p, int b, int row, int column, int rows, int columns, int ld, bool masked, float* scores,
            Unit* out, float* maximum, float* sums, float* fade) {
  const V scale = all(p.scale);
  for (int r = 0; r < rows; ++r) {
    float* s = scores + (long)r * ld;
    V most = all(-INFINITY);
    if (masked) {
      const int from = first_key(p, b, row + r) - column, to = row + r - column + 1;
      for (int c = 0; c < columns; c += kLanes) {
        const V x = visible(load(s + c), c, from, to);
        store(s + c, x);
        most = larger(most, x);
      }
    } else {
      for (int c = 0; c < columns; c += kLanes) most = larger(most, load(s + c));
    }
    const float before = maximum[r], found = largest(most);
    const float now = found > before ? found : before, offset = now == -INFINITY ? 0 : now;
    maximum[r] = now;
    V total = load(sums + r * kLanes);
    fade[r] = 1;
    if (now != before) {
      alignas(64) float lanes[kLanes];
      store(lanes, exp2(all((before - offset) * p.scale)));
      fade[r] = lanes[0];
      total = total * all(fade[r]);
    }
    for (int c = 0; c < columns; c += kLanes) {
      const V e = exp2((load(s + c) - all(offset)) * scale);
      total = total + e;
#if ATTENTION_PAIRS
      _mm256_storeu_si256((__m256i*)((uint16_t*)(out + (long)r * (ld / 2)) + c), (__m256i)_mm512_cvtneps_pbh(e));
#else
      store(out + (long)r * ld + c, e);
#endif
    }
    store(sums + r * kLanes, total);
  }
}

template <class S>
void forward(const Problem& p, const Strided<S>* in, S* out, float* lse, int task, Arena& arena) {
  const int b = task / p.Hk, hk = task % p.Hk, group = p.H / p.Hk, T = p.T, D = p.D;
  const int R = p.rows, C = p.columns, blocks = (T + C - 1) / C;
  Unit* kt = arena.get<Unit>((long)blocks * C * D / kPack);  // [blocks, D / kPack, C]
  Unit* vp = arena.get<Unit>((long)blocks * C * D / kPack);  // [blocks, C / kPack, D]
  Unit* q = arena.get<Unit>((long)(R > C ? R : C) * D / kPack);
  float* scores = arena.get<float>((long)R * C);
  Unit* pattern = arena.get<Unit>((long)R * C / kPack);
  float *mixed = arena.get<float>((long)R * D), *maximum = arena.get<float>(R), *fade = arena.get<float>(R);
  float* sums = arena.get<float>((long)R * kLanes);
  const S *k = in[1].at(b, hk), *v = in[2].at(b, hk);
  for (int j = 0; j < blocks; ++j) {
    const int count = T - j * C < C ? T - j * C : C;
    const long at = (long)j * C * D / kPack;
    pack(k + j * C * in[1].t, in[1].t, count, C, D, q, (Unit*)nullptr);
    transpose(q, C, D / kPack, kt + at);
    pack(v + j * C * in[2].t, in[2].t, count, C, D, (Unit*)nullptr, vp + at);
  }
  for (int h = hk * group; h < (hk + 1) * group; ++h)
    for (int row = 0; row < T; row += R) {
      const int count = T - row < R ? T - row : R;
      pack(in[0].at(b, h) + row * in[0].t, in[0].t, count, R, D, q, (Unit*)nullptr);
      for (int r = 0; r < R; ++r) maximum[r] = -INFINITY;
      memset(sums, 0, (long)R * kLanes * 4);
      const Range range = seen(p, b, row, R);
      bool add = false;
      for (int j = range.least / C; j * C < row + R && j < blocks; ++j) {
        const int column = j * C;
        int columns = row + R - column;  // beyond them no query of the block sees anything
        if (columns > C) columns = C;
        const bool masked = column + columns - 1 > row || range.most > column;
        product(R, columns, D / kPack, q, D / kPack, kt + (long)column * D / kPack, C, scores, C, false);
        soften(p, b, row, column, R, columns, C, masked, scores, pattern, maximum, sums, fade);
        if (add)
          for (int r = 0; r < R; ++r)
            if (fade[r] != 1)
              for (int d = 0; d < D; d += kLanes)
                store(mixed + (long)r * D + d, load(mixed + (long)r * D + d) * all(fade[r]));
        product(R, D, columns / kPack, pattern, C / kPack, vp + (long)column * D / kPack, D, mixed, D, add);
        add = true;
      }
      for (int r = 0; r < count; ++r) {
        const float total = sum(load(sums + r * kLanes));
        const long at = (long)b * T + row + r;
        unpack(mixed + (long)r * D, D, 1, 1 / total, out + (at * p.H + h) * D, 0);
        lse[((long)b * p.H + h) * T + row + r] = maximum[r] * p.scale + log2f(total);
      }
    }
}

// From scores and the product of the gradient with the values, both [R, C]: the pattern and the gradient of the scores,
// paired, and the latter also whole.
void differentiate(const Problem& p, int b, int row, int column, bool masked, const float* scores, const float* products,
                   const float* lse, const float* delta, Unit* pattern, Unit* paired, Unit* whole) {
  const int R = p.rows, C = p.columns;
  const V scale = all(p.scale), natural = all(p.natural);
  for (int r = 0; r < R; r += kPack) {
    const float* s = scores + (long)r * C;
    const float* g = products + (long)r * C;
    int from[kPack], to[kPack];
    V minus[kPack], less[kPack];
    for (int i = 0; i < kPack; ++i) {
      from[i] = masked ? first_key(p, b, row + r + i) - column : 0;
      to[i] = row + r + i - column + 1;
      minus[i] = all(-lse[r + i]);
      less[i] = all(delta[r + i]);
    }
    for (int c = 0; c < C; c += kLanes) {
      V e[kPack], d[kPack];
      for (int i = 0; i < kPack; ++i) {
        V x = load(s + i * C + c);
        if (masked) x = visible(x, c, from[i], to[i]);
        e[i] = exp2(fma(x, scale, minus[i]));
        d[i] = e[i] * (load(g + i * C + c) - less[i]) * natural;
      }
#if ATTENTION_PAIRS
      const Two first = rounded(e[0], e[1]), second = rounded(d[0], d[1]);
      _mm512_storeu_si512(pattern + (long)(r / 2) * C + c, first.paired);
      _mm512_storeu_si512(paired + (long)(r / 2) * C + c, second.paired);
      uint16_t* to_whole = (uint16_t*)whole + (long)r * C + c;
      _mm256_storeu_si256((__m256i*)to_whole, _mm512_castsi512_si256(second.rows));
      _mm256_storeu_si256((__m256i*)(to_whole + C), _mm512_extracti64x4_epi64(second.rows, 1));
#else
      store(pattern + (long)r * C + c, e[0]);
      store(paired + (long)r * C + c, d[0]);
#endif
    }
  }
}

template <class S>
void backward(const Problem& p, const Strided<S>* in, const Strided<S>& out, const Strided<S>& grad, const float* lse,
              S* const* result, int task, Arena& arena) {
  const int b = task / p.Hk, hk = task % p.Hk, group = p.H / p.Hk, T = p.T, D = p.D;
  const int R = p.rows, C = p.columns, keys = (T + C - 1) / C, queries = (T + R - 1) / R;
  const long row_block = (long)R * D / kPack, key_block = (long)C * D / kPack;
  Unit* kt = arena.get<Unit>(key_block);  // [D / kPack, C]
  Unit* kp = arena.get<Unit>(key_block);  // [C / kPack, D]
  Unit* vt = arena.get<Unit>(key_block);
  Unit* q = arena.get<Unit>(group * queries * row_block);   // [R, D / kPack] each
  Unit* qt = arena.get<Unit>(group * queries * row_block);  // [D, R / kPack] each
  Unit* g = arena.get<Unit>(group * queries * row_block);
  Unit* gt = arena.get<Unit>(group * queries * row_block);
  float* dq = arena.get<float>((long)group * queries * R * D);
  Unit* spare = arena.get<Unit>(row_block > key_block ? row_block : key_block);
  float *scores = arena.get<float>((long)R * C), *products = arena.get<float>((long)R * C);
  Unit *pattern = arena.get<Unit>((long)R * C / kPack), *paired = arena.get<Unit>((long)R * C / kPack);
  Unit* whole = kPack == 1 ? paired : arena.get<Unit>((long)R * C / kPack);
  float *dkt = arena.get<float>((long)D * C), *dvt = arena.get<float>((long)D * C), *rows = arena.get<float>((long)D * C);
  float *delta = arena.get<float>((long)group * queries * R), *base = arena.get<float>((long)group * queries * R);
  Range* range = arena.get<Range>(queries);
  bool* begun = arena.get<bool>((long)group * queries);
  for (int i = 0; i < queries; ++i) range[i] = seen(p, b, i * R, R);
  for (int n = 0; n < group * queries; ++n) {
    const int h = hk * group + n / queries, row = n % queries * R, count = T - row < R ? T - row : R;
    const S *gs = grad.at(b, h) + row * grad.t, *os = out.at(b, h) + row * out.t;
    pack(in[0].at(b, h) + row * in[0].t, in[0].t, count, R, D, q + n * row_block, spare);
    transpose(kPack == 1 ? q + n * row_block : spare, R / kPack, D, qt + n * row_block);
    pack(gs, grad.t, count, R, D, g + n * row_block, spare);
    transpose(kPack == 1 ? g + n * row_block : spare, R / kPack, D, gt + n * row_block);
    for (int r = 0; r < R; ++r) {
      float total = 0;
      if (r < count)
        for (int d = 0; d < D; ++d) total += wide(gs[r * grad.t + d]) * wide(os[r * out.t + d]);
      delta[(long)n * R + r] = total;
      base[(long)n * R + r] = r < count ? lse[((long)b * p.H + h) * T + row + r] : 0;
    }
    begun[n] = false;
  }
  for (int j = 0; j < keys; ++j) {
    const int column = j * C, count = T - column < C ? T - column : C;
    const long at = ((long)b * T + column) * p.Hk + hk;
    pack(in[1].at(b, hk) + column * in[1].t, in[1].t, count, C, D, spare, kp);
    if (kPack == 1) memcpy(kp, spare, key_block * 4);
    transpose(spare, C, D / kPack, kt);
    pack(in[2].at(b, hk) + column * in[2].t, in[2].t, count, C, D, spare, (Unit*)nullptr);
    transpose(spare, C, D / kPack, vt);
    bool add = false;
    for (int n = 0; n < group * queries; ++n) {
      const int i = n % queries, row = i * R;
      if (row + R <= column || range[i].least >= column + C) continue;
      const bool masked = column + C - 1 > row || range[i].most > column;
      product(R, C, D / kPack, q + n * row_block, D / kPack, kt, C, scores, C, false);
      product(R, C, D / kPack, g + n * row_block, D / kPack, vt, C, products, C, false);
      differentiate(p, b, row, column, masked, scores, products, base + (long)n * R, delta + (long)n * R, pattern,
                    paired, whole);
      product(D, C, R / kPack, gt + n * row_block, R / kPack, pattern, C, dvt, C, add);
      product(D, C, R / kPack, qt + n * row_block, R / kPack, paired, C, dkt, C, add);
      product(R, D, C / kPack, whole, C / kPack, kp, D, dq + (long)n * R * D, D, begun[n]);
      add = begun[n] = true;
    }
    transpose(dkt, D, C, rows);
    unpack(rows, D, count, 1, result[1] + at * D, (long)p.Hk * D);
    transpose(dvt, D, C, rows);
    unpack(rows, D, count, 1, result[2] + at * D, (long)p.Hk * D);
  }
  for (int n = 0; n < group * queries; ++n) {
    const int h = hk * group + n / queries, row = n % queries * R, count = T - row < R ? T - row : R;
    unpack(dq + (long)n * R * D, D, count, 1, result[0] + (((long)b * T + row) * p.H + h) * D, (long)p.H * D);
  }
}
