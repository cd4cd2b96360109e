// y = x W^T for one token or a few: reading the weights is all the work, so the fewest bytes win. Four forms: columns
// of 4, 8 or 16 output channels with one index each; for single weights (AVX-512) a permuted compact form, which holds
// 16 rows in the lanes of a vector and picks the inputs with a permutation instead of a gather, and a bitmap, which has
// fewer bytes where a fifth of the weights or more are live; and plain row lists.
// Every form is one straight stream through memory, prefetched a few kilobytes ahead.
#pragma once

#include "epilogue.h"
#include "threads.h"

namespace sparta {

enum StreamForm : int32_t { kColumns = 0, kPermuted = 1, kRows = 2, kBitmap = 3 };

constexpr int64_t kChunkInputs = 32;  // inputs that two AVX-512 registers hold
constexpr int kPermutedRows = 16;

// A packed weight. Group g holds output channels [g * height, (g + 1) * height) and the entries starts[g] to
// starts[g + 1]. Columns have `height` values and one index an entry; the other forms one value and one index.
struct StreamMatrix {
  int64_t channels;  // N
  int64_t inputs;    // K
  int64_t groups;
  const int64_t* starts;  // [groups + 1]
  const void* indices;    // uint16 or uint32 input channels; permuted: uint8 within a chunk
  const float* values;
  const int64_t* step_starts;    // permuted: [groups + 1]
  const uint16_t* step_lanes;    // permuted: [steps], which of the 16 rows have a value; bitmap: [channels][steps],
                                 // which of the next 16 inputs have one
  const uint8_t* step_advances;  // permuted: [steps], how many chunks of inputs to go on before it
  const int64_t* costs;          // [groups + 1], running sums
  int32_t form;
  int32_t height;
  int32_t index_bytes;
  int32_t prefetch;  // bytes ahead; 0 for none
};

template <int Height, class Index>
inline void column_sums(const float* x, const Index* indices, const float* values, int64_t entries, int64_t ahead,
                        float* sums) {
  using V = typename Vector<Height>::floats;
  V parts[4] = {};  // four independent sums hide the latency of the additions
  int64_t i = 0;
  for (; i + 4 <= entries; i += 4) {
    if (ahead) {
      const char* later = reinterpret_cast<const char*>(values + i * Height) + ahead;
#pragma GCC unroll 4
      for (int line = 0; line < Height / 4; ++line) __builtin_prefetch(later + 64 * line);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) parts[j] += splat<V>(x[indices[i + j]]) * load<V>(values + (i + j) * Height);
  }
  for (; i < entries; ++i) parts[0] += splat<V>(x[indices[i]]) * load<V>(values + i * Height);
  store(sums, (parts[0] + parts[1]) + (parts[2] + parts[3]));
}

template <class Index>
inline float row_sum(const float* x, const Index* indices, const float* values, int64_t entries, int64_t ahead) {
  float parts[4] = {};
  int64_t i = 0;
  for (; i + 4 <= entries; i += 4) {
    if (ahead) __builtin_prefetch(reinterpret_cast<const char*>(values + i) + ahead);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) parts[j] += values[i + j] * x[indices[i + j]];
  }
  for (; i < entries; ++i) parts[0] += values[i] * x[indices[i]];
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

#if defined(SPARTA_AVX512)
// A step multiplies up to 16 values, each with the input it names among the 32 of a chunk, and then spreads the
// products to the lanes of their rows. Lanes without a value are left out of the sum, so that an infinite input only
// reaches the rows that have a weight for it. Steps of all chunks are one loop, because the end of a short loop is
// mispredicted. Arrays are padded for whole loads at the end, and so is x.
inline void permuted_sums(const StreamMatrix& matrix, const float* x, int64_t group, float* sums) {
  const float* values = matrix.values + matrix.starts[group];
  const uint8_t* indices = static_cast<const uint8_t*>(matrix.indices) + matrix.starts[group];
  const int64_t ahead = matrix.prefetch;
  const auto add_step = [&](int64_t step, __m512 sum) __attribute__((always_inline)) {
    const __mmask16 lanes = matrix.step_lanes[step];
    x += kChunkInputs * matrix.step_advances[step];
    if (ahead) {
      __builtin_prefetch(reinterpret_cast<const char*>(values) + ahead);
      __builtin_prefetch(reinterpret_cast<const char*>(indices) + ahead / 4);
    }
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(indices));
    const __m512 inputs =
        _mm512_permutex2var_ps(_mm512_loadu_ps(x), _mm512_cvtepu8_epi32(bytes), _mm512_loadu_ps(x + 16));
    const __m512 products = _mm512_mul_ps(_mm512_loadu_ps(values), inputs);
    const int count = __builtin_popcount(lanes);
    values += count;
    indices += count;
    return _mm512_mask_add_ps(sum, lanes, sum, _mm512_maskz_expand_ps(lanes, products));
  };
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  int64_t step = matrix.step_starts[group];
  const int64_t end = matrix.step_starts[group + 1];
  for (; step + 2 <= end; step += 2) {
    even = add_step(step, even);
    odd = add_step(step + 1, odd);
  }
  if (step < end) even = add_step(step, even);
  _mm512_storeu_ps(sums, _mm512_add_ps(even, odd));
}

