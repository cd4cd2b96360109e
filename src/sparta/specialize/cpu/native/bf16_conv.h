// Convolutions in bf16, summed in fp32: planes of a band are copied as conv.h copies floats (or read where they are), and
// a product takes two live weights of a row at once (vdpbf16ps), of any two channels and taps: vectors of both are
// interleaved in registers. Sums of tokens that lie between the rows of an image are dropped on their way to memory.
#pragma once

#include "bf16_images.h"
#include "conv.h"

namespace sparta {

// Copies neighbouring values in whole vectors: what is read and written beyond the last one is written over later, or lies
// in room that is kept for it.
SPARTA_INLINE void copy_halves(const uint16_t* from, int64_t count, uint16_t* to) {
  for (int64_t j = 0; j < count; j += kHalves) store(reinterpret_cast<float*>(to + j), (Vec)load_short(from + j));
}

// The same for values that are `step` apart.
SPARTA_INLINE void copy_halves_by(const uint16_t* from, int64_t step, int64_t count, uint16_t* to) {
  int64_t j = 0;
#if defined(SPARTA_AVX512)
  for (; step == 2 && j + kLanes <= count; j += kLanes) {
    const __m256i even = _mm512_cvtepi32_epi16((__m512i)load_short(from + 2 * j));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), even);
  }
#endif
  for (; j < count; ++j) to[j] = from[j * step];
}

SPARTA_INLINE void clear_halves(int64_t count, uint16_t* to) {
  for (int64_t j = 0; j < count; j += kHalves) store(reinterpret_cast<float*>(to + j), Vec{});
}

// Fills one slot of a band, channel by channel.
inline void pack_halves(const ConvCall& call, const Band& band, int64_t slot, uint16_t* planes) {
  static thread_local std::vector<Piece> pieces;
  const uint8_t* used = call.used + slot * call.in_channels;
  find_pieces(call, band, slot, pieces);
  for (int64_t channel = 0; channel < call.in_channels; ++channel) {
    if (!used[channel]) continue;
    const uint16_t* image =
        reinterpret_cast<const uint16_t*>(call.x) + band.image * call.x_strides[0] + channel * call.x_strides[1];
    uint16_t* plane = planes + channel * call.plane;
    for (const Piece& piece : pieces) {
      uint16_t* to = plane + piece.at;
      clear_halves(piece.before, to);
      if (call.stride_columns == 1) {
        copy_halves(image + piece.from, piece.count, to + piece.before);
      } else {
        copy_halves_by(image + piece.from, call.stride_columns, piece.count, to + piece.before);
      }
      clear_halves(piece.after, to + piece.before + piece.count);
    }
  }
}

// Some groups of rows for the vectors of a tile.
struct Bf16RowsTask {
  const PanelMatrix* matrix;  // two offsets for each pair, bytes from a pixel to the values of either half
  const ConvCall* call;
  ShortEnds ends;  // at the first row of all, and the first pixel of the tile; of the image where there are segments
  int64_t group_begin;
  int64_t group_end;
  const char* x;
  int64_t count;            // tokens
  const Segment* segments;  // that are pixels, or null where all are
  int64_t runs;
};

constexpr int64_t kMostShortTokens = 4 * kHalves;

// One row of sums whose tokens are not all pixels.
template <class Unit, Activation Act>
inline void finish_bf16_segments(const Bf16RowsTask& task, const float* sums, Vec shift, float last_floor,
                                 const ShortEnds& ends) {
  alignas(64) float line[kMostShortTokens + kHalves];
  for (int64_t at = 0; at < task.count; at += kHalves) {
    const RealParts row = in_a_row({load(sums + at), load(sums + at + kLanes)});
    store(line + at, row.lower);
    store(line + at + kLanes, row.upper);
  }
  for (const Segment* run = task.segments; run != task.segments + task.runs; ++run) {
    for (int64_t j = 0; j < run->count; j += kHalves) {
      const float* from = line + run->token + j;
      const RealParts parts = in_parts(load(from), load(from + kLanes));
      put_short<Unit>({activate<Act>(parts.lower + shift), activate<Act>(parts.upper + shift)}, last_floor, ends,
                      run->pixel + j, run->count - j);
    }
  }
}

