// Convolutions over images that are cut into a grid of regions, one for each lane. A vector then holds one pixel of every
// region, so the shift of a tap is a whole number of vectors, and no load crosses two cache lines. Regions are copied with
// the pixels around them that their taps read; copies and results are transposed in registers.
#pragma once

#include "bands.h"

namespace sparta {

// The regions: `columns` of them side by side, each of `height` x `width` output pixels.
struct Grid {
  int64_t columns;
  int64_t height;
  int64_t width;
  explicit Grid(const ConvCall& call)
      : columns(call.grid_columns),
        height(ceil_div(call.out_rows, kLanes / call.grid_columns)),
        width(ceil_div(call.out_columns, call.grid_columns)) {}
  int64_t row_of(int64_t lane) const { return lane / columns * height; }
  int64_t column_of(int64_t lane) const { return lane % columns * width; }
};

// A band is some rows of all regions of an image: `first` is a row, not a token.
inline int64_t grid_bands_of(const ConvCall& call) { return ceil_div(Grid(call).height, call.band_tokens / call.row_width); }

inline Band grid_band_of(const ConvCall& call, int64_t index) {
  const int64_t bands = grid_bands_of(call), part = index % bands, height = Grid(call).height;
  const int64_t first = height * part / bands;
  return {index / bands, first, height * (part + 1) / bands - first};
}

// Some columns of one row of a region: what is inside the image.
struct GridRun {
  int64_t from;  // of the first column in its channel of the input
  int64_t begin;
  int64_t end;
  LaneMask lanes;
};

// For every kLanes columns of every row of a band, the runs of all regions.
inline void find_grid_runs(const ConvCall& call, const Band& band, int64_t slot, std::vector<GridRun>& runs) {
  runs.clear();
  const Grid grid(call);
  for (int64_t row = 0; row < band.tokens + call.reach / call.row_width; ++row) {
    for (int64_t column = 0; column < call.row_width; column += kLanes) {
      const int64_t count = std::min<int64_t>(call.row_width - column, kLanes);
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t from_row = (grid.row_of(lane) + band.first + row) * call.stride_rows + call.slot_rows[slot];
        const int64_t from = (grid.column_of(lane) + column) * call.stride_columns + call.slot_columns[slot];
        int64_t begin = from >= 0 ? 0 : ceil_div(-from, call.stride_columns);
        int64_t end = from >= call.in_columns ? 0 : ceil_div(call.in_columns - from, call.stride_columns);
        end = from_row < 0 || from_row >= call.in_rows ? 0 : std::min(end, count);
        begin = std::min(begin, end);
        runs.push_back({from_row * call.x_strides[2] + from * call.x_strides[3], begin, end, lane_mask(begin, end)});
      }
    }
  }
}

// The values of a run, `step` apart.
SPARTA_INLINE Vec load_run(const float* image, const GridRun& run, int64_t step) {
  if (step == 1) return load_lanes(image + run.from, run.lanes);
  if (step == 2 && kPacksByTwo) return load_lanes_by_two(image + run.from, run.lanes);
  float values[kLanes] = {};
  for (int64_t i = run.begin; i < run.end; ++i) values[i] = image[run.from + i * step];
  return load(values);
}

// Fills one slot of a band, channel by channel.
inline void pack_grid(const ConvCall& call, const Band& band, int64_t slot, float* planes) {
  static thread_local std::vector<GridRun> runs;
  find_grid_runs(call, band, slot, runs);
  const uint8_t* used = call.used + slot * call.in_channels;
  const int64_t step = call.stride_columns * call.x_strides[3];
  const int64_t rows = band.tokens + call.reach / call.row_width;
  for (int64_t channel = 0; channel < call.in_channels; ++channel) {
    if (!used[channel]) continue;
    const float* image = call.x + band.image * call.x_strides[0] + channel * call.x_strides[1];
    float* plane = planes + channel * call.plane;
    const GridRun* run = runs.data();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < call.row_width; column += kLanes, run += kLanes) {
        Vec square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = load_run(image, run[i], step);
        transpose(square);
        float* to = plane + (row * call.row_width + column) * kLanes;
        const int64_t count = std::min<int64_t>(call.row_width - column, kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          if (i < count) store(to + i * kLanes, square[i]);
        }
      }
    }
  }
}

