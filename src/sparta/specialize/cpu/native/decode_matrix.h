// A packed weight for the layers of a language model, and its products with one token: values in fp32, or in int8 with
// one scale per row, and three forms: every value of a row; live values with a bit for each input; columns of 4, 8 or 16
// rows with one index each. One token reads the weights straight through; several tokens are in decode_product.h.
#pragma once

#include "decode_bytes.h"
#include "panel.h"
#include "threads.h"

namespace sparta {

enum DecodeForm : int32_t { kDecodeDense = 0, kDecodeBitmap = 1, kDecodeColumns = 2 };

// A packed weight (N, K). Groups of `height` rows are what threads share.
struct DecodeMatrix {
  int64_t channels;       // N
  int64_t inputs;         // K
  const void* values;     // float or int8; 64 bytes may be read beyond the end
  const int64_t* starts;  // [groups + 1], the first value of a group (bitmap) or its first entry (columns)
  const void* marks;      // bitmap: [channels][ceil(K / 8)] bytes; columns: [entries] uint16 inputs
  const float* scales;    // [channels] where values are int8
  const float* bias;      // [channels], or null
  const int64_t* costs;   // [groups + 1], running sums
  int32_t form;
  int32_t value_bytes;  // 4 or 1
  int32_t height;       // 1, or 4, 8, 16 in columns
  int32_t unused;
};

inline int64_t groups_of(const DecodeMatrix& matrix) { return ceil_div(matrix.channels, matrix.height); }

// How the 8 inputs of a byte of the bitmap take their values from those that stand together.
struct ExpandTable {
  // For 32-bit lanes: which of the next 8 values; lanes without one have the highest bit.
  alignas(32) int32_t lanes[256][8];
  // For bytes, each to the top of its lane, so that it is read as 2^24 times its value; lanes without one become 0.
  alignas(32) int32_t bytes[256][8];
  ExpandTable() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0;
      for (int lane = 0; lane < 8; ++lane) {
        const bool live = (mask >> lane) & 1;
        lanes[mask][lane] = live ? next : static_cast<int32_t>(0x80000000u);
        bytes[mask][lane] = static_cast<int32_t>((live ? static_cast<uint32_t>(next) << 24 : 0x80000000u) | 0x808080u);
        next += live;
      }
    }
  }
};

inline const ExpandTable& expand_table() {
  static const ExpandTable table;
  return table;
}

constexpr float kTopByte = 1.0f / 16777216.0f;  // undoes the 2^24

inline float dense_dot(const float* w, const float* x, int64_t inputs) {
  Vec parts[4] = {};
  int64_t k = 0;
  for (; k + 4 * kLanes <= inputs; k += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) parts[j] += load(w + k + j * kLanes) * load(x + k + j * kLanes);
  }
  for (; k < inputs; k += kLanes) parts[0] += load_some(w + k, inputs - k) * load_some(x + k, inputs - k);
  return sum_by_halves((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

// The sum over inputs that fill no whole vector, or all of them where there are no vectors of bytes.
inline float dense_tail(const int8_t* w, const float* x, int64_t begin, int64_t inputs) {
  float total = 0;
  for (int64_t k = begin; k < inputs; ++k) total += static_cast<float>(w[k]) * x[k];
  return total;
}

#if defined(__AVX2__)
// Rows of int8, several at once: they share the loads of x.
template <int Rows>
inline void dense_rows(const int8_t* w, int64_t stride, const float* x, int64_t inputs, float* sums) {
  __m256 parts[Rows][2];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) parts[r][0] = parts[r][1] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + 16 <= inputs; k += 16) {
    const __m256 low = _mm256_loadu_ps(x + k), high = _mm256_loadu_ps(x + k + 8);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      __builtin_prefetch(w + r * stride + k + 1024);
      parts[r][0] = _mm256_fmadd_ps(eight_bytes(w + r * stride + k), low, parts[r][0]);
      parts[r][1] = _mm256_fmadd_ps(eight_bytes(w + r * stride + k + 8), high, parts[r][1]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    sums[r] = sum_of(_mm256_add_ps(parts[r][0], parts[r][1])) + dense_tail(w + r * stride, x, k, inputs);
  }
}
#else
template <int Rows>
inline void dense_rows(const int8_t* w, int64_t stride, const float* x, int64_t inputs, float* sums) {
  for (int r = 0; r < Rows; ++r) sums[r] = dense_tail(w + r * stride, x, 0, inputs);
}
#endif

template <int Rows>
inline void dense_rows(const float* w, int64_t stride, const float* x, int64_t inputs, float* sums) {
  for (int r = 0; r < Rows; ++r) sums[r] = dense_dot(w + r * stride, x, inputs);
}

// The inputs of the last byte of a bitmap that is not full, or of every byte where there are no vectors for it.
template <class Value>
inline float bitmap_tail(const Value* values, const uint8_t* marks, const float* x, int64_t begin, int64_t bytes) {
  float total = 0;
  for (int64_t i = begin; i < bytes; ++i) {
    for (unsigned mask = marks[i]; mask; mask &= mask - 1) {
      total += static_cast<float>(*values++) * x[8 * i + __builtin_ctz(mask)];
    }
  }
  return total;
}

#if defined(SPARTA_AVX512)
// Sixteen inputs at a time, whose values one instruction puts in their places.
inline float bitmap_row(const float* values, const uint8_t* marks, const float* x, int64_t inputs) {
  const int64_t bytes = ceil_div(inputs, 8), whole = inputs / 32;
  __m512 parts[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t i = 0; i < whole; ++i) {
    __builtin_prefetch(reinterpret_cast<const char*>(values) + 1024);
    uint32_t both;
    std::memcpy(&both, marks + 4 * i, sizeof both);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const unsigned mask = both >> (16 * j) & 0xffffu;
      const __m512 spread = _mm512_maskz_expand_ps(static_cast<__mmask16>(mask), _mm512_loadu_ps(values));
      parts[j] = _mm512_fmadd_ps(spread, _mm512_loadu_ps(x + 32 * i + 16 * j), parts[j]);
      values += __builtin_popcount(mask);
    }
  }
  return sum_by_halves((Vec)_mm512_add_ps(parts[0], parts[1])) + bitmap_tail(values, marks, x, 4 * whole, bytes);
}
#endif

