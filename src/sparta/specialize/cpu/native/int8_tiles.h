// Products of 8-bit integers by the tile registers of AMX, for groups of 16 rows that share one list of places. A tile of
// weights is 16 rows by 16 places; the 16 places of the tokens that belong to it are gathered into a buffer first, where
// they do not follow each other in the panel anyway. So blocks of any width and height pay that leave places of 16 rows
// empty. PlainByteTiles computes the same in plain loops, on every processor; it is not fast.
#pragma once

#include "int8_groups.h"
#include "matrix_tiles.h"

namespace sparta {

constexpr int64_t kTilePlaces = 16;  // of a tile of weights, or of tokens
constexpr int64_t kTileInts = kTileRows * kTilePlaces;
constexpr int64_t kMostStrips = 4;

// Four tiles of sums [16 rows][16 tokens], one of weights [16 rows][16 places], two of tokens [16 places][16 tokens], four
// bytes to a place: sums += weights * tokens.
class PlainByteTiles {
 public:
  template <int Sum>
  void clear() { std::memset(sums_[Sum], 0, sizeof sums_[Sum]); }
  void load_weights(const int32_t* from) { std::memcpy(weights_, from, sizeof weights_); }
  template <int Which>
  void load_tokens(const int32_t* from, int64_t stride) {
    for (int64_t place = 0; place < kTilePlaces; ++place) {
      std::memcpy(tokens_[Which][place], from + place * stride, sizeof tokens_[Which][place]);
    }
  }
  template <int Sum, int Tokens>
  void multiply() {
    const bool is_unsigned = has_vnni();
    for (int64_t row = 0; row < kTileRows; ++row) {
      for (int64_t place = 0; place < kTilePlaces; ++place) {
        for (int64_t t = 0; t < kTileTokens; ++t) {
          for (int64_t i = 0; i < 4; ++i) {
            const uint8_t byte = tokens_[Tokens][place][t][i];
            sums_[Sum][row][t] += weights_[row][place][i] * (is_unsigned ? byte : static_cast<int8_t>(byte));
          }
        }
      }
    }
  }
  template <int Sum>
  void store(int32_t* to, int64_t stride) const {
    for (int64_t row = 0; row < kTileRows; ++row) std::memcpy(to + row * stride, sums_[Sum][row], kTileBytes);
  }

 private:
  int32_t sums_[kMostStrips][kTileRows][kTileTokens];
  int8_t weights_[kTileRows][kTilePlaces][4];
  uint8_t tokens_[2][kTilePlaces][kTileTokens][4];
};

#if defined(SPARTA_AMX)
// Sums are in registers 0 to 3, weights in 4, tokens in 6 and 7, which are unsigned.
class NativeByteTiles : NativeTiles {
 public:
  using NativeTiles::clear;
  SPARTA_INLINE void load_weights(const int32_t* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm4" : : "r"(from), "r"(int64_t{64}) : "memory");
  }
  template <int Which>
  SPARTA_INLINE void load_tokens(const int32_t* from, int64_t stride) {
    if constexpr (Which == 0) asm volatile("tileloadd (%0,%1,1), %%tmm6" : : "r"(from), "r"(stride * 4) : "memory");
    else asm volatile("tileloadd (%0,%1,1), %%tmm7" : : "r"(from), "r"(stride * 4) : "memory");
  }
  template <int Sum, int Tokens>
  SPARTA_INLINE void multiply() {
#define SPARTA_CASE(NAME)                                                                  \
  if constexpr (Tokens == 0) asm volatile("tdpbsud %%tmm6, %%tmm4, %%tmm" NAME : :);       \
  else asm volatile("tdpbsud %%tmm7, %%tmm4, %%tmm" NAME : :)
    SPARTA_FOR_SUM(Sum, SPARTA_CASE)
#undef SPARTA_CASE
  }
  template <int Sum>
  SPARTA_INLINE void store(int32_t* to, int64_t stride) const {
    NativeTiles::store<Sum>(reinterpret_cast<float*>(to), stride);
  }
};
#endif

// Whether the processor multiplies tiles of bytes, and panels hold them as its instruction reads them.
inline bool has_byte_tiles() {
#if defined(SPARTA_AMX)
  static const bool found = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_tiles() && has_vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 25 & 1) != 0;
  }();
  return found;
#else
  return false;
#endif
}

