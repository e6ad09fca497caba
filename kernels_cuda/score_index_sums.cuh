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

// Starts the products of group g of the keys with query row r. Those of another group, started just before, fenced the registers.
__device__ __forceinline__ void start_group(Sums& dot, const KeyTile& tile, const Lane& l, int r, int g, bool fenced = false) {
  if (!fenced) wgmma_fence();
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
__device__ __forceinline__ void add_group(Sums& total, const Sums& dot, const KeyScales (&scales)[2]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float sum = fmaf(dot[i], scales[i / 2 % 2].ratio[g], total[i]);
    total[i] = g == kGroups - 1 ? __saturatef(sum) : sum;
  }
  wgmma_hold(total);
}

// The score of key 16 warp + lane / 4 + 8 (lane % 2), complete in every lane: the weighted sum over heads.
template <typename Weights>
__device__ __forceinline__ float add_heads(const Sums& positive, const Weights& weights) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = weights.of(j);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) sum[i / 2 % 2] = fmaf(positive[i], i % 2 == 0 ? two.x : two.y, sum[i / 2 % 2]);
  }
  const bool odd = threadIdx.x & 1;
  float mine = odd ? sum[1] : sum[0];
  mine += __shfl_xor_sync(0xFFFFFFFFu, odd ? sum[0] : sum[1], 1);
  return mine + __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
}

// By what that sum is multiplied for plain keys.
__device__ __forceinline__ float factor_of(const KeyScales (&scales)[2]) {
  const uint32_t first = (threadIdx.x & 1 ? scales[1].codes : scales[0].codes) & 255;
  return __uint_as_float((first + static_cast<uint32_t>(-kDotShift)) << 23);
}

// Products of 16 keys and 8 heads in one warp, for one group: the elements of Sums from 4 j on.
__device__ __forceinline__ void multiply_apart(float (&dot)[4], const uint32_t (&keys)[4], uint32_t low, uint32_t high) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(dot[0]), "=f"(dot[1]), "=f"(dot[2]), "=f"(dot[3])
      : "r"(keys[0]), "r"(keys[1]), "r"(keys[2]), "r"(keys[3]), "r"(low), "r"(high), "f"(0.0f));
}

// The score for any scales, by a warp for itself: every product is scaled alone. A call, to leave the common case the registers.
__device__ __noinline__ float score_apart(uint32_t at, const Shared& s, int r) {
  const int lane = threadIdx.x % 32;
  const uint32_t* const scales = s.scales[at / 8] + threadIdx.x % 128 / 32 * 16 + lane / 4;
  KeyTile tile;
  load_keys(at, lane_of_thread(s), tile);
  Sums total;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    expand_group(tile, g, 2);
    const float key[2] = {ue8m0(scales[0] >> (8 * g) & 255), ue8m0(scales[8] >> (8 * g) & 255)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int head = 8 * j + lane / 4;
      const uint8_t* const query = s.queries[r] + head * 128 + 4 * (lane % 4);
      const uint32_t low = *reinterpret_cast<const uint32_t*>(query + ((2 * g ^ head & 7) << 4));
      const uint32_t high = *reinterpret_cast<const uint32_t*>(query + (((2 * g + 1) ^ head & 7) << 4));
      float dot[4];
      multiply_apart(dot, tile.codes[g], low, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float apart = s.apart[r][g][8 * j + 2 * (lane % 4) + i % 2];
        total[4 * j + i] = fmaf(dot[i] * apart, key[i / 2], g == 0 ? 0.0f : total[4 * j + i]);
      }
      asm volatile("" ::: "memory");  // one after the other, for the sake of registers
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) total[i] = relu(total[i]);
  return add_heads(total, StoredWeights(s, r));
}

// The score for plain keys whose first two groups are expanded; the others are while those are multiplied. Gives the tile's place
// `at` back.
template <typename Weights>
__device__ __forceinline__ float score_row(KeyTile& tile, const KeyScales (&scales)[2], uint32_t at, const Lane& l,
                                           const Weights& weights, uint32_t two, float own) {
  Sums a, b, d;
  start_group(a, tile, l, 0, 0);
  start_group(b, tile, l, 0, 1, true);
  give_back(at, l);
  expand_group(tile, 2, two), expand_group(tile, 3, two);
  wait_group<0>(a), wgmma_hold(b);
  add_group<1>(a, b, scales);
  start_group(d, tile, l, 0, 2);
  start_group(b, tile, l, 0, 3, true);
  wait_group<1>(d);
  add_group<2>(a, d, scales);
  wait_group<0>(b);
  add_group<3>(a, b, scales);
  return add_heads(a, weights) * own;
}

// Row r of several, for plain keys: groups 0 and 1 are under way in `a` and `b`; leaves those of row `next` so in `d` and `b`.
__device__ __forceinline__ float score_row_of_many(Sums& a, Sums& b, Sums& d, const KeyTile& tile, const KeyScales (&scales)[2],
                                                   const Shared& s, const Lane& l, int r, int next) {
  start_group(d, tile, l, r, 2);
  wait_group<1>(a), wgmma_hold(b);
  add_group<1>(a, b, scales);
  start_group(b, tile, l, r, 3);
  wait_group<1>(d);
  add_group<2>(a, d, scales);
  start_group(d, tile, l, next, 0);
  wait_group<1>(b);
  add_group<3>(a, b, scales);
  start_group(b, tile, l, next, 1);
  return add_heads(a, StoredWeights(s, r)) * factor_of(scales);
}

}  // namespace
}  // namespace di
