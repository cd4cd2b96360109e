// y = x W^T in bf16 for many tokens, summed in fp32. Two neighbouring channels of a token are the halves of one 32-bit
// place; a panel has strips of 16 tokens, [strips][places][16], and a product takes two channels at once. Three forms:
// lists of pairs, one even and one odd channel each, for groups of 1 or 4 rows (vdpbf16ps), whose halves are put together
// while they are loaded; blocks of 16 rows by 32 channels (AMX); and lists of pairs for 16 rows, of which 16 at a time are
// gathered into a tile (bf16_gathered.h). Results stand as in spmm.h and go through the same epilogue.
#pragma once

#include "bf16_gathered.h"

namespace sparta {

// Products of pairs by the units for fp32.
struct PlainPairs {
  struct Inputs { Vec low, high; };
  using Weight = Inputs;
  static SPARTA_INLINE Inputs split(IntVec v) { return {(Vec)((BitVec)v << 16), (Vec)((BitVec)v & kUpperHalf)}; }
  static SPARTA_INLINE Weight spread(const int32_t* weight) { return split(IntVec{} + *weight); }
  static SPARTA_INLINE void add(Vec& sum, const Inputs& x, const Weight& w) {
    sum += x.low * w.low;
    sum += x.high * w.high;
  }
};

#if defined(SPARTA_AVX512)
// By one instruction; as assembly for the reasons of VnniUnit.
struct NativePairs {
  using Inputs = IntVec;
  using Weight = IntVec;
  static SPARTA_INLINE Inputs split(IntVec v) { return v; }
  static SPARTA_INLINE Weight spread(const int32_t* weight) { return (IntVec)_mm512_set1_epi32(*weight); }
  static SPARTA_INLINE void add(Vec& sum, const Inputs& x, const Weight& w) {
    Vec result = sum;
    asm("vdpbf16ps %2, %1, %0" : "+v"(result) : "v"(x), "v"(w));
    sum = result;
  }
};
#endif

template <class Unit, int BN, int MV>
void multiply_bf16_pairs(const Bf16Task& given) {
  const Bf16Task task = given;  // copies, which no store can change
  const PanelMatrix matrix = *task.matrix;
  const int32_t* all_values = reinterpret_cast<const int32_t*>(matrix.values);
  const int64_t places = bf16_places(matrix.inputs);
  const int32_t* vectors[MV];
#pragma GCC unroll 4
  for (int j = 0; j < MV; ++j) vectors[j] = task.x + vector_start(task.first_vector + j, places);
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    const int64_t begin = matrix.starts[group], end = matrix.starts[group + 1];
    float* y = task.y + (matrix.rows[group] - task.first_row) * task.tile + task.first_vector * kLanes;
    Vec sums[BN][MV] = {};
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t even = matrix.offsets[2 * i], odd = matrix.offsets[2 * i + 1];
      typename Unit::Inputs inputs[MV];
#pragma GCC unroll 4
      for (int j = 0; j < MV; ++j) {
        inputs[j] = Unit::split(load_halves(place_at(vectors[j], even), place_at(vectors[j], odd)));
      }
#pragma GCC unroll 4
      for (int r = 0; r < BN; ++r) {
        const typename Unit::Weight weight = Unit::spread(all_values + i * BN + r);
#pragma GCC unroll 4
        for (int j = 0; j < MV; ++j) Unit::add(sums[r][j], inputs[j], weight);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < BN; ++r) {  // rows beyond the last channel have room in the results
#pragma GCC unroll 4
      for (int j = 0; j < MV; ++j) store(y + r * task.tile + j * kLanes, sums[r][j]);
    }
  }
}

using Bf16Kernel = void (*)(const Bf16Task&);

template <class Unit, int BN>
Bf16Kernel bf16_pairs_for(int64_t vectors) {
  switch (vectors) {
    case 1: return multiply_bf16_pairs<Unit, BN, 1>;
    case 2: return multiply_bf16_pairs<Unit, BN, 2>;
    case 3: return multiply_bf16_pairs<Unit, BN, 3>;
    default: return multiply_bf16_pairs<Unit, BN, 4>;
  }
}

