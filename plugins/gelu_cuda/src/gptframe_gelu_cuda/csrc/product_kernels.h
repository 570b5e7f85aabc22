// The gradient of a linear layer's weight, out[M,N] = a[K,M]^T b[K,N], from bfloat16 with AMX, summed in float32.
// Knows nothing of torch.
//
// Both matrices lie with the depth of the product, the tokens, across their rows, which tiles cannot read. So they are packed
// first: a as panels of 32 of its columns, b likewise, each a sequence of steps of depth 32, and a step as two tiles side by
// side in memory. A tile of a has 16 rows of 16 pairs along the depth; a tile of b has 16 pairs along the depth, of 16 columns
// each. What is missing is zero.
//
// A block of a, all of its depth, stays in the second-level cache of one processor while all of b goes by, of which 32 KiB at
// a time stay in the first level meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tiles.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define PRODUCT_X86 1
#include <immintrin.h>
#endif

namespace product {

// Memory that only grows and is handed out again and again. Huge pages where there are any: a panel spans many small ones.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }
  template <class T>
  T* get(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes > size_) {
      constexpr size_t kHuge = (size_t)1 << 21;
      std::free(data_);
      size_ = (bytes + kHuge - 1) / kHuge * kHuge;
      data_ = std::aligned_alloc(kHuge, size_);
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
#if defined(MADV_HUGEPAGE)
      madvise(data_, size_, MADV_HUGEPAGE);
#endif
    }
    return (T*)data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

inline Scratch& scratch(int which) {
  static thread_local Scratch all[3];
  return all[which];
}

struct Matrix {  // row after row
  const uint16_t* data;
  long stride;
};

constexpr int kDeepest = 2048;  // of one product: deeper ones are sums of several

#ifdef PRODUCT_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")

constexpr int kPanel = 32, kTile = 512;  // columns of a panel and rows of a step; numbers in a tile
constexpr int kNear = 16;                // steps for which a panel of b stays in the first level
constexpr int kGroup = 8;                // panels of b between two times of writing results
constexpr long kBlockBytes = 1 << 20, kMostPanels = 16;  // of a block of a
constexpr long kStreamed = 1 << 22;      // bytes: results this large go past the caches, which would read them before

inline int steps_of(int depth) { return std::max(1, (depth + kPanel - 1) / kPanel); }
inline __mmask16 first(int count) { return count >= 16 ? 0xffff : (__mmask16)((1u << std::max(0, count)) - 1); }

inline void transpose(__m512i* r) {  // 16 x 16 numbers of 32 bits
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i)
    for (int h = 0; h < 2; ++h) {
      r[4 * i + 2 * h] = _mm512_unpacklo_epi64(t[4 * i + h], t[4 * i + 2 + h]);
      r[4 * i + 2 * h + 1] = _mm512_unpackhi_epi64(t[4 * i + h], t[4 * i + 2 + h]);
    }
  // r[4 i + j] now holds columns j, j + 4, j + 8 and j + 12 of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; ++j)
    for (int h = 0; h < 2; ++h) {
      t[8 * h + j] = _mm512_shuffle_i32x4(r[8 * h + j], r[8 * h + 4 + j], 0x88);
      t[8 * h + 4 + j] = _mm512_shuffle_i32x4(r[8 * h + j], r[8 * h + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
  }
}

// One tile of x, of which `columns` and `depth` exist. Sums over the depth are added to `sums`, where given.
template <bool Left>
inline void pack_tile(const uint16_t* x, long stride, int columns, int depth, uint16_t* to, float* sums) {
  __m512i r[16];
  const __mmask16 exist = first(columns);
  for (int i = 0; i < 16; ++i) {
    const __mmask16 upper = 2 * i < depth ? exist : 0, lower = 2 * i + 1 < depth ? exist : 0;
    const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(upper, x + 2 * i * stride));
    const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lower, x + (2 * i + 1) * stride));
    r[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
  }
  if (Left) {
    __m512 total = _mm512_loadu_ps(sums);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int i = 0; i < 16; ++i) total = _mm512_dpbf16_ps(total, (__m512bh)r[i], ones);
    _mm512_storeu_ps(sums, total);
    transpose(r);
  }
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + 32 * i, r[i]);
}

// Panels of x[depth, columns], of which the steps from `begin` to `end`; for the left side also the sums over the depth.
template <bool Left>
void pack(const Matrix& x, int columns, int depth, int begin, int end, uint16_t* to, float* sums = nullptr) {
  const int steps = steps_of(depth);
  for (int k = begin; k < end; ++k)
    for (int c = 0; c < columns; c += kPanel) {
      for (int r = (k + 1) * kPanel; r < std::min((k + 2) * kPanel, depth); ++r)  // each lies on another page
        _mm_prefetch((const char*)(x.data + (long)r * x.stride + c), _MM_HINT_T0);
      for (int h = 0; h < 2; ++h)
        pack_tile<Left>(x.data + (long)k * kPanel * x.stride + c + 16 * h, x.stride, columns - c - 16 * h, depth - k * kPanel,
                        to + ((long)(c / kPanel) * steps + k) * 2 * kTile + h * kTile, Left ? sums + c + 16 * h : nullptr);
    }
}

