// Stored rows to 16-bit floats: what a key row's bytes become before they enter a product.
//
// An element type says how four e4m3 codes or eight e2m1 codes and their scale become packed pairs, and multiplies tiles of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "di_wgmma.cuh"

namespace di {

__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// Two e4m3 codes as two FP16 values, exactly.
__device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t two_codes) {
  uint32_t d;
  asm("{ .reg .b16 c; cvt.u16.u32 c, %1; cvt.rn.f16x2.e4m3x2 %0, c; }" : "=r"(d) : "r"(two_codes));
  return d;
}

__device__ __forceinline__ uint32_t twice(uint32_t half) { return half | half << 16; }

// BF16: every decoded value is exact. Values are kept 2^8 times too small, so that one product makes them of e2m1 codes.
struct Bf16 {
  static constexpr float kUnit = 256.0f;
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
  static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

  // 2^(code - 127), 255 is NaN.
  static __device__ __forceinline__ uint32_t ue8m0(uint32_t code) {
    return twice(code == 255 ? 0x7FC0u : code == 0 ? 0x0040u : code << 7);
  }
  static __device__ __forceinline__ uint32_t e4m3_scale(uint32_t code) {
    const __half2 value = *reinterpret_cast<const __half2*>(&static_cast<const uint32_t&>(e4m3_to_f16(code)));
    const float wide = __low2float(value) * 0x1p118f;
    return pack(wide, wide);
  }
  static __device__ __forceinline__ uint32_t fp8_pair(uint32_t word, uint32_t selector, uint32_t scale) {
    const uint32_t t = permute_bytes(word, 0, selector);
    const uint32_t bits = (t & 0x80008000u) | ((t >> 4) & 0x07F007F0u);  // The code times 2^-120.
    return multiply(multiply(bits, 0x77807780u), scale);         // Times 2^112.
  }
  static __device__ __forceinline__ void fp8(uint32_t word, uint32_t scale, uint32_t& first, uint32_t& second) {
    first = fp8_pair(word, 0x1404, scale);
    second = fp8_pair(word, 0x3424, scale);
  }
  // A code's magnitude goes to bits 6 to 8 (the code times 2^-126) and its sign to bit 15: one product by 2^6 + 2^12 puts it in
  // both places. Bytes of nibbles have a clear sign, so a selector of 8 and more gives a zero byte.
  static __device__ __forceinline__ void fp4(uint32_t word, uint32_t scale, uint32_t (&out)[4]) {
    const uint32_t even = word & 0x0F0F0F0Fu, odd = (word >> 4) & 0x0F0F0F0Fu;
    constexpr uint32_t selectors[4] = {0x8480, 0x8581, 0x8682, 0x8783};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = multiply(permute_bytes(even, odd, selectors[i]) * 0x1040u & 0x81C081C0u, scale);
  }
  template <int N, int transposed_b, int R>
  static __device__ __forceinline__ void product(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) {
    Wgmma<N>::template bf16_ss<transposed_b>(d, a, b, accumulate);
  }
};

}  // namespace di
