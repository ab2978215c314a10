// One call of acm::learners: its operands but for the weights, and what becomes of a token's sums whatever they are of.
#pragma once

#include <optional>
#include <string_view>

#include "activations.h"
#include "norm.h"
#include "products/share.h"
#include "sorted.h"

namespace {

enum class Form { mlp, gated, linear, rows, cols };
constexpr std::string_view kFormNames[] = {"mlp", "gated", "linear", "rows", "cols"};

std::optional<Form> find_form(std::string_view name) {
  const auto* found = std::find(std::begin(kFormNames), std::end(kFormNames), name);
  if (found == std::end(kFormNames)) return std::nullopt;
  return static_cast<Form>(found - std::begin(kFormNames));
}

// T: of tokens, biases, residual and output
template <typename T>
struct Operation : Sorted {
  int64_t d_in, d_out, width, heads;
  const T *x, *b_in, *b_up, *b_out, *residual;
  int64_t x_stride;
  bool per_k;
  Form form;
  Act act;
  T* out;
  const Norm* norm;  // null: rows of x are the tokens as they are

  // to[k, G, part] = what the first k learners read of a row [G, N, part]
  void take_slices(const T* row, int64_t k, T* to) const {
    const int64_t part = width / heads;
    for (int64_t n = 0; n < k; n++)
      for (int64_t g = 0; g < heads; g++, to += part) std::copy_n(row + (g * learners + n) * part, part, to);
  }

  // y[token, col ...] = sums + b (+ residual)
  void put(int64_t token, const T* b, int64_t col, int64_t cols, const float* sums) const {
    T* to = out + token * d_out + col;
    const T* rest = residual ? residual + token * d_out + col : nullptr;
    each_vector(cols, [&](int64_t j, auto count) ACM_INLINED {
      Vec v = load(b + j, count);
      if (sums) v = v + load(sums + j, count);
      if (rest) v = v + load(rest + j, count);
      store(v, to + j, count);
    });
  }

  // h = act(sums + b) for rows of so many columns, or with `is_up` h *= sums + b; rounded as the dense layers do
  ACM_INLINED void put_hidden(const T* b, int64_t rows, int64_t cols, const float* sums, int64_t sums_stride, bool is_up,
                              T* h, int64_t h_stride) const {
    const auto each = [&](const auto& value) ACM_INLINED {
      for (int64_t i = 0; i < rows; i++, sums += sums_stride, h += h_stride)
        each_vector(cols, [&](int64_t j, auto count) ACM_INLINED {
          Vec v = Vec::loadu(sums + j);
          if (b) v = v + load(b + j, count);
          store(value(v, h + j, count), h + j, count);
        });
    };
    if (is_up) each([](const Vec& v, const T* old, auto count) ACM_INLINED { return v * load(old, count); });
    else with_act(act, [&](const auto& f) { each([&](const Vec& v, const T*, auto) ACM_INLINED { return f(v); }); });
  }

  // what no learner of a token adds to, form "rows"
  void start_rest(int64_t token, int64_t k) const {
    const int64_t part = width / heads;
    for (int64_t g = 0; g < heads && k < learners; g++) {
      const int64_t col = (g * learners + k) * part;
      put(token, b_out + k * d_out + col, col, (learners - k) * part, nullptr);
    }
  }

  // sums[rows, stride] of so many tokens from a sorted place on, columns [first, first + cols) of the first layer of form
  // "rows": column n * H + g * part + p is column (g * N + n) * part + p of the output. There may be sums of learners that
  // a token does not run.
  void put_slices(int64_t place, int64_t rows, int64_t first, int64_t cols, const float* sums, int64_t stride) const {
    const int64_t part = width / heads;
    for (int64_t j = 0; j < cols;) {
      const int64_t from = first + j, n = from / width, g = from % width / part, p = from % part;
      const int64_t count = std::min(part - p, cols - j), to = (g * learners + n) * part + p;
      int64_t k = k_at(place);
      for (int64_t i = 0; i < rows && place + i < at_least[n + 1]; i++) {
        while (place + i >= at_least[k]) k--;
        put(order[place + i], b_out + k * d_out + to, to, count, sums + i * stride + j);
      }
      j += count;
    }
  }

  // tokens that run no learner
  void put_idle() const {
    share_rows(at_least[1], tokens, d_out, [&](int64_t place) { put(order[place], b_out, 0, d_out, nullptr); });
  }
};

}  // namespace
