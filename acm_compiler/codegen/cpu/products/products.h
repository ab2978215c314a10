// Products a w^T of scattered rows with a weight matrix, tile by tile; what becomes of a tile is the caller's business.
//
// Everything here is 32-bit words (loops.h). Rows of `a` are read where they are, so that sorting tokens costs nothing;
// a panel of the weights is there (kept.h), or of as many columns as a piece has it is made once and used for all rows,
// or, where memory for one is not granted, piece by piece for each tile. A row's sums are made in one order, whatever
// its neighbours are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "loops.h"
#include "matrix.h"
#include "share.h"
#include "tiles.h"

namespace {

constexpr int64_t kWidePanelCols = 128;  // where AMX multiplies: rows are then read less often
constexpr int64_t kNearWords = 128;      // of rows that stay in the first cache while AMX multiplies them
constexpr int64_t kPanelDepth = 1024;    // words: a panel stays in the second cache
// up to so many rows, and one for so many words of depth, a product without panels is the cheaper one
constexpr int64_t kDotRows = 32, kDotDepth = 32;

// this thread's memory for one panel and for sums that wait for more depth
inline float* panel_memory(int64_t words) {
  static thread_local Memory memory;
  return memory.grown<float>(words);
}

// One product of rows with all columns of a matrix, piece by piece. `finish(row, rows, col, cols, tile, width)` gets
// every tile of sums, [rows, width], once. `first_col`: of the layer that the matrix is part of. `most`: of all rows of
// the call, these among them; it decides how they are summed. `memory`: so many words a panel of one piece may have.
// `tiles`: whether AMX multiplies.
template <typename T, bool kPairs>
struct Product {
  static constexpr bool kAsIs = kPairs || std::is_same_v<T, float>;  // rows are words as they are
  const T* const* rows;
  std::vector<Span> spans;
  Matrix<T, kPairs> matrix;
  int64_t first_col, cols, most, memory;
  bool tiles = false;

  Job job() const {
    const int64_t unit = dots() ? kDotCols : kLanes;
    return {spans, cols, widest(), unit, Matrix<T, kPairs>::kPerWord, tiles ? kTileGroup : kTileRows};
  }

  // whether so few rows of the call are multiplied by such a matrix without panels
  static bool is_few(int64_t most, const Matrix<T, kPairs>& matrix) {
    return most <= kDotRows && most * kDotDepth <= matrix.depth && matrix.pieces == 1 && kAsIs;
  }

  template <typename Finish>
  void run(const Piece& piece, const Finish& finish) const {
    const Tiles held(tiles && !dots());
    dots() ? run_dots(piece, finish) : has_panel() ? run_panel(piece, finish) : run_pieces(piece, finish);
  }

 private:
  bool dots() const { return is_few(most, matrix); }
  bool has_panel() const { return memory >= column_words() * kLanes; }
  int64_t widest() const {
    if (dots()) return kPanelCols;
    const int64_t most = tiles ? kWidePanelCols : kPanelCols;
    return has_panel() ? std::min(memory / column_words() / kLanes * kLanes, most) : kLanes;
  }

  // Depth is cut into equal blocks; where they begin must not depend on other rows' depth: it decides in what order
  // vectors sum a row. Tiles do so word by word, however they are cut.
  int64_t blocks() const { return tiles ? 1 : divide_up(matrix.depth, kPanelDepth); }
  int64_t block() const { return divide_up(matrix.depth, blocks()); }
  // words of memory for one column: of a panel that is made for a piece, and of sums, of a tile or of all rows if they
  // wait for more depth
  int64_t column_words() const { return (matrix.panel ? 0 : block()) + std::max(waiting(spans), tile_rows()); }
  int64_t waiting(const std::vector<Span>& some) const { return blocks() > 1 ? height_of(some) : 0; }

  int64_t tile_rows() const { return tiles ? kTileGroup : kTileRows; }

