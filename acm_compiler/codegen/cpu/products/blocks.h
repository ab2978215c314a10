// Sums of 2 x 2 blocks, two rows times two columns, as ARM's matrix instructions (bf16, i8mm) add to them: two words deep.
//
// They take twice the products of the instructions for vectors, and sum a row in the same order, bit by bit.
#pragma once

#include <cstdint>

#include "vectors.h"

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define ACM_BLOCKS 1

namespace {

inline int32x4_t add_block(int32x4_t sum, int32x4_t a, int32x4_t w) {
  return vmmlaq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(w));
}
inline float32x4_t add_block(float32x4_t sum, int32x4_t a, int32x4_t w) {
  return vbfmmlaq_f32(sum, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(w));
}
inline int32x4_t halves_of(int32x4_t low, int32x4_t high, bool second) {
  const auto a = vreinterpretq_s64_s32(low), b = vreinterpretq_s64_s32(high);
  return vreinterpretq_s32_s64(second ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
}
inline float32x4_t halves_of(float32x4_t low, float32x4_t high, bool second) {
  return vreinterpretq_f32_s32(halves_of(vreinterpretq_s32_f32(low), vreinterpretq_s32_f32(high), second));
}

// Sums of kRows rows and kVecs vectors of columns. Of an odd number of rows the last one is there twice.
template <typename Sum, int kRows, int kVecs>
struct Blocks {
  static constexpr int kTwos = (kRows + 1) / 2;
  Sum sums[kTwos][kVecs][2] = {};

  // `row(i)`: two words of a row; `column(j, w)`: of a vector of columns, their first or their second words
  template <typename Row, typename Column>
  ACM_INLINED void add(const Row& row, const Column& column) {
    int32x4_t a[kTwos];
#pragma GCC unroll 4
    for (int i = 0; i < kTwos; i++) a[i] = vcombine_s32(row(2 * i), row(2 * i + 1 < kRows ? 2 * i + 1 : 2 * i));
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; j++) {
      asm volatile("" ::: "memory");  // else all columns are loaded first, and sums leave the registers for them
      const int32x4_t first = column(j, 0), second = column(j, 1);
      const int32x4_t low = vzip1q_s32(first, second), high = vzip2q_s32(first, second);
#pragma GCC unroll 4
      for (int i = 0; i < kTwos; i++) {
        sums[i][j][0] = add_block(sums[i][j][0], a[i], low);
        sums[i][j][1] = add_block(sums[i][j][1], a[i], high);
      }
    }
  }

  // calls f(i, j, sums of row i and vector j of columns), and begins anew
  template <typename F>
  ACM_INLINED void flush(const F& f) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++)
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; j++) f(i, j, halves_of(sums[i / 2][j][0], sums[i / 2][j][1], i % 2));
#pragma GCC unroll 4
    for (int i = 0; i < kTwos; i++)
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; j++) sums[i][j][0] = sums[i][j][1] = Sum{};
  }
};

}  // namespace
#endif
