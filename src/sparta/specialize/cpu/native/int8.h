// y = x W^T of 8-bit integers for many tokens, requantised on the way out. As in spmm.h, vectors run along tokens and
// weights are broadcast; the unit is four neighbouring input channels, the bytes of one 32-bit lane, which one
// instruction multiplies and adds (AVX-512 VNNI; elsewhere two or four do). The one idea to know: sums are exact 32-bit
// integers in every build, and the zero point of the input is taken off them with the sums of the weight's rows.
#pragma once

#include "spmm.h"

namespace sparta {

enum Int8Output : int32_t { kFloat = 0, kInt8 = 1, kUint8 = 2 };

// One call. Rows of x are whole numbers of 4 bytes. The result is sum * multiplier + offset, at least `floor`; as an
// integer it is rounded to even, moved by its zero point and cut to its range.
struct Int8Call {
  const void* x;
  void* y;
  int64_t tokens;
  int64_t x_stride;         // in units of 4 bytes
  int64_t y_stride;         // in values
  const float* multiplier;  // [channels]
  const float* offset;      // [channels], or null
  const int32_t* row_sums;  // [channels], of the weight
  float floor;              // 0 for ReLU, -inf for none
  int32_t x_is_unsigned;
  int32_t x_zero;
  int32_t output;
  int32_t y_zero;
  int32_t threads;
};

SPARTA_INLINE IntVec load_ints(const int32_t* from) {
  IntVec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

SPARTA_INLINE void store_ints(int32_t* to, IntVec v) { std::memcpy(to, &v, sizeof v); }

// Four signed bytes a lane times four signed bytes, the same in all lanes, without VNNI: even and odd bytes are widened
// to pairs of 16 bits, which one instruction multiplies and adds.
struct SignedUnit {
  static constexpr bool kUnsigned = false;
#if defined(SPARTA_AVX512)
  struct Inputs { __m512i even, odd; };
  static SPARTA_INLINE Inputs split(IntVec v) {
    const __m512i x = (__m512i)v;
    return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
  }
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const int32_t* weight) {
    const Inputs w = split((IntVec)_mm512_set1_epi32(*weight));
    sum += (IntVec)_mm512_madd_epi16(x.even, w.even) + (IntVec)_mm512_madd_epi16(x.odd, w.odd);
  }
#elif defined(SPARTA_AVX2)
  struct Inputs { __m256i even, odd; };
  static SPARTA_INLINE Inputs split(IntVec v) {
    const __m256i x = (__m256i)v;
    return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
  }
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const int32_t* weight) {
    const Inputs w = split((IntVec)_mm256_set1_epi32(*weight));
    sum += (IntVec)_mm256_madd_epi16(x.even, w.even) + (IntVec)_mm256_madd_epi16(x.odd, w.odd);
  }
#else
  struct Inputs { IntVec bytes[4]; };
  static SPARTA_INLINE Inputs split(IntVec v) {
    typedef uint32_t Bits __attribute__((vector_size(sizeof(IntVec))));  // shifting a sign out is not defined
    const Bits x = (Bits)v;
    return {{(IntVec)(x << 24) >> 24, (IntVec)(x << 16) >> 24, (IntVec)(x << 8) >> 24, v >> 24}};
  }
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const int32_t* weight) {
    int8_t w[4];
    std::memcpy(w, weight, sizeof w);
    for (int i = 0; i < 4; ++i) sum += x.bytes[i] * static_cast<int32_t>(w[i]);
  }
#endif
};

#if defined(SPARTA_AVX512)
// Written as assembly: compilers copy and spill accumulators around the intrinsic, and this needs no flag of its own.
struct VnniUnit {
  static constexpr bool kUnsigned = true;
  using Inputs = IntVec;
  static SPARTA_INLINE Inputs split(IntVec v) { return v; }
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const int32_t* weight) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*weight));
  }
};
#endif

struct Int8Task {
  const PanelMatrix* matrix;  // its values are int32, four bytes each
  int64_t group_begin;
  int64_t group_end;
  const float* x;             // the panel tile, four bytes a place
  int32_t* y;                 // sums at row `first_row`
  int64_t first_row;
  int64_t tile;
};