  // out[height, width] (+)= words [from, to) of a tile's rows times a panel of so many columns that begins there
  void multiply(int64_t row, int64_t height, int64_t from, int64_t to, Panel panel, int64_t width, float* out) const {
    if constexpr (kPairs)
      if (tiles) return multiply_in_tiles(row, height, from, to, panel, width, out);
    const int64_t vecs = width / kLanes;
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
        tile(starts, panel.from(0, d - from), count, d > 0, out);
      }
    }
  }

  // The same by AMX, which takes whole tiles: rows that do not fill them, or lie scattered, are copied, and what the last
  // words lack is zeros.
  void multiply_in_tiles(int64_t row, int64_t height, int64_t from, int64_t to, Panel panel, int64_t width,
                         float* out) const {
    const int64_t words = to - from, padded = round_up(words, kTileSide), whole = words / kTileSide * kTileSide;
    const int64_t tall = round_up(height, kTileSide), near = round_up(divide_up(words, divide_up(words, kNearWords)), kTileSide);
    Lines lines = lines_of(row, height, from);
    if (!lines.data || padded > words) {
      static thread_local Memory memory;
      float* copies = memory.grown<float>(kTileGroup * padded);
      for (int64_t i = 0; i < height; i++) {
        std::copy_n(reinterpret_cast<const float*>(rows[row + i]) + from, words, copies + i * padded);
        std::fill(copies + i * padded + words, copies + (i + 1) * padded, 0.f);
      }
      lines = {copies, padded};
    }
    float edge[kTileGroup * kWidePanelCols];
    float* sums = tall > height ? edge : out;  // the rows behind belong to other tiles
    if (sums == edge && from > 0) std::copy_n(out, height * width, edge);
    for (int64_t at = 0; at < whole; at += near)
      multiply_by_tiles({lines.data + at, lines.stride}, tall, panel.from(0, at), width, std::min(near, whole - at),
                        from + at > 0, sums, width);
    if (whole < words) {
      float last[kTileSide * kWidePanelCols];
      for (int64_t col = 0; col < width; col += kLanes) {
        float* end = std::copy_n(panel.from(col, whole).data, (words - whole) * kLanes, last + col * kTileSide);
        std::fill(end, last + (col + kLanes) * kTileSide, 0.f);
      }
      multiply_by_tiles({lines.data + whole, lines.stride}, tall, {last, kTileSide}, width, kTileSide,
                        from + whole > 0, sums, width);
    }
    if (sums == edge) std::copy_n(edge, height * width, out);
  }

  // so many rows from word `from` on, where they fill tiles and lie evenly; else none
  Lines lines_of(int64_t row, int64_t height, int64_t from) const {
    const auto at = [&](int64_t i) { return reinterpret_cast<const float*>(rows[row + i]); };
    const int64_t stride = height > 1 ? at(1) - at(0) : 0;
    if (height % kTileSide) return {nullptr, 0};
    for (int64_t i = 2; i < height; i++)
      if (at(i) - at(i - 1) != stride) return {nullptr, 0};
    return {at(0) + from, stride};
  }

  template <typename Finish>
  void run_dots(const Piece& piece, const Finish& finish) const {
    const int64_t col = piece.col, count = piece.count;
    float tile[kTileRows * kPanelCols];
    const float* columns[kPanelCols];
    for (int64_t j = 0; j < kPanelCols; j++) columns[j] = matrix.words(col + std::min(j, count - 1));
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
    float tile[kTileGroup * kLanes], words[kStretch * kLanes];
    for (const Span& span : piece.spans)
      for (int64_t row = span.from; row < span.to; row += tile_rows()) {
        const int64_t height = std::min(tile_rows(), span.to - row);
        for (int64_t from = 0; from < span.depth; from += block()) {
          const int64_t stop = std::min(from + block(), span.depth);
          for (int64_t d = from; d < stop; d += kStretch) {
            const int64_t to = std::min(d + kStretch, stop);
            matrix.pack(col, count, d, to, words, to - d);
            multiply(row, height, d, to, {words, to - d}, kLanes, tile);
          }
        }
        finish(row, height, col, count, tile, kLanes);
      }
  }

  template <typename Finish>
  void run_panel(const Piece& piece, const Finish& finish) const {
    const int64_t col = piece.col, count = piece.count, width = round_up(count, kLanes);
    const int64_t block = this->block(), first = piece.spans.front().from, deepest = piece.spans.front().depth;
    const int64_t own = matrix.panel ? 0 : block * width, waiting = this->waiting(piece.spans);
    float* kept = panel_memory(own + std::max(waiting, tile_rows()) * width);
    for (int64_t from = 0; from < deepest; from += block) {
      const int64_t to = std::min(deepest, from + block);
      if (!matrix.panel) matrix.pack(col, count, from, to, kept, block);
      const Panel panel = matrix.panel ? Panel{matrix.panel, matrix.depth}.from(col, from) : Panel{kept, block};
      for (const Span& span : piece.spans) {
        if (span.depth <= from) break;
        for (int64_t row = span.from; row < span.to; row += tile_rows()) {
          const int64_t height = std::min(tile_rows(), span.to - row);
          float* out = kept + own + (waiting ? row - first : 0) * width;
          multiply(row, height, from, std::min(to, span.depth), panel, width, out);
          if (span.depth <= to) finish(row, height, col, count, out, width);
        }
      }
    }
  }
};

}  // namespace
