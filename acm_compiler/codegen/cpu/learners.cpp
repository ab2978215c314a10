// acm::learners, acm::sparse_learners and acm::gate as native operators. What they do not cover (other types, composite
// activations) and what cannot be (operands that do not fit each other, an illegal k) they hand to the references,
// which say what is wrong.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "call.h"
#include "gate.h"
#include "norm.h"
#include "package.h"
#include "products/switches.h"
#include "quantized/quantized_call.h"
#include "site.h"
#include "sparse.h"
#include "steps.h"

namespace {

using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Maybe&, const Maybe&, const Maybe&,
                         const Maybe&, const Tensor&, const Maybe&, const Maybe&, const Maybe&, const Maybe&,
                         const Maybe&, const Maybe&, std::string_view, std::string_view);

// everything but the weights; false when some k is illegal
template <typename T>
bool prepare(Operation<T>& call, const Operands& t, Tensor& y) {
  call.tokens = t.x.size(0), call.d_in = t.x.size(1), call.d_out = t.b_out.size(1);
  call.learners = t.w_in.size(0), call.width = t.w_in.size(1), call.heads = 1;
  if (t.form == Form::rows) call.heads = t.w_in.size(1), call.width = t.w_in.size(1) * t.w_in.size(2);
  if (t.form == Form::cols) call.heads = t.w_in.size(2), call.width = call.d_in / call.learners;
  call.x = t.x.const_data_ptr<T>(), call.x_stride = t.x.stride(0);
  call.b_in = data_of<T>(t.b_in), call.b_up = data_of<T>(t.b_up), call.b_out = t.b_out.const_data_ptr<T>();
  call.residual = data_of<T>(t.residual);
  call.form = t.form, call.per_k = t.w_out && t.w_out->dim() == 4, call.act = t.act;
  call.out = y.mutable_data_ptr<T>(), call.norm = t.norm;
  return t.k.scalar_type() == at::kInt ? call.sort(t.k.const_data_ptr<int32_t>())
                                       : call.sort(t.k.const_data_ptr<int64_t>());
}

template <typename W, typename C>
void take_weights(C& call, const Operands& t) {
  call.w_in = Weight<W>(t.w_in), call.w_up = Weight<W>(t.w_up);
  call.w_out = Weight<W>(t.w_out), call.w_top = Weight<W>(t.w_top);
}

template <typename T, bool kPairs>
bool run(const Operands& t, Tensor& y) {
  Call<T, kPairs> call;
  take_weights<T>(call, t);
  if (!prepare<T>(call, t, y)) return false;
  call.run();
  return true;
}

template <typename T, typename Kind>
bool run_quantised(const Operands& t, Tensor& y) {
  QuantisedCall<T, Kind> call;
  take_weights<typename Kind::Value>(call, t);
  call.s_in = &t.s_in, call.s_up = &t.s_up, call.s_out = &t.s_out, call.s_top = &t.s_top;
  if (!prepare<T>(call, t, y)) return false;
  call.run();
  return true;
}

bool run_any(const Operands& t, Tensor& y) {
  const bool floats = t.x.scalar_type() == at::kFloat;
  if (t.s_in && t.w_in.scalar_type() == at::kByte)
    return floats ? run_quantised<float, Nibbles>(t, y) : run_quantised<c10::BFloat16, Nibbles>(t, y);
  if (t.s_in) return floats ? run_quantised<float, Bytes>(t, y) : run_quantised<c10::BFloat16, Bytes>(t, y);
  if (floats) return run<float, false>(t, y);
  // bfloat16 is multiplied in pairs, where the processor can and no pair would straddle two learners
  const int64_t part = t.form == Form::rows ? 2 : t.w_in.size(t.form == Form::cols ? 3 : 1);
  if constexpr (kHasPairs)
    if (t.x.size(1) % 2 == 0 && part % 2 == 0) return run<c10::BFloat16, true>(t, y);
  return run<c10::BFloat16, false>(t, y);
}

Tensor normalised(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return at::layer_norm(x, x.sizes().slice(1), weight, bias, eps);
}

