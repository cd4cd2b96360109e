// How the results of int8 convolutions leave registers: as places, the bytes that the next convolution reads, as real
// numbers, or as both, after an activation and a residual that may itself be in bytes. Nothing is stored in between, so
// that a network of integers keeps its images at a quarter of the memory.
#pragma once

#include "int8.h"

namespace sparta {

enum ResidualKind : int32_t { kRealResidual = 0, kRoundedResidual = 1, kPlacesResidual = 2 };

// What is the same for all results of a call. Without an activation that registers hold, floors are -inf and the ceiling
// is inf; a ReLU that nothing but bytes see is in their least value.
struct PlacesFinish {
  Int8Finish scales;
  float floor;
  float ceiling;
  float last_floor;
  float factor;    // from results to steps of the grid of bytes
  Bytes residual;  // the grid of the residual
  float residual_inverse;
  float residual_scale;
  int32_t residual_kind;
  bool bounds;  // whether floor and ceiling say anything
};

// Where they go and what is added, each at the first row and the first token, or null.
struct PlacesEnds {
  int32_t* places;
  float* real;
  const int32_t* residual_places;
  const float* residual;
  int64_t plane;  // from one row to the next, of places and of real numbers
};

inline PlacesEnds moved(const PlacesEnds& ends, int64_t places, int64_t rows) {
  return {ends.places ? ends.places + places : nullptr, ends.real ? ends.real + rows : nullptr,
          ends.residual_places ? ends.residual_places + places : nullptr,
          ends.residual ? ends.residual + rows : nullptr, ends.plane};
}

// a * b + c with one rounding in every build, so that a residual adds the same in bytes and in real numbers.
SPARTA_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(SPARTA_AVX512)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(SPARTA_AVX2)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  Vec y;
  for (int i = 0; i < kLanes; ++i) y[i] = static_cast<float>(static_cast<double>(a[i]) * b[i] + c[i]);
  return y;
#endif
}

// Real numbers in steps of a grid of bytes: rounded and cut to its range.
SPARTA_INLINE Vec grid_steps(Vec x, const PlacesFinish& finish) {
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23
  const Vec least = splat(static_cast<float>(-finish.residual.shift));
  const Vec most = splat(static_cast<float>(255 - finish.residual.shift));
  const Vec steps = x * splat(finish.residual_inverse);
  const Vec cut = steps >= least ? (steps > most ? most : steps) : least;  // NaN is below all
  return (cut + round) - round;
}

// The same of one of four rows that are in bytes already.
template <int Row>
SPARTA_INLINE Vec byte_steps(IntVec bytes, const PlacesFinish& finish) {
  return __builtin_convertvector(((bytes >> 8 * Row) & 255) - finish.residual.shift, Vec);
}

// Lanes that are the first `count` tokens of one place.
template <bool Whole>
struct TokenLanes {
  int64_t count;
  SPARTA_INLINE Vec get(const float* from, int64_t, int64_t) const { return Whole ? load(from) : load_some(from, count); }
  SPARTA_INLINE void set(float* to, Vec v, int64_t, int64_t) const { Whole ? store(to, v) : store_some(to, v, count); }
};

SPARTA_INLINE void bound_four(Vec (&four)[4], const PlacesFinish& finish) {
  if (!finish.bounds) return;
  const Vec floor = splat(finish.floor), ceiling = splat(finish.ceiling);
  each<4>([&](auto r) SPARTA_LAMBDA {
    const Vec low = four[r] < floor ? floor : four[r];  // NaN is not below and stays
    four[r] = low > ceiling ? ceiling : low;
  });
}