inline Bf16Kernel bf16_pairs(int32_t bn, int64_t vectors) {
#if defined(SPARTA_AVX512)
  if (has_bf16()) return bn == 1 ? bf16_pairs_for<NativePairs, 1>(vectors) : bf16_pairs_for<NativePairs, 4>(vectors);
#endif
  return bn == 1 ? bf16_pairs_for<PlainPairs, 1>(vectors) : bf16_pairs_for<PlainPairs, 4>(vectors);
}

// Blocks of a group that are multiplied before the next ones: those of two groups stay in the first cache with the
// tokens of two strips.
constexpr int64_t kBlocksOfChunk = 12;
// Lines of weights that are asked for with every block: four pairs of strips ask for all of the next chunk.
constexpr int64_t kLinesAhead = 4, kLineValues = 32;

// Some blocks of one group of 16 rows, or of two with the same blocks, for one strip of tokens or two. The sums of the
// blocks before are taken up again.
template <int Groups, int Strips, class Tiles>
SPARTA_INLINE void multiply_bf16_chunk(Tiles& tiles, const uint32_t* offsets, const uint16_t* const (&values)[2],
                                       int64_t begin, int64_t end, const int32_t* x, int64_t strip, int64_t tile,
                                       float* y, const uint16_t* const (&later)[2]) {
  constexpr bool kTwo = Strips == 2;
  float* lower = y + kTileRows * tile;
  if (begin == 0) {
    tiles.template clear<0>();
    if constexpr (kTwo) tiles.template clear<1>();
    if constexpr (Groups == 2) tiles.template clear<2>();
    if constexpr (Groups == 2 && kTwo) tiles.template clear<3>();
  } else {
    tiles.template load<0>(y, tile);
    if constexpr (kTwo) tiles.template load<1>(y + kTileTokens, tile);
    if constexpr (Groups == 2) tiles.template load<2>(lower, tile);
    if constexpr (Groups == 2 && kTwo) tiles.template load<3>(lower + kTileTokens, tile);
  }
  for (int64_t i = begin; i < end; ++i) {
    const int32_t* from = place_at(x, offsets[i]);
#pragma GCC unroll 4
    for (int line = 0; line < kLinesAhead; ++line) {
      __builtin_prefetch(later[0] + ((i - begin) * kLinesAhead + line) * kLineValues, 0, 2);
      if constexpr (Groups == 2) __builtin_prefetch(later[1] + ((i - begin) * kLinesAhead + line) * kLineValues, 0, 2);
    }
    tiles.template load_weights<0>(values[0] + i * kTileValues);
    tiles.template load_tokens<0>(from);
    tiles.template multiply<0, 0, 0>();
    if constexpr (kTwo) {
      tiles.template load_tokens<1>(from + strip);
      tiles.template multiply<1, 0, 1>();
    }
    if constexpr (Groups == 2) {
      tiles.template load_weights<1>(values[1] + i * kTileValues);
      tiles.template multiply<2, 1, 0>();
      if constexpr (kTwo) tiles.template multiply<3, 1, 1>();
    }
  }
  tiles.template store<0>(y, tile);
  if constexpr (kTwo) tiles.template store<1>(y + kTileTokens, tile);
  if constexpr (Groups == 2) tiles.template store<2>(lower, tile);
  if constexpr (Groups == 2 && kTwo) tiles.template store<3>(lower + kTileTokens, tile);
}

