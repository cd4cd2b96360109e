// Dense convolutions of 3x3 taps with fewer products, as Winograd found them: four neighbouring pixels of the output are
// computed from a tile of 4x4 of the input with 16 products instead of 36. Tiles and weights are transformed by sums,
// multiplied place by place (16 products of matrices, with the kernels of dense_conv.h), and transformed back. Numbers
// that are not finite would spread over a tile; where a result is not finite, all of it is computed directly instead.
// The error is that of sums over a whole tile: a pixel of 1e8 beside small ones is felt by its neighbours, at 1e8 times the
// precision of a float, even where its weight is 0.
#pragma once

#include "few_channels.h"

namespace sparta {

// How a layer is computed so. Tiles are the tokens of a convolution with 4x4 taps and strides of 2, copied as bands.
struct WinogradPlan {
  ConvCall tiles;        // of images, with kTileChannels channels
  int64_t chunk;         // input channels that are multiplied together
  uint32_t offsets[16];  // bytes from a token to each of the values of its tile
};

constexpr int64_t kTileChannels = 32;  // that are copied and transformed together
constexpr int64_t kWinogradPlaces = 16;

// A band of tiles, and where its parts lie.
struct TileBand {
  Band band;
  int64_t vectors;
  int64_t tail;    // tiles behind the vectors
  int64_t stride;  // floats between two rows of sums

  int64_t panel_floats(int64_t channels) const { return channels * (vectors * kLanes + tail); }
};

// One image, cut into bands as dense_conv.h cuts its tokens into tiles.
inline TileBand tile_band(const DenseConvCall& call, const WinogradPlan& plan, int64_t index) {
  const int64_t tokens = plan.tiles.out_rows * plan.tiles.out_columns, most = call.mv * kLanes + (tokens % kLanes > 0);
  const int64_t bands = ceil_div(tokens, most), part = index % bands;
  const auto begin = [&](int64_t i) { return tokens % kLanes ? tokens * i / bands : tokens / kLanes * i / bands * kLanes; };
  const int64_t first = begin(part), count = begin(part + 1) - first, rest = count % kLanes;
  const bool tail = count > kLanes && rest <= kMostTail;
  const int64_t vectors = tail ? count / kLanes : ceil_div(count, kLanes);
  return {{index / bands, first, count}, vectors, tail ? rest : 0, (vectors + 1) * kLanes};
}

inline int64_t tile_bands(const DenseConvCall& call, const WinogradPlan& plan) {
  const int64_t tokens = plan.tiles.out_rows * plan.tiles.out_columns;
  return ceil_div(tokens, call.mv * kLanes + (tokens % kLanes > 0));
}

// The values of 16 (or 8, or 4) tiles of one channel, one vector each, transformed in place.
SPARTA_INLINE void transform_tiles(Vec (&d)[kWinogradPlaces]) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const Vec a = d[c] - d[8 + c], b = d[4 + c] + d[8 + c], e = d[8 + c] - d[4 + c], f = d[4 + c] - d[12 + c];
    d[c] = a;
    d[4 + c] = b;
    d[8 + c] = e;
    d[12 + c] = f;
  }
#pragma GCC unroll 4
  for (int r = 0; r < 16; r += 4) {
    const Vec a = d[r] - d[r + 2], b = d[r + 1] + d[r + 2], e = d[r + 2] - d[r + 1], f = d[r + 1] - d[r + 3];
    d[r] = a;
    d[r + 1] = b;
    d[r + 2] = e;
    d[r + 3] = f;
  }
}

// The transformed tiles of one channel, to the panels of all 16 values.
inline void put_channel(const WinogradPlan& plan, const TileBand& band, const float* x, int64_t channel,
                        int64_t channels, float* panels) {
  const int64_t floats = band.panel_floats(channels), row = channel * band.vectors * kLanes;
  const int64_t tails = channels * band.vectors * kLanes + channel * band.tail;
  for (int64_t j = 0; j < band.vectors + (band.tail > 0); ++j) {
    Vec d[kWinogradPlaces];
#pragma GCC unroll 16
    for (int i = 0; i < kWinogradPlaces; ++i) d[i] = load(at_offset(x + j * kLanes, plan.offsets[i]));
    transform_tiles(d);
    if (j < band.vectors) {
#pragma GCC unroll 16
      for (int i = 0; i < kWinogradPlaces; ++i) store(panels + i * floats + row + j * kLanes, d[i]);
    } else {
      for (int i = 0; i < kWinogradPlaces; ++i) store_some(panels + i * floats + tails, d[i], band.tail);
    }
  }
}

