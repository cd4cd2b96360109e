// y = x W^T for one token or a few with weights in a short format, int8 or bf16: reading them is all the work, so the
// fewest bytes win, and x stays in fp32. Two forms: a bitmap with a bit for every weight and the live ones after each
// other; and columns of 1, 4, 8 or 16 output channels with a byte each, the way from the column before.
// As in gemv.h, every form is one straight stream through memory. Weights become fp32 in registers; bitmaps of int8 stay
// bytes where the processor multiplies these, and tokens are then rounded to 16 bits (decode_bytes.h).
#pragma once

#include "decode_bytes.h"
#include "epilogue.h"
#include "gemv.h"
#include "threads.h"

namespace sparta {

constexpr int64_t kShortTokens = 4;  // that are multiplied at once

enum ShortForm : int32_t { kShortBitmap = 0, kShortDelta = 1 };
enum ShortValues : int32_t { kInt8Values = 0, kBf16Values = 1 };

// A packed weight. Group g holds output channels [g * height, (g + 1) * height) and the entries starts[g] to
// starts[g + 1], each of `height` values.
struct ShortMatrix {
  int64_t channels;  // N
  int64_t inputs;    // K
  int64_t groups;
  const int64_t* starts;  // [groups + 1]
  const uint32_t* bits;   // bitmap: [channels][ceil(inputs / 32)], and one more word that may be loaded
  const uint8_t* deltas;  // delta: [entries], input channels to go on before an entry
  const void* values;     // int8 or bf16, with 64 more after the last that may be loaded
  const float* scales;    // [channels], or null
  const int64_t* costs;   // [groups + 1], running sums
  int32_t form;
  int32_t height;
  int32_t format;    // of the values
  int32_t prefetch;  // bytes ahead; 0 for none
  float x_step;      // what x is multiples of, where it lies on a static grid; 0 for a 127th of a token's largest
  int32_t unused;
};

// How to load values of a format as floats.
struct Int8Loader {
  using Value = int8_t;
  static SPARTA_INLINE float one(const int8_t* from) { return static_cast<float>(*from); }
  template <int Count>
  static SPARTA_INLINE typename Vector<Count>::floats some(const int8_t* from) {
    using V = typename Vector<Count>::floats;
#if defined(SPARTA_AVX512) || defined(SPARTA_AVX2)
    if constexpr (Count == 4) {
      int32_t four;
      std::memcpy(&four, from, sizeof four);
      return (V)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
    } else if constexpr (Count == 8) {
      return (V)eight_bytes(from);
    }
#endif
    V v;
    for (int i = 0; i < Count; ++i) v[i] = static_cast<float>(from[i]);
    return v;
  }
};

struct Bf16Loader {
  using Value = uint16_t;
  static SPARTA_INLINE float one(const uint16_t* from) {
    const uint32_t bits = static_cast<uint32_t>(*from) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }
  template <int Count>
  static SPARTA_INLINE typename Vector<Count>::floats some(const uint16_t* from) {
    using V = typename Vector<Count>::floats;
#if defined(SPARTA_AVX512) || defined(SPARTA_AVX2)
    if constexpr (Count == 4) {
      const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
      return (V)_mm_slli_epi32(_mm_cvtepu16_epi32(four), 16);
    } else if constexpr (Count == 8) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
    }
#endif
    V v;
    for (int i = 0; i < Count; ++i) v[i] = one(from + i);
    return v;
  }
};

#if defined(SPARTA_AVX512) || defined(SPARTA_AVX2)
// For every byte of a bitmap: where each of the 8 bytes of a vector comes from, 0x80 where there is none.
struct BytePlaces {
  alignas(64) uint8_t places[256][8];
  BytePlaces() {
    for (int bits = 0; bits < 256; ++bits) {
      uint8_t next = 0;
      for (int i = 0; i < 8; ++i) places[bits][i] = bits >> i & 1 ? next++ : 0x80;
    }
  }
};

inline const BytePlaces& byte_places() {
  static const BytePlaces table;
  return table;
}

// Eight weights of which the live ones, as the bits say, lie at `from`.
SPARTA_INLINE __m256 expand_eight(const BytePlaces& table, const int8_t* from, uint32_t bits) {
  const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(table.places[bits]));
  const __m128i live = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8(live, places)));
}

SPARTA_INLINE __m256 expand_eight(const BytePlaces& table, const uint16_t* from, uint32_t bits) {
  const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(table.places[bits]));
  // Place i of 16 bits is made of the bytes 2 i and 2 i + 1; 0x80 stays above all of them.
  const __m128i twice = _mm_add_epi8(_mm_and_si128(places, _mm_set1_epi8(0x7f)), _mm_and_si128(places, _mm_set1_epi8(0x7f)));
  const __m128i low = _mm_or_si128(twice, _mm_and_si128(places, _mm_set1_epi8(static_cast<char>(0x80))));
  const __m128i pairs = _mm_unpacklo_epi8(low, _mm_or_si128(low, _mm_set1_epi8(1)));
  const __m128i live = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_shuffle_epi8(live, pairs)), 16);
}
#endif

