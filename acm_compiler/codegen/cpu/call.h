// One call of acm::learners on the CPU: y_k(x) + residual of every token, at the cost of the learners that it runs.
//
// Shapes: T tokens, D in, O out, N learners, H learner width (forms "rows" and "cols": its slice of G heads). Tokens
// are sorted by k, highest first (a counting sort), and cut into chunks, which all threads share (plan.h). In a chunk
// the tokens that run learner n are a prefix, and those that run exactly k learners lie together: the first layer is
// one product per learner over its prefix, the second one product over the first k H hidden values of each token.
#pragma once

#include "operation.h"
#include "products/multiply.h"
#include "products/products.h"

namespace {

// T: of the tensors. kPairs: whether products are of pairs of bfloat16, else of floats.
template <typename T, bool kPairs>
struct Call : Operation<T> {
  using Weights = Matrix<T, kPairs>;
  using One = Part<Weights, T>;
  static constexpr int64_t kPerWord = Weights::kPerWord;
  static constexpr int64_t kPerVector = kLanes * sizeof(float) / sizeof(T);

  using Op = Operation<T>;
  using Op::tokens, Op::learners, Op::order, Op::at_least, Op::k_at, Op::d_in, Op::d_out, Op::width, Op::heads, Op::x;
  using Op::x_stride, Op::b_in, Op::b_up, Op::b_out, Op::per_k, Op::form, Op::act, Op::norm;
  using Op::put, Op::put_hidden, Op::put_idle, Op::put_slices, Op::start_rest, Op::take_slices;
  Weight<T> w_in, w_up, w_out, w_top;
  bool tiles = kPairs && has_tiles();
  std::vector<One> first, up;  // what reads tokens: for each group of learners that share a product
  std::vector<One> second;     // what reads hidden values or slices: of tokens that run k learners second[layer(k)]

  // ---- one chunk: sorted places [first, stop), rows 0 ... stop - first

  struct Chunk {
    int64_t first, stop;
    std::vector<const T*> x, h;  // its rows
    int64_t hidden_stride;
    T* hidden;
  };

  bool has_hidden() const { return form == Form::mlp || form == Form::gated; }
  int64_t clip(const Chunk& c, int64_t place) const { return std::clamp(place, c.first, c.stop) - c.first; }
  // values in the dense layer's hidden activation, or in its output where it has none: no buffer is larger
  int64_t dense_values() const { return tokens * (has_hidden() ? learners * width : d_out); }
  // how many learners, narrower than a vector, share a product
  int64_t company() const { return std::max<int64_t>(1, kLanes / width); }

  // rows of exactly k learners, for each k in [low, high] that occurs; their products are `per_learner` deep times k
  std::vector<Span> spans(const Chunk& c, int64_t low, int64_t high, int64_t per_learner) const {
    std::vector<Span> found;
    for (int64_t k = high; k >= low; k--) {
      const int64_t from = clip(c, at_least[k + 1]), to = clip(c, at_least[k]);
      if (from < to) found.push_back({from, to, k * per_learner / kPerWord});
    }
    return found;
  }

  // ---- matrices

  bool dense_top() const { return form == Form::linear && w_top; }  // in the place of N learners
  // the second layer of tokens that run k learners
  int64_t layer(int64_t k) const { return k == learners && w_top ? learners : per_k ? k - 1 : 0; }

  static One part(const Weight<T>& weight, int64_t start, int64_t cols, int64_t depth) {
    return {{weight.data + start, cols, depth / kPerWord, depth / kPerWord}, weight, nullptr};
  }

  // the matrices of all that some token may run
  void gather_parts() {
    const int64_t all = form == Form::cols ? 0 : learners, step = company();
    for (int64_t n = 0; n < all; n += step)
      for (auto [of, to] : {std::pair(&w_in, &first), std::pair(&w_up, &up)})
        if (*of) to->push_back(part(*of, n * width * d_in, std::min(step, learners - n) * width, d_in));
    second.resize(form == Form::rows ? 0 : learners + 1);
    const int64_t deep = learners * width;
    if (form == Form::cols) {
      second[0] = part(w_in, 0, d_out, deep);
      second[0].stride = width / kPerWord, second[0].pieces = learners, second[0].piece_offset = d_out * width / kPerWord;
      return;
    }
    for (int64_t k = 1; k < static_cast<int64_t>(second.size()); k++) {
      const bool top = k == learners && w_top;
      const int64_t start = per_k && !top ? (k - 1) * d_out * deep : 0;
      second[layer(k)] = part(top ? w_top : w_out, start, d_out, top && dense_top() ? d_in : deep);
    }
  }

