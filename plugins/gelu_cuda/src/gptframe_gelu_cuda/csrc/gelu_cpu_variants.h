// The CPU loops of gelu_cpu_body.h for AVX-512, AVX2 and the baseline, and the choice among them at run time. Knows
// nothing of torch, so that the tests run it under sanitizers.
#pragma once

#include <cstdlib>
#include <cstring>

// GCC needs no -march: each variant is compiled under a target pragma, and the file runs on any x86-64. Other
// compilers and processors get the baseline, which the compiler may still vectorise.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(GELU_BASELINE_ONLY)
#define GELU_X86_VARIANTS 1
#include <immintrin.h>
#endif

#define GELU_FN inline __attribute__((always_inline))

#ifdef GELU_X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,prefer-vector-width=512")
#define GELU_ISA 512
#define GELU_FMAF __builtin_fmaf
#define GELU_FMA __builtin_fma
namespace gelu_avx512 {
#include "gelu_cpu_body.h"
}
#undef GELU_ISA
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#define GELU_ISA 256
namespace gelu_avx2 {
#include "gelu_cpu_body.h"
}
#undef GELU_ISA
#pragma GCC pop_options
#endif

// Without a fused multiply-add, one through double serves float; double goes unfused, and is as accurate as ATen's.
#define GELU_ISA 0
#undef GELU_FMAF
#undef GELU_FMA
#define GELU_FMAF(a, b, c) ((float)((double)(a) * (double)(b) + (double)(c)))
#define GELU_FMA(a, b, c) ((a) * (b) + (c))
namespace gelu_baseline {
#include "gelu_cpu_body.h"
}
#undef GELU_ISA

namespace {

// Untyped entry points of one variant, for one type T of x and one type B of the bias.
struct Loops {
  void (*forward)(const void* x, void* y, long long n);
  void (*backward)(const void* g, const void* x, void* dx, long long n);
  void (*double_backward)(const void* gg, const void* g, const void* x, void* dx, long long n);
  void (*bias_forward)(const void* x, const void* bias, void* y, long long rows, long long columns);
  void (*bias_backward)(const void* g, const void* x, const void* bias, void* dx, void* sum, long long rows,
                        long long columns);
};

#define GELU_LOOPS(V, T, B)                                                                                        \
  Loops {                                                                                                          \
    [](const void* x, void* y, long long n) { V::forward((const V::T*)x, (V::T*)y, n); },                          \
        [](const void* g, const void* x, void* dx, long long n) {                                                  \
          V::backward((const V::T*)g, (const V::T*)x, (V::T*)dx, n);                                               \
        },                                                                                                         \
        [](const void* gg, const void* g, const void* x, void* dx, long long n) {                                  \
          V::double_backward((const V::T*)gg, (const V::T*)g, (const V::T*)x, (V::T*)dx, n);                       \
        },                                                                                                         \
        [](const void* x, const void* bias, void* y, long long rows, long long columns) {                          \
          V::bias_forward((const V::T*)x, (const V::B*)bias, (V::T*)y, rows, columns);                             \
        },                                                                                                         \
        [](const void* g, const void* x, const void* bias, void* dx, void* sum, long long rows, long long columns) { \
          V::bias_backward((const V::T*)g, (const V::T*)x, (const V::B*)bias, (V::T*)dx,                           \
                           (V::Widen<V::T>::W*)sum, rows, columns);                                             \
        }                                                                                                          \
  }

// Rows: float32, float64, float16, bfloat16, float16 with a float32 bias, bfloat16 with a float32 bias.
#define GELU_TABLE(V)                                                                                  \
  {GELU_LOOPS(V, Float, Float),       GELU_LOOPS(V, Double, Double), GELU_LOOPS(V, Half, Half),        \
   GELU_LOOPS(V, BFloat16, BFloat16), GELU_LOOPS(V, Half, Float),    GELU_LOOPS(V, BFloat16, Float)}

const Loops baseline_table[6] = GELU_TABLE(gelu_baseline);
#ifdef GELU_X86_VARIANTS
const Loops avx2_table[6] = GELU_TABLE(gelu_avx2);
const Loops avx512_table[6] = GELU_TABLE(gelu_avx512);
#endif

struct Variant {
  const char* name;
  const Loops* table;
};

// The widest variant that this processor has; GPTFRAME_GELU_CPU=baseline|avx2|avx512 asks for a narrower one.
Variant choose() {
#ifdef GELU_X86_VARIANTS
  const char* asked = std::getenv("GPTFRAME_GELU_CPU");
  const bool base = asked && !std::strcmp(asked, "baseline"), narrow = asked && !std::strcmp(asked, "avx2");
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !base && !narrow) return {"avx512", avx512_table};
  if (has_avx2 && !base) return {"avx2", avx2_table};
#endif
  return {"baseline", baseline_table};
}

const Variant& variant() {
  static const Variant chosen = choose();
  return chosen;
}

}  // namespace