// Stores one row of all regions, for some output channels, through the epilogue. `sums` hold `width` vectors for each
// channel; y and residual are at the first of these channels.
template <Activation Act>
inline void store_regions(const ConvCall& call, int64_t region_row, const float* sums, int64_t stride, int64_t channels,
                          const float* bias, const float* residual, float* y) {
  const Grid grid(call);
  const int64_t plane = y_plane(call);
  for (int64_t channel = 0; channel < channels; ++channel) {
    const Vec shift = splat(bias ? bias[channel] : -0.0f);  // adding -0 changes nothing, not even a -0
    for (int64_t column = 0; column < grid.width; column += kLanes) {
      const int64_t count = std::min<int64_t>(grid.width - column, kLanes);
      const float* from = sums + channel * stride + column * kLanes;
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = i < count ? load(from + i * kLanes) : Vec{};
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = grid.row_of(i) + region_row, first = grid.column_of(i) + column;
        const int64_t pixels = std::min(count, call.out_columns - first);
        if (row >= call.out_rows || pixels <= 0) continue;
        const int64_t at = channel * plane + row * call.out_columns + first;
        Vec sum = activate<Act>(square[i] + shift);
        if (residual) sum += load_some(residual + at, pixels);
        store_some(y + at, activate_last<Act>(sum), pixels);
      }
    }
  }
}

// The sums of one row of all regions in the blocks of output channels [first, last).
inline void multiply_region_row(const PanelMatrix& matrix, const float* x, int64_t width, float* sums, int64_t first,
                                int64_t last) {
  const int64_t groups_each = kBlockRows / matrix.bn, tiles = ceil_div(width, matrix.mv);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = width * i / tiles * kLanes, vectors = width * (i + 1) / tiles - width * i / tiles;
    const RowsKernel kernel = find_kernel(matrix.bn, vectors, matrix.interleave, matrix.prefetch > 0);
    for (int64_t chunk = 0; chunk < matrix.chunks; ++chunk) {
      kernel(RowsTask{&matrix, chunk, first * groups_each, std::min(last * groups_each, matrix.groups), x + begin,
                      sums + begin, first * kBlockRows, width * kLanes, nullptr});
    }
  }
}

// The blocks of output channels [first, last) of one band; false when memory ran out.
inline bool multiply_grid_band(const PanelMatrix& matrix, const ConvCall& call, int64_t index, int64_t first,
                               int64_t last) {
  static thread_local Scratch image_scratch, sums_scratch;
  const Band band = grid_band_of(call, index);
  const Grid grid(call);
  const int64_t slot_floats = call.in_channels * call.plane, stride = grid.width * kLanes;
  float* image = image_scratch.get(call.slots * slot_floats + kLanes);  // never nothing
  float* sums = sums_scratch.get((last - first) * kBlockRows * stride);
  if (!image || !sums) return false;
  for (int64_t slot = 0; slot < call.slots; ++slot) pack_grid(call, band, slot, image + slot * slot_floats);
  const int64_t channel = first * kBlockRows, channels = std::min(last * kBlockRows, matrix.channels) - channel;
  const int64_t at = (band.image * matrix.channels + channel) * y_plane(call);
  const float* bias = call.bias ? call.bias + channel : nullptr;
  for (int64_t row = 0; row < band.tokens; ++row) {
    multiply_region_row(matrix, image + row * call.row_width * kLanes, grid.width, sums, first, last);
    with_activation(call.activation, [&](auto tag) {
      store_regions<decltype(tag)::value>(call, band.first + row, sums, stride, channels, bias,
                                          call.residual ? call.residual + at : nullptr, call.y + at);
    });
  }
  return true;
}

}  // namespace sparta
