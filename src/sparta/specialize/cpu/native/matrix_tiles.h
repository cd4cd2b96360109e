// The tile registers of AMX for products in bf16: four tiles of sums that share one tile of weights. PlainTiles computes
// the same in plain loops, so that kernels written for tiles run, and are tested, on every processor; it is not fast.
// Before its first tile a process must ask Linux for the registers, and a thread must say how it uses them.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

// Assemblers that are older than these compilers may not know the instructions.
#if defined(SPARTA_AVX512) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define SPARTA_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sparta {

constexpr int64_t kTileRows = 16;     // output channels of a tile of weights, and places of a tile of tokens
constexpr int64_t kTileTokens = 16;
constexpr int64_t kTileInputs = 32;   // input channels of a tile of weights
constexpr int64_t kTileValues = kTileRows * kTileInputs;

inline float float_of_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// sums[i] += weights [16][32] * tokens[i], where tokens are [16 places][16 tokens][2 channels].
class PlainTiles {
 public:
  template <int I>
  void clear() { std::memset(sums_[I], 0, sizeof sums_[I]); }
  void load_weights(const uint16_t* from) { std::memcpy(weights_, from, sizeof weights_); }
  template <int I>
  void multiply(const int32_t* tokens, int64_t stride) {
    for (int64_t place = 0; place < kTileRows; ++place) {
      uint16_t pairs[kTileTokens][2];
      std::memcpy(pairs, tokens + place * stride, sizeof pairs);
      for (int64_t row = 0; row < kTileRows; ++row) {
        const float low = float_of_bf16(weights_[row][2 * place]), high = float_of_bf16(weights_[row][2 * place + 1]);
        for (int64_t t = 0; t < kTileTokens; ++t) {
          sums_[I][row][t] += low * float_of_bf16(pairs[t][0]) + high * float_of_bf16(pairs[t][1]);
        }
      }
    }
  }
  template <int I>
  void store(float* to, int64_t stride) const {
    for (int64_t row = 0; row < kTileRows; ++row) std::memcpy(to + row * stride, sums_[I][row], sizeof sums_[I][row]);
  }

 private:
  float sums_[4][kTileRows][kTileTokens];
  uint16_t weights_[kTileRows][kTileInputs];
};

#if defined(SPARTA_AMX)
// How the eight registers are used: each has 16 rows of 64 bytes.
struct alignas(64) TileSetup {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileSetup) == 64, "as the processor reads it");

#define SPARTA_TILE_CASES(I, CASE) \
  if constexpr (I == 0) { CASE("0", "5"); } else if constexpr (I == 1) { CASE("1", "6"); } \
  else if constexpr (I == 2) { CASE("2", "7"); } else { CASE("3", "5"); }

// Sums are in the registers 0 to 3, weights in 4, tokens in 5 to 7. Assembly needs no flag of the compiler, which knows
// nothing of these registers; `volatile` keeps the order.
class NativeTiles {
 public:
  NativeTiles() {
    static const TileSetup setup;
    asm volatile("ldtilecfg %0" : : "m"(setup));
  }
  ~NativeTiles() { asm volatile("tilerelease" : : : "memory"); }
  NativeTiles(const NativeTiles&) = delete;
  NativeTiles& operator=(const NativeTiles&) = delete;
  template <int I>
  SPARTA_INLINE void clear() {
#define SPARTA_CASE(SUM, TOKENS) asm volatile("tilezero %%tmm" SUM : :)
    SPARTA_TILE_CASES(I, SPARTA_CASE)
#undef SPARTA_CASE
  }
  SPARTA_INLINE void load_weights(const uint16_t* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm4" : : "r"(from), "r"(int64_t{64}) : "memory");
  }
  template <int I>
  SPARTA_INLINE void multiply(const int32_t* tokens, int64_t stride) {
#define SPARTA_CASE(SUM, TOKENS)                                               \
  asm volatile("tileloadd (%0,%1,1), %%tmm" TOKENS "\n\t"                      \
               "tdpbf16ps %%tmm" TOKENS ", %%tmm4, %%tmm" SUM                  \
               : : "r"(tokens), "r"(stride * 4) : "memory")
    SPARTA_TILE_CASES(I, SPARTA_CASE)
#undef SPARTA_CASE
  }
  template <int I>
  SPARTA_INLINE void store(float* to, int64_t stride) const {
#define SPARTA_CASE(SUM, TOKENS) \
  asm volatile("tilestored %%tmm" SUM ", (%0,%1,1)" : : "r"(to), "r"(stride * 4) : "memory")
    SPARTA_TILE_CASES(I, SPARTA_CASE)
#undef SPARTA_CASE
  }
};
#undef SPARTA_TILE_CASES

// Whether the processor has tiles of bf16, the kernel of the system keeps them, and this process may use them.
inline bool has_tiles() {
  static const bool found = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1) == 0 || (d >> 24 & 1) == 0) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c >> 27 & 1) == 0) return false;
    uint32_t low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return false;
    constexpr long kRequest = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return found;
}
#else
inline bool has_tiles() { return false; }
#endif

}  // namespace sparta
