// Products of a language model's weights with several tokens, and the share of one thread in a product of any number.
// Several tokens unpack a few rows at a time, which all tokens then use while they are in the cache, so that one copy of
// the weights serves prompts and single tokens.
#pragma once

#include <type_traits>

#include "decode_matrix.h"

namespace sparta {

constexpr int kTokenVectors = 3;
constexpr int64_t kTokenTile = kTokenVectors * kLanes;
constexpr int kTogether = 4;  // rows that share the loads of x

// Four rows of a weight, each input in its place, and what they make of a tile of tokens: sums [4][kTokenTile].
template <int Vectors>
inline void multiply_rows(const float* const (&rows)[kTogether], int64_t inputs, const float* panel, float* sums) {
  Vec parts[kTogether][Vectors] = {};
  for (int64_t k = 0; k < inputs; ++k) {
    Vec tokens[Vectors];
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) tokens[v] = load(panel + k * kTokenTile + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kTogether; ++r) {
      const Vec weight = splat(rows[r][k]);
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) parts[r][v] += weight * tokens[v];
    }
  }
  for (int r = 0; r < kTogether; ++r) {
    for (int v = 0; v < Vectors; ++v) store(sums + r * kTokenTile + v * kLanes, parts[r][v]);
  }
}

// Columns of four rows: entry i is input inputs[i], with values[4 * i] to values[4 * i + 3].
template <int Vectors>
inline void multiply_columns(const uint16_t* inputs, const float* values, int64_t entries, const float* panel,
                             float* sums) {
  Vec parts[kTogether][Vectors] = {};
  for (int64_t i = 0; i < entries; ++i) {
    const float* x = panel + inputs[i] * kTokenTile;
    Vec tokens[Vectors];
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) tokens[v] = load(x + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kTogether; ++r) {
      const Vec weight = splat(values[kTogether * i + r]);
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) parts[r][v] += weight * tokens[v];
    }
  }
  for (int r = 0; r < kTogether; ++r) {
    for (int v = 0; v < Vectors; ++v) store(sums + r * kTokenTile + v * kLanes, parts[r][v]);
  }
}

// The same for one row, with two sets of sums to hide the latency.
template <int Vectors>
inline void multiply_list(const int32_t* inputs, const float* values, int64_t entries, const float* panel,
                          float* sums) {
  Vec parts[2][Vectors] = {};
  int64_t i = 0;
  for (; i + 2 <= entries; i += 2) {
#pragma GCC unroll 2
    for (int set = 0; set < 2; ++set) {
      const float* x = panel + inputs[i + set] * kTokenTile;
      const Vec weight = splat(values[i + set]);
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) parts[set][v] += weight * load(x + v * kLanes);
    }
  }
  for (; i < entries; ++i) {
    for (int v = 0; v < Vectors; ++v) {
      parts[0][v] += splat(values[i]) * load(panel + inputs[i] * kTokenTile + v * kLanes);
    }
  }
  for (int v = 0; v < Vectors; ++v) store(sums + v * kLanes, parts[0][v] + parts[1][v]);
}

// Calls f with how many vectors hold the tokens of a tile.
template <class F>
inline void with_vectors(int64_t tokens, F f) {
  if (tokens <= kLanes) return f(std::integral_constant<int, 1>());
  if (tokens <= 2 * kLanes) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, kTokenVectors>());
}

inline int64_t padded_inputs(int64_t inputs) { return ceil_div(inputs, 8) * 8; }

// A row of a bitmap with every input in its place; `out` has room for whole bytes of the bitmap.
template <class Value>
inline void expand_row(const Value* values, const uint8_t* marks, int64_t inputs, float* out) {
  const int64_t bytes = ceil_div(inputs, 8);
#if defined(__AVX2__)
  const ExpandTable& table = expand_table();
  const __m256 scale = _mm256_set1_ps(kExpandedScale<Value>);
  for (int64_t i = 0; i < bytes; ++i) {
    _mm256_storeu_ps(out + 8 * i, _mm256_mul_ps(expanded(values, marks[i], table), scale));
    values += __builtin_popcount(marks[i]);
  }
#else
  std::fill(out, out + 8 * bytes, 0.0f);
  for (int64_t i = 0; i < bytes; ++i) {
    for (unsigned mask = marks[i]; mask; mask &= mask - 1) {
      out[8 * i + __builtin_ctz(mask)] = static_cast<float>(*values++);
    }
  }
#endif
}

