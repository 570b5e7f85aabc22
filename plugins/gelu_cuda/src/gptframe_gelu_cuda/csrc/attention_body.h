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
// x - floor(x), and x 2^floor(t); also of -inf.
ATTENTION_FN V fraction(V x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
ATTENTION_FN V scaled(V x, V t) { return _mm512_scalef_ps(x, t); }
// x in the lanes of queries that see `key`, else -inf; the first lane is the query `row`, and `from` has their first keys.
ATTENTION_FN V visible(V x, int key, const int* from, int row) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 in = _mm512_cmple_epi32_mask(_mm512_loadu_si512(from), _mm512_set1_epi32(key)) &
                       _mm512_cmple_epi32_mask(_mm512_set1_epi32(key - row), lane);
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
ATTENTION_FN V bounded(V t) { return larger(all(-160), t); }  // keeps a NaN
ATTENTION_FN V fraction(V x) { return bounded(x) - _mm256_floor_ps(bounded(x)); }
ATTENTION_FN V scaled(V x, V t) {  // by two factors, as floor(t) may lie below the smallest exponent
  const __m256i i = _mm256_cvtps_epi32(_mm256_floor_ps(bounded(t)));
  const __m256i half = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
  const V a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const V b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23));
  return x * a * b;
}
ATTENTION_FN V visible(V x, int key, const int* from, int row) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i*)from), _mm256_set1_epi32(key)),
                                      _mm256_cmpgt_epi32(_mm256_set1_epi32(key - row), lane));
  return _mm256_blendv_ps(x, all(-INFINITY), _mm256_castsi256_ps(out));
}
#endif

// 2^t by a polynomial p with p(0) = 1 and the least largest relative error on [0, 1): 8.2e-8, or 8.6e-5 where the result
// is rounded to bfloat16.
ATTENTION_FN V exp2(V t) {
  const V f = fraction(t);
#if ATTENTION_PAIRS
  V p = fma(all(0.07706704393f), f, all(0.2276449891f));
  p = fma(p, f, all(0.6951167869f));
#else
  V p = fma(all(0.001867130101f), f, all(0.009017030257f));
  p = fma(p, f, all(0.05579991315f));
  p = fma(p, f, all(0.2401644501f));
  p = fma(p, f, all(0.6931513118f));
#endif
  return scaled(fma(p, f, all(1)), t);
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
// Paired, at less cost: ties go away from 0, and a NaN stays one unless its upper bits are all ones and its lower large.
ATTENTION_FN __m512i rounded_pairs(V above, V below) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32(_mm512_castps_si512(above), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16),
                                 _mm512_add_epi32(_mm512_castps_si512(below), half));
}
ATTENTION_FN void store_rows(__m512i rows, uint16_t* p, long stride) {
  _mm256_storeu_si256((__m256i*)p, _mm512_castsi512_si256(rows));
  _mm256_storeu_si256((__m256i*)(p + stride), _mm512_extracti64x4_epi64(rows, 1));
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

// `count` rows of x, padded to R, as `whole` and `paired`; either may be null. With kPack = 1 they are one, and one is
// written. In most layouts the next head's row follows each row: it is prefetched while its page is at hand.
template <class S>
void pack(const S* x, long stride, int count, int R, int D, Unit* whole, Unit* paired) {
#if ATTENTION_PAIRS
  for (int r = 0; r < R; r += 2)
    for (int d = 0; d < D; d += 16) {
      __m256i two[2];
      for (int i = 0; i < 2; ++i) {
        const S* from = x + (r + i) * stride + d;
        two[i] = r + i < count ? _mm256_loadu_si256((const __m256i*)from) : _mm256_setzero_si256();
        __builtin_prefetch(from + D, 0, 2);
      }
      if (whole)
        for (int i = 0; i < 2; ++i) _mm256_storeu_si256((__m256i*)(whole + ((long)(r + i) * D + d) / 2), two[i]);
      if (paired)
        _mm512_storeu_si512(paired + (long)r / 2 * D + d,
                            _mm512_or_si512(_mm512_cvtepu16_epi32(two[0]),
                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(two[1]), 16)));
    }
#else
  for (int r = 0; r < R; ++r) {
    Unit* to = (whole ? whole : paired) + (long)r * D;
    if (r < count)
      for (int d = 0; d < D; ++d) to[d] = wide(x[r * stride + d]);
    else
      memset(to, 0, D * 4);
  }
#endif
}

// The same, with the transpose of `whole`.
template <class S>
void pack_transposed(const S* x, long stride, int count, int R, int D, Unit* whole_t, Unit* paired, Unit* spare) {
  Unit* whole = kPack == 1 && paired ? paired : spare;
  pack(x, stride, count, R, D, whole, paired);
  transpose(whole, R, D / kPack, whole_t);
}

