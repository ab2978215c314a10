// Products that do not wait for each other, run by one thread or shared by all.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "products.h"

namespace {

// by one thread, strip by strip
template <typename T, bool kPairs, typename Run>
void multiply_alone(const std::vector<Product<T, kPairs>>& products, std::vector<Job>& jobs, const Run& run) {
  for (size_t j = 0; j < jobs.size(); j++) {
    const int64_t cols = jobs[j].cols, width = jobs[j].width(jobs[j].widest);
    Piece piece{static_cast<int64_t>(j), 0, 0, std::move(jobs[j].spans), false};
    for (; piece.col < cols; piece.col += width) {
      piece.count = std::min(width, cols - piece.col);
      run(products[j], piece, nullptr);
    }
  }
}

// The panel that each piece reads, null where that is its own business. Of a strip that several pieces share it is made
// here, once; behind it lies that of the `second` matrix.
template <typename T, bool kPairs>
std::vector<const float*> shared_panels(const std::vector<Product<T, kPairs>>& products,
                                        const std::vector<Piece>& pieces, const T* second, Memory& memory) {
  struct Block { int64_t piece, number, matrix; };
  std::vector<Block> blocks;
  std::vector<int64_t> starts(pieces.size(), -1);
  int64_t words = 0;
  for (size_t p = 0; p < pieces.size(); p++) {
    const auto& [job, col, count, spans, shares] = pieces[p];
    if (!shares || !products[job].can_share_panels()) continue;
    const bool known = p > 0 && pieces[p - 1].job == job && pieces[p - 1].col == col;
    starts[p] = known ? starts[p - 1] : words;
    for (int64_t m = 0; m < (second ? 2 : 1) && !known; m++, words += products[job].panel_words(count))
      for (int64_t b = 0; b < products[job].panel_blocks(); b++) blocks.push_back({static_cast<int64_t>(p), b, m});
  }
  float* panels = memory.grown<float>(words);
  share_out(blocks.size(), [&](int64_t i) {
    const Piece& piece = pieces[blocks[i].piece];
    Product<T, kPairs> product = products[piece.job];
    if (blocks[i].matrix) product.matrix.data = second;
    float* panel = panels + starts[blocks[i].piece] + blocks[i].matrix * product.panel_words(piece.count);
    product.pack_block(piece.col, piece.count, blocks[i].number, panel);
  });
  std::vector<const float*> of(pieces.size());
  for (size_t p = 0; p < pieces.size(); p++) of[p] = starts[p] < 0 ? nullptr : panels + starts[p];
  return of;
}

// The largest products come first. `run(product, piece, panel)` runs one piece of one of them, and that of the `second`
// matrix, if there is one, which is as large as the products' own.
template <typename T, bool kPairs, typename Run>
void multiply(const std::vector<Product<T, kPairs>>& products, const T* second, const Run& run) {
  static thread_local Memory memory;
  std::vector<Job> jobs;
  int64_t work = 0;
  for (const auto& product : products) work += jobs.emplace_back(product.job()).work();
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), work / kLeastWork);
  const bool alone = threads <= 1;
  const Plan made = alone ? Plan() : plan(jobs, threads);
  if (watched) return note(alone ? std::vector<int64_t>{work} : made.work);
  if (alone) return multiply_alone(products, jobs, run);
  const auto panels = shared_panels(products, made.pieces, second, memory);
  share_out(made.items(), [&](int64_t item) {
    for (int64_t p = item ? made.stops[item - 1] : 0; p < made.stops[item]; p++)
      run(products[made.pieces[p].job], made.pieces[p], panels[p]);
  });
  memory.end_call();
}

}  // namespace
