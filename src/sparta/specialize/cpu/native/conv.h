// Convolutions: the kernels of spmm.h with another table of offsets. A weight's offset leads from a token of a band to the
// input value that it multiplies, in a padded copy of the band (or in the input itself, where nothing is to be padded).
// Sums of tokens that lie between the rows of an image are dropped on their way to memory.
#pragma once

#include <functional>

#include "grid.h"

namespace sparta {

// A run of output pixels in a tile of tokens.
struct Segment {
  int64_t token;  // in the tile
  int64_t pixel;  // in the image
  int64_t count;
};

constexpr int64_t kMostTokens = kQuadVectors * kLanes;

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

// Tokens that are computed together: vectors, the last of which may lack some, and a few behind them.
struct TokenTile {
  int64_t begin;
  int64_t vectors;
  int64_t count;  // tokens of the vectors
  int64_t tail;
  bool whole;     // all are pixels that lie side by side, and no vector lacks any
};

// With several chunks every row must wait for the last one; with one, a few blocks at a time are enough.
inline int64_t scratch_rows(const PanelMatrix& matrix, int64_t first, int64_t last) {
  return (matrix.chunks > 1 ? last - first : kBlocksTogether) * kBlockRows;
}

// Floats between two rows of sums: a tile and its tail, in whole lines.
inline int64_t scratch_tile(const PanelMatrix& matrix) { return (matrix.mv + 1) * kLanes; }

// Which lanes of each vector are pixels, and of the tail where it begins.
inline void find_pixels(const ConvCall& call, const TokenTile& tile, PixelLanes* pixels) {
  int64_t row = tile.begin / call.row_width, column = tile.begin % call.row_width;
  for (int64_t j = 0; j <= tile.vectors; ++j) {
    pixels[j] = {0, 0, 0};
    const int64_t tokens = j == tile.vectors ? tile.tail : std::min<int64_t>(tile.count - j * kLanes, kLanes);
    for (int64_t i = 0; i < tokens; ++i) {
      if (column < call.out_columns) {
        if (!pixels[j].count++) pixels[j].pixel = row * call.out_columns + column;
        pixels[j].lanes |= 1u << i;
      }
      if (++column == call.row_width) column = 0, ++row;
    }
  }
}

// A tile in the blocks of rows [first, last). Sums that registers can finish are stored in place; others wait, or are
// looked through for pixels. Chunks of the input channels follow each other, so that what all rows read of one of them
// stays in the nearest cache.
inline void multiply_tokens(const BandTask& task, const TokenTile& given, int64_t first, int64_t last) {
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = *task.call;
  const int64_t vectors = given.vectors, begin = given.begin;
  const bool whole = given.whole;
  // Channels of an image lie far apart. Wide tiles of single rows gain by asking for them, where no chunk keeps them near.
  const bool singles_ahead = matrix.bn == 1 && matrix.interleave == 1 && matrix.chunks == 1 && vectors >= 3;
  const RowsKernel kernel =
      find_kernel(matrix.bn, vectors, matrix.interleave, matrix.prefetch > 0 || singles_ahead, given.tail);
  const int64_t tile = scratch_tile(matrix), plane = y_plane(call);
  const int64_t groups_each = kBlockRows / matrix.bn;
  const bool in_registers = (whole || kMovesLanes) && fits_registers(call.activation);
  PixelLanes pixels[kMostTokens / kLanes + 1];
  Segment segments[kMostTokens];
  if (in_registers && !whole) find_pixels(call, given, pixels);
  const int64_t runs = whole || in_registers ? 0 : find_segments(call, begin, given.count, segments);
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
      const RowsFinish finish =
          rows_finish(call.bias, residual && whole ? residual + begin : residual, call.activation);
      RowsTask rows_task{&matrix, chunk, block * groups_each, std::min((block + blocks) * groups_each, matrix.groups),
                         task.x + begin, whole ? y + begin : sums, row, whole ? plane : tile,
                         in_registers && ends ? &finish : nullptr, whole || in_registers};
      if (in_registers && !whole) {
        rows_task.pixels = pixels;
        rows_task.image = y;
        rows_task.plane = plane;
      }
      kernel(rows_task);
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

// Tokens behind the last vector of a band that a kernel computes without a vector of their own; 0 where there are none.
inline int64_t tail_of(const PanelMatrix& matrix, const ConvCall& call, const Band& band) {
  const int64_t rest = band.tokens % kLanes, column = (band.first + band.tokens - rest) % call.row_width;
  const bool in_registers = fits_registers(call.activation) && (kMovesLanes || call.row_width == call.out_columns);
  const bool pixels = call.row_width == call.out_columns || column + rest <= call.out_columns;
  const bool known = find_kernel(matrix.bn, 1, matrix.interleave, false, rest) != nullptr;
  return band.tokens > kLanes && in_registers && pixels && known ? rest : 0;
}

// Cuts a band into tiles that are about alike: calls f with each.
template <class F>
inline void each_tile(const PanelMatrix& matrix, const ConvCall& call, const Band& band, F f) {
  const int64_t tail = tail_of(matrix, call, band), vectors = ceil_div(band.tokens - tail, kLanes);
  const int64_t end = band.first + band.tokens - tail;
  // The input itself has no room behind it: a vector that lacks tokens begins earlier, over some of a vector before.
  const bool lacks = band.first + vectors * kLanes > end;
  const int64_t tiles = std::max<int64_t>(ceil_div(vectors, matrix.mv), call.direct && lacks ? 2 : 1);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = vectors * i / tiles, count = vectors * (i + 1) / tiles - first, tokens = count * kLanes;
    const bool whole = call.row_width == call.out_columns && tokens <= band.tokens;
    const int64_t start = band.first + first * kLanes, begin = whole ? std::min(start, end - tokens) : start;
    if (count) f(TokenTile{begin, count, std::min(end - begin, tokens), i + 1 == tiles ? tail : 0, whole});
  }
}

// The blocks of rows [first, last) of one band; false when memory ran out.
inline bool multiply_band(const PanelMatrix& matrix, const ConvCall& call, int64_t index, int64_t first, int64_t last) {
  static thread_local Scratch image_scratch, sums_scratch;
  const Band band = band_of(call, index);
  float* sums = sums_scratch.get(scratch_rows(matrix, first, last) * scratch_tile(matrix));
  const int64_t room = call.slots * call.in_channels * call.plane + matrix.mv * kLanes;
  float* image = call.direct ? nullptr : image_scratch.get(room);
  if (!sums || (!call.direct && !image)) return false;
  for (int64_t slot = 0; image && slot < call.slots; ++slot) {
    pack_slot(call, band, slot, image + slot * call.in_channels * call.plane);
  }
  const int64_t pixel = band.image * matrix.channels * y_plane(call);
  const float* x = image ? image - band.first : call.x + band.image * call.x_strides[0];
  const BandTask task{&matrix, &call, x, call.y + pixel, call.residual ? call.residual + pixel : nullptr, sums};
  each_tile(matrix, call, band, [&](const TokenTile& tile) { multiply_tokens(task, tile, first, last); });
  return true;
}

// Layers of one tap over images whose channels do not begin on cache lines, read where they are. Channels whose places in
// a line are the same are a chunk, a phase: their vectors are read from the beginning of a line on, some tokens early, so
// that no load crosses two lines, and only sums are moved, once for each phase.
// Channels that are so many apart begin at the same place of a line, where planes are a multiple of four pixels.
constexpr int64_t kPhases = 4;

// The blocks of rows [first, last) of one image; false when memory ran out. The input is contiguous, and its channels are
// a multiple of kPhases: then what is read early lies in the channel before, and nothing beyond the last one is read.
inline bool multiply_phases(const PanelMatrix& matrix, const ConvCall& call, int64_t image, int64_t first, int64_t last) {
  static thread_local Scratch scratch;
  const int64_t pixels = tokens_of(call), most = ceil_div(pixels, kLanes), groups_each = kBlockRows / matrix.bn;
  const int64_t row = first * kBlockRows, rows = std::min(last * kBlockRows, matrix.channels) - row;
  // Token 0 is behind a vector of those that are read early; those that are read late have a vector at the end. An odd
  // number of lines lets rows begin in different sets of a cache.
  const int64_t stride = (most + 2 | 1) * kLanes;
  float* sums = scratch.get((last - first) * kBlockRows * stride);
  if (!sums) return false;
  for (int64_t r = 0; r < rows; ++r) {
    store(sums + r * stride, Vec{});
    store(sums + r * stride + (most + 1) * kLanes, Vec{});
  }
  for (int64_t phase = 0; phase < kPhases; ++phase) {
    const int64_t early = phase * call.x_strides[1] % kLanes;
    const float* x = call.x + image * call.x_strides[0] - early;
    const int64_t vectors = ceil_div(pixels + early, kLanes), tiles = ceil_div(vectors, matrix.mv);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t begin = vectors * i / tiles, count = vectors * (i + 1) / tiles - begin;
      const RowsKernel kernel = find_kernel(matrix.bn, count, matrix.interleave, matrix.prefetch > 0);
      kernel(RowsTask{&matrix, phase, first * groups_each, std::min(last * groups_each, matrix.groups),
                      x + begin * kLanes, sums + (begin + 1) * kLanes - early, row, stride, nullptr});
    }
  }
  const Segment all{0, 0, pixels};
  const int64_t at = (image * matrix.channels + row) * y_plane(call);
  with_activation(call.activation, [&](auto tag) {
    store_pixels<decltype(tag)::value>(sums + kLanes, stride, rows, y_plane(call), &all, 1,
                                       call.bias ? call.bias + row : nullptr,
                                       call.residual ? call.residual + at : nullptr, call.y + at);
  });
  return true;
}

inline bool multiply_conv(const PanelMatrix& matrix, const ConvCall& call) {
  if (call.by_phases && matrix.chunks == kPhases) {
    return share_tiles(matrix, call.images, call.threads, [&](int64_t image, int64_t begin, int64_t end) {
      return multiply_phases(matrix, call, image, begin, end);
    });
  }
  if (call.grid_columns > 0) {
    const int64_t bands = call.images * grid_bands_of(call);
    return share_tiles(matrix, bands, call.threads, [&](int64_t band, int64_t begin, int64_t end) {
      return multiply_grid_band(matrix, call, band, begin, end);
    });
  }
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
  const int64_t tokens = tokens_of(first), each = one.channels * y_plane(first);
  const int64_t written = second.images * two.channels * y_plane(second);
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