// The output of a call that is covered and fits, as `run(operands, y)` makes it; none where it says that it cannot.
template <typename Run>
Maybe run_native(const Tensor& x, const Tensor& k, const Site& s, const Norm* norm, const Run& run) {
  if (!s.covers(x) || !s.fits(x, k) || (k.scalar_type() != at::kInt && k.scalar_type() != at::kLong)) return {};
  const Operands operands{x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous(), k.contiguous(),
                          s.w_in.contiguous(), s.b_out.contiguous(), packed(s.b_in), packed(s.w_up), packed(s.b_up),
                          packed(s.w_out), packed(s.w_top), packed(s.s_in), packed(s.s_up), packed(s.s_out),
                          packed(s.s_top), packed(s.residual), *s.form, *s.act, norm};
  Tensor y = at::empty({x.size(0), s.b_out.size(1)}, x.options());
  return run(operands, y) ? Maybe(y) : Maybe();
}

Tensor run_site(const Tensor& x, const Tensor& k, const Site& s, const Norm* norm) {
  if (const Maybe y = run_native(x, k, s, norm, run_any)) return *y;
  static const auto reference = reference_of<Signature>("acm::learners_reference");
  const Tensor z = norm ? normalised(x, norm->weight, norm->bias, norm->eps) : x;
  return reference.call(z, k, s.w_in, s.b_in, s.w_up, s.b_up, s.w_out, s.b_out, s.w_top, s.s_in, s.s_up, s.s_out,
                        s.s_top, s.residual, s.form_name, s.act_name);
}

Tensor learners(const Tensor& x, const Tensor& k, const Tensor& w_in, const Maybe& b_in, const Maybe& w_up,
                const Maybe& b_up, const Maybe& w_out, const Tensor& b_out, const Maybe& w_top, const Maybe& s_in,
                const Maybe& s_up, const Maybe& s_out, const Maybe& s_top, const Maybe& residual, std::string_view form,
                std::string_view act) {
  const Site site{w_in, b_in, w_up, b_up, w_out, b_out, w_top, s_in, s_up, s_out, s_top, residual, form, act};
  return run_site(x, k, site, nullptr);
}

template <typename T>
bool run_sparse(const Operands& t, Tensor& y, const Tensor& thresholds_in, const Tensor& thresholds_hidden) {
  SparseCall<T> call;
  take_weights<T>(call, t);
  call.thresholds_in = thresholds_in.const_data_ptr<float>(), call.thresholds_hidden = thresholds_hidden.const_data_ptr<float>();
  if (!prepare<T>(call, t, y)) return false;
  call.run();
  return true;
}

Tensor sparse_learners(const Tensor& x, const Tensor& k, const Tensor& thresholds_in, const Tensor& thresholds_hidden,
                       const Tensor& w_in, const Maybe& b_in, const Maybe& w_up, const Maybe& b_up, const Tensor& w_out,
                       const Tensor& b_out, const Maybe& w_top, std::string_view form, std::string_view act) {
  const Maybe none, second(w_out);
  const Site site{w_in, b_in, w_up, b_up, second, b_out, w_top, none, none, none, none, none, form, act};
  const auto is_threshold = [&](const Tensor& t, c10::IntArrayRef sizes) {
    return t.scalar_type() == at::kFloat && t.sizes().equals(sizes) && t.device() == x.device();
  };
  const auto keeps = [](const Maybe& weight) { return !weight || may_be_kept(*weight); };
  const bool fits = (site.form == Form::mlp || site.form == Form::gated) && x.dim() == 2 && x.size(0) <= kFewTokens &&
                    w_in.dim() == 3 && w_out.dim() == 3 && is_threshold(thresholds_in, w_in.sizes().slice(2)) &&
                    is_threshold(thresholds_hidden, w_in.sizes().slice(0, 2)) && keeps(w_in) && keeps(w_up) && keeps(w_out) &&
                    keeps(w_top);
  const Tensor inputs = thresholds_in.contiguous(), hidden = thresholds_hidden.contiguous();
  const auto run = [&](const Operands& t, Tensor& y) {
    return x.scalar_type() == at::kFloat ? run_sparse<float>(t, y, inputs, hidden)
                                         : run_sparse<c10::BFloat16>(t, y, inputs, hidden);
  };
  if (fits)
    if (const Maybe y = run_native(x, k, site, nullptr, run)) return *y;
  static const auto reference = reference_of<decltype(sparse_learners)>("acm::sparse_learners_reference");
  return reference.call(x, k, thresholds_in, thresholds_hidden, w_in, b_in, w_up, b_up, w_out, b_out, w_top, form, act);
}

