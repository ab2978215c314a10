// Weight matrices of products, and how panels of them are packed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kept.h"
#include "vectors.h"

namespace {

// A weight matrix [cols, depth]: row j is a column of the product. Its depth may lie in pieces of equal length, piece p
// at data + p * piece_offset; `stride` from row to row. All counted in words. `panel`: of all of it, or null.
template <typename T, bool kPairs>
struct Matrix {
  static constexpr int64_t kPerWord = kPairs ? 2 : 1;
  static constexpr Layout kLayout = kPairs ? Layout::pairs : std::is_same_v<T, float> ? Layout::floats : Layout::halves;
  const T* data;
  int64_t cols, depth, stride, pieces = 1, piece_offset = 0;
  float* panel = nullptr;

  const float* words(int64_t col) const { return reinterpret_cast<const float*>(data) + col * stride; }

  PanelKey key() const { return {data, cols, depth, stride, pieces, kLayout}; }
  int64_t packed_words() const { return round_up(cols, kLanes) * depth; }
  int64_t strips() const { return divide_up(cols, kLanes); }
  void lay(void* to) { panel = static_cast<float*>(to); }
  void pack(int64_t strip) const {
    const int64_t col = strip * kLanes;
    pack(col, std::min(kLanes, cols - col), 0, depth, panel + col * depth, depth);
  }

  // a panel of columns [col, col + count), `deep` words each, of which words [from, to) come first; zeros beyond them
  void pack(int64_t col, int64_t count, int64_t from, int64_t to, float* panel, int64_t deep) const {
    const int64_t length = depth / pieces;
    columns_packed.fetch_add(count, std::memory_order_relaxed);
    for (int64_t j = 0; j < count; j += kLanes, panel += deep * kLanes) {
      const int64_t some = std::min(kLanes, count - j);
      if (some < kLanes)
        for (int64_t d = 0; d < to - from; d++) std::fill(panel + d * kLanes + some, panel + (d + 1) * kLanes, 0.f);
      for (int64_t p = from / length; p * length < to; p++) {
        const int64_t start = std::max(from, p * length), stop = std::min(to, (p + 1) * length);
        const T* source = data + (p * piece_offset + (col + j) * stride + start - p * length) * kPerWord;
        pack_columns(source, some, stop - start, panel + (start - from) * kLanes);
      }
    }
  }

 private:
  void pack_columns(const T* source, int64_t count, int64_t length, float* panel) const {
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
      float* to = panel + d * kLanes;
      if (count < kLanes || depth < kLanes) at::vec::transpose_mxn<float>(from, from_stride, to, kLanes, count, depth);
      else at::vec::transpose_mxn<float, kLanes, kLanes>(from, from_stride, to, kLanes);
    }
  }
};

}  // namespace
