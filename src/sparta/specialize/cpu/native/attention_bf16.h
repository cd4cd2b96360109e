// Attention of bf16 models: keys and, turned, values are packed as blocks (bf16.h) once for each head, so both products
// run as those of layers do, and the scores of a query stand in one lane of their rows. A mask of its own for each query
// is turned likewise, once for all heads that share it.
#pragma once

#include "attention.h"
#include "bf16.h"

namespace sparta {

constexpr int64_t kQueriesOfTile = 64;
constexpr int64_t kMostTurned = 1 << 16;  // floats of turned masks that are kept for the next head

// e^x of numbers that are not above 0, to 1e-4 of itself, which is less than bf16 rounds; 0 below -87, NaN for NaN.
SPARTA_INLINE Vec exp_in_short(Vec x) {
  const Vec kRound = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
  const Vec shifted = x * splat(1.44269504f) + kRound;
  const Vec fraction = x * splat(1.44269504f) - (shifted - kRound);
  Vec power = splat(0.0551716685f) * fraction + splat(0.242611155f);
  power = power * fraction + splat(0.693260968f);
  power = power * fraction + splat(0.999928057f);
  const Vec factor = (Vec)(((BitVec)shifted << 23) + (127u << 23));
  return x < splat(-87.0f) ? Vec{} : power * factor;
}

// Whether a call can be computed by blocks.
inline bool attends_in_bf16(const AttentionCall& call) {
  return call.keys > 0 && call.width > 0 && call.value_width > 0;
}

// A weight (rows, inputs) of which every block is there, with room for its blocks.
class WholeBlocks {
 public:
  static int64_t floats(int64_t rows, int64_t inputs) {
    const int64_t groups = ceil_div(rows, kTileRows), blocks = ceil_div(inputs, kTileInputs);
    return 64 + 2 * (groups + 1) + groups * (blocks + 1) + groups * blocks * kTileValues / 2;
  }
  void place(int64_t rows, int64_t inputs, float* memory) {
    const int64_t groups = ceil_div(rows, kTileRows);
    blocks_ = ceil_div(inputs, kTileInputs);
    bytes_ = static_cast<size_t>(groups * blocks_ * kTileValues) * sizeof(uint16_t);
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    values_ = reinterpret_cast<uint16_t*>(aligned);
    int64_t* starts = reinterpret_cast<int64_t*>(values_ + groups * blocks_ * kTileValues);
    uint32_t* offsets = reinterpret_cast<uint32_t*>(starts + groups + 1);
    int32_t* first_rows = reinterpret_cast<int32_t*>(offsets + groups * blocks_);
    for (int64_t group = 0; group <= groups; ++group) starts[group] = group * blocks_;
    for (int64_t group = 0; group < groups; ++group) {
      first_rows[group] = static_cast<int32_t>(group * kTileRows);
      for (int64_t i = 0; i < blocks_; ++i) {
        offsets[group * blocks_ + i] = static_cast<uint32_t>(i * kTileRows * kTileTokens * sizeof(int32_t));
      }
    }
    matrix = PanelMatrix{};
    matrix.channels = rows;
    matrix.inputs = inputs;
    matrix.groups = groups;
    matrix.starts = starts;
    matrix.offsets = offsets;
    matrix.values = reinterpret_cast<const float*>(values_);
    matrix.rows = first_rows;
    matrix.bn = kTileRows;
  }
  void clear() { std::memset(values_, 0, bytes_); }
  // Where `row` and an even input stand.
  uint16_t* at(int64_t row, int64_t input) {
    const int64_t block = row / kTileRows * blocks_ + input / kTileInputs;
    return values_ + block * kTileValues + row % kTileRows * kTileInputs + input % kTileInputs;
  }
  PanelMatrix matrix;

 private:
  uint16_t* values_;
  int64_t blocks_;
  size_t bytes_;
};

// One thread's memory and its share of the tiles of queries.
class ShortAttentionThread {
 public:
  explicit ShortAttentionThread(const AttentionCall& call)
      : call_(call), query_places_(bf16_places(call.width)), key_places_(bf16_places(call.keys)),
        own_masks_(call.mask_kind != kNoMask && call.mask_strides[2] != 0) {}

