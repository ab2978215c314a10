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

inline Vec relu(const Vec& v) { return at::vec::maximum(v, Vec(0.f)); }
inline Vec gelu_tanh(const Vec& v) {
  const Vec inner = Vec(0.79788456080286536f) * (v + Vec(0.044715f) * v * v * v);
  return Vec(0.5f) * v * (Vec(1.f) + inner.tanh());
}

// one line an activation: is(its name, its value at v)
#define ACM_ACTIVATIONS(is) \
  is(identity, v) \
  is(relu, relu(v)) \
  is(relu6, between(v, 0.f, 6.f)) \
  is(relu2, relu(v) * relu(v)) \
  is(gelu, v * Vec(0.5f) * (Vec(1.f) + (v * Vec(0.70710678118654752f)).erf())) \
  is(gelu_tanh, gelu_tanh(v)) \
  is(quick_gelu, v * sigmoid(v * Vec(1.702f))) \
  is(silu, v / (Vec(1.f) + v.neg().exp())) \
  is(tanh, v.tanh()) \
  is(sigmoid, sigmoid(v)) \
  is(elu, Vec::blendv(v.expm1(), v, v > Vec(0.f))) \
  is(leaky_relu, Vec::blendv(v * Vec(0.01f), v, v > Vec(0.f))) \
  is(hardswish, v * between(v + Vec(3.f), 0.f, 6.f) / Vec(6.f)) \
  is(mish, v * softplus(v).tanh()) \
  is(softplus, softplus(v))

#define ACM_NAME(name, value) name,
enum class Act { ACM_ACTIVATIONS(ACM_NAME) };
#undef ACM_NAME
#define ACM_TEXT(name, value) #name,
constexpr std::string_view kActNames[] = {ACM_ACTIVATIONS(ACM_TEXT)};
#undef ACM_TEXT

std::optional<Act> find_act(std::string_view name) {
  const auto* found = std::find(std::begin(kActNames), std::end(kActNames), name);
  if (found == std::end(kActNames)) return std::nullopt;
  return static_cast<Act>(found - std::begin(kActNames));
}

// calls use(f), f the activation as a function of a vector
template <typename Use>
void with_act(Act act, const Use& use) {
#define ACM_CASE(name, value) \
  case Act::name: return use([](const Vec& v) { return value; });
  switch (act) { ACM_ACTIVATIONS(ACM_CASE) }
#undef ACM_CASE
}

}  // namespace
