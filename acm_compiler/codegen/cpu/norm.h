// LayerNorm, or RMSNorm, of single rows: what gate and learners read where a norm belongs to the operator.
//
// Sums are of distances from a value of the row, so that rows far from zero lose no digits; from their mean in a second
// pass where that value is far from it. All in float; a normalised value is rounded to the type of the tokens, as that
// of a norm by itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "products/vectors.h"

namespace {

constexpr float kNear = 8;  // how far from the mean, in variances, the first value may lie

// y = (x - mean) * scale - rest: `rest` is what the rounded mean is off by, scaled
struct Moments { float mean, scale, rest; };

// The norm of a call, and the moments of its tokens, which the gate finds and the learners use again.
struct Norm {
  at::Tensor weight, bias;  // [D] of the tokens' type, contiguous, or undefined
  float eps;
  bool centred;  // false: RMSNorm, whose mean counts as 0
  std::vector<Moments> moments;

  template <typename T>
  static const T* data_of(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<T>() : nullptr; }
};

inline float sum_of(const Vec* four) {
  const auto add = [](const Vec& a, const Vec& b) { return a + b; };
  return at::vec::vec_reduce_all<float>(add, (four[0] + four[1]) + (four[2] + four[3]));
}

struct Sums { float sum, squares; };

// of x - shift
template <typename T>
Sums sums_of(const T* row, int64_t features, float shift) {
  Vec sums[4] = {Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)}, squares[4] = {Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)};
  const auto take = [&](int64_t j, int i) {
    const Vec d = load(row + j, kLanes) - Vec(shift);
    sums[i] = sums[i] + d, squares[i] = at::vec::fmadd(d, d, squares[i]);
  };
  int64_t j = 0;
  for (; j + 4 * kLanes <= features; j += 4 * kLanes)
    for (int i = 0; i < 4; i++) take(j + i * kLanes, i);
  for (; j + kLanes <= features; j += kLanes) take(j, 0);
  Sums all{sum_of(sums), sum_of(squares)};
  for (; j < features; j++) {
    const float d = static_cast<float>(row[j]) - shift;
    all.sum += d, all.squares += d * d;
  }
  return all;
}

template <typename T>
Moments moments_of(const T* row, int64_t features, float eps, bool centred) {
  if (!centred) return {0.f, 1.f / std::sqrt(sums_of(row, features, 0.f).squares / features + eps), 0.f};
  float shift = features ? static_cast<float>(row[0]) : 0.f, off = 0.f, variance = 0.f;
  for (int pass = 0; pass < 2; pass++) {
    const Sums s = sums_of(row, features, shift += off);
    off = s.sum / features, variance = s.squares / features - off * off;
    if (!(off * off > kNear * variance)) break;
  }
  const float mean = shift + off, scale = 1.f / std::sqrt(std::max(variance, 0.f) + eps);
  return {mean, scale, ((shift - mean) + off) * scale};
}

template <typename T>
void normalise(const T* row, const Moments& m, int64_t features, const T* weight, const T* bias, T* to) {
  const Vec mean(m.mean), scale(m.scale), rest(m.rest);
  each_vector(features, [&](int64_t j, auto count) ACM_INLINED {
    Vec v = at::vec::fmsub(load(row + j, count) - mean, scale, rest);
    if (weight) v = v * load(weight + j, count);
    if (bias) v = v + load(bias + j, count);
    store(v, to + j, count);
  });
}

}  // namespace