template <class S>
void unpack(const float* x, int D, int count, float factor, S* y, long stride) {
  for (int r = 0; r < count; ++r)
#if ATTENTION_PAIRS
    for (int d = 0; d < D; d += kLanes) {
      S* to = y + r * stride + d;
      _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(load(x + (long)r * D + d) * all(factor)));
      __builtin_prefetch(to + D, 1, 2);  // as in `pack`
    }
#else
    for (int d = 0; d < D; ++d) narrow(x[(long)r * D + d] * factor, y + r * stride + d);
#endif
}

// The first key that each query sees, for `rows` queries; those past the last see what the last sees.
void first_keys(const Problem& p, int b, int rows, int* from) {
  for (int row = 0; row < rows; ++row) {
    const int own = row < p.T ? row : p.T - 1;
    from[row] = p.first ? p.first[(long)b * p.T + own] : 0;
    if (p.window && own - p.window + 1 > from[row]) from[row] = own - p.window + 1;
  }
}

// Which keys the queries of a block see: `least` is the first that any of them sees, `most` the first that all see.
struct Range {
  int least, most;
};
inline Range seen(const int* from, int rows) {
  Range range{from[0], from[0]};
  for (int r = 1; r < rows; ++r) {
    range.least = from[r] < range.least ? from[r] : range.least;
    range.most = from[r] > range.most ? from[r] : range.most;
  }
  return range;
}

// Scores are [keys, queries], so that what is said of a query is said of a lane. Those of keys that a query does not see
// become -inf.
void hide(const int* from, Range range, int row, int column, int rows, int columns, float* scores) {
  for (int key = column; key < column + columns; ++key) {
    float* s = scores + (long)(key - column) * rows;
    const int end = key < range.most || row + rows < key ? rows : key - row;  // the queries after that see it
    for (int r = 0; r < end; r += kLanes) store(s + r, visible(load(s + r), key, from + r, row + r));
  }
}

// Of a block of scores the softmax numerators, paired, with the running maximum of each query's scores and the sum of its
// numerators; the factor that is due to what was there before goes to `fade`. The maximum is taken off before scaling, so
// that it leaves exactly 0 however large the scores are, and it is renewed only where numerators would exceed 2^8, so that
// there is seldom anything to rescale.
void soften(const Problem& p, int columns, const float* scores, Unit* out, float* maximum, float* sums, float* fade) {
  const int R = p.rows;
  const V scale = all(p.scale);
  for (int r = 0; r < R; r += kLanes) {
    const float* s = scores + r;
    const V before = load(maximum + r);
    V most[4] = {before, before, before, before};
    for (int c = 0; c < columns; c += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) most[i] = larger(load(s + (long)(c + i) * R), most[i]);
    const V found = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    const V now = (found - before) * scale > all(8) ? found : before;
    const V offset = larger(now, all(-FLT_MAX));  // as -inf less -inf would be a NaN
    const V factor = exp2((before - offset) * scale);
    store(maximum + r, now);
    store(fade + r, factor);
    V total[2] = {load(sums + r) * factor, all(0)};
    for (int c = 0; c < columns; c += 2) {
      V e[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        e[i] = exp2((load(s + (long)(c + i) * R) - offset) * scale);
        total[i] = total[i] + e[i];
      }
#if ATTENTION_PAIRS
      _mm512_storeu_si512(out + (long)c / 2 * R + r, rounded_pairs(e[0], e[1]));
#else
      for (int i = 0; i < 2; ++i) store(out + (long)(c + i) * R + r, e[i]);
#endif
    }
    store(sums + r, total[0] + total[1]);
  }
}

// x[D,R] times a factor for each column.
void scale_columns(float* x, int D, int R, const float* factors) {
  for (int d = 0; d < D; ++d)
    for (int r = 0; r < R; r += kLanes) store(x + (long)d * R + r, load(x + (long)d * R + r) * load(factors + r));
}