  bool run(int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    const int64_t keys = WholeBlocks::floats(call_.keys, call_.width);
    const int64_t values = WholeBlocks::floats(call_.value_width, call_.keys);
    const int64_t score_rows = ceil_div(call_.keys, kTileInputs) * kTileInputs;
    const int64_t result_rows = ceil_div(call_.value_width, kTileInputs) * kTileInputs;
    const int64_t rows = query_places_ + key_places_ + score_rows + result_rows + 1;
    const int64_t tiles = ceil_div(call_.queries, kQueriesOfTile);
    turned_floats_ = own_masks_ ? call_.keys * kQueriesOfTile : 0;
    kept_ = tiles * turned_floats_ <= kMostTurned ? tiles : 1;
    float* memory = scratch.get(keys + values + score_rows + rows * kQueriesOfTile + kept_ * turned_floats_);
    if (!memory) return false;
    keys_.place(call_.keys, call_.width, memory);
    values_.place(call_.value_width, call_.keys, memory + keys);
    added_ = memory + keys + values;
    scores_ = added_ + score_rows;
    results_ = scores_ + score_rows * kQueriesOfTile;
    factors_ = results_ + result_rows * kQueriesOfTile;
    queries_ = reinterpret_cast<int32_t*>(factors_ + kQueriesOfTile);
    weights_ = queries_ + query_places_ * kQueriesOfTile;
    turned_ = reinterpret_cast<float*>(weights_ + key_places_ * kQueriesOfTile);
    turned_from_ = -1;
    const int64_t all = call_.batch * call_.heads * tiles;
    int64_t packed = -1;
    for (int64_t at = all * index / count; at < all * (index + 1) / count; ++at) {
      const int64_t head = at / tiles, sequence = head / call_.heads;
      const int64_t shared = head % call_.heads / (call_.heads / call_.kv_heads);
      const int64_t wanted = sequence * call_.kv_heads + shared;
      if (wanted != packed) pack(sequence, shared);
      packed = wanted;
      attend_tile(sequence, head % call_.heads, at % tiles * kQueriesOfTile);
    }
    return true;
  }

