// Tokens in order of how many learners they run, highest first, cut into chunks of equal work.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t kThreadRows = 192;  // with fewer rows per thread, threads share the products of one chunk instead

struct Sorted {
  int64_t tokens, learners;
  std::vector<int64_t> order;     // token of each sorted place
  std::vector<int64_t> at_least;  // [N + 2]: how many tokens run at least k learners

  // a counting sort; false when some k lies outside [0, N]
  template <typename K>
  bool sort(const K* k) {
    std::vector<int64_t> place(learners + 1, 0);
    for (int64_t t = 0; t < tokens; t++) {
      if (k[t] < 0 || k[t] > learners) return false;
      place[k[t]]++;
    }
    at_least.assign(learners + 2, 0);
    for (int64_t n = learners; n >= 0; n--) at_least[n] = at_least[n + 1] + place[n];
    for (int64_t n = 0; n <= learners; n++) place[n] = at_least[n + 1];
    order.resize(tokens);
    for (int64_t t = 0; t < tokens; t++) order[place[k[t]]++] = t;
    return true;
  }

  // how many learners the token at a sorted place runs
  int64_t k_at(int64_t place) const {
    int64_t k = learners;
    while (place >= at_least[k]) k--;
    return k;
  }

  // borders of chunks of equal work over the tokens with k >= 1, of about `rows` tokens and at most twice as many; of one
  // chunk where there are few tokens for each thread
  std::vector<int64_t> cut(int64_t rows) const {
    const int64_t busy = at_least[1], threads = at::get_num_threads();
    if (busy > 0 && busy < kThreadRows * threads) return {0, busy};
    int64_t work = 0, done = 0;
    for (int64_t k = 1; k <= learners; k++) work += at_least[k];
    const int64_t least = std::max<int64_t>(1, (busy + rows - 1) / rows);
    const int64_t count = (least + threads - 1) / threads * threads;
    std::vector<int64_t> cuts(1, 0);
    for (int64_t place = 0, k = learners; place < busy; place++) {
      while (place >= at_least[k]) k--;
      done += k;
      const bool full = place + 1 - cuts.back() >= 2 * rows;
      const bool share = done * count >= work * static_cast<int64_t>(cuts.size());
      if (share || full || place + 1 == busy) cuts.push_back(place + 1);
    }
    return cuts;
  }
};

}  // namespace
