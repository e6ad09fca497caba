// fp8_32 in registers: e4m3 codes to BF16 with their scale folded in, and FP32 groups to codes.
//
// A code times a power of two is exact in BF16. Four codes of one 32-bit word become two registers of two BF16 each: the even
// bytes (codes 0 and 2) and the odd bytes (codes 1 and 3). Operands of one product must pair their columns alike.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

namespace di {

// Both halves times `factor`, exactly.
__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t pair, uint32_t factor) {
  uint32_t scaled;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pair), "r"(factor));
  return scaled;
}

// Two bytes of a word, each widened to 16 bits with its sign in all of the upper eight.
template <int selector>
__device__ __forceinline__ uint32_t widen_bytes(uint32_t word) {
  uint32_t wide;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(wide) : "r"(word), "n"(selector));
  return wide;
}

// A code's sign, exponent and mantissa, put at the same places of a BF16, read as its value times 2^-120 (subnormals too).
__device__ __forceinline__ uint32_t even_codes(uint32_t word) { return (widen_bytes<0xA280>(word) << 4) & 0x87F087F0u; }
__device__ __forceinline__ uint32_t odd_codes(uint32_t word) { return (widen_bytes<0xB391>(word) << 4) & 0x87F087F0u; }

// What makes values of even_codes and odd_codes: the BF16 pair 2^(scale - 127 + 120) of a ue8m0 code, NaN for 255. Where it would
// leave BF16, which is above kOneFactor, it is 2^127, and second_factor is to be multiplied with after it. Both are exact.
constexpr uint32_t kOneFactor = 134;
__device__ __forceinline__ uint32_t code_factor(uint32_t scale) {
  return scale == 255u ? 0x7FFF7FFFu : (min(scale, kOneFactor) + 120u) * 0x00800080u;
}
// 1 up to kOneFactor.
__device__ __forceinline__ uint32_t second_factor(uint32_t scale) { return (max(scale, kOneFactor) + 127u - kOneFactor) * 0x00800080u; }

// Codes 0, 1 and 2, 3 of a word as F16.
__device__ __forceinline__ uint32_t low_codes_f16(uint32_t word) {
  uint32_t pair;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(pair) : "r"(word));
  return pair;
}
__device__ __forceinline__ uint32_t high_codes_f16(uint32_t word) {
  uint32_t pair;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(pair) : "r"(word));
  return pair;
}
__device__ __forceinline__ uint32_t scale_f16x2(uint32_t pair, uint32_t factor) {
  uint32_t scaled;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pair), "r"(factor));
  return scaled;
}

// ue8m0 code of a group with largest magnitude `amax`: the smallest power of two s with max(amax, 1e-4) / 448 <= s; 255 if
// amax is not finite.
__device__ __forceinline__ uint32_t fp8_scale(float amax) {
  const uint32_t bits = __float_as_uint(__fdiv_rn(fmaxf(amax, 1e-4f), 448.0f));
  const uint32_t code = (bits >> 23) + ((bits & 0x7FFFFFu) != 0);
  return __float_as_uint(amax) >= 0x7F800000u ? 255u : code;
}

// e4m3 codes of two values divided by the scale; `low` in the low byte. Zeros for scale 255.
__device__ __forceinline__ uint32_t fp8_pair(float low, float high, uint32_t scale) {
  const float inverse = __uint_as_float((254u - min(scale, 254u)) << 23);
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high * inverse), "f"(low * inverse));
  return scale == 255u ? 0u : pair;
}

}  // namespace di
