// One call of acm::learners on the CPU: y_k(x) + residual of every token, at the cost of the learners that it runs.
//
// Shapes: T tokens, D in, O out, N learners, H learner width (forms "rows" and "cols": its slice of G heads). Tokens
// are sorted by k, highest first (a counting sort), and cut into chunks of equal work, which threads take. In a chunk
// the tokens that run learner n are a prefix, and those that run exactly k learners lie together: the first layer is
// one product per learner over its prefix, the second one product over the first k H hidden values of each token.
#pragma once

#include <atomic>

#include "cpu_products.h"

namespace {

constexpr int64_t kChunkRows = 1024;  // so many rows pay for transposing the weights
constexpr int64_t kThreadRows = 192;  // with fewer rows per thread, threads share columns instead
constexpr int64_t kFewRows = 32;      // up to so many tokens, weights are read as they are

enum class Form { mlp, gated, linear, rows, cols };
constexpr std::string_view kFormNames[] = {"mlp", "gated", "linear", "rows", "cols"};

std::optional<Form> find_form(std::string_view name) {
  const auto* found = std::find(std::begin(kFormNames), std::end(kFormNames), name);
  if (found == std::end(kFormNames)) return std::nullopt;
  return static_cast<Form>(found - std::begin(kFormNames));
}

template <typename T>
Vec load(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) return Vec::loadu(from, count);
  float values[kLanes] = {};
  if (count == kLanes) for (int64_t j = 0; j < kLanes; j++) values[j] = static_cast<float>(from[j]);
  else at::vec::convert(from, values, count);
  return Vec::loadu(values);
}

template <typename T>
void store(const Vec& value, T* to, int64_t count) {
  if constexpr (std::is_same_v<T, float>) return value.store(to, count);
  float values[kLanes];
  value.store(values);
  if (count == kLanes) for (int64_t j = 0; j < kLanes; j++) to[j] = static_cast<T>(values[j]);
  else at::vec::convert(values, to, count);
}

// T: of the tensors. kPairs: whether products are of pairs of bfloat16, else of floats.
template <typename T, bool kPairs>
struct Call {
  using Hidden = std::conditional_t<kPairs, c10::BFloat16, float>;
  using Weights = Matrix<T, kPairs>;
  static constexpr int64_t kPerWord = Weights::kPerWord;
  static constexpr bool kAsIs = kPairs || std::is_same_v<T, float>;  // rows of x need no conversion

  int64_t tokens, d_in, d_out, learners, width, heads;
  const T *x, *w_in, *b_in, *w_up, *b_up, *w_out, *b_out, *w_top, *residual;
  int64_t x_stride;
  bool per_k;
  Form form;
  Act act;
  T* out;
  std::vector<int64_t> order;     // token of each sorted place
  std::vector<int64_t> at_least;  // [N + 2]: how many tokens run at least k learners
  std::vector<int64_t> cuts;      // borders of the chunks, in sorted places

  // ---- sorting and cutting

  // false when some k lies outside [0, N]
  template <typename K>
  bool sort(const K* k) {
    std::vector<int64_t> place(learners + 1, 0);
    for (int64_t t = 0; t < tokens; t++) {
      if (k[t] < 0 || k[t] > learners) return false;
      place[k[t]]++;
    }
    at_least.assign(learners + 2, 0);
    for (int64_t n = learners; n >= 0; n--) at_least[n] = at_least[n + 1] + place[n];
    for (int64_t n = 0; n <= learners; n++) place[n] = at_least[n + 1];
    order.resize(tokens);
    for (int64_t t = 0; t < tokens; t++) order[place[k[t]]++] = t;
    return true;
  }

  // chunks of equal work over the tokens with k >= 1
  void cut() {
    const int64_t busy = at_least[1], threads = at::get_num_threads();
    int64_t work = 0, done = 0;
    for (int64_t k = 1; k <= learners; k++) work += at_least[k];
    int64_t count = std::max<int64_t>(1, (busy + kChunkRows - 1) / kChunkRows);
    if (busy >= kThreadRows * threads) count = round_up(count, threads);
    cuts.assign(1, 0);
    for (int64_t place = 0, k = learners; place < busy; place++) {
      while (place >= at_least[k]) k--;
      done += k;
      const bool full = place + 1 - cuts.back() >= 2 * kChunkRows;
      const bool share = done * count >= work * static_cast<int64_t>(cuts.size());
      if (share || full || place + 1 == busy) cuts.push_back(place + 1);
    }
  }

  // ---- one chunk: sorted places [first, stop), rows 0 ... stop - first

  struct Chunk {
    int64_t first, stop;
    bool shared;                     // it is the only one: threads share its columns
    std::vector<const float*> x, h;  // its rows, as words
    int64_t hidden_stride;
    Hidden* hidden;
  };