// The sums of one group become results: [rows][vectors][2][lanes]. In a function of its own, which leaves the registers to
// the products.
template <class Unit, Activation Act>
SPARTA_NOINLINE void finish_bf16_group(const Bf16RowsTask& task, const float* sums, int64_t row, int64_t rows) {
  const float* bias = task.call->bias;
  const float last_floor = Act == kReluLast ? 0.0f : -std::numeric_limits<float>::infinity();
  const int64_t vectors = ceil_div(task.count, kHalves);
  for (int64_t r = 0; r < rows; ++r) {
    const Vec shift = splat(bias ? bias[row + r] : -0.0f);  // adding -0 changes nothing, not even a -0
    const ShortEnds ends = task.ends.moved((row + r) * task.ends.plane);
    if (task.segments) {
      finish_bf16_segments<Unit, Act>(task, sums, shift, last_floor, ends);
      sums += vectors * kHalves;
      continue;
    }
    for (int64_t j = 0; j < vectors; ++j, sums += kHalves) {
      const RealParts parts{activate<Act>(load(sums) + shift), activate<Act>(load(sums + kLanes) + shift)};
      put_short<Unit>(parts, last_floor, ends, j * kHalves, task.count - j * kHalves);
    }
  }
}

template <class Unit>
using Bf16Finish = void (*)(const Bf16RowsTask&, const float*, int64_t, int64_t);

template <class Unit>
Bf16Finish<Unit> find_bf16_finish(int32_t activation) {
  Bf16Finish<Unit> found = nullptr;
  with_activation(activation, [&](auto tag) { found = finish_bf16_group<Unit, decltype(tag)::value>; });
  return found;
}

template <class Unit, int BN, int MV>
void multiply_bf16_rows_of(const Bf16RowsTask& task) {
  const PanelMatrix matrix = *task.matrix;  // copies, which no store can change
  const char* const x = task.x;
  const int32_t* const all_values = reinterpret_cast<const int32_t*>(matrix.values);
  const Bf16Finish<Unit> finish = find_bf16_finish<Unit>(task.call->activation);
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    const int64_t begin = matrix.starts[group], end = matrix.starts[group + 1], row = matrix.rows[group];
    const int32_t* values = all_values + begin * BN;
    Vec sums[BN][2 * MV] = {};
    for (int64_t i = begin; i < end; ++i, values += BN) {
      const char* const one = x + matrix.offsets[2 * i];
      const char* const two = x + matrix.offsets[2 * i + 1];
      typename Unit::Inputs inputs[2 * MV];
      each<MV>([&](auto j) SPARTA_LAMBDA {
        constexpr int64_t kAt = j * kHalves * kHalfBytes;
        const PairParts parts = interleaved(load_short(reinterpret_cast<const uint16_t*>(one + kAt)),
                                            load_short(reinterpret_cast<const uint16_t*>(two + kAt)));
        inputs[2 * j] = Unit::split(parts.lower);
        inputs[2 * j + 1] = Unit::split(parts.upper);
      });
      each<BN>([&](auto r) SPARTA_LAMBDA {
        const typename Unit::Weight weight = Unit::spread(values + r);
        each<2 * MV>([&](auto j) SPARTA_LAMBDA { Unit::add(sums[r][j], inputs[j], weight); });
      });
    }
    alignas(64) float waiting[BN * 2 * MV * kLanes];
    each<BN>([&](auto r) SPARTA_LAMBDA {
      each<2 * MV>([&](auto j) SPARTA_LAMBDA { store(waiting + (r * 2 * MV + j) * kLanes, sums[r][j]); });
    });
    finish(task, waiting, row, std::min<int64_t>(BN, matrix.channels - row));
  }
}

