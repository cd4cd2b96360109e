// y = x W^T for one token or a few: reading the weights is all the work, so the fewest bytes win. Three forms: columns
// of 4, 8 or 16 output channels with one index each; a permuted compact form for single weights (AVX-512), which holds
// 16 rows in the lanes of a vector and picks the inputs with a permutation instead of a gather; and plain row lists.
// The one idea to know: every form is one straight stream through memory, prefetched a few kilobytes ahead.
#pragma once

#include "epilogue.h"
#include "threads.h"

namespace sparta {

enum StreamForm : int32_t { kColumns = 0, kPermuted = 1, kRows = 2 };

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
  const int64_t* step_starts;   // permuted: [groups + 1]
  const uint16_t* step_lanes;   // permuted: [steps], which of the 16 rows have a value
  const uint8_t* chunk_steps;   // permuted: [groups][chunks]
  const int64_t* costs;         // [groups + 1], running sums
  int32_t form;
  int32_t height;
  int32_t index_bytes;
  int32_t prefetch;  // bytes ahead; 0 for none
};

// Activations of one call: token-major, rows `x_stride` and `y_stride` apart.
struct StreamCall {
  const float* x;
  float* y;
  int64_t tokens;
  int64_t x_stride;
  int64_t y_stride;
  const float* bias;
  const float* residual;
  int64_t residual_stride;
  int32_t activation;
  int32_t threads;
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
// The values and indices of a step are expanded to the lanes that have one; the other lanes are left out of the sum, so
// that an infinite input only reaches the rows that have a weight for it. Arrays are padded for whole loads at the end.
inline void permuted_sums(const StreamMatrix& matrix, const float* x, int64_t group, float* sums) {
  const float* values = matrix.values + matrix.starts[group];
  const uint8_t* indices = static_cast<const uint8_t*>(matrix.indices) + matrix.starts[group];
  const uint16_t* lanes = matrix.step_lanes + matrix.step_starts[group];
  const int64_t chunks = (matrix.inputs + kChunkInputs - 1) / kChunkInputs;
  const uint8_t* steps = matrix.chunk_steps + group * chunks;
  const int64_t ahead = matrix.prefetch;
  __m512 sum = _mm512_setzero_ps();
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const float* from = x + chunk * kChunkInputs;
    const int64_t left = matrix.inputs - chunk * kChunkInputs;
    const __m512 low = (__m512)load_some(from, left);
    const __m512 high = left > 16 ? (__m512)load_some(from + 16, left - 16) : _mm512_setzero_ps();
    if (ahead) {
      __builtin_prefetch(reinterpret_cast<const char*>(indices) + ahead / 4);
      __builtin_prefetch(reinterpret_cast<const char*>(lanes) + ahead / 8);
    }
    for (int step = 0; step < steps[chunk]; ++step) {
      const __mmask16 present = *lanes++;
      if (ahead) __builtin_prefetch(reinterpret_cast<const char*>(values) + ahead);
      const __m512 weights = _mm512_maskz_expand_ps(present, _mm512_loadu_ps(values));
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(indices));
      const __m512i places = _mm512_maskz_expand_epi32(present, _mm512_cvtepu8_epi32(bytes));
      const __m512 inputs = _mm512_permutex2var_ps(low, places, high);
      sum = _mm512_mask3_fmadd_ps(weights, inputs, sum, present);
      const int count = __builtin_popcount(present);
      values += count;
      indices += count;
    }
  }
  _mm512_storeu_ps(sums, sum);
}
#endif

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
#endif
  return false;
}

// Not inlined: it would be compiled once for each activation.
SPARTA_NOINLINE inline void sums_of(const StreamMatrix& matrix, const float* x, int64_t group, float* sums) {
#if defined(SPARTA_AVX512)
  if (matrix.form == kPermuted) return permuted_sums(matrix, x, group, sums);
#endif
  if (matrix.index_bytes == 2) return group_sums<uint16_t>(matrix, x, group, sums);
  return group_sums<uint32_t>(matrix, x, group, sums);
}

// Channels are gathered to a whole vector before the epilogue, however small the groups are.
template <Activation Act>
inline void multiply_groups_of(const StreamMatrix& matrix, const StreamCall& call, int64_t begin, int64_t end) {
  const Epilogue epilogue{call.bias, call.residual, call.residual_stride, call.activation};
  constexpr int64_t kTogether = 16;
  const int64_t groups_together = kTogether / matrix.height;
  for (int64_t first = begin; first < end; first += groups_together) {
    const int64_t last = std::min(first + groups_together, end);
    const int64_t channel = first * matrix.height;
    const int64_t channels = std::min(last * matrix.height, matrix.channels) - channel;
    for (int64_t token = 0; token < call.tokens; ++token) {
      alignas(64) float sums[kTogether] = {};
      const float* x = call.x + token * call.x_stride;
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

inline void multiply_stream(const StreamMatrix& matrix, const StreamCall& call) {
  parallel(call.threads, [&](int64_t index, int64_t count) {
    const int64_t begin = share_begin(matrix.costs, matrix.groups, 1, index, count);
    const int64_t end = share_begin(matrix.costs, matrix.groups, 1, index + 1, count);
    with_activation(call.activation, [&](auto tag) {
      multiply_groups_of<decltype(tag)::value>(matrix, call, begin, end);
    });
  });
}

}  // namespace sparta
