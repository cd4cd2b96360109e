// Groups of 32 rows times a run of pixels: vectors run along output channels, and every place of the image is broadcast
// to them. As many pixels as registers hold are computed at once, whatever their number is, so rows of an image need no
// gaps and no vector is half empty: the way of dense layers, whose groups share all of their input channels.
#pragma once

#include "bands.h"
#include "int8_places.h"

namespace sparta {

constexpr int kRowVectors = kBlockRows / kLanes;
// Pixels whose sums fill the registers beside the weights and one place.
constexpr int kMostRun = kLanes == 16 ? 14 : kLanes == 8 ? 3 : 1;

// Pixels that follow each other in the result. The second half of their tokens, (count + 1) / 2 behind, may be in another
// row of the image.
struct Run {
  int64_t tokens[2];
  int64_t pixel;
  int64_t count;
};

constexpr int64_t first_half(int64_t count) { return (count + 1) / 2; }

// Cuts the pixels of a band into runs, those of a row about alike; two short rows are one run.
inline void find_runs(const ConvCall& call, const Band& band, std::vector<Run>& runs) {
  runs.clear();
  const int64_t end = band.first + band.tokens, width = call.out_columns;
  for (int64_t token = band.first; token < end;) {
    const int64_t row = token / call.row_width, column = token % call.row_width, pixel = row * width + column;
    const int64_t pixels = std::min(width - column, end - token);
    if (column == 0 && 2 * width <= kMostRun && token + call.row_width + width <= end) {
      runs.push_back({{token, token + call.row_width}, pixel, 2 * width});
      token += 2 * call.row_width;
      continue;
    }
    const int64_t parts = pixels > 0 ? ceil_div(pixels, kMostRun) : 0;
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t at = pixels * i / parts, count = pixels * (i + 1) / parts - at;
      runs.push_back({{token + at, token + at + first_half(count)}, pixel + at, count});
    }
    token += call.row_width - column;
  }
}

// A square of four tokens and four channels lies in every 128 bits.
SPARTA_INLINE void transpose_fours(Vec (&four)[4]) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  exchange<2>(four[0], four[2], kAll);
  exchange<2>(four[1], four[3], kAll);
  exchange<1>(four[0], four[1], kAll);
  exchange<1>(four[2], four[3], kAll);
}

#if defined(SPARTA_AVX512)
constexpr bool kMovesBytes = true;
#else
constexpr bool kMovesBytes = false;
#endif

// The bytes of one of four tokens whose places are the 128 bits of `bytes`, as steps of the residual's grid.
template <int Token>
SPARTA_INLINE Vec token_steps(IntVec bytes, const PlacesFinish& finish) {
#if defined(SPARTA_AVX512)
  constexpr char kAt = 4 * Token, kZero = -1;
  const __m128i order = _mm_setr_epi8(kAt, kZero, kZero, kZero, kAt + 1, kZero, kZero, kZero, kAt + 2, kZero, kZero,
                                      kZero, kAt + 3, kZero, kZero, kZero);
  bytes = (IntVec)_mm512_shuffle_epi8((__m512i)bytes, _mm512_broadcast_i32x4(order));
#endif
  return __builtin_convertvector(bytes - finish.residual.shift, Vec);
}

// Lanes that are up to four tokens of neighbouring places, `stride` apart, of which some may not be present.
struct QuadLanes {
  int64_t count;
#if defined(SPARTA_AVX512)
  SPARTA_INLINE __m128 one(const float* from) const {
    return count == 4 ? _mm_loadu_ps(from) : _mm_maskz_loadu_ps(static_cast<__mmask8>((1 << count) - 1), from);
  }
  SPARTA_INLINE Vec get(const float* from, int64_t stride, int64_t present) const {
    __m512 v = _mm512_castps128_ps512(one(from));
    if (present > 1) v = _mm512_insertf32x4(v, one(from + stride), 1);
    if (present > 2) v = _mm512_insertf32x4(v, one(from + 2 * stride), 2);
    if (present > 3) v = _mm512_insertf32x4(v, one(from + 3 * stride), 3);
    return (Vec)v;
  }
  SPARTA_INLINE void put(float* to, __m128 v) const {
    if (count == 4) {
      _mm_storeu_ps(to, v);
    } else {
      _mm_mask_storeu_ps(to, static_cast<__mmask8>((1 << count) - 1), v);
    }
  }
  SPARTA_INLINE void set(float* to, Vec v, int64_t stride, int64_t present) const {
    put(to, _mm512_castps512_ps128((__m512)v));
    if (present > 1) put(to + stride, _mm512_extractf32x4_ps((__m512)v, 1));
    if (present > 2) put(to + 2 * stride, _mm512_extractf32x4_ps((__m512)v, 2));
    if (present > 3) put(to + 3 * stride, _mm512_extractf32x4_ps((__m512)v, 3));
  }
#else
  SPARTA_INLINE Vec get(const float* from, int64_t stride, int64_t present) const {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < std::min<int64_t>(present, kLanes / 4); ++i) {
      std::memcpy(lanes + 4 * i, from + i * stride, static_cast<size_t>(count) * sizeof(float));
    }
    return load(lanes);
  }
  SPARTA_INLINE void set(float* to, Vec v, int64_t stride, int64_t present) const {
    float lanes[kLanes];
    store(lanes, v);
    for (int64_t i = 0; i < std::min<int64_t>(present, kLanes / 4); ++i) {
      std::memcpy(to + i * stride, lanes + 4 * i, static_cast<size_t>(count) * sizeof(float));
    }
  }
