// Rounding and elementary functions, the same bits at every level.
#pragma once

#include "simd.h"

namespace di::DI_LEVEL {

DI_INLINE float bf16_value(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

DI_INLINE uint16_t to_bf16(float x) {  // nearest even; NaN becomes the quiet NaN that torch uses
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7FC0;
  return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

DI_INLINE vf load_bf16(const uint16_t* p) { return float_of(shift_left<16>(widen_u16(p))); }

DI_INLINE vi bf16_bits(vf x) {
  vi bits = bits_of(x);
  vi rounded = shift_right<16>(bits + splat_i(0x7FFF) + (shift_right<16>(bits) & splat_i(1)));
  vi magnitude = bits & splat_i(0x7FFFFFFF);
  return less_select(splat_i(0x7F800000), magnitude, splat_i(0x7FC0), rounded);
}

DI_INLINE void store_bf16(uint16_t* p, vf x) { narrow_u16(p, bf16_bits(x)); }
DI_INLINE vf round_bf16(vf x) { return float_of(shift_left<16>(bf16_bits(x))); }

// exp(x): at most 2 ulp from the true value on [-87, 88]; 0 below -87.3, infinity above 88.7, NaN for NaN.
DI_INLINE vf exp(vf x) {
  const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  vf clamped = less_select(x, splat(-87.33f), splat(-87.33f), x);
  clamped = less_select(splat(88.72f), clamped, splat(88.72f), clamped);
  vf biased = fma(clamped, splat(1.44269504f), shift);
  vf n = biased - shift;
  vf r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  // 2^n in two factors, so that n = 128 does not overflow before it must.
  vi whole = bits_of(biased) - bits_of(shift);
  vi half = shift_right<1>(whole + splat_i(256)) - splat_i(128);
  vf scale_a = float_of(shift_left<23>(half + splat_i(127)));
  vf scale_b = float_of(shift_left<23>(whole - half + splat_i(127)));
  vf y = p * scale_a * scale_b;
  y = less_select(x, splat(-87.33f), splat(0.0f), y);
  return less_select(splat(88.72f), x, splat(__builtin_inff()), y);
}

DI_INLINE float exp(float x) {
  float lanes[16];
  store(lanes, exp(splat(x)));
  return lanes[0];
}

// log(x) of normal positive x: at most 2 ulp from the true value.
DI_INLINE vf log(vf x) {
  vi bits = bits_of(x);
  // Mantissa in [sqrt(1/2), sqrt(2)).
  vi offset = bits - splat_i(0x3F3504F3);
  vi exponent = shift_right<23>(offset + splat_i(127 << 23)) - splat_i(127);
  vf m = float_of(bits - shift_left<23>(exponent)) - splat(1.0f);
  vf p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  vf square = m * m, e = to_float(exponent);
  vf y = fma(p * m, square, e * splat(-2.12194440e-4f));
  y = fma(square, splat(-0.5f), y);
  return fma(e, splat(0.693359375f), m + y);
}

DI_INLINE float log(float x) {
  float lanes[16];
  store(lanes, log(splat(x)));
  return lanes[0];
}

// log(1 - d) for 2^-25 <= d <= 1/2: the rounding of 1 - d is divided out again.
DI_INLINE vf log_one_minus(vf d) {
  vf w = splat(1.0f) - d, lost = w - splat(1.0f);
  vf y = log(w) * (d / (splat(0.0f) - lost));
  return less_select(lost, splat(0.0f), y, splat(0.0f) - d);
}

DI_INLINE vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }
DI_INLINE float square_root(float x) { return __builtin_sqrtf(x); }

}  // namespace di::DI_LEVEL
