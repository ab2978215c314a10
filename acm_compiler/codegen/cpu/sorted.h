// Tokens in order of how many learners they run, highest first.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kSortRows = 1 << 16;  // more tokens than these are sorted by all threads

struct Sorted {
  int64_t tokens, learners;
  using Counts = c10::SmallVector<int64_t, 20>;  // of few learners without asking for memory
  std::vector<int64_t> order;  // token of each sorted place
  Counts at_least;             // [N + 2]: how many tokens run at least k learners

  // a counting sort, in ranges of tokens where there are many; false when some k lies outside [0, N]
  template <typename K>
  bool sort(const K* k) {
    const int64_t ranges = tokens > kSortRows ? at::get_num_threads() : 1, row = learners + 1;
    Counts place(ranges * row, 0);  // how many tokens of a range run k, then where its next one goes
    std::atomic<bool> legal{true};
    each_range(ranges, [&](int64_t r, int64_t from, int64_t to) {
      Counts count(row, 0);  // apart from those of other threads
      for (int64_t t = from; t < to && legal; t++) {
        if (k[t] < 0 || k[t] > learners) legal = false;
        else count[k[t]]++;
      }
      std::copy(count.begin(), count.end(), place.begin() + r * row);
    });
    if (!legal) return false;
    at_least.assign(learners + 2, 0);
    int64_t sum = 0;
    for (int64_t n = learners; n >= 0; at_least[n--] = sum)
      for (int64_t r = 0; r < ranges; r++) sum += std::exchange(place[r * row + n], sum);
    order.resize(tokens);
    each_range(ranges, [&](int64_t r, int64_t from, int64_t to) {
      Counts next(place.begin() + r * row, place.begin() + (r + 1) * row);
      for (int64_t t = from; t < to; t++) order[next[k[t]]++] = t;
    });
    return true;
  }

  // how many learners the token at a sorted place runs
  int64_t k_at(int64_t place) const {
    int64_t k = learners;
    while (place >= at_least[k]) k--;
    return k;
  }

 private:
  template <typename F>
  void each_range(int64_t ranges, const F& f) const {
    at::parallel_for(0, ranges, 1, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; r++) f(r, tokens * r / ranges, tokens * (r + 1) / ranges);
    });
  }
};

}  // namespace
