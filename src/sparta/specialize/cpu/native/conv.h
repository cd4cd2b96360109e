// Convolutions: the kernels of spmm.h with another table of offsets. An image is a flat row of tokens, its output pixels
// row by row with gaps where rows are padded; a weight's offset leads from a token to the input value that it multiplies,
// in a padded copy of a band of tokens (or in the input itself, where nothing is to be padded). A
// band is copied to `slots`, one for each way to shift the image that offsets alone cannot do: the phases of a stride,
// and, where the caller wants aligned loads or no gaps, the shifts of the taps as well.
#pragma once

#include <functional>
#include <limits>
#include <vector>

#include "spmm.h"

namespace sparta {

// One call. Rows and columns are those of images; the output is contiguous, [images][channels][out_rows][out_columns].
struct ConvCall {
  const float* x;
  float* y;
  const float* bias;
  const float* residual;          // as the output, or null
  const int32_t* slot_rows;       // [slots], input row behind row 0 of a slot, for output row 0
  const int32_t* slot_columns;    // [slots], input column behind column 0
  const uint8_t* used;            // [slots][in_channels], whether any weight reads it
  int64_t images;
  int64_t x_strides[4];           // of images, channels, rows, columns
  int64_t in_channels;
  int64_t in_rows;
  int64_t in_columns;
  int64_t out_rows;
  int64_t out_columns;
  int64_t stride_rows;
  int64_t stride_columns;
  int64_t slots;
  int64_t row_width;              // tokens between two rows of pixels; at least out_columns
  int64_t band_tokens;            // the tokens of an image are cut into bands of so many
  int64_t reach;                  // tokens behind a band that its taps read
  int64_t plane;                  // floats between two channels of a slot
  int32_t direct;                 // the input itself is the one slot
  int32_t activation;
  int32_t threads;
};

struct Band {
  int64_t image;
  int64_t first;   // token
  int64_t tokens;
};

// The tokens of a row of the image whose input is not padding.
struct RowRange {
  int64_t begin;
  int64_t end;
};

inline RowRange range_inside(const ConvCall& call, int64_t slot, int64_t row) {
  const int64_t from = row * call.stride_rows + call.slot_rows[slot], first = call.slot_columns[slot];
  if (from < 0 || from >= call.in_rows || first >= call.in_columns) return {0, 0};
  const int64_t begin = first >= 0 ? 0 : ceil_div(-first, call.stride_columns);
  const int64_t end = std::min(ceil_div(call.in_columns - first, call.stride_columns), call.row_width);
  return {std::min(begin, end), end};
}

SPARTA_INLINE void copy_strided(const float* from, int64_t stride, int64_t count, float* to) {
  if (stride == 2) {
    for (int64_t j = 0; j < count; ++j) to[j] = from[2 * j];  // a constant stride is vectorised
  } else {
    for (int64_t j = 0; j < count; ++j) to[j] = from[j * stride];
  }
}

// A piece of a row of the image in the tokens that a band reads: some padding, input values, some padding again.
struct Piece {
  int64_t at;      // token, in the band
  int64_t before;  // zeros
  int64_t count;   // values
  int64_t after;   // zeros
  int64_t from;    // of the first value in its channel of the input
};

// The pieces of one slot: the same for every channel.
inline void find_pieces(const ConvCall& call, const Band& band, int64_t slot, std::vector<Piece>& pieces) {
  pieces.clear();
  const int64_t count = band.tokens + call.reach;
  for (int64_t at = 0; at < count;) {
    const int64_t row = (band.first + at) / call.row_width, begin = (band.first + at) % call.row_width;
    const int64_t end = std::min(call.row_width, begin + count - at);
    const RowRange inside = range_inside(call, slot, row);
    const int64_t first = std::min(std::max(begin, inside.begin), end);
    const int64_t last = std::max(std::min(end, inside.end), first);
    const int64_t from_row = row * call.stride_rows + call.slot_rows[slot];
    const int64_t from_column = call.slot_columns[slot] + first * call.stride_columns;
    pieces.push_back({at, first - begin, last - first, end - last,
                      from_row * call.x_strides[2] + from_column * call.x_strides[3]});
    at += end - begin;
  }
}

// Tokens that are missing in the last vector of a band. What is computed there is not stored, but they are set to 0:
// chance bits are often denormal numbers, which are slow to multiply.
inline int64_t missing_tokens(const Band& band) { return ceil_div(band.tokens, kLanes) * kLanes - band.tokens; }

// Which lanes of a vector are loaded; the others are filled and their memory is not touched.
#if defined(SPARTA_AVX512)
using LaneMask = __mmask16;
inline LaneMask lane_mask(int64_t begin, int64_t end) {
  return static_cast<LaneMask>(((1u << end) - 1u) & ~((1u << begin) - 1u));
}
SPARTA_INLINE Vec load_lanes(const float* from, LaneMask lanes, Vec fill = Vec{}) {
  return (Vec)_mm512_mask_loadu_ps((__m512)fill, lanes, from);
}
#elif defined(SPARTA_AVX2)
struct LaneMask {
  int32_t lanes[kLanes];
};
inline LaneMask lane_mask(int64_t begin, int64_t end) {
  LaneMask mask = {};
  std::fill(mask.lanes + begin, mask.lanes + std::max(begin, end), -1);
  return mask;
}
SPARTA_INLINE Vec load_lanes(const float* from, const LaneMask& mask, Vec fill = Vec{}) {
  const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask.lanes));
  return (Vec)_mm256_blendv_ps((__m256)fill, _mm256_maskload_ps(from, lanes), (__m256)lanes);
}
#else
struct LaneMask {
  int64_t begin;
  int64_t end;
};
inline LaneMask lane_mask(int64_t begin, int64_t end) { return {begin, end}; }
SPARTA_INLINE Vec load_lanes(const float* from, const LaneMask& mask, Vec fill = Vec{}) {
  Vec v = fill;
  for (int64_t i = mask.begin; i < mask.end; ++i) v[i] = from[i];
  return v;
}
#endif

