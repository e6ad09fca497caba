// The grouped GEMM of every weight format, activation and output that the card allows: FP32 products and sums, no matrix unit.
//
// It serves what the fragments' kernel does not: other formats, scales that leave BF16, matrices that fill no granule, quantised
// output, FP32 output of long sums. Right and slow. A warp takes four features of a row; lane l takes K = l, l + 32, ... in order
// and the lanes are added by halving, so a row's bits depend on the row and its expert alone.
#pragma once

#include "di_fp8.cuh"
#include "expand_rows.cuh"

namespace di {

enum PlainFormat { kPlainF32, kPlainBf16, kPlainFp8Block, kPlainFp8Row, kPlainFp4Row, kPlainFragments };

struct PlainOperands {
  const void* x;
  const uint8_t* x_scale;
  int64_t x_pitch, x_scale_pitch;  // all pitches in elements
  const void* values;
  const uint8_t* scales;
  int64_t value_matrix, value_pitch, scale_matrix, scale_pitch;
  const int* offsets;
  void* out;
  uint8_t* out_scale;
  int64_t out_pitch, out_scale_pitch;
  int rows, experts, features, depth;
  int format, x_dtype, out_dtype;
};

__device__ __forceinline__ float e4m3_value(uint32_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
}

__device__ __forceinline__ float e2m1_value(uint32_t code) {
  const float magnitude = static_cast<float>(0xC8643210u >> (code % 8 * 4) & 15) * 0.5f;
  return code & 8 ? -magnitude : magnitude;
}

// Feature n, column k of an expert in the layout of deepinfer_cuda/weights.py.
__device__ inline float fragment_value(const uint8_t* weights, int64_t expert, int features, int depth, int n, int k) {
  const int64_t stripe = expert * (depth / kBlockK) + k / kBlockK;
  const uint8_t* block = weights + (stripe * (features / kGranuleRows) + n / kGranuleRows) * kGranuleBytes;
  const int pair_of_rows = n % 64 / 16 * 8 + n % 8, lower = n / 8 % 2, half = k / 64 % 2, pair = k / 8 % 2 * 2 + lower;
  const uint32_t word = reinterpret_cast<const uint32_t*>(block + half * 2048)[(pair_of_rows * 4 + k % 8 / 2) * 4 + k / 16 % 4];
  const uint32_t places = pair == 3 ? (word >> 10 & 0x001B001B) * (1u << 7 | 1u << 2 | 1u << 12) : word << 3 * pair;
  const uint32_t value = places >> (k % 2 * 16);
  const uint32_t scale = block[kCodeBytes + half * 128 + pair_of_rows * 4 + k / 32 % 2 * 2 + lower] - 126u;
  return e2m1_value(value >> 12 & 8 | value >> 6 & 7) * scale_value(scale);
}

__device__ __forceinline__ float plain_weight(const PlainOperands& p, int64_t expert, int n, int k) {
  if (p.format == kPlainFragments)
    return fragment_value(static_cast<const uint8_t*>(p.values), expert, p.features, p.depth, n, k);
  const int64_t at = expert * p.value_matrix + n * p.value_pitch;
  if (p.format == kPlainF32) return static_cast<const float*>(p.values)[at + k];
  if (p.format == kPlainBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p.values)[at + k]);
  const int64_t scale_row = p.format == kPlainFp8Block ? n / 32 : n;
  const float scale = scale_value(p.scales[expert * p.scale_matrix + scale_row * p.scale_pitch + k / 32]);
  const uint8_t* codes = static_cast<const uint8_t*>(p.values) + at;
  return (p.format == kPlainFp4Row ? e2m1_value(codes[k / 2] >> (k % 2 * 4)) : e4m3_value(codes[k])) * scale;
}

__device__ __forceinline__ float plain_token(const PlainOperands& p, int64_t row, int k) {
  if (p.x_dtype == DI_F32) return static_cast<const float*>(p.x)[row * p.x_pitch + k];
  if (p.x_dtype == DI_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p.x)[row * p.x_pitch + k]);
  const float code = e4m3_value(static_cast<const uint8_t*>(p.x)[row * p.x_pitch + k]);
  return code * scale_value(p.x_scale[row * p.x_scale_pitch + k / 32]);
}

// The 32 results of a group, one a lane, as out's dtype wants them.
__device__ __forceinline__ void plain_store(const PlainOperands& p, int64_t row, int first, float value) {
  const int lane = threadIdx.x % 32, at = first + lane;
  if (p.out_dtype == DI_U8) {
    const uint32_t scale = fp8_scale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(value)))));
    static_cast<uint8_t*>(p.out)[row * p.out_pitch + at] = static_cast<uint8_t>(fp8_pair(value, 0.f, scale));
    if (lane == 0) p.out_scale[row * p.out_scale_pitch + first / 32] = static_cast<uint8_t>(scale);
  } else if (at < p.features) {
    if (p.out_dtype == DI_F32) static_cast<float*>(p.out)[row * p.out_pitch + at] = value;
    else static_cast<__nv_bfloat16*>(p.out)[row * p.out_pitch + at] = __float2bfloat16_rn(value);
  }
}

// grid: (rows, ceil(features / 32)), 8 warps.
__global__ void __launch_bounds__(256) grouped_gemm_plain(const PlainOperands p) {
  __shared__ float results[32];
  const int row = blockIdx.x, first = blockIdx.y * 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row < p.offsets[0] || row >= p.offsets[p.experts]) return;
  int expert = 0;  // offsets[expert] <= row < offsets[beyond]
  for (int beyond = p.experts; beyond - expert > 1;) {
    const int middle = (expert + beyond) / 2;
    (p.offsets[middle] <= row ? expert : beyond) = middle;
  }
  for (int i = 0; i < 4; ++i) {
    const int n = first + warp * 4 + i;
    float sum = 0.f;
    if (n < p.features)
      for (int k = lane; k < p.depth; k += 32) sum = fmaf(plain_token(p, row, k), plain_weight(p, expert, n, k), sum);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) results[warp * 4 + i] = sum;
  }
  __syncthreads();
  if (warp == 0) plain_store(p, row, first, results[lane]);
}

}  // namespace di