// All channels of a band; false when memory ran out.
inline bool put_tiles(const DenseConvCall& call, const WinogradPlan& plan, const TileBand& band, float* panels) {
  static thread_local Scratch scratch;
  const int64_t slot_floats = kTileChannels * plan.tiles.plane, channels = call.conv.in_channels;
  float* copy = scratch.get(plan.tiles.slots * slot_floats + kMostTokens);
  if (!copy) return false;
  ConvCall part = plan.tiles;
  for (int64_t channel = 0; channel < channels; channel += kTileChannels) {
    part.in_channels = std::min(kTileChannels, channels - channel);
    part.x = call.conv.x + channel * part.x_strides[1];
    for (int64_t slot = 0; slot < part.slots; ++slot) pack_slot(part, band.band, slot, copy + slot * slot_floats);
    for (int64_t i = 0; i < part.in_channels; ++i) {
      put_channel(plan, band, copy + i * part.plane, channel + i, channels, panels);
    }
  }
  return true;
}

// Blocks [first, last) of rows of all 16 products; sums are [16][rows][stride]. The transformed weight is laid out as
// [16][chunks][blocks of bn rows][channels of the chunk][bn].
inline void multiply_tiles(const DenseConvCall& call, const WinogradPlan& plan, const TileBand& band,
                           const float* panels, int64_t first, int64_t last, float* sums) {
  const int64_t blocks = ceil_div(call.outputs, call.bn), channels = call.conv.in_channels, row = first * call.bn;
  const int64_t floats = band.panel_floats(channels), width = band.vectors * kLanes, rows = (last - first) * call.bn;
  const DenseKernel kernel = find_dense_kernel(call.bn, band.vectors, band.tail, true);
  for (int64_t i = 0; i < kWinogradPlaces; ++i) {
    float* y = sums + i * rows * band.stride - row * band.stride;
    for (int64_t channel = 0; channel < channels; channel += plan.chunk) {
      const float* panel = panels + i * floats + channel * width;
      const float* tails = panels + i * floats + channels * width + channel * band.tail;
      const float* values = call.winograd_values + (i * channels + channel) * blocks * call.bn;
      kernel(DenseRows{panel, tails, nullptr, nullptr, values, std::min(plan.chunk, channels - channel), first, last,
                       call.outputs, y, band.stride, kLanes, channel > 0, nullptr});
    }
  }
}

// Tiles that stand side by side in the image.
struct TileRun {
  int64_t first;   // in the band
  int64_t count;
  int64_t row;     // of tiles
  int64_t column;
};

inline int64_t find_runs(const WinogradPlan& plan, const TileBand& band, TileRun (&runs)[kMostTokens]) {
  int64_t found = 0;
  for (int64_t at = 0; at < band.band.tokens;) {
    const int64_t token = band.band.first + at, column = token % plan.tiles.out_columns;
    const int64_t count = std::min(plan.tiles.out_columns - column, band.band.tokens - at);
    runs[found++] = {at, count, token / plan.tiles.out_columns, column};
    at += count;
  }
  return found;
}

template <int... Lane>
SPARTA_INLINE void store_interleaved(Vec a, Vec b, float* to, std::integer_sequence<int, Lane...>) {
  store(to, SPARTA_SHUFFLE(a, b, (Lane / 2 + Lane % 2 * kLanes)...));
  store(to + kLanes, SPARTA_SHUFFLE(a, b, (kLanes / 2 + Lane / 2 + Lane % 2 * kLanes)...));
}

// The two rows of pixels of a row of tiles, of one output channel; returns 0, or NaN where a result is not finite.
// Behind the vectors, only the sums of the tail were ever written: what lies after them is not looked at.
SPARTA_INLINE Vec pixels_of(const TileBand& band, const float* sums, int64_t step, float* even, float* odd) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  Vec finite = {};
  for (int64_t j = 0; j < band.vectors + (band.tail > 0); ++j) {
    Vec m[kWinogradPlaces];
#pragma GCC unroll 16
    for (int i = 0; i < kWinogradPlaces; ++i) {
      const float* from = sums + i * step + j * kLanes;
      m[i] = j < band.vectors ? load(from) : load_some(from, band.tail);
    }
    Vec upper[4], lower[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      upper[c] = m[c] + m[4 + c] + m[8 + c];
      lower[c] = m[4 + c] - m[8 + c] - m[12 + c];
    }
    const Vec a = upper[0] + upper[1] + upper[2], b = upper[1] - upper[2] - upper[3];
    const Vec e = lower[0] + lower[1] + lower[2], f = lower[1] - lower[2] - lower[3];
    finite += (a + b) * 0.0f + (e + f) * 0.0f;
    store_interleaved(a, b, even + 2 * j * kLanes, kAll);
    store_interleaved(e, f, odd + 2 * j * kLanes, kAll);
  }
  return finite;
}

