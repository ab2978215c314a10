// The inner loops of int4 products: 4-bit values of weights times signed bytes of activations, by groups of 32.
//
// A panel is one vector of columns after the other; of each, group by group, a block: four words, of which each lane of
// a vector has eight values of its column, then the columns' scales and least values as float16.
#pragma once

#include <cstdint>
#include <cstring>

#include "int8_tile.h"

namespace {

constexpr int64_t kGroup = 32;  // values that share a scale and a least value
constexpr int64_t kBlockWords = kGroup / 8;
constexpr int64_t kBlockBytes = kLanes * (4 * kBlockWords + 2 * sizeof(uint16_t));
constexpr int kNibbleRows = kLanes == 16 ? 8 : 4;  // at once

inline int64_t groups_of(int64_t depth) { return divide_up(depth, kGroup); }

// Rows of activations as the products read them: bytes, eight at a time those of even places before those of odd ones;
// of each group the scale, and the sum of what its bytes stand for.
struct GroupedRow {
  const int8_t* bytes;
  const float *scales, *sums;
};

inline Word low_values(Word pairs) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_and_si512(pairs, _mm512_set1_epi8(15));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_and_si256(pairs, _mm256_set1_epi8(15));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vandq_s32(pairs, vdupq_n_s32(0x0f0f0f0f));
#else
  return pairs;  // never called: kHasBytes
#endif
}

inline Word high_values(Word pairs) {
#if defined(CPU_CAPABILITY_AVX512)
  return low_values(_mm512_srli_epi16(pairs, 4));
#elif defined(CPU_CAPABILITY_AVX2)
  return low_values(_mm256_srli_epi16(pairs, 4));
#elif defined(__ARM_FEATURE_DOTPROD)
  return low_values(vshrq_n_s32(pairs, 4));
#else
  return pairs;
#endif
}

inline Vec halves(const uint8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#else
  return Vec(0.f);
#endif
}

// out[kRows, kPanelCols] = rows times kVecs vectors of columns, whose blocks lie `apart` bytes from one to the next
template <int kRows, int kVecs>
__attribute__((noinline)) void multiply_nibbles(const GroupedRow* rows, int64_t groups, const uint8_t* panel,
                                                int64_t apart, float* out) {
  Vec sums[kRows][kVecs];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kVecs; j++) sums[i][j] = Vec(0.f);
  for (int64_t g = 0; g < groups; g++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; j++) {
      const uint8_t* block = panel + j * apart + g * kBlockBytes;
      Word whole[kRows];
      for (int i = 0; i < kRows; i++) whole[i] = all(0);
#pragma GCC unroll 4
      for (int64_t w = 0; w < kBlockWords; w++) {
        const Word pairs = load_words(block + w * 4 * kLanes), low = low_values(pairs), high = high_values(pairs);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; i++) {
          const auto* bytes = reinterpret_cast<const uint8_t*>(rows[i].bytes) + g * kGroup + 8 * w;
          whole[i] = add_bytes(whole[i], low, four_bytes(bytes));
          whole[i] = add_bytes(whole[i], high, four_bytes(bytes + 4));
        }
      }
      const Vec scale = halves(block + kBlockWords * 4 * kLanes);
      const Vec least = halves(block + kBlockWords * 4 * kLanes + 2 * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; i++) {
        const Vec value = at::vec::convert<float>(Ints(whole[i])) * scale;
        sums[i][j] = at::vec::fmadd(value, Vec(rows[i].scales[g]), sums[i][j]);
        sums[i][j] = at::vec::fmadd(least, Vec(rows[i].sums[g]), sums[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kVecs; j++) sums[i][j].store(out + i * kPanelCols + j * kLanes);
}

using NibbleTile = void (*)(const GroupedRow*, int64_t, const uint8_t*, int64_t, float*);

// for so many rows, of one vector of columns, or of two where there is one row: more of them is on its way then
inline NibbleTile nibble_tile(int64_t rows, bool two) {
  static constexpr auto each = []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::array<NibbleTile, sizeof...(kIndex)>{&multiply_nibbles<kIndex + 1, 1>...};
  }(std::make_index_sequence<kNibbleRows>());
  return two ? &multiply_nibbles<1, 2> : each[rows - 1];
}

}  // namespace
