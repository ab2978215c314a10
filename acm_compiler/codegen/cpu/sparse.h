// One call of acm::sparse_learners for few tokens: what a token multiplies by nothing, no weight is read for
// (docs/semantics.md, Skipped values).
//
// Weights are kept transposed (kept.h), so that what one value is multiplied by lies together: of a token's values
// those that count are gathered, and as many rows are added up. Time is that of reading the rows: whole ones, or as
// many columns as the learners have that it runs, several side by side. Tokens have their own lists and sums; they
// take turns at rows that are near.
#pragma once

#include <array>
#include <cmath>

#include "operation.h"
#include "products/multiply.h"

namespace {

constexpr int64_t kFewTokens = 16;         // more are faster with all values
constexpr int64_t kRowsAtOnce = 8;         // a row follows another in memory only by chance: so many are read at a time
constexpr int64_t kVecsAtOnce = 4;         // of each of them
constexpr int64_t kNearRowBytes = 1 << 18;  // of rows that stay in the second cache until all tokens have had them

// A weight matrix [cols, depth] and its transpose: [depth, stride], each row a whole number of cache lines.
template <typename T>
struct Transposed {
  static constexpr int64_t kLine = 64 / sizeof(T), kStripRows = kLine;
  const T* data;
  int64_t cols, depth;
  T* rows = nullptr;

  int64_t stride() const { return round_up(cols, kLine); }
  const T* row(int64_t j) const { return rows + j * stride(); }

  PanelKey key() const { return {data, cols, depth, depth, sizeof(T), Layout::rows}; }
  int64_t packed_words() const { return depth * stride() * sizeof(T) / sizeof(float); }
  int64_t strips() const { return divide_up(depth, kStripRows); }
  void lay(void* to) { rows = static_cast<T*>(to); }
  void pack(int64_t strip) const {
    const int64_t first = strip * kStripRows, count = std::min(kStripRows, depth - first);
    T* to = rows + first * stride();
    if (strip == 0) columns_packed.fetch_add(cols, std::memory_order_relaxed);
    for (int64_t col = 0; col < cols; col++)
      for (int64_t j = 0; j < count; j++) to[j * stride() + col] = data[col * depth + first + j];
    for (int64_t j = 0; j < count; j++) std::fill(to + j * stride() + cols, to + (j + 1) * stride(), T(0));
  }
};

// whether rows are asked for ahead: short ones, as of bfloat16, end before the processor does so by itself; floats are
// no faster for it
template <typename T>
constexpr bool kFetches = sizeof(T) < sizeof(float);
template <typename T>
constexpr int kVecsPerLine = std::max<int64_t>(1, 64 / sizeof(T) / kLanes);

// the values of a token that count, in order, and their places
struct Values {
  const int32_t* places;
  const float* values;
  int64_t count;
};

// sums[cols] += so many values times as many rows of whole vectors; `next`: the rows that are read after these
template <typename T, int kRows>
void add_rows(const T* const* rows, const T* const* next, const float* values, int64_t cols, float* sums) {
  Vec a[kRows];
  for (int i = 0; i < kRows; i++) a[i] = Vec(values[i]);
  const auto step = [&]<int kVecs>(int64_t col, std::integral_constant<int, kVecs>) ACM_INLINED {
    Vec some[kVecs];
    for (Vec& v : some) v = Vec(0.f);
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVecs; j++)
        some[j] = at::vec::fmadd(a[i], load(rows[i] + col + j * kLanes, kLanes), some[j]);
    for (int i = 0; kFetches<T> && i < kRows; i++)
      for (int j = 0; j < kVecs; j += kVecsPerLine<T>) __builtin_prefetch(next[i] + col + j * kLanes, 0, 2);
    for (int j = 0; j < kVecs; j++) (Vec::loadu(sums + col + j * kLanes) + some[j]).store(sums + col + j * kLanes);
  };
  int64_t col = 0;
  for (; col + kVecsAtOnce * kLanes <= cols; col += kVecsAtOnce * kLanes)
    step(col, std::integral_constant<int, kVecsAtOnce>());
  for (; col < cols; col += kLanes) step(col, std::integral_constant<int, 1>());
}

