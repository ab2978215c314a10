// acm::gate on the CPU: from the tokens straight to how many learners each of them runs.
//
// Shapes: T tokens, D in, G hidden width of the gate, C = N - k_min + 1 choices. Everything is computed in float.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "activations.h"
#include "norm.h"
#include "package.h"
#include "products/products.h"
#include "rule.h"

#define ACM_GATE_TENSORS                                                                                  \
  "Tensor x, Tensor w_inner, Tensor b_inner, Tensor w_outer, Tensor b_outer, Tensor knob, Tensor k_lo, "  \
  "Tensor k_hi"
#define ACM_GATE_CHOICES "float cost, int k_min, str rule"

namespace {

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

constexpr int64_t kOuterRows = 4;

// A gate's weights, for so many tokens.
struct GateWeights {
  const at::Tensor &w_inner, &b_inner, &w_outer, &b_outer;
  int64_t tokens;

  std::array<const at::Tensor*, 4> all() const { return {&w_inner, &b_inner, &w_outer, &b_outer}; }
};

// The gate's two layers. kPairs: whether products of the first are of pairs of bfloat16, else of floats.
template <bool kPairs>
struct Network {
  using Word = std::conditional_t<kPairs, c10::BFloat16, float>;
  int64_t d_in, words, width, choices, padded, padded_choices;
  bool few;                                      // so few tokens that rows of w_inner are read where they are
  bool tiles;                                    // whether AMX multiplies
  int64_t deep;                                  // words of a panel: tiles take a multiple of 16
  at::Tensor copy;                               // w_inner, if it was not of Word or its rows were not packed
  const Word* inner_rows = nullptr;              // w_inner; only to be read where it is known to be there still
  std::vector<float> panels;                     // w_inner as the inner loop reads it, one after the other
  std::vector<float> b_inner, w_outer, b_outer;  // [G], [G, C], [C], padded with zeros to whole vectors

  explicit Network(const GateWeights& of)
      : d_in(of.w_inner.size(1)), words(d_in / Matrix<Word, kPairs>::kPerWord), width(of.w_inner.size(0)),
        choices(of.w_outer.size(0)), padded(round_up(width, kLanes)), padded_choices(round_up(choices, kLanes)),
        few(of.tokens <= kDotRows && of.tokens * kDotDepth <= words), tiles(kPairs && !few && has_tiles()),
        deep(tiles ? round_up(words, kTileSide) : words) {}

  // with all that is made of its weights, kept from call to call where that may be
  static std::shared_ptr<const Network> of(const GateWeights& weights) {
    const auto all = weights.all();
    const bool keeps = std::ranges::all_of(all, [](const at::Tensor* t) { return may_be_kept(*t); });
    Network empty(weights);
    const PanelKey key = empty.key(weights.w_inner);
    SomeWords read;
    if (const Panels kept = keeps ? KeptPanels::all().find(key, all, read) : nullptr)
      return std::static_pointer_cast<const Network>(kept);
    const auto made = std::make_shared<Network>(std::move(empty));
    made->fill(weights);
    KeptPanels::all().sweep();
    if (keeps) KeptPanels::all().keep(key, all, made);
    return made;
  }

  int64_t group() const { return tiles ? kTileGroup : kTileRows; }

  Matrix<Word, kPairs> matrix() const { return {inner_rows, width, words, words}; }
  int64_t panel_cols(int64_t g) const { return std::min(kPanelCols, padded - g); }

  // h[rows, G] = gelu(w_inner x + b_inner) for up to group() tokens; for tiles they lie evenly, and none ends in a tile
  void inner(const float* const* x, int64_t rows, float* h) const {
    float tile[kTileGroup * kPanelCols];
    for (int64_t g = 0; g < padded; g += kPanelCols) {
      const int64_t cols = panel_cols(g);
      const Panel panel = Panel{panels.data(), deep}.from(g, 0);
      if (few) multiply_rows(x, rows, g, cols, tile);
      else if (tiles) multiply_by_tiles({x[0], rows > 1 ? x[1] - x[0] : deep}, rows, panel, cols, deep, false, tile, cols);
      else Inner<kPairs>::tile(rows, cols / kLanes)(x, panel, words, false, tile);
      with_act(Act::gelu, [&](const auto& f) {
        for (int64_t r = 0; r < rows; r++)
          for (int64_t j = 0; j < cols; j += kLanes)
            f(Vec::loadu(tile + r * cols + j) + Vec::loadu(b_inner.data() + g + j)).store(h + r * padded + g + j);
      });
    }
  }