// Four vectors, each of one channel of a place: `place` leads to the first lane in places, `at` in the first of real
// rows, of which there are `rows`. Lanes may be of several places.
template <class Lanes>
SPARTA_INLINE void put_four(Vec (&four)[4], const PlacesFinish& finish, const PlacesEnds& ends, int64_t place,
                            int64_t at, int64_t rows, const Lanes& lanes) {
  const int64_t places = ceil_div(rows, 4);
  bound_four(four, finish);
  if (ends.residual_places) {
    const float* from = reinterpret_cast<const float*>(ends.residual_places + place);
    const IntVec bytes = (IntVec)lanes.get(from, ends.plane, places) ^ finish.residual.flip;
    const Vec scale = splat(finish.residual_scale);
    each<4>([&](auto r) SPARTA_LAMBDA {
      four[r] = multiply_add(byte_steps<decltype(r)::value>(bytes, finish), scale, four[r]);
    });
  } else if (ends.residual) {
    const bool rounds = finish.residual_kind == kRoundedResidual;
    const Vec scale = splat(finish.residual_scale);
    each<4>([&](auto r) SPARTA_LAMBDA {
      const int64_t present = ceil_div(rows - r, 4);
      if (present <= 0) return;
      const Vec added = lanes.get(ends.residual + at + r * ends.plane, 4 * ends.plane, present);
      four[r] = rounds ? multiply_add(grid_steps(added, finish), scale, four[r]) : four[r] + added;
    });
  }
  if (ends.real) {
    const Vec floor = splat(finish.last_floor);
    each<4>([&](auto r) SPARTA_LAMBDA {
      const int64_t present = ceil_div(rows - r, 4);
      if (present <= 0) return;
      four[r] = four[r] < floor ? floor : four[r];
      lanes.set(ends.real + at + r * ends.plane, four[r], 4 * ends.plane, present);
    });
  }
  if (ends.places) {
    const Vec factor = splat(finish.factor);
    each<4>([&](auto r) SPARTA_LAMBDA { four[r] *= factor; });
    const Vec joined = (Vec)join_rows<false>(four, finish.scales.bytes);
    lanes.set(reinterpret_cast<float*>(ends.places + place), joined, ends.plane, places);
  }
}

// Some groups of four rows of a tile. Its tokens are all stored where `pixels` is null; else the ends are at the image's
// first pixel.
struct PlacesTask {
  const PanelMatrix* matrix;
  const PlacesFinish* finish;
  PlacesEnds ends;  // at `first_row`
  int64_t group_begin;
  int64_t group_end;
  const int32_t* x;
  int64_t first_row;
  int64_t x_stride;          // numbers from one place of x to the next
  const PixelLanes* pixels;  // of each vector, or null
};

// Asks for what a later group adds and writes.
template <int MV>
SPARTA_INLINE void announce_four(const PlacesTask& task, int64_t row) {
  const int64_t done = row - task.first_row, pixel = task.pixels ? task.pixels->pixel : 0;
  const int64_t place = done / 4 * task.ends.plane + pixel, at = done * task.ends.plane + pixel;
  if (task.ends.places) announce_early<MV>(task.ends.places + place);
  if (task.ends.residual_places) announce_early<MV>(task.ends.residual_places + place);
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    if (task.ends.real) announce_early<MV>(task.ends.real + at + r * task.ends.plane);
    if (task.ends.residual) announce_early<MV>(task.ends.residual + at + r * task.ends.plane);
  }
}

// The sums of four rows become results, `row` the first of them.
template <int MV>
SPARTA_INLINE void finish_four(const PlacesTask& task, const PlacesFinish& finish, const GroupScales<4>& scales,
                               int64_t row, int64_t channels, const IntVec (&sums)[4][MV]) {
  const int64_t done = row - task.first_row, rows = channels - row;
  const int64_t place = done / 4 * task.ends.plane, at = done * task.ends.plane;
  Vec multiplier[4], offset[4];
  each<4>([&](auto r) SPARTA_LAMBDA {
    multiplier[r] = splat(scales.multiplier[r]);
    offset[r] = splat(scales.offset[r]);
  });
  each<MV>([&](auto j) SPARTA_LAMBDA {
    Vec four[4];
    each<4>([&](auto r) SPARTA_LAMBDA { four[r] = requantise(sums[r][j], multiplier[r], offset[r]); });
    if (!task.pixels) {
      put_four(four, finish, task.ends, place + j * kLanes, at + j * kLanes, rows, TokenLanes<true>{kLanes});
      return;
    }
    const PixelLanes& pixels = task.pixels[j];
    each<4>([&](auto r) SPARTA_LAMBDA { four[r] = together(four[r], pixels.lanes); });
    put_four(four, finish, task.ends, place + pixels.pixel, at + pixels.pixel, rows, TokenLanes<false>{pixels.count});
  });
}

