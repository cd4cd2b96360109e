// What stands between products: layer norms, sums and activations of whole tensors, copies between layouts, and the
// rows of an embedding. Rows are shared evenly among threads; small work stays on one.
#pragma once

#include <cmath>

#include "epilogue.h"
#include "threads.h"

namespace sparta {

constexpr int64_t kElementsPerThread = 1 << 14;  // fewer are not worth waking another thread for

// Calls f(begin, end) on each thread with its share of `rows` rows of `width` elements.
template <class F>
inline void share_rows(int64_t rows, int64_t width, int32_t threads, F f) {
  const int64_t most = std::max<int64_t>(1, rows * width / kElementsPerThread);
  parallel(static_cast<int32_t>(std::min<int64_t>(threads, most)),
           [&](int64_t index, int64_t count) { f(rows * index / count, rows * (index + 1) / count); });
}

// (x - mean) / sqrt(variance + epsilon) * weight + bias, over rows of `width` neighbours.
struct NormCall {
  const float* x;
  float* y;
  const float* weight;  // [width], or null
  const float* bias;    // [width], or null
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  float epsilon;
  int32_t threads;
};

// The sum of f(i) over whole vectors i of `width` elements: four sums at once, so that none waits for itself.
template <class F>
SPARTA_INLINE float sum_over(int64_t width, F f) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] += f(i + j * kLanes);
  }
  for (; i + kLanes <= width; i += kLanes) sums[0] += f(i);
  return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

inline void norm_row(const NormCall& call, const float* x, float* y) {
  const int64_t width = call.width, whole = width / kLanes * kLanes;
  float total = sum_over(width, [&](int64_t i) SPARTA_LAMBDA { return load(x + i); });
  for (int64_t i = whole; i < width; ++i) total += x[i];
  const float mean = total / static_cast<float>(width);
  const Vec middle = splat(mean);
  float squares = sum_over(width, [&](int64_t i) SPARTA_LAMBDA {
    const Vec apart = load(x + i) - middle;
    return apart * apart;
  });
  for (int64_t i = whole; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const Vec factor = splat(1.0f / std::sqrt(squares / static_cast<float>(width) + call.epsilon));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    Vec out = (load_some(x + i, count) - middle) * factor;
    if (call.weight) out = out * load_some(call.weight + i, count);
    if (call.bias) out += load_some(call.bias + i, count);
    store_some(y + i, out, count);
  }
}

inline void norm_rows(const NormCall& call) {
  share_rows(call.rows, call.width, call.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) norm_row(call, call.x + row * call.x_stride, call.y + row * call.y_stride);
  });
}

enum MapKind : int32_t { kAdd = 0, kMultiply = 1 };

// y = activation(x (+ or *) other): tensors of `rows` rows of `width` neighbours. The stride of `other` is 0 where all
// rows share one; without it there is the activation alone. With `scalar`, `other` is one number.
struct MapCall {
  const float* x;
  const float* other;
  float* y;
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t other_stride;
  int64_t y_stride;
  float number;  // what `other` is multiplied by in a sum; the number itself where there is no other
  int32_t kind;
  int32_t has_other;
  int32_t activation;
  int32_t threads;
  int32_t unused;
};

template <Activation Act>
inline void map_row(const MapCall& call, const float* x, const float* other, float* y) {
  const Vec number = splat(call.number);
  for (int64_t i = 0; i < call.width; i += kLanes) {
    const int64_t count = call.width - i;
    Vec out = load_some(x + i, count);
    const Vec right = other ? load_some(other + i, count) : splat(1.0f);
    out = call.kind == kAdd ? (other ? out + right * number : out + number) : out * (other ? right : number);
    store_some(y + i, activate<Act>(out), count);
  }
}

inline void map_rows(const MapCall& call) {
  share_rows(call.rows, call.width, call.threads, [&](int64_t begin, int64_t end) {
    with_activation(call.activation, [&](auto tag) {
      for (int64_t row = begin; row < end; ++row) {
        map_row<decltype(tag)::value>(call, call.x + row * call.x_stride,
                                      call.has_other ? call.other + row * call.other_stride : nullptr,
                                      call.y + row * call.y_stride);
      }
    });
  });
}

// A copy of a tensor with any strides to contiguous memory; the last of six dims is the innermost. Sizes of unused dims
// are 1. Elements have 1, 4 or 8 bytes.
struct CopyCall {
  const char* x;
  char* y;
  int64_t sizes[6];
  int64_t strides[6];  // in bytes
  int64_t bytes;       // of an element
  int32_t threads;
  int32_t unused;
};

inline void copy_strided(const CopyCall& call) {
  const int64_t* sizes = call.sizes;
  const int64_t width = sizes[5], line = width * call.bytes;
  int64_t rows = 1;
  for (int i = 0; i < 5; ++i) rows *= sizes[i];
  share_rows(rows, width, call.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const char* from = call.x;
      int64_t rest = row;
      for (int i = 4; i >= 0; --i) {
        from += rest % sizes[i] * call.strides[i];
        rest /= sizes[i];
      }
      char* to = call.y + row * line;
      if (call.strides[5] == call.bytes) {
        std::memcpy(to, from, static_cast<size_t>(line));
      } else {
        for (int64_t i = 0; i < width; ++i) {
          std::memcpy(to + i * call.bytes, from + i * call.strides[5], static_cast<size_t>(call.bytes));
        }
      }
    }
  });
}

// Rows of a table by their numbers.
struct GatherCall {
  const int64_t* ids;
  float* y;
  const float* table;  // [count][width]
  int64_t rows;
  int64_t width;
  int64_t count;
  int32_t threads;
  int32_t unused;
};

// False for a number that the table does not have.
inline bool gather_rows(const GatherCall& call) {
  for (int64_t row = 0; row < call.rows; ++row) {
    if (call.ids[row] < 0 || call.ids[row] >= call.count) return false;
  }
  share_rows(call.rows, call.width, call.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(call.table + call.ids[row] * call.width, call.width, call.y + row * call.width);
    }
  });
  return true;
}

}  // namespace sparta