  // out[rows, cols] = columns [g, g + cols) of the product, as far as there are so many
  void multiply_rows(const float* const* x, int64_t rows, int64_t g, int64_t cols, float* out) const {
    std::fill(out, out + rows * cols, 0.f);
    for (int64_t j = 0; g + j < std::min(width, g + cols); j += kDotCols) {
      const float* columns[kDotCols];
      for (int64_t i = 0; i < kDotCols; i++) columns[i] = matrix().words(std::min(g + j + i, width - 1));
      Inner<kPairs>::dots(rows)(x, columns, words, cols, out + j);
    }
  }

  // to[rows, D] = rows of x, normalised
  template <typename T>
  __attribute__((noinline)) void normalise_rows(const T* x, int64_t stride, int64_t rows, const Norm& norm,
                                                Moments* moments, T* to) const {
    const T *weight = Norm::data_of<T>(norm.weight), *bias = Norm::data_of<T>(norm.bias);
    for (int64_t r = 0; r < rows; r++) {
      moments[r] = moments_of(x + r * stride, d_in, norm.eps, norm.centred);
      normalise(x + r * stride, moments[r], d_in, weight, bias, to + r * d_in);
    }
  }

  // scores[kOuterRows, C] = w_outer h + b_outer, of so many rows side by side: their sums do not wait for each other
  void outer(const float* h, float* scores) const {
    for (int64_t c = 0; c < padded_choices; c += kLanes) {
      Vec sums[kOuterRows];
      for (Vec& sum : sums) sum = Vec::loadu(b_outer.data() + c);
      for (int64_t g = 0; g < width; g++) {
        const Vec w = Vec::loadu(w_outer.data() + g * padded_choices + c);
        for (int64_t r = 0; r < kOuterRows; r++) sums[r] = at::vec::fmadd(Vec(h[r * padded + g]), w, sums[r]);
      }
      for (int64_t r = 0; r < kOuterRows; r++) sums[r].store(scores + r * padded_choices + c);
    }
  }

  // `norm`: null, or tokens are normalised and their moments kept
  template <typename T>
  void run(const T* x, int64_t stride, int64_t tokens, const Rule& rule, Norm* norm, int32_t* k) const {
    constexpr bool kAsIs = std::is_same_v<T, Word>;
    const int64_t group = this->group(), least = std::max(group, kLeastWork / (d_in * padded));
    at::parallel_for(0, tokens, least, [&](int64_t from, int64_t to) {
      const Tiles held(tiles);
      std::vector<float> copies(tiles ? group * deep : kAsIs ? 0 : group * d_in);
      std::vector<float> h(round_up(group, kOuterRows) * padded), scores(kOuterRows * padded_choices);
      std::vector<T> normal(norm ? group * d_in : 0);
      for (int64_t t = from; t < to; t += group) {
        const int64_t rows = std::min(group, to - t);
        if (norm) normalise_rows(x + t * stride, stride, rows, *norm, norm->moments.data() + t, normal.data());
        const float* starts[kTileGroup];
        const bool even = norm || stride % Matrix<Word, kPairs>::kPerWord == 0;
        const bool in_place = kAsIs && (!tiles || (rows == group && deep == words && even));
        for (int64_t r = 0; r < rows; r++) {
          const T* row = norm ? normal.data() + r * d_in : x + (t + r) * stride;
          starts[r] = in_place ? reinterpret_cast<const float*>(row) : copies.data() + r * (tiles ? deep : d_in);
          if constexpr (!kAsIs) at::vec::convert(row, copies.data() + r * d_in, d_in);
          else if (!in_place) std::copy_n(reinterpret_cast<const float*>(row), words, copies.data() + r * deep);
        }
        inner(starts, rows, h.data());
        for (int64_t r = 0; r < rows; r++) {
          if (r % kOuterRows == 0) outer(h.data() + r * padded, scores.data());
          k[t + r] = rule.choose(scores.data() + r % kOuterRows * padded_choices);
        }
      }
    });
  }

 private:
  PanelKey key(const at::Tensor& w_inner) const {
    return {w_inner.const_data_ptr(), width, words, choices, 4 * kPairs + 2 * tiles + few, Layout::gate};
  }