Tensor gated_learners(const Tensor& x, const Tensor& w_inner, const Tensor& b_inner, const Tensor& w_outer,
                      const Tensor& b_outer, const Tensor& knob, const Tensor& k_lo, const Tensor& k_hi,
                      const Tensor& w_in, const Maybe& b_in, const Maybe& w_up, const Maybe& b_up, const Maybe& w_out,
                      const Tensor& b_out, const Maybe& w_top, const Maybe& s_in, const Maybe& s_up, const Maybe& s_out,
                      const Maybe& s_top, const Maybe& residual, const Maybe& norm_weight, const Maybe& norm_bias,
                      double cost, int64_t k_min, std::string_view rule, std::string_view form, std::string_view act,
                      std::optional<double> norm_eps, bool norm_centred) {
  const Site site{w_in, b_in, w_up, b_up, w_out, b_out, w_top, s_in, s_up, s_out, s_top, residual, form, act};
  const auto run = [&](const Tensor& tokens, Norm* norm) {
    const Tensor k =
        choose(tokens, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, cost, k_min, rule, norm);
    return run_site(tokens, k, site, norm);
  };
  const auto apart = [&] {
    static const auto reference = reference_of<decltype(gated_learners)>("acm::gated_learners_reference");
    return reference.call(x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, w_in, b_in, w_up, b_up, w_out, b_out,
                          w_top, s_in, s_up, s_out, s_top, residual, norm_weight, norm_bias, cost, k_min, rule, form,
                          act, norm_eps, norm_centred);
  };
  if (w_outer.dim() != 2 || w_in.dim() < 3 || k_min + w_outer.size(0) - 1 > w_in.size(0)) return apart();
  if (!norm_eps) return run(x, nullptr);
  const auto fits = [&](const Maybe& t) {
    return !t || (t->scalar_type() == x.scalar_type() && t->sizes().equals(x.sizes().slice(1)));
  };
  const bool native = site.covers(x) && fits(norm_weight) && fits(norm_bias) &&
                      gate_fits(x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, k_min, rule);
  if (!native) return apart();
  Norm norm{packed(norm_weight).value_or(Tensor()), packed(norm_bias).value_or(Tensor()),
            static_cast<float>(*norm_eps), norm_centred, std::vector<Moments>(x.size(0))};
  return run(x, &norm);
}

Tensor norm_rows(const Tensor& x, const Maybe& weight, const Maybe& bias, double eps, bool centred) {
  const auto fits = [&](const Maybe& t) {
    return !t || (t->scalar_type() == at::kFloat && t->sizes().equals(x.sizes().slice(1)));
  };
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kFloat && fits(weight) && fits(bias),
              "a norm's tokens must be float32 [T, D], and its weights [D], got ", x.sizes());
  const Tensor rows = x.contiguous(), w = packed(weight).value_or(Tensor()), b = packed(bias).value_or(Tensor());
  Tensor y = at::empty(rows.sizes(), rows.options());
  const int64_t features = rows.size(1);
  share_rows(0, rows.size(0), features, [&](int64_t i) {
    const float* row = rows.const_data_ptr<float>() + i * features;
    const Moments moments = moments_of(row, features, static_cast<float>(eps), centred);
    normalise(row, moments, features, Norm::data_of<float>(w), Norm::data_of<float>(b),
              y.mutable_data_ptr<float>() + i * features);
  });
  return y;
}

// runs a step whose operands are these; absent ones are none
Tensor run_step(const Step& s, const Maybe* t) {
  if (s.kind == Step::Kind::norm) return norm_rows(*t[0], t[1], t[2], *s.eps, s.centred);
  if (s.kind == Step::Kind::attention) return attention(*t[0], *t[1], *t[2], s.heads, s.length, s.causal, s.scale);
  return gated_learners(*t[0], *t[1], *t[2], *t[3], *t[4], *t[5], *t[6], *t[7], *t[8], t[9], t[10], t[11], t[12],
                        *t[13], t[14], t[15], t[16], t[17], t[18], t[19], t[20], t[21], s.cost, s.k_min, s.rule, s.form,
                        s.act, s.eps, s.centred);
}

