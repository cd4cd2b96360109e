// Products of 8-bit integers by the tile registers of AMX, for groups of 16 rows that share one list of places. A tile of
// weights is 16 rows by 16 places; the 16 places of the tokens that belong to it are gathered into a buffer first, where
// they do not lie evenly in the panel or image anyway. So blocks of any width and height pay that leave places of 16 rows
// empty. PlainByteTiles computes the same in plain loops, on every processor; it is not fast.
#pragma once

#include "int8_groups.h"
#include "matrix_tiles.h"

namespace sparta {

constexpr int64_t kTilePlaces = 16;  // of a tile of weights, or of tokens
constexpr int64_t kTileInts = kTileRows * kTilePlaces;
constexpr int64_t kMostStrips = 4;

// Four tiles of sums [16 rows][16 tokens], two of weights [16 rows][16 places], two of tokens [16 places][16 tokens], four
// bytes to a place: sums += weights * tokens.
class PlainByteTiles {
 public:
  template <int Sum>
  void clear() { std::memset(sums_[Sum], 0, sizeof sums_[Sum]); }
  template <int Which>
  void load_weights(const int32_t* from) { std::memcpy(weights_[Which], from, sizeof weights_[Which]); }
  template <int Which>
  void load_tokens(const int32_t* from, int64_t stride) {
    for (int64_t place = 0; place < kTilePlaces; ++place) {
      std::memcpy(tokens_[Which][place], from + place * stride, sizeof tokens_[Which][place]);
    }
  }
  template <int Sum, int Weights, int Tokens>
  void multiply() {
    const bool is_unsigned = has_vnni();
    for (int64_t row = 0; row < kTileRows; ++row) {
      for (int64_t place = 0; place < kTilePlaces; ++place) {
        for (int64_t t = 0; t < kTileTokens; ++t) {
          for (int64_t i = 0; i < 4; ++i) {
            const uint8_t byte = tokens_[Tokens][place][t][i];
            sums_[Sum][row][t] += weights_[Weights][row][place][i] * (is_unsigned ? byte : static_cast<int8_t>(byte));
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
  int8_t weights_[2][kTileRows][kTilePlaces][4];
  uint8_t tokens_[2][kTilePlaces][kTileTokens][4];
};

#if defined(SPARTA_AMX)
// Sums are in registers 0 to 3, weights in 4 and 5, tokens in 6 and 7, which are unsigned.
class NativeByteTiles : NativeTiles {
 public:
  using NativeTiles::clear;
  template <int Which>
  SPARTA_INLINE void load_weights(const int32_t* from) {
    if constexpr (Which == 0) asm volatile("tileloadd (%0,%1,1), %%tmm4" : : "r"(from), "r"(int64_t{64}) : "memory");
    else asm volatile("tileloadd (%0,%1,1), %%tmm5" : : "r"(from), "r"(int64_t{64}) : "memory");
  }
  template <int Which>
  SPARTA_INLINE void load_tokens(const int32_t* from, int64_t stride) {
    if constexpr (Which == 0) asm volatile("tileloadd (%0,%1,1), %%tmm6" : : "r"(from), "r"(stride * 4) : "memory");
    else asm volatile("tileloadd (%0,%1,1), %%tmm7" : : "r"(from), "r"(stride * 4) : "memory");
  }
  template <int Sum, int Weights, int Tokens>
  SPARTA_INLINE void multiply() {
#define SPARTA_CASE(NAME)                                                                               \
  if constexpr (Weights == 0 && Tokens == 0) asm volatile("tdpbsud %%tmm6, %%tmm4, %%tmm" NAME : :);        \
  else if constexpr (Weights == 0) asm volatile("tdpbsud %%tmm7, %%tmm4, %%tmm" NAME : :);                  \
  else if constexpr (Tokens == 0) asm volatile("tdpbsud %%tmm6, %%tmm5, %%tmm" NAME : :);                   \
  else asm volatile("tdpbsud %%tmm7, %%tmm5, %%tmm" NAME : :)
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

// Whether sixteen places lie `stride` bytes apart, one after the other, so that tiles are loaded where they are.
SPARTA_INLINE bool follow_evenly(const uint32_t* offsets, int64_t stride) {
  // Without this, offsets of 32 bits might agree only because they wrap around.
  if (offsets[kTilePlaces - 1] != offsets[0] + (kTilePlaces - 1) * stride) return false;
#if defined(SPARTA_AVX512)
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i even = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(offsets[0])),
                                        _mm512_mullo_epi32(order, _mm512_set1_epi32(static_cast<int>(stride))));
  return _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(offsets), even) == 0;
#else
  bool even = true;
  for (int64_t i = 1; i < kTilePlaces; ++i) even &= offsets[i] == offsets[0] + i * stride;
  return even;
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
  tiles.template load_weights<0>(weights);
  each<Strips>([&](auto s) SPARTA_LAMBDA {
    tiles.template load_tokens<s % 2>(x + s * strip, stride);
    tiles.template multiply<s, 0, s % 2>();
  });
}

// Two tiles of weights, of 16 rows each, times the same two strips: every load is used twice.
template <class Tiles>
SPARTA_INLINE void multiply_pair(Tiles& tiles, const int32_t* weights, const int32_t* more_weights, const int32_t* x,
                                 int64_t strip, int64_t stride) {
  tiles.template load_weights<0>(weights);
  tiles.template load_tokens<0>(x, stride);
  tiles.template multiply<0, 0, 0>();
  tiles.template load_tokens<1>(x + strip, stride);
  tiles.template multiply<1, 0, 1>();
  tiles.template load_weights<1>(more_weights);
  tiles.template multiply<2, 1, 0>();
  tiles.template multiply<3, 1, 1>();
}

// Whether a group and the one behind it are neighbouring rows that have the same places.
inline bool share_places(const PanelMatrix& matrix, int64_t group) {
  if (matrix.rows[group + 1] != matrix.rows[group] + kTileRows) return false;
  const int64_t begin = matrix.starts[group], middle = matrix.starts[group + 1], end = matrix.starts[group + 2];
  const uint32_t* const next = matrix.offsets + middle;
  return middle - begin == end - middle && std::equal(matrix.offsets + begin, next, next);
}

// Strips of a tile of tokens; where it has two, the sums of two groups fit the registers.
template <int MV>
constexpr int kStripsOf = (MV * kLanes + kTileTokens - 1) / kTileTokens;
template <int MV>
constexpr bool kPairs = kStripsOf<MV> == 2 && MV * kLanes % kTileTokens == 0;
constexpr int64_t kSumsStride = kMostStrips * kTileTokens;

// Asks for a tile of weights, which may come from far, into the second level of caches.
SPARTA_INLINE void ask_for(const int32_t* weights) {
#pragma GCC unroll 16
  for (int64_t row = 0; row < kTileRows; ++row) __builtin_prefetch(weights + row * kTilePlaces, 0, 2);
}

// The sums of one group, or of two that share their places, for MV vectors of tokens: [rows][kSumsStride]. Of x, a place
// is `stride` numbers behind the one before. The next places are gathered before those of now are multiplied, because what
// was just stored cannot be loaded at once.
template <class Tiles, int MV, bool Pair>
SPARTA_INLINE void sum_int8_tiles(Tiles& tiles, const PanelMatrix& matrix, int64_t group, const int32_t* x,
                                  int64_t stride, int32_t* sums) {
  constexpr int kStrips = kStripsOf<MV>, kSums = Pair ? kMostStrips : kStrips;
  constexpr bool kWhole = MV * kLanes % kTileTokens == 0;
  alignas(64) int32_t gathered[2][kStrips * kTileInts];
  if constexpr (!kWhole) std::memset(gathered, 0, sizeof gathered);  // tokens that a strip has too many
  const int64_t begin = matrix.starts[group], chunks = (matrix.starts[group + 1] - begin) / kTilePlaces;
  const uint32_t* offsets = matrix.offsets + begin;
  const int32_t* values = reinterpret_cast<const int32_t*>(matrix.values) + begin * kTileRows;
  // Gathers the places of a chunk unless they can be loaded where they are, and tells which.
  const auto prepare = [&](int64_t chunk) SPARTA_LAMBDA {
    const uint32_t* at = offsets + chunk * kTilePlaces;
    if (kWhole && follow_evenly(at, 4 * stride)) return true;
    gather_places<MV>(x, at, gathered[chunk % 2]);
    return false;
  };
  each<kSums>([&](auto s) SPARTA_LAMBDA { tiles.template clear<s>(); });
  bool in_place = chunks > 0 && prepare(0);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const bool next_in_place = chunk + 1 < chunks && prepare(chunk + 1);
    const int32_t* weights = values + chunk * kTileInts;
    const int32_t* const more = weights + chunks * kTileInts;  // of the next group, at this place
    const char* const at = reinterpret_cast<const char*>(x) + offsets[chunk * kTilePlaces];
    const int32_t* const from = in_place ? reinterpret_cast<const int32_t*>(at) : gathered[chunk % 2];
    const int64_t strip = in_place ? kTileTokens : kTileInts, step = in_place ? stride : kTileTokens;
    if constexpr (Pair) {
      ask_for(more + chunks * kTileInts);
      multiply_pair(tiles, weights, more, from, strip, step);
    } else {
      ask_for(more);
      multiply_strips<kStrips>(tiles, weights, from, strip, step);
    }
    in_place = next_in_place;
  }
  each<kSums>([&](auto s) SPARTA_LAMBDA {
    constexpr int64_t kRow = s / kStrips * kTileRows, kToken = s % kStrips * kTileTokens;
    tiles.template store<s>(sums + kRow * kSumsStride + kToken, kSumsStride);
  });
}

// Rows whose sums are stored.
struct StoredRows {
  int64_t first;
  int64_t rows;
  const int32_t* sums;
};

// Calls f with four rows of every group that a task has: the first of them and their sums. Tiles multiply the next group
// while the sums of the one before become results: what was just stored cannot be loaded at once. `announce` is called
// with the same rows before they are multiplied.
template <class Tiles, int MV, class Task, class Announce, class F>
SPARTA_INLINE void each_four_of_tiles(const Task& task, const PanelMatrix& matrix, const int32_t* starts,
                                      Announce announce, F f) {
  alignas(64) int32_t all[2][2 * kTileRows * kSumsStride];
  Tiles tiles;
  const auto finish = [&](const StoredRows& stored) SPARTA_LAMBDA {
    for (int64_t r = 0; r < stored.rows; r += 4) {
      const int64_t row = stored.first + r;
      IntVec sums[4][MV];
      each<4>([&](auto i) SPARTA_LAMBDA {
        const IntVec start = IntVec{} + starts[std::min<int64_t>(row + i, matrix.channels - 1)];
        const int32_t* from = stored.sums + (r + i) * kSumsStride;
        each<MV>([&](auto j) SPARTA_LAMBDA { sums[i][j] = start + load_ints(from + j * kLanes); });
      });
      f(row, sums);
    }
  };
  StoredRows before{0, 0, nullptr};
  for (int64_t group = task.group_begin, which = 0; group < task.group_end; which = 1 - which) {
    const bool pair = kPairs<MV> && group + 1 < task.group_end && share_places(matrix, group);
    const int64_t first = matrix.rows[group], rows = std::min((pair ? 2 : 1) * kTileRows, matrix.channels - first);
    for (int64_t r = 0; r < rows; r += 4) announce(first + r);
    if constexpr (kPairs<MV>) {
      if (pair) sum_int8_tiles<Tiles, MV, true>(tiles, matrix, group, task.x, task.x_stride, all[which]);
    }
    if (!pair) sum_int8_tiles<Tiles, MV, false>(tiles, matrix, group, task.x, task.x_stride, all[which]);
    finish(before);
    before = {first, rows, all[which]};
    group += pair ? 2 : 1;
  }
  finish(before);
}

// Groups of 16 rows; entries of a group are a multiple of 16, values [tiles][16 rows][16 places].
template <class Tiles, int MV>
void multiply_int8_tiles(const Int8Task& given) {
  const Int8Task task = given;
  const PanelMatrix matrix = *task.matrix;
  const Int8Finish finish = *task.finish;
  const int32_t* const starts = finish.starts;
  const auto announce = [](int64_t) SPARTA_LAMBDA {};  // results of a panel are near
  each_four_of_tiles<Tiles, MV>(
      task, matrix, starts, announce, [&](int64_t row, const IntVec (&sums)[4][MV]) SPARTA_LAMBDA {
        finish_group(task, finish, GroupScales<4>(finish, row, matrix.channels), matrix.channels, row, sums);
      });
}

}  // namespace sparta
