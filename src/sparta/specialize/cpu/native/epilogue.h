// What happens to a sum before it is stored: y = activation(sum + bias) + residual, or relu(sum + bias + residual), on
// data that is still in the cache. The activation is a template parameter, chosen once a block of
// rows, so inner loops have no branches for it; where it stands is part of it: kReluLast comes after the residual.
#pragma once

#include "simd.h"

namespace sparta {

enum Activation : int32_t { kNone = 0, kRelu = 1, kGelu = 2, kSilu = 3, kRelu6 = 4, kReluLast = 5 };

struct Epilogue {
  const float* bias;      // one a channel, or null
  const float* residual;  // laid out as the output, or null
  int64_t residual_stride;
  int32_t activation;
};

// x * Phi(x), with Phi(x) = 0.5 + x * polynomial(x * x) up to 5.5, and 0 or 1 beyond: within 1e-6 of the true value.
// There is no division and no exp(), whose denormal results are slow.
SPARTA_INLINE Vec gelu(Vec x) {
  const Vec end = splat(5.5f);
  const Vec near = x > end ? end : (x < -end ? -end : x);
  const Vec u = near * near * splat(0.0661157025f) - splat(1.0f);  // from [0, 5.5 * 5.5] to [-1, 1]
  constexpr float kCoefficients[] = {0.000538164866f, -0.00136890204f, 0.00102358905f, -0.00122919399f,
                                     0.00423666742f,  -0.00767489476f, 0.0104684643f,  -0.0146712502f,
                                     0.0202880241f,   -0.0261124969f,  0.0320817344f,  -0.0387872644f,
                                     0.0477369912f,   -0.0641724765f,  0.12855193f};
  Vec series = splat(kCoefficients[0]);
#pragma GCC unroll 14
  for (int i = 1; i < 15; ++i) series = series * u + splat(kCoefficients[i]);
  const Vec phi = near * series + splat(0.5f);
  return x * (x < -end ? Vec{} : phi);
}

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
