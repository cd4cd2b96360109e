// Depthwise convolutions in bf16: planes come and leave in bf16, at half of the memory, which is what bounds such layers.
// There are no pairs to multiply: values become fp32 while they are loaded. With AVX-512 common kernels read planes where
// they are; elsewhere a plane is widened, and the kernels of depthwise.h do the rest.
#pragma once

#include "bf16_images.h"
#include "depthwise.h"

namespace sparta {

// One call. Of `conv`, what belongs to slots and bands is not read.
struct Bf16DepthwiseCall {
  Bf16ConvCall conv;
  DepthwiseCall planes;  // x, y, bias and residual are not read
};

// One plane of the result.
struct Bf16Plane {
  const uint16_t* x;
  const LaneMask* lanes;
  const float* values;
  Vec shift;
  float last_floor;
  ShortEnds ends;
};

#if defined(SPARTA_AVX512)
// The input columns of one vector of output pixels for each tap of a row: PlaneTaps of depthwise.h for bf16.
template <int Side, int Stride>
SPARTA_INLINE void load_short_taps(const uint16_t* from, const LaneMask* lanes, Vec (&taps)[Side]) {
  if constexpr (Stride == 1) {
#pragma GCC unroll 8
    for (int j = 0; j < Side; ++j) {
      const __m256i found = _mm256_maskz_loadu_epi16(lanes[j], from + j);
      taps[j] = (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(found), 16);
    }
  } else {
    // Every second value is the lower half of a lane, and its neighbour the upper one.
    using Taps = PlaneTaps<Side, Stride>;
#pragma GCC unroll 8
    for (int i = 0; i < Taps::kLoads; i += 2) {
      const auto mask = static_cast<__mmask32>(lanes[i] | static_cast<uint32_t>(lanes[i + 1]) << kLanes);
      const BitVec found = (BitVec)_mm512_maskz_loadu_epi16(mask, from + Taps::start(i));
      taps[i == 0 ? 0 : i - 1] = (Vec)(found << 16);
      if (i > 0) taps[i] = (Vec)(found & kUpperHalf);
    }
  }
}

// Up to sixteen pixels of a row, activated: to bf16 and nothing else, or whatever put_short() does.
SPARTA_INLINE void put_sixteen(Vec sum, const Bf16Plane& plane, int64_t at, int64_t count) {
  const ShortEnds& ends = plane.ends;
  if (ends.real || ends.residual || ends.real_residual) {
    put_short<NativePairs>(in_parts(sum, Vec{}), plane.last_floor, ends, at, count);
    return;
  }
  const Vec floor = splat(plane.last_floor);
  sum = sum < floor ? floor : sum;
  __m256i rounded;
  asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(sum));
  if (count >= kLanes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ends.y + at), rounded);
  } else {
    _mm256_mask_storeu_epi16(ends.y + at, static_cast<__mmask16>((1u << count) - 1u), rounded);
  }
}

// Rows [row, row + Rows).
template <Activation Act, int Side, int Stride, int Rows>
SPARTA_INLINE void bf16_rows_in_place(const DepthwiseCall& call, const Bf16Plane& plane, int64_t row) {
  const int64_t pixels = call.out_rows * call.out_columns;
  // From the last vector of a row to the first: what it writes beyond its row is written over by the next row.
  for (int64_t column = (call.out_columns - 1) / kLanes * kLanes; column >= 0; column -= kLanes) {
    const LaneMask* lanes = plane.lanes + column / kLanes * kMostLoads;
    Vec sums[Rows] = {};
#pragma GCC unroll 16
    for (int i = 0; i < (Rows - 1) * Stride + Side; ++i) {
      const int64_t line = row * Stride + i - call.top;
      if (line < 0 || line >= call.rows) continue;
      Vec taps[Side];
      load_short_taps<Side, Stride>(plane.x + line * call.columns + column * Stride - call.left, lanes, taps);
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
      put_sixteen(activate<Act>(sums[r] + plane.shift), plane, at, std::min<int64_t>(pixels - at, kLanes));
    }
  }
}