// Whether vectors of every second value are loaded at once.
#if defined(SPARTA_AVX512)
constexpr bool kPacksByTwo = true;
#else
constexpr bool kPacksByTwo = false;
#endif

// The same for every second value, counted from `from` on.
SPARTA_INLINE Vec load_lanes_by_two(const float* from, const LaneMask& lanes, Vec fill = Vec{}) {
#if defined(SPARTA_AVX512)
  uint32_t pairs = lanes;  // a bit for each of two vectors' values: bits are moved apart, eight, four, two, one
  pairs = (pairs | pairs << 8) & 0x00ff00ffu;
  pairs = (pairs | pairs << 4) & 0x0f0f0f0fu;
  pairs = (pairs | pairs << 2) & 0x33333333u;
  pairs = (pairs | pairs << 1) & 0x55555555u;
  const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(pairs), from);
  const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(pairs >> 16), from + kLanes);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return (Vec)_mm512_mask_mov_ps((__m512)fill, lanes, _mm512_permutex2var_ps(low, even, high));
#else
  (void)from;
  (void)lanes;
  return fill;
#endif
}

// A vector of tokens that a band reads: padding and input values.
struct Strip {
  int64_t at;      // token, in the band
  int64_t from;    // of lane 0 in its channel of the input
  LaneMask lanes;  // that are values
};

// Cuts pieces into vectors whose values lie `step` apart. The last vector of a piece goes beyond its end, to be written
// over by the next.
inline void find_strips(const Band& band, int64_t reach, int64_t step, const std::vector<Piece>& pieces,
                        std::vector<Strip>& strips) {
  strips.clear();
  for (const Piece& piece : pieces) {
    const int64_t values_end = piece.before + piece.count, end = values_end + piece.after;
    for (int64_t j = 0; j < end; j += kLanes) {
      const int64_t last = std::min<int64_t>(std::max<int64_t>(values_end - j, 0), kLanes);
      const int64_t first = std::min(std::max<int64_t>(piece.before - j, 0), last);
      strips.push_back({piece.at + j, piece.from + (j - piece.before) * step, lane_mask(first, last)});
    }
  }
  if (missing_tokens(band)) strips.push_back({band.tokens + reach, 0, lane_mask(0, 0)});
}

