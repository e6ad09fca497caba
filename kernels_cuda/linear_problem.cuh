// What the kernels of `linear` are told, the shape of their tiles, and how the tile's sums leave.
#pragma once

#include <stdint.h>

#include "di_fp8.cuh"
#include "di_ptx.cuh"

namespace di::linear {

enum Output : int { kBf16, kF32, kFp8 };

constexpr int kTileFeatures = 128;  // weight rows of a block: 64 a warpgroup
constexpr int kChunk = 128;         // K of a step of codes
constexpr int kDenseChunk = 64;     // K of a step of BF16
constexpr int kConsumers = 256;
constexpr int kMostSlices = 8;
constexpr int kMostRawSteps = 32, kScalePitch = kMostRawSteps + 1;  // steps of a slice whose row scales a block keeps; words
constexpr int kAheadRows = 16, kAheadBytes = kAheadRows * 2 * kChunk;  // what a warp expands at a time (linear_rows.cuh)
constexpr int kTilePitch = kTileFeatures + 4;  // FP32 sums of a row in the workspace: 4 more than the columns, for the banks' sake

struct Problem {
  const uint8_t* x;        // [rows, groups * k] codes (of BF16 rows a tensor map tells)
  const uint8_t* x_scale;  // [rows, groups * k / 32]
  const uint8_t* w_scale;  // [groups, ceil(n / 32), k / 32]
  const int32_t* count;    // valid rows of the call, or null
  uint8_t* expanded;       // x as BF16: [groups][row tiles][k steps][2] sub-tiles
  float* partial;          // sums of slices apart: [tiles][slices][tile rows][kTilePitch]
  void* out;               // [rows, groups * n]
  uint8_t* out_scale;      // [rows, groups * n / 32]
  int64_t x_stride, x_scale_stride, out_stride, out_scale_stride;  // in elements
  int first, rows, n, k, groups;  // first: row of the call that is row 0 here
  int output;   // Output
  int x_aligned, out_aligned;  // rows start at multiples of 16 bytes
  int chunk;    // K of a step
  int slices;   // parts of K that are summed by themselves, then in order
  int row_tiles;
  // The part of the call's rows after these, which the product's idle warps expand (linear_rows.cuh). None: no rows.
  uint8_t* next_expanded;
  int next_rows, next_row_tiles;

  __host__ __device__ int chunks() const { return (k + chunk - 1) / chunk; }
  __host__ __device__ int feature_tiles() const { return (n + kTileFeatures - 1) / kTileFeatures; }
  __host__ __device__ int scale_columns() const { return (k + 31) / 32; }
  // First chunk of a slice.
  __host__ __device__ int slice_start(int slice) const { return chunks() * slice / slices; }
};

__device__ __forceinline__ int valid_rows(const Problem& p) {
  return p.count == nullptr ? p.rows : max(0, min(p.rows, *p.count - p.first));
}

__device__ __forceinline__ int next_valid_rows(const Problem& p) {
  return p.count == nullptr ? p.next_rows : max(0, min(p.next_rows, *p.count - p.first - p.rows));
}

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_bf16(const Problem& p, int64_t at, int room, const float (&v)[8]) {
  __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.out) + at;
  if (p.out_aligned && room >= 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < room) to[i] = __float2bfloat16_rn(v[i]);
}

__device__ __forceinline__ void store_f32(const Problem& p, int64_t at, int room, const float (&v)[8]) {
  float* to = static_cast<float*>(p.out) + at;
  if (p.out_aligned && room >= 8) {
    reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < room) to[i] = v[i];
}

// Four neighbouring lanes hold the 32 columns of a group.
__device__ __forceinline__ void store_fp8(const Problem& p, int64_t row, int column, bool inside, const float (&v)[8]) {
  float amax = 0.0f;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    amax = fmaxf(amax, fabsf(v[i]));
    finite = finite && fabsf(v[i]) < __int_as_float(0x7F800000);
  }
  amax = finite ? amax : __int_as_float(0x7F800000);
  amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
  if (!inside) return;
  const uint32_t scale = fp8_scale(amax);
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    words[i] = fp8_pair(v[4 * i], v[4 * i + 1], scale) | fp8_pair(v[4 * i + 2], v[4 * i + 3], scale) << 16;
  uint8_t* to = static_cast<uint8_t*>(p.out) + row * p.out_stride + column;
  if (p.out_aligned) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
  }
  if (threadIdx.x % 4 == 0) p.out_scale[row * p.out_scale_stride + column / 32] = static_cast<uint8_t>(scale);
}

// Eight columns of a row, from column n of a group on. All lanes of a warp call it together,
// and lanes 4 i to 4 i + 3 hold one group of 32 columns.
__device__ __forceinline__ void store_unit(const Problem& p, int64_t row, int group, int n, bool inside, const float (&v)[8]) {
  const int room = p.n - n, column = group * p.n + n;
  if (p.output == kFp8) {
    store_fp8(p, row, column, inside && room > 0, v);
  } else if (inside && room > 0) {
    if (p.output == kBf16) store_bf16(p, row * p.out_stride + column, room, v);
    else store_f32(p, row * p.out_stride + column, room, v);
  }
}

}  // namespace di::linear
