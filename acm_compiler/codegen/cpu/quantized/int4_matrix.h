// Weight matrices of 4-bit values, packed into panels, and rows of activations that are rounded by group.
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "int4_tile.h"
#include "int8_matrix.h"
#include "int8_rows.h"

namespace {

struct GroupedRows;

// float [kByteRows, kPanelCols] sums of rows
struct NibbleSums {
  alignas(64) float of[kByteRows * kPanelCols];

  // what a vector of a row's sums stands for
  Vec value(int64_t i, int64_t j, const GroupedRows&, int64_t, int64_t) const {
    return Vec::loadu(of + i * kPanelCols + j);
  }
};

// Rows in equal parts, each rounded by group.
struct GroupedRows {
  int64_t parts, depth;
  int8_t* data = nullptr;
  float* numbers = nullptr;  // of each part the groups' scales, then their sums

  int64_t groups() const { return groups_of(depth); }
  int64_t bytes(int64_t rows) const { return rows * parts * groups() * (kGroup + 2 * sizeof(float)); }
  void lay(uint8_t* room, int64_t rows) {
    data = reinterpret_cast<int8_t*>(room);
    numbers = reinterpret_cast<float*>(room + rows * parts * groups() * kGroup);
  }

  // that part of a row
  GroupedRow at(int64_t row, int64_t part) const {
    const int64_t place = (row * parts + part) * groups();
    return {data + place * kGroup, numbers + 2 * place, numbers + 2 * place + groups()};
  }

  template <typename T>
  void quantise(const T* from, int64_t row, int64_t part) const {
    const int64_t place = (row * parts + part) * groups();
    for (int64_t g = 0; g < groups(); g++) {
      const auto [scale, sum] = round_group(from + g * kGroup, std::min(kGroup, depth - g * kGroup),
                                            data + (place + g) * kGroup);
      numbers[2 * place + g] = scale, numbers[2 * place + groups() + g] = sum;
    }
  }

 private:
  // its bytes; gives its scale and the sum of what they stand for, both nan if one value is not finite
  template <typename T>
  static std::array<float, 2> round_group(const T* from, int64_t count, int8_t* to) {
    constexpr int64_t kVecs = kGroup / kLanes;
    Vec values[kVecs], most(0.f);
    for (int64_t v = 0; v < kVecs; v++) {
      values[v] = v * kLanes < count ? load(from + v * kLanes, std::min(kLanes, count - v * kLanes)) : Vec(0.f);
      most = at::vec::maximum(most, values[v].abs());
    }
    const auto larger = [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); };
    const float scale = at::vec::vec_reduce_all<float>(larger, most) / 127.f;
    if (!(scale >= kLeastScale) || std::isinf(scale)) {
      std::memset(to, 0, kGroup);
      const float none = std::isfinite(scale) ? 0.f : std::numeric_limits<float>::quiet_NaN();
      return {none, none};
    }
    const Vec inverse(1.f / scale);
    int32_t q[kGroup], sum = 0;
    for (int64_t v = 0; v < kVecs; v++) at::vec::convert<int32_t>((values[v] * inverse).round()).store(q + v * kLanes);
    for (int64_t j = 0; j < kGroup; j++) sum += q[j];
    for (int64_t j = 0; j < kGroup; j++) to[j / 8 * 8 + j % 2 * 4 + j % 8 / 2] = static_cast<int8_t>(q[j]);
    return {scale, scale * static_cast<float>(sum)};
  }
};

// [cols, depth] values, row j a column of the product, two in a byte; `stride` bytes and `scale_stride` numbers from row
// to row
struct NibbleMatrix {
  const uint8_t* data;
  const at::Half* scales;
  int64_t cols, depth, stride, scale_stride;
  uint8_t* panels = nullptr;  // null: there are none

  int64_t padded() const { return round_up(cols, kLanes); }
  int64_t strips() const { return divide_up(cols, kPanelCols); }
  int64_t vector_bytes() const { return groups_of(depth) * kBlockBytes; }  // of one vector of columns
  int64_t packed_words() const { return padded() / kLanes * vector_bytes() / 4; }

  PanelKey key() const { return {data, cols, depth, stride, 1, Layout::nibbles}; }
  void lay(void* to) { panels = static_cast<uint8_t*>(to); }

  void pack(int64_t strip) const {
    const int64_t first = strip * kPanelCols, stop = std::min(first + kPanelCols, padded());
    columns_packed.fetch_add(std::min(stop, cols) - first, std::memory_order_relaxed);
    for (int64_t col = first; col < stop; col += kLanes)
      for (int64_t g = 0; g < groups_of(depth); g++)
        pack_block(col, g, panels + col / kLanes * vector_bytes() + g * kBlockBytes);
  }

  // rows [height] from that one on, of that part, times one strip of columns
  void multiply(const GroupedRows& rows, int64_t row, int64_t part, int64_t height, int64_t strip, bool,
                NibbleSums& to) const {
    const int64_t first = strip * kPanelCols, stop = std::min(first + kPanelCols, padded());
    for (int64_t i = 0; i < height; i += kNibbleRows) {
      const int64_t count = std::min<int64_t>(kNibbleRows, height - i);
      GroupedRow some[kNibbleRows];
      for (int64_t r = 0; r < count; r++) some[r] = rows.at(row + i + r, part);
      for (int64_t col = first; col < stop;) {
        const bool two = count == 1 && col + 2 * kLanes <= stop;
        nibble_tile(count, two)(some, groups_of(depth), panels + col / kLanes * vector_bytes(), vector_bytes(),
                                to.of + i * kPanelCols + col - first);
        col += two ? 2 * kLanes : kLanes;
      }
    }
  }

 private:
  void pack_block(int64_t col, int64_t g, uint8_t* to) const {
    const int64_t count = std::min(kLanes, cols - col), bytes = std::min(kGroup, depth - g * kGroup) / 2;
    std::memset(to, 0, kBlockBytes);
    uint8_t* numbers = to + kBlockWords * 4 * kLanes;
    for (int64_t j = 0; j < count; j++) {
      uint8_t group[kGroup / 2] = {};
      std::memcpy(group, data + (col + j) * stride + g * kGroup / 2, bytes);
      for (int64_t w = 0; w < kBlockWords; w++) std::memcpy(to + (w * kLanes + j) * 4, group + 4 * w, 4);
      const at::Half* of = scales + (col + j) * scale_stride + 2 * g;
      std::memcpy(numbers + 2 * j, of, 2), std::memcpy(numbers + 2 * (kLanes + j), of + 1, 2);
    }
  }
};

// What a call with 4-bit weights is made of.
struct Nibbles {
  using Value = uint8_t;
  using Matrix = NibbleMatrix;
  using Rows = GroupedRows;
  using Sums = NibbleSums;
  static constexpr bool kReadsInPlace = false;
};

}  // namespace
