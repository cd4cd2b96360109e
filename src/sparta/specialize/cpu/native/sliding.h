// Depthwise layers of 3x3 taps that go down an image row by row: every row of the input is loaded once, shifted by a pixel
// in registers, and added to the three rows of the output that read it. Loads that are not shifted themselves are fewer,
// and each row of the output waits only for its own. Planes of up to eight pixels a row go two at a time, each in half of
// the lanes, with a weight of its own in each half.
#pragma once

#include "bands.h"
#include "finish.h"

namespace sparta {

// Rows [begin, end) of the output of some planes, with one row and one column of zeros before the image.
struct SlidingTask {
  const float* x;         // plane 0, row 0
  const float* values;    // [planes][9]
  const float* bias;      // [planes], or null
  const float* residual;  // as y, or null
  float* y;               // plane 0, row 0
  int64_t planes;
  int64_t x_plane;  // floats between two planes
  int64_t y_plane;
  int64_t rows;
  int64_t columns;
  int64_t out_columns;
  int64_t begin;
  int64_t end;
  int32_t stride;
  int32_t activation;
};

#if defined(SPARTA_AVX512)
constexpr bool kSlides = true;
constexpr int kSide = 3;
constexpr int kStripVectors = 4;  // whose sums, with the weights, fit into the registers
constexpr int64_t kHalf = kLanes / 2;

// What a sum goes through on its way to memory: max(min(max(sum + shift, floor), ceiling) + residual, last_floor).
struct SlidingEnd {
  Vec shift, floor, ceiling, last_floor;
  SlidingEnd(const SlidingTask& task, Vec given) : shift(given) {
    const RowsFinish finish = rows_finish(nullptr, nullptr, task.activation);
    floor = splat(finish.floor), ceiling = splat(finish.ceiling), last_floor = splat(finish.last_floor);
  }
  // The second operand is what is returned where one is NaN.
  SPARTA_INLINE Vec before(Vec sum) const {
    const __m512 above = _mm512_max_ps((__m512)floor, (__m512)(sum + shift));
    return (Vec)_mm512_min_ps((__m512)ceiling, above);
  }
  SPARTA_INLINE Vec after(Vec sum) const { return (Vec)_mm512_max_ps((__m512)last_floor, (__m512)sum); }
};

// Lanes `By` later, of two vectors that lie side by side.
template <int By>
SPARTA_INLINE Vec shifted(Vec low, Vec high) {
  return (Vec)_mm512_castsi512_ps(_mm512_alignr_epi32((__m512i)high, (__m512i)low, By));
}

SPARTA_INLINE Vec permuted(Vec low, IntVec lanes, Vec high) {
  return (Vec)_mm512_permutex2var_ps((__m512)low, (__m512i)lanes, (__m512)high);
}

// Every second lane of two vectors, from `first` on.
template <int... Lane>
constexpr IntVec second_lanes(int first, std::integer_sequence<int, Lane...>) {
  return IntVec{(first + 2 * Lane)...};
}

// Some vectors of output columns of one plane, from `column` on.
template <int Stride, int Vectors>
class PlaneStrip {
 public:
  static constexpr int kVectors = Vectors;

  PlaneStrip(const SlidingTask& task, int64_t plane, int64_t column)
      : end_(task, splat(task.bias ? task.bias[plane] : -0.0f)),
        x_(task.x + plane * task.x_plane + column * Stride),
        columns_(task.columns),
        y_(task.y + plane * task.y_plane + column),
        residual_(task.residual ? task.residual + plane * task.y_plane + column : nullptr),
        out_columns_(task.out_columns),
        end_row_(task.end),
        stored_(lane_mask(0, std::min<int64_t>(task.out_columns - column - (Vectors - 1) * kLanes, kLanes))),
        is_first_(column == 0) {
    for (int i = 0; i < kSide * kSide; ++i) weights_[i] = splat(task.values[plane * kSide * kSide + i]);
    for (int i = 0; i < kLoads; ++i) {
      const int64_t left = task.columns - column * Stride - i * kLanes;
      inside_[i] = lane_mask(0, std::min<int64_t>(std::max<int64_t>(left, 0), kLanes));
    }
    is_last_ = inside_[kLoads - 1] == 0;
  }

  SPARTA_INLINE Vec weight(int tap) const { return weights_[tap]; }

