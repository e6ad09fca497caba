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

// 16 codes of a row and their scale.
struct Piece {
  uint4 codes;
  uint32_t scale;

  __device__ __forceinline__ void store(__nv_bfloat16* to) const {
    const float factor = scale_value(scale);
    const uint2 a = expand4(codes.x, factor), b = expand4(codes.y, factor);
    const uint2 c = expand4(codes.z, factor), d = expand4(codes.w, factor);
    uint4* out = reinterpret_cast<uint4*>(to);
    out[0] = make_uint4(a.x, a.y, b.x, b.y);
    out[1] = make_uint4(c.x, c.y, d.x, d.y);
  }
};

constexpr int kExpandThreads = 128;

// Blocks for `pieces` of 16 codes. One a multiprocessor as long as that is a few pieces a thread: with 32 registers a thread such
// a block leaves room for a block of the kernel that reads the rows.
inline int expand_blocks(int64_t pieces, int multiprocessors) {
  const int64_t all = ceil_div(pieces, kExpandThreads);
  if (all <= 12 * multiprocessors) return static_cast<int>(all < multiprocessors ? all : multiprocessors);
  return static_cast<int>(ceil_div(all, 2));
}

// Starts early; so may the kernel that reads the rows, which waits for them.
// to: [rows, pitch]; columns: a multiple of 32; rows * columns / 16 is at most 2^30.
__global__ void __launch_bounds__(kExpandThreads, 16)
    expand_rows_fp8(const uint8_t* codes, int64_t codes_pitch, const uint8_t* scales, int64_t scales_pitch, __nv_bfloat16* to,
                    int64_t pitch, int rows, int columns) {
  wait_for_producer();
  start_dependents();  // after the wait, so that they may read what earlier kernels wrote
  const uint32_t pieces = columns / 16, all = rows * pieces, stride = gridDim.x * kExpandThreads;
  const auto load = [&](uint32_t index) {
    const uint32_t row = index / pieces, piece = index % pieces;
    const uint4 code = *reinterpret_cast<const uint4*>(codes + row * codes_pitch + piece * 16);
    return Piece{code, scales[row * scales_pitch + piece / 2]};
  };
  const auto place = [&](uint32_t index) { return to + index / pieces * pitch + index % pieces * 16; };
  constexpr int kFlying = 3;
  for (uint32_t index = blockIdx.x * kExpandThreads + threadIdx.x; index < all; index += kFlying * stride) {
    Piece flying[kFlying];
#pragma unroll
    for (int i = 0; i < kFlying; ++i)
      if (index + i * stride < all) flying[i] = load(index + i * stride);
#pragma unroll
    for (int i = 0; i < kFlying; ++i)
      if (index + i * stride < all) flying[i].store(place(index + i * stride));
  }
}

}  // namespace di
