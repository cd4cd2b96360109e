// A layer of single pixels and the depthwise one that reads it, computed together: some channels of a band of rows are
// written to memory that stays near, and the depthwise layer reads them there. In networks of inverted residuals what
// lies between these two is by far the largest image.
#pragma once

#include "depthwise.h"

namespace sparta {

constexpr int64_t kExpandedBlocks = 2;               // of rows, whose channels are computed together
constexpr int64_t kExpandedBytes = 384 * 1024;       // of a band: its input and what lies between
constexpr int64_t kLeastExpandedRows = 6;            // of a band that threads share
constexpr int64_t kLeastExpandedBytes = 128 * 1024;  // of an image that is worth it

// Into how many bands of rows an image is cut, which are alike but for a row. Threads share bands where there are several,
// or where the blocks of channels are too few to be shared evenly.
inline int64_t expanded_bands(const PanelMatrix& one, const ConvCall& first, const DepthwiseCall& second) {
  const int64_t channels = first.in_channels + kExpandedBlocks * kBlockRows, threads = std::max(first.threads, 1);
  const int64_t each = channels * second.stride_rows * second.columns * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::max<int64_t>(kExpandedBytes / each / kRowsTogether, 2) * kRowsTogether;
  const int64_t bands = ceil_div(second.out_rows, most), shared = ceil_div(bands, threads) * threads;
  const int64_t share = ceil_div(ceil_div(one.channels, kBlockRows), threads) * kBlockRows;
  const bool uneven = 7 * share * threads > 8 * one.channels;  // one thread would have an eighth more than it should
  const bool fits = second.out_rows >= shared * kLeastExpandedRows && 2 * second.columns >= kLanes;
  return (bands > 1 || uneven) && fits && first.images % threads ? shared : bands;
}

// Whether the second layer reads what the first writes, and both can run band by band. What the second writes must not
// lie where the first still reads.
inline bool is_expanded(const PanelMatrix& one, const ConvCall& first, const DepthwiseCall& second) {
  const int64_t tokens = tokens_of(first), between = one.channels * tokens;
  const int64_t written = second.planes * second.out_rows * second.out_columns;
  // A band has whole vectors, also one of a single row.
  const int64_t least = expanded_bands(one, first, second) == 1 ? tokens : 2 * second.columns;
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
  const int64_t bands = expanded_bands(one, first, second), rows = second.out_rows;
  const int64_t blocks = ceil_div(one.channels, kBlockRows), units = first.images * bands * blocks;
  bool enough_memory = true;
  parallel(first.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    const ExpandedBand band(one, first, second);
    const int64_t stop = units * (index + 1) / count;
    for (int64_t unit = units * index / count; unit < stop;) {
      const int64_t image = unit / (bands * blocks), part = unit / blocks % bands, begin = unit % blocks;
      const int64_t end = std::min({begin + kExpandedBlocks, blocks, begin + stop - unit});
      unit += end - begin;
      if (band.run(image, rows * part / bands, rows * (part + 1) / bands, begin, end, scratch)) continue;
#pragma omp atomic write
      enough_memory = false;
      return;
    }
  });
  return enough_memory;
}

}  // namespace sparta
