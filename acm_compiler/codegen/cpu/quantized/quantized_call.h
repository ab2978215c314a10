// One call of acm::learners with quantised weights: y_k(x) + residual of every token (docs/semantics.md, Int8 learners,
// Int4 learners).
//
// Weights are packed at the first call that needs them (kept.h). Sorted tokens are cut into blocks, whose rows of bytes
// and hidden values stay in the second cache; threads take blocks, or, where there are fewer blocks than threads, share
// the columns of each.
#pragma once

#include <optional>
#include <type_traits>

#include "../operation.h"
#include "int4_matrix.h"
#include "int8_matrix.h"

namespace {

constexpr int64_t kByteBlock = 256;      // tokens of a block at most,
constexpr int64_t kNearPanels = 1 << 20;  // bytes of panels that stay in the second cache
constexpr int64_t kLeastByteBlock = 32;  // and at least, where each thread has its own

// T: of tokens, biases and output; Kind: Bytes or Nibbles
template <typename T, typename Kind>
struct QuantisedCall : Operation<T> {
  using Op = Operation<T>;
  using Op::tokens, Op::learners, Op::order, Op::at_least, Op::k_at, Op::d_in, Op::d_out, Op::width, Op::x, Op::x_stride;
  using Op::b_in, Op::b_up, Op::b_out, Op::per_k, Op::form, Op::act, Op::norm;
  using Op::put, Op::put_idle, Op::put_slices, Op::start_rest, Op::take_slices;

  using Values = Weight<typename Kind::Value>;
  using Matrix = Part<typename Kind::Matrix, typename Kind::Value>;
  using Matrices = std::vector<Matrix>;
  using Rows = typename Kind::Rows;
  using Sums = typename Kind::Sums;

  Values w_in, w_up, w_out, w_top;
  const std::optional<at::Tensor> *s_in, *s_up, *s_out, *s_top;
  bool tiles = has_tiles();
  Matrices first, up;            // by learner: what reads tokens
  std::vector<Matrices> second;  // what reads the learners' parts: of tokens that run k learners second[layer(k)]

  // sorted places [first, stop), rows 0 ... stop - first
  struct Block {
    int64_t first, stop;
    Rows x, parts;      // tokens; what each learner makes of them, or reads
    float* hidden;      // of one learner
    int64_t hidden_stride;
  };

  int64_t clip(const Block& b, int64_t place) const { return std::clamp(place, b.first, b.stop) - b.first; }
  bool dense_top(int64_t k) const { return form == Form::linear && w_top && k == learners; }
  int64_t layer(int64_t k) const { return w_top && k == learners ? learners : per_k ? k - 1 : 0; }
  // scales of columns, from that one on; null where the products know them
  static const float* scales_from(const std::optional<at::Tensor>* scales, int64_t first) {
    if constexpr (std::is_same_v<Kind, Bytes>) return *scales ? (*scales)->const_data_ptr<float>() + first : nullptr;
    else return nullptr;
  }
  const float* scales(int64_t k) const {
    if (form == Form::cols) return scales_from(s_in, 0);
    return w_top && k == learners ? scales_from(s_top, 0) : scales_from(s_out, per_k ? (k - 1) * d_out : 0);
  }
  static Vec scaled(const Vec& v, const float* scale, int64_t first, int64_t count) {
    return scale ? v * load(scale + first, count) : v;
  }

  void run() {
    put_idle();
    const int64_t active = at_least[1], threads = at::get_num_threads();
    if (!active) return;
    gather_matrices();
    Memory& packed = memory_of(kPacked);
    pack(packed, active > kFewByteRows || !Kind::kReadsInPlace);
    int64_t count = divide_up(active, kByteBlock);
    const bool apart = active >= threads * kLeastByteBlock;
    if (apart) count = round_up(count, threads);
    const auto run = [&](int64_t i) { run_block(active * i / count, active * (i + 1) / count); };
    if (apart) share_out(count, run);
    else for (int64_t i = 0; i < count; i++) run(i);
    packed.end_call();
  }

 private:
  // of the calling thread
  enum Use { kPacked, kBlock, kRow, kUses };
  static Memory& memory_of(Use use) {
    static thread_local Memory kept[kUses];
    return kept[use];
  }

