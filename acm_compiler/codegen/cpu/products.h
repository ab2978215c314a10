// Products a w^T of scattered rows with a weight matrix, tile by tile; what becomes of a tile is the caller's business.
//
// Everything here is 32-bit words: a float, or a pair of bfloat16 where the processor multiplies those (else bfloat16
// becomes floats as it is read). Rows of `a` are read where they are, so that sorting tokens costs nothing; a panel of
// the weights (as many columns as fill a few vectors) is transposed once and used for all rows, or, where memory for one
// is not granted, piece by piece for each tile. A row's sums are made in one order, whatever its neighbours are.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "matrix.h"
#include "share.h"

namespace {

// a tile's sums, one panel row and one broadcast fill the 32 (without AVX-512 on x86: 16) registers
#if defined(CPU_CAPABILITY_AVX2)
constexpr int64_t kTileVecs = 2;
#else
constexpr int64_t kTileVecs = 4;
#endif
constexpr int64_t kPanelCols = kTileVecs * kLanes;
constexpr int64_t kPanelDepth = 1024;  // words: a panel stays in the second cache
constexpr int64_t kStretch = 384;      // words summed before they are added to what there is: short sums round less
constexpr int64_t kDotCols = 4;
// up to so many rows, and one for so many words of depth, a product without panels is the cheaper one
constexpr int64_t kDotRows = 32, kDotDepth = 32;

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// sum + a b, of floats or, with kPairs, of pairs of bfloat16
template <bool kPairs>
inline Vec multiply_add(const Vec& a, const Vec& b, const Vec& sum) {
#if defined(__AVX512BF16__)
  const auto pairs = [](const Vec& words) { return (__m512bh)_mm512_castps_si512(words); };
  if constexpr (kPairs) return _mm512_dpbf16_ps(sum, pairs(a), pairs(b));
#endif
  return at::vec::fmadd(a, b, sum);
}

// ---- the inner loops --------------------------------------------------------------------------------------------

// out[kRows, kVecs * lanes] (+)= rows times a panel [depth, kVecs * lanes]
template <bool kPairs, int kRows, int kVecs>
void multiply_tile(const float* const* rows, const float* panel, int64_t depth, bool resume, float* out) {
  constexpr int64_t kWidth = kVecs * kLanes;
  Vec sums[kRows][kVecs];
  const float* row[kRows];
  for (int i = 0; i < kRows; i++) {
    row[i] = rows[i];
    for (int j = 0; j < kVecs; j++) sums[i][j] = Vec(0.f);
  }
  const auto flush = [&] {
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVecs; j++) {
        float* to = out + i * kWidth + j * kLanes;
        (resume ? Vec::loadu(to) + sums[i][j] : sums[i][j]).store(to);
        sums[i][j] = Vec(0.f);
      }
    resume = true;
  };
  for (int64_t from = 0; from < depth; from += kStretch) {
    const int64_t to = std::min(depth, from + kStretch);
    for (int64_t d = from; d < to; d++) {
      Vec w[kVecs];
      for (int j = 0; j < kVecs; j++) w[j] = Vec::loadu(panel + d * kWidth + j * kLanes);
      for (int i = 0; i < kRows; i++) {
        const Vec a(row[i][d]);
        for (int j = 0; j < kVecs; j++) sums[i][j] = multiply_add<kPairs>(a, w[j], sums[i][j]);
      }
    }
    flush();
  }
}

// out[i * width + j] = rows[i] . columns[j], without a panel: for so few rows that transposing would not pay
template <bool kPairs, int kRows>
void multiply_dots(const float* const* rows, const float* const* columns, int64_t depth, int64_t width, float* out) {
  Vec sums[kRows][kDotCols];
  for (auto& row : sums) for (Vec& sum : row) sum = Vec(0.f);
  const auto step = [&](int64_t d, int64_t count) {
    Vec w[kDotCols];
    for (int j = 0; j < kDotCols; j++) w[j] = Vec::loadu(columns[j] + d, count);
    for (int i = 0; i < kRows; i++) {
      const Vec a = Vec::loadu(rows[i] + d, count);
      for (int j = 0; j < kDotCols; j++) sums[i][j] = multiply_add<kPairs>(a, w[j], sums[i][j]);
    }
  };
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) step(d, kLanes);
  if (d < depth) step(d, depth - d);
  const auto add = [](const Vec& a, const Vec& b) { return a + b; };
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kDotCols; j++) out[i * width + j] = at::vec::vec_reduce_all<float>(add, sums[i][j]);
}

