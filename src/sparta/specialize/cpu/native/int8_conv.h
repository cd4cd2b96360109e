// Convolutions of 8-bit integers: an image is rounded to places of four channels, 32 bits a pixel, and those are packed
// as conv.h packs floats; the kernels are those of int8.h. What pads an image is the integer that stands for 0, not the
// bits 0.
#pragma once

#include "conv.h"
#include "int8_runs.h"

namespace sparta {

// One call. `conv` is a convolution over places: its x is where they are put, its in_channels counts them.
struct Int8ConvCall {
  ConvCall conv;
  const float* image;  // [images][channels][in_rows][in_columns], contiguous
  const float* multiplier;
  const float* offset;  // or null
  const int32_t* row_sums;
  int64_t channels;
  float x_inverse_scale;
  int32_t x_is_unsigned;
  int32_t x_zero;
  int32_t no_least_weight;
  int32_t x_is_places;  // conv.x holds the image in bytes already
  int32_t y_is_places;  // conv.y is [images][ceil(channels / 4)][pixels], bytes as the next convolution reads them
  float y_inverse_scale;
  int32_t y_is_unsigned;
  int32_t y_zero;
  float* real;  // the result in real numbers beside places, or null
  int32_t residual_kind;
  float residual_inverse;  // of a residual on a grid, the inverse scale and the scale
  float residual_scale;
  int32_t residual_is_unsigned;
  int32_t residual_zero;
};

// Bytes as images hold them: those that kernels multiply.
inline Bytes image_bytes(int32_t zero, bool is_unsigned) { return bytes_around(zero, is_unsigned, has_vnni()); }

// Four bytes of real 0, which pad images.
inline int32_t zero_place(const Bytes& bytes) {
  const uint32_t four = static_cast<uint32_t>(bytes.shift & 255) * 0x01010101u;
  return static_cast<int32_t>(four ^ static_cast<uint32_t>(bytes.flip));
}

// Pixels of an image that are rounded by one thread at a time.
constexpr int64_t kPixelsTogether = 1024;

// Some pixels of one place of one image. Channels that do not exist have no weights; they become 0.
inline void quantise_place(const Int8ConvCall& call, int64_t image, int64_t place, int64_t first, const Bytes& bytes) {
  const int64_t pixels = call.conv.in_rows * call.conv.in_columns, channel = 4 * place;
  const float* from = call.image + (image * call.channels + channel) * pixels;
  int32_t* to = reinterpret_cast<int32_t*>(const_cast<float*>(call.conv.x)) +
                (image * call.conv.in_channels + place) * pixels;
  const Vec scale = splat(call.x_inverse_scale);
  const int64_t present = std::min<int64_t>(4, call.channels - channel);
  for (int64_t pixel = first; pixel < std::min(first + kPixelsTogether, pixels); pixel += kLanes) {
    const int64_t count = std::min<int64_t>(pixels - pixel, kLanes);
    Vec four[4] = {};
    for (int64_t i = 0; i < present; ++i) four[i] = scale * load_some(from + i * pixels + pixel, count);
    store_some(reinterpret_cast<float*>(to + pixel), (Vec)join_rows<false>(four, bytes), count);
  }
}

// Stores results through what is not in registers: other activations, gaps between the rows of images, and tiles whose
// last tokens do not exist. `ends` are at the first row and the first pixel of the image.
template <Activation Act>
inline void store_results(const float* results, int64_t tile, int64_t rows, const Segment* segments, int64_t count,
                          const PlacesFinish& finish, const PlacesEnds& ends) {
  for (int64_t row = 0; row < rows; row += 4) {
    for (const Segment* segment = segments; segment != segments + count; ++segment) {
      for (int64_t j = 0; j < segment->count; j += kLanes) {
        const int64_t pixels = segment->count - j, pixel = segment->pixel + j;
        Vec four[4] = {};
        for (int64_t r = 0; r < std::min<int64_t>(4, rows - row); ++r) {
          four[r] = activate<Act>(load_some(results + (row + r) * tile + segment->token + j, pixels));
        }
        put_four(four, finish, ends, row / 4 * ends.plane + pixel, row * ends.plane + pixel, rows - row,
                 TokenLanes<false>{pixels});
      }
    }
  }
}

// What is the same for all tiles of a band.
struct Int8BandTask {
  const PanelMatrix* matrix;
  const Int8ConvCall* call;
  const PlacesFinish* finish;
  const int32_t* x;  // token 0 of the image, in the first slot
  PlacesEnds ends;   // at the image's first pixel in channel 0
  float* results;
};

// A tile in the blocks of rows [first, last). Results that registers can finish are stored from there.
inline void multiply_int8_tokens(const Int8BandTask& task, const TokenTile& given, int64_t first, int64_t last) {
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = task.call->conv;
  const bool no_least = task.call->no_least_weight != 0, whole = given.whole;
  const bool fours = matrix.bn == 4 || matrix.bn == kTileRows;
  const bool in_registers = (whole || kMovesLanes) && fours && fits_registers(call.activation);
  const int64_t tile = matrix.mv * kLanes, plane = task.ends.plane, groups_each = kBlockRows / matrix.bn;
  const int64_t begin = given.begin;
  PixelLanes pixels[kMostTokens / kLanes + 1];
  Segment segments[kMostTokens];
  if (in_registers && !whole) find_pixels(call, given, pixels);
  const int64_t runs = in_registers ? 0 : find_segments(call, begin, given.count, segments);
  for (int64_t block = first; block < last; block += kBlocksTogether) {
    const int64_t blocks = std::min(kBlocksTogether, last - block), row = block * kBlockRows;
    const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
    const int64_t groups = block * groups_each, end = std::min((block + blocks) * groups_each, matrix.groups);
    const PlacesEnds ends = moved(task.ends, row / 4 * plane, row * plane);
    if (in_registers) {
      find_places_kernel(matrix.bn, given.vectors, no_least)(
          PlacesTask{&matrix, task.finish, whole ? moved(ends, begin, begin) : ends, groups, end, task.x + begin, row,
                     call.plane, whole ? nullptr : pixels});
      continue;
    }
    find_int8_kernel(matrix.bn, given.vectors, no_least)(
        Int8Task{&matrix, &task.finish->scales, groups, end, task.x + begin,
                 reinterpret_cast<int32_t*>(task.results), row, tile, call.plane});
    with_activation(call.activation, [&](auto tag) {
      store_results<decltype(tag)::value>(task.results, tile, rows, segments, runs, *task.finish, ends);
    });
  }
}

// Cuts a band into tiles of vectors that are about alike.
inline void multiply_int8_vectors(const Int8BandTask& task, const Band& band, int64_t first, int64_t last) {
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = task.call->conv;
  const int64_t vectors = ceil_div(band.tokens, kLanes), end = band.first + band.tokens;
  // The input itself has no room behind it: vectors that lack tokens begin earlier, over some that are computed already.
  const bool lacks = vectors * kLanes > band.tokens;
  const int64_t tiles = std::max<int64_t>(ceil_div(vectors, matrix.mv), call.direct && lacks && vectors > 1 ? 2 : 1);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = vectors * i / tiles, count = vectors * (i + 1) / tiles - begin, tokens = count * kLanes;
    const bool whole = call.row_width == call.out_columns && tokens <= band.tokens;
    const int64_t start = band.first + begin * kLanes;
    const int64_t at = whole || call.direct ? std::min(start, end - tokens) : start;
    multiply_int8_tokens(task, TokenTile{at, count, std::min(end - at, tokens), 0, whole}, first, last);
  }
}

