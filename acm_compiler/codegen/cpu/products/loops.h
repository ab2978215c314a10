// The inner loops of products: a tile of sums over the registers, and sums without panels for few rows.
//
// Everything here is 32-bit words: a float, or a pair of bfloat16 where the processor multiplies those (else bfloat16
// becomes floats as it is read).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "blocks.h"
#include "matrix.h"
#include "plan.h"
#include "vectors.h"

namespace {

// a tile's sums, one panel row and one broadcast fill the 32 (without AVX-512 on x86: 16) registers
#if defined(CPU_CAPABILITY_AVX2)
constexpr int64_t kTileVecs = 2;
#else
constexpr int64_t kTileVecs = 4;
#endif
constexpr int64_t kPanelCols = kTileVecs * kLanes;
constexpr int64_t kStretch = 384;  // words summed before they are added to what there is: short sums round less
constexpr int64_t kDotCols = 4;

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// sum + a b, of floats or, with kPairs, of pairs of bfloat16
template <bool kPairs>
inline Vec multiply_add(const Vec& a, const Vec& b, const Vec& sum) {
#if defined(__AVX512BF16__)
  const auto pairs = [](const Vec& words) { return (__m512bh)_mm512_castps_si512(words); };
  if constexpr (kPairs) return _mm512_dpbf16_ps(sum, pairs(a), pairs(b));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const auto pairs = [](const Vec& words) { return vreinterpretq_bf16_f32(words); };
  if constexpr (kPairs) return vbfdotq_f32(sum, pairs(a), pairs(b));
#endif
  return at::vec::fmadd(a, b, sum);
}

#if defined(ACM_BLOCKS)
// multiply_tile for two rows and more of pairs
template <int kRows, int kVecs>
void multiply_blocks(const float* const* rows, Panel panel, int64_t depth, bool resume, float* out) {
  Blocks<float32x4_t, kRows, kVecs> blocks;
  const int32_t *row[kRows], *strip[kVecs];
  for (int i = 0; i < kRows; i++) row[i] = reinterpret_cast<const int32_t*>(rows[i]);
  for (int j = 0; j < kVecs; j++) strip[j] = reinterpret_cast<const int32_t*>(panel.data) + j * panel.deep * kLanes;
  const auto at = [&](int j, int64_t d) { return vld1q_s32(strip[j] + d * kLanes); };
  for (int64_t from = 0; from < depth; from += kStretch) {
    const int64_t to = std::min(depth, from + kStretch);
    int64_t d = from;
    for (; d + 2 <= to; d += 2)
      blocks.add([&](int i) { return vld1_s32(row[i] + d); }, [&](int j, int w) { return at(j, d + w); });
    if (d < to)
      blocks.add([&](int i) { return vld1_lane_s32(row[i] + d, vdup_n_s32(0), 0); },
                 [&](int j, int w) { return w ? vdupq_n_s32(0) : at(j, d); });
    blocks.flush([&](int i, int j, float32x4_t sums) {
      float* place = out + (i * kVecs + j) * kLanes;
      vst1q_f32(place, resume ? vaddq_f32(vld1q_f32(place), sums) : sums);
    });
    resume = true;
  }
}
#endif

// out[kRows, kVecs * lanes] (+)= rows times so many strips of a panel, `depth` words of each
template <bool kPairs, int kRows, int kVecs>
void multiply_tile(const float* const* rows, Panel panel, int64_t depth, bool resume, float* out) {
#if defined(ACM_BLOCKS)
  if constexpr (kPairs && kRows > 1) return multiply_blocks<kRows, kVecs>(rows, panel, depth, resume, out);
#endif
  constexpr int64_t kWidth = kVecs * kLanes;
  Vec sums[kRows][kVecs];
  const float* row[kRows];
  for (int i = 0; i < kRows; i++) {
    row[i] = rows[i];
    for (int j = 0; j < kVecs; j++) sums[i][j] = Vec(0.f);
  }
  const auto flush = [&] {
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVecs; j++) {
        float* to = out + i * kWidth + j * kLanes;
        (resume ? Vec::loadu(to) + sums[i][j] : sums[i][j]).store(to);
        sums[i][j] = Vec(0.f);
      }
    resume = true;
  };
  for (int64_t from = 0; from < depth; from += kStretch) {
    const int64_t to = std::min(depth, from + kStretch);
    for (int64_t d = from; d < to; d++) {
      Vec w[kVecs];
      for (int j = 0; j < kVecs; j++) w[j] = Vec::loadu(panel.data + (j * panel.deep + d) * kLanes);
      for (int i = 0; i < kRows; i++) {
        const Vec a(row[i][d]);
        for (int j = 0; j < kVecs; j++) sums[i][j] = multiply_add<kPairs>(a, w[j], sums[i][j]);
      }
    }
    flush();
  }
}

// out[i * width + j] = rows[i] . columns[j], without a panel: for so few rows that transposing would not pay
template <bool kPairs, int kRows>
void multiply_dots(const float* const* rows, const float* const* columns, int64_t depth, int64_t width, float* out) {
  Vec sums[kRows][kDotCols];
  for (auto& row : sums) for (Vec& sum : row) sum = Vec(0.f);
  const auto step = [&](int64_t d, int64_t count) {
    Vec w[kDotCols];
    for (int j = 0; j < kDotCols; j++) w[j] = Vec::loadu(columns[j] + d, count);
    for (int i = 0; i < kRows; i++) {
      const Vec a = Vec::loadu(rows[i] + d, count);
      for (int j = 0; j < kDotCols; j++) sums[i][j] = multiply_add<kPairs>(a, w[j], sums[i][j]);
    }
  };
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) step(d, kLanes);
  if (d < depth) step(d, depth - d);
  const auto add = [](const Vec& a, const Vec& b) { return a + b; };
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kDotCols; j++) out[i * width + j] = at::vec::vec_reduce_all<float>(add, sums[i][j]);
}

template <bool kPairs>
struct Inner {
  using Tile = void (*)(const float* const*, Panel, int64_t, bool, float*);
  using Dots = void (*)(const float* const*, const float* const*, int64_t, int64_t, float*);

  template <std::size_t... kIndex>
  static constexpr auto tiles(std::index_sequence<kIndex...>) {
    return std::array<Tile, sizeof...(kIndex)>{
        &multiply_tile<kPairs, kIndex / kTileVecs + 1, kIndex % kTileVecs + 1>...};
  }
  template <std::size_t... kIndex>
  static constexpr auto dots_of(std::index_sequence<kIndex...>) {
    return std::array<Dots, sizeof...(kIndex)>{&multiply_dots<kPairs, kIndex + 1>...};
  }
  static Tile tile(int64_t rows, int64_t vecs) {
    static constexpr auto all = tiles(std::make_index_sequence<kTileRows * kTileVecs>());
    return all[(rows - 1) * kTileVecs + vecs - 1];
  }
  static Dots dots(int64_t rows) {
    static constexpr auto all = dots_of(std::make_index_sequence<kTileRows>());
    return all[rows - 1];
  }
};

}  // namespace
