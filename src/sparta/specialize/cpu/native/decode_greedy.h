// Several steps of a decoder in one call, each with the likeliest token of the one before: the embedding is looked up,
// the step runs, and its largest logit is found by the threads that computed them. Threads start once for all steps.
#pragma once

#include "decode.h"

namespace sparta {

// `steps` tokens of each of `step.batch` sequences, after `step.past` that the cache holds. Of the call of one step,
// `tokens` and `kept` are 1, `x` and `logits` are memory for one step, and `cos` and `sin` hold those of all steps,
// [steps][batch][head_dim]. The mask covers all keys there will be.
struct GreedyCall {
  DecodeCall step;
  const float* embeddings;  // [vocabulary][hidden]
  int64_t* tokens;          // [steps + 1][batch]; the first of each sequence is given
  const int64_t* ends;      // [end_count]: tokens after which a sequence has ended
  uint8_t* ended;           // [batch]: 1 where it has; from then on it gets `padding`
  int64_t* largest;         // memory: [threads][batch]
  int64_t steps;
  int64_t end_count;
  int64_t padding;
  int64_t taken;  // is set to how many steps ran: fewer than `steps` where all sequences have ended
};

// Whether a logit comes before the largest so far. Not a number is above all, as in PyTorch.
inline bool is_larger(float one, float largest) { return one > largest || (one != one && largest == largest); }

// The first of the largest of logits [begin, end), or -1 where there are none.
inline int64_t largest_of(const float* logits, int64_t begin, int64_t end) {
  if (begin >= end) return -1;
  Vec most = {};
  IntVec where = {}, none = {};  // per lane: the vector of its largest, and whether one is no number
  const int64_t whole = (end - begin) / kLanes;
  if (whole > 0) most = load(logits + begin);
  for (int64_t i = 0; i < whole; ++i) {
    const Vec v = load(logits + begin + i * kLanes);
    const IntVec above = v > most;
    most = above ? v : most;
    where = above ? IntVec{} + static_cast<int32_t>(i) : where;
    none |= v != v;
  }
  bool numbers = whole > 0;
  for (int lane = 0; lane < kLanes; ++lane) numbers &= none[lane] == 0;
  int64_t found = begin;
  if (numbers) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t one = begin + where[lane] * static_cast<int64_t>(kLanes) + lane;
      if (logits[one] > logits[found] || (logits[one] == logits[found] && one < found)) found = one;
    }
  }
  for (int64_t i = numbers ? begin + whole * kLanes : begin; i < end; ++i) {
    if (is_larger(logits[i], logits[found])) found = i;
  }
  return found;
}

// One thread of all steps.
class GreedyThread {
 public:
  GreedyThread(const DecodeProgram& program, GreedyCall& call, int64_t index, int64_t count, float* memory)
      : program_(program), call_(call), step_(call.step), index_(index), count_(count), memory_(memory) {}

  void run() {
    const int64_t batch = step_.batch, size = program_.head_dim;
    int64_t at = 0;
    for (; at < call_.steps; ++at) {
      step_.past = call_.step.past + at;
      step_.cos = call_.step.cos + at * batch * size;
      step_.sin = call_.step.sin + at * batch * size;
      for (int64_t b = batch * index_ / count_; b < batch * (index_ + 1) / count_; ++b) {
        std::copy_n(call_.embeddings + call_.tokens[at * batch + b] * program_.hidden, program_.hidden,
                    step_.x + b * program_.hidden);
      }
      barrier(count_);
      DecodeThread thread(program_, step_, index_, count_, memory_);
      thread.run();
      for (int64_t b = 0; b < batch; ++b) {
        const float* logits = step_.logits + b * program_.head.channels;
        call_.largest[index_ * batch + b] = largest_of(logits, thread.computed().begin, thread.computed().end);
      }
      barrier(count_);
      if (index_ == 0) choose(at);
      barrier(count_);
      if (all_ended()) {
        ++at;
        break;
      }
    }
    if (index_ == 0) call_.taken = at;
  }

 private:
  // Threads have logits in their order, so that the first of equal ones wins.
  void choose(int64_t at) {
    const int64_t batch = step_.batch;
    for (int64_t b = 0; b < batch; ++b) {
      const float* logits = step_.logits + b * program_.head.channels;
      int64_t best = -1;
      for (int64_t thread = 0; thread < count_; ++thread) {
        const int64_t one = call_.largest[thread * batch + b];
        if (one >= 0 && (best < 0 || is_larger(logits[one], logits[best]))) best = one;
      }
      if (call_.ended[b]) best = call_.padding;
      for (int64_t i = 0; i < call_.end_count; ++i) call_.ended[b] |= best == call_.ends[i];
      call_.tokens[(at + 1) * batch + b] = best;
    }
  }

  bool all_ended() const {
    return call_.end_count > 0 && std::all_of(call_.ended, call_.ended + step_.batch, [](uint8_t e) { return e != 0; });
  }

  const DecodeProgram& program_;
  GreedyCall& call_;
  DecodeCall step_;
  const int64_t index_, count_;
  float* memory_;
};

// False when memory ran out, in which case nothing was computed.
inline bool decode_greedy(const DecodeProgram& program, GreedyCall& call) {
  DecodeCall last = call.step;
  last.past += call.steps;
  return with_decode_memory(program, last, [&](int64_t index, int64_t count, float* memory) {
    GreedyThread(program, call, index, count, memory).run();
  });
}

}  // namespace sparta
