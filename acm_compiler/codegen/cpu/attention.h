// Attention without a mask of its own: y = softmax(scale q k^T) v for each sequence and each head. Of few tokens in
// float, where torch's own kernel takes longer to prepare its products than they take; and with products of pairs of
// bfloat16 by tiles, for which operands are converted where they are packed.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "products/loops.h"
#include "products/share.h"
#include "products/tiles.h"
#include "products/vectors.h"

namespace {

// Shapes: S tokens of a sequence, D values of a head. Rows of q, k, v and y are tokens, `stride` apart.
struct AttentionHead {
  int64_t length, depth, stride;
  float scale;
  bool causal;

  int64_t keys() const { return round_up(length, kLanes); }
  int64_t columns() const { return round_up(depth, kLanes); }
  int64_t scratch() const { return depth * keys() + length * columns() + kTileRows * (keys() + kPanelCols); }

  // scores of the first `seen` keys -> weights, not yet divided by their sum, which is the result; zeros beyond them.
  // NaN where a score is NaN or infinite, as the division of infinities by each other would be
  float weigh(float* scores, int64_t seen) const {
    const auto at = [&](int64_t j, float beyond) ACM_INLINED {
      const Vec v = Vec::loadu(scores + j);
      return seen - j < kLanes ? Vec::set(Vec(beyond), v, seen - j) : v;
    };
    Vec highest = at(0, -std::numeric_limits<float>::infinity()), sum(0.f);
    for (int64_t j = kLanes; j < seen; j += kLanes)
      highest = at::vec::maximum(highest, at(j, -std::numeric_limits<float>::infinity()));
    const float most = at::vec::vec_reduce_all<float>(
        [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }, highest);
    if (!std::isfinite(most)) return std::numeric_limits<float>::quiet_NaN();
    int64_t j = 0;
    for (; j < seen; j += kLanes) {
      const Vec weights = (at(j, most) - Vec(most)).exp_u20();
      const Vec kept = seen - j < kLanes ? Vec::set(Vec(0.f), weights, seen - j) : weights;
      kept.store(scores + j), sum = sum + kept;
    }
    for (; j < keys(); j += kLanes) Vec(0.f).store(scores + j);
    return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, sum);
  }

  // rows of so many words times `cols` columns of a panel; `finish(row, col, sums)` gets each vector of the products
  template <typename Finish>
  void multiply(const float* const* rows, int64_t height, Panel panel, int64_t words, int64_t cols, float* tile,
                const Finish& finish) const {
    for (int64_t col = 0; col < cols; col += kPanelCols) {
      const int64_t width = std::min(kPanelCols, cols - col);
      Inner<false>::tile(height, width / kLanes)(rows, panel.from(col, 0), words, false, tile);
      for (int64_t r = 0; r < height; r++)
        for (int64_t j = 0; j < width; j += kLanes) finish(r, col + j, Vec::loadu(tile + r * width + j));
    }
  }

  void run(const float* q, const float* k, const float* v, float* y, float* room) const {
    float *turned = room, *values = turned + depth * keys(), *scores = values + length * columns();
    float* tile = scores + kTileRows * keys();
    Matrix<float, false>{k, length, depth, stride}.pack(0, length, 0, depth, turned, depth);
    for (int64_t c = 0; c < columns(); c += kLanes)
      for (int64_t j = 0; j < length; j++)
        Vec::loadu(v + j * stride + c, std::min(kLanes, depth - c)).store(values + c * length + j * kLanes);
    for (int64_t i = 0; i < length; i += kTileRows) {
      const int64_t rows = std::min(kTileRows, length - i);
      const auto seen = [&](int64_t row) { return causal ? i + row + 1 : length; };
      const float *queries[kTileRows], *weights[kTileRows];
      float sums[kTileRows];
      for (int64_t r = 0; r < rows; r++) queries[r] = q + (i + r) * stride, weights[r] = scores + r * keys();
      multiply(queries, rows, {turned, depth}, depth, round_up(seen(rows - 1), kLanes), tile,
               [&](int64_t r, int64_t j, const Vec& dot) { (dot * Vec(scale)).store(scores + r * keys() + j); });
      for (int64_t r = 0; r < rows; r++) sums[r] = weigh(scores + r * keys(), seen(r));
      multiply(weights, rows, {values, length}, seen(rows - 1), columns(), tile, [&](int64_t r, int64_t c, const Vec& all) {
        (all / Vec(sums[r])).store(y + (i + r) * stride + c, std::min(kLanes, depth - c));
      });
    }
  }
};

