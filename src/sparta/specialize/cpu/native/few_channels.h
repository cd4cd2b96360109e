// Dense layers of few input channels, such as the first ones of networks of images: a product has so few columns there
// that copying a panel for each tile would take as long as multiplying it. Bands of rows are copied once, with the phases of
// a stride apart, and kernels read every tap where it is. A vector of pixels is part of one row of the output, so gaps
// between rows cost nothing; a tile has vectors of several rows where one row has too few.
#pragma once

#include "dense_conv.h"

namespace sparta {

// Rows of the output of one block of the packed weight, and vectors of a tile, so that registers hold all sums.
#if defined(SPARTA_AVX512)
constexpr int kFewRows = 8;
#else
constexpr int kFewRows = 4;
#endif
constexpr int kFewVectors = 3;

// Pixels of one row of the output.
struct PixelVector {
  int64_t token;  // in the band
  int64_t pixel;
  int64_t count;
};

// One block of rows of the weight, for the pixels of a band.
struct FewTask {
  const float* x;           // token 0 of the band, in the first slot
  const uint32_t* offsets;  // [columns]
  const float* values;      // [columns][kFewRows]
  int64_t columns;
  int64_t row;              // of the output
  int64_t rows;             // that are stored
  const RowsFinish* finish; // of row 0 and pixel 0, or null
  float* y;                 // pixel 0 of `row`
  int64_t plane;
};

// Whether a layer's plan is one for these kernels: all others have no gaps between rows.
inline bool reads_taps_in_place(const DenseConvCall& call) { return call.conv.row_width != call.conv.out_columns; }

template <int Rows, int Vectors>
void multiply_few(const FewTask& given, const PixelVector* pixels) {
  const FewTask task = given;
  const float* x[Vectors];
  for (int j = 0; j < Vectors; ++j) x[j] = task.x + pixels[j].token;
  for (int64_t r = 0; r < task.rows; ++r) {
    for (int j = 0; j < Vectors; ++j) __builtin_prefetch(task.y + r * task.plane + pixels[j].pixel, 1);
  }
  Vec sums[Rows][Vectors] = {};
  for (int64_t i = 0; i < task.columns; ++i) {
    const uint32_t offset = task.offsets[i];
    Vec inputs[Vectors];
    each<Vectors>([&](auto j) SPARTA_LAMBDA { inputs[j] = load(at_offset(x[j], offset)); });
    each<Rows>([&](auto r) SPARTA_LAMBDA {
      const Vec weight = splat(task.values[i * kFewRows + r]);
      each<Vectors>([&](auto j) SPARTA_LAMBDA { sums[r][j] += weight * inputs[j]; });
    });
  }
  each<Rows>([&](auto r) SPARTA_LAMBDA {
    if (r >= task.rows) return;
    each<Vectors>([&](auto j) SPARTA_LAMBDA {
      const PixelVector& vector = pixels[j];
      Vec out = sums[r][j];
      if (task.finish) {
        const RowEnd<Vec> end(*task.finish, task.row + r);
        const float* residual = task.finish->residual;
        out = end.before(out);
        if (residual) out += load_some(residual + (task.row + r) * task.plane + vector.pixel, vector.count);
        out = end.after(out);
      }
      store_some(task.y + r * task.plane + vector.pixel, out, vector.count);
    });
  });
}

// All vectors of a band; few rows of the weight leave registers for more vectors.
inline void multiply_few_rows(const FewTask& task, const std::vector<PixelVector>& pixels) {
  const PixelVector* at = pixels.data();
  int64_t left = static_cast<int64_t>(pixels.size());
  if (task.rows <= kFewRows / 2 && kFewRows == 8) {
    for (; left >= 2 * kFewVectors; left -= 2 * kFewVectors, at += 2 * kFewVectors) {
      multiply_few<kFewRows / 2, 2 * kFewVectors>(task, at);
    }
  }
  for (; left >= kFewVectors; left -= kFewVectors, at += kFewVectors) multiply_few<kFewRows, kFewVectors>(task, at);
  if (left == 2) multiply_few<kFewRows, 2>(task, at);
  if (left == 1) multiply_few<kFewRows, 1>(task, at);
}

// Neighbouring values, or every second one, or any others; what is behind the last one is not read.
SPARTA_INLINE void copy_values(const float* from, int64_t step, int64_t count, float* to) {
  const int64_t whole = count / kLanes * kLanes, rest = count - whole;
  if (step == 1) {
    for (int64_t j = 0; j < whole; j += kLanes) store(to + j, load(from + j));
    if (rest) store_some(to + whole, load_some(from + whole, rest), rest);
  } else if (kPacksByTwo && step == 2) {
    const LaneMask all = lane_mask(0, kLanes);
    for (int64_t j = 0; j < whole; j += kLanes) store(to + j, load_lanes_by_two(from + 2 * j, all));
    if (rest) store_some(to + whole, load_lanes_by_two(from + 2 * whole, lane_mask(0, rest)), rest);
  } else {
    for (int64_t j = 0; j < count; ++j) to[j] = from[j * step];
  }
}

// Copies the rows that a band's taps read to one slot. Channels are few, so nothing is prepared for all of them.
inline void copy_few(const ConvCall& call, int64_t image, int64_t begin, int64_t rows, int64_t slot, float* planes) {
  for (int64_t row = 0; row < rows; ++row) {
    const RowRange inside = range_inside(call, slot, begin + row);
    const int64_t from_row = (begin + row) * call.stride_rows + call.slot_rows[slot];
    const int64_t from_column = call.slot_columns[slot] + inside.begin * call.stride_columns;
    const int64_t from = from_row * call.x_strides[2] + from_column * call.x_strides[3];
    for (int64_t channel = 0; channel < call.in_channels; ++channel) {
      float* to = planes + channel * call.plane + row * call.row_width;
      for (int64_t j = 0; j < inside.begin; ++j) to[j] = 0.0f;
      if (inside.begin < inside.end) {
        copy_values(call.x + image * call.x_strides[0] + channel * call.x_strides[1] + from,
                    call.stride_columns * call.x_strides[3], inside.end - inside.begin, to + inside.begin);
      }
      for (int64_t j = inside.end; j < call.row_width; ++j) to[j] = 0.0f;
    }
  }
}

// Rows [begin, end) of one image and group; false when memory ran out.
inline bool multiply_few_band(const DenseConvCall& given, int64_t image, int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  static thread_local std::vector<PixelVector> pixels;
  const ConvCall& call = given.conv;
  const int64_t plane = call.out_rows * call.out_columns, group = image % given.groups;
  const int64_t copied = end - begin + ceil_div(call.reach, call.row_width);
  float* copy = scratch.get(call.slots * call.in_channels * call.plane + kMostTokens);
  if (!copy) return false;
  for (int64_t slot = 0; slot < call.slots; ++slot) {
    copy_few(call, image, begin, copied, slot, copy + slot * call.in_channels * call.plane);
  }
  pixels.clear();
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < call.out_columns; column += kLanes) {
      pixels.push_back({(row - begin) * call.row_width + column, row * call.out_columns + column,
                        std::min<int64_t>(call.out_columns - column, kLanes)});
    }
  }
  const bool in_registers = fits_registers(call.activation);
  const float* bias = call.bias ? call.bias + group * given.outputs : nullptr;
  const float* residual = call.residual ? call.residual + image * given.outputs * plane : nullptr;
  const RowsFinish finish = rows_finish(bias, residual, call.activation);
  float* y = call.y + image * given.outputs * plane;
  const int64_t blocks = ceil_div(given.outputs, kFewRows);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = block * kFewRows, rows = std::min<int64_t>(kFewRows, given.outputs - row);
    const float* values = given.values + (group * blocks + block) * given.columns * kFewRows;
    multiply_few_rows(FewTask{copy, given.offsets, values, given.columns, row, rows, in_registers ? &finish : nullptr,
                              y + row * plane, plane},
                      pixels);
    if (in_registers) continue;
    const int64_t first = begin * call.out_columns, count = (end - begin) * call.out_columns;
    with_activation(call.activation, [&](auto tag) {
      finish_dense<decltype(tag)::value>(y + first, plane, row, row + rows, count, bias,
                                         residual ? residual + first : nullptr);
    });
  }
  return true;
}

inline bool multiply_few_channels(const DenseConvCall& call) {
  const int64_t rows = call.conv.images * call.conv.out_rows, most = call.conv.band_tokens / call.conv.row_width;
  bool enough_memory = true;
  parallel(call.conv.threads, [&](int64_t index, int64_t count) {
    const int64_t end = rows * (index + 1) / count;
    for (int64_t at = rows * index / count; at < end;) {
      const int64_t image = at / call.conv.out_rows, begin = at % call.conv.out_rows;
      const int64_t stop = std::min({begin + most, call.conv.out_rows, begin + end - at});
      if (!multiply_few_band(call, image, begin, stop)) {
#pragma omp atomic write
        enough_memory = false;
        return;
      }
      at += stop - begin;
    }
  });
  return enough_memory;
}

}  // namespace sparta