template <class S>
void forward(const Problem& p, const Strided<S>* in, S* out, float* lse, int task, Arena& arena) {
  const int b = task / p.Hk, hk = task % p.Hk, group = p.H / p.Hk, T = p.T, D = p.D;
  const int R = p.rows, C = p.columns, keys = (T + C - 1) / C, queries = (T + R - 1) / R;
  const long key_block = (long)C * D / kPack;
  Unit* k = arena.get<Unit>(keys * key_block);   // [C, D / kPack] each
  Unit* vt = arena.get<Unit>(keys * key_block);  // [D, C / kPack] each
  Unit* qt = arena.get<Unit>((long)R * D / kPack);
  Unit* spare = arena.get<Unit>((long)(R > C ? R : C) * D / kPack);
  float* scores = arena.get<float>((long)R * C);
  Unit* pattern = arena.get<Unit>((long)R * C / kPack);
  float *mixed = arena.get<float>((long)R * D), *rows = arena.get<float>((long)R * D);  // [D, R] and its transpose
  float *maximum = arena.get<float>(R), *sums = arena.get<float>(R), *fade = arena.get<float>(R);
  int* from = arena.get<int>((long)queries * R);
  first_keys(p, b, queries * R, from);
  for (int j = 0; j < keys; ++j) {
    const int column = j * C, count = T - column < C ? T - column : C;
    pack(in[1].at(b, hk) + column * in[1].t, in[1].t, count, C, D, k + j * key_block, (Unit*)nullptr);
    pack(in[2].at(b, hk) + column * in[2].t, in[2].t, count, C, D, (Unit*)nullptr, spare);
    transpose(spare, C / kPack, D, vt + j * key_block);
  }
  for (int h = hk * group; h < (hk + 1) * group; ++h)
    for (int row = 0; row < T; row += R) {
      const int count = T - row < R ? T - row : R;
      pack_transposed(in[0].at(b, h) + row * in[0].t, in[0].t, count, R, D, qt, (Unit*)nullptr, spare);
      for (int r = 0; r < R; ++r) maximum[r] = -INFINITY, sums[r] = 0;
      const Range range = seen(from + row, R);
      bool add = false;
      for (int j = range.least / C; j * C < row + R && j < keys; ++j) {
        const int column = j * C;
        int columns = row + R - column;  // beyond them no query of the block sees anything
        if (columns > C) columns = C;
        product(columns, R, D / kPack, k + j * key_block, D / kPack, qt, R, scores, R, false);
        hide(from + row, range, row, column, R, columns, scores);
        soften(p, columns, scores, pattern, maximum, sums, fade);
        bool fades = false;
        for (int r = 0; r < R; ++r) fades |= fade[r] != 1;
        if (add && fades) scale_columns(mixed, D, R, fade);
        product(D, R, columns / kPack, vt + j * key_block, C / kPack, pattern, R, mixed, R, add);
        add = true;
      }
      for (int r = 0; r < count; ++r) lse[((long)b * p.H + h) * T + row + r] = maximum[r] * p.scale + log2f(sums[r]);
      for (int r = 0; r < R; ++r) fade[r] = 1 / sums[r];
      scale_columns(mixed, D, R, fade);
      transpose(mixed, D, R, rows);
      unpack(rows, D, count, 1, out + (((long)b * T + row) * p.H + h) * D, (long)p.H * D);
    }
}

// From scores and the product of the values with the gradient: the pattern and the gradient of the scores (but for
// p.natural), whole, and the latter also paired. `minus` is -lse of each query, `less` its delta.
void differentiate(const Problem& p, const float* scores, const float* products, const float* minus, const float* less,
                   Unit* pattern, Unit* whole, Unit* paired) {
  const int R = p.rows, C = p.columns;
  const V scale = all(p.scale);
  for (int c = 0; c < C; c += kPack)
    for (int r = 0; r < R; r += kLanes) {
      const long at = (long)c * R + r;
      V e[kPack], d[kPack];
#pragma GCC unroll 2
      for (int i = 0; i < kPack; ++i) {
        e[i] = exp2(fma(load(scores + at + i * R), scale, load(minus + r)));
        d[i] = e[i] * (load(products + at + i * R) - load(less + r));
      }
#if ATTENTION_PAIRS
      const Two first = rounded(e[0], e[1]), second = rounded(d[0], d[1]);
      store_rows(first.rows, (uint16_t*)pattern + at, R);
      store_rows(second.rows, (uint16_t*)whole + at, R);
      _mm512_storeu_si512(paired + (long)c / 2 * R + r, second.paired);
#else
      store(pattern + at, e[0]);
      store(paired + at, d[0]);
#endif
    }
}

