// softmax(q k^T * scale + mask) v for encoders: all heads of all sequences, queries in blocks. A head's keys are
// transposed once and its values put together, so that both products run with vectors along their last dim and broadcast
// the other operand; the scores of a block stay in the cache between them, and rows are divided by their sums only at the end.
#pragma once

#include <cmath>
#include <limits>

#include "panel.h"
#include "threads.h"

namespace sparta {

enum MaskKind : int32_t { kNoMask = 0, kBoolMask = 1, kFloatMask = 2 };

// Strides are in elements: of a sequence, a head and a token; of the mask, a key too. Channels are neighbours.
struct AttentionCall {
  const float* q;
  const float* k;
  const float* v;
  const void* mask;
  float* y;
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int64_t width;
  int64_t value_width;
  int64_t q_strides[3];
  int64_t k_strides[3];
  int64_t v_strides[3];
  int64_t y_strides[3];
  int64_t mask_strides[4];
  float scale;
  int32_t mask_kind;
  int32_t causal;  // key s is seen by query t if s <= t
  int32_t threads;
};

// Registers hold the sums of so many rows and vectors.
constexpr int kProductRows = 6;
constexpr int kProductVectors = kLanes == 16 ? 4 : 2;
constexpr int64_t kQueriesTogether = 4 * kProductRows;

struct DenseProduct {
  const float* a;  // [rows][depth]
  int64_t a_stride;
  const float* b;  // [depth][columns], columns padded to whole vectors
  int64_t b_stride;
  int64_t depth;
  const float* factors;  // [rows], or null
  float* y;              // [rows][columns], padded as b
  int64_t y_stride;
};

template <int Rows, int Vectors>
SPARTA_NOINLINE void multiply_dense_block(const DenseProduct& given) {
  const DenseProduct task = given;
  Vec sums[Rows][Vectors] = {};
  for (int64_t k = 0; k < task.depth; ++k) {
    Vec right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) right[j] = load(task.b + k * task.b_stride + j * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Vec left = splat(task.a[r * task.a_stride + k]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sums[r][j] += left * right[j];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const Vec factor = splat(task.factors ? task.factors[r] : 1.0f);
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(task.y + r * task.y_stride + j * kLanes, sums[r][j] * factor);
  }
}

template <int Vectors>
void multiply_dense_columns(DenseProduct task, int64_t rows) {
  while (rows > 0) {
    int step = 1;
    if (rows >= kProductRows) {
      step = kProductRows;
      multiply_dense_block<kProductRows, Vectors>(task);
    } else if (rows >= 4) {
      step = 4;
      multiply_dense_block<4, Vectors>(task);
    } else if (rows >= 2) {
      step = 2;
      multiply_dense_block<2, Vectors>(task);
    } else {
      multiply_dense_block<1, Vectors>(task);
    }
    rows -= step;
    task.a += step * task.a_stride;
    task.y += step * task.y_stride;
    if (task.factors) task.factors += step;
  }
}

// All of a product: a few columns, which stay in the first cache, for all rows, in groups that registers hold.
inline void multiply_dense(DenseProduct task, int64_t rows, int64_t vectors) {
  while (vectors > 0) {
    int step = 1;
    if (vectors >= kProductVectors) {
      step = kProductVectors;
      multiply_dense_columns<kProductVectors>(task, rows);
    } else if (vectors >= 2) {
      step = 2;
      multiply_dense_columns<2>(task, rows);
    } else {
      multiply_dense_columns<1>(task, rows);
    }
    vectors -= step;
    task.b += step * kLanes;
    task.y += step * kLanes;
  }
}

inline int64_t whole_vectors(int64_t count) { return ceil_div(count, kLanes) * kLanes; }

// Rows whose scores are turned into weights together, so that none waits for the sum of its lanes.
constexpr int kSoftRows = 4;

// Turns the scores of some rows into weights that are not yet divided by their sums, in place; `factors` become what they
// are to be multiplied by. The places of a row after those that are `seen`, up to a whole vector, become 0. A row that
// sees nothing gets zeros.
template <int Rows>
inline void soften(float* scores, int64_t padded, const int64_t* seen, const float* added, float* factors) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  Vec most[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    std::fill(scores + r * padded + seen[r], scores + (r + 1) * padded, kHidden);
    most[r] = splat(kHidden);
  }
  for (int64_t s = 0; s < padded; s += kLanes) {
    const Vec more = added ? load(added + s) : Vec{};
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      Vec score = load(scores + r * padded + s);
      if (added) store(scores + r * padded + s, score += more);
      most[r] = larger(score, most[r]);
    }
  }
  float top[Rows];
  bool hidden = false;
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) hidden |= (top[r] = greatest_lane(most[r])) == kHidden;
  if (hidden) {  // nothing is seen, or a score is no number
    if constexpr (Rows == 1) {
      float total = 0.0f;
      for (int64_t s = 0; s < padded; ++s) total += scores[s] == kHidden ? 0.0f : scores[s];
      std::fill(scores, scores + padded, total);  // 0, or NaN
      factors[0] = 1.0f;
    } else {  // what is added is in the scores already
      for (int r = 0; r < Rows; ++r) soften<1>(scores + r * padded, padded, seen + r, nullptr, factors + r);
    }
    return;
  }
  Vec sums[Rows] = {};
  for (int64_t s = 0; s < padded; s += kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec power = exp(load(scores + r * padded + s) - splat(top[r]));
      store(scores + r * padded + s, power);
      sums[r] += power;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) factors[r] = 1.0f / sum_of_lanes(sums[r]);
}

