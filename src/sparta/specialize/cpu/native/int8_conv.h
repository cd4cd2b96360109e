// Convolutions of 8-bit integers: an image is rounded to places of four channels, 32 bits a pixel, and those are packed
// as conv.h packs floats; the kernels are those of int8.h. What pads an image must be the integer that stands for 0, not
// the bits 0: places are kept exclusive-or that integer until they are packed, so that the zeros of the padding become it.
#pragma once

#include "conv.h"
#include "int8.h"

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
  int32_t y_is_direct;  // whether the next one reads the image itself, and not a padded copy
};

inline int32_t four_times(int32_t byte) { return static_cast<int32_t>(static_cast<uint32_t>(byte & 255) * 0x01010101u); }

// The bytes of real 0 as the kernels read them.
inline int32_t zero_place(const Bytes& bytes) { return four_times(bytes.shift) ^ bytes.flip; }

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

// Bytes as a convolution keeps an image: those of a padded copy are exclusive-or real 0, so that 0 is padding.
inline Bytes image_bytes(int32_t zero, bool is_unsigned, bool is_direct) {
  const Bytes bytes = bytes_around(zero, is_unsigned, has_vnni());
  return {bytes.shift, bytes.least, is_direct ? bytes.flip : bytes.flip ^ zero_place(bytes)};
}

// Stores results as places: four rows at a time, through the activation and rounded. `y` is at the first row's place and
// the first pixel of the image.
template <Activation Act>
inline void store_places(const float* results, int64_t tile, int64_t rows, int64_t plane, const Segment* segments,
                         int64_t count, float factor, const Bytes& bytes, int32_t* y) {
  const Vec scale = splat(factor);
  for (int64_t row = 0; row < rows; row += 4) {
    for (const Segment* segment = segments; segment != segments + count; ++segment) {
      for (int64_t j = 0; j < segment->count; j += kLanes) {
        const int64_t pixels = segment->count - j;
        Vec four[4] = {};
        for (int64_t r = 0; r < std::min<int64_t>(4, rows - row); ++r) {
          const float* from = results + (row + r) * tile + segment->token + j;
          four[r] = scale * activate_last<Act>(activate<Act>(load_some(from, pixels)));
        }
        float* to = reinterpret_cast<float*>(y + row / 4 * plane + segment->pixel + j);
        store_some(to, (Vec)join_rows<false>(four, bytes), pixels);
      }
    }
  }
}

// Turns the padded copy of an image from places that are exclusive-or real 0 into plain ones.
inline void finish_copy(const ConvCall& call, int32_t zero, float* copy) {
  if (!zero) return;
  int32_t* places = reinterpret_cast<int32_t*>(copy);
  for (int64_t i = 0; i < call.slots * call.in_channels; ++i) {
    if (!call.used[i]) continue;
    int32_t* plane = places + i * call.plane;
    for (int64_t j = 0; j < call.plane; j += kLanes) store_ints(plane + j, load_ints(plane + j) ^ zero);
  }
}

// What is the same for all tiles of a band.
struct Int8BandTask {
  const PanelMatrix* matrix;
  const Int8ConvCall* call;
  const Int8Finish* finish;
  const int32_t* x;       // token 0 of the image, in the first slot
  float* y;               // the image's first pixel in channel 0
  const float* residual;  // the same, or null
  float* results;
};

// Tokens [begin, begin + count) in the blocks of rows [first, last).
inline void multiply_int8_tokens(const Int8BandTask& task, int64_t begin, int64_t count, int64_t vectors,
                                 int64_t first, int64_t last) {
  const PanelMatrix& matrix = *task.matrix;
  const ConvCall& call = task.call->conv;
  const Int8Kernel kernel = find_int8_kernel(matrix.bn, vectors, task.call->no_least_weight != 0);
  const int64_t tile = matrix.mv * kLanes, plane = call.out_rows * call.out_columns;
  const int64_t groups_each = kBlockRows / matrix.bn;
  Segment segments[kMostTokens];
  const int64_t runs = find_segments(call, begin, count, segments);
  for (int64_t block = first; block < last; block += kBlocksTogether) {
    const int64_t blocks = std::min(kBlocksTogether, last - block), row = block * kBlockRows;
    const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
    kernel(Int8Task{&matrix, task.finish, block * groups_each,
                    std::min((block + blocks) * groups_each, matrix.groups), task.x + begin,
                    reinterpret_cast<int32_t*>(task.results), row, tile});
    const float* residual = task.residual ? task.residual + row * plane : nullptr;
    with_activation(call.activation, [&](auto tag) {
      if (task.call->y_is_places) {
        return store_places<decltype(tag)::value>(task.results, tile, rows, plane, segments, runs,
                                                  task.call->y_inverse_scale, task.finish->bytes,
                                                  reinterpret_cast<int32_t*>(task.y) + row / 4 * plane);
      }
      store_pixels<decltype(tag)::value>(task.results, tile, rows, plane, segments, runs, nullptr, residual,
                                         task.y + row * plane);
    });
  }
}