// The live weights of a row stand together; a bit for every input says where they go. Two steps cover a chunk, of which
// there are whole ones only, in x and in the bitmap.
inline float bitmap_sum(const StreamMatrix& matrix, const float* x, int64_t row) {
  const float* values = matrix.values + matrix.starts[row];
  const int64_t steps = (matrix.inputs + kChunkInputs - 1) / kChunkInputs * 2;
  const uint16_t* lanes = matrix.step_lanes + row * steps;
  const int64_t ahead = matrix.prefetch;
  __m512 parts[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t step = 0; step < steps; step += 2) {
    if (ahead) {
      __builtin_prefetch(reinterpret_cast<const char*>(values) + ahead);
      __builtin_prefetch(reinterpret_cast<const char*>(lanes + step) + ahead / 8);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __mmask16 present = lanes[step + half];
      const __m512 weights = _mm512_maskz_expand_ps(present, _mm512_loadu_ps(values));
      const __m512 inputs = _mm512_loadu_ps(x + 16 * (step + half));
      parts[half] = _mm512_mask3_fmadd_ps(weights, inputs, parts[half], present);
      values += __builtin_popcount(present);
    }
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(parts[0], parts[1]));
}
#endif

// Whole chunks of inputs are loaded: where the last one is ragged, the rows of x are copied with zeros behind them.
struct WholeChunks {
  const float* x;
  int64_t stride;
};

// Null when memory ran out.
inline WholeChunks whole_chunks(const StreamCall& call, bool by_chunks, int64_t inputs, Scratch& scratch) {
  if (!by_chunks || inputs % kChunkInputs == 0) return {call.x, call.x_stride};
  const int64_t stride = (inputs + kChunkInputs - 1) / kChunkInputs * kChunkInputs;
  float* copy = scratch.get(std::max<int64_t>(call.tokens, 1) * stride);
  for (int64_t token = 0; copy && token < call.tokens; ++token) {
    std::copy_n(call.x + token * call.x_stride, inputs, copy + token * stride);
    std::fill(copy + token * stride + inputs, copy + (token + 1) * stride, 0.0f);
  }
  return {copy, stride};
}

template <class Index>
inline void group_sums(const StreamMatrix& matrix, const float* x, int64_t group, float* sums) {
  const int64_t begin = matrix.starts[group];
  const int64_t entries = matrix.starts[group + 1] - begin;
  const Index* indices = static_cast<const Index*>(matrix.indices) + begin;
  const float* values = matrix.values + begin * matrix.height;
  switch (matrix.height) {
    case 16: return column_sums<16>(x, indices, values, entries, matrix.prefetch, sums);
    case 8: return column_sums<8>(x, indices, values, entries, matrix.prefetch, sums);
    case 4: return column_sums<4>(x, indices, values, entries, matrix.prefetch, sums);
    default: sums[0] = row_sum(x, indices, values, entries, matrix.prefetch);
  }
}

