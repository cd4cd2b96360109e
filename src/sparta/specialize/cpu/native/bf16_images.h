// Images in bf16: two neighbouring channels of a pixel are the halves of one 32-bit place, [images][places][pixels], the
// even channel below. Here real images are rounded into places, sums leave registers as places, as real numbers, or as
// both, and places are pooled: a network in bf16 keeps its images at half of the memory.
#pragma once

#include "bf16.h"
#include "bands.h"
#include "int8_places.h"
#include "pool.h"

namespace sparta {

// One call. `conv` is a convolution over places: its x is where they are put, its in_channels counts them.
struct Bf16ConvCall {
  ConvCall conv;
  const float* image;  // [images][channels][in_rows][in_columns], contiguous
  float* real;         // the result in real numbers beside places, or null
  int64_t channels;    // of the input
  int64_t outputs;
  int32_t x_is_places;  // conv.x holds the image in places already
  int32_t y_is_places;
  int32_t residual_is_places;
  int32_t unused;
};

// Two vectors of real numbers, rounded, as the halves of one.
template <class Unit>
SPARTA_INLINE IntVec joined_pair(Vec low, Vec high) {
  return joined_halves(low, high);
}

#if defined(SPARTA_AVX512)
template <>
SPARTA_INLINE IntVec joined_pair<NativePairs>(Vec low, Vec high) {
  IntVec apart;  // the low ones, and behind them the high ones
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(apart) : "v"(high), "v"(low));
  const __m512i order = _mm512_setr_epi32(
      0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005, 0x00160006, 0x00170007, 0x00180008,
      0x00190009, 0x001a000a, 0x001b000b, 0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f);
  return (IntVec)_mm512_permutexvar_epi16(order, (__m512i)apart);
}
#endif

SPARTA_INLINE Vec low_halves(Vec places) { return (Vec)((BitVec)places << 16); }
SPARTA_INLINE Vec high_halves(Vec places) { return (Vec)((BitVec)places & kUpperHalf); }

// Calls f with what multiplies pairs on this processor, as a value.
template <class F>
SPARTA_INLINE auto with_pairs(F f) {
#if defined(SPARTA_AVX512)
  if (has_bf16()) return f(NativePairs{});
#endif
  return f(PlainPairs{});
}

// Pixels of an image that are rounded by one thread at a time.
constexpr int64_t kRoundedTogether = 1024;

// Some pixels of one place of one image; a channel that does not exist is 0.
template <class Unit>
inline void round_place(const Bf16ConvCall& call, int64_t image, int64_t place, int64_t first) {
  const int64_t pixels = call.conv.in_rows * call.conv.in_columns;
  const float* from = call.image + (image * call.channels + 2 * place) * pixels;
  float* to = const_cast<float*>(call.conv.x) + (image * call.conv.in_channels + place) * pixels;
  const bool both = 2 * place + 1 < call.channels;
  for (int64_t pixel = first; pixel < std::min(first + kRoundedTogether, pixels); pixel += kLanes) {
    const Vec low = load_some(from + pixel, pixels - pixel);
    const Vec high = both ? load_some(from + pixels + pixel, pixels - pixel) : Vec{};
    store_some(to + pixel, (Vec)joined_pair<Unit>(low, high), pixels - pixel);
  }
}

// Rounds the images of a call, unless they come in places.
template <class Unit>
inline void round_images(const Bf16ConvCall& call) {
  if (call.x_is_places) return;
  const int64_t each = call.conv.in_channels;
  const int64_t parts = ceil_div(call.conv.in_rows * call.conv.in_columns, kRoundedTogether);
  const int64_t all = call.conv.images * each * parts;
  parallel(call.conv.threads, [&](int64_t index, int64_t count) {
    for (int64_t i = all * index / count; i < all * (index + 1) / count; ++i) {
      const int64_t place = i / parts;
      round_place<Unit>(call, place / each, place % each, i % parts * kRoundedTogether);
    }
  });
}

// Where the results of an image go, and what is added to them: at its first row and first pixel.
inline PlacesEnds bf16_ends(const Bf16ConvCall& given, int64_t image) {
  const ConvCall& call = given.conv;
  const int64_t plane = call.out_rows * call.out_columns;
  const PlacesEnds first{given.y_is_places ? reinterpret_cast<int32_t*>(call.y) : nullptr,
                         given.y_is_places ? given.real : call.y,
                         given.residual_is_places ? reinterpret_cast<const int32_t*>(call.residual) : nullptr,
                         given.residual_is_places ? nullptr : call.residual, plane};
  return moved(first, image * ceil_div(given.outputs, 2) * plane, image * given.outputs * plane);
}

// Two rows that were activated, the second of which may not exist, leave from `pixel` of the ends on: what is added
// comes to them first.
template <class Unit, class Lanes>
SPARTA_INLINE void put_pair(Vec low, Vec high, float last_floor, const PlacesEnds& ends, int64_t pixel, bool both,
                            const Lanes& lanes) {
  if (ends.residual_places) {
    const Vec added = lanes.get(reinterpret_cast<const float*>(ends.residual_places) + pixel, 0, 0);
    low += low_halves(added);
    high += high_halves(added);
  } else if (ends.residual) {
    low += lanes.get(ends.residual + pixel, 0, 0);
    if (both) high += lanes.get(ends.residual + ends.plane + pixel, 0, 0);
  }
  const Vec floor = splat(last_floor);
  low = low < floor ? floor : low;  // NaN is not below and stays
  high = high < floor ? floor : high;
  if (ends.real) {
    lanes.set(ends.real + pixel, low, 0, 0);
    if (both) lanes.set(ends.real + ends.plane + pixel, high, 0, 0);
  }
  if (ends.places) {
    const Vec joined = (Vec)joined_pair<Unit>(low, both ? high : Vec{});
    lanes.set(reinterpret_cast<float*>(ends.places) + pixel, joined, 0, 0);
  }
}

// Halves are compared as whole numbers of 16 bits, whose order is that of real numbers once all bits but the sign of
// negative ones are turned around. NaN is made positive, which is above inf: it wins, as it does in PyTorch.
struct Bf16Pool {
  typedef int16_t HalfVec __attribute__((vector_size(sizeof(Vec))));
  static SPARTA_INLINE HalfVec turned(HalfVec v) { return v ^ ((v >> 15) & static_cast<int16_t>(0x7fff)); }
  static SPARTA_INLINE Vec least() { return (Vec)turned(HalfVec{} + static_cast<int16_t>(0xff80)); }  // -inf
  SPARTA_INLINE Vec read(Vec v) const {
    const HalfVec given = (HalfVec)v, absolute = given & static_cast<int16_t>(0x7fff);
    return (Vec)turned(absolute > static_cast<int16_t>(0x7f80) ? absolute : given);
  }
  static SPARTA_INLINE Vec larger(Vec a, Vec b) {
    const HalfVec one = (HalfVec)a, two = (HalfVec)b;
    return (Vec)(one > two ? one : two);
  }
  SPARTA_INLINE Vec written(Vec v) const { return (Vec)turned((HalfVec)v); }
};

// Planes are images times places.
inline bool max_pool_bf16(const PoolCall& call) { return pool_largest(Bf16Pool{}, call); }

}  // namespace sparta
