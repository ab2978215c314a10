// How scores of a gate become a choice of k.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "products/plan.h"
#include "products/vectors.h"

namespace {

// what a score means, by the names of acm/reference.py; a rule that is not here is left to the reference
enum class Meaning { logits, damage };
inline std::optional<Meaning> find_rule(std::string_view rule) {
  if (rule == "logits") return Meaning::logits;
  if (rule == "damage") return Meaning::damage;
  return std::nullopt;
}

// From scores to k: argmax of the utilities over the allowed choices.
struct Rule {
  int64_t k_min, first, stop;  // choices [first, stop) are allowed
  Meaning meaning;
  std::vector<float> cost;  // c_k of the choices times the knob; for damages knob + log c_k; padded to whole vectors

  // ties go to the smaller k; with a NaN among the utilities all allowed learners run. Overwrites the scores
  int32_t choose(float* scores) const {
    bool lost = false;
    for (int64_t c = first; c < stop; c++) {
      if (meaning == Meaning::logits) scores[c] -= cost[c];
      lost |= std::isnan(scores[c]) || std::isnan(cost[c]);
    }
    if (lost) return k_min + stop - 1;
    if (meaning == Meaning::damage) weigh_damages(scores);
    int64_t best = first;
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t c = first; c < stop; c++)
      if (scores[c] > most) most = scores[c], best = c;
    return k_min + best;
  }

  // scores o -> something of the order of -logaddexp(o, t), t = knob + log c_k: -(exp(o - m) + exp(t - m)), m the least
  // of max(o, t). What wins is at most log 2 above m, so nothing that matters leaves the range of exp.
  void weigh_damages(float* scores) const {
    float m = std::numeric_limits<float>::infinity();
    for (int64_t c = first; c < stop; c++) m = std::min(m, std::max(scores[c], cost[c]));
    if (std::isinf(m)) {  // a damage of nothing, or nothing but infinite damages
      for (int64_t c = first; c < stop; c++) scores[c] = -std::max(scores[c], cost[c]);
      return;
    }
    const auto above = [=](const Vec& v) { return at::vec::clamp(v - Vec(m), Vec(-80.f), Vec(2.f)).exp_u20(); };
    for (size_t c = 0; c < cost.size(); c += kLanes)
      (above(Vec::loadu(scores + c)) + above(Vec::loadu(cost.data() + c))).neg().store(scores + c);
  }
};

// the number that a tensor of T holds
template <typename T>
T number(const at::Tensor& t) {
  return t.scalar_type() == c10::CppTypeToScalarType<T>::value ? *t.const_data_ptr<T>() : t.item<T>();
}

// the knob may be the bits of its float, as int32
inline float knob_of(const at::Tensor& knob) {
  return knob.scalar_type() == at::kInt ? std::bit_cast<float>(number<int32_t>(knob)) : number<float>(knob);
}

Rule make_rule(int64_t choices, const at::Tensor& knob, const at::Tensor& k_lo, const at::Tensor& k_hi, double cost,
               int64_t k_min, Meaning meaning) {
  const int64_t most = std::clamp<int64_t>(number<int32_t>(k_hi) - k_min, 0, choices - 1);
  const int64_t least = std::clamp<int64_t>(number<int32_t>(k_lo) - k_min, 0, most);
  const float strength = knob_of(knob);
  Rule rule{k_min, least, most + 1, meaning, std::vector<float>(round_up(choices, kLanes), 0.f)};
  for (int64_t c = 0; c < choices; c++) {
    const float cost_c = static_cast<float>(static_cast<double>(k_min + c) * cost);
    rule.cost[c] = meaning == Meaning::damage ? strength + std::log(cost_c) : strength * cost_c;
  }
  return rule;
}

}  // namespace
