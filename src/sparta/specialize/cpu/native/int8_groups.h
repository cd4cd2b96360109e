// Groups of rows times a tile of tokens in 8-bit integers, and how exact sums of 32 bits leave the registers: as real
// numbers, a row for each channel, or as bytes, four channels to a place. int8.h says what is called with which rows.
#pragma once

#include <array>
#include <cmath>

#include "int8_units.h"
#include "spmm.h"

namespace sparta {

// What turns the sums of a layer into results.
struct Int8Finish {
  const float* multiplier;
  const float* offset;    // or null
  const int32_t* starts;  // what takes the zero point of the input off: a row's sum begins with it
  float floor;
  bool joins;    // four rows leave as bytes; `floor` is in them
  bool bounded;  // no result is beyond 2^31
  Bytes bytes;
  const float* token_scales;  // of the tokens of a tile, or null
};

// sum * multiplier + offset with one rounding, which a compiler left alone may split: without such an instruction, in
// double.
SPARTA_INLINE Vec requantise(IntVec exact, Vec multiplier, Vec offset) {
#if defined(SPARTA_AVX512)
  return (Vec)_mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)exact), (__m512)multiplier, (__m512)offset);
#elif defined(SPARTA_AVX2)
  return (Vec)_mm256_fmadd_ps(_mm256_cvtepi32_ps((__m256i)exact), (__m256)multiplier, (__m256)offset);
#else
  Vec y;
  for (int i = 0; i < kLanes; ++i) {
    y[i] = static_cast<float>(static_cast<double>(static_cast<float>(exact[i])) * multiplier[i] + offset[i]);
  }
  return y;
#endif
}

// The same for sums whose tokens have a scale each, which is a rounding of its own.
SPARTA_INLINE Vec requantise(IntVec exact, Vec scale, Vec multiplier, Vec offset) {
#if defined(SPARTA_AVX512)
  const __m512 real = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)exact), (__m512)scale);
  return (Vec)_mm512_fmadd_ps(real, (__m512)multiplier, (__m512)offset);
#elif defined(SPARTA_AVX2)
  const __m256 real = _mm256_mul_ps(_mm256_cvtepi32_ps((__m256i)exact), (__m256)scale);
  return (Vec)_mm256_fmadd_ps(real, (__m256)multiplier, (__m256)offset);
#else
  Vec y;
  for (int i = 0; i < kLanes; ++i) {
    const float real = static_cast<float>(exact[i]) * scale[i];
    y[i] = static_cast<float>(static_cast<double>(real) * multiplier[i] + offset[i]);
  }
  return y;
#endif
}

SPARTA_INLINE Vec at_least(Vec y, Vec floor) {
#if defined(SPARTA_AVX512)
  return (Vec)_mm512_max_ps((__m512)floor, (__m512)y);  // NaN stays
#else
  return y < floor ? floor : y;
#endif
}

struct Int8Task {
  const PanelMatrix* matrix;  // its values are int32, four bytes each
  const Int8Finish* finish;
  int64_t group_begin;
  int64_t group_end;
  const int32_t* x;           // a tile of a panel, or of a band of an image; four bytes a place
  int32_t* y;                 // results at row `first_row`: a row for each channel, or for each four
  int64_t first_row;
  int64_t tile;      // numbers from one row of results to the next
  int64_t x_stride;  // from one place of x to the next
};

// An offset of a group without any: adding -0 changes nothing, not even a -0.
constexpr auto kNothing = [] {
  std::array<float, kBlockRows> all{};
  for (float& each : all) each = -0.0f;
  return all;
}();

// The scales of the rows of one group. Rows beyond the last channel have those of the last.
template <int BN>
class GroupScales {
 public:
  SPARTA_INLINE GroupScales(const Int8Finish& finish, int64_t row, int64_t channels)
      : multiplier(finish.multiplier + row), offset(finish.offset ? finish.offset + row : kNothing.data()),
        starts(finish.starts + row) {
    if (BN == 1 || row + BN <= channels) return;
    for (int r = 0; r < BN; ++r) {
      const int64_t present = std::min<int64_t>(r, channels - 1 - row);
      multipliers_[r] = multiplier[present];
      offsets_[r] = offset[present];
      starts_[r] = starts[present];
    }
    multiplier = multipliers_;
    offset = offsets_;
    starts = starts_;
  }
  const float* multiplier;
  const float* offset;
  const int32_t* starts;

 private:
  float multipliers_[BN], offsets_[BN];
  int32_t starts_[BN];
};

