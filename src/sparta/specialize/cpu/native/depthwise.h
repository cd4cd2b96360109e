// Depthwise convolutions: every plane of an image has its own few weights. A plane is copied once, padded, with the phases
// of a stride apart, so that vectors of neighbouring output pixels read neighbouring values; several rows are computed
// together, because they read the same input. With AVX-512 common kernels read planes where they are: masks of loads
// stand for the padding, and nothing waits for a copy to reach the cache. The same kernel averages windows and scales channels. For a convolution of
// bytes that reads them, four planes leave as places.
#pragma once

#include "int8_conv.h"
#include "sliding.h"

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
  float* real;  // the result in real numbers beside places, or null
  float y_inverse_scale;
  int32_t y_is_places;  // y is [images][ceil(channels / 4)][pixels], bytes as the next convolution reads them
  int32_t y_is_unsigned;
  int32_t y_zero;
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

// Copies neighbouring values in whole vectors; what is behind the last one is filled, and there is room for it.
SPARTA_INLINE void copy_line(const float* from, int64_t count, const LaneMask& tail, Vec fill, float* to) {
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) store(to + j, load(from + j));
  if (j < count) store(to + j, load_lanes(from + j, tail, fill));
}

// The same for every second value.
SPARTA_INLINE void copy_line_by_two(const float* from, int64_t count, const LaneMask& tail, Vec fill, float* to) {
  int64_t j = 0;
  if constexpr (kPacksByTwo) {
    const LaneMask all = lane_mask(0, kLanes);
    for (; j + kLanes <= count; j += kLanes) store(to + j, load_lanes_by_two(from + 2 * j, all));
    if (j < count) store(to + j, load_lanes_by_two(from + 2 * j, tail, fill));
  } else {
    for (; j < count; ++j) to[j] = from[2 * j];
  }
}

// Copies a plane to a padded one whose padding is there already; `fill` is the same.
inline void copy_plane(const DepthwiseCall& call, const DepthwiseCopy& copy, const float* x, float* to,
                       Vec fill = Vec{}) {
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
        copy_line(from + begin, end - begin, tail, fill, line + begin);
      } else if (call.stride_columns == 2) {
        copy_line_by_two(from + 2 * begin, end - begin, tail, fill, line + begin);
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
  const float* copy;  // or the plane itself, for a kernel that reads it where it is
  const LaneMask* lanes;
  const float* values;
  Vec shift;
  const float* residual;
  float* y;
  int64_t begin;  // rows of the output
  int64_t end;
};

// Rows [row, row + Rows) of a kernel of Side x Side taps that lie next to each other, with this stride along rows.
template <Activation Act, int Side, int Stride, int Rows>
SPARTA_INLINE void square_rows(const DepthwiseCall& call, const DepthwiseCopy& copy, const DepthwisePlane& plane,
                               const int64_t (&taps)[Side], int64_t row) {
  const int64_t pixels = plane.end * call.out_columns;
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
  int64_t row = plane.begin;
  for (; row + kRowsTogether <= plane.end; row += kRowsTogether) {
    square_rows<Act, Side, Stride, kRowsTogether>(call, copy, plane, taps, row);
  }
  const int64_t left = plane.end - row;
  if (left == 3) square_rows<Act, Side, Stride, 3>(call, copy, plane, taps, row);
  if (left == 2) square_rows<Act, Side, Stride, 2>(call, copy, plane, taps, row);
  if (left == 1) square_rows<Act, Side, Stride, 1>(call, copy, plane, taps, row);
}

