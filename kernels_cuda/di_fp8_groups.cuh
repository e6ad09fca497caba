// Rows to fp8_32, eight values a thread and four threads, side by side in a warp, a group.
#pragma once

#include <cuda_bf16.h>

#include "di_fp8.cuh"

namespace di {

// Rows of a call that count.
__device__ __forceinline__ int valid_rows(const int* count, int rows) { return count ? max(0, min(*count, rows)) : rows; }

// Eight BF16 values; with `wide` their address is a multiple of 16, otherwise of two.
template <bool wide>
__device__ __forceinline__ uint4 load_eight(const __nv_bfloat16* from) {
  if constexpr (wide) return *reinterpret_cast<const uint4*>(from);
  const uint16_t* each = reinterpret_cast<const uint16_t*>(from);
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = each[2 * i] | static_cast<uint32_t>(each[2 * i + 1]) << 16;
  return {pair[0], pair[1], pair[2], pair[3]};
}

// Eight values as pairs that are floats one at a time.
__device__ __forceinline__ void widen_eight(float (&to)[8], uint4 eight) {
  const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = __uint_as_float(pairs[i] << 16), to[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
}

// The larger of two, or NaN if one is.
__device__ __forceinline__ float largest_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
__device__ __forceinline__ float smallest_or_nan(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
}

// Bits of the largest magnitude of eight values; of eight BF16 values, whose magnitudes order as 16-bit numbers.
__device__ __forceinline__ uint32_t largest_of_eight(const float (&value)[8]) {
  float largest = fabsf(value[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) largest = largest_or_nan(largest, fabsf(value[i]));
  return __float_as_uint(largest) & 0x7FFFFFFFu;
}
__device__ __forceinline__ uint32_t largest_of_eight(uint4 eight) {
  constexpr uint32_t magnitude = 0x7FFF7FFFu;
  const uint32_t two = __vmaxu2(__vmaxu2(eight.x & magnitude, eight.y & magnitude), __vmaxu2(eight.z & magnitude, eight.w & magnitude));
  return max(two << 16, two & 0xFFFF0000u);
}

}  // namespace di
