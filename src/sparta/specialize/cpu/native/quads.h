// Four rows of an unstructured weight that share what they load: a vector of inputs is loaded once for all rows of the
// four that have a weight there. For ten weights at 80 % sparsity that are seven and a half loads, at 50 % fewer than
// five. Columns are listed by which rows these are, in fifteen lists, so that none asks a question for each column. What
// all four rows have alone comes first, a column of each row in turn, so that no sum waits for itself. Which four rows
// these are is another matter in every chunk of columns: those of about the same length, so that few are left over.
#pragma once

#include <cstring>

#include "panel.h"

namespace sparta {

constexpr int kQuadRows = 4;
constexpr int kVectors = 4;      // of tokens in a tile, at most, of other rows
constexpr int kQuadVectors = 7;  // of tokens, at most: 28 sums fill the registers of AVX-512
constexpr int kQuadLists = 1 << kQuadRows;  // the first is of steps: one column for each row
// Numbers of a quad in the array of starts: its first offset, its first value, and 16 bits for the length of each list.
constexpr int64_t kQuadStarts = 2 + kQuadLists / 4;

SPARTA_INLINE const float* at_offset(const float* x, uint32_t offset) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + offset);
}

// Two offsets by one load: loads are what an unstructured weight has most of.
struct TwoOffsets {
  uint64_t both;
  SPARTA_INLINE explicit TwoOffsets(const uint32_t* from) { std::memcpy(&both, from, sizeof both); }
  SPARTA_INLINE uint32_t first() const { return static_cast<uint32_t>(both); }
  SPARTA_INLINE uint32_t second() const { return static_cast<uint32_t>(both >> 32); }
};

// One weight of one row.
template <int MV>
SPARTA_INLINE void multiply_single(const float* from, Vec weight, Vec (&sums)[MV]) {
#pragma GCC unroll 8
  for (int j = 0; j < MV; ++j) sums[j] += weight * load(from + j * kLanes);
}

// Rows that lists are for, at most: what more rows of a wide tile share would be more than registers hold.
template <int MV>
constexpr int kMostShared = MV > kVectors ? 2 : kQuadRows;

// Keeps a vector in a register, where compilers would rather load it again for each use.
SPARTA_INLINE void keep_in_register(Vec& v) {
#if defined(SPARTA_AVX512)
  asm("" : "+v"(v));
#else
  (void)v;
#endif
}

// One column: the rows of `List` have a weight there, in their order.
template <int List, int MV>
SPARTA_INLINE void multiply_column(const float* from, const Vec* weights, Vec (&sums)[kQuadRows][MV]) {
  const auto weight_of = [&](int r) SPARTA_LAMBDA { return weights[__builtin_popcount(List & ((1 << r) - 1))]; };
  if constexpr (MV > kVectors) {
    // One vector of inputs at a time: with seven sums for each row there are registers for no more.
#pragma GCC unroll 8
    for (int j = 0; j < MV; ++j) {
      Vec inputs = load(from + j * kLanes);
      if constexpr (__builtin_popcount(List) > 1) keep_in_register(inputs);
#pragma GCC unroll 4
      for (int r = 0; r < kQuadRows; ++r) {
        if (List >> r & 1) sums[r][j] += weight_of(r) * inputs;
      }
    }
    return;
  }
  Vec inputs[MV];
#pragma GCC unroll 8
  for (int j = 0; j < MV; ++j) inputs[j] = load(from + j * kLanes);
#pragma GCC unroll 4
  for (int r = 0; r < kQuadRows; ++r) {
    if (!(List >> r & 1)) continue;
#pragma GCC unroll 8
    for (int j = 0; j < MV; ++j) sums[r][j] += weight_of(r) * inputs[j];
  }
}

// A narrow tile has several sums for each row, or every column would wait for the one before it.
constexpr int kQuadSums = kLanes >= 16 ? 16 : 8;
template <int MV>
constexpr int kSumSets = kQuadSums / (kQuadRows * MV) > 1 ? kQuadSums / (kQuadRows * MV) : 1;