template <class Unit, int BN, int MV>
void multiply_int8_groups(const Int8Task& task) {
  const PanelMatrix& matrix = *task.matrix;
  const int32_t* all_values = reinterpret_cast<const int32_t*>(matrix.values);
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    const int64_t begin = matrix.starts[group], entries = matrix.starts[group + 1] - begin;
    const uint32_t* offsets = matrix.offsets + begin;
    const int32_t* values = all_values + begin * BN;
    IntVec sums[BN][MV] = {};
    for (int64_t i = 0; i < entries; ++i) {
      const int32_t* from = reinterpret_cast<const int32_t*>(at_offset(task.x, offsets[i]));
      typename Unit::Inputs inputs[MV];
#pragma GCC unroll 4
      for (int j = 0; j < MV; ++j) inputs[j] = Unit::split(load_ints(from + j * kLanes));
#pragma GCC unroll 8
      for (int r = 0; r < BN; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < MV; ++j) Unit::add(sums[r][j], inputs[j], values + i * BN + r);
      }
    }
    const int64_t row = matrix.rows[group];
    int32_t* y = task.y + (row - task.first_row) * task.tile;
#pragma GCC unroll 8
    for (int r = 0; r < BN; ++r) {
      if (BN > 1 && row + r >= matrix.channels) break;
#pragma GCC unroll 4
      for (int j = 0; j < MV; ++j) store_ints(y + r * task.tile + j * kLanes, sums[r][j]);
    }
  }
}

using Int8Kernel = void (*)(const Int8Task&);

template <class Unit, int BN>
Int8Kernel find_int8_kernel_for(int64_t mv) {
  switch (mv) {
    case 1: return multiply_int8_groups<Unit, BN, 1>;
    case 2: return multiply_int8_groups<Unit, BN, 2>;
    case 3: return multiply_int8_groups<Unit, BN, 3>;
    case 4: return multiply_int8_groups<Unit, BN, 4>;
    default: return nullptr;
  }
}

inline bool has_vnni() {
#if defined(SPARTA_AVX512)
  static const bool found = __builtin_cpu_supports("avx512vnni");
  return found;
#else
  return false;
#endif
}

// Null for a tile that this library does not hold.
inline Int8Kernel find_int8_kernel(int32_t bn, int64_t mv) {
#if defined(SPARTA_AVX512)
  if (has_vnni()) {
    return bn == 1 ? find_int8_kernel_for<VnniUnit, 1>(mv) : bn == 4 ? find_int8_kernel_for<VnniUnit, 4>(mv) : nullptr;
  }
#endif
  return bn == 1 ? find_int8_kernel_for<SignedUnit, 1>(mv) : bn == 4 ? find_int8_kernel_for<SignedUnit, 4>(mv) : nullptr;
}

// Turns rows of sums into results, in place. One rounding for a * b + c: without a fused instruction, in double.
inline void requantise_rows(const Int8Call& call, int32_t zero, int64_t first_row, int64_t rows, int64_t tile,
                            int64_t vectors, int32_t* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t channel = first_row + row;
    const int32_t correction = zero * call.row_sums[channel];
    const float multiplier = call.multiplier[channel], offset = call.offset ? call.offset[channel] : -0.0f;
    for (int64_t j = 0; j < vectors * kLanes; j += kLanes) {
      int32_t* at = sums + row * tile + j;
      const IntVec exact = load_ints(at) - correction;
      Vec y;
#if defined(SPARTA_AVX512) || defined(SPARTA_AVX2)
      y = __builtin_convertvector(exact, Vec) * splat(multiplier) + splat(offset);
#else
      for (int i = 0; i < kLanes; ++i) {
        y[i] = static_cast<float>(static_cast<double>(static_cast<float>(exact[i])) * multiplier + offset);
      }
#endif
      const Vec floor = splat(call.floor);
      store(reinterpret_cast<float*>(at), y < floor ? floor : y);
    }
  }
}

// Rounds values to even and stores them as bytes.
SPARTA_INLINE void store_bytes(uint8_t* to, Vec v, float least, float most, int32_t zero, int64_t count) {
  const Vec low = splat(least), high = splat(most), round = splat(12582912.0f);  // 1.5 * 2^23
  const Vec cut = v < low ? low : (v > high ? high : v);
  const IntVec whole = (IntVec)(cut + round) - (IntVec)round + zero;
#if defined(SPARTA_AVX512)
  const __mmask16 lanes = count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << count) - 1u);
  _mm_mask_storeu_epi8(to, lanes, _mm512_cvtepi32_epi8((__m512i)whole));
