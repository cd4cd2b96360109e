// A whole step of a decoder in one call: norms, rotary embeddings, grouped attention over a cache, gated MLPs and the
// head, for one token of a sequence or many. Threads start once per step and meet at barriers; every product is shared
// by the cost of its rows. What each thread needs of its own (normed tokens, panels, scores) it keeps between steps.
#pragma once

#include <cmath>
#include <limits>

#include "decode_product.h"

namespace sparta {

struct DecodeLayer {
  const float* input_norm;   // [hidden]
  const float* middle_norm;  // [hidden], before the MLP
  const float* query_norm;   // [head_dim], or null
  const float* key_norm;     // [head_dim], or null
  DecodeMatrix query, key, value, output, gate, up, down;
};

struct DecodeProgram {
  int64_t hidden;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t wide;  // channels of the MLP
  int64_t layers;
  const DecodeLayer* each;
  const float* final_norm;
  DecodeMatrix head;
  float epsilon;
  float scaling;
  int32_t activation;  // of the MLP's gate
  int32_t unused;
};

// One step: `tokens` of each of `batch` sequences, after `past` tokens that the cache holds. Keys and values of a layer
// are [batch][kv_heads][token][head_dim]; key s is seen by token t if s <= past + t and the mask does not hide it.
struct DecodeCall {
  float* x;          // [batch][tokens][hidden]: embeddings; what is left there is undefined
  const float* cos;  // [batch][tokens][head_dim]
  const float* sin;
  float* const* keys;  // [layers]
  float* const* values;
  const uint8_t* mask;  // 1 where a key is seen, or null
  float* logits;        // [batch][kept][vocabulary]
  float* buffer;        // decode_buffer() floats
  int64_t batch;
  int64_t tokens;
  int64_t past;
  int64_t kept;  // how many of the last tokens of each sequence get logits
  int64_t cache_batch_stride;
  int64_t cache_head_stride;
  int64_t mask_batch_stride;
  int64_t mask_token_stride;
  int32_t threads;
  int32_t unused;
};

// Floats that the threads of a step share: queries, keys, values, attention, and the MLP's two halves.
inline int64_t decode_buffer(const DecodeProgram& program, int64_t rows) {
  const int64_t attention = program.head_dim * (2 * program.heads + 2 * program.kv_heads);
  return rows * (attention + 2 * program.wide);
}

inline void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  Vec squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load_some(x + i, size - i);
    squares += v * v;
  }
  const float factor = 1.0f / std::sqrt(sum_by_halves(squares) / static_cast<float>(size) + epsilon);
  for (int64_t i = 0; i < size; i += kLanes) {
    store_some(out + i, load_some(weight + i, size - i) * (load_some(x + i, size - i) * splat(factor)), size - i);
  }
}

// Turns the two halves of a head by the angles of a position: each x[i] with x[i + half].
inline void rotate(float* x, const float* cos, const float* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float low = x[i], high = x[i + half];
    x[i] = low * cos[i] - high * sin[i];
    x[i + half] = high * cos[i + half] + low * sin[i + half];
  }
}

// Attention of one head of one token: `scores` has room for `seen` values and a vector more.
inline void attend(const float* query, const float* keys, const float* values, int64_t seen, int64_t head_dim,
                   float scaling, const uint8_t* mask, float* scores, float* out) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  float most = kHidden;
  for (int64_t s = 0; s < seen; ++s) {
    scores[s] = mask && !mask[s] ? kHidden : dense_dot(query, keys + s * head_dim, head_dim) * scaling;
    most = std::max(most, scores[s]);
  }
  std::fill(out, out + head_dim, 0.0f);
  if (most == kHidden) return;  // a padding token sees nothing, and nothing sees it
  Vec sums = {};
  for (int64_t s = 0; s < seen; s += kLanes) {
    Vec power = exp(load_some(scores + s, seen - s) - splat(most));
    if (seen - s < kLanes) {
      for (int64_t lane = seen - s; lane < kLanes; ++lane) power[lane] = 0.0f;
    }
    sums += power;
    store(scores + s, power);
  }
  const float share = 1.0f / sum_by_halves(sums);
  constexpr int64_t kWide = 8 * kLanes;
  for (int64_t first = 0; first < head_dim; first += kWide) {
    const int64_t width = std::min(kWide, head_dim - first);
    if (width == kWide || width % kLanes == 0) {
      Vec parts[8] = {};
      const int64_t vectors = width / kLanes;
      for (int64_t s = 0; s < seen; ++s) {
        const float* value = values + s * head_dim + first;
        for (int64_t v = 0; v < vectors; ++v) parts[v] += splat(scores[s]) * load(value + v * kLanes);
      }
      for (int64_t v = 0; v < vectors; ++v) store(out + first + v * kLanes, parts[v] * splat(share));
    } else {
      for (int64_t s = 0; s < seen; ++s) {
        for (int64_t d = 0; d < width; ++d) out[first + d] += scores[s] * values[s * head_dim + first + d];
      }
      for (int64_t d = 0; d < width; ++d) out[first + d] *= share;
    }
  }
}