// The live weights of a row of a bitmap, as a list; returns how many.
template <class Value>
inline int64_t list_row(const Value* values, const uint8_t* marks, int64_t inputs, int32_t* places, float* out) {
  int64_t entries = 0;
  for (int64_t i = 0; i < ceil_div(inputs, 8); ++i) {
    for (unsigned mask = marks[i]; mask; mask &= mask - 1) {
      places[entries] = static_cast<int32_t>(8 * i + __builtin_ctz(mask));
      out[entries] = static_cast<float>(values[entries]);
      ++entries;
    }
  }
  return entries;
}

// Writes the sums of `count` rows, [rows][kTokenTile], token by token.
inline void scatter_sums(const float* sums, int64_t count, int64_t channel, int64_t present, float* y, int64_t stride) {
  for (int64_t t = 0; t < present; ++t) {
    for (int64_t r = 0; r < count; ++r) y[t * stride + channel + r] = sums[r * kTokenTile + t];
  }
}

// Several tokens of panels [tiles][K][kTokenTile] and the rows of a call: what all forms share.
struct ManyTokens {
  const float* panel;
  int64_t tokens;
  int64_t inputs;
  float* y;
  int64_t stride;

  // f(panel of a tile, vectors, sums) for every tile, whose sums of `count` rows then go to y.
  template <class F>
  void each_tile(int64_t channel, int64_t count, F f) const {
    alignas(64) float sums[kTogether * kTokenTile];
    for (int64_t first = 0; first < tokens; first += kTokenTile) {
      const int64_t present = std::min(kTokenTile, tokens - first);
      with_vectors(present, [&](auto vectors) { f(panel + first * inputs, vectors, sums); });
      scatter_sums(sums, count, channel, present, y + first * stride, stride);
    }
  }
};

// Rows in which every input has its place: stored so, or unpacked into `scratch`, four at a time.
template <class Value>
inline void many_by_rows(const DecodeMatrix& matrix, const ManyTokens& many, int64_t begin, int64_t end,
                         float* scratch) {
  const Value* values = static_cast<const Value*>(matrix.values);
  const int64_t k = matrix.inputs, stride = padded_inputs(k), bytes = ceil_div(k, 8);
  for (int64_t row = begin; row < end; row += kTogether) {
    const int64_t count = std::min<int64_t>(kTogether, end - row);
    const float* rows[kTogether];
    for (int64_t r = 0; r < kTogether; ++r) {
      const int64_t from = row + std::min(r, count - 1);  // what is beyond the last row is computed and not used
      float* own = scratch + r * stride;
      rows[r] = own;
      if (matrix.form == kDecodeBitmap) {
        expand_row(values + matrix.starts[from], static_cast<const uint8_t*>(matrix.marks) + from * bytes, k, own);
      } else if constexpr (sizeof(Value) == 4) {
        rows[r] = values + from * k;
      } else {
        for (int64_t i = 0; i < k; ++i) own[i] = static_cast<float>(values[from * k + i]);
      }
    }
    many.each_tile(row, count, [&](const float* panel, auto vectors, float* sums) {
      multiply_rows<decltype(vectors)::value>(rows, k, panel, sums);
    });
  }
}

// Rows of a bitmap with few live weights.
template <class Value>
inline void many_by_lists(const DecodeMatrix& matrix, const ManyTokens& many, int64_t begin, int64_t end,
                          float* scratch) {
  const int64_t k = matrix.inputs;
  int32_t* places = reinterpret_cast<int32_t*>(scratch + padded_inputs(k));
  for (int64_t row = begin; row < end; ++row) {
    const int64_t entries = list_row(static_cast<const Value*>(matrix.values) + matrix.starts[row],
                                     static_cast<const uint8_t*>(matrix.marks) + row * ceil_div(k, 8), k, places,
                                     scratch);
    many.each_tile(row, 1, [&](const float* panel, auto vectors, float* sums) {
      multiply_list<decltype(vectors)::value>(places, scratch, entries, panel, sums);
    });
  }
}

template <class Value>
inline void many_by_columns(const DecodeMatrix& matrix, const ManyTokens& many, int64_t begin, int64_t end,
                            float* scratch) {
  const int64_t height = matrix.height;
  for (int64_t group = begin; group < end; ++group) {
    const int64_t first = matrix.starts[group], entries = matrix.starts[group + 1] - first;
    const uint16_t* inputs = static_cast<const uint16_t*>(matrix.marks) + first;
    for (int64_t row = 0; row < height && group * height + row < matrix.channels; row += kTogether) {
      const Value* from = static_cast<const Value*>(matrix.values) + first * height + row;
      for (int64_t i = 0; i < entries; ++i) {
        for (int64_t r = 0; r < kTogether; ++r) scratch[i * kTogether + r] = static_cast<float>(from[i * height + r]);
      }
      const int64_t channel = group * height + row;
      const int64_t count = std::min<int64_t>(kTogether, matrix.channels - channel);
      many.each_tile(channel, count, [&](const float* panel, auto vectors, float* sums) {
        multiply_columns<decltype(vectors)::value>(inputs, scratch, entries, panel, sums);
      });
    }
  }
}