#else
  for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); ++i) to[i] = static_cast<uint8_t>(whole[i]);
#endif
}

// Writes rows of results token-major as bytes.
inline void unpack_bytes(const float* panel, int64_t tile, int64_t rows, int64_t tokens, const Int8Call& call,
                         uint8_t* y) {
  const float least = static_cast<float>((call.output == kInt8 ? -128 : 0) - call.y_zero);
  for (int64_t first = 0; first < tokens; first += kLanes) {
    for (int64_t row = 0; row < rows; row += kLanes) {
      Vec square[kLanes];
      load_square<false>(panel + row * tile + first, tile, std::min<int64_t>(rows - row, kLanes), kLanes, square);
      transpose(square);
      const int64_t present = std::min<int64_t>(tokens - first, kLanes);
      for (int64_t i = 0; i < present; ++i) {
        store_bytes(y + (first + i) * call.y_stride + row, square[i], least, least + 255.0f, call.y_zero, rows - row);
      }
    }
  }
}

// The blocks [begin, end) of one tile of tokens; false when memory ran out.
inline bool multiply_int8_tile(const PanelMatrix& matrix, const Int8Call& call, int64_t index, int64_t begin,
                               int64_t end) {
  static thread_local Scratch input_scratch, sums_scratch;
  const int64_t tile = matrix.mv * kLanes;
  const int64_t tokens = std::min(tile, call.tokens - index * tile), vectors = ceil_div(tokens, kLanes);
  float* x = input_scratch.get(std::max<int64_t>(matrix.inputs, 1) * tile);
  float* sums = sums_scratch.get(kBlocksTogether * kBlockRows * tile);
  if (!x || !sums) return false;
  pack_tile(static_cast<const float*>(call.x) + index * tile * call.x_stride, call.x_stride, tokens, 0, matrix.inputs,
            tile, x);
  // Bytes as the kernel multiplies them: adding 128 is flipping the highest bit.
  const bool wants_unsigned = has_vnni();
  int32_t zero = call.x_zero;
  if (wants_unsigned != (call.x_is_unsigned != 0)) {
    zero += wants_unsigned ? 128 : -128;
    int32_t* bytes = reinterpret_cast<int32_t*>(x);
    const int32_t flip = static_cast<int32_t>(0x80808080u);
    for (int64_t row = 0; row < matrix.inputs; ++row) {
      for (int64_t j = 0; j < vectors * kLanes; j += kLanes) {
        store_ints(bytes + row * tile + j, load_ints(bytes + row * tile + j) ^ flip);
      }
    }
  }
  const Int8Kernel kernel = find_int8_kernel(matrix.bn, vectors);
  const int64_t groups_each = kBlockRows / matrix.bn;
  for (int64_t block = begin; block < end; block += kBlocksTogether) {
    const int64_t blocks = std::min(kBlocksTogether, end - block), row = block * kBlockRows;
    const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
    int32_t* exact = reinterpret_cast<int32_t*>(sums);
    kernel(Int8Task{&matrix, block * groups_each, std::min((block + blocks) * groups_each, matrix.groups), x, exact, row,
                    tile});
    requantise_rows(call, zero, row, rows, tile, vectors, exact);
    if (call.output == kFloat) {
      const Epilogue nothing{nullptr, nullptr, 0, kNone};
      unpack_rows<kNone>(sums, tile, row, rows, tokens, nothing,
                         static_cast<float*>(call.y) + index * tile * call.y_stride, call.y_stride);
    } else {
      unpack_bytes(sums, tile, rows, tokens, call,
                   static_cast<uint8_t*>(call.y) + index * tile * call.y_stride + row);
    }
  }
  return true;
}

inline bool multiply_int8(const PanelMatrix& matrix, const Int8Call& call) {
  const int64_t tiles = ceil_div(call.tokens, matrix.mv * kLanes);
  return share_tiles(matrix, tiles, call.threads, [&](int64_t tile, int64_t begin, int64_t end) {
    return multiply_int8_tile(matrix, call, tile, begin, end);
  });
}

}  // namespace sparta
