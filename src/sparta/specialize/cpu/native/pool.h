// The largest value of every window of an image, for the dense neighbours of sparse layers: without having to say where
// the value was, as training needs it, this is quick. A window is first reduced over its rows,
// then over its columns, in whole vectors; picking every stride-th result goes value by value, but for a stride of two
// where vectors of every second value are loaded at once.
#pragma once

#include <limits>

#include "bands.h"

namespace sparta {

// Contiguous planes (images times channels); padding counts as -inf.
struct PoolCall {
  const float* x;
  float* y;
  int64_t planes;
  int64_t rows;
  int64_t columns;
  int64_t out_rows;
  int64_t out_columns;
  int64_t kernel_rows;
  int64_t kernel_columns;
  int64_t stride_rows;
  int64_t stride_columns;
  int64_t padding_rows;
  int64_t padding_columns;
  int64_t dilation_rows;
  int64_t dilation_columns;
  int32_t threads;
};

// How real numbers are compared. NaN wins, as it does in PyTorch.
struct RealPool {
  static SPARTA_INLINE Vec least() { return splat(-std::numeric_limits<float>::infinity()); }
  SPARTA_INLINE Vec read(Vec v) const { return v; }
  static SPARTA_INLINE Vec larger(Vec a, Vec b) { return (b > a) | (b != b) ? b : a; }
  SPARTA_INLINE Vec written(Vec v) const { return v; }
};

// The largest of each column of a window's rows, at `line`; rows outside of the image do not count.
template <class Kind>
inline void reduce_rows(const Kind& kind, const PoolCall& call, const float* plane, int64_t out_row, float* line) {
  const int64_t top = out_row * call.stride_rows - call.padding_rows, step = call.dilation_rows;
  const int64_t first = top < 0 ? ceil_div(-top, step) : 0;
  const int64_t last = top >= call.rows ? first : std::min(call.kernel_rows, (call.rows - 1 - top) / step + 1);
  const float* row = plane + (top + first * step) * call.columns;
  const int64_t down = step * call.columns;
  for (int64_t column = 0; column < call.columns; column += kLanes, row += kLanes) {
    const int64_t count = call.columns - column;
    Vec most = Kind::least();
    if (last - first == 3) {  // the common window, without a loop
      most = Kind::larger(kind.read(load_some(row, count)), kind.read(load_some(row + down, count)));
      most = Kind::larger(most, kind.read(load_some(row + 2 * down, count)));
    } else {
      for (int64_t k = 0; k < last - first; ++k) {
        most = Kind::larger(most, kind.read(load_some(row + k * down, count)));
      }
    }
    store_some(line + column, most, count);
  }
}

// Results of neighbouring windows two columns apart, from every second value of a line.
template <class Kind>
inline void reduce_columns_by_two(const Kind& kind, const PoolCall& call, const float* line, float* out) {
  const LaneMask all = lane_mask(0, kLanes);
  for (int64_t column = 0; column < call.out_columns; column += kLanes) {
    const float* from = line + 2 * column;
    Vec most = load_lanes_by_two(from, all);
    for (int64_t k = 1; k < call.kernel_columns; ++k) {
      most = Kind::larger(most, load_lanes_by_two(from + k * call.dilation_columns, all));
    }
    store_some(out + column, kind.written(most), call.out_columns - column);
  }
}

// The largest of each window's columns: `line` has the least value on both sides of the image, `wide` takes one result a
// column.
template <class Kind>
inline void reduce_columns(const Kind& kind, const PoolCall& call, const float* line, int64_t width, float* wide,
                           float* out) {
  if (kPacksByTwo && call.stride_columns == 2) return reduce_columns_by_two(kind, call, line, out);
  for (int64_t column = 0; column < width; column += kLanes) {
    Vec most = load(line + column);
    for (int64_t k = 1; k < call.kernel_columns; ++k) {
      most = Kind::larger(most, load(line + column + k * call.dilation_columns));
    }
    store(wide + column, kind.written(most));
  }
  if (call.stride_columns == 2) {
    for (int64_t i = 0; i < call.out_columns; ++i) std::memcpy(out + i, wide + 2 * i, sizeof *out);  // vectorised
  } else {
    for (int64_t i = 0; i < call.out_columns; ++i) std::memcpy(out + i, wide + i * call.stride_columns, sizeof *out);
  }
}

// False when memory ran out.
template <class Kind>
inline bool pool_largest(const Kind& kind, const PoolCall& call) {
  const int64_t width = (call.out_columns - 1) * call.stride_columns + 1;
  const int64_t reach = (call.kernel_columns - 1) * call.dilation_columns;
  const int64_t line_size = std::max(width + reach, call.padding_columns + call.columns) + 2 * kLanes;
  bool enough_memory = true;
  parallel(call.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    float* line = scratch.get(line_size + width + kLanes);
    if (!line) {
#pragma omp atomic write
      enough_memory = false;
      return;
    }
    for (int64_t i = 0; i < line_size; i += kLanes) store_some(line + i, Kind::least(), line_size - i);
    for (int64_t plane = call.planes * index / count; plane < call.planes * (index + 1) / count; ++plane) {
      const float* x = call.x + plane * call.rows * call.columns;
      float* y = call.y + plane * call.out_rows * call.out_columns;
      for (int64_t row = 0; row < call.out_rows; ++row) {
        reduce_rows(kind, call, x, row, line + call.padding_columns);
        reduce_columns(kind, call, line, width, line + line_size, y + row * call.out_columns);
      }
    }
  });
  return enough_memory;
}

inline bool max_pool(const PoolCall& call) { return pool_largest(RealPool{}, call); }

}  // namespace sparta
