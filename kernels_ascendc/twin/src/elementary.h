// exp and log from additions, multiplications, sums of both rounded once, and bit operations alone, so that every machine
// and optimisation level gives the same bits. Minimax polynomials on the usual reduced ranges.
#pragma once

#include <limits>

#include "twin/types.h"

namespace twin {

// a * b + c for a narrower rounding: the sum as a double, rounded to odd, loses nothing that matters to it.
static inline double fused(float a, float b, float c) {
  const double product = (double)a * (double)b, addend = (double)c, sum = product + addend;
  const double part = sum - product, error = (product - (sum - part)) + (addend - part);
  uint64_t u;
  memcpy(&u, &sum, 8);
  const bool inexact = error > 0 || error < 0, even = (u & 1) == 0;
  u += inexact && even ? ((error > 0) == (sum > 0) ? 1 : ~uint64_t(0)) : 0;
  double odd;
  memcpy(&odd, &u, 8);
  return odd;
}
// a * b + c rounded once, with the instruction where there is one.
static inline float fused_of(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return (float)fused(a, b, c);
#endif
}

// exp(x) = mantissa * 2^n, n in the low bits of `shifted`, for |x| < 150.
struct ExpParts {
  float mantissa, shifted;
};
constexpr float kExpMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
static inline ExpParts exp_parts(float x) {
  const float shifted = fused_of(x, 1.44269504f, kExpMagic), steps = shifted - kExpMagic;
  const float r = fused_of(steps, 2.12194440e-4f, fused_of(steps, -0.693359375f, x));
  float p = 1.3814598592e-3f;
  p = fused_of(p, r, 8.3687169665e-3f);
  p = fused_of(p, r, 4.1668388053e-2f);
  p = fused_of(p, r, 1.6666520631e-1f);
  p = fused_of(p, r, 4.9999993448e-1f);
  return {fused_of(fused_of(p, r, 1.0f), r, 1.0f), shifted};
}

static inline float exp_of(float x) {
  const ExpParts e = exp_parts(x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x);
  const int32_t n = (int32_t)(e.shifted - kExpMagic), first = n / 2, second = n - first;  // two factors reach
  const float scaled =                                                                    // subnormals and 2^128
      e.mantissa * float_of((uint32_t)(first + 127) << 23) * float_of((uint32_t)(second + 127) << 23);
  return x != x ? x : scaled;
}

// The same where the result is a normal number; zero where it would be smaller.
static inline float exp_normal_of(float x) {
  const ExpParts e = exp_parts(x);
  float y = float_of(bits_of(e.mantissa) + (bits_of(e.shifted) << 23));
  y = x > 88.7228317f ? std::numeric_limits<float>::infinity() : y;
  y = x < -87.3365402f ? 0.0f : y;
  return x != x ? x : y;
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
