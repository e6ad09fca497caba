// Adds the slices of K that blocks of linear_tile.cuh summed apart, in order, and rounds once.
#pragma once

#include "di_launch.cuh"
#include "linear_problem.cuh"

namespace di::linear {

constexpr int kCombineRows = 8, kCombineThreads = kCombineRows * kTileFeatures / 8;

// Of all slices, in order: the sum of the four floats at `address` of the shared memory of each block of the cluster.
__device__ __forceinline__ float4 add_joined(uint32_t address, int slices) {
  float4 parts[kMostSlices];  // all on their way before the first is used
#pragma unroll
  for (int slice = 0; slice < kMostSlices; ++slice)
    if (slice < slices) parts[slice] = load_cluster16(address, slice);
  float4 sum = parts[0];
#pragma unroll
  for (int slice = 1; slice < kMostSlices; ++slice)
    if (slice < slices) sum.x += parts[slice].x, sum.y += parts[slice].y, sum.z += parts[slice].z, sum.w += parts[slice].w;
  return sum;
}

// Block (tile, kCombineRows of its rows): a thread has eight columns of a row.
template <int T>
__global__ void __launch_bounds__(kCombineThreads) combine_slices(const Problem p) {
  const int unit = blockIdx.x / (T / kCombineRows), row = blockIdx.x % (T / kCombineRows) * kCombineRows + threadIdx.x / 16;
  const int row_tile = unit % p.row_tiles, column = unit / p.row_tiles, feature_tile = column % p.feature_tiles();
  const int n = feature_tile * kTileFeatures + threadIdx.x % 16 * 8;
  wait_for_predecessor();
  const bool inside = row_tile * T + row < valid_rows(p);
  const float* at = p.partial + (static_cast<int64_t>(unit) * p.slices * T + row) * kTilePitch + threadIdx.x % 16 * 8;
  float4 parts[kMostSlices][2] = {};  // all on their way before the first is used
#pragma unroll
  for (int slice = 0; slice < kMostSlices; ++slice)
    if (inside && slice < p.slices) {
      const float4* from = reinterpret_cast<const float4*>(at + static_cast<int64_t>(slice) * (T * kTilePitch));
      parts[slice][0] = from[0], parts[slice][1] = from[1];
    }
  float sums[8] = {parts[0][0].x, parts[0][0].y, parts[0][0].z, parts[0][0].w, parts[0][1].x, parts[0][1].y, parts[0][1].z, parts[0][1].w};
#pragma unroll
  for (int slice = 1; slice < kMostSlices; ++slice)
    if (slice < p.slices) {
      const float4 a = parts[slice][0], b = parts[slice][1];
      const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += v[i];
    }
  store_unit(p, row_tile * T + row, column / p.feature_tiles(), n, inside, sums);
}

}  // namespace di::linear
