// Depthwise convolutions of 8-bit integers, four planes at a time: an image comes in places, and so do the results leave.
// Four taps of a channel must be the bytes of one lane to be multiplied at once, so the places of four neighbouring taps
// are interleaved: every 128 bits then hold the four channels of one pixel, and what is rounded has the order of places
// again. Several rows are computed together, because they read the same input.
#pragma once

#include "depthwise.h"

namespace sparta {

// One call. Of `conv`, what belongs to slots and bands is not read.
struct Int8DepthwiseCall {
  Int8ConvCall conv;
  DepthwiseCall planes;  // one of them is a place; `values` are int32, [places][kernel rows][fours of taps][4 channels]
};

// Four vectors of places: vector i of the result has pixel i of every four, its channels one after the other, and in
// each lane the bytes of the four vectors.
SPARTA_INLINE void interleave_bytes(const IntVec (&taps)[4], IntVec (&pixels)[4]) {
#if defined(SPARTA_AVX512)
  const __m512i a = (__m512i)taps[0], b = (__m512i)taps[1], c = (__m512i)taps[2], d = (__m512i)taps[3];
  const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
  pixels[0] = (IntVec)_mm512_unpacklo_epi16(ab_low, cd_low);
  pixels[1] = (IntVec)_mm512_unpackhi_epi16(ab_low, cd_low);
  pixels[2] = (IntVec)_mm512_unpacklo_epi16(ab_high, cd_high);
  pixels[3] = (IntVec)_mm512_unpackhi_epi16(ab_high, cd_high);
#elif defined(SPARTA_AVX2)
  const __m256i a = (__m256i)taps[0], b = (__m256i)taps[1], c = (__m256i)taps[2], d = (__m256i)taps[3];
  const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
  const __m256i cd_low = _mm256_unpacklo_epi8(c, d), cd_high = _mm256_unpackhi_epi8(c, d);
  pixels[0] = (IntVec)_mm256_unpacklo_epi16(ab_low, cd_low);
  pixels[1] = (IntVec)_mm256_unpackhi_epi16(ab_low, cd_low);
  pixels[2] = (IntVec)_mm256_unpacklo_epi16(ab_high, cd_high);
  pixels[3] = (IntVec)_mm256_unpackhi_epi16(ab_high, cd_high);
#else
  uint8_t from[4][4 * kLanes], to[4][4 * kLanes];
  for (int tap = 0; tap < 4; ++tap) std::memcpy(from[tap], &taps[tap], sizeof from[tap]);
  for (int i = 0; i < 4 * kLanes; ++i) {
    for (int tap = 0; tap < 4; ++tap) to[i / 4 % 4][i / 16 * 16 + i % 4 * 4 + tap] = from[tap][i];
  }
  for (int i = 0; i < 4; ++i) std::memcpy(&pixels[i], to[i], sizeof to[i]);
#endif
}

// Four channels of an image: where they are, and how their results leave.
struct PlacePlane {
  const float* x;         // the plane, or its padded copy
  const LaneMask* lanes;  // for a kernel that reads planes where they are
  Vec fill;               // four bytes of real 0 in each lane
  const int32_t* values;
  IntVec starts;
  Vec multiplier;
  Vec offset;
  const PlacesFinish* finish;
  PlacesEnds ends;
  int64_t channels;
  int32_t activation;
};

// Activations that registers do not hold beside sums.
SPARTA_NOINLINE inline void activate_apart(Vec (&four)[4], int32_t activation) {
  with_activation(activation, [&](auto tag) {
    for (Vec& each : four) each = activate<decltype(tag)::value>(each);
  });
}

// Stores the sums of up to a vector of pixels, as interleave_bytes() orders them.
SPARTA_INLINE void put_pixels_in_bytes(const IntVec (&sums)[4], const PlacePlane& plane, int64_t at, int64_t count) {
  const PlacesFinish& finish = *plane.finish;
  Vec four[4];
  each<4>([&](auto i) SPARTA_LAMBDA { four[i] = requantise(sums[i], plane.multiplier, plane.offset); });
  if (!fits_registers(plane.activation)) activate_apart(four, plane.activation);
  if (plane.ends.real || plane.ends.residual || plane.ends.residual_places) {
    constexpr auto kAll = std::make_integer_sequence<int, kLanes>();  // a channel to each vector
    exchange<2>(four[0], four[2], kAll);
    exchange<2>(four[1], four[3], kAll);
    exchange<1>(four[0], four[1], kAll);
    exchange<1>(four[2], four[3], kAll);
    put_four(four, finish, plane.ends, at, at, plane.channels, TokenLanes<false>{count});
    return;
  }
  if (finish.bounds) {
    const Vec floor = splat(finish.floor), ceiling = splat(finish.ceiling);
    each<4>([&](auto i) SPARTA_LAMBDA {
      const Vec low = four[i] < floor ? floor : four[i];  // NaN is not below and stays
      four[i] = low > ceiling ? ceiling : low;
    });
  }
  const Vec factor = splat(finish.factor);
  each<4>([&](auto i) SPARTA_LAMBDA { four[i] *= factor; });
  const IntVec joined = round_bytes<false>(four, finish.scales.bytes);
  store_some(reinterpret_cast<float*>(plane.ends.places + at), (Vec)joined, count);
}

// The weights of four taps of a row, for all channels of a place.
SPARTA_INLINE IntVec tap_weights(const int32_t* four) {
  return (IntVec)load_four(reinterpret_cast<const float*>(four));
}

// The values of a row's taps for one vector of output pixels: from a padded copy, or from the plane as it is.
template <int Side, int Stride, bool InPlace>
SPARTA_INLINE void load_taps(const DepthwiseCall& call, const DepthwiseCopy& copy, const PlacePlane& plane,
                             const int64_t (&starts)[Side], int64_t line, int64_t column, Vec (&taps)[Side]) {
  if constexpr (InPlace) {
    const int64_t row = line - call.top;
    if (row < 0 || row >= call.rows) {
#pragma GCC unroll 8
      for (int j = 0; j < Side; ++j) taps[j] = plane.fill;
      return;
    }
    PlaneTaps<Side, Stride>::load(plane.x + row * call.columns + column * Stride - call.left,
                                  plane.lanes + column / kLanes * kMostLoads, taps, plane.fill);
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < Side; ++j) taps[j] = load(plane.x + line * copy.width + column + starts[j]);
  }
}