// Four rows as bytes.
template <bool Bounded, int MV>
SPARTA_INLINE void finish_bytes(const GroupScales<4>& scales, const Bytes bytes, const IntVec (&sums)[4][MV],
                                int32_t* y) {
  Vec multiplier[4], offset[4];
  each<4>([&](auto r) SPARTA_LAMBDA {
    multiplier[r] = splat(scales.multiplier[r]);
    offset[r] = splat(scales.offset[r]);
  });
  each<MV>([&](auto j) SPARTA_LAMBDA {
    Vec four[4];
    each<4>([&](auto r) SPARTA_LAMBDA { four[r] = requantise(sums[r][j], multiplier[r], offset[r]); });
    store_ints(y + j * kLanes, join_rows<Bounded>(four, bytes));
  });
}

// The first `rows` of BN rows.
template <int BN, int MV>
SPARTA_INLINE void finish_floats(const GroupScales<BN>& scales, const Int8Finish& finish, const IntVec (&sums)[BN][MV],
                                 int64_t rows, int64_t tile, float* y) {
  const Vec floor = splat(finish.floor);
  const float* const token_scales = finish.token_scales;
  each<BN>([&](auto r) SPARTA_LAMBDA {
    if (BN > 1 && r >= rows) return;
    const Vec multiplier = splat(scales.multiplier[r]), offset = splat(scales.offset[r]);
    if (token_scales) {
      each<MV>([&](auto j) SPARTA_LAMBDA {
        const Vec scale = load(token_scales + j * kLanes);
        store(y + r * tile + j * kLanes, at_least(requantise(sums[r][j], scale, multiplier, offset), floor));
      });
      return;
    }
    each<MV>([&](auto j) SPARTA_LAMBDA {
      store(y + r * tile + j * kLanes, at_least(requantise(sums[r][j], multiplier, offset), floor));
    });
  });
}

// The sums of one group: its entries times MV vectors of inputs, on top of what rows start with.
template <class Unit, int BN, int MV>
SPARTA_INLINE void sum_int8_group(const PanelMatrix& matrix, int64_t group, const int32_t* x, const int32_t* starts,
                                  IntVec (&sums)[BN][MV]) {
  const int64_t begin = matrix.starts[group], entries = matrix.starts[group + 1] - begin;
  const uint32_t* offsets = matrix.offsets + begin;
  const int32_t* values = reinterpret_cast<const int32_t*>(matrix.values) + begin * BN;
  each<BN>([&](auto r) SPARTA_LAMBDA {
    const IntVec start = IntVec{} + starts[r];
    each<MV>([&](auto j) SPARTA_LAMBDA { sums[r][j] = start; });
  });
  for (int64_t i = 0; i < entries; ++i) {
    const int32_t* from = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(x) + offsets[i]);
    typename Unit::Inputs inputs[MV];
    each<MV>([&](auto j) SPARTA_LAMBDA { inputs[j] = Unit::split(load_ints(from + j * kLanes)); });
    each<BN>([&](auto r) SPARTA_LAMBDA {
      const typename Unit::Weight weight = Unit::spread(values + i * BN + r);
      each<MV>([&](auto j) SPARTA_LAMBDA { Unit::add(sums[r][j], inputs[j], weight); });
    });
  }
}

// Sums of BN rows from `row` on become results, where the task has them.
template <int BN, int MV>
SPARTA_INLINE void finish_group(const Int8Task& task, const Int8Finish& finish, const GroupScales<BN>& scales,
                                int64_t channels, int64_t row, const IntVec (&sums)[BN][MV]) {
  const int64_t done = row - task.first_row;
  if constexpr (BN == 4) {
    if (finish.joins) {
      int32_t* y = task.y + done / 4 * task.tile;
      finish.bounded ? finish_bytes<true>(scales, finish.bytes, sums, y)
                     : finish_bytes<false>(scales, finish.bytes, sums, y);
      return;
    }
  }
  finish_floats(scales, finish, sums, channels - row, task.tile, reinterpret_cast<float*>(task.y) + done * task.tile);
}

template <class Unit, int BN, int MV>
void multiply_int8_groups(const Int8Task& given) {
  const Int8Task task = given;  // copies, which no store can change
  const PanelMatrix matrix = *task.matrix;
  const Int8Finish finish = *task.finish;
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    const int64_t row = matrix.rows[group];
    const GroupScales<BN> scales(finish, row, matrix.channels);
    IntVec sums[BN][MV];
    sum_int8_group<Unit>(matrix, group, task.x, scales.starts, sums);
    finish_group(task, finish, scales, matrix.channels, row, sums);
  }
}

}  // namespace sparta