 private:
  void pack(int64_t sequence, int64_t head) {
    constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
    const float* k = call_.k + sequence * call_.k_strides[0] + head * call_.k_strides[1];
    const float* v = call_.v + sequence * call_.v_strides[0] + head * call_.v_strides[1];
    keys_.clear();
    values_.clear();
    for (int64_t s = 0; s < call_.keys; ++s) {
      for (int64_t e = 0; e < call_.width; e += 2 * kLanes) {
        const float* from = k + s * call_.k_strides[2] + e;
        const int64_t left = call_.width - e;
        const Vec first = load_some(from, left), second = left > kLanes ? load_some(from + kLanes, left - kLanes) : Vec{};
        const Vec pairs = neighbours(first, second, kAll);
        std::memcpy(keys_.at(s, e), &pairs, sizeof pairs);
      }
    }
    for (int64_t d = 0; d < call_.value_width; d += kLanes) {
      const int64_t left = call_.value_width - d;
      for (int64_t s = 0; s < call_.keys; s += 2 * kLanes) {
        Vec square[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          const int64_t key = s + 2 * i;
          const float* from = v + key * call_.v_strides[2] + d;
          const Vec first = key < call_.keys ? load_some(from, left) : Vec{};
          const Vec second = key + 1 < call_.keys ? load_some(from + call_.v_strides[2], left) : Vec{};
          square[i] = (Vec)joined_halves(first, second);
        }
        transpose(square);
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, left); ++i) {
          std::memcpy(values_.at(d + i, s), &square[i], sizeof square[i]);
        }
      }
    }
  }

  float added(int64_t at) const {
    if (call_.mask_kind == kFloatMask) return static_cast<const float*>(call_.mask)[at];
    return static_cast<const uint8_t*>(call_.mask)[at] ? 0.0f : -std::numeric_limits<float>::infinity();
  }

  // What the mask adds to the score of each key, for all queries.
  void add_mask(int64_t sequence, int64_t head) {
    std::fill(added_, added_ + call_.keys, 0.0f);
    if (call_.mask_kind == kNoMask) return;
    const int64_t first = sequence * call_.mask_strides[0] + head * call_.mask_strides[1];
    for (int64_t s = 0; s < call_.keys; ++s) added_[s] = added(first + s * call_.mask_strides[3]);
  }

  // The same for each query of a tile, [keys][queries]; masks of the head before are taken again where they are the same.
  const float* turned_mask(int64_t sequence, int64_t head, int64_t first_query, int64_t tokens) {
    const int64_t from = sequence * call_.mask_strides[0] + head * call_.mask_strides[1];
    if (from != turned_from_) std::fill(done_, done_ + kDone, false);
    turned_from_ = from;
    const int64_t tile = first_query / kQueriesOfTile, number = kept_ > 1 ? tile : 0;
    float* to = turned_ + number * turned_floats_;
    const bool keeps = kept_ > 1 || call_.queries <= kQueriesOfTile;
    if (keeps && done_[number]) return to;
    for (int64_t q = 0; q < kQueriesOfTile; ++q) {
      const int64_t row = from + (first_query + q) * call_.mask_strides[2];
      for (int64_t s = 0; s < call_.keys; ++s) {
        to[s * kQueriesOfTile + q] = q < tokens ? added(row + s * call_.mask_strides[3]) : 0.0f;
      }
    }
    done_[number] = true;
    return to;
  }

  // The scores of one vector of queries become weights, as places of a panel; their sums go to the factors.
  void soften(int64_t vector, int64_t first_query, const float* turned) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    float* scores = scores_ + vector * kLanes;
    Vec query, most = splat(kHidden), sums = {};
    for (int lane = 0; lane < kLanes; ++lane) query[lane] = static_cast<float>(first_query + vector * kLanes + lane);
    for (int64_t s = 0; s < call_.keys; ++s) {
      const Vec plus = turned ? load(turned + s * kQueriesOfTile + vector * kLanes) : splat(added_[s]);
      Vec score = load(scores + s * kQueriesOfTile) * splat(call_.scale) + plus;
      if (call_.causal) score = query < splat(static_cast<float>(s)) ? splat(kHidden) : score;
      store(scores + s * kQueriesOfTile, score);
      most = score > most ? score : most;
    }
    const Vec base = most == splat(kHidden) ? Vec{} : most;  // a query that sees nothing gets zeros
    int32_t* to = weights_ + vector_start(vector, key_places_);
    for (int64_t s = 0; s < 2 * key_places_; s += 2) {
      Vec pair[2] = {};
      for (int64_t i = 0; i < 2 && s + i < call_.keys; ++i) {
        pair[i] = exp_in_short(load(scores + (s + i) * kQueriesOfTile) - base);
        sums += pair[i];
      }
      // Ties go up here, which is one instruction. A sum that is no number spreads by itself.
      const BitVec low = (BitVec)pair[0] + 0x8000u, high = (BitVec)pair[1] + 0x8000u;
      const IntVec joined = (IntVec)(low >> 16 | (high & kUpperHalf));
      std::memcpy(to + s / 2 * kTileTokens, &joined, sizeof joined);
    }
    store(factors_ + vector * kLanes, sums == Vec{} ? Vec{} : splat(1.0f) / sums);
  }

  void attend_tile(int64_t sequence, int64_t head, int64_t first) {
    const int64_t tokens = std::min(kQueriesOfTile, call_.queries - first), vectors = ceil_div(tokens, kLanes);
    const float* q = call_.q + sequence * call_.q_strides[0] + head * call_.q_strides[1] + first * call_.q_strides[2];
    pack_bf16_rows(q, call_.q_strides[2], tokens, call_.width, queries_);
    multiply_bf16_rows({&keys_.matrix, 0, keys_.matrix.groups, queries_, scores_, 0, kQueriesOfTile, tokens, 0});
    const float* turned = own_masks_ ? turned_mask(sequence, head, first, tokens) : nullptr;
    if (!own_masks_) add_mask(sequence, head);
    for (int64_t vector = 0; vector < vectors; ++vector) soften(vector, first, turned);
    multiply_bf16_rows({&values_.matrix, 0, values_.matrix.groups, weights_, results_, 0, kQueriesOfTile, tokens, 0});
    for (int64_t d = 0; d < call_.value_width; ++d) {
      for (int64_t j = 0; j < vectors * kLanes; j += kLanes) {
        float* at = results_ + d * kQueriesOfTile + j;
        store(at, load(at) * load(factors_ + j));
      }
    }
    const Epilogue nothing{nullptr, nullptr, 0, kNone};
    unpack_rows<kNone>(results_, kQueriesOfTile, 0, call_.value_width, tokens, nothing,
                       call_.y + sequence * call_.y_strides[0] + head * call_.y_strides[1] + first * call_.y_strides[2],
                       call_.y_strides[2]);
  }

  static constexpr int64_t kDone = kMostTurned / kQueriesOfTile;  // no more tiles are kept, not of one key either
  const AttentionCall call_;
  const int64_t query_places_, key_places_;
  const bool own_masks_;
  int64_t turned_floats_ = 0, kept_ = 0, turned_from_ = -1;
  bool done_[kDone] = {};
  float* turned_ = nullptr;
  WholeBlocks keys_, values_;
  float *added_ = nullptr, *scores_ = nullptr, *results_ = nullptr, *factors_ = nullptr;
  int32_t *queries_ = nullptr, *weights_ = nullptr;
};

// False when memory ran out.
inline bool attend_in_bf16(const AttentionCall& call) {
  if (!attends_in_bf16(call)) return attend_all(call);
  bool enough_memory = true;
  const int64_t tiles = call.batch * call.heads * ceil_div(call.queries, kQueriesOfTile);
  parallel(static_cast<int32_t>(std::min<int64_t>(call.threads, std::max<int64_t>(tiles, 1))),
           [&](int64_t index, int64_t count) {
             if (ShortAttentionThread(call).run(index, count)) return;
#pragma omp atomic write
             enough_memory = false;
           });
  return enough_memory;
}

}  // namespace sparta
