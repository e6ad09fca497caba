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

constexpr int kExpandFlying = 5, kExpandPart = 256 * kExpandFlying;  // codes of a row that a warp takes at once

struct ExpandLaunch {
  int blocks, threads;
};

// How `rows` are expanded. By one small block a multiprocessor as long as that is a few parts a warp: with 32 registers a thread
// it leaves room for a block of the kernel that reads the rows. More, by all threads there are, before that kernel's blocks
// begin; very many, by small blocks again, each of which is soon done.
inline ExpandLaunch expand_launch(int64_t rows, int columns, int multiprocessors) {
  constexpr int kSmall = 128, kLarge = 1024;
  const int64_t parts = rows * ceil_div(columns, kExpandPart);
  const int64_t small = ceil_div(parts, kSmall / 32), large = ceil_div(parts, kLarge / 32);
  if (small <= 3 * multiprocessors) return {static_cast<int>(small < multiprocessors ? small : multiprocessors), kSmall};
  if (large <= 8 * multiprocessors) return {static_cast<int>(large < 2 * multiprocessors ? large : 2 * multiprocessors), kLarge};
  return {static_cast<int>(ceil_div(small, 2)), kSmall};
}

// Starts early; so may the kernel that reads the rows, which waits for them.
// to: [rows, pitch]; columns: a multiple of 32; rows * columns / 1280, rounded up in each row, is at most 2^30.
__global__ void __launch_bounds__(1024, 2)
    expand_rows_fp8(const uint8_t* codes, int64_t codes_pitch, const uint8_t* scales, int64_t scales_pitch, __nv_bfloat16* to,
                    int64_t pitch, int rows, int columns) {
  wait_for_producer();
  start_dependents();  // after the wait, so that they may read what earlier kernels wrote
  const uint32_t parts = (columns + kExpandPart - 1) / kExpandPart, warps = gridDim.x * blockDim.x / 32, all = rows * parts;
  for (uint32_t index = (blockIdx.x * blockDim.x + threadIdx.x) / 32; index < all; index += warps) {
    const uint32_t row = index / parts, column = index % parts * kExpandPart + threadIdx.x % 32 * 8;
    const uint8_t* from = codes + row * codes_pitch + column;
    const uint8_t* scale_from = scales + row * scales_pitch + column / 32;
    __nv_bfloat16* out = to + row * pitch + column;
    uint2 code[kExpandFlying];
    uint32_t scale[kExpandFlying];
#pragma unroll
    for (int i = 0; i < kExpandFlying; ++i)
      if (column + 256 * i < columns) code[i] = *reinterpret_cast<const uint2*>(from + 256 * i), scale[i] = scale_from[8 * i];
#pragma unroll
    for (int i = 0; i < kExpandFlying; ++i) {
      if (column + 256 * i >= columns) continue;
      const float factor = scale_value(scale[i]);
      const uint2 low = expand4(code[i].x, factor), high = expand4(code[i].y, factor);
      *reinterpret_cast<uint4*>(out + 256 * i) = make_uint4(low.x, low.y, high.x, high.y);
    }
  }
}

}  // namespace di