// Some columns of one list, each into the next set of sums.
template <int List, int MV, int Columns>
SPARTA_INLINE void multiply_columns(const float* x, const uint32_t*& offsets, const float*& values,
                                    Vec (&sums)[kSumSets<MV>][kQuadRows][MV]) {
  constexpr int kWeights = __builtin_popcount(List);
  // Wide tiles have registers for the weights of one column only.
  constexpr int kTogether = MV > kVectors ? kWeights : Columns * kWeights;
  __builtin_prefetch(values + kWeightsAhead);
  Vec weights[kTogether];
  const auto column = [&](auto number, uint32_t offset) SPARTA_LAMBDA {
    constexpr int kColumn = decltype(number)::value, kFirst = kColumn * kWeights % kTogether;
    if constexpr (kFirst == 0) {
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; ++i) weights[i] = splat(values[kColumn * kWeights + i]);
    }
    multiply_column<List, MV>(at_offset(x, offset), weights + kFirst, sums[kColumn % kSumSets<MV>]);
  };
  each<Columns / 2>([&](auto pair) SPARTA_LAMBDA {
    constexpr int kPair = decltype(pair)::value;
    const TwoOffsets two(offsets + 2 * kPair);
    column(std::integral_constant<int, 2 * kPair>(), two.first());
    column(std::integral_constant<int, 2 * kPair + 1>(), two.second());
  });
  offsets += Columns;
  values += Columns * kWeights;
}

// The columns of one list; both streams go on. Only lists of single rows have odd lengths.
template <int List, int MV>
SPARTA_INLINE void multiply_list(const float* x, int64_t columns, const uint32_t*& offsets, const float*& values,
                                 Vec (&sums)[kSumSets<MV>][kQuadRows][MV]) {
  constexpr bool kSingle = __builtin_popcount(List) == 1;
  if constexpr (kSingle && kSumSets<MV> >= 4) {
    for (; columns >= 4; columns -= 4) multiply_columns<List, MV, 4>(x, offsets, values, sums);
  }
  for (; columns >= 2; columns -= 2) multiply_columns<List, MV, 2>(x, offsets, values, sums);
  if constexpr (kSingle) {
    if (columns == 0) return;
    const Vec weight = splat(*values++);
    multiply_column<List, MV>(at_offset(x, *offsets++), &weight, sums[0]);
  }
}

// Steps of one column for each row, which no other row of the four has; both streams go on.
template <int MV>
SPARTA_INLINE void multiply_steps(const float* x, int64_t steps, const uint32_t*& offsets, const float*& values,
                                  Vec (&sums)[kSumSets<MV>][kQuadRows][MV]) {
  static_assert(kQuadRows == 4, "the weights that load_four() loads");
  constexpr int kSets = kSumSets<MV> > 1 ? 2 : 1;
  const auto step = [&](auto set) SPARTA_LAMBDA {
    Vec(&into)[kQuadRows][MV] = sums[decltype(set)::value];
    const Vec four = load_four(values);
    const TwoOffsets one(offsets), two(offsets + 2);
    __builtin_prefetch(values + kWeightsAhead);
    multiply_single<MV>(at_offset(x, one.first()), pick(four, 0), into[0]);
    multiply_single<MV>(at_offset(x, one.second()), pick(four, 1), into[1]);
    multiply_single<MV>(at_offset(x, two.first()), pick(four, 2), into[2]);
    multiply_single<MV>(at_offset(x, two.second()), pick(four, 3), into[3]);
    offsets += kQuadRows;
    values += kQuadRows;
  };
  for (; steps >= kSets; steps -= kSets) each<kSets>(step);
  if (kSets > 1 && steps) each<1>(step);
}

// All lists of one quad; `starts` are its numbers.
template <int MV>
SPARTA_INLINE void multiply_quad(const float* x, const int64_t* starts, const uint32_t* offsets, const float* values,
                                 Vec (&total)[kQuadRows][MV]) {
  uint16_t columns[kQuadLists];
  std::memcpy(columns, starts + 2, sizeof columns);
  offsets += starts[0];
  values += starts[1];
  Vec sums[kSumSets<MV>][kQuadRows][MV] = {};
  multiply_steps<MV>(x, columns[0], offsets, values, sums);
  each<kQuadLists - 1>([&](auto before) SPARTA_LAMBDA {
    constexpr int kList = decltype(before)::value + 1;
    if constexpr (__builtin_popcount(kList) <= kMostShared<MV>) {
      multiply_list<kList, MV>(x, columns[kList], offsets, values, sums);
    }
  });
#pragma GCC unroll 4
  for (int r = 0; r < kQuadRows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < MV; ++j) {
      total[r][j] = sums[0][r][j];
#pragma GCC unroll 4
      for (int set = 1; set < kSumSets<MV>; ++set) total[r][j] += sums[set][r][j];
    }
  }
}

}  // namespace sparta
