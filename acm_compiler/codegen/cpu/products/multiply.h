// Products that do not wait for each other, run by one thread or shared by all.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "products.h"

namespace {

// by one thread, strip by strip
template <typename P, typename Run>
void multiply_alone(const std::vector<P>& products, std::vector<Job>& jobs, const Run& run) {
  for (size_t j = 0; j < jobs.size(); j++) {
    const int64_t cols = jobs[j].cols, width = jobs[j].width(jobs[j].widest);
    Piece piece{static_cast<int64_t>(j), 0, 0, std::move(jobs[j].spans)};
    for (; piece.col < cols; piece.col += width) {
      piece.count = std::min(width, cols - piece.col);
      run(products[j], piece);
    }
  }
}

// The largest products come first. `run(product, piece)` runs one piece of one of them.
template <typename P, typename Run>
void multiply(const std::vector<P>& products, const Run& run) {
  std::vector<Job> jobs;
  int64_t work = 0;
  for (const auto& product : products) work += jobs.emplace_back(product.job()).work();
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), work / kLeastWork);
  const bool alone = threads <= 1;
  const Plan made = alone ? Plan() : plan(jobs, threads);
  if (watched) return note(alone ? std::vector<int64_t>{work} : made.work);
  if (alone) return multiply_alone(products, jobs, run);
  share_out(made.items(), [&](int64_t item) {
    for (int64_t p = item ? made.stops[item - 1] : 0; p < made.stops[item]; p++)
      run(products[made.pieces[p].job], made.pieces[p]);
  });
}

}  // namespace
