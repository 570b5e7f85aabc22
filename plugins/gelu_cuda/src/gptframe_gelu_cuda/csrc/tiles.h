// AMX: eight registers of 16 rows of 64 bytes, and the product of such tiles of bfloat16. Knows nothing of torch.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

#ifdef EMULATE_TILES  // so that loops over tiles can be tested where the processor has none
struct Tile {
  float f[16][16];
};
inline Tile& at(int i) {
  static thread_local Tile all[8];
  return all[i];
}
inline void load(int i, const void* p, long stride) {
  for (int r = 0; r < 16; ++r) memcpy(at(i).f[r], (const char*)p + r * stride, 64);
}
inline void store(int i, void* p, long stride) {
  for (int r = 0; r < 16; ++r) memcpy((char*)p + r * stride, at(i).f[r], 64);
}
inline void multiply(int c, int a, int b) {
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n)
        for (int h = 0; h < 2; ++h) {
          uint16_t x[2], y[2];
          memcpy(x, &at(a).f[m][k], 4);
          memcpy(y, &at(b).f[k][n], 4);
          const uint32_t xb = (uint32_t)x[h] << 16, yb = (uint32_t)y[h] << 16;
          float xf, yf;
          memcpy(&xf, &xb, 4);
          memcpy(&yf, &yb, 4);
          at(c).f[m][n] += xf * yf;
        }
}
#define TILE_LOAD(i, p, stride) tiles::load(i, p, stride)
#define TILE_LOAD_ONCE(i, p, stride) tiles::load(i, p, stride)
#define TILE_STORE(i, p, stride) tiles::store(i, p, stride)
#define TILE_ZERO(i) (tiles::at(i) = tiles::Tile{})
#define TILE_MULTIPLY(c, a, b) tiles::multiply(c, a, b)
inline void begin() {}
inline void end() {}
inline bool available() { return true; }
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
// Instructions by name: GCC's intrinsics say too little of what they read (8 bytes of the configuration, nothing of a
// tile), so that stores before them get lost. A tile that is loaded "once" need not stay in the first-level cache.
#define TILE_LOAD(i, p, stride) \
  __asm__ volatile("tileloadd\t(%0,%1,1), %%tmm" #i ::"r"((const void*)(p)), "r"((long)(stride)) : "memory")
#define TILE_LOAD_ONCE(i, p, stride) \
  __asm__ volatile("tileloaddt1\t(%0,%1,1), %%tmm" #i ::"r"((const void*)(p)), "r"((long)(stride)) : "memory")
#define TILE_STORE(i, p, stride) \
  __asm__ volatile("tilestored\t%%tmm" #i ", (%0,%1,1)" ::"r"((void*)(p)), "r"((long)(stride)) : "memory")
#define TILE_ZERO(i) __asm__ volatile("tilezero\t%%tmm" #i ::)
#define TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps\t%%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
// Other libraries set tiles up for themselves, so this is done for every task.
inline void begin() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  __asm__ volatile("ldtilecfg\t%0" ::"m"(config) : "memory");
}
inline void end() { __asm__ volatile("tilerelease"); }
// Whether the processor has AMX with bfloat16, and the kernel lets this process use it.
inline bool available() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  unsigned a, b, c, d;
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  const bool has = (d >> 22 & 1) && (d >> 24 & 1);
  constexpr long kRequest = 0x1023, kTileData = 18;
  return has && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#else
inline void begin() {}
inline void end() {}
inline bool available() { return false; }
#endif

}  // namespace tiles