// One thread's memory and its share of the blocks of queries.
class AttentionThread {
 public:
  explicit AttentionThread(const AttentionCall& call)
      : call_(call), padded_keys_(whole_vectors(call.keys)), padded_values_(whole_vectors(call.value_width)) {}

  bool run(int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    const int64_t values = call_.keys * padded_values_;
    float* memory = scratch.get(padded_keys_ * (call_.width + kQueriesTogether + 1) + values +
                                kQueriesTogether * (padded_values_ + 1));
    if (!memory) return false;
    turned_ = memory;
    scores_ = turned_ + padded_keys_ * call_.width;
    added_ = scores_ + padded_keys_ * kQueriesTogether;
    values_ = added_ + padded_keys_;
    result_ = values_ + values;
    factors_ = result_ + kQueriesTogether * padded_values_;
    const int64_t blocks = ceil_div(call_.queries, kQueriesTogether), all = call_.batch * call_.heads * blocks;
    int64_t packed = -1;
    for (int64_t at = all * index / count; at < all * (index + 1) / count; ++at) {
      const int64_t head = at / blocks, sequence = head / call_.heads;
      const int64_t shared = head % call_.heads / (call_.heads / call_.kv_heads);
      const int64_t wanted = sequence * call_.kv_heads + shared;
      if (wanted != packed) pack(sequence, shared);
      packed = wanted;
      attend_block(sequence, head % call_.heads, at % blocks * kQueriesTogether);
    }
    return true;
  }

 private:
  void pack(int64_t sequence, int64_t head) {
    pack_tile(call_.k + sequence * call_.k_strides[0] + head * call_.k_strides[1], call_.k_strides[2], call_.keys, 0,
              call_.width, padded_keys_, turned_);
    // Rows of other heads lie between those of one, so far apart that they would push each other out of the first cache.
    const float* values = call_.v + sequence * call_.v_strides[0] + head * call_.v_strides[1];
    for (int64_t s = 0; s < call_.keys; ++s) {
      for (int64_t d = 0; d < padded_values_; d += kLanes) {
        store(values_ + s * padded_values_ + d, load_some(values + s * call_.v_strides[2] + d, call_.value_width - d));
      }
    }
  }