  // Finds the panels of matrices that some token runs, and makes those that are missing: to be kept, or, if it is worth
  // it, for this call.
  void pack_panels(Memory& memory, bool shared) {
    std::vector<One*> needed;
    const auto need = [&](One& one) {
      if (!OneProduct::is_few(tokens, one)) needed.push_back(&one);
    };
    const int64_t whole = dense_top() ? at_least[learners] : 0, most = whole < at_least[1] ? k_at(whole) : 0;
    for (std::vector<One>* some : {&first, &up})
      for (size_t i = 0; i < some->size() && static_cast<int64_t>(i) * company() < most; i++) need((*some)[i]);
    std::vector<bool> taken(learners + 1, second.empty());
    for (int64_t k = learners; k >= 1; k--)
      if (at_least[k] > at_least[k + 1] && !taken[layer(k)]) taken[layer(k)] = true, need(second[layer(k)]);
    if (!needed.empty()) pack_parts(std::move(needed), true, shared, memory);
  }

  using OneProduct = Product<T, kPairs>;

  // adds the product of these rows with the columns of `one`, unless there are no rows
  void add(std::vector<OneProduct>& to, const std::vector<const T*>& rows, std::vector<Span> spans, const One& one,
           int64_t first_col, int64_t cols) const {
    const int64_t words = dense_values() * sizeof(T) / sizeof(float);
    if (!spans.empty()) to.push_back({rows.data(), std::move(spans), one, first_col, cols, tokens, words, tiles});
  }

  // memory of the calling thread: hidden values of a chunk or slices of its rows, normalised rows, panels of the call
  enum Use { kHidden, kNormal, kPacked, kUses };
  static Memory& memory_of(Use use) {
    static thread_local Memory kept[kUses];
    return kept[use];
  }

  void run_chunk(int64_t first, int64_t stop) const {
    const int64_t rows = stop - first, most = std::min(learners, round_up(k_at(first), company()));
    Chunk c{first, stop, std::vector<const T*>(rows), std::vector<const T*>(rows)};
    c.hidden_stride = form == Form::rows ? 0 : apart(most * width, rows);
    c.hidden = memory_of(kHidden).template grown<T>(rows * c.hidden_stride);
    for (int64_t i = 0; i < rows; i++) {
      c.x[i] = x + order[first + i] * x_stride;
      c.h[i] = c.hidden + i * c.hidden_stride;
    }
    if (norm) normalise_rows(c);
    else if (tiles && form != Form::cols) gather_rows(c);
    if (form == Form::cols) take_all_slices(c);
    if (form == Form::rows) run_rows(c);
    else if (form == Form::cols) run_columns(c);
    else run_layers(c);
  }

  // from row to row of a buffer: where there is room an odd number of vectors, for the cache's sake
  int64_t apart(int64_t values, int64_t rows) const {
    const int64_t odd = (round_up(values, kPerVector) / kPerVector | 1) * kPerVector;
    return rows * odd <= dense_values() ? odd : values;
  }

  // replaces the rows of a chunk by normalised ones
  __attribute__((noinline)) void normalise_rows(Chunk& c) const {
    const int64_t rows = c.stop - c.first, stride = apart(d_in, rows);
    T* to = memory_of(kNormal).template grown<T>(rows * stride);
    const T *weight = Norm::data_of<T>(norm->weight), *bias = Norm::data_of<T>(norm->bias);
    share_rows(0, rows, d_in, [&](int64_t i) {
      normalise(c.x[i], norm->moments[order[c.first + i]], d_in, weight, bias, to + i * stride);
      c.x[i] = to + i * stride;
    });
  }

  // copies the rows of a chunk to where they lie side by side, as tiles take them, if there is room
  void gather_rows(Chunk& c) const {
    const int64_t rows = c.stop - c.first, stride = apart(d_in, rows);
    const auto scattered = [&](const T* row, const T* next) { return next - row != x_stride; };
    if (rows * d_in > dense_values() || std::adjacent_find(c.x.begin(), c.x.end(), scattered) == c.x.end()) return;
    T* to = memory_of(kNormal).template grown<T>(rows * stride);
    share_rows(0, rows, d_in, [&](int64_t i) { c.x[i] = std::copy_n(c.x[i], d_in, to + i * stride) - d_in; });
  }

