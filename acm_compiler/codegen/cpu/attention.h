// Attention of few tokens, without a mask of its own: y = softmax(scale q k^T) v for each sequence and each head. Torch's
// own kernel takes longer to prepare its products than such products take.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "products/share.h"
#include "products/vectors.h"

namespace {

// Shapes: S tokens of a sequence, D values of a head. Rows of q, k, v and y are tokens, `stride` apart.
struct AttentionHead {
  static constexpr int64_t kRows = 8;  // queries side by side: their sums do not wait for each other

  int64_t length, depth, stride;
  float scale;
  bool causal;

  int64_t keys() const { return round_up(length, kLanes); }
  int64_t columns() const { return round_up(depth, kLanes); }
  int64_t scratch() const { return depth * keys() + length * columns() + kRows * keys(); }

  // scores of kRows queries, the last one again where there are fewer, with all keys
  void score(const float* const* q, const float* turned, float* scores) const {
    for (int64_t j = 0; j < keys(); j += kLanes) {
      Vec sums[kRows];
      for (Vec& sum : sums) sum = Vec(0.f);
      for (int64_t d = 0; d < depth; d++) {
        const Vec key = Vec::loadu(turned + d * keys() + j);
        for (int64_t r = 0; r < kRows; r++) sums[r] = at::vec::fmadd(Vec(q[r][d]), key, sums[r]);
      }
      for (int64_t r = 0; r < kRows; r++) (sums[r] * Vec(scale)).store(scores + r * keys() + j);
    }
  }

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

  // y of kRows queries: weights of the first `seen` keys times rows of v, over the sums; the first `rows` are stored
  void sum_values(const float* weights, const float* sums, const float* values, int64_t seen, int64_t rows,
                  float* y) const {
    for (int64_t c = 0; c < columns(); c += kLanes) {
      Vec all[kRows];
      for (Vec& one : all) one = Vec(0.f);
      for (int64_t j = 0; j < seen; j++) {
        const Vec value = Vec::loadu(values + j * columns() + c);
        for (int64_t r = 0; r < kRows; r++) all[r] = at::vec::fmadd(Vec(weights[r * keys() + j]), value, all[r]);
      }
      const int64_t count = std::min(kLanes, depth - c);
      for (int64_t r = 0; r < rows; r++) (all[r] / Vec(sums[r])).store(y + r * stride + c, count);
    }
  }

  void run(const float* q, const float* k, const float* v, float* y, float* room) const {
    float *turned = room, *values = turned + depth * keys(), *scores = values + length * columns();
    std::fill(turned, values, 0.f);
    for (int64_t j = 0; j < length; j++) {
      for (int64_t d = 0; d < depth; d++) turned[d * keys() + j] = k[j * stride + d];
      std::fill(std::copy_n(v + j * stride, depth, values + j * columns()), values + (j + 1) * columns(), 0.f);
    }
    for (int64_t i = 0; i < length; i += kRows) {
      const int64_t rows = std::min(kRows, length - i);
      const float* queries[kRows];
      float sums[kRows];
      for (int64_t r = 0; r < kRows; r++) queries[r] = q + (i + std::min(r, rows - 1)) * stride;
      score(queries, turned, scores);
      const auto seen = [&](int64_t row) { return causal ? row + 1 : length; };
      for (int64_t r = 0; r < kRows; r++) sums[r] = weigh(scores + r * keys(), seen(i + std::min(r, rows - 1)));
      sum_values(scores, sums, values, seen(i + rows - 1), rows, y + i * stride);
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

}  // namespace