// The sums of one row for `Tokens` tokens. x has whole words of 32 inputs.
template <class Loader, int Tokens>
inline void bitmap_row(const ShortMatrix& matrix, int64_t row, const float* x, int64_t stride, float* sums) {
  const int64_t words = (matrix.inputs + 31) / 32;
  const uint32_t* bits = matrix.bits + row * words;
  const typename Loader::Value* values = static_cast<const typename Loader::Value*>(matrix.values) + matrix.starts[row];
  const int64_t ahead = matrix.prefetch;
#if defined(SPARTA_AVX512) || defined(SPARTA_AVX2)
  const BytePlaces& table = byte_places();
  constexpr int kParts = Tokens <= 2 ? 2 : 1;  // sums that do not wait for each other
  __m256 parts[Tokens][kParts];
#pragma GCC unroll 8
  for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) parts[t][p] = _mm256_setzero_ps();
  }
  for (int64_t word = 0; word < words; ++word) {
    const uint32_t all = bits[word];
    if (ahead) __builtin_prefetch(reinterpret_cast<const char*>(values) + ahead);
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint32_t some = all >> 8 * quarter & 255;
      const __m256 weights = expand_eight(table, values, some);
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) {
        const __m256 inputs = _mm256_loadu_ps(x + t * stride + word * 32 + quarter * 8);
        parts[t][quarter % kParts] = _mm256_fmadd_ps(weights, inputs, parts[t][quarter % kParts]);
      }
      values += __builtin_popcount(some);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < Tokens; ++t) {
    const __m256 both = kParts == 2 ? _mm256_add_ps(parts[t][0], parts[t][kParts - 1]) : parts[t][0];
    sums[t * 16] = sum_of(both);
  }
#else
  (void)ahead;
  float parts[Tokens] = {};
  for (int64_t word = 0; word < words; ++word) {
    for (uint32_t left = bits[word]; left; left &= left - 1) {
      const int64_t k = word * 32 + __builtin_ctz(left);
      const float weight = Loader::one(values++);
      for (int t = 0; t < Tokens; ++t) parts[t] += weight * x[t * stride + k];
    }
  }
  for (int t = 0; t < Tokens; ++t) sums[t * 16] = parts[t];
#endif
}

// The sums of a group of `Height` rows.
template <class Loader, int Height, int Tokens>
inline void delta_group(const ShortMatrix& matrix, int64_t group, const float* x, int64_t stride, float* sums) {
  const int64_t begin = matrix.starts[group], entries = matrix.starts[group + 1] - begin;
  const uint8_t* deltas = matrix.deltas + begin;
  const typename Loader::Value* values =
      static_cast<const typename Loader::Value*>(matrix.values) + begin * Height;
  const int64_t ahead = matrix.prefetch;
  constexpr int kVector = Height >= 8 ? 8 : 4, kVectors = Height >= 8 ? Height / 8 : 1;
  constexpr int kParts = Tokens * kVectors <= 2 ? 2 : 1;
  using V = typename Vector<kVector>::floats;
  V parts[Tokens][kVectors][kParts] = {};
  const auto add = [&](int64_t i, int64_t k, int part) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const V weights = Loader::template some<kVector>(values + i * Height + v * kVector);
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) parts[t][v][part] += weights * splat<V>(x[t * stride + k]);
    }
  };
  int64_t k = 0, i = 0;
  for (; i + 4 <= entries; i += 4) {
    if (ahead) __builtin_prefetch(reinterpret_cast<const char*>(values + i * Height) + ahead);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) add(i + j, k += deltas[i + j], j % kParts);
  }
  for (; i < entries; ++i) add(i, k += deltas[i], 0);
  for (int t = 0; t < Tokens; ++t) {
    for (int v = 0; v < kVectors; ++v) {
      store(sums + t * 16 + v * kVector, kParts == 2 ? parts[t][v][0] + parts[t][v][kParts - 1] : parts[t][v][0]);
    }
  }
}

