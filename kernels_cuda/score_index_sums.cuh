// score_index: the products of a tile of keys with a query row, their sum over groups, and the weighted sum over heads.
#pragma once

#include "score_index_tiles.cuh"

namespace di {
namespace {

// A row's weights of this thread's heads 8 j + 2 (lane % 4) and + 1: read where they are used, or kept in registers.
struct StoredWeights {
  const float* first;

  __device__ __forceinline__ StoredWeights(const Shared& s, int r) : first(&s.weights[r][2 * (threadIdx.x % 4)]) {}
  __device__ __forceinline__ float2 of(int j) const { return *reinterpret_cast<const float2*>(first + 8 * j); }
};

struct KeptWeights {
  float2 kept[4];

  __device__ __forceinline__ explicit KeptWeights(const StoredWeights& stored) {
#pragma unroll
    for (int j = 0; j < 4; ++j) kept[j] = stored.of(j);
  }
  __device__ __forceinline__ float2 of(int j) const { return kept[j]; }
};

// Of a thread's keys (half) and heads, sums [4 j + 2 half + e] are of head 8 j + 2 (lane % 4) + e and key lane / 4 + 8 half.
using Sums = float[16];

// Starts the products of group g of the keys with query row r.
__device__ __forceinline__ void start_group(Sums& dot, const KeyTile& tile, const Lane& l, int r, int g) {
  wgmma_fence();
  const uint32_t queries = l.queries + r * (kHeads * 128 / 16) + 2 * g;
  Wgmma<32>::e5m2_rs(dot, tile.codes[g], kDescriptorHigh << 32 | queries, false);
  wgmma_commit();
}

// Waits for all products but those of the last `pending` groups.
template <int pending>
__device__ __forceinline__ void wait_group(Sums& dot) {
  wgmma_wait<pending>();
  wgmma_hold(dot);
}

// Adds the products of group g to those before, for plain keys and queries. After the last group a sum is its relu.
template <int g>
__device__ __forceinline__ void add_group(Sums& total, const Sums& dot, const KeyTile& tile) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float sum = fmaf(dot[i], tile.scales[i / 2 % 2].ratio[g], total[i]);
    total[i] = g == kGroups - 1 ? __saturatef(sum) : sum;
  }
  wgmma_hold(total);
}

// The score of key 16 warp + lane / 4 + 8 (lane % 2), complete in every lane: the weighted sum over heads, times `factor`.
template <typename Weights>
__device__ __forceinline__ float add_heads(const Sums& positive, float factor0, float factor1, const Weights& weights) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = weights.of(j);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) sum[i / 2 % 2] = fmaf(positive[i], i % 2 == 0 ? two.x : two.y, sum[i / 2 % 2]);
  }
  sum[0] *= factor0, sum[1] *= factor1;
  const bool odd = threadIdx.x & 1;
  float mine = odd ? sum[1] : sum[0];
  mine += __shfl_xor_sync(0xFFFFFFFFu, odd ? sum[0] : sum[1], 1);
  return mine + __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
}

// The score for any scales: every product is scaled by itself.
template <typename Weights>
__device__ __forceinline__ float score_apart(const KeyTile& tile, const Shared& s, const Lane& l, int r, const Weights& weights) {
  Sums dot, total;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    start_group(dot, tile, l, r, g);
    wait_group<0>(dot);
    const float key[2] = {ue8m0(tile.scales[0].codes >> (8 * g) & 255), ue8m0(tile.scales[1].codes >> (8 * g) & 255)};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int head = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
      total[i] = fmaf(dot[i] * s.apart[r][g][head], key[i / 2 % 2], g == 0 ? 0.0f : total[i]);
    }
    wgmma_hold(total);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) total[i] = relu(total[i]);
  return add_heads(total, 1.0f, 1.0f, weights);
}

// The score of a plain tile whose first two groups are expanded; the others are while those are multiplied.
template <typename Weights>
__device__ __forceinline__ float score_row(KeyTile& tile, const Lane& l, const Weights& weights) {
  Sums a, b, d;
  start_group(a, tile, l, 0, 0);
  start_group(b, tile, l, 0, 1);
  expand_group(tile, 2), expand_group(tile, 3);
  wait_group<0>(a), wait_group<0>(b);
  start_group(d, tile, l, 0, 2);
  add_group<1>(a, b, tile);
  start_group(b, tile, l, 0, 3);
  wait_group<1>(d);
  add_group<2>(a, d, tile);
  wait_group<0>(b);
  add_group<3>(a, b, tile);
  return add_heads(a, tile.scales[0].factor, tile.scales[1].factor, weights);
}

// Row r of several with a plain tile: groups 0 and 1 are under way in `a` and `b`; leaves those of row `next` so in `d` and `b`.
__device__ __forceinline__ float score_row_of_many(Sums& a, Sums& b, Sums& d, const KeyTile& tile, const Shared& s, const Lane& l,
                                                   int r, int next) {
  start_group(d, tile, l, r, 2);
  wait_group<1>(a), wait_group<1>(b);
  add_group<1>(a, b, tile);
  start_group(b, tile, l, r, 3);
  wait_group<1>(d);
  add_group<2>(a, d, tile);
  start_group(d, tile, l, next, 0);
  wait_group<1>(b);
  add_group<3>(a, b, tile);
  start_group(b, tile, l, next, 1);
  return add_heads(a, tile.scales[0].factor, tile.scales[1].factor, StoredWeights(s, r));
}

}  // namespace
}  // namespace di
