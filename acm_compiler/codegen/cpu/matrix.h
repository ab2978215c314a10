// Weight matrices of products, and how panels of them are packed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "plan.h"
#include "vectors.h"

namespace {

// A weight matrix [cols, depth]: row j is a column of the product. Its depth may lie in pieces of equal length, piece p
// at data + p * piece_offset; `stride` from row to row. All counted in words.
template <typename T, bool kPairs>
struct Matrix {
  static constexpr int64_t kPerWord = kPairs ? 2 : 1;
  const T* data;
  int64_t cols, depth, stride, pieces = 1, piece_offset = 0;

  const float* words(int64_t col) const { return reinterpret_cast<const float*>(data) + col * stride; }

  // panel[to - from, width] = words [from, to) of columns [col, col + count), zeros beyond them
  void pack(int64_t col, int64_t count, int64_t width, int64_t from, int64_t to, float* panel) const {
    if (count < width)
      for (int64_t d = 0; d < to - from; d++) std::fill(panel + d * width + count, panel + (d + 1) * width, 0.f);
    const int64_t length = depth / pieces;
    for (int64_t p = from / length; p * length < to; p++) {
      const int64_t start = std::max(from, p * length), stop = std::min(to, (p + 1) * length);
      const T* source = data + (p * piece_offset + col * stride + start - p * length) * kPerWord;
      for (int64_t j = 0; j < count; j += kLanes)
        pack_columns(source + j * stride * kPerWord, std::min(kLanes, count - j), stop - start, width,
                     panel + (start - from) * width + j);
    }
  }

 private:
  void pack_columns(const T* source, int64_t count, int64_t length, int64_t width, float* panel) const {
    constexpr bool kConvert = !kPairs && !std::is_same_v<T, float>;
    float block[kConvert ? kLanes * kLanes : 1];
    for (int64_t d = 0; d < length; d += kLanes) {
      const int64_t depth = std::min(kLanes, length - d);
      const float* from = reinterpret_cast<const float*>(source) + d;
      int64_t from_stride = stride;
      if constexpr (kConvert) {
        for (int64_t j = 0; j < count; j++) at::vec::convert(source + j * stride + d, block + j * kLanes, depth);
        from = block, from_stride = kLanes;
      }
      float* to = panel + d * width;
      if (count < kLanes || depth < kLanes) at::vec::transpose_mxn<float>(from, from_stride, to, width, count, depth);
      else at::vec::transpose_mxn<float, kLanes, kLanes>(from, from_stride, to, width);
    }
  }
};

}  // namespace
