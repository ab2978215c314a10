// Rows of activations as bytes, each with a scale and a zero point of its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "int8_tile.h"

namespace {

constexpr float kLeastScale = 0x1p-100f;  // a row of a smaller one counts as zeros

// a byte q stands for (q - zero) * scale
struct Scaled {
  float scale;
  int32_t zero;
};

// whole numbers from 0 to 255
inline void store_bytes(const Vec& whole, uint8_t* to, int64_t count) {
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 some = count >= kLanes ? 0xffff : (1u << count) - 1;
  _mm512_mask_cvtepi32_storeu_epi8(to, some, _mm512_cvtps_epi32(whole));
#else
  float values[kLanes];
  whole.store(values);
  for (int64_t j = 0; j < std::min(count, kLanes); j++) to[j] = static_cast<uint8_t>(values[j]);
#endif
}

// by the row's own range, which always includes zero; that of a row that is not finite is NaN
template <typename T>
Scaled quantise(const T* row, int64_t count, uint8_t* to) {
  const auto least = [](const Vec& a, const Vec& b) { return at::vec::minimum(a, b); };
  const auto most = [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); };
  Vec lows(0.f), highs(0.f);
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec v = load(row + j, std::min(kLanes, count - j));
    lows = least(lows, v), highs = most(highs, v);
  }
  const float low = at::vec::vec_reduce_all<float>(least, lows), high = at::vec::vec_reduce_all<float>(most, highs);
  const float scale = (high - low) / 255.f;
  if (!(scale >= kLeastScale) || std::isinf(scale)) {
    std::memset(to, 0, count);
    return {std::isfinite(scale) ? 0.f : std::numeric_limits<float>::quiet_NaN(), 0};
  }
  const float inverse = 1.f / scale, zero = std::nearbyint(-low * inverse);
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t some = std::min(kLanes, count - j);
    const Vec q = (load(row + j, some) * Vec(inverse)).round() + Vec(zero);
    store_bytes(least(most(q, Vec(0.f)), Vec(255.f)), to + j, some);
  }
  return {scale, static_cast<int32_t>(zero)};
}

// Rows of bytes in equal parts, each padded and with a scale of its own.
struct ByteRows {
  uint8_t* data;
  Scaled* scales;
  int64_t parts, part_bytes;

  int64_t stride() const { return parts * part_bytes; }
  uint8_t* at(int64_t row, int64_t part) const { return data + row * stride() + part * part_bytes; }
  Scaled& scaled(int64_t row, int64_t part) const { return scales[row * parts + part]; }
};

}  // namespace