template <class S>
void backward(const Problem& p, const Strided<S>* in, const Strided<S>& out, const Strided<S>& grad, const float* lse,
              S* const* result, int task, Arena& arena) {
  const int b = task / p.Hk, hk = task % p.Hk, group = p.H / p.Hk, T = p.T, D = p.D;
  const int R = p.rows, C = p.columns, keys = (T + C - 1) / C, queries = (T + R - 1) / R;
  const long row_block = (long)R * D / kPack, key_block = (long)C * D / kPack;
  Unit* k = arena.get<Unit>(key_block);   // [C, D / kPack]
  Unit* kt = arena.get<Unit>(key_block);  // [D, C / kPack]
  Unit* v = arena.get<Unit>(key_block);
  Unit* q = arena.get<Unit>(group * queries * row_block);   // [R / kPack, D] each
  Unit* qt = arena.get<Unit>(group * queries * row_block);  // [D / kPack, R] each
  Unit* g = arena.get<Unit>(group * queries * row_block);
  Unit* gt = arena.get<Unit>(group * queries * row_block);
  Unit* ot = arena.get<Unit>(row_block);
  float* dqt = arena.get<float>((long)group * queries * R * D);  // [D, R] each
  Unit* spare = arena.get<Unit>(row_block > key_block ? row_block : key_block);
  float *scores = arena.get<float>((long)R * C), *products = arena.get<float>((long)R * C);
  Unit *pattern = arena.get<Unit>((long)R * C / kPack), *paired = arena.get<Unit>((long)R * C / kPack);
  Unit* whole = kPack == 1 ? paired : arena.get<Unit>((long)R * C / kPack);
  float *dk = arena.get<float>((long)D * C), *dv = arena.get<float>((long)D * C), *rows = arena.get<float>((long)R * D);
  float *minus = arena.get<float>((long)group * queries * R), *less = arena.get<float>((long)group * queries * R);
  int* from = arena.get<int>((long)queries * R);
  Range* range = arena.get<Range>(queries);
  bool* begun = arena.get<bool>((long)group * queries);
  first_keys(p, b, queries * R, from);
  for (int i = 0; i < queries; ++i) range[i] = seen(from + i * R, R);
  for (int n = 0; n < group * queries; ++n) {
    const int h = hk * group + n / queries, row = n % queries * R, count = T - row < R ? T - row : R;
    Unit* gtn = gt + n * row_block;
    pack_transposed(in[0].at(b, h) + row * in[0].t, in[0].t, count, R, D, qt + n * row_block, q + n * row_block, spare);
    pack_transposed(grad.at(b, h) + row * grad.t, grad.t, count, R, D, gtn, g + n * row_block, spare);
    pack_transposed(out.at(b, h) + row * out.t, out.t, count, R, D, ot, (Unit*)nullptr, spare);
    for (int r = 0; r < R; r += kLanes) {
      V total = all(0);
      for (long at = r; at < row_block; at += R) total = multiply(several(gtn + at), several(ot + at), total);
      store(less + (long)n * R + r, total);
    }
    for (int r = 0; r < R; ++r) minus[(long)n * R + r] = r < count ? -lse[((long)b * p.H + h) * T + row + r] : 0;
    begun[n] = false;
  }
  for (int j = 0; j < keys; ++j) {
    const int column = j * C, count = T - column < C ? T - column : C;
    const long at = ((long)b * T + column) * p.Hk + hk;
    pack(in[1].at(b, hk) + column * in[1].t, in[1].t, count, C, D, k, spare);
    transpose(kPack == 1 ? k : spare, C / kPack, D, kt);
    pack(in[2].at(b, hk) + column * in[2].t, in[2].t, count, C, D, v, (Unit*)nullptr);
    bool add = false;
    for (int n = 0; n < group * queries; ++n) {
      const int i = n % queries, row = i * R;
      if (row + R <= column || range[i].least >= column + C) continue;
      product(C, R, D / kPack, k, D / kPack, qt + n * row_block, R, scores, R, false);
      product(C, R, D / kPack, v, D / kPack, gt + n * row_block, R, products, R, false);
      hide(from + row, range[i], row, column, R, C, scores);
      differentiate(p, scores, products, minus + (long)n * R, less + (long)n * R, pattern, whole, paired);
      product(C, D, R / kPack, pattern, R / kPack, g + n * row_block, D, dv, D, add);
      product(C, D, R / kPack, whole, R / kPack, q + n * row_block, D, dk, D, add);
      product(D, R, C / kPack, kt, C / kPack, paired, R, dqt + (long)n * R * D, R, begun[n]);
      add = begun[n] = true;
    }
    unpack(dk, D, count, p.natural, result[1] + at * D, (long)p.Hk * D);
    unpack(dv, D, count, 1, result[2] + at * D, (long)p.Hk * D);
  }
  for (int n = 0; n < group * queries; ++n) {
    const int h = hk * group + n / queries, row = n % queries * R, count = T - row < R ? T - row : R;
    transpose(dqt + (long)n * R * D, D, R, rows);
    unpack(rows, D, count, p.natural, result[0] + (((long)b * T + row) * p.H + h) * D, (long)p.H * D);
  }
}