#endif
};

// One group and runs of the same number of pixels. The ends are at its first row and the first pixel of the image.
struct RunTask {
  const PanelMatrix* matrix;
  const PlacesFinish* finish;
  PlacesEnds ends;
  int64_t group;
  const int32_t* x;
  const Run* first;
  const Run* last;
};

// What the sums of a run become, where its ends are, and which of its group's rows exist.
struct RunSums {
  const int32_t* sums;  // [pixels][rows of a group]
  const float* multiplier;
  const float* offset;
  PlacesEnds ends;  // at the first row and the first pixel
  int64_t rows;     // from the first on to the last of all
  int64_t pixels;
};

// As places, where nothing is read or written in real numbers and no vector of rows lacks any: lanes need not be moved.
// No function of its own would leave the multiplying loop before it without registers.
template <bool Bounds, bool Adds>
SPARTA_NOINLINE void finish_run_places(const RunSums& run, const PlacesFinish& finish) {
  const Vec factor = splat(finish.factor), scale = splat(finish.residual_scale);
  const int64_t rows = std::min(run.rows, kBlockRows), plane = run.ends.plane;
  for (int64_t row = 0; row < rows; row += kLanes) {
    const Vec multiplier = load(run.multiplier + row), offset = load(run.offset + row);
    const int32_t* sums = run.sums + row;
    int32_t* places = run.ends.places + row / 4 * plane;
    const int32_t* added = Adds ? run.ends.residual_places + row / 4 * plane : nullptr;
    for (int64_t first = 0; first < run.pixels; first += 4, sums += 4 * kBlockRows) {
      const QuadLanes lanes{std::min<int64_t>(run.pixels - first, 4)};
      Vec four[4];
      each<4>([&](auto t) SPARTA_LAMBDA { four[t] = requantise(load_ints(sums + t * kBlockRows), multiplier, offset); });
      if (Bounds) bound_four(four, finish);
      if (Adds) {
        const Vec found = lanes.get(reinterpret_cast<const float*>(added + first), plane, kLanes / 4);
        const IntVec bytes = (IntVec)found ^ finish.residual.flip;
        each<4>([&](auto t) SPARTA_LAMBDA {
          four[t] = multiply_add(token_steps<decltype(t)::value>(bytes, finish), scale, four[t]);
        });
      }
      each<4>([&](auto t) SPARTA_LAMBDA { four[t] *= factor; });
      const Vec joined = (Vec)round_bytes<false>(four, finish.scales.bytes);
      lanes.set(reinterpret_cast<float*>(places + first), joined, plane, kLanes / 4);
    }
  }
}

SPARTA_NOINLINE inline void finish_run(const RunSums& run, const PlacesFinish& finish) {
  const int64_t rows = std::min(run.rows, kBlockRows);
  if (kMovesBytes && run.ends.places && !run.ends.real && !run.ends.residual && rows % kLanes == 0) {
    if (run.ends.residual_places) {
      return finish.bounds ? finish_run_places<true, true>(run, finish) : finish_run_places<false, true>(run, finish);
    }
    return finish.bounds ? finish_run_places<true, false>(run, finish) : finish_run_places<false, false>(run, finish);
  }
  for (int64_t row = 0; row < rows; row += kLanes) {
    const Vec multiplier = load(run.multiplier + row), offset = load(run.offset + row);
    for (int64_t first = 0; first < run.pixels; first += 4) {
      const int32_t* sums = run.sums + first * kBlockRows + row;
      Vec four[4];
      each<4>([&](auto t) SPARTA_LAMBDA { four[t] = requantise(load_ints(sums + t * kBlockRows), multiplier, offset); });
      transpose_fours(four);
      put_four(four, finish, run.ends, row / 4 * run.ends.plane + first, row * run.ends.plane + first, run.rows - row,
               QuadLanes{std::min<int64_t>(run.pixels - first, 4)});
    }
  }
}