#if defined(__AVX2__)
SPARTA_INLINE __m256 expanded(const float* values, unsigned mask, const ExpandTable& table) {
  const __m256i lanes = _mm256_load_si256(reinterpret_cast<const __m256i*>(table.lanes[mask]));
  const __m256 moved = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), lanes);
  return _mm256_blendv_ps(moved, _mm256_setzero_ps(), _mm256_castsi256_ps(lanes));
}

SPARTA_INLINE __m256 expanded(const int8_t* values, unsigned mask, const ExpandTable& table) {
  int64_t eight;
  std::memcpy(&eight, values, sizeof eight);
  const __m256i where = _mm256_load_si256(reinterpret_cast<const __m256i*>(table.bytes[mask]));
  return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(_mm256_set1_epi64x(eight), where));
}

template <class Value>
constexpr float kExpandedScale = sizeof(Value) == 1 ? kTopByte : 1.0f;

template <class Value>
inline float bitmap_row(const Value* values, const uint8_t* marks, const float* x, int64_t inputs) {
  const ExpandTable& table = expand_table();
  const int64_t bytes = ceil_div(inputs, 8), whole = inputs / 8;
  __m256 parts[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + 4 <= whole; i += 4) {
    __builtin_prefetch(reinterpret_cast<const char*>(values) + 1024);
    uint32_t four;
    std::memcpy(&four, marks + i, sizeof four);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const unsigned mask = (four >> (8 * j)) & 255u;
      parts[j] = _mm256_fmadd_ps(expanded(values, mask, table), _mm256_loadu_ps(x + 8 * (i + j)), parts[j]);
      values += __builtin_popcount(mask);
    }
  }
  for (; i < whole; ++i) {
    parts[0] = _mm256_fmadd_ps(expanded(values, marks[i], table), _mm256_loadu_ps(x + 8 * i), parts[0]);
    values += __builtin_popcount(marks[i]);
  }
  const __m256 sum = _mm256_add_ps(_mm256_add_ps(parts[0], parts[1]), _mm256_add_ps(parts[2], parts[3]));
  return sum_of(sum) * kExpandedScale<Value> + bitmap_tail(values, marks, x, i, bytes);
}
#else
template <class Value>
inline float bitmap_row(const Value* values, const uint8_t* marks, const float* x, int64_t inputs) {
  return bitmap_tail(values, marks, x, 0, ceil_div(inputs, 8));
}
#endif

