// One call of acm::learners on the CPU: y_k(x) + residual of every token, at the cost of the learners that it runs.
//
// Shapes: T tokens, D in, O out, N learners, H learner width (forms "rows" and "cols": its slice of G heads). Tokens
// are sorted by k, highest first (a counting sort), and cut into chunks, which all threads share (plan.h). In a chunk
// the tokens that run learner n are a prefix, and those that run exactly k learners lie together: the first layer is
// one product per learner over its prefix, the second one product over the first k H hidden values of each token.
#pragma once

#include "multiply.h"
#include "operation.h"
#include "products.h"

namespace {

// T: of the tensors. kPairs: whether products are of pairs of bfloat16, else of floats.
template <typename T, bool kPairs>
struct Call : Operation<T> {
  using Weights = Matrix<T, kPairs>;
  static constexpr int64_t kPerWord = Weights::kPerWord;
  static constexpr int64_t kPerVector = kLanes * sizeof(float) / sizeof(T);

  using Op = Operation<T>;
  using Op::tokens, Op::learners, Op::order, Op::at_least, Op::k_at, Op::d_in, Op::d_out, Op::width, Op::heads, Op::x;
  using Op::x_stride, Op::b_in, Op::b_up, Op::b_out, Op::per_k, Op::form, Op::act, Op::norm;
  using Op::put, Op::put_idle, Op::put_slices, Op::start_rest, Op::take_slices;
  const T *w_in, *w_up, *w_out, *w_top;
  bool tiles = kPairs && has_tiles();

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

  using OneProduct = Product<T, kPairs>;

  // adds the product of these rows with columns [first_col, first_col + cols), unless there are no rows
  void add(std::vector<OneProduct>& to, const std::vector<const T*>& rows, std::vector<Span> spans, const Weights& w,
           int64_t first_col, int64_t cols) const {
    const int64_t words = dense_values() * sizeof(T) / sizeof(float);
    if (!spans.empty()) to.push_back({rows.data(), std::move(spans), w, first_col, cols, tokens, words, tiles});
  }

  static Weights plain(const T* data, int64_t cols, int64_t depth) {
    return {data, cols, depth / kPerWord, depth / kPerWord};
  }

  // memory of the calling thread: hidden values of a chunk or slices of its rows, normalised rows
  enum Use { kHidden, kNormal, kUses };
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
    if (form == Form::linear && w_top) {  // the dense weight itself runs in the place of N learners
      const int64_t rows = clip(c, at_least[most--]);
      std::vector<OneProduct> top;
      if (rows) add(top, c.x, {{0, rows, d_in / kPerWord}}, plain(w_top, d_out, d_in), 0, d_out);
      multiply<T, kPairs>(top, nullptr, output_of(c));
    }
    const int64_t skip = clip(c, at_least[most + 1]);
    std::vector<OneProduct> first, second;
    for (int64_t n = 0; n < most; n += company()) {
      const int64_t rows = clip(c, at_least[n + 1]), cols = std::min(company(), most - n) * width;
      if (rows <= skip) break;
      add(first, c.x, {{skip, rows, d_in / kPerWord}}, plain(w_in, learners * width, d_in), n * width, cols);
    }
    multiply<T, kPairs>(first, w_up, [&](const OneProduct& in, const Piece& piece, const float* panel) {
      in.run(piece, panel, finish_hidden(c, in.first_col, b_in, false));
      if (!w_up) return;
      OneProduct up = in;
      up.matrix.data = w_up;
      up.run(piece, panel ? panel + up.panel_words(piece.count) : nullptr, finish_hidden(c, in.first_col, b_up, true));
    });
    for (int64_t high = most; high >= 1;) {  // tokens whose k share a second layer go together
      int64_t low = high;
      while (low > 1 && second_layer(low - 1) == second_layer(high)) low--;
      const Weights w = plain(second_layer(high), d_out, learners * width);
      add(second, c.h, spans(c, low, high, width), w, 0, d_out);
      high = low - 1;
    }
    multiply<T, kPairs>(second, nullptr, output_of(c));
  }

  auto output_of(const Chunk& c) const {
    return [this, &c](const OneProduct& product, const Piece& piece, const float* panel) {
      product.run(piece, panel, finish_output(c));
    };
  }

  // the second layer [O, N H] of tokens that run k learners
  const T* second_layer(int64_t k) const {
    if (k == learners && w_top) return w_top;
    return per_k ? w_out + (k - 1) * d_out * learners * width : w_out;
  }

  void run_columns(const Chunk& c) const {
    const int64_t deep = width / kPerWord;
    const Weights w{w_in, d_out, learners * deep, deep, learners, d_out * deep};
    std::vector<OneProduct> all;
    add(all, c.x, spans(c, 1, learners, width), w, 0, d_out);
    multiply<T, kPairs>(all, nullptr, output_of(c));
  }

  void run_rows(const Chunk& c) const {
    share_rows(0, c.stop - c.first, d_out, [&](int64_t i) { start_rest(order[c.first + i], k_at(c.first + i)); });
    std::vector<OneProduct> all;
    for (int64_t n = 0; n < learners; n += company()) {
      const int64_t rows = clip(c, at_least[n + 1]), cols = std::min(company(), learners - n) * width;
      if (rows == 0) break;
      add(all, c.x, {{0, rows, d_in / kPerWord}}, plain(w_in, learners * width, d_in), n * width, cols);
    }
    multiply<T, kPairs>(all, nullptr, [&](const OneProduct& product, const Piece& piece, const float* panel) {
      product.run(piece, panel, finish_slices(c, product.first_col));
    });
  }

  // ---- what becomes of a tile

  // columns of `n * H + col`: h = act(tile + b), or with `up` h *= tile + b
  auto finish_hidden(const Chunk& c, int64_t first_col, const T* b, bool up) const {
    return [=, this, &c](int64_t row, int64_t rows, int64_t col, int64_t cols, float* tile, int64_t tile_width) {
      for (int64_t i = 0; i < rows; i++) {
        T* h = c.hidden + (row + i) * c.hidden_stride + first_col + col;
        float* from = tile + i * tile_width;
        const auto each = [&](const auto& value) {
          for (int64_t j = 0; j < cols; j += kLanes) {
            const int64_t count = std::min(kLanes, cols - j);
            Vec v = Vec::loadu(from + j);
            if (b) v = v + load(b + first_col + col + j, count);
            store(value(v, h + j, count), h + j, count);  // rounded as the dense layers do
          }
        };
        if (up) each([](const Vec& v, const T* old, int64_t count) { return v * load(old, count); });
        else with_act(act, [&](const auto& f) { each([&](const Vec& v, const T*, int64_t) { return f(v); }); });
      }
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
      for (int64_t i = 0; i < rows; i++)  // a tile may hold learners that a token with a lower k does not run
        put_slices(order[c.first + row + i], k_at(c.first + row + i), first_col + col, cols, tile + i * tile_width);
    };
  }

  void run() const {
    put_idle();
    const auto borders = cut_chunks(at_least[1], at::get_num_threads());
    for (size_t c = 1; c < borders.size(); c++) run_chunk(borders[c - 1], borders[c]);
    for (int use = 0; use < kUses; use++) memory_of(static_cast<Use>(use)).end_call();
  }
};

}  // namespace