  // What the three taps of a row read.
  SPARTA_INLINE void read(int64_t line, Vec (&taps)[Vectors][kSide]) const {
    const float* from = x_ + line * columns_;
    const Vec before = is_first_ ? Vec{} : load(from - kLanes);
    if constexpr (Stride == 1) {
      Vec loaded[Vectors + 1];
      each<Vectors>([&](auto j) SPARTA_LAMBDA { loaded[j] = load_lanes(from + j * kLanes, inside_[j]); });
      loaded[Vectors] = is_last_ ? Vec{} : load_lanes(from + Vectors * kLanes, inside_[Vectors]);
      each<Vectors>([&](auto j) SPARTA_LAMBDA {
        taps[j][0] = shifted<kLanes - 1>(j == 0 ? before : loaded[j == 0 ? 0 : j - 1], loaded[j]);
        taps[j][1] = loaded[j];
        taps[j][2] = shifted<1>(loaded[j], loaded[j + 1]);
      });
    } else {
      constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
      each<Vectors>([&](auto j) SPARTA_LAMBDA {
        const Vec low = load_lanes(from + 2 * j * kLanes, inside_[2 * j]);
        const Vec high = load_lanes(from + (2 * j + 1) * kLanes, inside_[2 * j + 1]);
        taps[j][1] = permuted(low, second_lanes(0, kAll), high);
        taps[j][2] = permuted(low, second_lanes(1, kAll), high);
        taps[j][0] = shifted<kLanes - 1>(j == 0 ? before : taps[j == 0 ? 0 : j - 1][2], taps[j][2]);
      });
    }
  }

  SPARTA_INLINE void put(int64_t row, const Vec (&sums)[Vectors]) const {
    float* to = y_ + row * out_columns_;
    each<Vectors>([&](auto j) SPARTA_LAMBDA {
      const bool last = j + 1 == Vectors;
      Vec out = end_.before(sums[j]);
      if (residual_) {
        const float* added = residual_ + row * out_columns_ + j * kLanes;
        out += last ? load_lanes(added, stored_) : load(added);
      }
      out = end_.after(out);
      if (last && row + 1 == end_row_) {
        _mm512_mask_storeu_ps(to + j * kLanes, stored_, (__m512)out);
      } else {
        store(to + j * kLanes, out);  // what goes beyond the row is written over by the next one
      }
    });
  }

 private:
  static constexpr int kLoads = Stride == 1 ? Vectors + 1 : 2 * Vectors;
  const SlidingEnd end_;
  const float* x_;
  const int64_t columns_;
  float* y_;
  const float* residual_;
  const int64_t out_columns_;
  const int64_t end_row_;
  const LaneMask stored_;
  const bool is_first_;
  bool is_last_;
  Vec weights_[kSide * kSide];
  LaneMask inside_[kLoads];
};

// Two planes, whose rows lie in the halves of a vector.
template <int Stride>
class PlanePair {
 public:
  static constexpr int kVectors = 1;

  PlanePair(const SlidingTask& task, int64_t one, int64_t two)
      : end_(task, halves(task.bias ? task.bias[one] : -0.0f, task.bias ? task.bias[two] : -0.0f)),
        x_{task.x + one * task.x_plane, task.x + two * task.x_plane},
        columns_(task.columns),
        y_{task.y + one * task.y_plane, task.y + two * task.y_plane},
        out_columns_(task.out_columns),
        inside_(lane_mask(0, task.columns)),
        stored_(lane_mask(0, task.out_columns)) {
    residuals_[0] = task.residual ? task.residual + one * task.y_plane : nullptr;
    residuals_[1] = task.residual ? task.residual + two * task.y_plane : nullptr;
    const float* first = task.values + one * kSide * kSide;
    const float* second = task.values + two * kSide * kSide;
    for (int i = 0; i < kSide * kSide; ++i) weights_[i] = halves(first[i], second[i]);
  }

  SPARTA_INLINE Vec weight(int tap) const { return weights_[tap]; }

