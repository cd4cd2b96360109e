// Convolutions in bf16, summed in fp32: a band of places is packed as conv.h packs floats, and a product takes two live
// weights of a row at once (vdpbf16ps). They need not be neighbours, nor even of one parity: each half of a pair has an
// address of its own, and a load that begins two bytes earlier or later brings any channel into the half that is wanted.
#pragma once

#include "bf16_images.h"
#include "conv.h"

namespace sparta {

// Pairs of a matrix have two offsets, the bytes from a token to either half; where it has whole places, one.
constexpr int32_t kWholePlaces = 2;

// The half at one address below, the half at another above. A load under a mask of halves takes ten times as long as two
// loads that are blended, so two bytes before the first place and behind the last one are read as well.
SPARTA_INLINE IntVec load_pair(const char* low, const char* high) {
#if defined(SPARTA_AVX512)
  const __m512i first = _mm512_loadu_si512(low), second = _mm512_loadu_si512(high - 2);
  return (IntVec)_mm512_mask_blend_epi16(0xAAAAAAAAu, first, second);
#else
  const auto first = reinterpret_cast<uintptr_t>(low) & 2, second = reinterpret_cast<uintptr_t>(high) & 2;
  BitVec one, two;
  std::memcpy(&one, low - first, sizeof one);
  std::memcpy(&two, high - second, sizeof two);
  return (IntVec)((first ? one >> 16 : one & ~kUpperHalf) | (second ? two & kUpperHalf : two << 16));
#endif
}

// Some groups of rows of a tile. Sums go to the ends at once, or wait in `results`. Where `pixels`
// is null the tokens are all stored; else the ends are at the image's first pixel.
struct Bf16PlacesTask {
  const PanelMatrix* matrix;
  const RowsFinish* finish;
  PlacesEnds ends;  // at `first_row`
  int64_t group_begin;
  int64_t group_end;
  const char* x;
  int64_t first_row;
  const PixelLanes* pixels;  // of each vector, or null
  float* results;            // [rows][tile], or null
  int64_t tile;
};

// The sums of some rows of one group, an even number of them, become results: [rows][vectors][lanes]. In a function of its
// own, which leaves the registers to the products.
template <class Unit>
SPARTA_NOINLINE void finish_bf16_group(const Bf16PlacesTask& task, const float* sums, int64_t rows, int64_t vectors,
                                       int64_t row, int64_t channels) {
  const RowsFinish finish = *task.finish;
  const int64_t done = row - task.first_row;
  for (int64_t r = 0; r < std::min(rows, channels - row); r += 2) {
    const bool both = row + r + 1 < channels;
    const RowEnd<Vec> low(finish, row + r), high(finish, both ? row + r + 1 : row + r);
    const PlacesEnds ends = moved(task.ends, (done + r) / 2 * task.ends.plane, (done + r) * task.ends.plane);
    const float* from = sums + r * vectors * kLanes;
    for (int64_t j = 0; j < vectors; ++j) {
      const Vec one = low.before(load(from + j * kLanes)), two = high.before(load(from + (vectors + j) * kLanes));
      if (!task.pixels) {
        put_pair<Unit>(one, two, finish.last_floor, ends, j * kLanes, both, TokenLanes<true>{kLanes});
        continue;
      }
      const PixelLanes& pixels = task.pixels[j];
      put_pair<Unit>(together(one, pixels.lanes), together(two, pixels.lanes), finish.last_floor, ends, pixels.pixel,
                     both, TokenLanes<false>{pixels.count});
    }
  }
}

template <class Unit, int BN, int MV, bool Whole>
void multiply_bf16_places(const Bf16PlacesTask& given) {
  const Bf16PlacesTask task = given;  // copies, which no store can change
  const PanelMatrix matrix = *task.matrix;
  const int32_t* const all_values = reinterpret_cast<const int32_t*>(matrix.values);
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    const int64_t begin = matrix.starts[group], end = matrix.starts[group + 1], row = matrix.rows[group];
    const int32_t* values = all_values + begin * BN;
    Vec sums[BN][MV] = {};
    for (int64_t i = begin; i < end; ++i, values += BN) {
      typename Unit::Inputs inputs[MV];
      const char* const low = task.x + matrix.offsets[Whole ? i : 2 * i];
      const char* const high = Whole ? nullptr : task.x + matrix.offsets[2 * i + 1];
      each<MV>([&](auto j) SPARTA_LAMBDA {
        constexpr int kBytes = j * kLanes * 4;
        if constexpr (Whole) {
          inputs[j] = Unit::split((IntVec)load(reinterpret_cast<const float*>(low + kBytes)));
        } else {
          inputs[j] = Unit::split(load_pair(low + kBytes, high + kBytes));
        }
      });
      each<BN>([&](auto r) SPARTA_LAMBDA {
        const typename Unit::Weight weight = Unit::spread(values + r);
        each<MV>([&](auto j) SPARTA_LAMBDA { Unit::add(sums[r][j], inputs[j], weight); });
      });
    }
    alignas(64) float waiting[BN * MV * kLanes];
    const bool waits = task.results == nullptr;
    float* const to = waits ? waiting : task.results + (row - task.first_row) * task.tile;
    const int64_t stride = waits ? MV * kLanes : task.tile;
    each<BN>([&](auto r) SPARTA_LAMBDA {
      each<MV>([&](auto j) SPARTA_LAMBDA { store(to + r * stride + j * kLanes, sums[r][j]); });
    });
    if (waits) finish_bf16_group<Unit>(task, waiting, BN, MV, row, matrix.channels);
  }
}

