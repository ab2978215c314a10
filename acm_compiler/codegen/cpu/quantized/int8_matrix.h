// Weight matrices of int8: packed into panels, with the sums that zero points need; few rows read them where they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../products/kept.h"
#include "int8_rows.h"
#include "int8_tile.h"

namespace {

constexpr int64_t kFewByteRows = 16;  // so many rows at most are not worth a panel

// int32 [kByteRows, kPanelCols] sums of rows, and those of the weights
struct ByteSums {
  alignas(64) int32_t of[kByteRows * kPanelCols], weights[kPanelCols];

  // what a vector of a row's sums, of that row and part, stands for, but for the columns' scales
  Vec value(int64_t i, int64_t j, const ByteRows& rows, int64_t row, int64_t part) const {
    const Scaled& of_row = rows.scaled(row, part);
    const Ints whole = Ints::loadu(of + i * kPanelCols + j) - Ints(of_row.zero) * Ints::loadu(weights + j);
    return at::vec::convert<float>(whole) * Vec(of_row.scale);
  }
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

  PanelKey key() const { return {data, cols, depth, stride, 1, Layout::bytes}; }
  // lays panels and sums there
  void lay(void* to) { panels = static_cast<int32_t*>(to), sums = panels + padded() * words(); }

  void pack(int64_t strip) const {
    const int64_t first = strip * kPanelCols, width = std::min(kPanelCols, padded() - first);
    columns_packed.fetch_add(std::min(width, cols - first), std::memory_order_relaxed);
    for (int64_t col = first; col < first + width; col += kLanes) {
      Ints sum(0);
      for (int64_t d = 0; d < words(); d += kDeep / 4) sum = sum + pack_block(col, d, width, first);
      sum.store(sums + col);
    }
  }

  // rows [height] from that one on, of that part, times one strip of columns
  void multiply(const ByteRows& of, int64_t row, int64_t part, int64_t height, int64_t strip, bool tiles,
                ByteSums& to) const {
    const uint8_t* rows = of.at(row, part);
    const int64_t row_stride = of.stride();
    if (!panels) {
      for (int64_t i = 0; i < height; i += 4)
        (height == 1 ? multiply_few<1> : multiply_few<4>)(*this, rows + i * row_stride, row_stride, strip,
                                                          to.of + i * kPanelCols, to.weights);
      return;
    }
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

  // sums of the words of a vector for each of a vector of columns
  struct Columns {
    alignas(64) float words[kLanes * kLanes];

    void set(int64_t column, Word word) { Ints(word).store(words + column * kLanes); }
    Ints totals() const {
      alignas(64) float turned[kLanes * kLanes];
      at::vec::transpose_mxn<float, kLanes, kLanes>(words, kLanes, turned, kLanes);
      Ints total(0);
      for (int64_t i = 0; i < kLanes; i++) total = total + Ints::loadu(turned + i * kLanes);
      return total;
    }
  };

  // rows beyond those that count are there as memory
  template <int kRows>
  __attribute__((noinline)) static void multiply_few(const ByteMatrix& m, const uint8_t* rows, int64_t row_stride,
                                                     int64_t strip, int32_t* to, int32_t* to_weights) {
    for (int64_t first = strip * kPanelCols, at = 0; at < kPanelCols && first + at < m.cols; at += kLanes) {
      Columns of_rows[kRows], of_weights;
      for (int64_t j = 0; j < kLanes; j++) {
        Word sums[kRows], ones = all(0);
        for (Word& sum : sums) sum = all(0);
        const int8_t* column = m.data + std::min(first + at + j, m.cols - 1) * m.stride;
        m.each_words(column, [&](int64_t d, Word w) {
          ones = add_bytes(ones, all(0x01010101), w);
          for (int64_t i = 0; i < kRows; i++) sums[i] = add_bytes(sums[i], load_words(rows + i * row_stride + d), w);
        });
        of_weights.set(j, ones);
        for (int64_t i = 0; i < kRows; i++) of_rows[i].set(j, sums[i]);
      }
      of_weights.totals().store(to_weights + at);
      for (int64_t i = 0; i < kRows; i++) of_rows[i].totals().store(to + i * kPanelCols + at);
    }
  }

  // calls f(d, words) for the bytes of a column from d on, zeros behind its end
  template <typename F>
  void each_words(const int8_t* column, const F& f) const {
    constexpr int64_t kStep = 4 * kLanes;
    int64_t d = 0;
    for (; d + kStep <= depth; d += kStep) f(d, load_words(column + d));
    if (d == depth) return;
    alignas(64) int8_t last[kStep] = {};
    std::memcpy(last, column + d, depth - d);
    f(d, load_words(last));
  }
};

// What a call with int8 weights is made of.
struct Bytes {
  using Value = int8_t;
  using Matrix = ByteMatrix;
  using Rows = ByteRows;
  using Sums = ByteSums;
  static constexpr bool kReadsInPlace = true;
};

}  // namespace