template <Activation Act, int Side, int Stride>
void bf16_plane_in_place(const DepthwiseCall& call, const Bf16Plane& plane) {
  int64_t row = 0;
  for (; row + kRowsTogether <= call.out_rows; row += kRowsTogether) {
    bf16_rows_in_place<Act, Side, Stride, kRowsTogether>(call, plane, row);
  }
  const int64_t left = call.out_rows - row;
  if (left == 3) bf16_rows_in_place<Act, Side, Stride, 3>(call, plane, row);
  if (left == 2) bf16_rows_in_place<Act, Side, Stride, 2>(call, plane, row);
  if (left == 1) bf16_rows_in_place<Act, Side, Stride, 1>(call, plane, row);
}
#endif

using Bf16PlaneKernel = void (*)(const DepthwiseCall&, const Bf16Plane&);

// The kernel that reads planes where they are; null where they are widened.
inline Bf16PlaneKernel find_bf16_plane(const DepthwiseCall& call, int32_t activation) {
  Bf16PlaneKernel found = nullptr;
#if defined(SPARTA_AVX512)
  if (!has_bf16() || !reads_in_place(call) || call.kernel_rows != 3) return nullptr;
  with_activation(activation, [&](auto tag) {
    constexpr Activation kAct = decltype(tag)::value;
    found = call.stride_rows == 1 ? bf16_plane_in_place<kAct, 3, 1> : bf16_plane_in_place<kAct, 3, 2>;
  });
#else
  (void)call;
  (void)activation;
#endif
  return found;
}

// Planes [begin, end) of all images, one after the other, on one thread. `memory` is for planes that are widened.
inline void depthwise_bf16_planes(const Bf16DepthwiseCall& given, int64_t begin, int64_t end, float* memory) {
  const ConvCall& conv = given.conv.conv;
  DepthwiseCall call = given.planes;
  const int64_t size = call.rows * call.columns, pixels = call.out_rows * call.out_columns, channels = given.conv.channels;
  const int64_t taps = call.kernel_rows * call.kernel_columns, copies = DepthwiseRun::room(call);
  const float last_floor = conv.activation == kReluLast ? 0.0f : -std::numeric_limits<float>::infinity();
  const Bf16PlaneKernel kernel = find_bf16_plane(call, conv.activation);
  LaneMask lanes[kMostVectors * kMostLoads];
  if (kernel) find_plane_lanes(call, lanes);
  // A widened plane is one image of one channel, and what is done to its sums is done as they leave.
  call.x = memory + copies;
  call.bias = call.residual = nullptr;
  call.activation = kNone;
  call.planes = call.channels = call.multiplier = 1;
  float* sums = memory + copies + size;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t channel = unit % channels;
    const uint16_t* x = reinterpret_cast<const uint16_t*>(conv.x) + unit * size;
    const ShortEnds ends = short_ends(given.conv, unit / channels).moved(channel * pixels);
    const Vec shift = splat(conv.bias ? conv.bias[channel] : -0.0f);
    if (kernel) {
      kernel(given.planes, Bf16Plane{x, lanes, call.values + channel * taps, shift, last_floor, ends});
      continue;
    }
    widen_all(x, size, memory + copies);
    DepthwiseCall one = call;
    one.values += channel * taps;
    DepthwiseRun(one, 1, memory).run(0, sums);
    with_pairs([&](auto pairs) {
      with_activation(conv.activation, [&](auto tag) {
        constexpr Activation kAct = decltype(tag)::value;
        for (int64_t at = 0; at < pixels; at += kHalves) {
          const RealParts parts = load_parts(sums + at, pixels - at);
          put_short<decltype(pairs)>({activate<kAct>(parts.lower + shift), activate<kAct>(parts.upper + shift)},
                                     last_floor, ends, at, pixels - at);
        }
      });
    });
  }
}

// False when memory ran out.
inline bool bf16_depthwise(const Bf16DepthwiseCall& call) {
  const ConvCall& conv = call.conv.conv;
  round_images(call.conv);
  const DepthwiseCall& planes = call.planes;
  const int64_t units = conv.images * call.conv.channels;
  const int64_t room = DepthwiseRun::room(planes) + planes.rows * planes.columns + planes.out_rows * planes.out_columns;
  bool enough_memory = true;
  parallel(conv.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    float* memory = scratch.get(room);
    if (memory) {
      depthwise_bf16_planes(call, units * index / count, units * (index + 1) / count, memory);
      return;
    }
#pragma omp atomic write
    enough_memory = false;
  });
  return enough_memory;
}

}  // namespace sparta
