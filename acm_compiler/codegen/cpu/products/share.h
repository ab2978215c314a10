// Threads that take items in turns, and the memory that they keep from call to call.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "plan.h"

namespace {

constexpr int64_t kMostThreads = 1024;
constexpr int64_t kKeptBytes = 64 << 20;  // a buffer larger than this is freed when its call ends

inline std::atomic<bool> worked[kMostThreads];  // threads that had something to do, for tests

// for tests: while it is there, calls of this thread note the sizes of their items, a 0 after each plan, and compute
// nothing that is planned
inline thread_local std::unique_ptr<std::vector<int64_t>> watched;

inline void note(const std::vector<int64_t>& items) {
  watched->insert(watched->end(), items.begin(), items.end());
  watched->push_back(0);
}

// calls f(item) for each of so many items: each thread takes one, then the next that nobody has taken
template <typename F>
void share_out(int64_t items, const F& f) {
  const int64_t workers = std::min<int64_t>(items, at::get_num_threads());
  std::atomic<int64_t> next{workers};
  at::parallel_for(0, workers, 1, [&](int64_t from, int64_t to) {
    worked[at::get_thread_num() % kMostThreads].store(true, std::memory_order_relaxed);
    for (int64_t worker = from; worker < to; worker++)
      for (int64_t item = worker; item < items; item = next++) f(item);
  });
}

// calls f(row) for rows [from, to), each of so much work
template <typename F>
void share_rows(int64_t from, int64_t to, int64_t work, const F& f) {
  at::parallel_for(from, to, std::max<int64_t>(1, kLeastWork / work), [&](int64_t first, int64_t stop) {
    for (int64_t row = first; row < stop; row++) f(row);
  });
}

// A buffer that is not written when it is made, so that each page lies near the processor that first uses it.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() { std::free(data_); }

  // room for so many values; what it held is lost if that is more than it had
  template <typename T>
  T* grown(int64_t values) {
    if (static_cast<int64_t>(values * sizeof(T)) > bytes_) {
      std::free(data_);
      bytes_ = round_up(values * sizeof(T), kAlignment);
      data_ = std::aligned_alloc(kAlignment, bytes_);
      if (!data_) {
        bytes_ = 0;
        throw std::bad_alloc();
      }
    }
    return static_cast<T*>(data_);
  }

  void end_call() {
    if (bytes_ > kKeptBytes) std::free(data_), data_ = nullptr, bytes_ = 0;
  }

 private:
  static constexpr int64_t kAlignment = 64;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace
