// Products with a packed weight for the layers of a language model: values in fp32, or in int8 with one scale per row,
// and four forms: every value of a row; live values with a bit for each input; columns of 4, 8 or 16 rows with one index
// each. One token reads the weights straight through. Several tokens unpack a few rows at a time, which all tokens
// then use while they are in the cache, so that one copy of the weights serves prompts and single tokens.
#pragma once

#include "panel.h"
#include "threads.h"

namespace sparta {

enum DecodeForm : int32_t { kDecodeDense = 0, kDecodeBitmap = 1, kDecodeColumns = 2 };

// A packed weight (N, K). Groups of `height` rows are what threads share.
struct DecodeMatrix {
  int64_t channels;       // N
  int64_t inputs;         // K
  const void* values;     // float or int8; 32 bytes may be read beyond the end
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

// ---------------------------------------------------------------------------------------------- one token

inline float dense_dot(const float* w, const float* x, int64_t inputs) {
  Vec parts[4] = {};
  int64_t k = 0;
  for (; k + 4 * kLanes <= inputs; k += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) parts[j] += load(w + k + j * kLanes) * load(x + k + j * kLanes);
  }
  for (; k < inputs; k += kLanes) parts[0] += load_some(w + k, inputs - k) * load_some(x + k, inputs - k);
  const Vec sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  return total;
}

// The sum over inputs that fill no whole vector, or all of them where there are no vectors of bytes.
inline float dense_tail(const int8_t* w, const float* x, int64_t begin, int64_t inputs) {
  float total = 0;
  for (int64_t k = begin; k < inputs; ++k) total += static_cast<float>(w[k]) * x[k];
  return total;
}

#if defined(__AVX2__)
SPARTA_INLINE float sum_of(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

SPARTA_INLINE __m256 eight_bytes(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

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

// ---------------------------------------------------------------------------------------------- several tokens

constexpr int kTokenVectors = 3;
constexpr int64_t kTokenTile = kTokenVectors * kLanes;
constexpr int kTogether = 4;  // rows that share the loads of x

// Live weights of a few rows: entry i is input inputs[i] with `height` values.
struct Unpacked {
  int32_t* inputs;
  float* values;
  int64_t entries;
};

template <int Height, int Vectors>
inline void multiply_unpacked(const Unpacked& rows, const float* panel, float* sums) {
  constexpr int kSets = Height == 1 ? 2 : 1;  // enough independent sums to hide the latency
  Vec parts[kSets][Height][Vectors] = {};
  int64_t i = 0;
  for (; i + kSets <= rows.entries; i += kSets) {
#pragma GCC unroll 2
    for (int set = 0; set < kSets; ++set) {
      const float* x = panel + rows.inputs[i + set] * kTokenTile;
      Vec tokens[Vectors];
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) tokens[v] = load(x + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < Height; ++r) {
        const Vec weight = splat(rows.values[(i + set) * Height + r]);
#pragma GCC unroll 3
        for (int v = 0; v < Vectors; ++v) parts[set][r][v] += weight * tokens[v];
      }
    }
  }
  for (; i < rows.entries; ++i) {
    for (int r = 0; r < Height; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        parts[0][r][v] += splat(rows.values[i * Height + r]) * load(panel + rows.inputs[i] * kTokenTile + v * kLanes);
      }
    }
  }
  for (int r = 0; r < Height; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      Vec sum = parts[0][r][v];
      if constexpr (kSets == 2) sum += parts[1][r][v];
      store(sums + r * kTokenTile + v * kLanes, sum);
    }
  }
}

template <int Height>
inline void multiply_unpacked(const Unpacked& rows, const float* panel, int64_t tokens, float* sums) {
  if (tokens <= kLanes) return multiply_unpacked<Height, 1>(rows, panel, sums);
  if (tokens <= 2 * kLanes) return multiply_unpacked<Height, 2>(rows, panel, sums);
  multiply_unpacked<Height, kTokenVectors>(rows, panel, sums);
}

// Rows [row, row + count) as entries of four rows; those beyond `count` are 0.
template <class Value>
inline void unpack_dense(const Value* values, int64_t inputs, int64_t count, Unpacked& out) {
  for (int64_t k = 0; k < inputs; ++k) {
    for (int64_t r = 0; r < kTogether; ++r) {
      out.values[k * kTogether + r] = r < count ? static_cast<float>(values[r * inputs + k]) : 0.0f;
    }
  }
  out.entries = inputs;
}

template <class Value>
inline void unpack_bitmap(const Value* values, const uint8_t* marks, int64_t inputs, Unpacked& out) {
  int64_t entries = 0;
  for (int64_t i = 0; i < ceil_div(inputs, 8); ++i) {
    for (unsigned mask = marks[i]; mask; mask &= mask - 1) {
      out.inputs[entries] = static_cast<int32_t>(8 * i + __builtin_ctz(mask));
      out.values[entries] = static_cast<float>(values[entries]);
      ++entries;
    }
  }
  out.entries = entries;
}

// Rows of a packed weight and tokens in panels of kTokenTile, [tiles][K][kTokenTile].
template <class Value>
inline void multiply_many(const DecodeMatrix& matrix, const float* panel, int64_t tokens, int64_t begin, int64_t end,
                          Unpacked& unpacked, float* y, int64_t y_stride) {
  const Value* values = static_cast<const Value*>(matrix.values);
  const int64_t k = matrix.inputs;
  alignas(64) float sums[kTogether * kTokenTile];
  const auto finish = [&](int64_t channel, int64_t count, int64_t height) {
    for (int64_t first = 0; first < tokens; first += kTokenTile) {
      const int64_t present = std::min(kTokenTile, tokens - first);
      const float* x = panel + first * k;
      if (height == 1) multiply_unpacked<1>(unpacked, x, present, sums);
      else multiply_unpacked<kTogether>(unpacked, x, present, sums);
      for (int64_t t = 0; t < present; ++t) {
        for (int64_t r = 0; r < count; ++r) y[(first + t) * y_stride + channel + r] = sums[r * kTokenTile + t];
      }
    }
  };
  if (matrix.form == kDecodeDense) {
    for (int64_t i = 0; i < k; ++i) unpacked.inputs[i] = static_cast<int32_t>(i);
    for (int64_t row = begin; row < end; row += kTogether) {
      const int64_t count = std::min<int64_t>(kTogether, end - row);
      unpack_dense(values + row * k, k, count, unpacked);
      finish(row, count, kTogether);
    }
    return;
  }
  if (matrix.form == kDecodeBitmap) {
    const uint8_t* marks = static_cast<const uint8_t*>(matrix.marks);
    for (int64_t row = begin; row < end; ++row) {
      unpack_bitmap(values + matrix.starts[row], marks + row * ceil_div(k, 8), k, unpacked);
      finish(row, 1, 1);
    }
    return;
  }
  const uint16_t* marks = static_cast<const uint16_t*>(matrix.marks);
  for (int64_t group = begin; group < end; ++group) {
    const int64_t first = matrix.starts[group], height = matrix.height;
    unpacked.entries = matrix.starts[group + 1] - first;
    for (int64_t i = 0; i < unpacked.entries; ++i) unpacked.inputs[i] = marks[first + i];
    for (int64_t row = 0; row < height && group * height + row < matrix.channels; row += kTogether) {
      const Value* from = values + first * height + row;
      for (int64_t i = 0; i < unpacked.entries; ++i) {
        for (int64_t r = 0; r < kTogether; ++r) {
          unpacked.values[i * kTogether + r] = static_cast<float>(from[i * height + r]);
        }
      }
      const int64_t channel = group * height + row;
      finish(channel, std::min<int64_t>(kTogether, matrix.channels - channel), kTogether);
    }
  }
}

