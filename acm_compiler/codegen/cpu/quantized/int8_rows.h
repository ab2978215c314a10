// Rows of activations as bytes, each with a scale and a zero point of its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "int8_tile.h"

namespace {

constexpr float kLeastScale = 0x1p-100f;  // a row of a smaller one counts as zeros

// a byte q, from kLeastByte on, stands for (q - zero) * scale
struct Scaled {
  float scale;
  int32_t zero;
};

// round(v) + zero, of finite values: no less than 0 and no more than 255, before kLeastByte is added
inline void store_bytes(const Vec& v, float zero, uint8_t* to, int64_t count) {
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 some = count >= kLanes ? 0xffff : (1u << count) - 1;
  const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(static_cast<int32_t>(zero)));
  _mm512_mask_cvtusepi32_storeu_epi8(to, some, _mm512_max_epi32(q, _mm512_setzero_si512()));
#else
  float values[kLanes];
  at::vec::clamp(v.round() + Vec(zero), Vec(0.f), Vec(255.f)).store(values);
  for (int64_t j = 0; j < std::min(count, kLanes); j++) to[j] = static_cast<uint8_t>(values[j]) + kLeastByte;
#endif
}

// Least and largest value of a row and 0; both nan if one of them is.
template <typename T>
std::pair<float, float> range_of(const T* row, int64_t count) {
  constexpr int64_t kChains = 4;  // else each comparison waits for the one before
  Vec lows[kChains], highs[kChains];
  for (int64_t i = 0; i < kChains; i++) lows[i] = highs[i] = Vec(0.f);
  int64_t j = 0;
  for (; j + kChains * kLanes <= count; j += kChains * kLanes)
#pragma GCC unroll 4
    for (int64_t i = 0; i < kChains; i++) {
      const Vec v = load(row + j + i * kLanes, kLanes);
      lows[i] = at::vec::minimum(lows[i], v), highs[i] = at::vec::maximum(highs[i], v);
    }
  for (; j < count; j += kLanes) {
    const Vec v = load(row + j, std::min(kLanes, count - j));
    lows[0] = at::vec::minimum(lows[0], v), highs[0] = at::vec::maximum(highs[0], v);
  }
  const auto least = [](const Vec& a, const Vec& b) { return at::vec::minimum(a, b); };
  const auto most = [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); };
  return {at::vec::vec_reduce_all<float>(least, least(least(lows[0], lows[1]), least(lows[2], lows[3]))),
          at::vec::vec_reduce_all<float>(most, most(most(highs[0], highs[1]), most(highs[2], highs[3])))};
}

// by the row's own range, which always includes zero; that of a row that is not finite is NaN
template <typename T>
Scaled quantise(const T* row, int64_t count, uint8_t* to) {
  const auto [low, high] = range_of(row, count);
  const float scale = (high - low) / 255.f;
  if (!(scale >= kLeastScale) || std::isinf(scale)) {
    std::memset(to, 0, count);
    return {std::isfinite(scale) ? 0.f : std::numeric_limits<float>::quiet_NaN(), 0};
  }
  const float inverse = 1.f / scale, zero = std::nearbyint(-low * inverse);
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t some = std::min(kLanes, count - j);
    store_bytes(load(row + j, some) * Vec(inverse), zero, to + j, some);
  }
  return {scale, static_cast<int32_t>(zero) + kLeastByte};
}

// Rows of bytes in equal parts, each padded and with a scale of its own.
struct ByteRows {
  int64_t parts, depth;
  uint8_t* data = nullptr;
  Scaled* scales = nullptr;

  int64_t stride() const { return parts * deep(depth); }
  int64_t bytes(int64_t rows) const { return rows * (stride() + parts * sizeof(Scaled)); }
  void lay(uint8_t* room, int64_t rows) {
    data = room;
    scales = reinterpret_cast<Scaled*>(room + rows * stride());
  }

  uint8_t* at(int64_t row, int64_t part) const { return data + row * stride() + part * deep(depth); }
  const Scaled& scaled(int64_t row, int64_t part) const { return scales[row * parts + part]; }

  template <typename T>
  void quantise(const T* from, int64_t row, int64_t part) const {
    scales[row * parts + part] = ::quantise(from, depth, at(row, part));
  }
};

}  // namespace
