// What happens to a sum before it is stored: y = activation(sum + bias) + residual, or relu(sum + bias + residual), on
// data that is still in the cache. The activation is a template parameter, chosen once a block of
// rows, so inner loops have no branches for it; where it stands is part of it: kReluLast comes after the residual.
#pragma once

#include "gelu.h"

namespace sparta {

enum Activation : int32_t { kNone = 0, kRelu = 1, kGelu = 2, kSilu = 3, kRelu6 = 4, kReluLast = 5 };

struct Epilogue {
  const float* bias;      // one a channel, or null
  const float* residual;  // laid out as the output, or null
  int64_t residual_stride;
  int32_t activation;
};

SPARTA_INLINE Vec relu(Vec x) { return x < Vec{} ? Vec{} : x; }  // NaN is not below 0 and stays

// Before the residual is added.
template <Activation Act>
SPARTA_INLINE Vec activate(Vec x) {
  if constexpr (Act == kRelu) return relu(x);
  if constexpr (Act == kGelu) return gelu(x);
  if constexpr (Act == kSilu) return x / (splat(1.0f) + exp(-x));
  if constexpr (Act == kRelu6) {
    const Vec above = relu(x);
    return above > splat(6.0f) ? splat(6.0f) : above;
  }
  return x;
}

// After it.
template <Activation Act>
SPARTA_INLINE Vec activate_last(Vec x) {
  if constexpr (Act == kReluLast) return relu(x);
  return x;
}

// Calls f with the activation as a type.
template <Activation Act>
struct ActivationTag {
  static constexpr Activation value = Act;
};

template <class F>
inline void with_activation(int32_t activation, F f) {
  switch (activation) {
    case kRelu: return f(ActivationTag<kRelu>());
    case kGelu: return f(ActivationTag<kGelu>());
    case kSilu: return f(ActivationTag<kSilu>());
    case kRelu6: return f(ActivationTag<kRelu6>());
    case kReluLast: return f(ActivationTag<kReluLast>());
    default: return f(ActivationTag<kNone>());
  }
}

// Finishes `count` neighbouring channels of one token.
template <Activation Act>
SPARTA_INLINE void finish_channels(Vec sum, const Epilogue& epilogue, int64_t channel, const float* residual,
                                   float* out, int64_t count) {
  if (epilogue.bias) sum += load_some(epilogue.bias + channel, count);
  sum = activate<Act>(sum);
  if (residual) sum += load_some(residual, count);
  store_some(out, activate_last<Act>(sum), count);
}

// Activations of one call: token-major, rows `x_stride` and `y_stride` apart.
struct StreamCall {
  const float* x;
  float* y;
  int64_t tokens;
  int64_t x_stride;
  int64_t y_stride;
  const float* bias;
  const float* residual;
  int64_t residual_stride;
  int32_t activation;
  int32_t threads;
};

}  // namespace sparta
