// The inner loops of int8 products: bytes of activations times signed bytes of weights, summed without loss.
//
// A word is four bytes, as one lane of a sum takes them. A panel of weights is [words, width], width some vectors of
// columns: what the processor's tiles read is the same as what its vectors read.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../products/blocks.h"
#include "../products/plan.h"
#include "../products/products.h"
#include "../products/tiles.h"
#include "../products/vectors.h"

namespace {

using Ints = at::vec::Vectorized<int32_t>;
#if defined(CPU_CAPABILITY_AVX512)
using Word = __m512i;  // as they are: of a class the compiler keeps copies in memory
#elif defined(CPU_CAPABILITY_AVX2)
using Word = __m256i;
#elif defined(__ARM_FEATURE_DOTPROD)
using Word = int32x4_t;
#else
using Word = Ints;
#endif

constexpr int64_t kDeep = 64;  // rows and panels are padded to a multiple of so many bytes, what a tile takes at a time
constexpr int64_t kByteRows = 32;  // at once; memory of rows is a multiple of them
#if defined(__AVX512BW__) || defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kHasBytes = true;
#else
constexpr bool kHasBytes = false;
#endif
// the least byte of an activation: x86 multiplies unsigned by signed bytes, ARM signed by signed ones
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int32_t kLeastByte = -128;
#else
constexpr int32_t kLeastByte = 0;
#endif

inline int64_t deep(int64_t bytes) { return round_up(bytes, kDeep); }

// sum + a . w of the four bytes in each lane, w signed and a from kLeastByte on; of either kind where they are below 128
inline Word add_bytes(Word sum, Word a, Word w) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, a, w);
#elif defined(__AVX512BW__)
  const __m512i low = _mm512_set1_epi16(255);
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(w, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#elif defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, a, w);
#elif defined(__AVX2__)
  const __m256i low = _mm256_set1_epi16(255);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(w, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(w));
#else
  return sum;  // never called: kHasBytes
#endif
}

inline Word load_words(const void* from) { return Ints::loadu(from); }
inline Word all(int32_t word) { return Ints(word); }

inline Word four_bytes(const uint8_t* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof(word));
  return all(word);
}

// out[kRows, kPanelCols] = rows times a panel [words, kVecs * lanes]
template <int kRows, int kVecs>
void multiply_bytes(const uint8_t* rows, int64_t stride, const int32_t* panel, int64_t words, int32_t* out) {
#if defined(ACM_BLOCKS)
  if constexpr (kRows > 1) {
    Blocks<Word, kRows, kVecs> blocks;
    for (int64_t d = 0; d < words; d += 2)
      blocks.add([&](int i) { return vreinterpret_s32_u8(vld1_u8(rows + i * stride + 4 * d)); },
                 [&](int j, int w) { return vld1q_s32(panel + ((d + w) * kVecs + j) * kLanes); });
    blocks.flush([&](int i, int j, Word sums) { vst1q_s32(out + i * kPanelCols + j * kLanes, sums); });
    return;
  }
#endif
  Word sums[kRows][kVecs];
  const uint8_t* row[kRows];
  for (int i = 0; i < kRows; i++) {
    row[i] = rows + i * stride;
    for (int j = 0; j < kVecs; j++) sums[i][j] = all(0);
  }
  for (int64_t d = 0; d < words; d++) {
    Word w[kVecs];
    for (int j = 0; j < kVecs; j++) w[j] = load_words(panel + (d * kVecs + j) * kLanes);
    for (int i = 0; i < kRows; i++) {
      const Word a = four_bytes(row[i] + 4 * d);
      for (int j = 0; j < kVecs; j++) sums[i][j] = add_bytes(sums[i][j], a, w[j]);
    }
  }
#pragma GCC unroll 8  // else the sums are in memory all the time
  for (int i = 0; i < kRows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; j++) Ints(sums[i][j]).store(out + i * kPanelCols + j * kLanes);
}

using ByteTile = void (*)(const uint8_t*, int64_t, const int32_t*, int64_t, int32_t*);

inline ByteTile byte_tile(int64_t rows, int64_t vecs) {
  static constexpr auto each = []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::array<ByteTile, sizeof...(kIndex)>{
        &multiply_bytes<kIndex / kTileVecs + 1, kIndex % kTileVecs + 1>...};
  }(std::make_index_sequence<kTileRows * kTileVecs>());
  return each[(rows - 1) * kTileVecs + vecs - 1];
}

// ---- by tiles

#if defined(__AMX_INT8__)
// out[16 or 32, kPanelCols] = rows times one or two vectors of columns of a panel of so many words each
template <bool kTwoRows, bool kTwoCols>
__attribute__((noinline)) void multiply_tiles(const uint8_t* rows, int64_t stride, const int32_t* panel, int64_t width,
                                              int64_t words, int32_t* out) {
  asm volatile("" ::: "memory");  // what was written before is in memory: the intrinsics do not say that they read it
  const int64_t below = 16 * stride, across = width * sizeof(int32_t);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < words; d += 16) {
    const uint8_t* a = rows + 4 * d;
    const int32_t* w = panel + d * width;
    _tile_loadd(4, a, stride);
    if (kTwoRows) _tile_loadd(5, a + below, stride);
    _tile_loadd(6, w, across);
    _tile_dpbusd(0, 4, 6);
    if (kTwoRows) _tile_dpbusd(2, 5, 6);
    if (!kTwoCols) continue;
    _tile_loadd(7, w + 16, across);
    _tile_dpbusd(1, 4, 7);
    if (kTwoRows) _tile_dpbusd(3, 5, 7);
  }
  constexpr int64_t kAcross = kPanelCols * sizeof(int32_t);
  _tile_stored(0, out, kAcross);
  if (kTwoCols) _tile_stored(1, out + 16, kAcross);
  if (kTwoRows) _tile_stored(2, out + 16 * kPanelCols, kAcross);
  if (kTwoRows && kTwoCols) _tile_stored(3, out + 16 * kPanelCols + 16, kAcross);
}

inline void multiply_by_tiles(const uint8_t* rows, int64_t stride, int64_t height, const int32_t* panel, int64_t width,
                              int64_t words, int32_t* out) {
  for (int64_t col = 0; col < width; col += 32) {
    const bool two = width - col > 16;
    const auto run = height > 16 ? (two ? multiply_tiles<true, true> : multiply_tiles<true, false>)
                                 : (two ? multiply_tiles<false, true> : multiply_tiles<false, false>);
    run(rows, stride, panel + col, width, words, out + col);
  }
}
#else
inline void multiply_by_tiles(const uint8_t*, int64_t, int64_t, const int32_t*, int64_t, int64_t, int32_t*) {}
#endif

}  // namespace
