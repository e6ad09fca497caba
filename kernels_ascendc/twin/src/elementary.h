// exp and log from additions, multiplications and bit operations alone, so that every machine and optimisation level
// gives the same bits. Minimax polynomials on the usual reduced ranges.
#pragma once

#include <limits>

#include "twin/types.h"

namespace twin {

static inline float exp_of(float x) {
  const float clamped = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float steps = (clamped * 1.44269504f + magic) - magic;
  float r = clamped - steps * 0.693359375f;
  r = r - steps * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = (p * (r * r) + r) + 1.0f;
  const int32_t n = (int32_t)steps, first = n / 2, second = n - first;  // two factors reach subnormals and 2^128
  const float scaled = y * float_of((uint32_t)(first + 127) << 23) * float_of((uint32_t)(second + 127) << 23);
  return x != x ? x : scaled;
}

static inline float log_of(float x) {
  uint32_t u = bits_of(x);
  const bool tiny = u < 0x00800000u;
  const uint32_t scaled = bits_of(x * 8388608.0f);
  u = tiny ? scaled : u;
  const int32_t lift = tiny ? -23 : 0;
  int32_t exponent = (int32_t)((u >> 23) & 255) - 126 + lift;
  float m = float_of((u & 0x7fffffu) | 0x3f000000u);  // [0.5, 1)
  const bool low = m < 0.707106781f;
  exponent = low ? exponent - 1 : exponent;
  m = low ? m + m - 1.0f : m - 1.0f;
  const float z = m * m, e = (float)exponent;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  float y = m * z * p;
  y = y + e * -2.12194440e-4f;
  y = y - 0.5f * z;
  float r = m + y;
  r = r + e * 0.693359375f;
  const float inf = std::numeric_limits<float>::infinity();
  r = x == inf ? inf : r;
  r = x == 0.0f ? -inf : r;
  return x != x || x < 0.0f ? std::numeric_limits<float>::quiet_NaN() : r;
}

}  // namespace twin