// 32 x 32 results c, as four tiles: `steps` steps of depth of a panel of a and of one of b. Meanwhile `lines` lines a step,
// from `next` on, come nearer: the part of b that is next.
inline void multiply(int steps, const uint16_t* a, const uint16_t* b, float* c, bool add, const char* next, int lines) {
  if (add) {
    TILE_LOAD(0, c, 64);
    TILE_LOAD(1, c + 256, 64);
    TILE_LOAD(2, c + 512, 64);
    TILE_LOAD(3, c + 768, 64);
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (int k = 0; k < steps; ++k, a += 2 * kTile, b += 2 * kTile) {
    TILE_LOAD(6, b, 64);
    for (int i = 0; i < lines; ++i, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    TILE_LOAD_ONCE(4, a, 64);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, b + kTile, 64);
    TILE_MULTIPLY(1, 4, 7);
    TILE_LOAD_ONCE(5, a + kTile, 64);
    TILE_MULTIPLY(2, 5, 6);
    TILE_MULTIPLY(3, 5, 7);
  }
  TILE_STORE(0, c, 64);
  TILE_STORE(1, c + 256, 64);
  TILE_STORE(2, c + 512, 64);
  TILE_STORE(3, c + 768, 64);
}

// 32 results of one row, of which `count` exist: on top of what is there, or past the caches, or as usual.
enum class Store { kPlain, kStreamed, kAdded };
inline void put(__m512 low, __m512 high, int count, Store how, float* to) {
  const __mmask16 left = first(count), right = first(count - 16);
  if (how == Store::kStreamed && count >= kPanel && ((uintptr_t)to & 63) == 0) {
    _mm512_stream_ps(to, low);
    _mm512_stream_ps(to + 16, high);
    return;
  }
  if (how == Store::kAdded) {
    low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(left, to));
    high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(right, to + 16));
  }
  _mm512_mask_storeu_ps(to, left, low);
  _mm512_mask_storeu_ps(to + 16, right, high);
}

// out[M,N] = a^T b and sums[M], those of the columns of a; both += with `add`. `parallel(n, f)` calls f(begin, end) for parts
// of the range up to n, on several threads.
template <class Parallel>
void weight_gradient(int M, int N, int K, const Matrix& a, const Matrix& b, float* out, float* sums, bool add, int threads,
                     const Parallel& parallel) {
  const int steps = steps_of(K), right = (N + kPanel - 1) / kPanel, left = (M + kPanel - 1) / kPanel;
  const long panel = (long)steps * 2 * kTile;
  uint16_t* packed = scratch(0).get<uint16_t>(right * panel);
  parallel(steps, [&](long begin, long end) { pack<false>(b, N, K, (int)begin, (int)end, packed); });

  // Blocks of equal size, as many for each thread.
  const int most = (int)std::max<long>(1, std::min(kMostPanels, kBlockBytes / (panel * 2)));
  const int rounds = (left + most * threads - 1) / (most * threads);
  const int size = (left + rounds * threads - 1) / (rounds * threads), blocks = (left + size - 1) / size;
  const bool large = (long)M * N * (long)sizeof(float) >= kStreamed;
  const Store how = add ? Store::kAdded : large ? Store::kStreamed : Store::kPlain;
  parallel(blocks, [&](long begin, long end) {
    uint16_t* columns = scratch(1).get<uint16_t>(size * panel);
    float* results = scratch(2).get<float>((size_t)size * (kGroup * 2 * kTile + kPanel));
    float* totals = results + (size_t)size * kGroup * 2 * kTile;
    tiles::begin();
    for (long block = begin; block < end; ++block) {
      const int row = (int)block * size * kPanel, count = std::min(size, left - (int)block * size);
      const int exist = std::min(count * kPanel, M - row);
      memset(totals, 0, (size_t)count * kPanel * sizeof(float));
      pack<true>(Matrix{a.data + row, a.stride}, exist, K, 0, steps, columns, totals);
      for (int i = 0; i < exist; ++i) sums[row + i] = add ? sums[row + i] + totals[i] : totals[i];
      for (int group = 0; group < right; group += kGroup) {
        const int members = std::min(kGroup, right - group), lines = (kPanel + count - 1) / count;
        for (int n = 0; n < members; ++n)
          for (int k = 0; k < steps; k += kNear) {
            const int part = std::min(kNear, steps - k);
            const uint16_t *x = columns + (long)k * 2 * kTile, *y = packed + (group + n) * panel + (long)k * 2 * kTile;
            const char* next = (const char*)(y + (long)part * 2 * kTile);
            for (int m = 0; m < count; ++m)
              multiply(part, x + m * panel, y, results + (long)(m * kGroup + n) * 2 * kTile, k > 0,
                       next + (long)m * lines * part * 64, lines);
          }
        for (int r = 0; r < exist; ++r)
          for (int n = 0; n < members; ++n) {
            const int column = (group + n) * kPanel;
            const float* c = results + (long)(r / kPanel * kGroup + n) * 2 * kTile + r % kPanel / 16 * kTile + r % 16 * 16;
            put(_mm512_load_ps(c), _mm512_load_ps(c + 256), std::min(kPanel, N - column), how,
                out + (long)(row + r) * N + column);
          }
      }
    }
    tiles::end();
    _mm_sfence();  // streamed results, before another thread reads them
  });
}
#pragma GCC pop_options

inline bool available() {
  static const bool found = [] {
    __builtin_cpu_init();
    for (const bool has : {(bool)__builtin_cpu_supports("avx512f"), (bool)__builtin_cpu_supports("avx512bw"),
                           (bool)__builtin_cpu_supports("avx512dq"), (bool)__builtin_cpu_supports("avx512vl"),
                           (bool)__builtin_cpu_supports("avx512bf16"), (bool)__builtin_cpu_supports("avx2"),
                           (bool)__builtin_cpu_supports("fma"), (bool)__builtin_cpu_supports("bmi2")})
      if (!has) return false;
    return tiles::available();
  }();
  return found;
}
#else
inline bool available() { return false; }
#endif

}  // namespace product