// All blocks of one group, or of two, for all tokens of a tile.
template <int Groups, class Tiles>
void multiply_bf16_groups(Tiles& tiles, const Bf16Task& task, int64_t group) {
  const PanelMatrix& matrix = *task.matrix;
  const int64_t first = matrix.starts[group], blocks = matrix.starts[group + 1] - first;
  const int64_t strips = ceil_div(task.tokens, kTileTokens), strip = bf16_places(matrix.inputs) * kTileTokens;
  const uint16_t* all = reinterpret_cast<const uint16_t*>(matrix.values);
  const uint16_t* const values[2] = {all + first * kTileValues, all + (first + blocks) * kTileValues};
  float* y = task.y + (matrix.rows[group] - task.first_row) * task.tile;
  for (int64_t begin = 0; begin < std::max<int64_t>(blocks, 1); begin += kBlocksOfChunk) {
    const int64_t end = std::min(begin + kBlocksOfChunk, blocks);
    for (int64_t at = 0; at < strips; at += 2) {
      const int32_t* x = task.x + at * strip;
      float* to = y + at * kTileTokens;
      // The next chunk, or what the next groups begin with, is asked for in parts, one for each pair of strips.
      const int64_t part = at / 2 % 4 * kBlocksOfChunk * kLinesAhead * kLineValues;
      const uint16_t* next = end < blocks ? values[0] + end * kTileValues : values[Groups - 1] + blocks * kTileValues;
      const uint16_t* const later[2] = {next + part, next + blocks * kTileValues + part};
      const uint32_t* offsets = matrix.offsets + first;
      if (at + 1 < strips) {
        multiply_bf16_chunk<Groups, 2>(tiles, offsets, values, begin, end, x, strip, task.tile, to, later);
      } else {
        multiply_bf16_chunk<Groups, 1>(tiles, offsets, values, begin, end, x, strip, task.tile, to, later);
      }
    }
  }
}

// Whether the blocks of a group and the next one stand at the same channels.
inline bool same_blocks(const PanelMatrix& matrix, int64_t group) {
  const int64_t first = matrix.starts[group], next = matrix.starts[group + 1], count = next - first;
  return matrix.starts[group + 2] - next == count &&
         std::equal(matrix.offsets + first, matrix.offsets + next, matrix.offsets + next);
}

template <class Tiles>
void multiply_bf16_blocks(const Bf16Task& task) {
  Tiles tiles;
  for (int64_t group = task.group_begin; group < task.group_end;) {
    if (group + 1 < task.group_end && same_blocks(*task.matrix, group)) {
      multiply_bf16_groups<2>(tiles, task, group);
      group += 2;
    } else {
      multiply_bf16_groups<1>(tiles, task, group);
      group += 1;
    }
  }
}

// Pairs of 16 rows have two offsets for each entry, as those of fewer rows; blocks have one.
constexpr int32_t kGathered = 2;

inline bool knows_bf16(const PanelMatrix& matrix) {
  if (matrix.mv < 1 || matrix.chunks != 1 || matrix.mv * kLanes % kTileTokens != 0) return false;
  return matrix.bn == kTileRows || matrix.bn == 1 || matrix.bn == 4;
}

inline void multiply_bf16_rows(const Bf16Task& task) {
  if (task.matrix->bn == kTileRows) {
    const bool gathers = task.matrix->interleave == kGathered;
#if defined(SPARTA_AMX)
    if (has_tiles()) {
      return gathers ? multiply_bf16_gathered<NativeTiles>(task) : multiply_bf16_blocks<NativeTiles>(task);
    }
#endif
    return gathers ? multiply_bf16_gathered<PlainTiles>(task) : multiply_bf16_blocks<PlainTiles>(task);
  }
  const int64_t vectors = ceil_div(task.tokens, kLanes);
  for (int64_t at = 0; at < vectors; at += 4) {
    Bf16Task part = task;
    part.first_vector = at;
    bf16_pairs(task.matrix->bn, std::min<int64_t>(vectors - at, 4))(part);
  }
}