using Bf16PlacesKernel = void (*)(const Bf16PlacesTask&);

template <class Unit, int BN, bool Whole>
Bf16PlacesKernel bf16_places_for(int64_t vectors) {
  switch (vectors) {
    case 1: return multiply_bf16_places<Unit, BN, 1, Whole>;
    case 2: return multiply_bf16_places<Unit, BN, 2, Whole>;
    case 3: return multiply_bf16_places<Unit, BN, 3, Whole>;
    case 4: return BN < 8 ? multiply_bf16_places<Unit, BN, BN < 8 ? 4 : 3, Whole> : nullptr;
    default: return nullptr;
  }
}

// For groups of 1, 4 or 8 rows and 1 to 4 vectors, or 3 for 8; null where there is none.
inline Bf16PlacesKernel find_bf16_places(int32_t bn, int64_t vectors, int32_t interleave) {
  const bool whole = interleave == kWholePlaces;
  return with_pairs([&](auto unit) -> Bf16PlacesKernel {
    using Unit = decltype(unit);
    if (bn == 1) return whole ? nullptr : bf16_places_for<Unit, 1, false>(vectors);
    if (bn == 4) return whole ? bf16_places_for<Unit, 4, true>(vectors) : bf16_places_for<Unit, 4, false>(vectors);
    if (bn == 8) return whole ? bf16_places_for<Unit, 8, true>(vectors) : bf16_places_for<Unit, 8, false>(vectors);
    return nullptr;
  });
}

// Stores results through what is not in registers: other activations, gaps between the rows of images, and single rows.
template <class Unit, Activation Act>
inline void store_bf16_results(const float* results, int64_t tile, int64_t row, int64_t rows, const Segment* segments,
                               int64_t count, const float* bias, const PlacesEnds& ends) {
  const float floor = Act == kReluLast ? 0.0f : -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < rows; i += 2) {
    const bool both = i + 1 < rows;
    const Vec first = splat(bias ? bias[row + i] : -0.0f), second = splat(bias && both ? bias[row + i + 1] : -0.0f);
    const PlacesEnds to = moved(ends, i / 2 * ends.plane, i * ends.plane);
    for (const Segment* segment = segments; segment != segments + count; ++segment) {
      for (int64_t j = 0; j < segment->count; j += kLanes) {
        const TokenLanes<false> lanes{segment->count - j};
        const float* from = results + i * tile + segment->token + j;
        const Vec low = activate<Act>(load_some(from, lanes.count) + first);
        const Vec high = both ? activate<Act>(load_some(from + tile, lanes.count) + second) : Vec{};
        put_pair<Unit>(low, high, floor, to, segment->pixel + j, both, lanes);
      }
    }
  }
}

// What is the same for all tiles of a band.
struct Bf16BandTask {
  const PanelMatrix* matrix;
  const ConvCall* call;
  const float* x;   // token 0 of the image, in the first slot
  PlacesEnds ends;  // at the image's first pixel in channel 0
  float* results;
};