// Rows [row, row + Rows) of a kernel of Side x Side taps that lie next to each other.
template <class Unit, int Side, int Stride, bool InPlace, int Rows>
SPARTA_INLINE void place_rows(const DepthwiseCall& call, const DepthwiseCopy& copy, const PlacePlane& plane,
                              const int64_t (&starts)[Side], int64_t row) {
  constexpr int kFours = (Side + 3) / 4;
  const int64_t pixels = call.out_rows * call.out_columns;
  decltype(Unit::weights(IntVec{})) weights[Side][kFours];
#pragma GCC unroll 8
  for (int i = 0; i < Side * kFours; ++i) {
    weights[i / kFours][i % kFours] = Unit::weights(tap_weights(plane.values + 4 * i));
  }
  // From the last vector of a row to the first: what it writes beyond its row is written over by the next row.
  for (int64_t column = (call.out_columns - 1) / kLanes * kLanes; column >= 0; column -= kLanes) {
    IntVec sums[Rows][4];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) each<4>([&](auto k) SPARTA_LAMBDA { sums[r][k] = plane.starts; });
#pragma GCC unroll 16
    for (int i = 0; i < (Rows - 1) * Stride + Side; ++i) {
      Vec taps[Side];
      load_taps<Side, Stride, InPlace>(call, copy, plane, starts, row * Stride + i, column, taps);
#pragma GCC unroll 2
      for (int g = 0; g < kFours; ++g) {
        IntVec four[4], inputs[4];
        each<4>([&](auto j) SPARTA_LAMBDA { four[j] = (IntVec)taps[4 * g + j < Side ? 4 * g + j : Side - 1]; });
        interleave_bytes(four, inputs);
        each<4>([&](auto k) SPARTA_LAMBDA {
          const typename Unit::Inputs split = Unit::split(inputs[k]);
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r) {
            const int tap = i - r * Stride;
            if (tap >= 0 && tap < Side) Unit::add(sums[r][k], split, weights[tap][g]);
          }
        });
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const int64_t at = (row + r) * call.out_columns + column;
      put_pixels_in_bytes(sums[r], plane, at, pixels - at);
    }
  }
}

template <class Unit, int Side, int Stride, bool InPlace>
void square_place(const DepthwiseCall& call, const DepthwiseCopy& copy, const PlacePlane& plane) {
  int64_t starts[Side], row = 0;
  for (int j = 0; j < Side; ++j) starts[j] = tap_start(call, copy, j);
  for (; row + kRowsTogether <= call.out_rows; row += kRowsTogether) {
    place_rows<Unit, Side, Stride, InPlace, kRowsTogether>(call, copy, plane, starts, row);
  }
  const int64_t left = call.out_rows - row;
  if (left == 3) place_rows<Unit, Side, Stride, InPlace, 3>(call, copy, plane, starts, row);
  if (left == 2) place_rows<Unit, Side, Stride, InPlace, 2>(call, copy, plane, starts, row);
  if (left == 1) place_rows<Unit, Side, Stride, InPlace, 1>(call, copy, plane, starts, row);
}