// ---------------------------------------------------------------------------------------------- one thread's share

// The tokens of a call as a thread reads them: one as it is, several in panels, which the thread packs for itself.
struct DecodeTokens {
  const float* x;      // [tokens][inputs]
  const float* panel;  // where there is more than one
  int64_t tokens;
};

inline int64_t panel_floats(int64_t inputs, int64_t tokens) {
  return tokens > 1 ? ceil_div(tokens, kTokenTile) * kTokenTile * inputs : 0;
}

inline DecodeTokens packed_tokens(const float* x, int64_t stride, int64_t tokens, int64_t inputs, float* panel) {
  if (tokens <= 1) return {x, nullptr, tokens};
  for (int64_t first = 0; first < tokens; first += kTokenTile) {
    const int64_t present = std::min(kTokenTile, tokens - first);
    pack_tile(x + first * stride, stride, present, 0, inputs, kTokenTile, panel + first * inputs);
  }
  return {x, panel, tokens};
}

// Scales and adds the bias of channels [begin, end) of all tokens, and then adds what was there, for a residual.
inline void finish_decoded(const DecodeMatrix& matrix, int64_t begin, int64_t end, int64_t tokens, float* y,
                           int64_t stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = y + t * stride;
    if (matrix.scales) {
      for (int64_t n = begin; n < end; ++n) row[n] *= matrix.scales[n];
    }
    if (matrix.bias) {
      for (int64_t n = begin; n < end; ++n) row[n] += matrix.bias[n];
    }
  }
}

// Memory that one thread needs to unpack rows, in floats.
inline int64_t unpacked_floats(int64_t inputs) { return (kTogether + 1) * inputs; }

struct ChannelRange {
  int64_t begin;
  int64_t end;
};

// Writes share `index` of `count` of y = x W^T + bias, and returns which channels that are.
inline ChannelRange multiply_share(const DecodeMatrix& matrix, const DecodeTokens& input, int64_t index, int64_t count,
                                   float* scratch, float* y, int64_t y_stride) {
  const int64_t groups = groups_of(matrix);
  const int64_t begin = share_begin(matrix.costs, groups, 1, index, count);
  const int64_t end = share_begin(matrix.costs, groups, 1, index + 1, count);
  const ChannelRange range{std::min(begin * matrix.height, matrix.channels),
                           std::min(end * matrix.height, matrix.channels)};
  if (input.tokens == 1) {
    if (matrix.value_bytes == 1) multiply_one<int8_t>(matrix, input.x, begin, end, y);
    else multiply_one<float>(matrix, input.x, begin, end, y);
  } else {
    Unpacked unpacked{reinterpret_cast<int32_t*>(scratch + kTogether * matrix.inputs), scratch, 0};
    if (matrix.value_bytes == 1) {
      multiply_many<int8_t>(matrix, input.panel, input.tokens, begin, end, unpacked, y, y_stride);
    } else {
      multiply_many<float>(matrix, input.panel, input.tokens, begin, end, unpacked, y, y_stride);
    }
  }
  finish_decoded(matrix, range.begin, range.end, input.tokens, y, y_stride);
  return range;
}

// y = x W^T + bias for any number of tokens. False when memory ran out.
inline bool multiply_decoded(const DecodeMatrix& matrix, const float* x, int64_t x_stride, int64_t tokens, float* y,
                             int64_t y_stride, int32_t threads) {
  bool enough_memory = true;
  parallel(threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    float* memory = scratch.get(unpacked_floats(matrix.inputs) + panel_floats(matrix.inputs, tokens));
    if (!memory) {
#pragma omp atomic write
      enough_memory = false;
      return;
    }
    const DecodeTokens input =
        packed_tokens(x, x_stride, tokens, matrix.inputs, memory + unpacked_floats(matrix.inputs));
    multiply_share(matrix, input, index, count, memory, y, y_stride);
  });
  return enough_memory;
}

}  // namespace sparta
