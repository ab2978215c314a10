// acm::gate on the CPU: from the tokens straight to how many learners each of them runs.
//
// Shapes: T tokens, D in, G hidden width of the gate, C = N - k_min + 1 choices. Everything is computed in float.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "cpu_activations.h"

#define ACM_GATE_SCHEMA                                                                                         \
  "(Tensor x, Tensor w_inner, Tensor b_inner, Tensor w_outer, Tensor b_outer, Tensor knob, Tensor k_lo, "       \
  "Tensor k_hi, *, float cost, int k_min, str rule) -> Tensor"

namespace {

struct GateCall {
  static constexpr int64_t kRows = 8;  // tokens that share every load of a weight
  int64_t d_in, width, padded, choices, k_min, k_lo, k_hi;
  bool damage;
  float knob;
  std::vector<float> w_inner;  // [D, G], rows padded with zeros to whole vectors
  std::vector<float> b_inner, w_outer, b_outer;  // [G], [G, C], [C]
  std::vector<float> cost;                       // c_k of the choices; for damages knob + log c_k

  // h[rows, G] = gelu(w_inner x + b_inner) for up to kRows tokens
  void inner(const float* x, int64_t stride, int64_t rows, float* h) const {
    for (int64_t g = 0; g < padded; g += Vec::size()) {
      Vec sums[kRows];
      for (auto& sum : sums) sum = Vec::loadu(b_inner.data() + g);
      const float* row[kRows];
      for (int64_t r = 0; r < kRows; r++) row[r] = x + std::min(r, rows - 1) * stride;
      for (int64_t d = 0; d < d_in; d++) {
        const Vec w = Vec::loadu(w_inner.data() + d * padded + g);
        for (int64_t r = 0; r < kRows; r++) sums[r] = at::vec::fmadd(Vec(row[r][d]), w, sums[r]);
      }
      with_act(Act::gelu, [&](const auto& f) {
        for (int64_t r = 0; r < rows; r++) f(sums[r]).store(h + r * padded + g);
      });
    }
  }

  float utility(float score, int64_t c) const {
    if (!damage) return score - cost[c];
    const float high = std::max(score, cost[c]), low = std::min(score, cost[c]);
    if (std::isnan(score) || std::isinf(high)) return -(std::isnan(score) ? score : high);
    return -(high + std::log1p(std::exp(low - high)));
  }

  // argmax of the utilities over the allowed choices, ties to the smaller k; a NaN wins, as in torch
  int32_t choose(const float* h, float* scores) const {
    std::copy(b_outer.begin(), b_outer.end(), scores);
    for (int64_t g = 0; g < width; g++)
      for (int64_t c = 0; c < choices; c++) scores[c] += h[g] * w_outer[g * choices + c];
    int64_t best = 0;
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t c = std::max<int64_t>(0, k_lo - k_min); c < std::min(choices, k_hi - k_min + 1); c++) {
      const float u = utility(scores[c], c);
      if (std::isnan(u)) return k_min + c;
      if (u > most) most = u, best = c;
    }
    return k_min + best;
  }

  template <typename T>
  void run(const T* x, int64_t stride, int64_t tokens, int32_t* k) const {
    at::parallel_for(0, tokens, 64, [&](int64_t first, int64_t stop) {
      std::vector<float> rows_x(std::is_same_v<T, float> ? 0 : kRows * d_in), h(kRows * padded), scores(choices);
      for (int64_t t = first; t < stop; t += kRows) {
        const int64_t rows = std::min(kRows, stop - t);
        if constexpr (std::is_same_v<T, float>) {
          inner(x + t * stride, stride, rows, h.data());
        } else {
          for (int64_t r = 0; r < rows; r++) at::vec::convert(x + (t + r) * stride, rows_x.data() + r * d_in, d_in);
          inner(rows_x.data(), d_in, rows, h.data());
        }
        for (int64_t r = 0; r < rows; r++) k[t + r] = choose(h.data() + r * padded, scores.data());
      }
    });
  }
};

inline bool is_native(const at::Tensor& t) { return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16; }

// a matrix or vector as floats, element (i, j) at [j * rows_to + i] of the result, rows_to >= rows
inline std::vector<float> transposed(const at::Tensor& tensor, int64_t rows_to) {
  const at::Tensor w = tensor.to(at::kFloat).contiguous();
  const int64_t rows = w.size(0), cols = w.dim() > 1 ? w.size(1) : 1;
  const float* from = w.const_data_ptr<float>();
  std::vector<float> out(rows_to * cols, 0.f);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) out[j * rows_to + i] = from[i * cols + j];
  return out;
}

inline at::Tensor gate(const at::Tensor& x, const at::Tensor& w_inner, const at::Tensor& b_inner,
                       const at::Tensor& w_outer, const at::Tensor& b_outer, const at::Tensor& knob,
                       const at::Tensor& k_lo, const at::Tensor& k_hi, double cost, int64_t k_min,
                       std::string_view rule) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                               int64_t, std::string_view);
  static const auto reference =
      c10::Dispatcher::singleton().findSchemaOrThrow("acm::gate_reference", "").typed<Signature>();
  if (!is_native(x) || !is_native(w_inner) || x.size(0) == 0)
    return reference.call(x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, cost, k_min, rule);
  GateCall call;
  call.d_in = x.size(1), call.width = w_inner.size(0), call.choices = w_outer.size(0), call.k_min = k_min;
  call.padded = (call.width + Vec::size() - 1) / Vec::size() * Vec::size();
  call.k_hi = k_hi.item<int32_t>(), call.k_lo = std::min<int64_t>(k_lo.item<int32_t>(), call.k_hi);
  call.damage = rule == "damage", call.knob = knob.item<float>();
  call.w_inner = transposed(w_inner, call.padded), call.b_inner = transposed(b_inner, call.padded);
  call.w_outer = transposed(w_outer, call.choices), call.b_outer = transposed(b_outer, call.choices);
  for (int64_t c = 0; c < call.choices; c++) {
    const float cost_c = static_cast<float>(static_cast<double>(k_min + c) * cost);
    call.cost.push_back(call.damage ? call.knob + std::log(cost_c) : call.knob * cost_c);
  }
  const at::Tensor xs = x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous();
  at::Tensor k = at::empty({x.size(0)}, x.options().dtype(at::kInt));
  int32_t* out = k.mutable_data_ptr<int32_t>();
  if (x.scalar_type() == at::kFloat) call.run(xs.const_data_ptr<float>(), xs.stride(0), xs.size(0), out);
  else call.run(xs.const_data_ptr<c10::BFloat16>(), xs.stride(0), xs.size(0), out);
  return k;
}

}  // namespace