std::vector<Tensor> steps(at::TensorList tensors, std::string_view text) {
  const auto program = program_of(text);
  const int64_t given = tensors.size();
  TORCH_CHECK(given == program->tensors, "acm::steps takes ", program->tensors, " tensors, got ", given);
  std::vector<Tensor> made;
  for (const Step& s : program->steps) {
    Maybe operands[kGatedOperands];
    for (size_t i = 0; i < s.operands.size(); i++)
      if (const int64_t n = s.operands[i]; n != kAbsent) operands[i] = n < given ? tensors[n] : made[n - given];
    made.push_back(run_step(s, operands));
    for (const int64_t n : s.done) made[n].reset();
  }
  std::vector<Tensor> results;
  for (const int64_t n : program->results) results.push_back(made[n - given]);
  return results;
}

#define ACM_LEARNER_TENSORS                                                                                     \
  "Tensor w_in, Tensor? b_in, Tensor? w_up, Tensor? b_up, Tensor? w_out, Tensor b_out, Tensor? w_top, "         \
  "Tensor? s_in, Tensor? s_up, Tensor? s_out, Tensor? s_top, Tensor? residual=None"
#define ACM_SPARSE_TENSORS                                                                                      \
  "Tensor x, Tensor k, Tensor thresholds_in, Tensor thresholds_hidden, Tensor w_in, Tensor? b_in, Tensor? w_up, "         \
  "Tensor? b_up, Tensor w_out, Tensor b_out, Tensor? w_top"
#define ACM_FORM "str form, str act"

TORCH_LIBRARY_FRAGMENT(acm, m) {
  if (defined("acm::learners_cpu")) return;
  m.def("learners_cpu(Tensor x, Tensor k, " ACM_LEARNER_TENSORS ", *, " ACM_FORM ") -> Tensor");
  m.impl("learners_cpu", c10::DispatchKey::CPU, TORCH_FN(learners));
  m.def("sparse_learners_cpu(" ACM_SPARSE_TENSORS ", *, " ACM_FORM ") -> Tensor");
  m.impl("sparse_learners_cpu", c10::DispatchKey::CPU, TORCH_FN(sparse_learners));
  m.def("steps_cpu(Tensor[] tensors, str program) -> Tensor[]");
  m.impl("steps_cpu", c10::DispatchKey::CPU, TORCH_FN(steps));
  m.def("attention_cpu(Tensor q, Tensor k, Tensor v, *, float scale, bool causal) -> Tensor");
  m.impl("attention_cpu", c10::DispatchKey::CPU, TORCH_FN(attention_in_pairs));
  m.def("gate_cpu(" ACM_GATE_TENSORS ", *, " ACM_GATE_CHOICES ") -> Tensor");
  m.impl("gate_cpu", c10::DispatchKey::CPU, TORCH_FN(gate));
}

TORCH_LIBRARY_FRAGMENT(acm_package, m) {
  if (defined("acm_package::learners")) return;
  m.def("learners(Tensor x, Tensor k, " ACM_LEARNER_TENSORS ", *, " ACM_FORM ", str built) -> Tensor");
  m.def("gate(" ACM_GATE_TENSORS ", *, " ACM_GATE_CHOICES ", str built) -> Tensor");
  m.def("gated_learners(" ACM_GATE_TENSORS ", " ACM_LEARNER_TENSORS
        ", Tensor? norm_weight=None, Tensor? norm_bias=None, *, " ACM_GATE_CHOICES ", " ACM_FORM
        ", float? norm_eps=None, bool norm_centred=True, str built) -> Tensor");
  m.def("require(Tensor value, Tensor holds, str message, *, str built) -> Tensor");
  m.impl("require", c10::DispatchKey::CPU, TORCH_FN(Packaged<require>::call));
  m.impl("learners", c10::DispatchKey::CPU, TORCH_FN(Packaged<learners>::call));
  m.impl("gate", c10::DispatchKey::CPU, TORCH_FN(Packaged<gate>::call));
  m.impl("gated_learners", c10::DispatchKey::CPU, TORCH_FN(Packaged<gated_learners>::call));
}

}  // namespace

// makes these the CPU implementations of the operators of those names
extern "C" __attribute__((visibility("default"))) void acm_take_over() {
  static torch::Library library(torch::Library::IMPL, "acm", c10::DispatchKey::CPU, __FILE__, __LINE__);
  static const bool done = [] {
    library.impl("learners", TORCH_FN(learners));
    library.impl("sparse_learners", TORCH_FN(sparse_learners));
    library.impl("gate", TORCH_FN(gate));
    library.impl("gated_learners", TORCH_FN(gated_learners));
    library.impl("steps", TORCH_FN(steps));
    library.impl("attention", TORCH_FN(attention_in_pairs));
    return true;
  }();
  (void)done;
}