// The blocks of rows [first, last) of one band; false when memory ran out.
inline bool multiply_int8_band(const PanelMatrix& matrix, const Int8ConvCall& given, const Int8Finish& finish,
                               int32_t zero, int64_t index, int64_t first, int64_t last) {
  static thread_local Scratch image_scratch, results_scratch;
  const ConvCall& call = given.conv;
  const int64_t bands = bands_of(call), part = index % bands, tokens = tokens_of(call);
  const int64_t band_end = part + 1 == bands ? tokens : (part + 1) * call.band_tokens;
  const Band band{index / bands, part * call.band_tokens, band_end - part * call.band_tokens};
  const int64_t tile = matrix.mv * kLanes;
  float* results = results_scratch.get(kBlocksTogether * kBlockRows * tile);
  float* image = call.direct ? nullptr : image_scratch.get(call.slots * call.in_channels * call.plane + tile);
  if (!results || (!call.direct && !image)) return false;
  for (int64_t slot = 0; image && slot < call.slots; ++slot) {
    pack_slot(call, band, slot, image + slot * call.in_channels * call.plane);
  }
  if (image) finish_copy(call, zero, image);
  const int64_t planes = given.y_is_places ? ceil_div(matrix.channels, 4) : matrix.channels;
  const int64_t pixel = band.image * planes * call.out_rows * call.out_columns;
  const float* x = image ? image - band.first : call.x + band.image * call.x_strides[0];
  const Int8BandTask task{&matrix, &given, &finish, reinterpret_cast<const int32_t*>(x), call.y + pixel,
                          call.residual ? call.residual + pixel : nullptr, results};
  for (int64_t start = band.first; start < band_end;) {
    const int64_t left = band_end - start;
    int64_t vectors = std::min<int64_t>(matrix.mv, ceil_div(left, kLanes));
    if (call.direct && vectors * kLanes > band.tokens) vectors = std::max<int64_t>(left / kLanes, 1);
    // The input itself has no room behind it: the last vectors begin earlier, over tokens that are computed already.
    const int64_t begin = call.direct ? std::min(start, band_end - vectors * kLanes) : start;
    multiply_int8_tokens(task, begin, std::min(band_end - begin, vectors * kLanes), vectors, first, last);
    start += vectors * kLanes;
  }
  return true;
}

inline bool multiply_int8_conv(const PanelMatrix& matrix, const Int8ConvCall& call) {
  static thread_local Scratch scratch;
  int32_t* starts = reinterpret_cast<int32_t*>(scratch.get(matrix.channels));
  if (!starts) return false;
  const ConvCall& conv = call.conv;
  const Bytes bytes = bytes_around(call.x_zero, call.x_is_unsigned != 0, has_vnni());
  const int32_t zero = zero_place(bytes);
  const Bytes stored = image_bytes(call.x_zero, call.x_is_unsigned != 0, conv.direct != 0);
  parallel(call.x_is_places ? 1 : conv.threads, [&](int64_t index, int64_t count) {
    if (call.x_is_places) return;
    const int64_t places = conv.images * conv.in_channels;
    for (int64_t i = places * index / count; i < places * (index + 1) / count; ++i) {
      quantise_place(call, i / conv.in_channels, i % conv.in_channels, stored);
    }
  });
  const int32_t moved = has_vnni() == (call.x_is_unsigned != 0) ? 0 : has_vnni() ? 128 : -128;
  for (int64_t i = 0; i < matrix.channels; ++i) starts[i] = -(call.x_zero + moved) * call.row_sums[i];
  const Int8Finish finish{call.multiplier, call.offset, starts, -std::numeric_limits<float>::infinity(),
                          false, false,
                          image_bytes(call.y_zero, call.y_is_unsigned != 0, call.y_is_direct != 0), nullptr};
  return share_tiles(matrix, conv.images * bands_of(conv), conv.threads,
                     [&](int64_t band, int64_t begin, int64_t end) {
                       return multiply_int8_band(matrix, call, finish, zero, band, begin, end);
                     });
}

}  // namespace sparta