// Channels whose values are asked for ahead: they lie far apart, where the processor does not look by itself.
constexpr int64_t kChannelsAhead = 16;

// Fills one slot of a band, channel by channel, where values of a row lie side by side, or every second one is taken. What
// is written beyond a plane is written over by the next one; there is room for a vector behind the last.
template <int Step>
inline void pack_strips(const ConvCall& call, const Band& band, const std::vector<Strip>& strips, const uint8_t* used,
                        int32_t padding, float* planes) {
  const Vec fill = (Vec)(IntVec{} + padding);
  const Strip* const first = strips.data();
  const Strip* const end = first + strips.size();
  for (int64_t channel = 0; channel < call.in_channels; ++channel) {
    if (!used[channel]) continue;
    const float* image = call.x + band.image * call.x_strides[0] + channel * call.x_strides[1];
    const float* later = image + kChannelsAhead * call.x_strides[1];
    float* plane = planes + channel * call.plane;
    for (const Strip* strip = first; strip != end; ++strip) {
      __builtin_prefetch(later + strip->from);
      const float* from = image + strip->from;
      store(plane + strip->at,
            Step == 1 ? load_lanes(from, strip->lanes, fill) : load_lanes_by_two(from, strip->lanes, fill));
    }
  }
}

// The same for any step between the values of a row.
inline void pack_planes(const ConvCall& call, const Band& band, const std::vector<Piece>& pieces, const uint8_t* used,
                        float padding, float* planes) {
  const int64_t step = call.stride_columns * call.x_strides[3];
  for (int64_t channel = 0; channel < call.in_channels; ++channel) {
    if (!used[channel]) continue;
    const float* image = call.x + band.image * call.x_strides[0] + channel * call.x_strides[1];
    float* plane = planes + channel * call.plane;
    for (const Piece& piece : pieces) {
      float* to = plane + piece.at;
      std::fill_n(to, piece.before, padding);
      copy_strided(image + piece.from, step, piece.count, to + piece.before);
      std::fill_n(to + piece.before + piece.count, piece.after, padding);
    }
    std::fill_n(plane + band.tokens + call.reach, missing_tokens(band), 0.0f);
  }
}

// The same from channels-last images, whose channels lie side by side: squares of pixels and channels are transposed.
// A square may write beyond its row; what it writes there is written again, and such a plane has room for a vector
// behind its last row.
inline void pack_planes_channels_last(const ConvCall& call, const Band& band, const std::vector<Piece>& pieces,
                                      const uint8_t* used, float padding, float* planes) {
  const int64_t step = call.stride_columns * call.x_strides[3];
  for (int64_t channel = 0; channel < call.in_channels; channel += kLanes) {
    const int64_t channels = std::min<int64_t>(call.in_channels - channel, kLanes);
    if (std::find(used + channel, used + channel + channels, 1) == used + channel + channels) continue;
    const float* image = call.x + band.image * call.x_strides[0] + channel;
    float* plane = planes + channel * call.plane;
    for (const Piece& piece : pieces) {
      float* to = plane + piece.at + piece.before;
      for (int64_t j = 0; j < piece.count; j += kLanes) {
        const int64_t pixels = std::min<int64_t>(piece.count - j, kLanes);
        const bool whole = pixels == kLanes && channels == kLanes;
        (whole ? pack_square<true> : pack_square<false>)(image + piece.from + j * step, step, pixels, channels, to + j,
                                                         call.plane);
      }
      for (int64_t i = 0; i < channels; ++i) {
        std::fill_n(to + i * call.plane - piece.before, piece.before, padding);
        std::fill_n(to + i * call.plane + piece.count, piece.after, padding);
      }
    }
    for (int64_t i = 0; i < channels; ++i) {
      std::fill_n(plane + i * call.plane + band.tokens + call.reach, missing_tokens(band), 0.0f);
    }
  }
}

