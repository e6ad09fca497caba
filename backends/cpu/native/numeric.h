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

DI_INLINE vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }
DI_INLINE float square_root(float x) { return __builtin_sqrtf(x); }

}  // namespace di::DI_LEVEL