  // What the mask adds to the scores of one query, the same as for the query before where it says the same.
  const float* added(int64_t sequence, int64_t head, int64_t query) {
    if (call_.mask_kind == kNoMask) return nullptr;
    const int64_t* strides = call_.mask_strides;
    const int64_t first = sequence * strides[0] + head * strides[1] + query * strides[2];
    if (first == added_from_) return added_;
    added_from_ = first;
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    if (call_.mask_kind == kBoolMask) {
      const uint8_t* mask = static_cast<const uint8_t*>(call_.mask) + first;
      for (int64_t s = 0; s < call_.keys; ++s) added_[s] = mask[s * strides[3]] ? 0.0f : kHidden;
    } else {
      const float* mask = static_cast<const float*>(call_.mask) + first;
      for (int64_t s = 0; s < call_.keys; ++s) added_[s] = mask[s * strides[3]];
    }
    std::fill(added_ + call_.keys, added_ + padded_keys_, 0.0f);  // those scores are hidden anyway
    return added_;
  }

  // The scores of a block of queries, several at once where the mask says the same of all.
  void soften_block(int64_t sequence, int64_t head, int64_t first, int64_t rows) {
    int64_t seen[kQueriesTogether];
    for (int64_t row = 0; row < rows; ++row) {
      seen[row] = call_.causal ? std::min(call_.keys, first + row + 1) : call_.keys;
    }
    const bool alike = call_.mask_kind == kNoMask || call_.mask_strides[2] == 0;
    int64_t row = 0;
    for (; alike && row + kSoftRows <= rows; row += kSoftRows) {
      soften<kSoftRows>(scores_ + row * padded_keys_, padded_keys_, seen + row, added(sequence, head, first + row),
                        factors_ + row);
    }
    for (; row < rows; ++row) {
      soften<1>(scores_ + row * padded_keys_, padded_keys_, seen + row, added(sequence, head, first + row),
                factors_ + row);
    }
  }

  void attend_block(int64_t sequence, int64_t head, int64_t first) {
    const int64_t rows = std::min(kQueriesTogether, call_.queries - first);
    const float* q = call_.q + sequence * call_.q_strides[0] + head * call_.q_strides[1] + first * call_.q_strides[2];
    std::fill(factors_, factors_ + rows, call_.scale);
    multiply_dense({q, call_.q_strides[2], turned_, padded_keys_, call_.width, factors_, scores_, padded_keys_}, rows,
                   padded_keys_ / kLanes);
    soften_block(sequence, head, first, rows);
    float* y = call_.y + sequence * call_.y_strides[0] + head * call_.y_strides[1] + first * call_.y_strides[2];
    const bool whole = padded_values_ == call_.value_width;
    multiply_dense({scores_, padded_keys_, values_, padded_values_, call_.keys, factors_, whole ? y : result_,
                    whole ? call_.y_strides[2] : padded_values_},
                   rows, padded_values_ / kLanes);
    if (whole) return;
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(result_ + row * padded_values_, call_.value_width, y + row * call_.y_strides[2]);
    }
  }

  const AttentionCall call_;
  const int64_t padded_keys_, padded_values_;
  float *turned_ = nullptr, *scores_ = nullptr, *added_ = nullptr, *values_ = nullptr, *result_ = nullptr;
  float* factors_ = nullptr;
  int64_t added_from_ = -1;
};

// False when memory ran out.
inline bool attend_all(const AttentionCall& call) {
  bool enough_memory = true;
  const int64_t blocks = call.batch * call.heads * ceil_div(call.queries, kQueriesTogether);
  parallel(static_cast<int32_t>(std::min<int64_t>(call.threads, blocks)), [&](int64_t index, int64_t count) {
    if (AttentionThread(call).run(index, count)) return;
#pragma omp atomic write
    enough_memory = false;
  });
  return enough_memory;
}

}  // namespace sparta