// A tile in the blocks of rows [first, last).
inline void multiply_bf16_tokens(const Bf16BandTask& task, const TokenTile& given, int64_t first, int64_t last) {
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = *task.call;
  const bool in_registers = (given.whole || kMovesLanes) && matrix.bn > 1 && fits_registers(call.activation);
  const int64_t tile = matrix.mv * kLanes, plane = task.ends.plane, groups_each = kBlockRows / matrix.bn;
  const int64_t begin = given.begin;
  const Bf16PlacesKernel kernel = find_bf16_places(matrix.bn, given.vectors, matrix.interleave);
  const RowsFinish finish = rows_finish(call.bias, nullptr, call.activation);
  PixelLanes pixels[kMostTokens / kLanes + 1];
  Segment segments[kMostTokens];
  if (in_registers && !given.whole) find_pixels(call, given, pixels);
  const int64_t runs = in_registers ? 0 : find_segments(call, begin, given.count, segments);
  for (int64_t block = first; block < last; block += kBlocksTogether) {
    const int64_t blocks = std::min(kBlocksTogether, last - block), row = block * kBlockRows;
    const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
    const PlacesEnds ends = moved(task.ends, row / 2 * plane, row * plane);
    const PlacesEnds at = in_registers && given.whole ? moved(ends, begin, begin) : ends;
    kernel(Bf16PlacesTask{&matrix, &finish, at, block * groups_each, std::min((block + blocks) * groups_each, matrix.groups),
                          reinterpret_cast<const char*>(task.x + begin), row, given.whole ? nullptr : pixels,
                          in_registers ? nullptr : task.results, tile});
    if (in_registers) continue;
    with_pairs([&](auto unit) {
      with_activation(call.activation, [&](auto tag) {
        store_bf16_results<decltype(unit), decltype(tag)::value>(task.results, tile, row, rows, segments, runs,
                                                                 call.bias, ends);
      });
    });
  }
}

// Cuts a band into tiles of vectors that are about alike.
inline void multiply_bf16_vectors(const Bf16BandTask& task, const Band& band, int64_t first, int64_t last) {
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = *task.call;
  const int64_t vectors = ceil_div(band.tokens, kLanes), end = band.first + band.tokens;
  // The input itself has no room behind it: vectors that lack tokens begin earlier, over some that are computed already.
  const bool lacks = vectors * kLanes > band.tokens;
  const int64_t tiles = std::max<int64_t>(ceil_div(vectors, matrix.mv), call.direct && lacks && vectors > 1 ? 2 : 1);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = vectors * i / tiles, count = vectors * (i + 1) / tiles - begin, tokens = count * kLanes;
    const bool whole = call.row_width == call.out_columns && tokens <= band.tokens;
    const int64_t start = band.first + begin * kLanes;
    const int64_t at = whole || call.direct ? std::min(start, end - tokens) : start;
    multiply_bf16_tokens(task, TokenTile{at, count, std::min(end - at, tokens), 0, whole}, first, last);
  }
}

// The blocks of rows [first, last) of one band; false when memory ran out.
inline bool multiply_bf16_band(const PanelMatrix& matrix, const Bf16ConvCall& given, int64_t index, int64_t first,
                               int64_t last) {
  static thread_local Scratch image_scratch, results_scratch;
  const ConvCall& call = given.conv;
  const Band band = band_of(call, index);
  const int64_t tile = matrix.mv * kLanes;
  float* results = results_scratch.get(kBlocksTogether * kBlockRows * tile);
  const int64_t room = call.slots * call.in_channels * call.plane + tile + 2 * kLanes;
  float* memory = call.direct ? nullptr : image_scratch.get(room);
  if (!results || (!call.direct && !memory)) return false;
  float* image = memory ? memory + kLanes : nullptr;  // halves are read around what they belong to
  for (int64_t slot = 0; image && slot < call.slots; ++slot) {
    pack_slot(call, band, slot, image + slot * call.in_channels * call.plane);
  }
  const float* x = image ? image - band.first : call.x + band.image * call.x_strides[0];
  multiply_bf16_vectors(Bf16BandTask{&matrix, &call, x, bf16_ends(given, band.image), results}, band, first, last);
  return true;
}

inline bool knows_bf16_places(const PanelMatrix& matrix) {
  for (int64_t vectors = 1; vectors <= matrix.mv; ++vectors) {
    if (!find_bf16_places(matrix.bn, vectors, matrix.interleave)) return false;
  }
  return matrix.mv >= 1 && matrix.chunks == 1;
}

inline bool multiply_bf16_conv(const PanelMatrix& matrix, const Bf16ConvCall& call) {
  const ConvCall& conv = call.conv;
  with_pairs([&](auto unit) { round_images<decltype(unit)>(call); });
  return share_tiles(matrix, conv.images * bands_of(conv), conv.threads,
                     [&](int64_t band, int64_t begin, int64_t end) {
                       return multiply_bf16_band(matrix, call, band, begin, end);
                     });
}

}  // namespace sparta