  void take_all_slices(Chunk& c) const {
    share_rows(0, c.stop - c.first, d_in, [&](int64_t i) {
      T* own = c.hidden + i * c.hidden_stride;
      take_slices(c.x[i], k_at(c.first + i), own);
      c.x[i] = own;
    });
  }

  void run_layers(const Chunk& c) const {
    int64_t most = learners;
    if (dense_top()) {
      const int64_t rows = clip(c, at_least[most--]);
      std::vector<OneProduct> top;
      if (rows) add(top, c.x, {{0, rows, d_in / kPerWord}}, second[learners], 0, d_out);
      multiply(top, output_of(c));
    }
    const int64_t skip = clip(c, at_least[most + 1]);
    std::vector<OneProduct> in, out;
    for (int64_t n = 0; n < most; n += company()) {
      const int64_t rows = clip(c, at_least[n + 1]), cols = std::min(company(), most - n) * width;
      if (rows <= skip) break;
      add(in, c.x, {{skip, rows, d_in / kPerWord}}, first[n / company()], n * width, cols);
    }
    multiply(in, [&](const OneProduct& of_in, const Piece& piece) {
      of_in.run(piece, finish_hidden(c, of_in.first_col, b_in, false));
      if (!w_up) return;
      OneProduct of_up = of_in;
      of_up.matrix = up[of_in.first_col / width / company()];
      of_up.run(piece, finish_hidden(c, of_in.first_col, b_up, true));
    });
    for (int64_t high = most; high >= 1;) {  // tokens whose k share a second layer go together
      int64_t low = high;
      while (low > 1 && layer(low - 1) == layer(high)) low--;
      add(out, c.h, spans(c, low, high, width), second[layer(high)], 0, d_out);
      high = low - 1;
    }
    multiply(out, output_of(c));
  }

  auto output_of(const Chunk& c) const {
    return [this, &c](const OneProduct& product, const Piece& piece) { product.run(piece, finish_output(c)); };
  }

  void run_columns(const Chunk& c) const {
    std::vector<OneProduct> all;
    add(all, c.x, spans(c, 1, learners, width), second[0], 0, d_out);
    multiply(all, output_of(c));
  }

  void run_rows(const Chunk& c) const {
    share_rows(0, c.stop - c.first, d_out, [&](int64_t i) { start_rest(order[c.first + i], k_at(c.first + i)); });
    std::vector<OneProduct> all;
    for (int64_t n = 0; n < learners; n += company()) {
      const int64_t rows = clip(c, at_least[n + 1]), cols = std::min(company(), learners - n) * width;
      if (rows == 0) break;
      add(all, c.x, {{0, rows, d_in / kPerWord}}, first[n / company()], n * width, cols);
    }
    multiply(all, [&](const OneProduct& product, const Piece& piece) {
      product.run(piece, finish_slices(c, product.first_col));
    });
  }

  // ---- what becomes of a tile

  // columns of `n * H + col` of hidden values
  auto finish_hidden(const Chunk& c, int64_t first_col, const T* b, bool is_up) const {
    return [=, this, &c](int64_t row, int64_t rows, int64_t col, int64_t cols, float* tile, int64_t tile_width) {
      T* h = c.hidden + row * c.hidden_stride + first_col + col;
      put_hidden(b ? b + first_col + col : nullptr, rows, cols, tile, tile_width, is_up, h, c.hidden_stride);
    };
  }

  auto finish_output(const Chunk& c) const {
    return [=, this, &c](int64_t row, int64_t rows, int64_t col, int64_t cols, float* tile, int64_t tile_width) {
      const T* b = b_out + k_at(c.first + row) * d_out + col;  // rows of a tile run equally many learners
      for (int64_t i = 0; i < rows; i++) put(order[c.first + row + i], b, col, cols, tile + i * tile_width);
    };
  }

  auto finish_slices(const Chunk& c, int64_t first_col) const {
    return [=, this, &c](int64_t row, int64_t rows, int64_t col, int64_t cols, float* tile, int64_t tile_width) {
      put_slices(c.first + row, rows, first_col + col, cols, tile, tile_width);
    };
  }

  void run() {
    put_idle();
    if (!at_least[1]) return;
    const auto borders = cut_chunks(at_least[1], at::get_num_threads());
    gather_parts();
    if (!watched) pack_panels(memory_of(kPacked), borders.size() > 2 || at::get_num_threads() > 1);
    for (size_t c = 1; c < borders.size(); c++) run_chunk(borders[c - 1], borders[c]);
    for (int use = 0; use < kUses; use++) memory_of(static_cast<Use>(use)).end_call();
  }
};

}  // namespace
