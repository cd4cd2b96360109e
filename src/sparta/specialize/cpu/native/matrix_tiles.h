// The tile registers of AMX for products in bf16: four of sums, two of weights, two of tokens. PlainTiles computes the
// same in plain loops, so that kernels written for tiles run, and are tested, on every processor; it is not fast.
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
constexpr int64_t kTileBytes = 64;    // of a row

inline float float_of_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// Four tiles of sums, two of weights [16 rows][32 channels], two of tokens [16 places][16 tokens][2 channels]:
// sums += weights * tokens.
class PlainTiles {
 public:
  template <int Sum>
  void clear() { std::memset(sums_[Sum], 0, sizeof sums_[Sum]); }
  template <int Which>
  void load_weights(const uint16_t* from) { std::memcpy(weights_[Which], from, sizeof weights_[Which]); }
  template <int Which>
  void load_tokens(const int32_t* from) { std::memcpy(tokens_[Which], from, sizeof tokens_[Which]); }
  template <int Sum, int Weights, int Tokens>
  void multiply() {
    for (int64_t place = 0; place < kTileRows; ++place) {
      for (int64_t row = 0; row < kTileRows; ++row) {
        const float low = float_of_bf16(weights_[Weights][row][2 * place]);
        const float high = float_of_bf16(weights_[Weights][row][2 * place + 1]);
        for (int64_t t = 0; t < kTileTokens; ++t) {
          const uint16_t* pair = tokens_[Tokens][place][t];
          sums_[Sum][row][t] += low * float_of_bf16(pair[0]) + high * float_of_bf16(pair[1]);
        }
      }
    }
  }
  template <int Sum>
  void load(const float* from, int64_t stride) {
    for (int64_t row = 0; row < kTileRows; ++row) std::memcpy(sums_[Sum][row], from + row * stride, kTileBytes);
  }
  template <int Sum>
  void store(float* to, int64_t stride) const {
    for (int64_t row = 0; row < kTileRows; ++row) std::memcpy(to + row * stride, sums_[Sum][row], kTileBytes);
  }

 private:
  float sums_[4][kTileRows][kTileTokens];
  uint16_t weights_[2][kTileRows][kTileInputs];
  uint16_t tokens_[2][kTileRows][kTileTokens][2];
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

// Calls CASE with the name of the register of a tile: sums are in 0 to 3, weights in 4 and 5, tokens in 6 and 7.
#define SPARTA_FOR_SUM(SUM, CASE) \
  if constexpr (SUM == 0) { CASE("0"); } else if constexpr (SUM == 1) { CASE("1"); } \
  else if constexpr (SUM == 2) { CASE("2"); } else { CASE("3"); }

// Assembly needs no flag of the compiler, which knows nothing of these registers; `volatile` keeps the order.
class NativeTiles {
 public:
  NativeTiles() {
    static const TileSetup setup;
    asm volatile("ldtilecfg %0" : : "m"(setup));
  }
  ~NativeTiles() { asm volatile("tilerelease" : : : "memory"); }
  NativeTiles(const NativeTiles&) = delete;
  NativeTiles& operator=(const NativeTiles&) = delete;
  template <int Sum>
  SPARTA_INLINE void clear() {
#define SPARTA_CASE(NAME) asm volatile("tilezero %%tmm" NAME : :)
    SPARTA_FOR_SUM(Sum, SPARTA_CASE)
#undef SPARTA_CASE
  }
  template <int Which>
  SPARTA_INLINE void load_weights(const uint16_t* from) {
    if constexpr (Which == 0) asm volatile("tileloadd (%0,%1,1), %%tmm4" : : "r"(from), "r"(int64_t{64}) : "memory");
    else asm volatile("tileloadd (%0,%1,1), %%tmm5" : : "r"(from), "r"(int64_t{64}) : "memory");
  }
  template <int Which>
  SPARTA_INLINE void load_tokens(const int32_t* from) {
    if constexpr (Which == 0) asm volatile("tileloadd (%0,%1,1), %%tmm6" : : "r"(from), "r"(int64_t{64}) : "memory");
    else asm volatile("tileloadd (%0,%1,1), %%tmm7" : : "r"(from), "r"(int64_t{64}) : "memory");
  }
  template <int Sum, int Weights, int Tokens>
  SPARTA_INLINE void multiply() {
#define SPARTA_CASE(NAME)                                                                               \
  if constexpr (Weights == 0 && Tokens == 0) asm volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm" NAME : :);      \
  else if constexpr (Weights == 0) asm volatile("tdpbf16ps %%tmm7, %%tmm4, %%tmm" NAME : :);                \
  else if constexpr (Tokens == 0) asm volatile("tdpbf16ps %%tmm6, %%tmm5, %%tmm" NAME : :);                 \
  else asm volatile("tdpbf16ps %%tmm7, %%tmm5, %%tmm" NAME : :)
    SPARTA_FOR_SUM(Sum, SPARTA_CASE)
#undef SPARTA_CASE
  }
  template <int Sum>
  SPARTA_INLINE void load(const float* from, int64_t stride) {
#define SPARTA_CASE(NAME) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" NAME : : "r"(from), "r"(stride * 4) : "memory")
    SPARTA_FOR_SUM(Sum, SPARTA_CASE)
#undef SPARTA_CASE
  }
  template <int Sum>
  SPARTA_INLINE void store(float* to, int64_t stride) const {
#define SPARTA_CASE(NAME) \
  asm volatile("tilestored %%tmm" NAME ", (%0,%1,1)" : : "r"(to), "r"(stride * 4) : "memory")
    SPARTA_FOR_SUM(Sum, SPARTA_CASE)
#undef SPARTA_CASE
  }
};

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