// Waits for the other threads of a step.
inline void barrier(int64_t threads) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp barrier
  }
#else
  (void)threads;
#endif
}

// One thread of a step.
class DecodeThread {
 public:
  DecodeThread(const DecodeProgram& program, const DecodeCall& call, int64_t index, int64_t count, float* memory)
      : program_(program), call_(call), index_(index), count_(count), rows_(call.batch * call.tokens) {
    const int64_t q = program.heads * program.head_dim, kv = program.kv_heads * program.head_dim;
    queries_ = call.buffer;
    keys_ = queries_ + rows_ * q;
    values_ = keys_ + rows_ * kv;
    attended_ = values_ + rows_ * kv;
    gate_ = attended_ + rows_ * q;
    up_ = gate_ + rows_ * program.wide;
    const int64_t widest = std::max({program.hidden, q, program.wide});
    normed_ = memory;
    sums_ = normed_ + rows_ * program.hidden;
    unpacked_ = sums_ + rows_ * program.hidden;
    scores_ = unpacked_ + unpacked_floats(widest);
    panel_ = scores_ + call.past + call.tokens + kLanes;
  }

  // Floats that one thread needs.
  static int64_t memory(const DecodeProgram& program, const DecodeCall& call) {
    const int64_t rows = call.batch * call.tokens;
    const int64_t widest = std::max({program.hidden, program.heads * program.head_dim, program.wide});
    return 2 * rows * program.hidden + unpacked_floats(widest) + call.past + call.tokens + kLanes +
           panel_floats(widest, rows);
  }

  void run() {
    for (int64_t layer = 0; layer < program_.layers; ++layer) {
      project(program_.each[layer]);
      barrier();
      remember(program_.each[layer], layer);
      barrier();
      attention(program_.each[layer], layer);
      barrier();
      add_product(program_.each[layer].output, attended_, program_.heads * program_.head_dim);
      barrier();
      gated(program_.each[layer]);
      barrier();
      add_product(program_.each[layer].down, gate_, program_.wide);
      barrier();
    }
    logits();
  }

  // The logits that this thread has computed.
  ChannelRange computed() const { return computed_; }

 private:
  void barrier() const { sparta::barrier(count_); }

  // Every thread norms all tokens: that is less than to wait for another one.
  DecodeTokens normed(const float* weight, bool rounds) {
    for (int64_t row = 0; row < rows_; ++row) {
      rms_norm(call_.x + row * program_.hidden, weight, program_.hidden, program_.epsilon,
               normed_ + row * program_.hidden);
    }
    return packed_tokens(normed_, program_.hidden, rows_, program_.hidden, panel_, rounds);
  }

  void project(const DecodeLayer& layer) {
    const bool rounds = by_bytes(layer.query) || by_bytes(layer.key) || by_bytes(layer.value);
    const DecodeTokens input = normed(layer.input_norm, rounds);
    multiply_share(layer.query, input, index_, count_, unpacked_, queries_, layer.query.channels);
    // The other way round, so that what one thread has more of here it has less of there.
    multiply_share(layer.key, input, count_ - 1 - index_, count_, unpacked_, keys_, layer.key.channels);
    multiply_share(layer.value, input, index_, count_, unpacked_, values_, layer.value.channels);
  }

  // Keys, turned to their positions, and values go into the cache.
  void remember(const DecodeLayer& layer, int64_t at) {
    const int64_t size = program_.head_dim, units = rows_ * program_.kv_heads;
    for (int64_t unit = units * index_ / count_; unit < units * (index_ + 1) / count_; ++unit) {
      const int64_t row = unit / program_.kv_heads, head = unit % program_.kv_heads;
      float* key = keys_ + unit * size;
      if (layer.key_norm) rms_norm(key, layer.key_norm, size, program_.epsilon, key);
      rotate(key, call_.cos + row * size, call_.sin + row * size, size);
      const int64_t place = (row / call_.tokens) * call_.cache_batch_stride + head * call_.cache_head_stride +
                            (call_.past + row % call_.tokens) * size;
      std::copy_n(key, size, call_.keys[at] + place);
      std::copy_n(values_ + unit * size, size, call_.values[at] + place);
    }
  }