  // the weights that some token needs
  void gather_matrices() {
    const int64_t most = k_at(0), whole = dense_top(most) ? at_least[learners] : 0;
    const int64_t run = whole < at_least[1] && form != Form::cols ? k_at(whole) : 0;
    second.resize(learners + 1);
    for (int64_t n = 0; n < run; n++) {
      first.push_back(part(w_in, s_in, n * width, width, d_in));
      if (w_up) up.push_back(part(w_up, s_up, n * width, width, d_in));
    }
    for (int64_t k = most; k >= 1 && form != Form::rows; k--) {
      Matrices& of = second[layer(k)];
      if (at_least[k] == at_least[k + 1] || !of.empty()) continue;
      const bool top = w_top && k == learners;
      const int64_t row = per_k && !top ? (k - 1) * d_out : 0;
      if (dense_top(k)) of.push_back(part(w_top, s_top, 0, d_out, d_in));
      for (int64_t n = 0; n < k && !dense_top(k); n++)
        if (form == Form::cols) of.push_back(part(w_in, s_in, n * d_out, d_out, width));
        else of.push_back(part(top ? w_top : w_out, top ? s_top : s_out, row, d_out, width, n, learners));
    }
  }

  // so many rows of a weight from that one on: of each the piece of that number, `depth` values
  static Matrix part(const Values& weight, const std::optional<at::Tensor>* scales, int64_t row, int64_t cols,
                     int64_t depth, int64_t piece = 0, int64_t pieces = 1) {
    const int64_t number = row * pieces + piece;
    if constexpr (std::is_same_v<Kind, Bytes>) {
      return {{weight.data + number * depth, cols, depth, pieces * depth}, weight};
    } else {
      const int64_t numbers = 2 * groups_of(depth);
      const at::Half* of = (*scales)->const_data_ptr<at::Half>() + number * numbers;
      return {{weight.data + number * depth / 2, of, cols, depth, pieces * depth / 2, pieces * numbers}, weight,
              &**scales};
    }
  }

  // finds the panels of all, and makes those that are missing if that is wanted
  void pack(Memory& memory, bool missing) {
    std::vector<Matrix*> all;
    for (Matrices* some : {&first, &up}) for (Matrix& m : *some) all.push_back(&m);
    for (Matrices& some : second) for (Matrix& m : some) all.push_back(&m);
    pack_parts(std::move(all), missing, missing, memory);
  }

  void run_block(int64_t from, int64_t stop) const {
    const int64_t rows = stop - from, padded = round_up(rows, kByteRows), parts = k_at(from);
    Block b{from, stop, {1, d_in}, {parts, width}, nullptr, round_up(width, kLanes)};
    const int64_t floats = padded * b.hidden_stride * sizeof(float);
    Memory& memory = memory_of(kBlock);
    uint8_t* room = memory.grown<uint8_t>(floats + b.x.bytes(padded) + b.parts.bytes(padded));
    b.hidden = reinterpret_cast<float*>(room), room += floats;
    b.x.lay(room, padded), room += b.x.bytes(padded);
    b.parts.lay(room, padded);
    take_tokens(b);
    if (form == Form::rows) run_slices(b);
    else run_layers(b);
    memory.end_call();
  }

  // the tokens, normalised if a norm belongs to the operator, or the slices of them that learners read, as bytes
  void take_tokens(const Block& b) const {
    share_rows(0, b.stop - b.first, d_in, [&](int64_t i) {
      const int64_t token = order[b.first + i];
      const T* row = x + token * x_stride;
      T* own = memory_of(kRow).template grown<T>(2 * d_in);
      if (norm) {
        normalise(row, norm->moments[token], d_in, Norm::data_of<T>(norm->weight), Norm::data_of<T>(norm->bias), own);
        row = own;
      }
      if (form != Form::cols) {
        b.x.quantise(row, i, 0);
        return;
      }
      const int64_t k = k_at(b.first + i);
      take_slices(row, k, own + d_in);
      for (int64_t n = 0; n < k; n++) b.parts.quantise(own + d_in + n * width, i, n);
    });
  }

  void run_layers(const Block& b) const {
    int64_t top = 0;
    if (dense_top(learners)) add_up(b, b.x, learners, 0, top = clip(b, at_least[learners]));
    for (int64_t n = 0; n < b.parts.parts && form != Form::cols; n++) run_first(b, n, top, clip(b, at_least[n + 1]));
    for (int64_t high = b.parts.parts; high >= 1;) {  // tokens whose k share a second layer go together
      int64_t low = high;
      while (low > 1 && layer(low - 1) == layer(high)) low--;
      if (!dense_top(high)) add_up(b, b.parts, high, clip(b, at_least[high + 1]), clip(b, at_least[low]));
      high = low - 1;
    }
  }

  // Calls f(strip, row, height) for all tiles of the products of these rows with so many matrices like one: strip by
  // strip, or, where panels of all of them stay in the second cache, row by row, which writes them as they lie.
  template <typename F>
  void each_tile(const Matrix& like, int64_t count, int64_t from, int64_t to, const F& f) const {
    const int64_t strips = like.strips(), tiles_of_rows = divide_up(to - from, kByteRows);
    const bool by_row = count * like.packed_words() * 4 <= kNearPanels && tiles_of_rows >= at::get_num_threads();
    share_out(by_row ? tiles_of_rows : strips, [&](int64_t item) {
      const Tiles held(tiles);
      for (int64_t other = 0; other < (by_row ? strips : tiles_of_rows); other++) {
        const int64_t row = from + (by_row ? item : other) * kByteRows;
        f(by_row ? other : item, row, std::min(kByteRows, to - row));
      }
    });
  }

