// A layer of single pixels and the depthwise one that reads it, computed together: some channels of a band of rows are
// written to memory that stays near, and the depthwise layer reads them there. In networks of inverted residuals what
// lies between these two is by far the largest image.
#pragma once

#include "depthwise.h"

namespace sparta {

constexpr int64_t kExpandedBlocks = 2;               // of rows, whose channels are computed together
constexpr int64_t kExpandedBytes = 384 * 1024;       // of a band: its input and what lies between
constexpr int64_t kLeastExpandedBytes = 128 * 1024;  // of an image that is worth it

// Rows of the output that a band has, the last of an image maybe fewer.
inline int64_t expanded_rows(const ConvCall& first, const DepthwiseCall& second) {
  const int64_t channels = first.in_channels + kExpandedBlocks * kBlockRows;
  const int64_t each = channels * second.stride_rows * second.columns * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::max<int64_t>(kExpandedBytes / each / kRowsTogether, 2) * kRowsTogether;
  const int64_t bands = ceil_div(second.out_rows, most);
  return ceil_div(ceil_div(second.out_rows, bands), kRowsTogether) * kRowsTogether;
}

// Whether the second layer reads what the first writes, and both can run band by band. What the second writes must not
// lie where the first still reads.
inline bool is_expanded(const PanelMatrix& one, const ConvCall& first, const DepthwiseCall& second) {
  const int64_t tokens = tokens_of(first), between = one.channels * tokens;
  const int64_t written = second.planes * second.out_rows * second.out_columns;
  // A band has whole vectors, the last one too, which may be a single row.
  const int64_t least = expanded_rows(first, second) >= second.out_rows ? tokens : 2 * second.columns;
  return first.direct && !first.residual && one.chunks == 1 && reads_in_place(second) && !second.y_is_places &&
         second.multiplier == 1 && second.kernel_rows > 1 && second.planes == first.images * one.channels &&
         second.rows * second.columns == tokens && least >= kLanes &&
         between * static_cast<int64_t>(sizeof(float)) >= kLeastExpandedBytes &&
         !overlap(second.y, written, first.x, first.images * first.x_strides[0]) &&
         !overlap(second.y, written, second.residual, second.residual ? written : 0);
}

// One band of rows, for the blocks of channels [begin, end).
class ExpandedBand {
 public:
  ExpandedBand(const PanelMatrix& one, const ConvCall& first, const DepthwiseCall& second)
      : one_(one), first_(first), second_(second), copy_(depthwise_copy(second)) {
    find_plane_lanes(second, lanes_);
    with_activation(second.activation, [&](auto tag) { kernel_ = find_plane_kernel<decltype(tag)::value>(second); });
  }

  bool run(int64_t image, int64_t row, int64_t row_end, int64_t begin, int64_t end, Scratch& scratch) const {
    const int64_t line = std::max<int64_t>(row * second_.stride_rows - second_.top, 0);
    const int64_t reach = (row_end - 1) * second_.stride_rows - second_.top + second_.kernel_rows;
    const int64_t tokens = (std::min(reach, second_.rows) - line) * second_.columns, channel = begin * kBlockRows;
    float* between = scratch.get((end - begin) * kBlockRows * tokens + kLanes);
    if (!between) return false;
    ConvCall part = first_;
    part.images = 1;
    part.x = first_.x + image * first_.x_strides[0] + line * second_.columns;
    part.y = between - channel * tokens;
    part.out_rows = 1;
    part.out_columns = part.row_width = part.band_tokens = tokens;
    if (!multiply_band(one_, part, 0, begin, end)) return false;
    if (slides(second_)) {
      SlidingTask task = sliding_task(second_, image, channel, std::min(end * kBlockRows, one_.channels));
      task.x = between - line * second_.columns;
      task.x_plane = tokens;
      task.begin = row;
      task.end = row_end;
      return slide_down(task), true;
    }
    const int64_t taps = second_.kernel_rows * second_.kernel_columns, pixels = second_.out_rows * second_.out_columns;
    for (int64_t i = channel; i < std::min(end * kBlockRows, one_.channels); ++i) {
      const int64_t at = (image * one_.channels + i) * pixels;
      kernel_(second_, copy_,
              DepthwisePlane{between + (i - channel) * tokens - line * second_.columns, lanes_,
                             second_.values + i * taps, splat(second_.bias ? second_.bias[i] : -0.0f),
                             second_.residual ? second_.residual + at : nullptr, second_.y + at, row, row_end});
    }
    return true;
  }

 private:
  const PanelMatrix& one_;
  const ConvCall& first_;
  const DepthwiseCall& second_;
  const DepthwiseCopy copy_;
  LaneMask lanes_[kMostVectors * kMostLoads];
  PlaneKernel kernel_ = nullptr;
};

// False when memory ran out. What lies between the layers is not stored.
inline bool multiply_expanded(const PanelMatrix& one, const ConvCall& first, const DepthwiseCall& second) {
  const int64_t rows = expanded_rows(first, second), bands = ceil_div(second.out_rows, rows);
  const int64_t blocks = ceil_div(one.channels, kBlockRows), parts = ceil_div(blocks, kExpandedBlocks);
  const int64_t units = first.images * bands * parts;
  bool enough_memory = true;
  parallel(first.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    const ExpandedBand band(one, first, second);
    for (int64_t unit = units * index / count; unit < units * (index + 1) / count; ++unit) {
      const int64_t image = unit / (bands * parts), row = unit / parts % bands * rows;
      const int64_t begin = unit % parts * kExpandedBlocks, end = std::min(begin + kExpandedBlocks, blocks);
      if (band.run(image, row, std::min(row + rows, second.out_rows), begin, end, scratch)) continue;
#pragma omp atomic write
      enough_memory = false;
      return;
    }
  });
  return enough_memory;
}

}  // namespace sparta