template <class Value>
inline void multiply_many(const DecodeMatrix& matrix, const ManyTokens& many, int64_t begin, int64_t end,
                          float* scratch) {
  if (matrix.form == kDecodeColumns) return many_by_columns<Value>(matrix, many, begin, end, scratch);
  // Four rows at once do twice the work of a list in the same time.
  const bool few = matrix.form == kDecodeBitmap &&
                   3 * (matrix.starts[end] - matrix.starts[begin]) < matrix.inputs * (end - begin);
  if (few) return many_by_lists<Value>(matrix, many, begin, end, scratch);
  many_by_rows<Value>(matrix, many, begin, end, scratch);
}

// The tokens of a call as a thread reads them: one as it is and rounded, several in panels, which the thread packs for
// itself.
struct DecodeTokens {
  const float* x;      // [tokens][inputs]
  const float* panel;  // where there is more than one
  int64_t tokens;
  RoundedToken rounded;  // where there is one, and a matrix that takes it
};

inline int64_t panel_floats(int64_t inputs, int64_t tokens) {
  return tokens > 1 ? ceil_div(tokens, kTokenTile) * kTokenTile * inputs : rounded_floats(inputs);
}

// `rounds`: whether any of the products to come takes bytes.
inline DecodeTokens packed_tokens(const float* x, int64_t stride, int64_t tokens, int64_t inputs, float* panel,
                                  bool rounds) {
  if (tokens <= 1) {
    RoundedToken rounded = {};
#if defined(SPARTA_DECODE_BYTES)
    if (rounds) rounded = rounded_token(x, inputs, panel);
#else
    (void)rounds;
#endif
    return {x, nullptr, tokens, rounded};
  }
  for (int64_t first = 0; first < tokens; first += kTokenTile) {
    const int64_t present = std::min(kTokenTile, tokens - first);
    pack_tile(x + first * stride, stride, present, 0, inputs, kTokenTile, panel + first * inputs);
  }
  return {x, panel, tokens, {}};
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
inline int64_t unpacked_floats(int64_t inputs) { return kTogether * padded_inputs(inputs); }

struct ChannelRange {
  int64_t begin;
  int64_t end;
};

// The products of groups [begin, end) with one token.
inline void multiply_token(const DecodeMatrix& matrix, const DecodeTokens& input, int64_t begin, int64_t end,
                           float* y) {
#if defined(SPARTA_DECODE_BYTES)
  if (input.rounded.high && by_bytes(matrix)) return multiply_bytes(matrix, input.rounded, begin, end, y);
#endif
  if (matrix.value_bytes == 1) return multiply_one<int8_t>(matrix, input.x, begin, end, y);
  multiply_one<float>(matrix, input.x, begin, end, y);
}

// Writes share `index` of `count` of y = x W^T + bias, and returns which channels that are.
inline ChannelRange multiply_share(const DecodeMatrix& matrix, const DecodeTokens& input, int64_t index, int64_t count,
                                   float* scratch, float* y, int64_t y_stride) {
  const int64_t groups = groups_of(matrix);
  const int64_t begin = share_begin(matrix.costs, groups, 1, index, count);
  const int64_t end = share_begin(matrix.costs, groups, 1, index + 1, count);
  const ChannelRange range{std::min(begin * matrix.height, matrix.channels),
                           std::min(end * matrix.height, matrix.channels)};
  if (input.tokens == 1) {
    multiply_token(matrix, input, begin, end, y);
  } else {
    const ManyTokens many{input.panel, input.tokens, matrix.inputs, y, y_stride};
    if (matrix.value_bytes == 1) multiply_many<int8_t>(matrix, many, begin, end, scratch);
    else multiply_many<float>(matrix, many, begin, end, scratch);
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
        packed_tokens(x, x_stride, tokens, matrix.inputs, memory + unpacked_floats(matrix.inputs), by_bytes(matrix));
    multiply_share(matrix, input, index, count, memory, y, y_stride);
  });
  return enough_memory;
}

}  // namespace sparta
