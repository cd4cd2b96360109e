// The largest value of every window of an image in places, four bytes at a time: rounding keeps the order of numbers, so
// the largest of rounded numbers is the largest number, rounded.
#pragma once

#include "int8_conv.h"
#include "pool.h"

namespace sparta {

// Bytes are compared without a sign, however images hold them.
struct BytePool {
  typedef uint8_t ByteVec __attribute__((vector_size(sizeof(Vec))));
  int32_t flip;
  static SPARTA_INLINE Vec least() { return Vec{}; }
  SPARTA_INLINE Vec read(Vec v) const { return (Vec)((IntVec)v ^ flip); }
  static SPARTA_INLINE Vec larger(Vec a, Vec b) {
    const ByteVec one = (ByteVec)a, two = (ByteVec)b;
    return (Vec)(one > two ? one : two);
  }
  SPARTA_INLINE Vec written(Vec v) const { return (Vec)((IntVec)v ^ flip); }
};

// Planes are images times places.
inline bool max_pool_places(const PoolCall& call) { return pool_largest(BytePool{image_bytes(0, true).flip}, call); }

}  // namespace sparta