  int64_t clip(const Chunk& c, int64_t place) const { return std::clamp(place, c.first, c.stop) - c.first; }
  bool few() const { return tokens <= kFewRows; }
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

  template <typename Finish>
  void multiply(const Chunk& c, const std::vector<const float*>& rows, const std::vector<Span>& spans, const Weights& w,
                int64_t first_col, int64_t cols, const Finish& finish) const {
    if (spans.empty()) return;
    Product<T, kPairs>{rows.data(), spans, w, first_col, cols, few(), c.shared}.run(finish);
  }

  static Weights plain(const T* data, int64_t cols, int64_t depth) {
    return {data, cols, depth / kPerWord, depth / kPerWord};
  }

  // this thread's memory for the hidden values of a chunk and, where types differ, its rows of x
  static float* memory(int64_t words) {
    static thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < words) kept.resize(words);
    return kept.data();
  }

  void run_chunk(int64_t first, int64_t stop, bool shared) const {
    const int64_t rows = stop - first, most = std::min(learners, round_up(k_at(first), company()));
    Chunk c{first, stop, shared, std::vector<const float*>(rows), std::vector<const float*>(rows)};
    // odd numbers of vectors apart, for the cache's sake
    c.hidden_stride = form == Form::rows || form == Form::cols ? 0 : apart(most * width / kPerWord);
    const int64_t copied = form == Form::cols ? apart(most * width / kPerWord) : kAsIs ? 0 : apart(d_in);
    float* own = memory(rows * (c.hidden_stride + copied));
    c.hidden = reinterpret_cast<Hidden*>(own);
    for (int64_t i = 0; i < rows; i++) {
      const T* row = x + order[first + i] * x_stride;
      float* copy = own + rows * c.hidden_stride + i * copied;
      c.h[i] = own + i * c.hidden_stride;
      c.x[i] = copied ? copy : reinterpret_cast<const float*>(row);
      if (form == Form::cols) take_slices(row, k_at(first + i), reinterpret_cast<Hidden*>(copy));
      else if (!kAsIs) at::vec::convert(row, copy, d_in);
    }
    if (form == Form::rows) run_rows(c);
    else if (form == Form::cols) run_columns(c);
    else run_layers(c);
  }

  static int64_t apart(int64_t words) { return (round_up(words, kLanes) / kLanes | 1) * kLanes; }

  // to[k, G, part] = what the first k learners read of a row [G, N, part]
  void take_slices(const T* row, int64_t k, Hidden* to) const {
    const int64_t part = width / heads;
    for (int64_t n = 0; n < k; n++)
      for (int64_t g = 0; g < heads; g++, to += part) at::vec::convert(row + (g * learners + n) * part, to, part);
  }

  void run_layers(const Chunk& c) const {
    int64_t most = learners;
    if (form == Form::linear && w_top) {  // the dense weight itself runs in the place of N learners
      const int64_t rows = clip(c, at_least[most--]);
      const std::vector<Span> span(rows ? 1 : 0, Span{0, rows, d_in / kPerWord});
      multiply(c, c.x, span, plain(w_top, d_out, d_in), 0, d_out, finish_output(c));
    }
    const int64_t skip = clip(c, at_least[most + 1]);
    for (int64_t n = 0; n < most; n += company()) {
      const int64_t rows = clip(c, at_least[n + 1]), cols = std::min(company(), most - n) * width;
      if (rows <= skip) break;
      const std::vector<Span> span = {{skip, rows, d_in / kPerWord}};
      const Weights up = plain(w_up, learners * width, d_in), in = plain(w_in, learners * width, d_in);
      multiply(c, c.x, span, in, n * width, cols, finish_hidden(c, n * width, b_in, false));
      if (w_up) multiply(c, c.x, span, up, n * width, cols, finish_hidden(c, n * width, b_up, true));
    }
    for (int64_t high = most; high >= 1;) {  // tokens whose k share a second layer go together
      int64_t low = high;
      while (low > 1 && second_layer(low - 1) == second_layer(high)) low--;
      const Weights w = plain(second_layer(high), d_out, learners * width);
      multiply(c, c.h, spans(c, low, high, width), w, 0, d_out, finish_output(c));
      high = low - 1;
    }
  }

  // the second layer [O, N H] of tokens that run k learners
  const T* second_layer(int64_t k) const {
    if (k == learners && w_top) return w_top;
    return per_k ? w_out + (k - 1) * d_out * learners * width : w_out;
  }

  void run_columns(const Chunk& c) const {
    const int64_t deep = width / kPerWord;
    const Weights w{w_in, d_out, learners * deep, deep, learners, d_out * deep};
    multiply(c, c.x, spans(c, 1, learners, width), w, 0, d_out, finish_output(c));
  }

  void run_rows(const Chunk& c) const {
    for (int64_t i = 0; i < c.stop - c.first; i++) start_rest(order[c.first + i], k_at(c.first + i));
    for (int64_t n = 0; n < learners; n += company()) {
      const int64_t rows = clip(c, at_least[n + 1]), cols = std::min(company(), learners - n) * width;
      if (rows == 0) break;
      const std::vector<Span> span = {{0, rows, d_in / kPerWord}};
      multiply(c, c.x, span, plain(w_in, learners * width, d_in), n * width, cols, finish_slices(c, n * width));
    }
  }

  // ---- what becomes of a tile

  // columns of `n * H + col`: h = act(tile + b), or with `up` h *= tile + b
  auto finish_hidden(const Chunk& c, int64_t first_col, const T* b, bool up) const {
    return [=, this, &c](int64_t row, int64_t rows, int64_t col, int64_t cols, float* tile, int64_t tile_width) {
      for (int64_t i = 0; i < rows; i++) {
        Hidden* h = c.hidden + (row + i) * c.hidden_stride * kPerWord + first_col + col;
        float* from = tile + i * tile_width;
        const auto each = [&](const auto& value) {
          for (int64_t j = 0; j < cols; j += kLanes) {
            const int64_t count = std::min(kLanes, cols - j);
            Vec v = Vec::loadu(from + j);
            if (b) v = v + load(b + first_col + col + j, count);
            store(value(v, h + j, count), h + j, count);
          }
        };
        if (up) each([](const Vec& v, const Hidden* old, int64_t count) { return v * load(old, count); });
        else with_act(act, [&](const auto& f) { each([&](const Vec& v, const Hidden*, int64_t) { return f(v); }); });
      }
    };
  }

  auto finish_output(const Chunk& c) const {
    return [=, this, &c](int64_t row, int64_t rows, int64_t col, int64_t cols, float* tile, int64_t tile_width) {
      const T* b = b_out + k_at(c.first + row) * d_out + col;  // rows of a tile run equally many learners
      for (int64_t i = 0; i < rows; i++) put(order[c.first + row + i], b, col, cols, tile + i * tile_width);
    };
  }

  // column n * H + g * part + p of the product is column (g * N + n) * part + p of the output
  auto finish_slices(const Chunk& c, int64_t first_col) const {
    return [=, this, &c](int64_t row, int64_t rows, int64_t col, int64_t cols, float* tile, int64_t tile_width) {
      const int64_t part = width / heads;
      for (int64_t i = 0; i < rows; i++) {
        const int64_t token = order[c.first + row + i], k = k_at(c.first + row + i);
        for (int64_t j = 0; j < cols;) {
          const int64_t from = first_col + col + j, n = from / width, g = from % width / part, p = from % part;
          const int64_t count = std::min(part - p, cols - j), to = (g * learners + n) * part + p;
          // a tile may hold learners that a token with a lower k does not run
          if (n < k) put(token, b_out + k * d_out + to, to, count, tile + i * tile_width + j);
          j += count;
        }
      }
    };
  }

  // y[token, col ...] = sums + b (+ residual)
  void put(int64_t token, const T* b, int64_t col, int64_t cols, const float* sums) const {
    const int64_t start = token * d_out + col;
    for (int64_t j = 0; j < cols; j += kLanes) {
      const int64_t count = std::min(kLanes, cols - j);
      Vec v = load(b + j, count);
      if (sums) v = v + load(sums + j, count);
      if (residual) v = v + load(residual + start + j, count);
      store(v, out + start + j, count);
    }
  }

  // what no learner of a token adds to, form "rows"
  void start_rest(int64_t token, int64_t k) const {
    const int64_t part = width / heads;
    for (int64_t g = 0; g < heads && k < learners; g++) {
      const int64_t col = (g * learners + k) * part;
      put(token, b_out + k * d_out + col, col, (learners - k) * part, nullptr);
    }
  }

  // how many learners the token at a sorted place runs
  int64_t k_at(int64_t place) const {
    int64_t k = learners;
    while (place >= at_least[k]) k--;
    return k;
  }

  void run() const {
    at::parallel_for(at_least[1], tokens, 256, [&](int64_t first, int64_t stop) {
      for (int64_t p = first; p < stop; p++) put(order[p], b_out, 0, d_out, nullptr);
    });
    const int64_t chunks = cuts.size() - 1;
    if (at_least[1] == 0) return;
    if (chunks == 1) return run_chunk(cuts[0], cuts[1], true);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(chunks, at::get_num_threads()), 1, [&](int64_t, int64_t) {
      for (int64_t c = next++; c < chunks; c = next++) run_chunk(cuts[c], cuts[c + 1], false);
    });
  }
};

}  // namespace
