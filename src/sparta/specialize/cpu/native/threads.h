// Threads: OpenMP, so that a process that has loaded torch first shares one pool with it. Work is cut by cost, not by
// count, because the rows of a trained mask differ. Every thread finds its own share from the
// running sum of costs, without talking to the others, and the cut never changes a result. To begin and to end an OpenMP
// region takes as long as a small layer, so the steps of a chain share one, in which a team waits for work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace sparta {

// Waits until `done` returns true. Whoever waits long lets others run: there may be more threads than cores.
template <class F>
inline void wait_until(F done) {
  constexpr int kTurns = 1024;
  for (int turn = 0; !done(); ++turn) {
    if (turn >= kTurns) {
      std::this_thread::yield();
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// The threads of one OpenMP region, which do what the first one hands them, again and again.
class Team {
 public:
  explicit Team(int64_t threads) : threads_(threads) {}

  // The one that the calling thread leads, or null.
  static Team*& led() {
    static thread_local Team* team = nullptr;
    return team;
  }

  // Of the first thread: calls f(index, count) on each and waits for all.
  template <class F>
  void run(const F& f) {
    what_ = &f;
    call_ = [](const void* what, int64_t index, int64_t count) { (*static_cast<const F*>(what))(index, count); };
    left_.store(threads_ - 1, std::memory_order_relaxed);
    rounds_.fetch_add(1, std::memory_order_release);
    f(0, threads_);
    wait_until([this] { return left_.load(std::memory_order_acquire) == 0; });
  }

  // Of the first thread: lets the others go.
  void end() {
    call_ = nullptr;
    rounds_.fetch_add(1, std::memory_order_release);
  }

  // Of the others: works until the end.
  void work(int64_t index) {
    for (int64_t done = 0;; ++done) {
      wait_until([this, done] { return rounds_.load(std::memory_order_acquire) != done; });
      if (!call_) return;
      call_(what_, index, threads_);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

 private:
  const int64_t threads_;
  void (*call_)(const void*, int64_t, int64_t) = nullptr;
  const void* what_ = nullptr;
  alignas(64) std::atomic<int64_t> rounds_{0};
  alignas(64) std::atomic<int64_t> left_{0};
};

// Calls f(index, count) on each thread. One thread means a plain call, which is cheaper and safe after a fork.
template <class F>
inline void parallel(int32_t threads, F f) {
#ifdef _OPENMP
  if (threads > 1 && Team::led()) return Team::led()->run(f);
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    f(omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  f(0, 1);
}

// Calls f() on the first thread of a region that all calls of parallel() in it share.
template <class F>
inline void in_team(int32_t threads, F f) {
#ifdef _OPENMP
  if (threads > 1 && !Team::led()) {
    Team* team = nullptr;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
      team = new Team(omp_get_num_threads());
      if (omp_get_thread_num() == 0) {
        Team::led() = team;
        f();
        Team::led() = nullptr;
        team->end();
      } else {
        team->work(omp_get_thread_num());
      }
    }
    delete team;
    return;
  }
#endif
  f();
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