// Runs of pixels in the blocks of rows [first, last), which are groups here.
inline void multiply_int8_runs(const Int8BandTask& task, const Band& band, int64_t first, int64_t last) {
  static thread_local std::vector<Run> runs;
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = task.call->conv;
  const int64_t plane = task.ends.plane;
  const bool no_least = task.call->no_least_weight != 0, in_registers = fits_registers(call.activation);
  find_runs(call, band, runs);
  PlacesFinish plain = *task.finish;  // of results that are looked through for what registers cannot do
  plain.last_floor = -std::numeric_limits<float>::infinity();
  plain.bounds = false;
  const Run* const end = runs.data() + runs.size();
  for (int64_t group = first; group < last; ++group) {
    const int64_t row = matrix.rows[group], rows = std::min(kBlockRows, matrix.channels - row);
    const PlacesEnds ends = moved(task.ends, row / 4 * plane, row * plane);
    for (const Run* run = runs.data(); run != end;) {
      const RunKernel kernel = find_runs_kernel(run->count, no_least);
      if (in_registers) {
        const Run* other = std::find_if(run, end, [run](const Run& each) { return each.count != run->count; });
        kernel(RunTask{&matrix, task.finish, ends, group, task.x, run, other});
        run = other;
        continue;
      }
      const PlacesEnds scratch{nullptr, task.results - run->pixel, nullptr, nullptr, kLanes};
      kernel(RunTask{&matrix, &plain, scratch, group, task.x, run, run + 1});
      const Segment segment{0, run->pixel, run->count};
      with_activation(call.activation, [&](auto tag) {
        store_results<decltype(tag)::value>(task.results, kLanes, rows, &segment, 1, *task.finish, ends);
      });
      ++run;
    }
  }
}

