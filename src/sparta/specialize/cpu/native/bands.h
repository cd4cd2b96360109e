// Bands of images as convolutions read them. An image is a flat row of tokens, its output pixels row by row with gaps
// where rows are padded. A band of tokens is copied to `slots`, one for each way to shift the image that offsets alone
// cannot do: the phases of a stride, and, where the caller wants aligned loads or no gaps, the shifts of the taps as well.
#pragma once

#include <limits>
#include <vector>

#include "spmm.h"

namespace sparta {

// One call. Rows and columns are those of images; the output is [images][channels][out_rows][out_columns], contiguous but
// for a gap behind each channel.
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
  int32_t y_gap;                  // floats between two channels of the output, and of the residual
  int32_t grid_columns;           // 0, or the regions side by side of the layout that grid.h is about
  int32_t by_phases;              // whether chunks are the phases that conv.h is about
};

// Floats from a channel of the output to the next.
inline int64_t y_plane(const ConvCall& call) { return call.out_rows * call.out_columns + call.y_gap; }

struct Band {
  int64_t image;
  int64_t first;   // token
  int64_t tokens;
};

inline int64_t tokens_of(const ConvCall& call) { return (call.out_rows - 1) * call.row_width + call.out_columns; }

// The input itself has no room behind it: there, bands have whole vectors, and so all of them have more than was asked.
inline int64_t bands_of(const ConvCall& call) {
  const int64_t tokens = tokens_of(call);
  return call.direct ? std::max<int64_t>(tokens / call.band_tokens, 1) : ceil_div(tokens, call.band_tokens);
}

// A band of an image: whole vectors, about as many in each, so that threads that share bands have done at once.
inline Band band_of(const ConvCall& call, int64_t index) {
  const int64_t bands = bands_of(call), part = index % bands, tokens = tokens_of(call);
  const int64_t vectors = ceil_div(tokens, kLanes), first = vectors * part / bands * kLanes;
  return {index / bands, first, std::min(vectors * (part + 1) / bands * kLanes, tokens) - first};
}

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

// Whether all are loaded, where asking pays.
SPARTA_INLINE bool are_all(const LaneMask& lanes) {
#if defined(SPARTA_AVX512)
  return lanes == lane_mask(0, kLanes);
#else
  (void)lanes;
  return false;
#endif
}

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
constexpr int64_t kChannelsAhead = 32;

// Fills one slot of a band, channel by channel, where values of a row lie side by side, or every second one is taken. What
// is written beyond a plane is written over by the next one; there is room for a vector behind the last.
template <int Step>
inline void pack_strips(const ConvCall& call, const Band& band, const std::vector<Strip>& strips, const uint8_t* used,
                        int32_t padding, float* planes) {
  const Vec fill = (Vec)(IntVec{} + padding);
  const Strip* const first = strips.data();
  const Strip* const end = first + strips.size();
  // A band with all rows reads channels that follow each other, where processors look ahead by themselves.
  const bool far = bands_of(call) > 1;
  for (int64_t channel = 0; channel < call.in_channels; ++channel) {
    if (!used[channel]) continue;
    const float* image = call.x + band.image * call.x_strides[0] + channel * call.x_strides[1];
    const float* later = image + kChannelsAhead * call.x_strides[1];
    float* plane = planes + channel * call.plane;
    for (const Strip* strip = first; strip != end; ++strip) {
      if (far) __builtin_prefetch(later + strip->from, 0, 2);
      const float* from = image + strip->from;
      if (Step == 1 && are_all(strip->lanes)) {
        store(plane + strip->at, load(from));
      } else {
        store(plane + strip->at,
              Step == 1 ? load_lanes(from, strip->lanes, fill) : load_lanes_by_two(from, strip->lanes, fill));
      }
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

}  // namespace sparta
