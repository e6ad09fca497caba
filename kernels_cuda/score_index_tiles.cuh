// score_index: a tile of 64 keys in registers, its products with a query row, and the weighted sum over heads.
#pragma once

#include "di_wgmma.cuh"
#include "score_index_queries.cuh"

namespace di {
namespace {

// What a thread needs in every tile and would else work out again in each.
// The high half of every descriptor of a tile with the 128-byte swizzle (wgmma_descriptor128).
constexpr uint64_t kDescriptorHigh = static_cast<uint64_t>(kSwizzle128) << 30 | 1024 >> 4;

struct Lane {
  uint32_t at;       // where its word of the first group lies in a tile of keys
  uint32_t key;      // its first key in the tile; the second is 8 further
  int place;         // of the key in the tile whose score it has in the end
  uint32_t queries;  // low half of the descriptor of the first query row
};

__device__ __forceinline__ Lane lane_of_thread(const Shared& s) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16, row = first + lane / 4;
  Lane l;
  l.at = row / 2 * 128 + (((row & 1) << 2 ^ (row >> 1 & 7)) << 4) + 4 * (lane % 4);
  l.key = row;
  l.place = first + lane / 4 + 8 * (lane & 1);
  l.queries = static_cast<uint32_t>(wgmma_descriptor128(s.queries[0]));
  asm volatile("" : "+r"(l.at), "+r"(l.key), "+r"(l.place), "+r"(l.queries));  // kept, not worked out again
  return l;
}

// A key's four scales. ratio[g] = scale g / scale 0, and the sum over heads is multiplied by scale 0: powers of two, so that
// gives the bits of scaling each group's sum, as long as nothing leaves the range of float. Where scales or weights are so
// far from one that it might ("not plain"), each sum is scaled by itself.
struct KeyScales {
  uint32_t codes;
  float ratio[kGroups];
};

__device__ __forceinline__ bool take_scales(uint32_t codes, KeyScales& scales) {
  const uint32_t rest = 0x3F800000u - (codes << 23 & 0x7F800000u);
  scales.codes = codes;
  scales.ratio[1] = __uint_as_float((codes << 15 & 0x7F800000u) + rest);
  scales.ratio[2] = __uint_as_float((codes << 7 & 0x7F800000u) + rest);
  scales.ratio[3] = __uint_as_float((codes >> 1 & 0x7F800000u) + rest);
  return ((codes + 0x10101010u) & 0xE0E0E0E0u) == 0x80808080u;  // all from kLeastPlain to kMostPlain
}

struct KeyTile {
  uint32_t codes[kGroups][4];  // the register operand of the four wgmma
  KeyScales scales[2];         // of this thread's two keys
  bool plain;
};

// The word of group g is 16 g bytes further but for the swizzle, so an exclusive or; the second key's is 8 rows on, where the
// swizzle flips bit 6.
__device__ __forceinline__ void load_keys(const Shared& s, uint32_t stage, const Lane& l, KeyTile& tile) {
  const uint8_t* keys = s.keys[0];
  const uint32_t at = stage * (kIndexTile * kCodes) | l.at;
  uint32_t words[2][kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    words[0][g] = *reinterpret_cast<const uint32_t*>(keys + (at ^ 16 * g));
    words[1][g] = *reinterpret_cast<const uint32_t*>(keys + 8 * kCodes + (at ^ (16 * g + 64)));
  }
  const bool first = take_scales(s.scales[stage][l.key], tile.scales[0]);
  const bool second = take_scales(s.scales[stage][l.key + 8], tile.scales[1]);
  tile.plain = __all_sync(0xFFFFFFFFu, first && second);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t w = words[half][g];
      tile.codes[g][half] = (w << 4 & 0x80808080u) | (w << 2 & 0x1C1C1C1Cu);
      tile.codes[g][half + 2] = (w & 0x80808080u) | (w >> 2 & 0x1C1C1C1Cu);
    }
  }
  // They must be made before the wgmmas' fence; the compiler would make them in between.
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) asm volatile("" : "+r"(tile.codes[i / 4][i % 4]));
}

// This thread's part of the weighted head sum: sum[half] over its eight heads of key lane / 4 + 8 half.
__device__ __forceinline__ void add_heads(const float (&dot)[kGroups][16], const KeyTile& tile, const Shared& s, int r,
                                          float (&sum)[2]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 weight = *reinterpret_cast<const float2*>(&s.weights[r][8 * j + 2 * c]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * j + 2 * half + e;
        float total = dot[0][i];
#pragma unroll
        for (int g = 1; g < kGroups; ++g) total = fmaf(dot[g][i], tile.scales[half].ratio[g], total);
        sum[half] = fmaf(relu(total), e == 0 ? weight.x : weight.y, sum[half]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) sum[half] *= __uint_as_float(tile.scales[half].codes << 23 & 0x7F800000u);
}

// The same for any scales of the keys and for heads whose own scales lie far apart.
__device__ __forceinline__ void add_heads_apart(const float (&dot)[kGroups][16], const KeyTile& tile, const Shared& s, int r,
                                                float (&sum)[2]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t codes = tile.scales[half].codes;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int head = j / 2 * 8 + 2 * c + j % 2, i = j / 2 * 4 + 2 * half + j % 2;
      float total = 0.0f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) total = fmaf(dot[g][i] * s.apart[r][g][head], ue8m0(codes >> (8 * g) & 255), total);
      sum[half] = fmaf(relu(total), s.weights[r][head], sum[half]);
    }
  }
}

// The score of key 16 warp + lane / 4 + 8 (lane % 2), complete in every lane.
__device__ __forceinline__ float score_row(const KeyTile& tile, const Shared& s, const Lane& l, int r) {
  float dot[kGroups][16];
  const bool plain = tile.plain && s.plain[r] != 0;
  const uint32_t queries = l.queries + r * (kHeads * 128 / 16);
  wgmma_fence();
#pragma unroll
  for (int g = 0; g < kGroups; ++g) Wgmma<32>::e4m3_rs(dot[g], tile.codes[g], kDescriptorHigh << 32 | (queries + 2 * g), false);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int g = 0; g < kGroups; ++g) wgmma_hold(dot[g]);
  float sum[2] = {0.0f, 0.0f};
  if (plain) {
    add_heads(dot, tile, s, r, sum);
  } else {
    add_heads_apart(dot, tile, s, r, sum);
  }
  const bool odd = threadIdx.x & 1;
  float mine = odd ? sum[1] : sum[0];
  mine += __shfl_xor_sync(0xFFFFFFFFu, odd ? sum[0] : sum[1], 1);
  return mine + __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
}

// Takes a tile out of the ring; returns the row, of the request, of this thread's key.
template <bool pool>
__device__ __forceinline__ int take_tile(const IndexCall& c, Shared& s, const Lane& l, uint32_t index, int first, KeyTile& tile) {
  const uint32_t stage = index % kStages;
  mbarrier_wait(&s.full[stage], index / kStages & 1);
  load_keys(s, stage, l, tile);
  int key = first + l.place;
  if (pool) {
    const int piece = s.first_row[stage][l.place >> c.piece_shift];
    key = piece < 0 ? INT32_MAX : piece + (l.place & ((1 << c.piece_shift) - 1));
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[stage]);
  return key;
}

}  // namespace
}  // namespace di
