// A dense layer and the pooling that reads it, computed together: some rows of all channels are written to memory that
// stays near, and the windows are reduced there. The first layers of many networks are these two, and what lies between
// them is the largest image of all.
#pragma once

#include <vector>

#include "dense_conv.h"
#include "pool.h"

namespace sparta {

constexpr int64_t kPooledBytes = 256 * 1024;       // of a band of what lies between
constexpr int64_t kLeastPooledBytes = 256 * 1024;  // of an image that is worth it

// Rows that one row of windows reads.
inline int64_t window_rows(const PoolCall& call) { return (call.kernel_rows - 1) * call.dilation_rows + 1; }

// Rows of windows in a band.
inline int64_t pooled_rows(const DenseConvCall& first, const PoolCall& second) {
  const int64_t each = first.outputs * second.columns * static_cast<int64_t>(sizeof(float));
  return std::max<int64_t>((kPooledBytes / each - window_rows(second)) / second.stride_rows + 1, 1);
}

// Whether the second layer reads what the first writes, and both can run band by band. What the second writes must not
// lie where the first still reads. Bands are cut between rows, so rows are whole vectors.
inline bool is_pooled(const DenseConvCall& first, const PoolCall& second) {
  const ConvCall& conv = first.conv;
  const int64_t between = first.outputs * conv.out_rows * conv.out_columns;
  return first.groups == 1 && !first.winograd && !conv.residual && !conv.direct && conv.out_columns % kLanes == 0 &&
         second.planes == conv.images * first.outputs && second.rows == conv.out_rows &&
         second.columns == conv.out_columns && between * static_cast<int64_t>(sizeof(float)) >= kLeastPooledBytes &&
         !overlap(second.y, second.planes * second.out_rows * second.out_columns, conv.x,
                  conv.images * conv.x_strides[0]);
}

// The bands of one thread, one after the other: rows of the first layer that the next band reads too are kept.
class PooledBands {
 public:
  PooledBands(const DenseConvCall& first, const PoolCall& second)
      : first_(first), second_(second), line_(kind_, second), most_(pooled_rows(first, second)),
        slot_rows_(static_cast<size_t>(first.conv.slots)) {}

  // False when memory ran out.
  bool prepare(Scratch& band, Scratch& kept, Scratch& line) {
    const int64_t each = first_.outputs * second_.columns;
    band_ = band.get(each * ((most_ - 1) * second_.stride_rows + window_rows(second_)) + kLanes);
    kept_ = kept.get(each * window_rows(second_));
    return band_ && kept_ && line_.prepare(line);
  }

  // Rows [begin, end) of the windows of all images.
  bool run(int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t image = at / second_.out_rows, row = at % second_.out_rows;
      const int64_t row_end = std::min({row + most_, row + end - at, second_.out_rows});
      if (at == begin || row == 0) from_ = std::max<int64_t>(top(row), 0), kept_rows_ = 0;
      const int64_t to = std::max(std::min(top(row_end - 1) + window_rows(second_), second_.rows), from_);
      if (to > from_ && !multiply(image, to)) return false;
      reduce(image, row, row_end, to);
      keep(row_end, to);
      at += row_end - row;
    }
    return true;
  }

 private:
  int64_t top(int64_t row) const { return row * second_.stride_rows - second_.padding_rows; }

  // Rows up to `to` of the first layer.
  bool multiply(int64_t image, int64_t to) {
    DenseConvCall part = first_;
    for (size_t i = 0; i < slot_rows_.size(); ++i) {
      slot_rows_[i] = first_.conv.slot_rows[i] + static_cast<int32_t>(from_ * first_.conv.stride_rows);
    }
    part.conv.slot_rows = slot_rows_.data();
    part.conv.images = 1;
    part.conv.x = first_.conv.x + image * first_.conv.x_strides[0];
    part.conv.y = band_;
    part.conv.out_rows = to - from_;
    part.tiles = ceil_div((to - from_) * second_.columns, part.mv * kLanes);
    return multiply_dense_share(part, 0, part.tiles * dense_parts(part));
  }

  void reduce(int64_t image, int64_t row, int64_t row_end, int64_t to) const {
    const int64_t columns = second_.columns, rows = to - from_, before = from_ - kept_rows_;
    for (int64_t channel = 0; channel < first_.outputs; ++channel) {
      const float* band = band_ + channel * rows * columns;
      const float* kept = kept_ + channel * window_rows(second_) * columns;
      const auto row_at = [&](int64_t at) {
        return at < from_ ? kept + (at - before) * columns : band + (at - from_) * columns;
      };
      float* y = second_.y + (image * first_.outputs + channel) * second_.out_rows * second_.out_columns;
      for (int64_t i = row; i < row_end; ++i) line_.run(row_at, i, y + i * second_.out_columns);
    }
  }

  // What the band after `row_end` reads of rows up to `to`. Rows of windows that overlap by more than a band
  // move up.
  void keep(int64_t row_end, int64_t to) {
    const int64_t first = std::max<int64_t>(top(row_end), 0), columns = second_.columns;
    const int64_t rows = std::max<int64_t>(to - first, 0), before = from_ - kept_rows_;
    for (int64_t channel = 0; channel < first_.outputs; ++channel) {
      const float* band = band_ + channel * (to - from_) * columns;
      float* kept = kept_ + channel * window_rows(second_) * columns;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = first + i;
        const float* from = at < from_ ? kept + (at - before) * columns : band + (at - from_) * columns;
        std::memmove(kept + i * columns, from, static_cast<size_t>(columns) * sizeof(float));
      }
    }
    from_ = std::max(to, first);
    kept_rows_ = rows;
  }

  const DenseConvCall& first_;
  const PoolCall& second_;
  const RealPool kind_ = {};
  PoolLine<RealPool> line_;
  const int64_t most_;
  std::vector<int32_t> slot_rows_;
  float* band_ = nullptr;
  float* kept_ = nullptr;
  int64_t from_ = 0;       // the first row that is not computed yet
  int64_t kept_rows_ = 0;  // before it
};

// False when memory ran out. What lies between the layers is not stored.
inline bool multiply_pooled(const DenseConvCall& first, const PoolCall& second) {
  const int64_t rows = first.conv.images * second.out_rows;
  bool enough_memory = true;
  parallel(first.conv.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch band, kept, line;
    PooledBands bands(first, second);
    if (bands.prepare(band, kept, line) && bands.run(rows * index / count, rows * (index + 1) / count)) return;
#pragma omp atomic write
    enough_memory = false;
  });
  return enough_memory;
}

}  // namespace sparta