// The same for single rows: four entries make a vector.
template <class Loader, int Tokens>
inline void delta_row(const ShortMatrix& matrix, int64_t row, const float* x, int64_t stride, float* sums) {
  using V = Vector<4>::floats;
  const int64_t begin = matrix.starts[row], entries = matrix.starts[row + 1] - begin;
  const uint8_t* deltas = matrix.deltas + begin;
  const typename Loader::Value* values = static_cast<const typename Loader::Value*>(matrix.values) + begin;
  const int64_t ahead = matrix.prefetch;
  V parts[Tokens] = {};
  int64_t k = 0, i = 0;
  for (; i + 4 <= entries; i += 4) {
    if (ahead) __builtin_prefetch(reinterpret_cast<const char*>(values + i) + ahead);
    const int64_t a = k + deltas[i], b = a + deltas[i + 1], c = b + deltas[i + 2], d = c + deltas[i + 3];
    const V weights = Loader::template some<4>(values + i);
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
      const float* from = x + t * stride;
      parts[t] += weights * V{from[a], from[b], from[c], from[d]};
    }
    k = d;
  }
  for (int t = 0; t < Tokens; ++t) sums[t * 16] = (parts[t][0] + parts[t][1]) + (parts[t][2] + parts[t][3]);
  for (; i < entries; ++i) {
    k += deltas[i];
    for (int t = 0; t < Tokens; ++t) sums[t * 16] += Loader::one(values + i) * x[t * stride + k];
  }
}

template <class Loader, int Tokens>
inline void short_group(const ShortMatrix& matrix, int64_t group, const float* x, int64_t stride, float* sums) {
  if (matrix.form == kShortBitmap) return bitmap_row<Loader, Tokens>(matrix, group, x, stride, sums);
  switch (matrix.height) {
    case 16: return delta_group<Loader, 16, Tokens>(matrix, group, x, stride, sums);
    case 8: return delta_group<Loader, 8, Tokens>(matrix, group, x, stride, sums);
    case 4: return delta_group<Loader, 4, Tokens>(matrix, group, x, stride, sums);
    default: return delta_row<Loader, Tokens>(matrix, group, x, stride, sums);
  }
}

// Sums of one group for up to four tokens; those of a token begin at a multiple of 16.
using ShortKernel = void (*)(const ShortMatrix&, int64_t, const float*, int64_t, float*);

template <class Loader>
inline ShortKernel short_kernel_of(int64_t tokens) {
  switch (tokens) {
    case 1: return short_group<Loader, 1>;
    case 2: return short_group<Loader, 2>;
    case 3: return short_group<Loader, 3>;
    default: return short_group<Loader, 4>;
  }
}

inline ShortKernel short_kernel(int32_t format, int64_t tokens) {
  return format == kInt8Values ? short_kernel_of<Int8Loader>(tokens) : short_kernel_of<Bf16Loader>(tokens);
}

inline bool knows_short(const ShortMatrix& matrix) {
  const bool format = matrix.format == kInt8Values || matrix.format == kBf16Values;
  const int32_t height = matrix.height;
  if (matrix.form == kShortBitmap) return format && height == 1;
  return format && matrix.form == kShortDelta && (height == 1 || height == 4 || height == 8 || height == 16);
}

#if defined(SPARTA_DECODE_BYTES)
// The sums of one row of a bitmap of int8 for `Tokens` tokens in two bytes per number: 64 weights are put in their places
// once for all tokens.
template <int Tokens>
inline void bitmap_bytes(const ShortMatrix& matrix, int64_t row, const RoundedToken* tokens, float* sums) {
  constexpr int64_t kEach = kByteGroup / kByteChunk;
  const int64_t words = (matrix.inputs + 31) / 32, chunks = ceil_div(matrix.inputs, kByteChunk);
  const uint64_t last = words % 2 ? 0xffffffffu : ~uint64_t{0};
  const uint32_t* bits = matrix.bits + row * words;
  const int8_t* values = static_cast<const int8_t*>(matrix.values) + matrix.starts[row];
  ByteTotals totals[Tokens] = {};
  for (int64_t chunk = 0, group = 0; chunk < chunks; ++group) {
    ByteSums high[Tokens] = {}, low[Tokens];
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) low[t] = start_of(tokens[t], group);
    for (const int64_t end = std::min(chunk + kEach, chunks); chunk < end; ++chunk) {
      uint64_t mask;  // a word after the last of a row is that of the next, or padding
      std::memcpy(&mask, bits + 2 * chunk, sizeof mask);
      if (chunk == chunks - 1) mask &= last;
      if (matrix.prefetch) __builtin_prefetch(values + matrix.prefetch);
      const ByteVec weights = expanded_bytes(values, mask);
      values += __builtin_popcountll(mask);
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) {
        high[t] = add_products(high[t], weights, tokens[t].high + chunk * kByteChunk);
        low[t] = add_products(low[t], weights, tokens[t].low + chunk * kByteChunk);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) totals[t] = add_group(totals[t], high[t], low[t], tokens[t].scales[group]);
  }
  for (int t = 0; t < Tokens; ++t) sums[t * 16] = sum_of_totals(totals[t]);
}

using ByteKernel = void (*)(const ShortMatrix&, int64_t, const RoundedToken*, float*);