template <typename T, std::size_t... kIndex>
void add_some(int64_t count, const T* const* rows, const T* const* next, const float* values, int64_t cols, float* sums,
              std::index_sequence<kIndex...>) {
  using Add = void (*)(const T* const*, const T* const*, const float*, int64_t, float*);
  static constexpr std::array<Add, sizeof...(kIndex)> all{&add_rows<T, kIndex + 1>...};
  all[count - 1](rows, next, values, cols, sums);
}

// Values of some tokens times the rows of matrices of one shape. `deepest`: rows; `per_value`: how many matrices.
struct SparseProduct {
  const Values* tokens;  // of sorted places
  int64_t first, stop;   // places
  int64_t cols, deepest, per_value;

  int64_t count() const {
    int64_t sum = 0;
    for (int64_t i = first; i < stop; i++) sum += tokens[i].count;
    return sum;
  }

  // even strips, one for each thread that has enough to do: the wider, the more is read in one go
  Job job() const {
    const int64_t values = std::max<int64_t>(1, count()) * per_value, worth = values * cols / kLeastWork;
    const int64_t threads = std::clamp<int64_t>(worth, 1, at::get_num_threads());
    return {{{0, 1, values}}, cols, round_up(divide_up(cols, threads), kLanes), kLanes, 1};
  }

  // calls finish(place, cols, sums) for each token, of columns from `col` on as far as it has some, of that many at
  // most; `cols_of(place)`: how many it has
  template <typename T, typename ColsOf, typename Finish>
  void run(const Transposed<T>& matrix, int64_t col, int64_t most, const ColsOf& cols_of, const Finish& finish) const {
    const int64_t apart = round_up(most, kLanes), height = stop - first;
    float* sums = panel_memory(height * apart);
    std::fill_n(sums, height * apart, 0.f);
    const auto width = [&](int64_t i) { return std::min(most, cols_of(first + i) - col); };
    std::array<int64_t, kFewTokens> done{};
    const int64_t near = std::max<int64_t>(kRowsAtOnce, kNearRowBytes / (apart * sizeof(T)));
    const int64_t block = height > 1 ? near : deepest;
    for (int64_t end = block; end - block < deepest; end += block)
      for (int64_t i = 0; i < height && width(i) > 0; i++)
        done[i] = add(matrix, tokens[first + i], done[i], end, col, round_up(width(i), kLanes), sums + i * apart);
    for (int64_t i = 0; i < height && width(i) > 0; i++) finish(first + i, width(i), sums + i * apart);
  }

 private:
  // adds whole groups of a token's values from `done` on whose places are before `end`, what is left of them with the
  // last; returns where it stopped. Groups do not depend on where blocks end.
  template <typename T>
  int64_t add(const Transposed<T>& matrix, const Values& v, int64_t done, int64_t end, int64_t col, int64_t cols,
              float* sums) const {
    while (done < v.count) {
      const int64_t group = std::min(kRowsAtOnce, v.count - done);
      if (end < deepest && (group < kRowsAtOnce || v.places[done + group - 1] >= end)) break;
      const T *rows[kRowsAtOnce], *next[kRowsAtOnce];
      for (int64_t i = 0; i < group; i++) {
        rows[i] = matrix.row(v.places[done + i]) + col;
        if constexpr (kFetches<T>) next[i] = matrix.row(v.places[std::min(done + group + i, v.count - 1)]) + col;
      }
      add_some<T>(group, rows, next, v.values + done, cols, sums, std::make_index_sequence<kRowsAtOnce>());
      done += group;
    }
    return done;
  }
};

