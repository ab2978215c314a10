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
  int64_t d_in, width, padded, choices, padded_choices, k_min, k_lo, k_hi;
  bool damage;
  float knob;
  std::vector<float> w_inner;  // [D, G], rows padded with zeros to whole vectors
  std::vector<float> b_inner, w_outer, b_outer;  // [G], [G, C], [C], padded too
  std::vector<float> cost;                       // c_k of the choices times the knob; for damages knob + log c_k

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
        for (int64_t r = 0; r < kRows; r++) f(sums[r]).store(h + r * padded + g);  // a fixed count: sums stay in registers
      });
    }
  }

  // argmax of the utilities over the allowed choices, ties to the smaller k; a NaN wins, as in torch
  int32_t choose(const float* h, float* scores) const {
    for (int64_t c = 0; c < padded_choices; c += Vec::size()) {
      Vec sum = Vec::loadu(b_outer.data() + c);
      for (int64_t g = 0; g < width; g++)
        sum = at::vec::fmadd(Vec(h[g]), Vec::loadu(w_outer.data() + g * padded_choices + c), sum);
      sum.store(scores + c);
    }
    const int64_t first = std::max<int64_t>(0, k_lo - k_min), stop = std::min(choices, k_hi - k_min + 1);
    for (int64_t c = first; c < stop; c++)
      if (std::isnan(scores[c])) return k_min + c;
    if (damage) weigh_damages(first, stop, scores);
    else for (int64_t c = first; c < stop; c++) scores[c] -= cost[c];
    int64_t best = 0;
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t c = first; c < stop; c++)
      if (scores[c] > most) most = scores[c], best = c;
    return k_min + best;
  }

  // scores o -> something of the order of -logaddexp(o, t), t = knob + log c_k: -(exp(o - m) + exp(t - m)), m the least
  // of max(o, t). What wins is at most log 2 above m, so nothing that matters leaves the range of exp.
  void weigh_damages(int64_t first, int64_t stop, float* scores) const {
    float m = std::numeric_limits<float>::infinity();
    for (int64_t c = first; c < stop; c++) m = std::min(m, std::max(scores[c], cost[c]));
    if (std::isinf(m)) {  // a damage of nothing, or nothing but infinite damages
      for (int64_t c = first; c < stop; c++) scores[c] = -std::max(scores[c], cost[c]);
      return;
    }
    const auto above = [=](const Vec& v) { return at::vec::clamp(v - Vec(m), Vec(-80.f), Vec(2.f)).exp_u20(); };
    for (int64_t c = 0; c < padded_choices; c += Vec::size())
      (above(Vec::loadu(scores + c)) + above(Vec::loadu(cost.data() + c))).neg().store(scores + c);
  }

  template <typename T>
  void run(const T* x, int64_t stride, int64_t tokens, int32_t* k) const {
    at::parallel_for(0, tokens, 64, [&](int64_t first, int64_t stop) {
      std::vector<float> rows_x(std::is_same_v<T, float> ? 0 : kRows * d_in), h(kRows * padded), scores(padded_choices);
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
  call.padded_choices = (call.choices + Vec::size() - 1) / Vec::size() * Vec::size();
  call.w_outer = transposed(w_outer, call.padded_choices), call.b_outer = transposed(b_outer, call.padded_choices);
  for (int64_t c = 0; c < call.choices; c++) {
    const float cost_c = static_cast<float>(static_cast<double>(k_min + c) * cost);
    call.cost.push_back(call.damage ? call.knob + std::log(cost_c) : call.knob * cost_c);
  }
  call.cost.resize(call.padded_choices, 0.f);
  const at::Tensor xs = x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous();
  at::Tensor k = at::empty({x.size(0)}, x.options().dtype(at::kInt));
  int32_t* out = k.mutable_data_ptr<int32_t>();
  if (x.scalar_type() == at::kFloat) call.run(xs.const_data_ptr<float>(), xs.stride(0), xs.size(0), out);
  else call.run(xs.const_data_ptr<c10::BFloat16>(), xs.stride(0), xs.size(0), out);
  return k;
}

}  // namespace
