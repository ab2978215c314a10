// Weight matrices of int8: packed into panels, with the sums that zero points need; few rows read them where they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "int8_tile.h"

namespace {

constexpr int64_t kFewByteRows = 4;  // so many rows at most are not worth a panel

// int32 [kByteRows, kPanelCols] sums of rows, and those of the weights
struct ByteSums {
  alignas(64) int32_t of[kByteRows * kPanelCols], weights[kPanelCols];
};

// [cols, depth] bytes, row j a column of the product; `stride` from row to row
struct ByteMatrix {
  const int8_t* data;
  int64_t cols, depth, stride;
  int32_t *panels = nullptr, *sums = nullptr;  // null: there are none

  int64_t words() const { return deep(depth) / 4; }
  int64_t padded() const { return round_up(cols, kLanes); }
  int64_t strips() const { return divide_up(cols, kPanelCols); }
  int64_t packed_words() const { return padded() * (words() + 1); }

  // lays panels and sums there, not yet made
  void lay(int32_t* to) { panels = to, sums = to + padded() * words(); }

  void pack(int64_t strip) const {
    const int64_t first = strip * kPanelCols, width = std::min(kPanelCols, padded() - first);
    for (int64_t col = first; col < first + width; col += kLanes) {
      Ints sum(0);
      for (int64_t d = 0; d < words(); d += kDeep / 4) sum = sum + pack_block(col, d, width, first);
      sum.store(sums + col);
    }
  }

  // rows [height] times one strip of columns
  void multiply(const uint8_t* rows, int64_t row_stride, int64_t height, int64_t strip, bool tiles, ByteSums& to) const {
    if (!panels) return multiply_few(rows, row_stride, height, strip, to);
    const int64_t first = strip * kPanelCols, width = std::min(kPanelCols, padded() - first);
    const int32_t* panel = panels + first * words();
    std::copy_n(sums + first, width, to.weights);
    if (tiles) return multiply_by_tiles(rows, row_stride, height, panel, width, words(), to.of);
    for (int64_t i = 0; i < height; i += kTileRows)
      byte_tile(std::min(kTileRows, height - i), width / kLanes)(rows + i * row_stride, row_stride, panel, words(),
                                                                 to.of + i * kPanelCols);
  }

 private:
  // words [d, d + 16) of a vector of columns; gives the sums of their bytes
  Ints pack_block(int64_t col, int64_t d, int64_t width, int64_t first) const {
    constexpr int64_t kWords = kDeep / 4;
    alignas(64) float block[kLanes * kWords], turned[kWords * kLanes];
    const int64_t count = std::min(kLanes, cols - col), bytes = std::min(kDeep, depth - 4 * d);
    if (count < kLanes || bytes < kDeep) std::memset(block, 0, sizeof(block));
    for (int64_t j = 0; j < count; j++) std::memcpy(block + j * kWords, data + (col + j) * stride + 4 * d, bytes);
    for (int64_t w = 0; w < kWords; w += kLanes)
      at::vec::transpose_mxn<float, kLanes, kLanes>(block + w, kWords, turned + w * kLanes, kLanes);
    Word sum = all(0);
    for (int64_t w = 0; w < kWords; w++) {
      const Word word = load_words(turned + w * kLanes);
      sum = add_bytes(sum, all(0x01010101), word);
      Ints(word).store(panels + first * words() + (d + w) * width + col - first);
    }
    return sum;
  }

  __attribute__((noinline)) void multiply_few(const uint8_t* rows, int64_t row_stride, int64_t height, int64_t strip,
                                              ByteSums& to) const {
    const auto total = [](const Ints& v) {
      return at::vec::vec_reduce_all<int32_t>([](const Ints& a, const Ints& b) { return a + b; }, v);
    };
    constexpr int64_t kStep = 4 * kLanes;
    for (int64_t j = strip * kPanelCols, to_col = 0; to_col < kPanelCols && j < cols; j++, to_col++) {
      Word sums[kFewByteRows], of_weights = all(0);
      for (Word& sum : sums) sum = all(0);
      const int8_t* column = data + j * stride;
      for (int64_t d = 0; d < depth; d += kStep) {
        alignas(64) int8_t last[kStep] = {};
        const bool whole = d + kStep <= depth;
        if (!whole) std::memcpy(last, column + d, depth - d);
        const Word w = load_words(whole ? column + d : last);
        of_weights = add_bytes(of_weights, all(0x01010101), w);
        for (int64_t i = 0; i < height; i++) sums[i] = add_bytes(sums[i], load_words(rows + i * row_stride + d), w);
      }
      to.weights[to_col] = total(of_weights);
      for (int64_t i = 0; i < height; i++) to.of[i * kPanelCols + to_col] = total(sums[i]);
    }
  }
};

}  // namespace