// Fills one slot in the way that suits the input's strides. The bits of what pads may stand for no float, so they are
// moved and never computed with.
inline void pack_slot(const ConvCall& call, const Band& band, int64_t slot, float* planes, int32_t padding = 0) {
  static thread_local std::vector<Piece> pieces;
  static thread_local std::vector<Strip> strips;
  const uint8_t* used = call.used + slot * call.in_channels;
  float fill;
  std::memcpy(&fill, &padding, sizeof fill);
  find_pieces(call, band, slot, pieces);
  const int64_t step = call.stride_columns * call.x_strides[3];
  if (step == 1 || (step == 2 && kPacksByTwo)) {
    find_strips(band, call.reach, step, pieces, strips);
    (step == 1 ? pack_strips<1> : pack_strips<2>)(call, band, strips, used, padding, planes);
  } else if (call.x_strides[1] == 1 && call.x_strides[3] != 1) {
    pack_planes_channels_last(call, band, pieces, used, fill, planes);
  } else {
    pack_planes(call, band, pieces, used, fill, planes);
  }
}

// A run of output pixels in a tile of tokens.
struct Segment {
  int64_t token;  // in the tile
  int64_t pixel;  // in the image
  int64_t count;
};

constexpr int64_t kMostTokens = 4 * kLanes;

// Finds the tokens of [begin, begin + count) that are pixels: the others lie between the rows of the image.
inline int64_t find_segments(const ConvCall& call, int64_t begin, int64_t count, Segment (&segments)[kMostTokens]) {
  if (call.row_width == call.out_columns) {
    segments[0] = {0, begin, count};
    return 1;
  }
  int64_t found = 0;
  for (int64_t token = 0; token < count;) {
    const int64_t row = (begin + token) / call.row_width, column = (begin + token) % call.row_width;
    const int64_t pixels = std::min(call.out_columns - column, count - token);
    if (pixels > 0) segments[found++] = {token, row * call.out_columns + column, pixels};
    token += call.row_width - column;
  }
  return found;
}

// Stores sums through the epilogue; `y` and `residual` are at the first row of `sums` and the first pixel of the image.
template <Activation Act>
inline void store_pixels(const float* sums, int64_t tile, int64_t rows, int64_t plane, const Segment* segments,
                         int64_t count, const float* bias, const float* residual, float* y) {
  for (int64_t row = 0; row < rows; ++row) {
    const Vec shift = splat(bias ? bias[row] : -0.0f);  // adding -0 changes nothing, not even a -0
    for (const Segment* segment = segments; segment != segments + count; ++segment) {
      for (int64_t j = 0; j < segment->count; j += kLanes) {
        const int64_t pixels = segment->count - j;
        const int64_t at = row * plane + segment->pixel + j;
        Vec sum = activate<Act>(load_some(sums + row * tile + segment->token + j, pixels) + shift);
        if (residual) sum += load_some(residual + at, pixels);
        store_some(y + at, activate_last<Act>(sum), pixels);
      }
    }
  }
}

// What is the same for all tiles of a band.
struct BandTask {
  const PanelMatrix* matrix;
  const ConvCall* call;
  const float* x;         // token 0 of the image, in the first slot
  float* y;               // the image's first pixel in channel 0
  const float* residual;  // the same, or null
  float* sums;            // [scratch_rows()][tile]
};

// With several chunks every row must wait for the last one; with one, a few blocks at a time are enough.
inline int64_t scratch_rows(const PanelMatrix& matrix, int64_t first, int64_t last) {
  return (matrix.chunks > 1 ? last - first : kBlocksTogether) * kBlockRows;
}