using Bf16RowsKernel = void (*)(const Bf16RowsTask&);

// For groups of 1 or 4 rows and 1 to 3 vectors, 4 for single rows, 1 for 8; null where there is none.
inline Bf16RowsKernel find_bf16_rows(int32_t bn, int64_t vectors) {
  return with_pairs([&](auto unit) -> Bf16RowsKernel {
    using Unit = decltype(unit);
    switch (8 * vectors + bn) {
      case 8 + 1: return multiply_bf16_rows_of<Unit, 1, 1>;
      case 16 + 1: return multiply_bf16_rows_of<Unit, 1, 2>;
      case 24 + 1: return multiply_bf16_rows_of<Unit, 1, 3>;
      case 32 + 1: return multiply_bf16_rows_of<Unit, 1, 4>;
      case 8 + 4: return multiply_bf16_rows_of<Unit, 4, 1>;
      case 16 + 4: return multiply_bf16_rows_of<Unit, 4, 2>;
      case 24 + 4: return multiply_bf16_rows_of<Unit, 4, 3>;
      default: return vectors == 1 && bn == 8 ? multiply_bf16_rows_of<Unit, 8, 1> : nullptr;
    }
  });
}

// The blocks of rows [first, last) of one band; false when memory ran out.
inline bool multiply_bf16_band(const PanelMatrix& matrix, const Bf16ConvCall& given, int64_t index, int64_t first,
                               int64_t last) {
  static thread_local Scratch scratch;
  const ConvCall& call = given.conv;
  const Band band = band_of(call, index);
  // Vectors are read and written as a whole, also where only some of their pixels exist.
  const int64_t halves = call.slots * call.in_channels * call.plane + (matrix.mv + 1) * kHalves;
  float* memory = call.direct ? nullptr : scratch.get(ceil_div(halves, 2));
  if (!call.direct && !memory) return false;
  uint16_t* image = reinterpret_cast<uint16_t*>(memory);
  for (int64_t slot = 0; image && slot < call.slots; ++slot) {
    pack_halves(call, band, slot, image + slot * call.in_channels * call.plane);
  }
  const uint16_t* x = image ? image : reinterpret_cast<const uint16_t*>(call.x) + band.image * call.x_strides[0] + band.first;
  const ShortEnds ends = short_ends(given, band.image);
  const int64_t groups_each = kBlockRows / matrix.bn, vectors = ceil_div(band.tokens, kHalves);
  const int64_t tiles = ceil_div(vectors, matrix.mv);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = vectors * i / tiles, count = vectors * (i + 1) / tiles - begin, at = begin * kHalves;
    const int64_t tokens = std::min(band.tokens - at, count * kHalves);
    const bool gaps = call.row_width != call.out_columns;
    Segment segments[kMostTokens];
    const int64_t runs = gaps ? find_segments(call, band.first + at, tokens, segments) : 0;
    find_bf16_rows(matrix.bn, count)(
        Bf16RowsTask{&matrix, &call, gaps ? ends : ends.moved(band.first + at), first * groups_each,
                     std::min(last * groups_each, matrix.groups), reinterpret_cast<const char*>(x + at), tokens,
                     gaps ? segments : nullptr, runs});
  }
  return true;
}

inline bool knows_bf16_rows(const PanelMatrix& matrix) {
  for (int64_t vectors = 1; vectors <= matrix.mv; ++vectors) {
    if (!find_bf16_rows(matrix.bn, vectors)) return false;
  }
  return matrix.mv >= 1 && matrix.chunks == 1;
}

inline bool multiply_bf16_conv(const PanelMatrix& matrix, const Bf16ConvCall& call) {
  const ConvCall& conv = call.conv;
  round_images(call);
  return share_tiles(matrix, conv.images * bands_of(conv), conv.threads,
                     [&](int64_t band, int64_t begin, int64_t end) {
                       return multiply_bf16_band(matrix, call, band, begin, end);
                     });
}

}  // namespace sparta