inline ByteKernel byte_kernel(int64_t tokens) {
  switch (tokens) {
    case 1: return bitmap_bytes<1>;
    case 2: return bitmap_bytes<2>;
    case 3: return bitmap_bytes<3>;
    default: return bitmap_bytes<4>;
  }
}
#endif

// All tokens of a call rounded, or null: they are multiplied as they are, which those that are no numbers must be.
inline const RoundedToken* rounded_tokens(const ShortMatrix& matrix, const StreamCall& call) {
#if defined(SPARTA_DECODE_BYTES)
  if (matrix.form != kShortBitmap || matrix.format != kInt8Values || !has_byte_products()) return nullptr;
  static thread_local Scratch numbers, tokens;
  const int64_t each = ceil_div(rounded_floats(matrix.inputs), 16) * 16;
  float* memory = numbers.get(call.tokens * each);
  constexpr int64_t kFloats = sizeof(RoundedToken) / sizeof(float);
  RoundedToken* found = reinterpret_cast<RoundedToken*>(tokens.get(call.tokens * kFloats));
  if (!memory || !found) return nullptr;
  for (int64_t t = 0; t < call.tokens; ++t) {
    const float* x = call.x + t * call.x_stride;
    const float step = matrix.x_step > 0.0f ? matrix.x_step : token_scale(x, matrix.inputs);
    found[t] = rounded_token(x, matrix.inputs, memory + t * each, step);
    if (!found[t].high) return nullptr;
  }
  return found;
#else
  (void)matrix, (void)call;
  return nullptr;
#endif
}

// Sums of groups [begin, end) for up to four tokens: of a group's first token at sums, of the others 16 farther each.
inline void short_sums(const ShortMatrix& matrix, int64_t begin, int64_t end, const float* x, int64_t x_stride,
                       const RoundedToken* rounded, int64_t tokens, float* sums) {
#if defined(SPARTA_DECODE_BYTES)
  if (rounded) {
    const ByteKernel kernel = byte_kernel(tokens);
    for (int64_t row = begin; row < end; ++row) kernel(matrix, row, rounded, sums + (row - begin));
    return;
  }
#endif
  (void)rounded;
  const ShortKernel kernel = short_kernel(matrix.format, tokens);
  for (int64_t group = begin; group < end; ++group) {
    kernel(matrix, group, x, x_stride, sums + (group - begin) * matrix.height);
  }
}

// Groups [begin, end) for tokens [first, first + tokens), at most four of them.
template <Activation Act>
inline void multiply_short_groups(const ShortMatrix& matrix, const StreamCall& call, const float* x, int64_t x_stride,
                                  const RoundedToken* rounded, int64_t first, int64_t tokens, int64_t begin,
                                  int64_t end) {
  constexpr int64_t kTogether = 16;
  const Epilogue epilogue{call.bias, call.residual, call.residual_stride, call.activation};
  const int64_t groups_together = kTogether / matrix.height;
  for (int64_t group = begin; group < end; group += groups_together) {
    const int64_t last = std::min(group + groups_together, end), channel = group * matrix.height;
    const int64_t channels = std::min(last * matrix.height, matrix.channels) - channel;
    alignas(64) float sums[kShortTokens * kTogether];
    short_sums(matrix, group, last, x + first * x_stride, x_stride, rounded ? rounded + first : nullptr, tokens, sums);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t at = 0; at < channels; at += kLanes) {
        const int64_t count = std::min<int64_t>(channels - at, kLanes), token = first + t;
        Vec sum = load_some(sums + t * kTogether + at, count);
        if (matrix.scales) sum *= load_some(matrix.scales + channel + at, count);
        const float* residual = call.residual ? call.residual + token * call.residual_stride + channel + at : nullptr;
        finish_channels<Act>(sum, epilogue, channel + at, residual, call.y + token * call.y_stride + channel + at,
                             count);
      }
    }
  }
}

// False when memory ran out.
inline bool multiply_short(const ShortMatrix& matrix, const StreamCall& call) {
  static thread_local Scratch scratch;
  const WholeChunks x = whole_chunks(call, matrix.form == kShortBitmap, matrix.inputs, scratch);
  if (!x.x && matrix.inputs > 0) return false;
  const RoundedToken* rounded = rounded_tokens(matrix, call);
  parallel(call.threads, [&](int64_t index, int64_t count) {
    const int64_t begin = share_begin(matrix.costs, matrix.groups, 1, index, count);
    const int64_t end = share_begin(matrix.costs, matrix.groups, 1, index + 1, count);
    with_activation(call.activation, [&](auto tag) {
      for (int64_t first = 0; first < call.tokens; first += kShortTokens) {
        const int64_t tokens = std::min(call.tokens - first, kShortTokens);
        multiply_short_groups<decltype(tag)::value>(matrix, call, x.x, x.stride, rounded, first, tokens, begin, end);
      }
    });
  });
  return true;
}

}  // namespace sparta