// Tokens [begin, begin + vectors * kLanes) in the blocks of rows [first, last). All of them are pixels and are stored
// in place if `whole`; else the first `count` are looked through for pixels. Chunks of the input channels follow each
// other, so that what all rows read of one of them stays in the nearest cache.
inline void multiply_tokens(const BandTask& task, int64_t begin, int64_t count, int64_t vectors, bool whole,
                            int64_t first, int64_t last) {
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = *task.call;
  // Channels of an image lie far apart. Wide tiles of single rows gain by asking for them, where no chunk keeps them near.
  const bool singles_ahead = matrix.bn == 1 && matrix.interleave == 1 && matrix.chunks == 1 && vectors >= 3;
  const RowsKernel kernel = find_kernel(matrix.bn, vectors, matrix.interleave, matrix.prefetch > 0 || singles_ahead);
  const int64_t tile = matrix.mv * kLanes, plane = call.out_rows * call.out_columns;
  const int64_t groups_each = kBlockRows / matrix.bn;
  const bool in_registers = whole && fits_registers(call.activation);
  Segment segments[kMostTokens];
  const int64_t runs = whole ? 0 : find_segments(call, begin, count, segments);
  for (int64_t chunk = 0; chunk < matrix.chunks; ++chunk) {
    const bool ends = chunk + 1 == matrix.chunks;
    for (int64_t block = first; block < last; block += kBlocksTogether) {
      const int64_t blocks = std::min(kBlocksTogether, last - block);
      const int64_t row = block * kBlockRows;
      const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
      float* y = task.y + row * plane;
      float* sums = task.sums + (matrix.chunks > 1 ? row - first * kBlockRows : 0) * tile;
      const float* bias = call.bias ? call.bias + row : nullptr;
      const float* residual = task.residual ? task.residual + row * plane : nullptr;
      const RowsFinish finish = rows_finish(call.bias, residual ? residual + begin : nullptr, call.activation);
      kernel(RowsTask{&matrix, chunk, block * groups_each, std::min((block + blocks) * groups_each, matrix.groups),
                      task.x + begin, whole ? y + begin : sums, row, whole ? plane : tile,
                      in_registers && ends ? &finish : nullptr, whole});
      if (in_registers || !ends) continue;
      with_activation(call.activation, [&](auto tag) {
        constexpr Activation act = decltype(tag)::value;
        if (whole) {
          finish_rows<act>(y + begin, plane, row, rows, vectors, call.bias, residual ? residual + begin : nullptr);
        } else {
          store_pixels<act>(sums, tile, rows, plane, segments, runs, bias, residual, y);
        }
      });
    }
  }
}

inline int64_t tokens_of(const ConvCall& call) { return (call.out_rows - 1) * call.row_width + call.out_columns; }

// The input itself has no room behind it: there, the last band takes what is left, so that it has a whole vector.
inline int64_t bands_of(const ConvCall& call) {
  const int64_t tokens = tokens_of(call);
  return call.direct ? std::max<int64_t>(tokens / call.band_tokens, 1) : ceil_div(tokens, call.band_tokens);
}

// The blocks of rows [first, last) of one band; false when memory ran out.
inline bool multiply_band(const PanelMatrix& matrix, const ConvCall& call, int64_t index, int64_t first, int64_t last) {
  static thread_local Scratch image_scratch, sums_scratch;
  const int64_t bands = bands_of(call), part = index % bands, tokens = tokens_of(call);
  const int64_t band_end = part + 1 == bands ? tokens : (part + 1) * call.band_tokens;
  const Band band{index / bands, part * call.band_tokens, band_end - part * call.band_tokens};
  const int64_t tile = matrix.mv * kLanes;

  float* sums = sums_scratch.get(scratch_rows(matrix, first, last) * tile);
  float* image = call.direct ? nullptr : image_scratch.get(call.slots * call.in_channels * call.plane + tile);
  if (!sums || (!call.direct && !image)) return false;
  for (int64_t slot = 0; image && slot < call.slots; ++slot) {
    pack_slot(call, band, slot, image + slot * call.in_channels * call.plane);
  }
  const int64_t pixel = band.image * matrix.channels * call.out_rows * call.out_columns;
  const float* x = image ? image - band.first : call.x + band.image * call.x_strides[0];
  const BandTask task{&matrix, &call, x, call.y + pixel, call.residual ? call.residual + pixel : nullptr, sums};
  for (int64_t start = band.first; start < band_end;) {
    const int64_t left = band_end - start;
    int64_t vectors = std::min<int64_t>(matrix.mv, ceil_div(left, kLanes));
    if (call.direct && vectors * kLanes > band.tokens) vectors = std::max<int64_t>(left / kLanes, 1);
    // The last vectors may begin earlier, over tokens that are computed already, to be whole.
    const bool whole = call.row_width == call.out_columns && vectors * kLanes <= band.tokens;
    const int64_t begin = whole ? std::min(start, band_end - vectors * kLanes) : start;
    multiply_tokens(task, begin, std::min(left, vectors * kLanes), vectors, whole, first, last);
    start += vectors * kLanes;
  }
  return true;
}