// Whether this library holds the form.
inline bool knows_stream(const StreamMatrix& matrix) {
  const bool index = matrix.index_bytes == 2 || matrix.index_bytes == 4;
  if (matrix.form == kColumns) return index && (matrix.height == 4 || matrix.height == 8 || matrix.height == 16);
  if (matrix.form == kRows) return index && matrix.height == 1;
#if defined(SPARTA_AVX512)
  if (matrix.form == kPermuted) return matrix.index_bytes == 1 && matrix.height == kPermutedRows;
  if (matrix.form == kBitmap) return matrix.height == 1;
#endif
  return false;
}

// Not inlined: it would be compiled once for each activation.
SPARTA_NOINLINE inline void sums_of(const StreamMatrix& matrix, const float* x, int64_t group, float* sums) {
#if defined(SPARTA_AVX512)
  if (matrix.form == kPermuted) return permuted_sums(matrix, x, group, sums);
  if (matrix.form == kBitmap) {
    sums[0] = bitmap_sum(matrix, x, group);
    return;
  }
#endif
  if (matrix.index_bytes == 2) return group_sums<uint16_t>(matrix, x, group, sums);
  return group_sums<uint32_t>(matrix, x, group, sums);
}

// Channels are gathered to a whole vector before the epilogue, however small the groups are.
template <Activation Act>
inline void multiply_groups_of(const StreamMatrix& matrix, const StreamCall& call, const float* inputs,
                               int64_t inputs_stride, int64_t begin, int64_t end) {
  const Epilogue epilogue{call.bias, call.residual, call.residual_stride, call.activation};
  constexpr int64_t kTogether = 16;
  const int64_t groups_together = kTogether / matrix.height;
  for (int64_t first = begin; first < end; first += groups_together) {
    const int64_t last = std::min(first + groups_together, end);
    const int64_t channel = first * matrix.height;
    const int64_t channels = std::min(last * matrix.height, matrix.channels) - channel;
    for (int64_t token = 0; token < call.tokens; ++token) {
      alignas(64) float sums[kTogether] = {};
      const float* x = inputs + token * inputs_stride;
      for (int64_t group = first; group < last; ++group) {
        sums_of(matrix, x, group, sums + (group - first) * matrix.height);
      }
      for (int64_t at = 0; at < channels; at += kLanes) {
        const float* residual = call.residual ? call.residual + token * call.residual_stride + channel + at : nullptr;
        finish_channels<Act>(load(sums + at), epilogue, channel + at, residual,
                             call.y + token * call.y_stride + channel + at, channels - at);
      }
    }
  }
}

// False when memory ran out.
inline bool multiply_stream(const StreamMatrix& matrix, const StreamCall& call) {
  bool enough_memory = true;
  parallel(call.threads, [&](int64_t index, int64_t count) {
    const int64_t begin = share_begin(matrix.costs, matrix.groups, 1, index, count);
    const int64_t end = share_begin(matrix.costs, matrix.groups, 1, index + 1, count);
    static thread_local Scratch scratch;
    const bool by_chunks = matrix.form == kPermuted || matrix.form == kBitmap;
    const WholeChunks inputs = whole_chunks(call, by_chunks, matrix.inputs, scratch);
    if (!inputs.x && matrix.inputs > 0) {
#pragma omp atomic write
      enough_memory = false;
      return;
    }
    with_activation(call.activation, [&](auto tag) {
      multiply_groups_of<decltype(tag)::value>(matrix, call, inputs.x, inputs.stride, begin, end);
    });
  });
  return enough_memory;
}

}  // namespace sparta
