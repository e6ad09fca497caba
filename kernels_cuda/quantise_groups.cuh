// BF16 rows to fp8_32, sixteen values a thread and two threads, side by side in a warp, a group.
#pragma once

#include "di_fp8_groups.cuh"
#include "di_launch_small.cuh"

namespace di {

constexpr int kSixteen = 16;

// fp8_scale (di_fp8.cuh) of the bits of a magnitude, without a division: amax / 448 is at most a power of two where amax's mantissa is
// at most that of 448, which is 1.75.
__device__ __forceinline__ uint32_t fp8_scale_of_bits(uint32_t amax) {
  constexpr uint32_t least = 0x38D1B717u, up = 0x007FFFFFu - 0x00600000u;  // 1e-4f; what lifts mantissas above 1.75
  static_assert(up == 0x001FFFFFu);
  return amax >= 0x7F800000u ? 255u : ((max(amax, least) + up) >> 23) - 8u;
}

// Sixteen BF16 values: as load_eight.
template <bool wide>
__device__ __forceinline__ void load_sixteen(uint4 (&to)[2], const __nv_bfloat16* from) {
#pragma unroll
  for (int i = 0; i < 2; ++i) to[i] = load_eight<wide>(from + 8 * i);
}

// Bits of the largest magnitude of a group whose other half a lane's neighbour has; `mine` is that of the lane's half.
__device__ __forceinline__ uint32_t largest_of_two_lanes(uint32_t mine) { return max(mine, __shfl_xor_sync(~0u, mine, 1)); }

// Stores sixteen codes at a multiple of 16, or of 8 unless `wide`, and by the first lane of a group its scale.
template <bool wide>
__device__ __forceinline__ void store_sixteen(uint8_t* codes, uint8_t* scale_at, uint4 sixteen, uint32_t scale) {
  if (scale == 255u) sixteen = {};
  if constexpr (wide) {
    *reinterpret_cast<uint4*>(codes) = sixteen;
  } else {
    reinterpret_cast<uint2*>(codes)[0] = {sixteen.x, sixteen.y};
    reinterpret_cast<uint2*>(codes)[1] = {sixteen.z, sixteen.w};
  }
  if (threadIdx.x % 2 == 0) *scale_at = static_cast<uint8_t>(scale);
}

// e4m3 codes of four values.
__device__ __forceinline__ uint32_t four_codes(float a, float b, float c, float d) {
  uint32_t four;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high}; }" : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// Codes of eight BF16 values times a power of two, given twice as BF16: that is exact but for what is a zero code anyway.
__device__ __forceinline__ uint2 eight_codes(uint4 eight, uint32_t factor) {
  float value[8];
  widen_eight(value, {scale_bf16x2(eight.x, factor), scale_bf16x2(eight.y, factor), scale_bf16x2(eight.z, factor),
                      scale_bf16x2(eight.w, factor)});
  return {four_codes(value[0], value[1], value[2], value[3]), four_codes(value[4], value[5], value[6], value[7])};
}

// Codes of sixteen BF16 values divided by the scale.
__device__ __forceinline__ uint4 sixteen_codes(uint4 first, uint4 second, uint32_t scale) {
  const uint32_t factor = ((254u - min(scale, 254u)) << 7) * 0x00010001u;
  const uint2 low = eight_codes(first, factor), high = eight_codes(second, factor);
  return {low.x, low.y, high.x, high.y};
}

}  // namespace di