inline bool multiply_conv(const PanelMatrix& matrix, const ConvCall& call) {
  return share_tiles(matrix, call.images * bands_of(call), call.threads, [&](int64_t band, int64_t begin, int64_t end) {
    return multiply_band(matrix, call, band, begin, end);
  });
}

// Bytes of a result that does not stay in the second level of caches until the next layer reads it.
constexpr int64_t kFarBytes = 1 << 20;
// Tokens that two layers compute together, at least.
constexpr int64_t kPairTokens = 192;

inline bool overlap(const float* one, int64_t floats, const float* two, int64_t more_floats) {
  const std::less<const float*> before;
  return one && two && before(one, two + more_floats) && before(two, one + floats);
}

// The first of two layers, cut into bands of whole tiles of both.
inline ConvCall in_pair_bands(const PanelMatrix& one, ConvCall first, const PanelMatrix& two) {
  const int64_t step = static_cast<int64_t>(one.mv) * two.mv * kLanes;
  first.band_tokens = ceil_div(kPairTokens, step) * step;
  return first;
}

// Whether bands, which threads do not cut again, keep all of them busy.
inline bool shares_bands(const ConvCall& call) {
  const int64_t bands = call.images * bands_of(call), threads = std::max(call.threads, 1);
  return bands % threads == 0 || bands >= 8 * threads;
}

// Whether the second of two layers reads what the first writes, token by token, and it is much: each band is then read
// while it is still near. What the second writes must not lie where the first still reads.
inline bool is_pair(const PanelMatrix& one, const ConvCall& first, const PanelMatrix& two, const ConvCall& second) {
  const int64_t tokens = tokens_of(first), each = one.channels * tokens, written = second.images * two.channels * tokens;
  const bool direct = first.direct && second.direct && tokens == tokens_of(second) && first.images == second.images;
  return direct && shares_bands(in_pair_bands(one, first, two)) && second.in_channels == one.channels &&
         each * static_cast<int64_t>(sizeof(float)) >= kFarBytes &&
         !overlap(second.y, written, first.x, first.images * first.x_strides[0]) &&
         !overlap(second.y, written, first.residual, first.images * each);
}

inline bool multiply_pair(const PanelMatrix& one, ConvCall first, const PanelMatrix& two, ConvCall second) {
  first = in_pair_bands(one, first, two);
  second.band_tokens = first.band_tokens;
  const int64_t bands = first.images * bands_of(first);
  bool enough_memory = true;
  parallel(first.threads, [&](int64_t index, int64_t count) {
    for (int64_t band = bands * index / count; band < bands * (index + 1) / count; ++band) {
      if (multiply_band(one, first, band, 0, ceil_div(one.channels, kBlockRows)) &&
          multiply_band(two, second, band, 0, ceil_div(two.channels, kBlockRows))) {
        continue;
      }
#pragma omp atomic write
      enough_memory = false;
      return;
    }
  });
  return enough_memory;
}

}  // namespace sparta
