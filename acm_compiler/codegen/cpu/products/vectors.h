// Vectors of floats, and how they are read from and written to floats and bfloat16.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>

#include <cstdint>
#include <tuple>
#include <type_traits>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// Columns of a matrix as the inner loops read them: strips of as many as a vector has lanes, each [deep, lanes] words,
// one after the other.
struct Panel {
  const float* data;
  int64_t deep;

  // from that column, a multiple of the lanes, and that word on
  Panel from(int64_t col, int64_t word) const { return {data + col * deep + word * kLanes, deep}; }
};

// in the loop that calls it, whatever the compiler thinks that costs
#define ACM_INLINED __attribute__((always_inline))
#define ACM_INLINE ACM_INLINED inline

// calls f(j, lanes) for each whole vector of so many values, then f(j, count) for what is left
template <typename F>
ACM_INLINE void each_vector(int64_t count, const F& f) {
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) f(j, std::integral_constant<int64_t, kLanes>());
  if (j < count) f(j, count - j);
}

// `count` values as floats, zeros beyond them
template <typename T>
ACM_INLINE Vec load(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(from, count);
  } else {
    Vec value;
    if (count == kLanes) at::vec::load_to_float(from, value);
    else value = std::get<0>(at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from, count)));
    return value;
  }
}

// the first `count` values, bfloat16 rounded to nearest
template <typename T>
ACM_INLINE void store(const Vec& value, T* to, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    value.store(to, count);
  } else {
#if defined(__AVX512BF16__)
    if (count == kLanes) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(value));
      return;
    }
#endif
    at::vec::convert_from_float<T>(value, value).store(to, count);
  }
}

}  // namespace