// Any kernel, stride and dilation.
template <Activation Act>
void any_plane(const DepthwiseCall& call, const DepthwiseCopy& copy, const DepthwisePlane& plane) {
  const int64_t pixels = plane.end * call.out_columns;
  for (int64_t row = plane.begin; row < plane.end; ++row) {
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

// How kernels of Side x Side taps read the input columns of one vector of output pixels where they are: a load for each
// tap of a row, or for a stride of two, pairs of loads, of which the first has tap 0 and each other one two more taps.
template <int Side, int Stride>
struct PlaneTaps {
  static constexpr int kLoads = Stride == 1 ? Side : Side + 1;
  // From the input column of tap 0 in lane 0 to the first column of a load.
  static constexpr int64_t start(int load) {
    if (Stride == 1) return load;
    return (load < 2 ? 0 : load / 2 * 2 - 1) + load % 2 * kLanes;
  }
  // Which lanes of the loads are columns of the image.
  static void find_lanes(const DepthwiseCall& call, int64_t column, LaneMask* lanes) {
    for (int i = 0; i < kLoads; ++i) {
      const int64_t first = column * Stride - call.left + start(i);
      const int64_t begin = std::min<int64_t>(std::max<int64_t>(-first, 0), kLanes);
      lanes[i] = lane_mask(begin, std::min<int64_t>(std::max(call.columns - first, begin), kLanes));
    }
  }
  SPARTA_INLINE static void load(const float* from, const LaneMask* lanes, Vec (&taps)[Side], Vec fill = Vec{}) {
    if constexpr (Stride == 1) {
#pragma GCC unroll 8
      for (int j = 0; j < Side; ++j) taps[j] = load_lanes(from + j, lanes[j], fill);
    } else {
#if defined(SPARTA_AVX512)
      const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#pragma GCC unroll 8
      for (int i = 0; i < kLoads; i += 2) {
        const __m512 low = (__m512)load_lanes(from + start(i), lanes[i], fill);
        const __m512 high = (__m512)load_lanes(from + start(i + 1), lanes[i + 1], fill);
        taps[i == 0 ? 0 : i - 1] = (Vec)_mm512_permutex2var_ps(low, even, high);
        if (i > 0) taps[i] = (Vec)_mm512_permutex2var_ps(low, odd, high);
      }
#endif
    }
  }
};

constexpr int kMostLoads = 6;
constexpr int64_t kMostVectors = 16;  // of a row of the output, whose masks are kept

// Rows [row, row + Rows), from the plane as it is.
template <Activation Act, int Side, int Stride, int Rows>
SPARTA_INLINE void rows_in_place(const DepthwiseCall& call, const DepthwisePlane& plane, int64_t row) {
  const int64_t pixels = plane.end * call.out_columns;
  for (int64_t column = (call.out_columns - 1) / kLanes * kLanes; column >= 0; column -= kLanes) {
    const LaneMask* lanes = plane.lanes + column / kLanes * kMostLoads;
    Vec sums[Rows] = {};
#pragma GCC unroll 16
    for (int i = 0; i < (Rows - 1) * Stride + Side; ++i) {
      const int64_t line = row * Stride + i - call.top;
      if (line < 0 || line >= call.rows) continue;
      Vec taps[Side];
      PlaneTaps<Side, Stride>::load(plane.copy + line * call.columns + column * Stride - call.left, lanes, taps);
#pragma GCC unroll 8
      for (int j = 0; j < Side; ++j) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const int tap = i - r * Stride;
          if (tap >= 0 && tap < Side) sums[r] += splat(plane.values[tap * Side + j]) * taps[j];
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

template <Activation Act, int Side, int Stride>
void plane_in_place(const DepthwiseCall& call, const DepthwiseCopy&, const DepthwisePlane& plane) {
  int64_t row = plane.begin;
  for (; row + kRowsTogether <= plane.end; row += kRowsTogether) {
    rows_in_place<Act, Side, Stride, kRowsTogether>(call, plane, row);
  }
  const int64_t left = plane.end - row;
  if (left == 3) rows_in_place<Act, Side, Stride, 3>(call, plane, row);
  if (left == 2) rows_in_place<Act, Side, Stride, 2>(call, plane, row);
  if (left == 1) rows_in_place<Act, Side, Stride, 1>(call, plane, row);
}

// Whether a kernel reads planes where they are. Masks of loads cost nothing with AVX-512 alone.
inline bool reads_in_place(const DepthwiseCall& call) {
  const bool square = call.kernel_rows == call.kernel_columns && call.stride_rows == call.stride_columns;
  const bool known = (call.kernel_rows == 3 || call.kernel_rows == 5) && (call.stride_rows == 1 || call.stride_rows == 2);
  return kPacksByTwo && square && known && call.dilation_rows == 1 && call.dilation_columns == 1 &&
         call.out_columns <= kMostVectors * kLanes;
}

// The masks of all vectors of a row, for a kernel that reads planes where they are.
inline void find_plane_lanes(const DepthwiseCall& call, LaneMask* lanes) {
  const auto find = call.kernel_rows == 3
                        ? (call.stride_rows == 1 ? PlaneTaps<3, 1>::find_lanes : PlaneTaps<3, 2>::find_lanes)
                        : (call.stride_rows == 1 ? PlaneTaps<5, 1>::find_lanes : PlaneTaps<5, 2>::find_lanes);
  for (int64_t i = 0; i * kLanes < call.out_columns; ++i) find(call, i * kLanes, lanes + i * kMostLoads);
}

using PlaneKernel = void (*)(const DepthwiseCall&, const DepthwiseCopy&, const DepthwisePlane&);

template <Activation Act>
PlaneKernel find_plane_kernel(const DepthwiseCall& call) {
  if (reads_in_place(call)) {
    if (call.kernel_rows == 3) return call.stride_rows == 1 ? plane_in_place<Act, 3, 1> : plane_in_place<Act, 3, 2>;
    return call.stride_rows == 1 ? plane_in_place<Act, 5, 1> : plane_in_place<Act, 5, 2>;
  }
  const bool square = call.kernel_rows == call.kernel_columns && call.dilation_rows == 1;
  if (square && call.stride_rows == 1 && call.kernel_rows == 3) return square_plane<Act, 3, 1>;
  if (square && call.stride_rows == 2 && call.kernel_rows == 3) return square_plane<Act, 3, 2>;
  if (square && call.stride_rows == 1 && call.kernel_rows == 5) return square_plane<Act, 5, 1>;
  if (square && call.stride_rows == 2 && call.kernel_rows == 5) return square_plane<Act, 5, 2>;
  return any_plane<Act>;
}

// Floats of a copy that is so small that it would be read before it has reached the cache: the next one is made ahead.
constexpr int64_t kSmallCopy = 2048;

// Planes up to `end`, one after the other, on one thread: the copy of one that several output channels read is kept.
class DepthwiseRun {
 public:
  // Floats of memory, a multiple of a vector.
  static int64_t room(const DepthwiseCall& call) {
    if (reads_in_place(call)) return kLanes;
    const int64_t size = ceil_div(depthwise_copy(call).size(), kLanes) * kLanes;
    return size <= kSmallCopy ? 2 * size : size;
  }

  DepthwiseRun(const DepthwiseCall& call, int64_t end, float* memory)
      : call_(call), copy_(depthwise_copy(call)), end_(end), in_place_(reads_in_place(call)),
        ahead_(room(call) > copy_.size() + kLanes) {
    if (in_place_) find_plane_lanes(call, lanes_);
    with_activation(call.activation, [&](auto tag) { kernel_ = find_plane_kernel<decltype(tag)::value>(call); });
    std::fill_n(memory, room(call), 0.0f);
    copies_[0] = memory;
    copies_[1] = memory + (ahead_ ? room(call) / 2 : 0);
  }

  void run(int64_t plane, float* y) {
    const int64_t source = plane / call_.multiplier, channel = plane % call_.channels;
    const int64_t taps = call_.kernel_rows * call_.kernel_columns, pixels = call_.out_rows * call_.out_columns;
    const float* copy = in_place_ ? call_.x + source * call_.rows * call_.columns : copied(source);
    if (ahead_ && plane + 1 < end_) copied((plane + 1) / call_.multiplier);
    kernel_(call_, copy_,
            DepthwisePlane{copy, lanes_, call_.values + channel * taps, splat(call_.bias ? call_.bias[channel] : -0.0f),
                           call_.residual ? call_.residual + plane * pixels : nullptr, y, 0, call_.out_rows});
  }

 private:
  // The padded copy of an input plane, made if it is not there.
  const float* copied(int64_t source) {
    const int slot = ahead_ ? static_cast<int>(source % 2) : 0;
    if (held_[slot] != source) copy_plane(call_, copy_, call_.x + source * call_.rows * call_.columns, copies_[slot]);
    held_[slot] = source;
    return copies_[slot];
  }

  const DepthwiseCall& call_;
  const DepthwiseCopy copy_;
  const int64_t end_;
  const bool in_place_;
  const bool ahead_;
  LaneMask lanes_[kMostVectors * kMostLoads];
  float* copies_[2];
  PlaneKernel kernel_ = nullptr;
  int64_t held_[2] = {-1, -1};
};

// One place of one image: up to four planes, rounded while they are near.
inline void depthwise_place(const DepthwiseCall& call, DepthwiseRun& planes, int64_t unit, float* room) {
  const int64_t pixels = call.out_rows * call.out_columns, places = ceil_div(call.channels, 4);
  const int64_t image = unit / places, channel = unit % places * 4;
  const int64_t present = std::min<int64_t>(4, call.channels - channel), first = image * call.channels + channel;
  float* from = call.real ? call.real + first * pixels : room;
  for (int64_t i = 0; i < present; ++i) planes.run(first + i, from + i * pixels);
  const Bytes bytes = image_bytes(call.y_zero, call.y_is_unsigned != 0);
  const Vec scale = splat(call.y_inverse_scale);
  for (int64_t pixel = 0; pixel < pixels; pixel += kLanes) {
    const int64_t count = std::min<int64_t>(pixels - pixel, kLanes);
    Vec four[4] = {};
    for (int64_t i = 0; i < present; ++i) four[i] = scale * load_some(from + i * pixels + pixel, count);
    store_some(call.y + unit * pixels + pixel, (Vec)join_rows<false>(four, bytes), count);
  }
}

// Whether sliding.h takes a layer.
inline bool slides(const DepthwiseCall& call) {
  const bool square = call.kernel_rows == 3 && call.kernel_columns == 3 && call.stride_rows == call.stride_columns;
  const bool plain = call.dilation_rows == 1 && call.dilation_columns == 1 && call.top == 1 && call.left == 1;
  return kSlides && square && plain && (call.stride_rows == 1 || call.stride_rows == 2) && call.multiplier == 1 &&
         call.out_columns == ceil_div(call.columns, call.stride_rows) && fits_registers(call.activation);
}

// Channels [begin, end) of one image, as they lie in it.
inline SlidingTask sliding_task(const DepthwiseCall& call, int64_t image, int64_t begin, int64_t end) {
  const int64_t pixels = call.out_rows * call.out_columns, first = image * call.channels + begin;
  return {call.x + first * call.rows * call.columns,
          call.values + begin * call.kernel_rows * call.kernel_columns,
          call.bias ? call.bias + begin : nullptr,
          call.residual ? call.residual + first * pixels : nullptr,
          call.y + first * pixels,
          end - begin,
          call.rows * call.columns,
          pixels,
          call.rows,
          call.columns,
          call.out_columns,
          0,
          call.out_rows,
          static_cast<int32_t>(call.stride_rows),
          call.activation};
}

inline void slide_images(const DepthwiseCall& call) {
  parallel(call.threads, [&](int64_t index, int64_t count) {
    const int64_t end = call.planes * (index + 1) / count;
    for (int64_t plane = call.planes * index / count; plane < end;) {
      const int64_t image = plane / call.channels, begin = plane % call.channels;
      const int64_t stop = std::min(call.channels, begin + end - plane);
      slide_down(sliding_task(call, image, begin, stop));
      plane += stop - begin;
    }
  });
}

// False when memory ran out.
inline bool depthwise(const DepthwiseCall& call) {
  if (!call.y_is_places && slides(call)) return slide_images(call), true;
  const int64_t copies = DepthwiseRun::room(call), pixels = call.out_rows * call.out_columns;
  const int64_t places = ceil_div(call.channels, 4);
  const int64_t units = call.y_is_places ? call.planes / call.channels * places : call.planes;
  bool enough_memory = true;
  parallel(call.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    float* memory = scratch.get(copies + (call.y_is_places ? 4 * pixels : 0));
    if (!memory) {
#pragma omp atomic write
      enough_memory = false;
      return;
    }
    const int64_t begin = units * index / count, end = units * (index + 1) / count;
    const int64_t last = end / places * call.channels + std::min(end % places * 4, call.channels);
    DepthwiseRun planes(call, call.y_is_places ? last : end, memory);
    for (int64_t unit = begin; unit < end; ++unit) {
      if (call.y_is_places) {
        depthwise_place(call, planes, unit, memory + copies);
      } else {
        planes.run(unit, call.y + unit * pixels);
      }
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
