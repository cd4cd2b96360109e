// Depthwise convolutions in bf16: an image comes in places and so do the results leave, at half of the memory, which is
// what bounds such layers. The two channels of a place do not meet, so there are no pairs to multiply: both halves become
// fp32 while they are loaded, and several rows are computed together, because they read the same input.
#pragma once

#include "bf16_images.h"
#include "depthwise.h"

namespace sparta {

// One call. Of `conv`, what belongs to slots and bands is not read.
struct Bf16DepthwiseCall {
  Bf16ConvCall conv;
  DepthwiseCall planes;  // one of them is a place; `values` are fp32, [channels][taps]
};

// Two channels of an image: where they are, and how their results leave.
struct Bf16Plane {
  const float* x;           // the plane, or its padded copy
  const LaneMask* lanes;    // for a kernel that reads planes where they are
  const float* values[2];
  Vec shift[2];
  float last_floor;
  PlacesEnds ends;
  bool both;  // whether the second one exists
};

// The values of a row's taps for one vector of output pixels; false for a row of padding.
template <int Side, int Stride, bool InPlace>
SPARTA_INLINE bool load_bf16_taps(const DepthwiseCall& call, const DepthwiseCopy& copy, const Bf16Plane& plane,
                                  const int64_t (&starts)[Side], int64_t line, int64_t column, Vec (&taps)[Side]) {
  if constexpr (InPlace) {
    const int64_t row = line - call.top;
    if (row < 0 || row >= call.rows) return false;
    PlaneTaps<Side, Stride>::load(plane.x + row * call.columns + column * Stride - call.left,
                                  plane.lanes + column / kLanes * kMostLoads, taps);
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < Side; ++j) taps[j] = load(plane.x + line * copy.width + column + starts[j]);
  }
  return true;
}

