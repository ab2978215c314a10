// Activations of learners, as functions of vectors of floats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "products/vectors.h"

namespace {

// (1 + erf(v / sqrt(2))) / 2, to 2e-7: 1/2 + v p(v^2), p least in its largest error up to |v| = 5.6, where floats end
ACM_INLINE Vec normal_cdf(const Vec& v) {
  constexpr float kEnd = 5.6f * 5.6f;
  constexpr float kPowers[] = {
      0.126259595f,     -0.0630512908f,   0.0469810404f,    -0.0383454897f,  0.0319670886f,  -0.0263119098f,
      0.0209598411f,    -0.015755333f,    0.0109306518f,    -0.00753612956f, 0.00541259116f, -0.00287489942f,
      0.000742273172f,  -0.000619728235f, 0.000860884786f,  -0.000333473174f};
  const Vec t = at::vec::fmadd(at::vec::clamp_max(v * v, Vec(kEnd)), Vec(2.f / kEnd), Vec(-1.f));
  Vec p(kPowers[15]);
#pragma GCC unroll 16
  for (int i = 14; i >= 0; i--) p = at::vec::fmadd(p, t, Vec(kPowers[i]));
  return at::vec::clamp(at::vec::fmadd(v, p, Vec(0.5f)), Vec(0.f), Vec(1.f));
}

inline Vec sigmoid(const Vec& v) { return Vec(1.f) / (Vec(1.f) + v.neg().exp()); }
// v sigmoid(a v), with the exponential that is right to 2e-7 and makes a number of nan, which v brings back
inline Vec swish(const Vec& v, float a) { return v / (Vec(1.f) + (v * Vec(-a)).exp_u20()); }
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
  is(gelu, v * normal_cdf(v)) \
  is(gelu_tanh, gelu_tanh(v)) \
  is(quick_gelu, swish(v, 1.702f)) \
  is(silu, swish(v, 1.f)) \
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