// T: of the tensors.
template <typename T>
struct SparseCall : Operation<T> {
  using Op = Operation<T>;
  using Op::tokens, Op::learners, Op::order, Op::at_least, Op::k_at, Op::d_in, Op::d_out, Op::width, Op::x, Op::x_stride;
  using Op::b_in, Op::b_up, Op::b_out, Op::put, Op::put_hidden, Op::put_idle;
  using Matrix = Part<Transposed<T>, T>;

  Weight<T> w_in, w_up, w_out, w_top;
  const float *thresholds_in, *thresholds_hidden;
  Matrix first, up, second, top;

  void run() {
    put_idle();
    const int64_t active = at_least[1], on_top = w_top ? at_least[learners] : 0, deep = learners * width;
    if (!active) return;
    const auto part = [](const Weight<T>& weight, int64_t cols, int64_t depth) -> Matrix {
      return {{weight.data, cols, depth}, weight, nullptr};
    };
    first = part(w_in, deep, d_in), up = part(w_up, deep, d_in);
    second = part(w_out, d_out, deep), top = part(w_top, d_out, deep);
    std::vector<Matrix*> parts{&first};
    if (w_up) parts.push_back(&up);
    if (on_top < active) parts.push_back(&second);
    if (on_top) parts.push_back(&top);
    pack_parts(std::move(parts), true, false, memory_of(kPlaces));

    const int64_t most = k_at(0) * width, apart = std::max(d_in, most);
    int32_t* places = memory_of(kPlaces).template grown<int32_t>(active * apart);
    float* values = memory_of(kValues).template grown<float>(active * apart);
    T* hidden = memory_of(kHidden).template grown<T>(active * most);
    std::array<Values, kFewTokens> kept;
    const auto gather_all = [&](const auto& row, const float* thresholds, const auto& count) {
      share_rows(0, active, apart, [&](int64_t i) {
        kept[i] = gather(row(i), thresholds, count(i), places + i * apart, values + i * apart);
      });
    };
    gather_all([&](int64_t i) { return x + order[i] * x_stride; }, thresholds_in, [&](int64_t) { return d_in; });
    const auto hidden_of = [&](int64_t i) { return k_at(i) * width; };
    multiply(std::vector<SparseProduct>{{kept.data(), 0, active, most, d_in, w_up ? 2 : 1}},
             [&](const SparseProduct& product, const Piece& piece) {
      for (const bool is_up : {false, true}) {
        if (is_up && !w_up) break;
        const T* b = is_up ? b_up : b_in;
        product.run(is_up ? up : first, piece.col, piece.count, hidden_of, [&](int64_t i, int64_t cols, float* sums) {
          put_hidden(b ? b + piece.col : nullptr, 1, cols, sums, cols, is_up, hidden + i * most + piece.col, most);
        });
      }
    });
    gather_all([&](int64_t i) { return hidden + i * most; }, thresholds_hidden, hidden_of);
    std::vector<SparseProduct> out;
    if (on_top) out.push_back({kept.data(), 0, on_top, d_out, deep, 1});
    if (on_top < active) out.push_back({kept.data(), on_top, active, d_out, deep, 1});
    multiply(out, [&](const SparseProduct& product, const Piece& piece) {
      const auto cols_of = [&](int64_t) { return d_out; };
      product.run(product.first < on_top ? top : second, piece.col, piece.count, cols_of,
                  [&](int64_t i, int64_t cols, float* sums) {
        put(order[i], b_out + k_at(i) * d_out + piece.col, piece.col, cols, sums);
      });
    });
  }

 private:
  // memory of the calling thread: of each token the values that count, their places, and hidden values
  enum Use { kPlaces, kValues, kHidden, kUses };
  static Memory& memory_of(Use use) {
    static thread_local Memory kept[kUses];
    return kept[use];
  }

  static Values gather(const T* row, const float* thresholds, int64_t count, int32_t* places, float* values) {
    int64_t kept = 0;
    for (int64_t j = 0; j < count; j++) {
      const float v = row[j];
      places[kept] = j, values[kept] = v;
      kept += !(std::abs(v) < thresholds[j] || v == 0);
    }
    return {places, values, kept};
  }
};

}  // namespace
