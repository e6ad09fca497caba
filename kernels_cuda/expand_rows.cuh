// Activations as BF16 rows in the workspace: e4m3 codes with a ue8m0 scale for each 32 become BF16, which is exact.
#pragma once

#include <cuda_fp8.h>

#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {

// Four codes, widened and scaled. The scale is a power of two (255: NaN); a product below BF16's range is rounded once.
__device__ __forceinline__ uint2 expand4(uint32_t codes, float scale) {
  const __half2 low = __nv_cvt_fp8x2_to_halfraw2(codes & 0xFFFF, __NV_E4M3);
  const __half2 high = __nv_cvt_fp8x2_to_halfraw2(codes >> 16, __NV_E4M3);
  const float2 a = __half22float2(low), b = __half22float2(high);
  const __nv_bfloat162 first = __floats2bfloat162_rn(a.x * scale, a.y * scale);
  const __nv_bfloat162 second = __floats2bfloat162_rn(b.x * scale, b.y * scale);
  return make_uint2(*reinterpret_cast<const uint32_t*>(&first), *reinterpret_cast<const uint32_t*>(&second));
}

__device__ __forceinline__ float scale_value(uint32_t code) {
  return code == 255 ? __int_as_float(0x7FFFFFFF) : code == 0 ? __int_as_float(0x00400000) : __int_as_float(code << 23);
}

// One thread for 16 codes. The kernel that reads the rows may start early, and waits for them itself.
// to: [rows, pitch]; columns: a multiple of 32.
__global__ void __launch_bounds__(256)
    expand_rows_fp8(const uint8_t* codes, int64_t codes_pitch, const uint8_t* scales, int64_t scales_pitch, __nv_bfloat16* to,
                    int64_t pitch, int rows, int columns) {
  launch_dependents();
  const int pieces = columns / 16;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<int64_t>(rows) * pieces) return;
  const int64_t row = index / pieces;
  const int piece = static_cast<int>(index % pieces);
  const uint4 code = *reinterpret_cast<const uint4*>(codes + row * codes_pitch + piece * 16);
  const float scale = scale_value(scales[row * scales_pitch + piece / 2]);
  const uint2 a = expand4(code.x, scale), b = expand4(code.y, scale), c = expand4(code.z, scale), d = expand4(code.w, scale);
  uint4* out = reinterpret_cast<uint4*>(to + row * pitch + piece * 16);
  out[0] = make_uint4(a.x, a.y, b.x, b.y);
  out[1] = make_uint4(c.x, c.y, d.x, d.y);
}

}  // namespace di
