// Depthwise convolutions: every plane of an image has its own few weights. A plane is copied once, padded, with the phases
// of a stride apart, so that vectors of neighbouring output pixels read neighbouring values; several rows are computed
// together, because they read the same input. The same kernel averages windows and scales channels.
#pragma once

#include "conv.h"

namespace sparta {

// Contiguous planes, images times channels.
struct DepthwiseCall {
  const float* x;
  float* y;
  const float* bias;      // one for each output channel, or null
  const float* residual;  // as the output, or null
  const float* values;    // [channels][kernel_rows * kernel_columns]
  int64_t planes;         // of the output
  int64_t channels;       // of the output
  int64_t multiplier;     // output channels for each input channel
  int64_t rows;
  int64_t columns;
  int64_t out_rows;
  int64_t out_columns;
  int64_t kernel_rows;
  int64_t kernel_columns;
  int64_t stride_rows;
  int64_t stride_columns;
  int64_t top;  // rows of zeros before the image
  int64_t left;
  int64_t dilation_rows;
  int64_t dilation_columns;
  int32_t activation;
  int32_t threads;
};

// Where a padded copy keeps what: [phases][height][width], and for each tap of a row its first value.
struct DepthwiseCopy {
  int64_t height;
  int64_t width;
  int64_t phases;
  int64_t size() const { return phases * height * width + kLanes; }
};

inline DepthwiseCopy depthwise_copy(const DepthwiseCall& call) {
  const int64_t reach = (call.kernel_columns - 1) * call.dilation_columns;
  return {(call.out_rows - 1) * call.stride_rows + (call.kernel_rows - 1) * call.dilation_rows + 1,
          call.out_columns + reach / call.stride_columns + kLanes, std::min(call.stride_columns, reach + 1)};
}

// From a tap of a row to its first value in the copy.
inline int64_t tap_start(const DepthwiseCall& call, const DepthwiseCopy& copy, int64_t tap) {
  const int64_t distance = tap * call.dilation_columns;
  return distance % call.stride_columns * copy.height * copy.width + distance / call.stride_columns;
}

// Copies neighbouring values in whole vectors; what is behind the last one is set to 0, and there is room for it.
SPARTA_INLINE void copy_line(const float* from, int64_t count, const LaneMask& tail, float* to) {
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) store(to + j, load(from + j));
  if (j < count) store(to + j, load_lanes(from + j, tail));
}

// Copies a plane to a padded one whose padding is 0 already.
inline void copy_plane(const DepthwiseCall& call, const DepthwiseCopy& copy, const float* x, float* to) {
  const int64_t most = copy.width - kLanes;
  const int64_t last = std::min(copy.height, call.rows + call.top);
  for (int64_t phase = 0; phase < copy.phases; ++phase) {
    const int64_t ahead = phase - call.left;  // input column of the phase's first value
    const int64_t begin = ahead >= 0 ? 0 : ceil_div(-ahead, call.stride_columns);
    const int64_t end = std::min(most, ahead >= call.columns ? 0 : ceil_div(call.columns - ahead, call.stride_columns));
    const LaneMask tail = lane_mask(0, std::max<int64_t>(end - begin, 0) % kLanes);
    for (int64_t row = call.top; row < last; ++row) {
      const float* from = x + (row - call.top) * call.columns + ahead;
      float* line = to + (phase * copy.height + row) * copy.width;
      if (call.stride_columns == 1) {
        copy_line(from + begin, end - begin, tail, line + begin);
      } else if (call.stride_columns == 2) {
        for (int64_t j = begin; j < end; ++j) line[j] = from[2 * j];
      } else {
        for (int64_t j = begin; j < end; ++j) line[j] = from[j * call.stride_columns];
      }
    }
  }
}

template <Activation Act>
SPARTA_INLINE void put_pixels(Vec sum, Vec shift, const float* residual, float* y, int64_t count) {
  sum = activate<Act>(sum + shift);
  if (residual) sum += load_some(residual, count);
  store_some(y, activate_last<Act>(sum), count);
}

// One plane of the output; pointers are those of the plane.
struct DepthwisePlane {
  const float* copy;
  const float* values;
  Vec shift;
  const float* residual;
  float* y;
};

// Rows [row, row + Rows) of a kernel of Side x Side taps that lie next to each other, with this stride along rows.
template <Activation Act, int Side, int Stride, int Rows>
SPARTA_INLINE void square_rows(const DepthwiseCall& call, const DepthwiseCopy& copy, const DepthwisePlane& plane,
                               const int64_t (&taps)[Side], int64_t row) {
  const int64_t pixels = call.out_rows * call.out_columns;
  // From the last vector of a row to the first: what it writes beyond its row is written over by the next row.
  for (int64_t column = (call.out_columns - 1) / kLanes * kLanes; column >= 0; column -= kLanes) {
    const float* from = plane.copy + row * Stride * copy.width + column;
    Vec sums[Rows] = {};
#pragma GCC unroll 16
    for (int i = 0; i < (Rows - 1) * Stride + Side; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < Side; ++j) {
        const Vec inputs = load(from + i * copy.width + taps[j]);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const int tap = i - r * Stride;
          if (tap >= 0 && tap < Side) sums[r] += splat(plane.values[tap * Side + j]) * inputs;
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const int64_t at = (row + r) * call.out_columns + column;
      put_pixels<Act>(sums[r], plane.shift, plane.residual ? plane.residual + at : nullptr, plane.y + at, pixels - at);
    }
  }
}