template <bool kPairs>
struct Inner {
  using Tile = void (*)(const float* const*, const float*, int64_t, bool, float*);
  using Dots = void (*)(const float* const*, const float* const*, int64_t, int64_t, float*);

  template <std::size_t... kIndex>
  static constexpr auto tiles(std::index_sequence<kIndex...>) {
    return std::array<Tile, sizeof...(kIndex)>{
        &multiply_tile<kPairs, kIndex / kTileVecs + 1, kIndex % kTileVecs + 1>...};
  }
  template <std::size_t... kIndex>
  static constexpr auto dots_of(std::index_sequence<kIndex...>) {
    return std::array<Dots, sizeof...(kIndex)>{&multiply_dots<kPairs, kIndex + 1>...};
  }
  static Tile tile(int64_t rows, int64_t vecs) {
    static constexpr auto all = tiles(std::make_index_sequence<kTileRows * kTileVecs>());
    return all[(rows - 1) * kTileVecs + vecs - 1];
  }
  static Dots dots(int64_t rows) {
    static constexpr auto all = dots_of(std::make_index_sequence<kTileRows>());
    return all[rows - 1];
  }
};

// ---- a whole product --------------------------------------------------------------------------------------------

// this thread's memory for one panel and for sums that wait for more depth
inline float* panel_memory(int64_t words) {
  static thread_local Memory memory;
  return memory.grown<float>(words);
}

// One product of rows with columns [first_col, first_col + cols) of a matrix, piece by piece. `finish(row, rows, col,
// cols, tile, width)` gets every tile of sums, [rows, width], once. `most`: of all rows of the call, these among them; it
// decides how they are summed. `memory`: so many words a panel of one piece may have.
template <typename T, bool kPairs>
struct Product {
  static constexpr bool kAsIs = kPairs || std::is_same_v<T, float>;  // rows are words as they are
  const T* const* rows;
  std::vector<Span> spans;
  Matrix<T, kPairs> matrix;
  int64_t first_col, cols, most, memory;

  Job job() const {
    const int64_t unit = dots() ? kDotCols : kLanes;
    return {spans, cols, widest(), unit, Matrix<T, kPairs>::kPerWord};
  }

  // A panel of the whole depth of these columns, for pieces that share it: its words, whether there is one, and how
  // block number `b` of it is made.
  bool can_share_panels() const { return !dots() && has_panel(); }
  int64_t panel_words(int64_t count) const { return round_up(count, kLanes) * spans.front().depth; }
  int64_t panel_blocks() const { return divide_up(spans.front().depth, block()); }
  void pack_block(int64_t col, int64_t count, int64_t b, float* panel) const {
    const int64_t width = round_up(count, kLanes), from = b * block();
    matrix.pack(first_col + col, count, width, from, std::min(from + block(), spans.front().depth), panel + from * width);
  }

  // `panel`: of the whole depth, or null
  template <typename Finish>
  void run(const Piece& piece, const float* panel, const Finish& finish) const {
    dots() ? run_dots(piece, finish) : has_panel() ? run_panel(piece, panel, finish) : run_pieces(piece, finish);
  }

 private:
  bool dots() const {
    const bool few = most <= kDotRows && most * kDotDepth <= matrix.depth;
    return few && matrix.pieces == 1 && kAsIs;
  }
  bool has_panel() const { return memory >= column_words() * kLanes; }
  int64_t widest() const {
    return dots() ? kPanelCols : has_panel() ? std::min(memory / column_words() / kLanes * kLanes, kPanelCols) : kLanes;
  }

  // depth is cut into equal blocks; where they begin must not depend on other rows' depth: it decides in what order a
  // row is summed
  int64_t blocks() const { return divide_up(matrix.depth, kPanelDepth); }
  int64_t block() const { return divide_up(matrix.depth, blocks()); }
  // words of memory for one column: of the panel, and of sums that wait for more depth
  int64_t column_words() const { return block() + (blocks() > 1 ? spans.back().to - spans.front().from : 0); }