// Rows [row, row + Rows) of a kernel of Side x Side taps that lie next to each other.
template <class Unit, Activation Act, int Side, int Stride, bool InPlace, int Rows>
SPARTA_INLINE void bf16_rows(const DepthwiseCall& call, const DepthwiseCopy& copy, const Bf16Plane& plane,
                             const int64_t (&starts)[Side], int64_t row) {
  const int64_t pixels = call.out_rows * call.out_columns;
  // From the last vector of a row to the first: what it writes beyond its row is written over by the next row.
  for (int64_t column = (call.out_columns - 1) / kLanes * kLanes; column >= 0; column -= kLanes) {
    Vec sums[2][Rows] = {};
#pragma GCC unroll 16
    for (int i = 0; i < (Rows - 1) * Stride + Side; ++i) {
      Vec taps[Side];
      if (!load_bf16_taps<Side, Stride, InPlace>(call, copy, plane, starts, row * Stride + i, column, taps)) continue;
#pragma GCC unroll 8
      for (int j = 0; j < Side; ++j) {
        const Vec low = low_halves(taps[j]), high = high_halves(taps[j]);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const int tap = i - r * Stride;
          if (tap < 0 || tap >= Side) continue;
          sums[0][r] += splat(plane.values[0][tap * Side + j]) * low;
          sums[1][r] += splat(plane.values[1][tap * Side + j]) * high;
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const int64_t at = (row + r) * call.out_columns + column;
      put_pair<Unit>(activate<Act>(sums[0][r] + plane.shift[0]), activate<Act>(sums[1][r] + plane.shift[1]),
                     plane.last_floor, plane.ends, at, plane.both, TokenLanes<false>{pixels - at});
    }
  }
}

template <class Unit, Activation Act, int Side, int Stride, bool InPlace>
void bf16_square(const DepthwiseCall& call, const DepthwiseCopy& copy, const Bf16Plane& plane) {
  int64_t starts[Side], row = 0;
  for (int j = 0; j < Side; ++j) starts[j] = tap_start(call, copy, j);
  for (; row + kRowsTogether <= call.out_rows; row += kRowsTogether) {
    bf16_rows<Unit, Act, Side, Stride, InPlace, kRowsTogether>(call, copy, plane, starts, row);
  }
  const int64_t left = call.out_rows - row;
  if (left == 3) bf16_rows<Unit, Act, Side, Stride, InPlace, 3>(call, copy, plane, starts, row);
  if (left == 2) bf16_rows<Unit, Act, Side, Stride, InPlace, 2>(call, copy, plane, starts, row);
  if (left == 1) bf16_rows<Unit, Act, Side, Stride, InPlace, 1>(call, copy, plane, starts, row);
}

// Any kernel, stride and dilation, from a copy.
template <class Unit, Activation Act>
void bf16_any_plane(const DepthwiseCall& call, const DepthwiseCopy& copy, const Bf16Plane& plane) {
  const int64_t pixels = call.out_rows * call.out_columns;
  for (int64_t row = 0; row < call.out_rows; ++row) {
    for (int64_t column = (call.out_columns - 1) / kLanes * kLanes; column >= 0; column -= kLanes) {
      Vec sums[2] = {};
      for (int64_t i = 0; i < call.kernel_rows; ++i) {
        const float* line = plane.x + (row * call.stride_rows + i * call.dilation_rows) * copy.width + column;
        for (int64_t j = 0; j < call.kernel_columns; ++j) {
          const Vec tap = load(line + tap_start(call, copy, j));
          sums[0] += splat(plane.values[0][i * call.kernel_columns + j]) * low_halves(tap);
          sums[1] += splat(plane.values[1][i * call.kernel_columns + j]) * high_halves(tap);
        }
      }
      const int64_t at = row * call.out_columns + column;
      put_pair<Unit>(activate<Act>(sums[0] + plane.shift[0]), activate<Act>(sums[1] + plane.shift[1]),
                     plane.last_floor, plane.ends, at, plane.both, TokenLanes<false>{pixels - at});
    }
  }
}

using Bf16PlaneKernel = void (*)(const DepthwiseCall&, const DepthwiseCopy&, const Bf16Plane&);

template <class Unit, Activation Act>
Bf16PlaneKernel find_bf16_plane(const DepthwiseCall& call) {
  if (!reads_in_place(call)) return bf16_any_plane<Unit, Act>;
  if constexpr (kPacksByTwo) {
    const bool by_two = call.stride_rows == 2;
    if (call.kernel_rows == 3) return by_two ? bf16_square<Unit, Act, 3, 2, true> : bf16_square<Unit, Act, 3, 1, true>;
    return by_two ? bf16_square<Unit, Act, 5, 2, true> : bf16_square<Unit, Act, 5, 1, true>;
  }
  return bf16_any_plane<Unit, Act>;
}

inline Bf16PlaneKernel find_bf16_plane_kernel(const DepthwiseCall& call, int32_t activation) {
  Bf16PlaneKernel found = nullptr;
  with_pairs([&](auto unit) {
    with_activation(activation, [&](auto tag) {
      found = find_bf16_plane<decltype(unit), decltype(tag)::value>(call);
    });
  });
  return found;
}

// Places [begin, end) of all images, one after the other, on one thread. `memory` is for a copy of a plane.
inline void depthwise_bf16_places(const Bf16DepthwiseCall& given, int64_t begin, int64_t end, float* memory) {
  const DepthwiseCall& call = given.planes;
  const ConvCall& conv = given.conv.conv;
  const int64_t pixels = call.out_rows * call.out_columns, places = conv.in_channels, channels = given.conv.channels;
  const int64_t taps = call.kernel_rows * call.kernel_columns;
  const DepthwiseCopy copy = depthwise_copy(call);
  const bool in_place = reads_in_place(call);
  const Bf16PlaneKernel kernel = find_bf16_plane_kernel(call, conv.activation);
  LaneMask lanes[kMostVectors * kMostLoads];
  if (in_place) {
    find_plane_lanes(call, lanes);
  } else {
    std::fill_n(memory, copy.size(), 0.0f);
  }
  const float last_floor = conv.activation == kReluLast ? 0.0f : -std::numeric_limits<float>::infinity();
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t place = unit % places, first = 2 * place, image = unit / places;
    const bool both = first + 1 < channels;
    const int64_t second = both ? first + 1 : first;
    const float* x = conv.x + unit * call.rows * call.columns;
    if (!in_place) copy_plane(call, copy, x, memory);
    kernel(call, copy,
           Bf16Plane{in_place ? x : memory,
                     lanes,
                     {call.values + first * taps, call.values + second * taps},
                     {splat(conv.bias ? conv.bias[first] : -0.0f), splat(conv.bias ? conv.bias[second] : -0.0f)},
                     last_floor,
                     moved(bf16_ends(given.conv, image), place * pixels, first * pixels),
                     both});
  }
}

// False when memory ran out.
inline bool bf16_depthwise(const Bf16DepthwiseCall& call) {
  const ConvCall& conv = call.conv.conv;
  with_pairs([&](auto unit) { round_images<decltype(unit)>(call.conv); });
  const int64_t units = conv.images * conv.in_channels;
  const int64_t room = reads_in_place(call.planes) ? kLanes : depthwise_copy(call.planes).size();
  bool enough_memory = true;
  parallel(conv.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch copies;
    float* memory = copies.get(room);
    if (memory) {
      depthwise_bf16_places(call, units * index / count, units * (index + 1) / count, memory);
      return;
    }
#pragma omp atomic write
    enough_memory = false;
  });
  return enough_memory;
}

}  // namespace sparta