  // learner n's hidden values of rows [from, to), as its part
  void run_first(const Block& b, int64_t n, int64_t from, int64_t to) const {
    if (from >= to) return;
    each_tile(first[n], w_up ? 2 : 1, from, to, [&](int64_t strip, int64_t row, int64_t height) {
      Sums sums;
      first[n].multiply(b.x, row, 0, height, strip, tiles, sums);
      with_act(act, [&](const auto& f) {
        write_hidden(b, n, row, height, strip, sums, scales_from(s_in, 0), b_in, [&](const Vec& v, const float*) { return f(v); });
      });
      if (!w_up) return;
      up[n].multiply(b.x, row, 0, height, strip, tiles, sums);
      write_hidden(b, n, row, height, strip, sums, scales_from(s_up, 0), b_up,
                   [](const Vec& v, const float* old) { return v * Vec::loadu(old); });
    });
    share_rows(from, to, width, [&](int64_t i) { b.parts.quantise(b.hidden + i * b.hidden_stride, i, n); });
  }

  template <typename F>
  void write_hidden(const Block& b, int64_t n, int64_t row, int64_t height, int64_t strip, const Sums& sums,
                    const float* scale, const T* bias, const F& f) const {
    const int64_t col = strip * kPanelCols, cols = std::min(kPanelCols, width - col), start = n * width + col;
    for (int64_t i = 0; i < height; i++) {
      float* to = b.hidden + (row + i) * b.hidden_stride + col;
      for (int64_t j = 0; j < cols; j += kLanes) {
        const int64_t count = std::min(kLanes, cols - j);
        Vec v = scaled(sums.value(i, j, b.x, row + i, 0), scale, start + j, count);
        if (bias) v = v + load(bias + start + j, count);
        f(v, to + j).store(to + j);
      }
    }
  }

  // the outputs of rows [from, to), which share the second layer of k: sums over the parts that each row has
  void add_up(const Block& b, const Rows& parts, int64_t k, int64_t from, int64_t to) const {
    if (from >= to) return;  // perhaps no token needs these weights
    const Matrices& of = second[layer(k)];
    const float* scale = scales(k);
    each_tile(of[0], parts.parts, from, to, [&](int64_t strip, int64_t row, int64_t height) {
      Sums sums;
      alignas(64) float total[kByteRows * kPanelCols];
      const int64_t col = strip * kPanelCols, cols = std::min(kPanelCols, d_out - col), wide = round_up(cols, kLanes);
      for (int64_t n = 0; n < parts.parts; n++) {
        const int64_t some = parts.parts == 1 ? height : std::min(height, clip(b, at_least[n + 1]) - row);
        if (some <= 0) break;
        of[n].multiply(parts, row, n, some, strip, tiles, sums);
        for (int64_t i = 0; i < some; i++)
          for (int64_t j = 0; j < wide; j += kLanes) {
            float* t = total + i * kPanelCols + j;
            const Vec v = sums.value(i, j, parts, row + i, n);
            (n ? Vec::loadu(t) + v : v).store(t);
          }
      }
      for (int64_t i = 0; i < height; i++) {
        float* t = total + i * kPanelCols;
        for (int64_t j = 0; j < cols; j += kLanes)
          scaled(Vec::loadu(t + j), scale, col + j, std::min(kLanes, cols - j)).store(t + j);
        put(order[b.first + row + i], b_out + k_at(b.first + row + i) * d_out + col, col, cols, t);
      }
    });
  }

  void run_slices(const Block& b) const {
    const float* scale = scales_from(s_in, 0);
    share_rows(0, b.stop - b.first, d_out, [&](int64_t i) { start_rest(order[b.first + i], k_at(b.first + i)); });
    for (int64_t n = 0; n < b.parts.parts; n++)
      each_tile(first[n], 1, 0, clip(b, at_least[n + 1]), [&](int64_t strip, int64_t row, int64_t height) {
        Sums sums;
        alignas(64) float values[kPanelCols];
        first[n].multiply(b.x, row, 0, height, strip, tiles, sums);
        const int64_t col = strip * kPanelCols, cols = std::min(kPanelCols, width - col);
        for (int64_t i = 0; i < height; i++) {
          for (int64_t j = 0; j < cols; j += kLanes)
            scaled(sums.value(i, j, b.x, row + i, 0), scale, n * width + col + j, std::min(kLanes, cols - j))
                .store(values + j);
          put_slices(b.first + row + i, 1, n * width + col, cols, values, 0);
        }
      });
  }
};

}  // namespace
