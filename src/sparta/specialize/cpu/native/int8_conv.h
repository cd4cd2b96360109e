// Convolutions of 8-bit integers: an image is rounded to places of four channels, 32 bits a pixel, and those are packed
// as conv.h packs floats; the kernels are those of int8.h. What pads an image is the integer that stands for 0, not the
// bits 0.
#pragma once

#include "conv.h"
#include "int8_places.h"

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

// One place of one image. Channels that do not exist have no weights; they become 0.
inline void quantise_place(const Int8ConvCall& call, int64_t image, int64_t place, const Bytes& bytes) {
  const int64_t pixels = call.conv.in_rows * call.conv.in_columns, channel = 4 * place;
  const float* from = call.image + (image * call.channels + channel) * pixels;
  int32_t* to = reinterpret_cast<int32_t*>(const_cast<float*>(call.conv.x)) +
                (image * call.conv.in_channels + place) * pixels;
  const Vec scale = splat(call.x_inverse_scale);
  const int64_t present = std::min<int64_t>(4, call.channels - channel);
  for (int64_t pixel = 0; pixel < pixels; pixel += kLanes) {
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
        put_four<false>(four, finish, ends, row / 4 * ends.plane + pixel, row * ends.plane + pixel, rows - row, pixels);
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

inline PlacesEnds moved(const PlacesEnds& ends, int64_t places, int64_t rows) {
  return {ends.places ? ends.places + places : nullptr, ends.real ? ends.real + rows : nullptr,
          ends.residual_places ? ends.residual_places + places : nullptr,
          ends.residual ? ends.residual + rows : nullptr, ends.plane};
}

// Tokens [begin, begin + count) in the blocks of rows [first, last). All are pixels and fill their vectors if `whole`.
inline void multiply_int8_tokens(const Int8BandTask& task, int64_t begin, int64_t count, int64_t vectors, bool whole,
                                 int64_t first, int64_t last) {
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = task.call->conv;
  const bool no_least = task.call->no_least_weight != 0;
  const bool in_registers = whole && matrix.bn == 4 && fits_registers(call.activation);
  const int64_t tile = matrix.mv * kLanes, plane = task.ends.plane, groups_each = kBlockRows / matrix.bn;
  Segment segments[kMostTokens];
  const int64_t runs = in_registers ? 0 : find_segments(call, begin, count, segments);
  for (int64_t block = first; block < last; block += kBlocksTogether) {
    const int64_t blocks = std::min(kBlocksTogether, last - block), row = block * kBlockRows;
    const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
    const int64_t groups = block * groups_each, end = std::min((block + blocks) * groups_each, matrix.groups);
    const PlacesEnds ends = moved(task.ends, row / 4 * plane, row * plane);
    if (in_registers) {
      find_places_kernel(vectors, no_least)(
          PlacesTask{&matrix, task.finish, moved(ends, begin, begin), groups, end, task.x + begin, row});
      continue;
    }
    find_int8_kernel(matrix.bn, vectors, no_least)(
        Int8Task{&matrix, &task.finish->scales, groups, end, task.x + begin,
                 reinterpret_cast<int32_t*>(task.results), row, tile});
    with_activation(call.activation, [&](auto tag) {
      store_results<decltype(tag)::value>(task.results, tile, rows, segments, runs, *task.finish, ends);
    });
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
  const int64_t band_end = band.first + band.tokens, tile = matrix.mv * kLanes;
  float* results = results_scratch.get(kBlocksTogether * kBlockRows * tile);
  float* image = call.direct ? nullptr : image_scratch.get(call.slots * call.in_channels * call.plane + tile);
  if (!results || (!call.direct && !image)) return false;
  for (int64_t slot = 0; image && slot < call.slots; ++slot) {
    pack_slot(call, band, slot, image + slot * call.in_channels * call.plane, zero);
  }
  const float* x = image ? image - band.first : call.x + band.image * call.x_strides[0];
  const Int8BandTask task{&matrix, &given, &finish, reinterpret_cast<const int32_t*>(x),
                          ends_of(matrix.channels, given, band.image), results};
  for (int64_t start = band.first; start < band_end;) {
    const int64_t left = band_end - start;
    int64_t vectors = std::min<int64_t>(matrix.mv, ceil_div(left, kLanes));
    if (call.direct && vectors * kLanes > band.tokens) vectors = std::max<int64_t>(left / kLanes, 1);
    // The last vectors may begin earlier, over tokens that are computed already, to be whole; the input itself has no
    // room behind it.
    const bool whole = call.row_width == call.out_columns && vectors * kLanes <= band.tokens;
    const int64_t begin = whole || call.direct ? std::min(start, band_end - vectors * kLanes) : start;
    multiply_int8_tokens(task, begin, std::min(band_end - begin, vectors * kLanes), vectors, whole, first, last);
    start += vectors * kLanes;
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
  const int64_t places = call.conv.images * call.conv.in_channels;
  parallel(call.conv.threads, [&](int64_t index, int64_t count) {
    for (int64_t i = places * index / count; i < places * (index + 1) / count; ++i) {
      quantise_place(call, i / call.conv.in_channels, i % call.conv.in_channels, bytes);
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