constexpr int kRowsTogether = 4;

template <Activation Act, int Side, int Stride>
void square_plane(const DepthwiseCall& call, const DepthwiseCopy& copy, const DepthwisePlane& plane) {
  int64_t taps[Side];
  for (int j = 0; j < Side; ++j) taps[j] = tap_start(call, copy, j);
  int64_t row = 0;
  for (; row + kRowsTogether <= call.out_rows; row += kRowsTogether) {
    square_rows<Act, Side, Stride, kRowsTogether>(call, copy, plane, taps, row);
  }
  for (; row < call.out_rows; ++row) square_rows<Act, Side, Stride, 1>(call, copy, plane, taps, row);
}

// Any kernel, stride and dilation.
template <Activation Act>
void any_plane(const DepthwiseCall& call, const DepthwiseCopy& copy, const DepthwisePlane& plane) {
  const int64_t pixels = call.out_rows * call.out_columns;
  for (int64_t row = 0; row < call.out_rows; ++row) {
    for (int64_t column = 0; column < call.out_columns; column += kLanes) {
      Vec sum = {};
      for (int64_t i = 0; i < call.kernel_rows; ++i) {
        const float* line = plane.copy + (row * call.stride_rows + i * call.dilation_rows) * copy.width + column;
        for (int64_t j = 0; j < call.kernel_columns; ++j) {
          sum += splat(plane.values[i * call.kernel_columns + j]) * load(line + tap_start(call, copy, j));
        }
      }
      const int64_t at = row * call.out_columns + column;
      put_pixels<Act>(sum, plane.shift, plane.residual ? plane.residual + at : nullptr, plane.y + at, pixels - at);
    }
  }
}

using PlaneKernel = void (*)(const DepthwiseCall&, const DepthwiseCopy&, const DepthwisePlane&);

template <Activation Act>
PlaneKernel find_plane_kernel(const DepthwiseCall& call) {
  const bool square = call.kernel_rows == call.kernel_columns && call.dilation_rows == 1;
  if (square && call.stride_rows == 1 && call.kernel_rows == 3) return square_plane<Act, 3, 1>;
  if (square && call.stride_rows == 2 && call.kernel_rows == 3) return square_plane<Act, 3, 2>;
  if (square && call.stride_rows == 1 && call.kernel_rows == 5) return square_plane<Act, 5, 1>;
  if (square && call.stride_rows == 2 && call.kernel_rows == 5) return square_plane<Act, 5, 2>;
  return any_plane<Act>;
}

// False when memory ran out.
inline bool depthwise(const DepthwiseCall& call) {
  const DepthwiseCopy copy = depthwise_copy(call);
  PlaneKernel kernel = nullptr;
  with_activation(call.activation, [&](auto tag) { kernel = find_plane_kernel<decltype(tag)::value>(call); });
  const int64_t taps = call.kernel_rows * call.kernel_columns, pixels = call.out_rows * call.out_columns;
  bool enough_memory = true;
  parallel(call.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    float* padded = scratch.get(copy.size());
    if (!padded) {
#pragma omp atomic write
      enough_memory = false;
      return;
    }
    std::fill_n(padded, copy.size(), 0.0f);
    int64_t held = -1;
    for (int64_t plane = call.planes * index / count; plane < call.planes * (index + 1) / count; ++plane) {
      const int64_t source = plane / call.multiplier, channel = plane % call.channels;
      if (source != held) copy_plane(call, copy, call.x + source * call.rows * call.columns, padded);
      held = source;
      kernel(call, copy,
             DepthwisePlane{padded, call.values + channel * taps, splat(call.bias ? call.bias[channel] : -0.0f),
                            call.residual ? call.residual + plane * pixels : nullptr, call.y + plane * pixels});
    }
  });
  return enough_memory;
}

// The mean of each of contiguous planes.
struct MeanCall {
  const float* x;
  float* y;
  int64_t planes;
  int64_t size;
  int32_t threads;
};

inline void mean_planes(const MeanCall& call) {
  parallel(call.threads, [&](int64_t index, int64_t count) {
    for (int64_t plane = call.planes * index / count; plane < call.planes * (index + 1) / count; ++plane) {
      const float* x = call.x + plane * call.size;
      Vec sums[4] = {};
      int64_t at = 0;
      for (; at + 4 * kLanes <= call.size; at += 4 * kLanes) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[j] += load(x + at + j * kLanes);
      }
      for (; at < call.size; at += kLanes) sums[0] += load_some(x + at, call.size - at);
      const float total = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
      call.y[plane] = total / static_cast<float>(call.size);
    }
  });
}

}  // namespace sparta
