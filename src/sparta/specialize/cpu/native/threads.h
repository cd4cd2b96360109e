// Threads: OpenMP, so that a process that has loaded torch first shares one pool with it. Work is cut by cost, not by
// count, because the rows of a trained mask differ. Every thread finds its own share from the
// running sum of costs, without talking to the others, and the cut never changes a result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace sparta {

// Calls f(index, count) on each thread. One thread means a plain call, which is cheaper and safe after a fork.
template <class F>
inline void parallel(int32_t threads, F f) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    f(omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  f(0, 1);
}

// Where share `index` of `count` begins in `repeats` repetitions of blocks with running costs `sums[0..blocks]`.
// A position is repetition * blocks + block.
inline int64_t share_begin(const int64_t* sums, int64_t blocks, int64_t repeats, int64_t index, int64_t count) {
  if (index <= 0) return 0;
  if (index >= count) return repeats * blocks;
  const double each = static_cast<double>(sums[blocks]);
  const double wanted = each * static_cast<double>(repeats) * static_cast<double>(index) / static_cast<double>(count);
  const int64_t whole = static_cast<int64_t>(wanted / each);
  const double rest = wanted - static_cast<double>(whole) * each;
  const int64_t* cut =
      std::lower_bound(sums, sums + blocks, rest, [](int64_t a, double b) { return static_cast<double>(a) < b; });
  return std::min(whole * blocks + (cut - sums), repeats * blocks);
}

// Memory a thread keeps between calls, aligned to cache lines; null when there is not enough.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  float* get(int64_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = 0;
      const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 4095) / 4096 * 4096;
      data_ = static_cast<float*>(std::aligned_alloc(4096, bytes));
      if (data_) size_ = floats;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace sparta