  SPARTA_INLINE void read(int64_t line, Vec (&taps)[1][kSide]) const {
    const float* one = x_[0] + line * columns_;
    const float* two = x_[1] + line * columns_;
    if constexpr (Stride == 1) {  // at least one lane of each half is 0, so shifts bring nothing from the other plane
      const Vec rows = joined(one, two, inside_);
      taps[0][0] = shifted<kLanes - 1>(Vec{}, rows);
      taps[0][1] = rows;
      taps[0][2] = shifted<1>(rows, Vec{});
    } else {  // lane 15 of a row is 0
      const Vec low = load_lanes(one, inside_), high = load_lanes(two, inside_);
      taps[0][0] = permuted(low, IntVec{15, 1, 3, 5, 7, 9, 11, 13, 31, 17, 19, 21, 23, 25, 27, 29}, high);
      taps[0][1] = permuted(low, IntVec{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, high);
      taps[0][2] = permuted(low, IntVec{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31}, high);
    }
  }

  SPARTA_INLINE void put(int64_t row, const Vec (&sums)[1]) const {
    const int64_t at = row * out_columns_;
    Vec out = end_.before(sums[0]);
    if (residuals_[0]) out += joined(residuals_[0] + at, residuals_[1] + at, stored_);
    out = end_.after(out);
    _mm512_mask_storeu_ps(y_[0] + at, stored_, (__m512)out);
    _mm512_mask_storeu_ps(y_[1] + at - kHalf, static_cast<LaneMask>(stored_ << kHalf), (__m512)out);
  }

 private:
  static Vec halves(float low, float high) {
    return (Vec)_mm512_mask_blend_ps(0xff00, (__m512)splat(low), (__m512)splat(high));
  }
  static SPARTA_INLINE Vec joined(const float* low, const float* high, LaneMask lanes) {
    return load_lanes(high - kHalf, static_cast<LaneMask>(lanes << kHalf), load_lanes(low, lanes));
  }

  const SlidingEnd end_;
  const float* const x_[2];
  const int64_t columns_;
  float* const y_[2];
  const int64_t out_columns_;
  const LaneMask inside_;
  const LaneMask stored_;
  const float* residuals_[2];
  Vec weights_[kSide * kSide];
};

// Adds what one row of taps makes of a row of the input.
template <int Row, class Lines, int Vectors = Lines::kVectors>
SPARTA_INLINE void add_row(const Lines& lines, const Vec (&taps)[Vectors][kSide], Vec (&sums)[Vectors]) {
  each<kSide>([&](auto tap) SPARTA_LAMBDA {
    each<Vectors>([&](auto j) SPARTA_LAMBDA { sums[j] += lines.weight(Row * kSide + tap) * taps[j][tap]; });
  });
}

// A row of the input ends a row of the output, is in the middle of the next one and begins the one after that.
template <class Lines, int Vectors = Lines::kVectors>
SPARTA_INLINE void slide_by_one(const Lines& lines, const SlidingTask& task) {
  Vec sums[kSide][Vectors] = {};
  for (int64_t first = task.begin - 1; first <= task.end; first += kSide) {
    each<kSide>([&](auto part) SPARTA_LAMBDA {
      const int64_t line = first + part;
      if (line > task.end) return;
      Vec(&ends)[Vectors] = sums[part];
      Vec(&begins)[Vectors] = sums[(part + 2) % kSide];
      each<Vectors>([&](auto j) SPARTA_LAMBDA { begins[j] = Vec{}; });
      if (line >= 0 && line < task.rows) {
        Vec taps[Vectors][kSide];
        lines.read(line, taps);
        add_row<2>(lines, taps, ends);
        add_row<1>(lines, taps, sums[(part + 1) % kSide]);
        add_row<0>(lines, taps, begins);
      }
      if (line > task.begin) lines.put(line - 1, ends);
    });
  }
}

// The same where every second row is the middle of one, and the others end one and begin the next.
template <class Lines, int Vectors = Lines::kVectors>
SPARTA_INLINE void slide_by_two(const Lines& lines, const SlidingTask& task) {
  Vec taps[Vectors][kSide], begins[Vectors] = {};
  if (task.begin > 0 && 2 * task.begin - 1 < task.rows) {
    lines.read(2 * task.begin - 1, taps);
    add_row<0>(lines, taps, begins);
  }
  for (int64_t row = task.begin; row < task.end; ++row) {
    Vec sums[Vectors];
    each<Vectors>([&](auto j) SPARTA_LAMBDA { sums[j] = begins[j], begins[j] = Vec{}; });
    if (2 * row < task.rows) {
      lines.read(2 * row, taps);
      add_row<1>(lines, taps, sums);
    }
    if (2 * row + 1 < task.rows) {
      lines.read(2 * row + 1, taps);
      add_row<2>(lines, taps, sums);
      add_row<0>(lines, taps, begins);
    }
    lines.put(row, sums);
  }
}

template <int Stride, class Lines>
SPARTA_INLINE void slide(const Lines& lines, const SlidingTask& task) {
  if constexpr (Stride == 1) {
    slide_by_one(lines, task);
  } else {
    slide_by_two(lines, task);
  }
}

template <int Stride, int Vectors>
void slide_strips(const SlidingTask& task, int64_t column) {
  for (int64_t plane = 0; plane < task.planes; ++plane) {
    slide<Stride>(PlaneStrip<Stride, Vectors>(task, plane, column), task);
  }
}

template <int Stride>
void slide_planes(const SlidingTask& task) {
  // A row of a pair leaves a lane of its half free, or is read by twos from a vector with a lane that is free.
  if (task.columns < (Stride == 1 ? kHalf : kLanes)) {
    for (int64_t plane = 0; plane < task.planes; plane += 2) {
      slide<Stride>(PlanePair<Stride>(task, plane, std::min(plane + 1, task.planes - 1)), task);
    }
    return;
  }
  const int64_t vectors = ceil_div(task.out_columns, kLanes), strips = ceil_div(vectors, kStripVectors);
  for (int64_t i = strips - 1; i >= 0; --i) {  // a strip writes over the next row, which strips before it mend
    const int64_t first = vectors * i / strips, count = vectors * (i + 1) / strips - first;
    if (count == 1) slide_strips<Stride, 1>(task, first * kLanes);
    if (count == 2) slide_strips<Stride, 2>(task, first * kLanes);
    if (count == 3) slide_strips<Stride, 3>(task, first * kLanes);
    if (count == 4) slide_strips<Stride, 4>(task, first * kLanes);
  }
}

inline void slide_down(const SlidingTask& task) { (task.stride == 1 ? slide_planes<1> : slide_planes<2>)(task); }
#else
constexpr bool kSlides = false;
inline void slide_down(const SlidingTask&) {}
#endif

}  // namespace sparta
