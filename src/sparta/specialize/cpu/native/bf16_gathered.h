// Products in bf16 by the tile registers of AMX for groups of 16 rows that share one list of pairs of channels, one even and
// one odd. The 16 pairs that belong to a tile of weights are gathered into a buffer, so that blocks as narrow as one
// channel pay where 16 rows leave many channels empty.
#pragma once

#include "bf16_panel.h"

namespace sparta {

constexpr uint32_t kNoPlace = 0xffffffffu;

// Sixteen pairs of one strip, as a tile of tokens. Of the last ones, some may be there only to fill the tile: they are 0,
// because a weight of 0 times what is no number would be none either.
template <bool Last>
SPARTA_INLINE void gather_pairs(const int32_t* x, const uint32_t* offsets, int32_t* to) {
#pragma GCC unroll 16
  for (int64_t place = 0; place < kTileRows; ++place) {
    const bool there = !Last || offsets[2 * place] != kNoPlace;
#pragma GCC unroll 4
    for (int64_t t = 0; t < kTileTokens; t += kLanes) {
      const IntVec pair = there ? load_halves(place_at(x, offsets[2 * place]) + t, place_at(x, offsets[2 * place + 1]) + t)
                                : IntVec{};
      std::memcpy(to + place * kTileTokens + t, &pair, sizeof pair);
    }
  }
}

// One group of 16 rows for a few strips. The next pairs are gathered before those of now are multiplied, because what was
// just stored cannot be loaded at once.
template <int Strips, class Tiles>
SPARTA_INLINE void multiply_bf16_gathers(Tiles& tiles, const uint32_t* offsets, const uint16_t* values, int64_t chunks,
                                         const int32_t* x, int64_t strip, int64_t tile, float* y) {
  constexpr int64_t kTileInts = kTileRows * kTileTokens;
  alignas(64) int32_t gathered[2][Strips * kTileInts];
  const auto gather = [&](int64_t chunk) SPARTA_LAMBDA {
    const uint32_t* from = offsets + chunk * kTileInputs;
    for (int64_t s = 0; s < Strips; ++s) {
      int32_t* to = gathered[chunk % 2] + s * kTileInts;
      chunk + 1 < chunks ? gather_pairs<false>(x + s * strip, from, to) : gather_pairs<true>(x + s * strip, from, to);
    }
  };
  each<Strips>([&](auto s) SPARTA_LAMBDA { tiles.template clear<s>(); });
  if (chunks > 0) gather(0);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) gather(chunk + 1);
    tiles.template load_weights<0>(values + chunk * kTileValues);
    each<Strips>([&](auto s) SPARTA_LAMBDA {
      tiles.template load_tokens<s % 2>(gathered[chunk % 2] + s * kTileInts);
      tiles.template multiply<s, 0, s % 2>();
    });
  }
  each<Strips>([&](auto s) SPARTA_LAMBDA { tiles.template store<s>(y + s * kTileTokens, tile); });
}

template <class Tiles>
void multiply_bf16_gathered(const Bf16Task& task) {
  const PanelMatrix& matrix = *task.matrix;
  const int64_t strips = ceil_div(task.tokens, kTileTokens), strip = bf16_places(matrix.inputs) * kTileTokens;
  Tiles tiles;
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    const int64_t first = matrix.starts[group], chunks = (matrix.starts[group + 1] - first) / kTileRows;
    const uint32_t* offsets = matrix.offsets + 2 * first;
    const uint16_t* values = reinterpret_cast<const uint16_t*>(matrix.values) + first * kTileInputs;
    for (int64_t at = 0; at < strips; at += 4) {
      const int32_t* x = task.x + at * strip;
      float* y = task.y + (matrix.rows[group] - task.first_row) * task.tile + at * kTileTokens;
      switch (std::min<int64_t>(strips - at, 4)) {
        case 1: multiply_bf16_gathers<1>(tiles, offsets, values, chunks, x, strip, task.tile, y); break;
        case 2: multiply_bf16_gathers<2>(tiles, offsets, values, chunks, x, strip, task.tile, y); break;
        case 3: multiply_bf16_gathers<3>(tiles, offsets, values, chunks, x, strip, task.tile, y); break;
        default: multiply_bf16_gathers<4>(tiles, offsets, values, chunks, x, strip, task.tile, y);
      }
    }
  }
}

}  // namespace sparta
