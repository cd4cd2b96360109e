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

// The largest of each column of a window's rows, at `line`; rows outside of the image do not count. `row_at` tells where
// a row of the plane is.
template <class Kind, class RowAt>
inline void reduce_rows(const Kind& kind, const PoolCall& call, RowAt row_at, int64_t out_row, float* line) {
  const int64_t top = out_row * call.stride_rows - call.padding_rows, step = call.dilation_rows;
  const int64_t first = top < 0 ? ceil_div(-top, step) : 0;
  const int64_t last = top >= call.rows ? first : std::min(call.kernel_rows, (call.rows - 1 - top) / step + 1);
  if (last - first == 3) {  // the common window, with a row's address in a register each
    const float* rows[3] = {row_at(top + first * step), row_at(top + (first + 1) * step), row_at(top + (first + 2) * step)};
    for (int64_t column = 0; column < call.columns; column += kLanes) {
      const int64_t count = call.columns - column;
      Vec most = kind.read(load_some(rows[0] + column, count));
      most = Kind::larger(most, kind.read(load_some(rows[1] + column, count)));
      store_some(line + column, Kind::larger(most, kind.read(load_some(rows[2] + column, count))), count);
    }
    return;
  }
  for (int64_t column = 0; column < call.columns; column += kLanes) {
    const int64_t count = call.columns - column;
    Vec most = Kind::least();
    for (int64_t k = first; k < last; ++k) {
      most = Kind::larger(most, kind.read(load_some(row_at(top + k * step) + column, count)));
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

// Memory for one row of windows: its line, with the least value on both sides, and one result a column.
template <class Kind>
class PoolLine {
 public:
  PoolLine(const Kind& kind, const PoolCall& call)
      : kind_(kind), call_(call), width_((call.out_columns - 1) * call.stride_columns + 1),
        size_(std::max(width_ + (call.kernel_columns - 1) * call.dilation_columns,
                       call.padding_columns + call.columns) + 2 * kLanes) {}

  // False when memory ran out.
  bool prepare(Scratch& scratch) {
    line_ = scratch.get(size_ + width_ + kLanes);
    for (int64_t i = 0; line_ && i < size_; i += kLanes) store_some(line_ + i, Kind::least(), size_ - i);
    return line_ != nullptr;
  }

  template <class RowAt>
  void run(RowAt row_at, int64_t out_row, float* out) const {
    reduce_rows(kind_, call_, row_at, out_row, line_ + call_.padding_columns);
    reduce_columns(kind_, call_, line_, width_, line_ + size_, out);
  }

 private:
  const Kind& kind_;
  const PoolCall& call_;
  const int64_t width_;
  const int64_t size_;
  float* line_ = nullptr;
};

// False when memory ran out.
template <class Kind>
inline bool pool_largest(const Kind& kind, const PoolCall& call) {
  bool enough_memory = true;
  parallel(call.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    PoolLine<Kind> line(kind, call);
    if (!line.prepare(scratch)) {
#pragma omp atomic write
      enough_memory = false;
      return;
    }
    for (int64_t plane = call.planes * index / count; plane < call.planes * (index + 1) / count; ++plane) {
      const float* x = call.x + plane * call.rows * call.columns;
      float* y = call.y + plane * call.out_rows * call.out_columns;
      for (int64_t row = 0; row < call.out_rows; ++row) {
        line.run([&](int64_t at) { return x + at * call.columns; }, row, y + row * call.out_columns);
      }
    }
  });
  return enough_memory;
}

inline bool max_pool(const PoolCall& call) { return pool_largest(RealPool{}, call); }

}  // namespace sparta