// q, k, v [T, heads * D] of sequences of so many tokens, one after the other
inline at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t heads, int64_t length,
                            bool causal, double scale) {
  for (const auto* t : {&q, &k, &v})
    TORCH_CHECK(t->scalar_type() == at::kFloat && t->dim() == 2 && t->sizes().equals(q.sizes()) && t->is_contiguous(),
                "q, k and v of an attention must be contiguous float32 of one shape [T, heads * D]");
  const int64_t tokens = q.size(0), width = q.size(1);
  TORCH_CHECK(heads > 0 && length > 0 && width % heads == 0 && tokens % length == 0, "q of an attention must have whole "
              "heads and sequences, got ", q.sizes(), " for ", heads, " heads and ", length, " tokens each");
  at::Tensor y = at::empty(q.sizes(), q.options());
  const AttentionHead head{length, width / heads, width, static_cast<float>(scale), causal};
  const int64_t work = length * length * head.depth * 2;
  at::parallel_for(0, tokens / length * heads, std::max<int64_t>(1, kLeastWork / work), [&](int64_t from, int64_t to) {
    static thread_local Memory kept;
    float* room = kept.grown<float>(head.scratch());
    for (int64_t i = from; i < to; i++) {
      const int64_t start = i / heads * length * width + i % heads * head.depth;
      head.run(q.const_data_ptr<float>() + start, k.const_data_ptr<float>() + start, v.const_data_ptr<float>() + start,
               y.mutable_data_ptr<float>() + start, room);
    }
    kept.end_call();
  });
  return y;
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
// Shapes as above, D a multiple of 32. Operands are rounded to bfloat16, the softmax's weights too, which are made for
// kTileGroup queries at a time; sums are floats.
struct TiledHead {
  int64_t length, depth;
  float scale;
  bool causal;

  int64_t keys() const { return round_up(length, kTileGroup); }
  int64_t words() const { return depth / 2; }
  int64_t scratch() const { return keys() * depth + kTileGroup * (words() + keys() + keys() / 2 + depth); }

  // 32 floats, each times a factor, as 16 pairs
  static void store_pairs(const float* from, float factor, float* to) {
    const Vec low = Vec::loadu(from) * Vec(factor), high = Vec::loadu(from + kLanes) * Vec(factor);
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }

  // keys as strips of 16, [words, 16] each; zeros behind the last one
  void turn_keys(const float* k, int64_t stride, float* to) const {
    alignas(64) float block[kTileSide * kTileSide];
    for (int64_t key = 0; key < keys(); key += kTileSide)
      for (int64_t d = 0; d < words(); d += kTileSide) {
        for (int64_t j = 0; j < kTileSide; j++)
          if (key + j < length) store_pairs(k + (key + j) * stride + 2 * d, 1.f, block + j * kTileSide);
          else std::fill_n(block + j * kTileSide, kTileSide, 0.f);
        at::vec::transpose_mxn<float, kLanes, kLanes>(block, kTileSide, to + key * words() + d * kTileSide, kTileSide);
      }
  }

  // columns of values as strips of 16, [keys / 2, 16] each: of two keys a pair
  void pair_values(const float* v, int64_t stride, float* to) const {
    const auto halves = [&](int64_t key, int64_t col) {
      if (key >= length) return _mm512_setzero_si512();
      return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(Vec::loadu(v + key * stride + col)));
    };
    for (int64_t col = 0; col < depth; col += kTileSide)
      for (int64_t key = 0; key < keys(); key += 2, to += kTileSide)
        _mm512_storeu_si512(to, _mm512_or_si512(halves(key, col), _mm512_slli_epi32(halves(key + 1, col), 16)));
  }

  // strides: from row to row of q, k, v and y
  void run(const float* q, const float* k, const float* v, float* y, const int64_t* strides, float* room) const {
    float *turned = room, *values = turned + keys() * words(), *queries = values + keys() * words();
    float *scores = queries + kTileGroup * words(), *weights = scores + kTileGroup * keys();
    float* sums = weights + kTileGroup * keys() / 2;
    turn_keys(k, strides[1], turned), pair_values(v, strides[2], values);
    for (int64_t i = 0; i < length; i += kTileGroup) {
      const int64_t rows = std::min(kTileGroup, length - i), most = causal ? i + kTileGroup : keys();
      for (int64_t r = 0; r < kTileGroup; r++)  // the last one again where there are fewer
        for (int64_t d = 0; d < words(); d += kTileSide)
          store_pairs(q + (i + std::min(r, rows - 1)) * strides[0] + 2 * d, scale, queries + r * words() + d);
      multiply_by_tiles({queries, words()}, kTileGroup, {turned, words()}, most, words(), false, scores, keys());
      const AttentionHead softmax{most, depth, 0, scale, causal};
      float whole[kTileGroup];
      for (int64_t r = 0; r < kTileGroup; r++) {
        const int64_t row = i + std::min(r, rows - 1);
        whole[r] = softmax.weigh(scores + r * keys(), causal ? row + 1 : length);
        for (int64_t j = 0; j < most; j += 2 * kTileSide)
          store_pairs(scores + r * keys() + j, 1.f, weights + (r * keys() + j) / 2);
      }
      multiply_by_tiles({weights, keys() / 2}, kTileGroup, {values, keys() / 2}, depth, most / 2, false, sums, depth);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < depth; d += kLanes)
          (Vec::loadu(sums + r * depth + d) / Vec(whole[r])).store(y + (i + r) * strides[3] + d);
    }
  }
};
#endif

