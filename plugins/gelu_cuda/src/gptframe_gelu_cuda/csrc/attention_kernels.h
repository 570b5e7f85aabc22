// The attention of attention_body.h for AVX2, AVX-512, AVX-512 with bfloat16 and AMX, and the choice among them at run
// time. Knows nothing of torch.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "tiles.h"

// Each variant is compiled under a target pragma of GCC, and the file runs on any x86-64. Elsewhere there is none.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define ATTENTION_X86 1
#include <immintrin.h>
#endif

#define ATTENTION_FN inline __attribute__((always_inline))

#ifdef ATTENTION_X86
// C[M,N] (+)= A[M,K] B[K,N] with AMX: M, N, K multiples of 16, K counts pairs of bfloat16.
namespace tiles {
template <int M, int N>
ATTENTION_FN void block(int K, const uint32_t* a, long lda, const uint32_t* b, long ldb, float* c, long ldc, bool add) {
  if (add) {
    TILE_LOAD(0, c, ldc * 4);
    if (N > 1) TILE_LOAD(1, c + 16, ldc * 4);
    if (M > 1) TILE_LOAD(2, c + 16 * ldc, ldc * 4);
    if (M > 1 && N > 1) TILE_LOAD(3, c + 16 * ldc + 16, ldc * 4);
  } else {
    TILE_ZERO(0);
    if (N > 1) TILE_ZERO(1);
    if (M > 1) TILE_ZERO(2);
    if (M > 1 && N > 1) TILE_ZERO(3);
  }
  for (int k = 0; k < K; k += 16) {
    TILE_LOAD(4, a + k, lda * 4);
    TILE_LOAD(6, b + k * ldb, ldb * 4);
    TILE_MULTIPLY(0, 4, 6);
    if (M > 1) {
      TILE_LOAD(5, a + 16 * lda + k, lda * 4);
      TILE_MULTIPLY(2, 5, 6);
    }
    if (N > 1) {
      TILE_LOAD(7, b + k * ldb + 16, ldb * 4);
      TILE_MULTIPLY(1, 4, 7);
      if (M > 1) TILE_MULTIPLY(3, 5, 7);
    }
  }
  TILE_STORE(0, c, ldc * 4);
  if (N > 1) TILE_STORE(1, c + 16, ldc * 4);
  if (M > 1) TILE_STORE(2, c + 16 * ldc, ldc * 4);
  if (M > 1 && N > 1) TILE_STORE(3, c + 16 * ldc + 16, ldc * 4);
}

inline void product(int M, int N, int K, const uint32_t* a, long lda, const uint32_t* b, long ldb, float* c, long ldc,
                    bool add) {
  for (int n = 0; n < N; n += 32)
    for (int m = 0; m < M; m += 32) {
      const uint32_t *x = a + m * lda, *y = b + n;
      float* z = c + m * ldc + n;
      if (M - m > 16 && N - n > 16)
        block<2, 2>(K, x, lda, y, ldb, z, ldc, add);
      else if (M - m > 16)
        block<2, 1>(K, x, lda, y, ldb, z, ldc, add);
      else if (N - n > 16)
        block<1, 2>(K, x, lda, y, ldb, z, ldc, add);
      else
        block<1, 1>(K, x, lda, y, ldb, z, ldc, add);
    }
}
}  // namespace tiles
#endif

namespace attention {

struct BFloat16 {
  uint16_t bits;
};

struct Problem {
  int B, H, Hk, T, D;
  int window;            // how many keys a query sees, itself included; 0 for all
  const int32_t* first;  // [B, T]: the first key that each query sees; null for 0
  float scale;           // of the scores, times log2(e): all exponentials are powers of two
  float natural;         // of the scores
  int rows, columns;     // of a block: multiples of 16
};

// [B, H, T, D] with neighbouring features side by side.
template <class S>
struct Strided {
  const S* data;
  long b, h, t;
  const S* at(int batch, int head) const { return data + batch * b + head * h; }
};

// Scratch memory of one thread, which hands out the same pieces again after `reset`.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  ~Arena() {
    for (const Piece& piece : pieces_) std::free(piece.data);
  }
  void reset() { next_ = 0; }
  template <class T>
  T* get(long count) {
    const size_t size = ((size_t)count * sizeof(T) + 63) & ~(size_t)63;
    if (next_ == pieces_.size()) {
      void* data = std::aligned_alloc(64, size ? size : 64);
      if (!data) throw std::bad_alloc();
      pieces_.push_back({data});
    }
    return (T*)pieces_[next_++].data;
  }

 private:
  struct Piece {
    void* data;
  };
  std::vector<Piece> pieces_;
  size_t next_ = 0;
};

#ifdef ATTENTION_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
#define ATTENTION_ISA 256
#define ATTENTION_PAIRS 0
#define ATTENTION_TILES 0
namespace avx2 {
#include "attention_body.h"
}
#pragma GCC pop_options
#undef ATTENTION_ISA
#define ATTENTION_ISA 512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
namespace avx512 {
#include "attention_body.h"
}
#pragma GCC pop_options
#undef ATTENTION_PAIRS
#define ATTENTION_PAIRS 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")
namespace avx512_bf16 {
#include "attention_body.h"
}
#undef ATTENTION_TILES
#define ATTENTION_TILES 1
namespace amx {
#include "attention_body.h"
}
#pragma GCC pop_options
#endif

template <class S>
struct Loops {
  void (*forward)(const Problem&, const Strided<S>* in, S* out, float* lse, int task, Arena&);
  void (*backward)(const Problem&, const Strided<S>* in, const Strided<S>& out, const Strided<S>& grad,
                   const float* lse, S* const* result, int task, Arena&);
};

struct Variant {
  const char* name;
  Loops<float> single;
  Loops<BFloat16> half;
  bool tiles;
};

inline const std::vector<Variant>& variants() {  // those that run here, the slowest first
  static const std::vector<Variant> found = [] {
    std::vector<Variant> all;
#ifdef ATTENTION_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")) return all;
    all.push_back({"avx2", {avx2::forward<float>, avx2::backward<float>},
                   {avx2::forward<BFloat16>, avx2::backward<BFloat16>}, false});
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
      return all;
    const Loops<float> single{avx512::forward<float>, avx512::backward<float>};
    all.push_back({"avx512", single, {avx512::forward<BFloat16>, avx512::backward<BFloat16>}, false});
    if (!__builtin_cpu_supports("avx512bf16")) return all;
    all.push_back(
        {"avx512_bf16", single, {avx512_bf16::forward<BFloat16>, avx512_bf16::backward<BFloat16>}, false});
    if (tiles::available()) all.push_back({"amx", single, {amx::forward<BFloat16>, amx::backward<BFloat16>}, true});
#endif
    return all;
  }();
  return found;
}

// The fastest that runs here, or the one that GPTFRAME_ATTENTION_CPU names; null where there is none.
inline const Variant* variant() {
  static const Variant* chosen = [] {
    const char* asked = std::getenv("GPTFRAME_ATTENTION_CPU");
    const Variant* best = nullptr;
    for (const Variant& one : variants()) {
      if (asked && *asked && std::strcmp(asked, one.name)) continue;
      best = &one;
    }
    return best;
  }();
  return chosen;
}

}  // namespace attention