// Finishes rows of results as places of a panel; `channel` is even.
template <Activation Act>
inline void finish_bf16_rows(const float* results, int64_t tile, int64_t channel, int64_t rows, int64_t vectors,
                             int64_t places, const float* bias, int32_t* panel) {
  for (int64_t row = 0; row < rows; row += 2) {
    const bool both = row + 1 < rows;
    const Vec first = splat(bias ? bias[channel + row] : -0.0f);
    const Vec second = splat(bias && both ? bias[channel + row + 1] : -0.0f);
    int32_t* to = panel + (channel + row) / 2 * kTileTokens;
    for (int64_t j = 0; j < vectors; ++j) {
      const float* from = results + row * tile + j * kLanes;
      const Vec low = activate<Act>(load(from) + first);
      const Vec high = both ? activate<Act>(load(from + tile) + second) : Vec{};
      const IntVec pair = joined_halves(activate_last<Act>(low), activate_last<Act>(high));
      std::memcpy(to + vector_start(j, places), &pair, sizeof pair);
    }
  }
}

// The blocks of rows [begin, end) of one tile of tokens; false when memory ran out.
inline bool multiply_bf16_tile(const PanelMatrix& matrix, const PanelCall& call, int64_t index, int64_t begin,
                               int64_t end) {
  static thread_local Scratch input_scratch, results_scratch;
  const int64_t tile = matrix.mv * kLanes, tokens = std::min(tile, call.tokens - index * tile);
  const int64_t places = bf16_places(matrix.inputs), out_places = bf16_places(matrix.channels);
  const int32_t* x = reinterpret_cast<const int32_t*>(call.x) + index * places * tile;
  float* results = results_scratch.get(kBlocksTogether * kBlockRows * tile);
  if (!results) return false;
  if (!call.x_is_panel) {
    int32_t* packed = reinterpret_cast<int32_t*>(input_scratch.get(std::max<int64_t>(places, 1) * tile));
    if (!packed) return false;
    pack_bf16_rows(call.x + index * tile * call.x_stride, call.x_stride, tokens, matrix.inputs, packed);
    x = packed;
  }
  int32_t* panel = call.y_is_panel ? reinterpret_cast<int32_t*>(call.y) + index * out_places * tile : nullptr;
  Epilogue epilogue{call.bias, call.residual, call.residual_stride, call.activation};
  if (call.residual) epilogue.residual += index * tile * call.residual_stride;
  const int64_t groups_each = kBlockRows / matrix.bn;
  for (int64_t block = begin; block < end; block += kBlocksTogether) {
    const int64_t blocks = std::min(kBlocksTogether, end - block), row = block * kBlockRows;
    const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
    multiply_bf16_rows({&matrix, block * groups_each, std::min((block + blocks) * groups_each, matrix.groups), x,
                        results, row, tile, tokens, 0});
    with_activation(call.activation, [&](auto tag) {
      constexpr Activation act = decltype(tag)::value;
      if (panel) {
        finish_bf16_rows<act>(results, tile, row, rows, ceil_div(tokens, kLanes), out_places, call.bias, panel);
      } else {
        unpack_rows<act>(results, tile, row, rows, tokens, epilogue, call.y + index * tile * call.y_stride,
                         call.y_stride);
      }
    });
  }
  if (panel && end == ceil_div(matrix.channels, kBlockRows)) {
    const int64_t used = ceil_div(matrix.channels, 2) * kTileTokens, strip = out_places * kTileTokens;
    for (int64_t at = 0; at < ceil_div(tokens, kTileTokens); ++at) {
      std::fill(panel + at * strip + used, panel + (at + 1) * strip, 0);
    }
  }
  return true;
}

// x and y are fp32, token-major, or panels of bf16; a panel of results takes no residual.
inline bool multiply_bf16(const PanelMatrix& matrix, const PanelCall& call) {
  const int64_t tiles = ceil_div(call.tokens, matrix.mv * kLanes);
  return share_tiles(matrix, tiles, call.threads, [&](int64_t tile, int64_t begin, int64_t end) {
    return multiply_bf16_tile(matrix, call, tile, begin, end);
  });
}

}  // namespace sparta