template <int Height, class Value>
inline void column_group(const Value* values, const uint16_t* marks, int64_t entries, const float* x, float* sums) {
  int64_t i = 0;
#if defined(__AVX2__)
  // Two columns of 4, or one of 8, or half of one of 16, to a vector.
  __m256 parts[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  const auto eight = [&](int64_t at) __attribute__((always_inline)) {
    if constexpr (sizeof(Value) == 1) return eight_bytes(values + at);
    else return _mm256_loadu_ps(values + at);
  };
  if constexpr (Height == 4) {
    for (; i + 8 <= entries; i += 8) {
      __builtin_prefetch(reinterpret_cast<const char*>(values + 4 * i) + 1024);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m256 first = _mm256_broadcast_ss(x + marks[i + 2 * j]);
        const __m256 second = _mm256_broadcast_ss(x + marks[i + 2 * j + 1]);
        parts[j] = _mm256_fmadd_ps(eight(4 * (i + 2 * j)), _mm256_blend_ps(first, second, 0xF0), parts[j]);
      }
    }
    const __m256 sum = _mm256_add_ps(_mm256_add_ps(parts[0], parts[1]), _mm256_add_ps(parts[2], parts[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
  } else {
    constexpr int kVectors = Height / 8, kColumns = 4 / kVectors;
    for (; i + kColumns <= entries; i += kColumns) {
      __builtin_prefetch(reinterpret_cast<const char*>(values + Height * i) + 1024);
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) {
        const __m256 input = _mm256_broadcast_ss(x + marks[i + j]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          __m256& part = parts[j * kVectors + v];
          part = _mm256_fmadd_ps(eight(Height * (i + j) + 8 * v), input, part);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      __m256 sum = parts[v];
      for (int j = 1; j < kColumns; ++j) sum = _mm256_add_ps(sum, parts[j * kVectors + v]);
      _mm256_storeu_ps(sums + 8 * v, sum);
    }
  }
#else
  for (int r = 0; r < Height; ++r) sums[r] = 0;
#endif
  for (; i < entries; ++i) {
    for (int r = 0; r < Height; ++r) sums[r] += static_cast<float>(values[Height * i + r]) * x[marks[i]];
  }
}

// Whether one token's products with a matrix take it rounded to bytes.
inline bool by_bytes(const DecodeMatrix& matrix) {
  return matrix.value_bytes == 1 && matrix.form != kDecodeColumns && has_byte_products();
}

#if defined(SPARTA_DECODE_BYTES)
// The products of rows [begin, end) of int8 with one token that is rounded.
inline void multiply_bytes(const DecodeMatrix& matrix, const RoundedToken& token, int64_t begin, int64_t end,
                           float* y) {
  const int8_t* values = static_cast<const int8_t*>(matrix.values);
  const uint8_t* marks = static_cast<const uint8_t*>(matrix.marks);
  const int64_t k = matrix.inputs, bytes = ceil_div(k, 8);
  for (int64_t row = begin; row < end; ++row) {
    y[row] = matrix.form == kDecodeBitmap
                 ? bitmap_byte_row(values + matrix.starts[row], marks + row * bytes, token, k)
                 : dense_byte_row(values + row * k, token, k);
  }
}
#endif

// The products of groups [begin, end) with one token; y begins with channel 0.
template <class Value>
inline void multiply_one(const DecodeMatrix& matrix, const float* x, int64_t begin, int64_t end, float* y) {
  const Value* values = static_cast<const Value*>(matrix.values);
  const int64_t k = matrix.inputs;
  if (matrix.form == kDecodeDense) {
    int64_t row = begin;
    for (; row + 4 <= end; row += 4) dense_rows<4>(values + row * k, k, x, k, y + row);
    for (; row < end; ++row) dense_rows<1>(values + row * k, k, x, k, y + row);
    return;
  }
  if (matrix.form == kDecodeBitmap) {
    const int64_t bytes = ceil_div(k, 8);
    const uint8_t* marks = static_cast<const uint8_t*>(matrix.marks);
    for (int64_t row = begin; row < end; ++row) {
      y[row] = bitmap_row(values + matrix.starts[row], marks + row * bytes, x, k);
    }
    return;
  }
  const uint16_t* marks = static_cast<const uint16_t*>(matrix.marks);
  for (int64_t group = begin; group < end; ++group) {
    const int64_t first = matrix.starts[group], entries = matrix.starts[group + 1] - first, channel = group * matrix.height;
    const Value* from = values + first * matrix.height;
    alignas(32) float sums[16];
    if (matrix.height == 4) column_group<4>(from, marks + first, entries, x, sums);
    if (matrix.height == 8) column_group<8>(from, marks + first, entries, x, sums);
    if (matrix.height == 16) column_group<16>(from, marks + first, entries, x, sums);
    std::copy_n(sums, std::min<int64_t>(matrix.height, matrix.channels - channel), y + channel);
  }
}

}  // namespace sparta