// Sixteen places of MV vectors of tokens, as tiles: [strips][places][16 tokens].
template <int MV>
SPARTA_INLINE void gather_places(const int32_t* x, const uint32_t* offsets, int32_t* to) {
#pragma GCC unroll 16
  for (int64_t place = 0; place < kTilePlaces; ++place) {
    const int32_t* from = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(x) + offsets[place]);
    each<MV>([&](auto j) SPARTA_LAMBDA {
      constexpr int64_t token = j * kLanes;
      store_ints(to + token / kTileTokens * kTileInts + place * kTileTokens + token % kTileTokens,
                 load_ints(from + token));
    });
  }
}

// One tile of weights times the tokens of all strips, `strip` numbers apart and with `stride` between their places.
template <int Strips, class Tiles>
SPARTA_INLINE void multiply_strips(Tiles& tiles, const int32_t* weights, const int32_t* x, int64_t strip,
                                   int64_t stride) {
  tiles.load_weights(weights);
  each<Strips>([&](auto s) SPARTA_LAMBDA {
    tiles.template load_tokens<s % 2>(x + s * strip, stride);
    tiles.template multiply<s, s % 2>();
  });
}

// The sums of one group for MV vectors of tokens, [16][kMostStrips * 16]. The next places are gathered before those of
// now are multiplied, because what was just stored cannot be loaded at once.
template <class Tiles, int MV>
SPARTA_INLINE void sum_int8_tiles(Tiles& tiles, const PanelMatrix& matrix, int64_t group, const int32_t* x,
                                  int64_t tile, int32_t* sums) {
  constexpr int kStrips = (MV * kLanes + kTileTokens - 1) / kTileTokens;
  constexpr bool kWhole = MV * kLanes % kTileTokens == 0;
  alignas(64) int32_t gathered[2][kStrips * kTileInts];
  if constexpr (!kWhole) std::memset(gathered, 0, sizeof gathered);  // tokens that a strip has too many
  const int64_t begin = matrix.starts[group], chunks = (matrix.starts[group + 1] - begin) / kTilePlaces;
  const uint32_t* offsets = matrix.offsets + begin;
  const int32_t* values = reinterpret_cast<const int32_t*>(matrix.values) + begin * kTileRows;
  const auto follow = [&](int64_t chunk) {  // offsets ascend; what fills up a tile goes back to the first
    const uint32_t* at = offsets + chunk * kTilePlaces;
    return kWhole && at[kTilePlaces - 1] - at[0] == (kTilePlaces - 1) * static_cast<uint32_t>(tile) * 4;
  };
  const auto gather = [&](int64_t chunk) SPARTA_LAMBDA {
    if (!follow(chunk)) gather_places<MV>(x, offsets + chunk * kTilePlaces, gathered[chunk % 2]);
  };
  each<kStrips>([&](auto s) SPARTA_LAMBDA { tiles.template clear<s>(); });
  if (chunks > 0) gather(0);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) gather(chunk + 1);
    const int32_t* weights = values + chunk * kTileInts;
    if (follow(chunk)) {
      const char* from = reinterpret_cast<const char*>(x) + offsets[chunk * kTilePlaces];
      multiply_strips<kStrips>(tiles, weights, reinterpret_cast<const int32_t*>(from), kTileTokens, tile);
    } else {
      multiply_strips<kStrips>(tiles, weights, gathered[chunk % 2], kTileInts, kTileTokens);
    }
  }
  each<kStrips>([&](auto s) SPARTA_LAMBDA {
    tiles.template store<s>(sums + s * kTileTokens, kMostStrips * kTileTokens);
  });
}

// Groups of 16 rows; entries of a group are a multiple of 16, values [tiles][16 rows][16 places].
template <class Tiles, int MV>
void multiply_int8_tiles(const Int8Task& given) {
  const Int8Task task = given;
  const PanelMatrix matrix = *task.matrix;
  const Int8Finish finish = *task.finish;
  constexpr int64_t kStride = kMostStrips * kTileTokens;
  alignas(64) int32_t all[kTileRows * kStride];
  Tiles tiles;
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    sum_int8_tiles<Tiles, MV>(tiles, matrix, group, task.x, task.tile, all);
    for (int64_t r = 0; r < kTileRows && matrix.rows[group] + r < matrix.channels; r += 4) {
      const int64_t row = matrix.rows[group] + r;
      const GroupScales<4> scales(finish, row, matrix.channels);
      IntVec sums[4][MV];
      each<4>([&](auto i) SPARTA_LAMBDA {
        const IntVec start = IntVec{} + scales.starts[i];
        each<MV>([&](auto j) SPARTA_LAMBDA { sums[i][j] = start + load_ints(all + (r + i) * kStride + j * kLanes); });
      });
      finish_group(task, finish, scales, matrix.channels, row, sums);
    }
  }
}

}  // namespace sparta
