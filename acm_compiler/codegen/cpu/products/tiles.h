// Tile registers of AMX, 16 rows of 64 bytes each, and products of pairs of bfloat16 by them.
//
// A sum is made in the same order wherever its row lies in a tile, and whatever lies beside it.
#pragma once

#include <ATen/cpu/Utils.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "vectors.h"

namespace {

constexpr int64_t kTileSide = 16;             // rows of a tile, and words of a row
constexpr int64_t kTileGroup = 2 * kTileSide;  // rows, and columns, of four tiles of sums

inline std::atomic<bool> tiles_wanted{true};  // tests compare with and without

inline bool has_tiles() {
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(CPU_CAPABILITY_AVX512)
  static const bool granted = at::cpu::init_amx();
  return granted && tiles_wanted.load(std::memory_order_relaxed);
#else
  return false;
#endif
}

// The thread's tile registers while it is there.
class Tiles {
 public:
  explicit Tiles(bool used) : used_(used) {
#if defined(__AMX_TILE__)
    alignas(64) static constexpr auto kShapes = [] {
      std::array<uint8_t, 64> all{1};
      for (int tile = 0; tile < 8; tile++) all[16 + 2 * tile] = 64, all[48 + tile] = kTileSide;
      return all;
    }();
    if (used_) _tile_loadconfig(kShapes.data());
#endif
  }
  Tiles(const Tiles&) = delete;
  ~Tiles() {
#if defined(__AMX_TILE__)
    if (used_) _tile_release();
#endif
  }

 private:
  bool used_;
};

// Rows of words that lie `stride` words apart.
struct Lines {
  const float* data;
  int64_t stride;
};

#if defined(__AMX_BF16__)
// out (+)= 16 or 32 rows times one or two strips of a panel, each `deep` words; `words`: of each, a multiple of 16
template <bool kTwoRows, bool kTwoCols>
__attribute__((noinline)) void multiply_pairs(Lines rows, const float* panel, int64_t deep, int64_t words, bool resume,
                                              float* out, int64_t out_stride) {
  asm volatile("" ::: "memory");  // what was written before is in memory: the intrinsics do not say that they read it
  constexpr int64_t kWord = sizeof(float);
  const int64_t down = rows.stride * kWord, across = kTileSide * kWord, apart = out_stride * kWord;
  float* below = out + kTileSide * out_stride;
  if (resume) {
    _tile_loadd(0, out, apart);
    if (kTwoCols) _tile_loadd(1, out + kTileSide, apart);
    if (kTwoRows) _tile_loadd(2, below, apart);
    if (kTwoRows && kTwoCols) _tile_loadd(3, below + kTileSide, apart);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < words; d += kTileSide) {
    const float *a = rows.data + d, *w = panel + d * kTileSide;
    _tile_loadd(4, a, down);
    if (kTwoRows) _tile_loadd(5, a + kTileSide * rows.stride, down);
    _tile_loadd(6, w, across);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoRows) _tile_dpbf16ps(2, 5, 6);
    if (!kTwoCols) continue;
    _tile_loadd(7, w + deep * kTileSide, across);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwoRows) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, apart);
  if (kTwoCols) _tile_stored(1, out + kTileSide, apart);
  if (kTwoRows) _tile_stored(2, below, apart);
  if (kTwoRows && kTwoCols) _tile_stored(3, below + kTileSide, apart);
  asm volatile("" ::: "memory");
}

// the same for any number of columns that is a multiple of 16, and 16 or 32 rows
inline void multiply_by_tiles(Lines rows, int64_t height, Panel panel, int64_t cols, int64_t words, bool resume,
                              float* out, int64_t out_stride) {
  for (int64_t col = 0; col < cols; col += kTileGroup) {
    const bool two = cols - col > kTileSide;
    const auto run = height > kTileSide ? (two ? multiply_pairs<true, true> : multiply_pairs<true, false>)
                                        : (two ? multiply_pairs<false, true> : multiply_pairs<false, false>);
    run(rows, panel.from(col, 0).data, panel.deep, words, resume, out + col, out_stride);
  }
}
#else
inline void multiply_by_tiles(Lines, int64_t, Panel, int64_t, int64_t, bool, float*, int64_t) {}
#endif

}  // namespace