// Rows [row, row + rows) of sums, through the epilogue; false where a result is not finite.
template <Activation Act>
inline bool store_tiles(const DenseConvCall& call, const TileBand& band, const TileRun* runs, int64_t count,
                        const float* sums, int64_t row, int64_t rows, int64_t step) {
  const ConvCall& conv = call.conv;
  const int64_t plane = conv.out_rows * conv.out_columns;
  float pixels[2][2 * kMostTokens + 2 * kLanes];
  Vec finite = {};
  for (int64_t r = 0; r < rows; ++r) {
    finite += pixels_of(band, sums + r * band.stride, step, pixels[0], pixels[1]);
    const Vec shift = splat(conv.bias ? conv.bias[row + r] : -0.0f);  // adding -0 changes nothing, not even a -0
    for (const TileRun* run = runs; run != runs + count; ++run) {
      const int64_t wide = std::min(2 * run->count, conv.out_columns - 2 * run->column);
      for (int64_t i = 0; i < std::min<int64_t>(2, conv.out_rows - 2 * run->row); ++i) {
        const int64_t at = (band.band.image * call.outputs + row + r) * plane +
                           (2 * run->row + i) * conv.out_columns + 2 * run->column;
        for (int64_t j = 0; j < wide; j += kLanes) {
          Vec sum = activate<Act>(load_some(pixels[i] + 2 * run->first + j, wide - j) + shift);
          if (conv.residual) sum += load_some(conv.residual + at + j, wide - j);
          store_some(conv.y + at + j, activate_last<Act>(sum), wide - j);
        }
      }
    }
  }
  return sum_of_lanes(finite) == 0.0f;
}

// The parts of rows [begin, end) of one band.
inline bool multiply_tile_band(const DenseConvCall& call, const WinogradPlan& plan, int64_t index, int64_t begin,
                               int64_t end) {
  static thread_local Scratch panel_scratch, sum_scratch;
  const TileBand band = tile_band(call, plan, index);
  const int64_t each = kBlockRows / call.bn, blocks = ceil_div(call.outputs, call.bn);
  float* panels = panel_scratch.get(kWinogradPlaces * band.panel_floats(call.conv.in_channels) + kLanes);
  float* sums = sum_scratch.get(kWinogradPlaces * kBlockRows * band.stride);
  if (!panels || !sums) return false;
  DenseConvCall one = call;
  one.conv.x += band.band.image * call.conv.x_strides[0];
  TileBand first = band;
  first.band.image = 0;
  if (!put_tiles(one, plan, first, panels)) return false;
  TileRun runs[kMostTokens];
  const int64_t count = find_runs(plan, band, runs);
  bool finite = true;
  for (int64_t part = begin; part < end && finite; ++part) {
    const int64_t from = part * each, to = std::min(from + each, blocks), row = from * call.bn;
    multiply_tiles(call, plan, band, panels, from, to, sums);
    with_activation(call.conv.activation, [&](auto tag) {
      finite = store_tiles<decltype(tag)::value>(call, band, runs, count, sums, row,
                                                 std::min(to * call.bn, call.outputs) - row,
                                                 (to - from) * call.bn * band.stride);
    });
  }
  return finite;
}

// False where a result is not finite, or when memory ran out.
inline bool multiply_winograd(const DenseConvCall& call, const WinogradPlan& plan) {
  const int64_t parts = ceil_div(ceil_div(call.outputs, call.bn), kBlockRows / call.bn);
  const int64_t units = call.conv.images * tile_bands(call, plan) * parts;
  bool done = true;
  parallel(call.conv.threads, [&](int64_t index, int64_t count) {
    const int64_t end = units * (index + 1) / count;
    for (int64_t at = units * index / count; at < end;) {
      const int64_t stop = std::min(end, (at / parts + 1) * parts), band = at / parts;
      if (!multiply_tile_band(call, plan, band, at - band * parts, stop - band * parts)) {
#pragma omp atomic write
        done = false;
        return;
      }
      at = stop;
    }
  });
  return done;
}

// A dense layer of images, in the way that its call says.
inline bool multiply_dense_images(const DenseConvCall& call) {
  if (call.winograd && multiply_winograd(call, *call.winograd)) return true;
  return reads_taps_in_place(call) ? multiply_few_channels(call) : multiply_dense_conv(call);
}

}  // namespace sparta