  void fill(const GateWeights& of) {
    copy = of.w_inner.to(c10::CppTypeToScalarType<Word>::value).contiguous();
    inner_rows = copy.template const_data_ptr<Word>();
    if (!few) panels.resize(deep * padded), matrix().pack(0, width, 0, words, panels.data(), deep);
    if (!few || copy.is_alias_of(of.w_inner)) copy.reset();  // what is kept must not hold what it was made of
    b_inner = transposed(of.b_inner, padded), w_outer = transposed(of.w_outer, padded_choices);
    b_outer = transposed(of.b_outer, padded_choices);
  }
};

inline bool is_native(const at::Tensor& t) { return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16; }

// whether types, sizes and places are those that the native gate takes them for
inline bool gate_fits(const at::Tensor& x, const at::Tensor& w_inner, const at::Tensor& b_inner,
                      const at::Tensor& w_outer, const at::Tensor& b_outer, const at::Tensor& knob,
                      const at::Tensor& k_lo, const at::Tensor& k_hi, int64_t k_min, std::string_view rule) {
  if (x.dim() != 2 || w_inner.dim() != 2 || w_outer.dim() != 2 || w_inner.numel() == 0 || w_outer.size(0) == 0)
    return false;
  const int64_t width = w_inner.size(0), columns = w_outer.size(0);
  const auto has = [&](const at::Tensor& t, std::initializer_list<int64_t> sizes) {
    return t.sizes().equals(c10::IntArrayRef(sizes)) && t.scalar_type() == w_inner.scalar_type() &&
           t.device() == x.device();
  };
  const auto is_number = [&](const at::Tensor& t) { return t.dim() == 0 && t.device() == x.device(); };
  return is_native(x) && is_native(w_inner) && has(w_inner, {width, x.size(1)}) && has(b_inner, {width}) &&
         has(w_outer, {columns, width}) && has(b_outer, {columns}) && is_number(knob) && is_number(k_lo) &&
         is_number(k_hi) && k_min >= 0 && find_rule(rule).has_value();
}

// k of every token. `norm`: null, or what normalises them (floats or bfloat16, as the gate)
at::Tensor choose(const at::Tensor& x, const at::Tensor& w_inner, const at::Tensor& b_inner, const at::Tensor& w_outer,
                  const at::Tensor& b_outer, const at::Tensor& knob, const at::Tensor& k_lo, const at::Tensor& k_hi,
                  double cost, int64_t k_min, std::string_view rule_name, Norm* norm) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                               int64_t, std::string_view);
  if (!gate_fits(x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, k_min, rule_name)) {
    static const auto reference = reference_of<Signature>("acm::gate_reference");
    return reference.call(x, w_inner, b_inner, w_outer, b_outer, knob.scalar_type() == at::kInt ? knob.view(at::kFloat) : knob, k_lo,
                          k_hi, cost, k_min, rule_name);
  }
  const Rule rule = make_rule(w_outer.size(0), knob, k_lo, k_hi, cost, k_min, *find_rule(rule_name));
  const at::Tensor rows = x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous();
  at::Tensor k = at::empty({x.size(0)}, x.options().dtype(at::kInt));
  if (x.size(0) == 0) return k;
  const GateWeights weights{w_inner, b_inner, w_outer, b_outer, x.size(0)};
  const auto run = [&]<typename T, bool kPairs>(const std::shared_ptr<const Network<kPairs>>& network, const T* from) {
    network->run(from, rows.stride(0), rows.size(0), rule, norm, k.mutable_data_ptr<int32_t>());
  };
  const bool halves = x.scalar_type() == at::kBFloat16;
  if constexpr (kHasPairs)
    if (halves && w_inner.scalar_type() == at::kBFloat16 && x.size(1) % 2 == 0) {
      run(Network<true>::of(weights), rows.const_data_ptr<c10::BFloat16>());
      return k;
    }
  const auto network = Network<false>::of(weights);
  if (halves) run(network, rows.const_data_ptr<c10::BFloat16>());
  else run(network, rows.const_data_ptr<float>());
  return k;
}

at::Tensor gate(const at::Tensor& x, const at::Tensor& w_inner, const at::Tensor& b_inner, const at::Tensor& w_outer,
                const at::Tensor& b_outer, const at::Tensor& knob, const at::Tensor& k_lo, const at::Tensor& k_hi,
                double cost, int64_t k_min, std::string_view rule) {
  return choose(x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, cost, k_min, rule, nullptr);
}

}  // namespace