template <class Unit, int Pixels>
void multiply_int8_run(const RunTask& given) {
  const RunTask task = given;  // copies, which no store can change
  const PanelMatrix& matrix = *task.matrix;
  const int64_t row = matrix.rows[task.group], rows = matrix.channels - row;
  const GroupScales<kBlockRows> scales(task.finish->scales, row, matrix.channels);
  const int64_t begin = matrix.starts[task.group], entries = matrix.starts[task.group + 1] - begin;
  const uint32_t* offsets = matrix.offsets + begin;
  const int32_t* values = reinterpret_cast<const int32_t*>(matrix.values) + begin * kBlockRows;
  // The weights of the next group, half of which each of the first two runs asks for.
  const char* const next = reinterpret_cast<const char*>(values + entries * kBlockRows);
  constexpr int64_t kLine = 2 * kBlockRows;
  alignas(64) int32_t all[(Pixels + 3) / 4 * 4 * kBlockRows] = {};
  for (const Run* run = task.first; run != task.last; ++run) {
    const char* const x[2] = {reinterpret_cast<const char*>(task.x + run->tokens[0]),
                              reinterpret_cast<const char*>(task.x + run->tokens[1])};
    IntVec sums[Pixels][kRowVectors];
    each<kRowVectors>([&](auto v) SPARTA_LAMBDA {
      const IntVec start = load_ints(scales.starts + v * kLanes);
      each<Pixels>([&](auto t) SPARTA_LAMBDA { sums[t][v] = start; });
    });
    const char* const ahead = next + std::min<int64_t>(run - task.first, 1) * entries * kLine;
    for (int64_t i = 0; i < entries; ++i) {
      __builtin_prefetch(ahead + i * kLine, 0, 2);
      decltype(Unit::weights(IntVec{})) weights[kRowVectors];
      each<kRowVectors>([&](auto v) SPARTA_LAMBDA {
        weights[v] = Unit::weights(load_ints(values + i * kBlockRows + v * kLanes));
      });
      each<Pixels>([&](auto t) SPARTA_LAMBDA {
        constexpr int kHalf = first_half(Pixels), kSecond = t >= kHalf;
        const int32_t* place = reinterpret_cast<const int32_t*>(x[kSecond] + offsets[i]) + (t - kSecond * kHalf);
        const typename Unit::Inputs input = Unit::split(IntVec{} + *place);
        each<kRowVectors>([&](auto v) SPARTA_LAMBDA { Unit::add(sums[t][v], input, weights[v]); });
      });
    }
    each<Pixels>([&](auto t) SPARTA_LAMBDA {
      each<kRowVectors>([&](auto v) SPARTA_LAMBDA { store_ints(all + t * kBlockRows + v * kLanes, sums[t][v]); });
    });
    finish_run(RunSums{all, scales.multiplier, scales.offset, moved(task.ends, run->pixel, run->pixel), rows, Pixels},
               *task.finish);
  }
}

using RunKernel = void (*)(const RunTask&);

template <class Unit, int... Pixels>
RunKernel find_runs_kernel_of(int64_t count, std::integer_sequence<int, Pixels...>) {
  static constexpr RunKernel kKernels[] = {multiply_int8_run<Unit, Pixels + 1>...};
  return kKernels[count - 1];
}

// For runs of 1 to kMostRun pixels.
inline RunKernel find_runs_kernel(int64_t count, bool no_least_weight) {
  constexpr auto kAll = std::make_integer_sequence<int, kMostRun>();
#if defined(SPARTA_AVX512) || defined(SPARTA_AVX_VNNI)
  if (has_vnni()) return find_runs_kernel_of<VnniUnit>(count, kAll);
#endif
#if defined(SPARTA_AVX2)
  if (no_least_weight) return find_runs_kernel_of<AbsoluteUnit>(count, kAll);
#endif
  (void)no_least_weight;
  return find_runs_kernel_of<SignedUnit>(count, kAll);
}

}  // namespace sparta
