// Activations of learners, as functions of vectors of floats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "vectors.h"

namespace {

inline Vec sigmoid(const Vec& v) { return Vec(1.f) / (Vec(1.f) + v.neg().exp()); }
inline Vec softplus(const Vec& v) { return Vec::blendv(v.exp().log1p(), v, v > Vec(20.f)); }
inline Vec between(const Vec& v, float low, float high) {
  return at::vec::minimum(at::vec::maximum(v, Vec(low)), Vec(high));
}

enum class Act {
  identity, relu, relu6, relu2, gelu, gelu_tanh, quick_gelu, silu, tanh, sigmoid, elu, leaky_relu, hardswish, mish,
  softplus
};
constexpr std::string_view kActNames[] = {
    "identity", "relu", "relu6", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "sigmoid", "elu",
    "leaky_relu", "hardswish", "mish", "softplus"};

std::optional<Act> find_act(std::string_view name) {
  const auto* found = std::find(std::begin(kActNames), std::end(kActNames), name);
  if (found == std::end(kActNames)) return std::nullopt;
  return static_cast<Act>(found - std::begin(kActNames));
}

// calls use(f), f the activation as a function of a vector
template <typename Use>
void with_act(Act act, const Use& use) {
  const Vec zero(0.f), half(0.5f), one(1.f);
  switch (act) {
    case Act::identity: return use([](const Vec& v) { return v; });
    case Act::relu: return use([=](const Vec& v) { return at::vec::maximum(v, zero); });
    case Act::relu6: return use([](const Vec& v) { return between(v, 0.f, 6.f); });
    case Act::relu2: return use([=](const Vec& v) { const Vec r = at::vec::maximum(v, zero); return r * r; });
    case Act::gelu: return use([=](const Vec& v) { return v * half * (one + (v * Vec(0.70710678118654752f)).erf()); });
    case Act::gelu_tanh: return use([=](const Vec& v) {
      const Vec inner = Vec(0.79788456080286536f) * (v + Vec(0.044715f) * v * v * v);
      return half * v * (one + inner.tanh());
    });
    case Act::quick_gelu: return use([](const Vec& v) { return v * sigmoid(v * Vec(1.702f)); });
    case Act::silu: return use([=](const Vec& v) { return v / (one + v.neg().exp()); });
    case Act::tanh: return use([](const Vec& v) { return v.tanh(); });
    case Act::sigmoid: return use([](const Vec& v) { return sigmoid(v); });
    case Act::elu: return use([=](const Vec& v) { return Vec::blendv(v.expm1(), v, v > zero); });
    case Act::leaky_relu: return use([=](const Vec& v) { return Vec::blendv(v * Vec(0.01f), v, v > zero); });
    case Act::hardswish: return use([](const Vec& v) { return v * between(v + Vec(3.f), 0.f, 6.f) / Vec(6.f); });
    case Act::mish: return use([](const Vec& v) { return v * softplus(v).tanh(); });
    case Act::softplus: return use([](const Vec& v) { return softplus(v); });
  }
}

}  // namespace