  void attention(const DecodeLayer& layer, int64_t at) {
    const int64_t size = program_.head_dim, units = rows_ * program_.heads;
    const int64_t group = program_.heads / program_.kv_heads;
    for (int64_t unit = index_; unit < units; unit += count_) {  // later tokens see more: share them out one by one
      const int64_t row = unit / program_.heads, head = unit % program_.heads;
      const int64_t sequence = row / call_.tokens, token = row % call_.tokens;
      float* query = queries_ + unit * size;
      if (layer.query_norm) rms_norm(query, layer.query_norm, size, program_.epsilon, query);
      rotate(query, call_.cos + row * size, call_.sin + row * size, size);
      const int64_t place = sequence * call_.cache_batch_stride + (head / group) * call_.cache_head_stride;
      const uint8_t* mask =
          call_.mask ? call_.mask + sequence * call_.mask_batch_stride + token * call_.mask_token_stride : nullptr;
      attend(query, call_.keys[at] + place, call_.values[at] + place, call_.past + token + 1, size, program_.scaling,
             mask, scores_, attended_ + unit * size);
    }
  }

  // x += input W^T
  void add_product(const DecodeMatrix& matrix, const float* input, int64_t inputs) {
    const DecodeTokens tokens = packed_tokens(input, inputs, rows_, inputs, panel_, by_bytes(matrix));
    const ChannelRange own = multiply_share(matrix, tokens, index_, count_, unpacked_, sums_, program_.hidden);
    for (int64_t row = 0; row < rows_; ++row) {
      float* x = call_.x + row * program_.hidden;
      const float* sums = sums_ + row * program_.hidden;
      for (int64_t n = own.begin; n < own.end; ++n) x[n] += sums[n];
    }
  }

  void gated(const DecodeLayer& layer) {
    const DecodeTokens input = normed(layer.middle_norm, by_bytes(layer.gate) || by_bytes(layer.up));
    // Both have the costs of both together, so that a thread has the same channels of either.
    const ChannelRange gate = multiply_share(layer.gate, input, index_, count_, unpacked_, gate_, program_.wide);
    multiply_share(layer.up, input, index_, count_, unpacked_, up_, program_.wide);
    with_activation(program_.activation, [&](auto tag) {
      for (int64_t row = 0; row < rows_; ++row) {
        float* left = gate_ + row * program_.wide;
        const float* right = up_ + row * program_.wide;
        for (int64_t n = gate.begin; n < gate.end; n += kLanes) {
          const int64_t some = gate.end - n;
          store_some(left + n, activate<decltype(tag)::value>(load_some(left + n, some)) * load_some(right + n, some),
                     some);
        }
      }
    });
  }

  void logits() {
    const int64_t kept = call_.kept, size = program_.hidden, outputs = program_.head.channels;
    if (kept <= 0) return;
    const int64_t rows = call_.batch * kept;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = (row / kept) * call_.tokens + call_.tokens - kept + row % kept;
      rms_norm(call_.x + from * size, program_.final_norm, size, program_.epsilon, normed_ + row * size);
    }
    const DecodeTokens input = packed_tokens(normed_, size, rows, size, panel_, by_bytes(program_.head));
    computed_ = multiply_share(program_.head, input, index_, count_, unpacked_, call_.logits, outputs);
  }

  const DecodeProgram& program_;
  const DecodeCall& call_;
  const int64_t index_, count_, rows_;
  float *queries_, *keys_, *values_, *attended_, *gate_, *up_;
  float *normed_, *sums_, *unpacked_, *scores_, *panel_;
  ChannelRange computed_ = {};
};

// Calls f(index, count, memory) on each thread, with memory for a call; false when it ran out, before any f.
template <class F>
inline bool with_decode_memory(const DecodeProgram& program, const DecodeCall& call, F f) {
  bool enough_memory = true;
  parallel(call.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    float* memory = scratch.get(DecodeThread::memory(program, call));
    if (!memory) {
#pragma omp atomic write
      enough_memory = false;
    }
    barrier(count);
    if (enough_memory) f(index, count, memory);
  });
  return enough_memory;
}

// False when memory ran out, in which case nothing was computed.
inline bool decode_step(const DecodeProgram& program, const DecodeCall& call) {
  return with_decode_memory(program, call, [&](int64_t index, int64_t count, float* memory) {
    DecodeThread(program, call, index, count, memory).run();
  });
}

}  // namespace sparta
