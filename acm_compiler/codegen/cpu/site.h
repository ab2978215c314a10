// The operands of a call of learners: which of them the native kernels cover, and whether they fit each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <string_view>

#include "activations.h"
#include "norm.h"
#include "operation.h"
#include "quantized/quantized_call.h"

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// the operator's tensors, each with its rows packed
struct Operands {
  Tensor x, k, w_in, b_out;
  Maybe b_in, w_up, b_up, w_out, w_top, s_in, s_up, s_out, s_top, residual;
  Form form;
  Act act;
  const Norm* norm;
};

Maybe packed(const Maybe& tensor) { return tensor ? Maybe(tensor->contiguous()) : Maybe(); }

template <typename T>
const T* data_of(const Maybe& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// what the schemas call w_in to act
struct Site {
  const Tensor& w_in;
  const Maybe &b_in, &w_up, &b_up, &w_out;
  const Tensor& b_out;
  const Maybe &w_top, &s_in, &s_up, &s_out, &s_top, &residual;
  std::string_view form_name, act_name;
  std::optional<Form> form = find_form(form_name);
  std::optional<Act> act = find_act(act_name);

  bool is_int4() const { return s_in && w_in.scalar_type() == at::kByte; }

  bool covers(const Tensor& x) const {
    const auto type = x.scalar_type();
    if (!form || !act || (type != at::kFloat && type != at::kBFloat16)) return false;
    if (!w_out && form != Form::rows && form != Form::cols) return false;
    const auto weights = !s_in ? type : is_int4() ? at::kByte : at::kChar;
    const auto scales = is_int4() ? at::kHalf : at::kFloat;
    const auto fits = [&](const Maybe& t, auto expected) { return !t || t->scalar_type() == expected; };
    return (kHasBytes || !s_in) && w_in.scalar_type() == weights && fits(w_up, weights) && fits(w_out, weights) &&
           fits(w_top, weights) && b_out.scalar_type() == type && fits(b_in, type) && fits(b_up, type) &&
           fits(residual, type) && fits(s_in, scales) && fits(s_up, scales) && fits(s_out, scales) && fits(s_top, scales);
  }

  // whether the operands of a covered call have the sizes, and are where, the kernel takes them to be
  bool fits(const Tensor& x, const Tensor& k) const {
    const bool sliced = form == Form::rows || form == Form::cols;
    if (x.dim() != 2 || w_in.dim() != (sliced ? 4 : 3) || w_in.numel() == 0 || b_out.dim() != 2) return false;
    const int64_t tokens = x.size(0), d_in = x.size(1), n = w_in.size(0), width = w_in.size(1), d_out = b_out.size(1);
    const auto has = [&](const Maybe& t, std::initializer_list<int64_t> sizes) {
      return !t || (t->sizes().equals(c10::IntArrayRef(sizes)) && t->device() == x.device());
    };
    if (!has(b_out, {n + 1, d_out}) || !has(k, {tokens}) || !has(residual, {tokens, d_out})) return false;
    const int64_t a_byte = is_int4() ? 2 : 1;  // values; sizes that do not fill bytes fit nothing
    const auto values = [&](int64_t depth) { return depth % a_byte ? -1 : depth / a_byte; };
    // one scale a column, or two numbers for each group of so many parts of a depth
    const auto scales = [&](const Maybe& t, std::vector<int64_t> columns, int64_t pieces, int64_t parts, int64_t depth) {
      if (is_int4() && pieces) columns.push_back(pieces);
      if (is_int4()) columns.insert(columns.end(), {parts * groups_of(depth), 2});
      return !t || (t->sizes().equals(columns) && t->device() == x.device());
    };
    if (sliced) {
      const int64_t heads = w_in.size(2), within = width * n * heads, part = d_in / n;
      const bool rows = form == Form::rows;
      if (b_in || w_up || b_up || w_out || w_top || s_up || s_out || s_top) return false;
      if (rows)
        return has(w_in, {n, width, heads, values(d_in)}) && within == d_out &&
               scales(s_in, {n, width, heads}, 0, 1, d_in);
      return has(w_in, {n, d_out, heads, values(part / heads)}) && part * n == d_in && part % heads == 0 &&
             (is_int4() ? scales(s_in, {n, d_out}, 0, 1, part) : has(s_in, {d_out}));
    }
    const bool gated = form == Form::gated, each = w_out->dim() == 4, dense = form == Form::linear;
    const auto scaled = [&](const Maybe& w, const Maybe& s) { return (w && s_in) == s.has_value(); };
    const bool fit = scaled(w_up, s_up) && scaled(w_out, s_out) && scaled(w_top, s_top) &&
                     scales(s_in, {n, width}, 0, 1, d_in) && scales(s_up, {n, width}, 0, 1, d_in) &&
                     scales(s_top, {d_out}, 0, dense ? 1 : n, dense ? d_in : width) &&
                     (each ? scales(s_out, {n, d_out}, n, 1, width) : scales(s_out, {d_out}, n, 1, width));
    return fit && has(w_in, {n, width, values(d_in)}) && has(b_in, {n, width}) && gated == w_up.has_value() &&
           (each ? has(w_out, {n, d_out, n, values(width)}) : has(w_out, {d_out, n, values(width)})) &&
           has(w_up, {n, width, values(d_in)}) && (gated || !b_up) && has(b_up, {n, width}) &&
           has(w_top, {d_out, dense ? values(d_in) : n * values(width)});
  }
};

}  // namespace