// q, k, v and y [B, H, S, D] in float32, y as [B, S, H, D] lies; products in bfloat16. Torch's own where tiles cannot
inline at::Tensor attention_in_pairs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                                     bool causal) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  bool fits = has_tiles() && q.dim() == 4 && q.numel() && q.size(3) % kTileGroup == 0;
  for (const auto* t : {&q, &k, &v})
    fits = fits && t->scalar_type() == at::kFloat && t->sizes().equals(q.sizes()) && t->stride(3) == 1;
  if (fits) {
    const int64_t heads = q.size(1), length = q.size(2), depth = q.size(3);
    const at::Tensor y = at::empty({q.size(0), length, heads, depth}, q.options()).transpose(1, 2);
    const int64_t strides[] = {q.stride(2), k.stride(2), v.stride(2), y.stride(2)};
    const TiledHead head{length, depth, static_cast<float>(scale), causal};
    const int64_t least = std::max<int64_t>(1, kLeastWork / (length * length * depth));
    at::parallel_for(0, q.size(0) * heads, least, [&](int64_t from, int64_t to) {
      static thread_local Memory kept;
      float* room = kept.grown<float>(head.scratch());
      const Tiles held(true);
      for (int64_t i = from; i < to; i++) {
        const auto start = [&](const at::Tensor& t) { return i / heads * t.stride(0) + i % heads * t.stride(1); };
        head.run(q.const_data_ptr<float>() + start(q), k.const_data_ptr<float>() + start(k),
                 v.const_data_ptr<float>() + start(v), y.mutable_data_ptr<float>() + start(y), strides, room);
      }
      kept.end_call();
    });
    return y;
  }
#endif
  const auto half = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
  const at::Tensor y = at::scaled_dot_product_attention(half(q), half(k), half(v), {}, 0., causal, scale);
  return y.to(at::kFloat).transpose(1, 2).contiguous().transpose(1, 2);
}

}  // namespace