// Any kernel, stride and dilation, from a copy.
template <class Unit>
void any_place(const DepthwiseCall& call, const DepthwiseCopy& copy, const PlacePlane& plane) {
  const int64_t pixels = call.out_rows * call.out_columns, last = call.kernel_columns - 1;
  const int64_t fours = ceil_div(call.kernel_columns, 4);
  for (int64_t row = 0; row < call.out_rows; ++row) {
    for (int64_t column = (call.out_columns - 1) / kLanes * kLanes; column >= 0; column -= kLanes) {
      IntVec sums[4] = {plane.starts, plane.starts, plane.starts, plane.starts};
      for (int64_t i = 0; i < call.kernel_rows; ++i) {
        const float* line = plane.x + (row * call.stride_rows + i * call.dilation_rows) * copy.width + column;
        for (int64_t g = 0; g < fours; ++g) {
          IntVec four[4], inputs[4];
          for (int j = 0; j < 4; ++j) {
            four[j] = (IntVec)load(line + tap_start(call, copy, std::min<int64_t>(4 * g + j, last)));
          }
          interleave_bytes(four, inputs);
          const auto weights = Unit::weights(tap_weights(plane.values + 4 * (i * fours + g)));
          each<4>([&](auto k) SPARTA_LAMBDA { Unit::add(sums[k], Unit::split(inputs[k]), weights); });
        }
      }
      const int64_t at = row * call.out_columns + column;
      put_pixels_in_bytes(sums, plane, at, pixels - at);
    }
  }
}

using PlaceKernel = void (*)(const DepthwiseCall&, const DepthwiseCopy&, const PlacePlane&);

// Kernels of 3 x 3 taps are common enough for code of their own.
inline bool is_three_by_three(const DepthwiseCall& call) {
  return call.kernel_rows == 3 && call.kernel_columns == 3 && call.stride_rows == call.stride_columns &&
         call.stride_rows <= 2 && call.dilation_rows == 1 && call.dilation_columns == 1;
}

inline bool reads_places(const DepthwiseCall& call) { return is_three_by_three(call) && reads_in_place(call); }

template <class Unit>
PlaceKernel find_place_kernel_of(const DepthwiseCall& call) {
  if (!is_three_by_three(call) || (kPacksByTwo && !reads_places(call))) return any_place<Unit>;
  return call.stride_rows == 1 ? square_place<Unit, 3, 1, kPacksByTwo> : square_place<Unit, 3, 2, kPacksByTwo>;
}

inline PlaceKernel find_place_kernel(const DepthwiseCall& call, bool no_least_weight) {
#if defined(SPARTA_AVX512) || defined(SPARTA_AVX_VNNI)
  if (has_vnni()) return find_place_kernel_of<VnniUnit>(call);
#endif
#if defined(SPARTA_AVX2)
  if (no_least_weight) return find_place_kernel_of<AbsoluteUnit>(call);
#endif
  (void)no_least_weight;
  return find_place_kernel_of<SignedUnit>(call);
}

// Places [begin, end) of all images, one after the other, on one thread. `memory` is for a copy of a plane.
inline void depthwise_places(const Int8DepthwiseCall& given, const PlacesFinish& finish, int32_t zero, int64_t begin,
                             int64_t end, float* memory) {
  const DepthwiseCall& call = given.planes;
  const ConvCall& conv = given.conv.conv;
  const int64_t pixels = call.out_rows * call.out_columns, places = conv.in_channels, channels = given.conv.channels;
  const DepthwiseCopy copy = depthwise_copy(call);
  const bool in_place = reads_places(call);
  const PlaceKernel kernel = find_place_kernel(call, given.conv.no_least_weight != 0);
  const Vec fill = (Vec)(IntVec{} + zero);
  LaneMask lanes[kMostVectors * kMostLoads];
  if (in_place) {
    find_plane_lanes(call, lanes);
  } else {
    for (int64_t i = 0; i < copy.size(); i += kLanes) store_some(memory + i, fill, copy.size() - i);
  }
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t place = unit % places, row = 4 * place, image = unit / places;
    const float* x = conv.x + unit * call.rows * call.columns;
    if (!in_place) copy_plane(call, copy, x, memory, fill);
    const GroupScales<4> scales(finish.scales, row, channels);
    const PlacesEnds ends = moved(ends_of(channels, given.conv, image), place * pixels, row * pixels);
    kernel(call, copy,
           PlacePlane{in_place ? x : memory, lanes, fill,
                      reinterpret_cast<const int32_t*>(call.values) +
                          place * call.kernel_rows * ceil_div(call.kernel_columns, 4) * 4,
                      tap_weights(scales.starts), load_four(scales.multiplier), load_four(scales.offset), &finish, ends,
                      channels - row, conv.activation});
  }
}

// False when memory ran out.
inline bool int8_depthwise(const Int8DepthwiseCall& call) {
  static thread_local Scratch scratch;
  const ConvCall& conv = call.conv.conv;
  int32_t* starts = reinterpret_cast<int32_t*>(scratch.get(call.conv.channels));
  if (!starts) return false;
  quantise_images(call.conv);
  find_starts(call.conv, call.conv.channels, starts);
  const PlacesFinish finish = places_finish(call.conv, starts);
  const int32_t zero = zero_place(image_bytes(call.conv.x_zero, call.conv.x_is_unsigned != 0));
  const int64_t units = conv.images * conv.in_channels;
  const int64_t room = reads_places(call.planes) ? kLanes : depthwise_copy(call.planes).size();
  bool enough_memory = true;
  parallel(conv.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch copies;
    float* memory = copies.get(room);
    if (memory) {
      depthwise_places(call, finish, zero, units * index / count, units * (index + 1) / count, memory);
      return;
    }
#pragma omp atomic write
    enough_memory = false;
  });
  return enough_memory;
}

}  // namespace sparta