// Where the results of an image go, and what is added to them.
inline PlacesEnds ends_of(int64_t channels, const Int8ConvCall& given, int64_t image) {
  const ConvCall& call = given.conv;
  const int64_t plane = call.out_rows * call.out_columns;
  const bool in_bytes = call.residual && given.residual_kind == kPlacesResidual;
  const PlacesEnds first{given.y_is_places ? reinterpret_cast<int32_t*>(call.y) : nullptr,
                         given.y_is_places ? given.real : call.y,
                         in_bytes ? reinterpret_cast<const int32_t*>(call.residual) : nullptr,
                         in_bytes ? nullptr : call.residual, plane};
  return moved(first, image * ceil_div(channels, 4) * plane, image * channels * plane);
}

// The blocks of rows [first, last) of one band; false when memory ran out.
inline bool multiply_int8_band(const PanelMatrix& matrix, const Int8ConvCall& given, const PlacesFinish& finish,
                               int32_t zero, int64_t index, int64_t first, int64_t last) {
  static thread_local Scratch image_scratch, results_scratch;
  const ConvCall& call = given.conv;
  const Band band = band_of(call, index);
  const int64_t tile = matrix.mv * kLanes;
  float* results = results_scratch.get(kBlocksTogether * kBlockRows * tile);
  float* image = call.direct ? nullptr : image_scratch.get(call.slots * call.in_channels * call.plane + tile);
  if (!results || (!call.direct && !image)) return false;
  for (int64_t slot = 0; image && slot < call.slots; ++slot) {
    pack_slot(call, band, slot, image + slot * call.in_channels * call.plane, zero);
  }
  const float* x = image ? image - band.first : call.x + band.image * call.x_strides[0];
  const Int8BandTask task{&matrix, &given, &finish, reinterpret_cast<const int32_t*>(x),
                          ends_of(matrix.channels, given, band.image), results};
  if (matrix.bn == kBlockRows) {
    multiply_int8_runs(task, band, first, last);
  } else {
    multiply_int8_vectors(task, band, first, last);
  }
  return true;
}

// How the results of a call leave registers.
inline PlacesFinish places_finish(const Int8ConvCall& call, const int32_t* starts) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const int32_t activation = call.conv.activation;
  const bool only_bytes = call.y_is_places && !call.real;
  const bool relu = activation == kRelu || activation == kReluLast;
  // A ReLU is the last to change a result unless a residual follows it.
  const bool in_bytes = only_bytes && relu && !(activation == kRelu && call.conv.residual);
  Bytes bytes = image_bytes(call.y_zero, call.y_is_unsigned != 0);
  if (in_bytes) bytes.least = std::min(std::max(bytes.shift, 0), 255);
  const bool floor = (activation == kRelu && !in_bytes) || activation == kRelu6;
  return {Int8Finish{call.multiplier, call.offset, starts, -kInfinity, false, false, bytes, nullptr},
          floor ? 0.0f : -kInfinity,
          activation == kRelu6 ? 6.0f : kInfinity,
          activation == kReluLast ? 0.0f : -kInfinity,
          call.y_inverse_scale,
          image_bytes(call.residual_zero, call.residual_is_unsigned != 0),
          call.residual_inverse,
          call.residual_scale,
          call.residual_kind,
          floor};
}

// Rounds the images of a call, unless they come in places.
inline void quantise_images(const Int8ConvCall& call) {
  if (call.x_is_places) return;
  const Bytes bytes = image_bytes(call.x_zero, call.x_is_unsigned != 0);
  const int64_t each = call.conv.in_channels, parts = ceil_div(call.conv.in_rows * call.conv.in_columns, kPixelsTogether);
  const int64_t all = call.conv.images * each * parts;
  parallel(call.conv.threads, [&](int64_t index, int64_t count) {
    for (int64_t i = all * index / count; i < all * (index + 1) / count; ++i) {
      const int64_t place = i / parts;
      quantise_place(call, place / each, place % each, i % parts * kPixelsTogether, bytes);
    }
  });
}

// What takes the zero point of the images off, for each row.
inline void find_starts(const Int8ConvCall& call, int64_t rows, int32_t* starts) {
  const int32_t moved = has_vnni() == (call.x_is_unsigned != 0) ? 0 : has_vnni() ? 128 : -128;
  for (int64_t i = 0; i < rows; ++i) starts[i] = -(call.x_zero + moved) * call.row_sums[i];
}

inline bool multiply_int8_conv(const PanelMatrix& matrix, const Int8ConvCall& call) {
  static thread_local Scratch scratch;
  int32_t* starts = reinterpret_cast<int32_t*>(scratch.get(matrix.channels));
  if (!starts) return false;
  const ConvCall& conv = call.conv;
  const int32_t zero = zero_place(image_bytes(call.x_zero, call.x_is_unsigned != 0));
  quantise_images(call);
  find_starts(call, matrix.channels, starts);
  const PlacesFinish finish = places_finish(call, starts);
  return share_tiles(matrix, conv.images * bands_of(conv), conv.threads,
                     [&](int64_t band, int64_t begin, int64_t end) {
                       return multiply_int8_band(matrix, call, finish, zero, band, begin, end);
                     });
}

}  // namespace sparta
