// What generated kernels share: they bring functions for groups of rows, with all indices in the instructions; here
// tokens are packed, the functions are called, and results go through the epilogue. A generated
// function reads one vector of tokens for each input channel and writes one for each of its rows.
#pragma once

#include "spmm.h"

namespace sparta {

struct GeneratedGroup {
  void (*multiply)(const float* x, const float* values, float* y);
  int64_t row;    // the first of its rows
  int64_t value;  // the first of its values
};

// False when memory ran out.
inline bool multiply_generated(const GeneratedGroup* groups, int64_t count, int64_t channels, int64_t inputs,
                               const float* values, const PanelCall& call) {
  const int64_t tiles = ceil_div(call.tokens, kLanes);
  bool enough_memory = true;
  parallel(call.threads, [&](int64_t index, int64_t threads) {
    static thread_local Scratch input_scratch, sums_scratch;
    const int64_t first = count * index / threads, last = count * (index + 1) / threads;
    if (first == last) return;
    const int64_t row = groups[first].row, rows = (last < count ? groups[last].row : channels) - row;
    float* x = input_scratch.get(std::max<int64_t>(inputs, 1) * kLanes);
    float* sums = sums_scratch.get(rows * kLanes);
    if (!x || !sums) {
#pragma omp atomic write
      enough_memory = false;
      return;
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = tile * kLanes, tokens = std::min<int64_t>(call.tokens - token, kLanes);
      pack_tile(call.x + token * call.x_stride, call.x_stride, tokens, 0, inputs, kLanes, x);
      for (const GeneratedGroup* group = groups + first; group != groups + last; ++group) {
        group->multiply(x, values + group->value, sums + (group->row - row) * kLanes);
      }
      Epilogue epilogue{call.bias, call.residual, call.residual_stride, call.activation};
      if (call.residual) epilogue.residual += token * call.residual_stride;
      with_activation(call.activation, [&](auto tag) {
        unpack_rows<decltype(tag)::value>(sums, kLanes, row, rows, tokens, epilogue, call.y + token * call.y_stride,
                                          call.y_stride);
      });
    }
  });
  return enough_memory;
}

}  // namespace sparta