  // out (+)= words [from, to) of a tile's rows times a panel of so many vectors that begins there
  void multiply(int64_t row, int64_t height, int64_t from, int64_t to, const float* panel, int64_t vecs,
                float* out) const {
    const auto tile = Inner<kPairs>::tile(height, vecs);
    const float* starts[kTileRows];
    if constexpr (kAsIs) {
      for (int64_t i = 0; i < height; i++) starts[i] = reinterpret_cast<const float*>(rows[row + i]) + from;
      tile(starts, panel, to - from, from > 0, out);
    } else {
      float copies[kTileRows * kStretch];
      for (int64_t i = 0; i < height; i++) starts[i] = copies + i * kStretch;
      for (int64_t d = from; d < to; d += kStretch) {
        const int64_t count = std::min(kStretch, to - d);
        for (int64_t i = 0; i < height; i++) at::vec::convert(rows[row + i] + d, copies + i * kStretch, count);
        tile(starts, panel + (d - from) * vecs * kLanes, count, d > 0, out);
      }
    }
  }

  template <typename Finish>
  void run_dots(const Piece& piece, const Finish& finish) const {
    const int64_t col = piece.col, count = piece.count;
    float tile[kTileRows * kPanelCols];
    const float* columns[kPanelCols];
    for (int64_t j = 0; j < kPanelCols; j++) columns[j] = matrix.words(first_col + col + std::min(j, count - 1));
    for (const Span& span : piece.spans)
      for (int64_t row = span.from; row < span.to; row += kTileRows) {
        const int64_t height = std::min(kTileRows, span.to - row);
        for (int64_t j = 0; j < count; j += kDotCols)
          Inner<kPairs>::dots(height)(reinterpret_cast<const float* const*>(rows + row), columns + j, span.depth,
                                      kPanelCols, tile + j);
        finish(row, height, col, count, tile, kPanelCols);
      }
  }

  // One vector of columns without a panel of them; the sums are those of run_panel, bit by bit. Seldom needed, and said
  // to be: with one more caller that counts, the compiler inlines `finish` in none, which costs whole calls a tenth.
  template <typename Finish>
  __attribute__((cold)) void run_pieces(const Piece& piece, const Finish& finish) const {
    const int64_t col = piece.col, count = piece.count;
    float tile[kTileRows * kLanes], words[kStretch * kLanes];
    for (const Span& span : piece.spans)
      for (int64_t row = span.from; row < span.to; row += kTileRows) {
        const int64_t height = std::min(kTileRows, span.to - row);
        for (int64_t from = 0; from < span.depth; from += block()) {
          const int64_t stop = std::min(from + block(), span.depth);
          for (int64_t d = from; d < stop; d += kStretch) {
            const int64_t to = std::min(d + kStretch, stop);
            matrix.pack(first_col + col, count, kLanes, d, to, words);
            multiply(row, height, d, to, words, 1, tile);
          }
        }
        finish(row, height, col, count, tile, kLanes);
      }
  }

  template <typename Finish>
  void run_panel(const Piece& piece, const float* whole, const Finish& finish) const {
    const int64_t col = piece.col, count = piece.count, width = round_up(count, kLanes), vecs = width / kLanes;
    const int64_t block = this->block(), first = piece.spans.front().from, deepest = piece.spans.front().depth;
    const int64_t own = whole ? 0 : block * width, waiting = blocks() > 1 ? piece.spans.back().to - first : 0;
    float* kept = panel_memory(own + waiting * width);
    float tile[kTileRows * kPanelCols];
    for (int64_t from = 0; from < deepest; from += block) {
      const int64_t to = std::min(deepest, from + block);
      if (!whole) matrix.pack(first_col + col, count, width, from, to, kept);
      const float* panel = whole ? whole + from * width : kept;
      for (const Span& span : piece.spans) {
        if (span.depth <= from) break;
        for (int64_t row = span.from; row < span.to; row += kTileRows) {
          const int64_t height = std::min(kTileRows, span.to - row);
          float* out = waiting ? kept + own + (row - first) * width : tile;
          multiply(row, height, from, std::min(to, span.depth), panel, vecs, out);
          if (span.depth <= to) finish(row, height, col, count, out, width);
        }
      }
    }
  }
};

}  // namespace