template <class Unit, int MV>
void multiply_int8_places(const PlacesTask& given) {
  const PlacesTask task = given;  // copies, which no store can change
  const PanelMatrix matrix = *task.matrix;
  const PlacesFinish finish = *task.finish;
  StreamAhead weights(matrix.values + matrix.starts[task.group_begin] * 4);
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    const int64_t row = matrix.rows[group];
    const GroupScales<4> scales(finish.scales, row, matrix.channels);
    weights.ask(matrix.values + matrix.starts[group + 1] * 4);
    if (group + kGroupsAhead < task.group_end) announce_four<MV>(task, matrix.rows[group + kGroupsAhead]);
    IntVec sums[4][MV];
    sum_int8_group<Unit>(matrix, group, task.x, scales.starts, sums);
    finish_four(task, finish, scales, row, matrix.channels, sums);
  }
}

// The same for groups of 16 rows, by tile registers.
template <class Tiles, int MV>
void multiply_places_tiles(const PlacesTask& given) {
  const PlacesTask task = given;
  const PanelMatrix matrix = *task.matrix;
  const PlacesFinish finish = *task.finish;
  const int32_t* const starts = finish.scales.starts;
  const auto announce = [&](int64_t row) SPARTA_LAMBDA { announce_four<MV>(task, row); };
  each_four_of_tiles<Tiles, MV>(
      task, matrix, starts, announce, [&](int64_t row, const IntVec (&sums)[4][MV]) SPARTA_LAMBDA {
        finish_four(task, finish, GroupScales<4>(finish.scales, row, matrix.channels), row, matrix.channels, sums);
      });
}

using PlacesKernel = void (*)(const PlacesTask&);

template <class Unit>
PlacesKernel find_places_kernel_of(int64_t mv) {
  switch (mv) {
    case 1: return multiply_int8_places<Unit, 1>;
    case 2: return multiply_int8_places<Unit, 2>;
    case 3: return multiply_int8_places<Unit, 3>;
    default: return multiply_int8_places<Unit, 4>;
  }
}

template <class Tiles>
PlacesKernel find_places_tiles(int64_t mv) {
  switch (mv) {
    case 1: return multiply_places_tiles<Tiles, 1>;
    case 2: return multiply_places_tiles<Tiles, 2>;
    case 3: return multiply_places_tiles<Tiles, 3>;
    default: return multiply_places_tiles<Tiles, 4>;
  }
}

// For groups of 4 or 16 rows and 1 to 4 vectors.
inline PlacesKernel find_places_kernel(int32_t bn, int64_t mv, bool no_least_weight) {
  if (bn == kTileRows) {
#if defined(SPARTA_AMX)
    if (has_byte_tiles()) return find_places_tiles<NativeByteTiles>(mv);
#endif
    return find_places_tiles<PlainByteTiles>(mv);
  }
#if defined(SPARTA_AVX512) || defined(SPARTA_AVX_VNNI)
  if (has_vnni()) return find_places_kernel_of<VnniUnit>(mv);
#endif
#if defined(SPARTA_AVX2)
  if (no_least_weight) return find_places_kernel_of<AbsoluteUnit>(mv);
#endif
  (void)no_least_weight;
  return find_places_kernel_of<SignedUnit>(mv);
}

}  // namespace sparta
