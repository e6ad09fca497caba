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
  uint32_t keys;     // address of the 16 bytes of codes that it names for ldmatrix, in the ring's first tile
  uint32_t scales;   // address there of the scales of its first key; the second is 8 further
  uint32_t pairs;    // address there of the scales of two keys, of which the lanes have all
  uint32_t full;     // address of the first tile's barrier
  int place;         // of the key in the tile whose score it has in the end
  uint32_t queries;  // low half of the descriptor of the first query row
};

// Where a warpgroup is in the ring of tiles.
struct Turn {
  uint32_t index;

  __device__ __forceinline__ uint32_t stage() const { return index % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return index / kStages & 1; }
  __device__ __forceinline__ void advance() { index += kConsumers; }
};

__device__ __forceinline__ Lane lane_of_thread(const Shared& s) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16, row = first + lane % 8, group = lane / 8;
  Lane l;
  l.keys = shared_address(s.keys[0]) + row / 2 * 128 + ((((row & 1) << 2 | group) ^ (row >> 1 & 7)) << 4);
  l.scales = shared_address(&s.scales[0][first + lane / 4]);
  l.pairs = shared_address(&s.scales[0][2 * lane]);
  l.full = shared_address(&s.full[0]);
  l.place = first + lane / 4 + 8 * (lane & 1);
  l.queries = static_cast<uint32_t>(wgmma_descriptor128(s.queries[0]));
  asm volatile("" : "+r"(l.keys), "+r"(l.scales), "+r"(l.pairs), "+r"(l.full), "+r"(l.queries));  // kept, not worked out again
  return l;
}

// A key's four scales. ratio[g] = scale g / scale 0, and the sum over heads is multiplied by scale 0: powers of two, so that
// gives the bits of scaling each group's sum, as long as nothing leaves the range of float. Where scales or weights are so
// far from one that it might ("not plain"), each sum is scaled by itself.
struct KeyScales {
  uint32_t codes;
  float ratio[kGroups];
};

__device__ __forceinline__ void take_scales(uint32_t codes, KeyScales& scales) {
  const uint32_t first = codes & 255, over = codes + 0x7F7F7F7Fu - first * 0x01010101u;  // no carries where they are plain
  scales.codes = codes;
  scales.ratio[1] = __uint_as_float(over << 15 & 0x7F800000u);
  scales.ratio[2] = __uint_as_float(over << 7 & 0x7F800000u);
  scales.ratio[3] = __uint_as_float(over >> 1 & 0x7F800000u);
}

// Whether every code of a key is from kLeastPlain to kMostPlain.
__device__ __forceinline__ bool are_plain(uint2 codes) {
  return ((codes.x + 0x10101010u ^ 0x80808080u | codes.y + 0x10101010u ^ 0x80808080u) & 0xE0E0E0E0u) == 0;
}

struct KeyTile {
  uint32_t words[2][kGroups];  // as they are stored, of this thread's two keys
  uint32_t codes[kGroups][4];  // the register operand of the four wgmma
  KeyScales scales[2];         // of this thread's two keys
  bool plain;                  // the scales of all of its keys, so that a warpgroup agrees
};

// A row of ldmatrix is a key's 16 bytes of a group, so a lane gets the word of its place in the quad. Eight rows on, the swizzle
// flips bit 6.
__device__ __forceinline__ void load_keys(uint32_t stage, const Lane& l, KeyTile& tile) {
  const uint32_t keys = l.keys + stage * (kIndexTile * kCodes), scales = l.scales + stage * (kIndexTile * 4);
  load_matrices(keys, tile.words[0]);
  load_matrices((keys ^ 64) + 8 * kCodes, tile.words[1]);
  take_scales(load_shared4(scales), tile.scales[0]);
  take_scales(load_shared4(scales + 8 * 4), tile.scales[1]);
  tile.plain = __all_sync(0xFFFFFFFFu, are_plain(load_shared8(l.pairs + stage * (kIndexTile * 4))));
}

// Makes the operands of groups `first` on that are multiplied together.
__device__ __forceinline__ void expand_keys(KeyTile& tile, int first) {
#pragma unroll
  for (int g = first; g < first + kAtOnce; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t w = tile.words[half][g];
      tile.codes[g][half] = (w << 4 & 0x80808080u) | (w << 2 & 0x1C1C1C1Cu);
      tile.codes[g][half + 2] = (w & 0x80808080u) | (w >> 2 & 0x1C1C1C1Cu);
    }
  }
  // They must be made before the wgmmas' fence; the compiler would make them in between.
#pragma unroll
  for (int g = first; g < first + kAtOnce; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(tile.codes[g][i]));
}

// A row's weights of this thread's heads 8 j + 2 (lane % 4) and + 1, and whether its own scales are plain: read where they are
// used, or kept in registers.
struct StoredWeights {
  const float* first;
  bool plain;

  __device__ __forceinline__ StoredWeights(const Shared& s, int r)
      : first(&s.weights[r][2 * (threadIdx.x % 4)]), plain(s.plain[r] != 0) {}
  __device__ __forceinline__ float2 of(int j) const { return *reinterpret_cast<const float2*>(first + 8 * j); }
};

struct KeptWeights {
  float2 kept[4];
  bool plain;

  __device__ __forceinline__ explicit KeptWeights(const StoredWeights& stored) : plain(stored.plain) {
#pragma unroll
    for (int j = 0; j < 4; ++j) kept[j] = stored.of(j);
  }
  __device__ __forceinline__ float2 of(int j) const { return kept[j]; }
};

// Adds the groups from `first` on to this thread's sums over groups, total[4 j + 2 half + e] of head 8 j + 2 (lane % 4) + e and
// key lane / 4 + 8 half.
template <int count>
__device__ __forceinline__ void add_groups(const float (&dot)[count][16], int first, const KeyTile& tile, float (&total)[16]) {
#pragma unroll
  for (int g = 0; g < count; ++g) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      total[i] = first + g == 0 ? dot[0][i] : fmaf(dot[g][i], tile.scales[i / 2 % 2].ratio[first + g], total[i]);
  }
}

// The same for any scales of the keys and for heads whose own scales lie far apart: scaled, group by group.
template <int count>
__device__ __forceinline__ void add_groups_apart(const float (&dot)[count][16], int first, const KeyTile& tile, const Shared& s,
                                                 int r, float (&total)[16]) {
#pragma unroll
  for (int g = 0; g < count; ++g) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int head = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, group = first + g;
      const float key = ue8m0(tile.scales[i / 2 % 2].codes >> (8 * group) & 255);
      total[i] = fmaf(dot[g][i] * s.apart[r][group][head], key, group == 0 ? 0.0f : total[i]);
    }
  }
}

// This thread's part of the weighted head sum: sum[half] over its eight heads of key lane / 4 + 8 half. Where all is plain,
// x + |x| is twice the relu, on the pipe of the other sums.
template <bool plain, typename Weights>
__device__ __forceinline__ void add_heads(const float (&total)[16], const KeyTile& tile, const Weights& weights,
                                          float (&sum)[2]) {
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = weights.of(j);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) {
      const float positive = plain ? total[i] + fabsf(total[i]) : relu(total[i]);
      sum[i / 2 % 2] = fmaf(positive, i % 2 == 0 ? two.x : two.y, sum[i / 2 % 2]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (plain) sum[half] *= 0.5f * __uint_as_float(tile.scales[half].codes << 23 & 0x7F800000u);
}

// This thread's part of the weighted sums over heads of its two keys, for plain scales or any.
template <bool plain, bool expanded, typename Weights>
__device__ __forceinline__ void multiply(KeyTile& tile, const Shared& s, const Lane& l, int r, const Weights& weights,
                                         float (&sum)[2]) {
  float dot[kAtOnce][16], total[16];
  const uint32_t queries = l.queries + r * (kHeads * 128 / 16);
#pragma unroll
  for (int first = 0; first < kGroups; first += kAtOnce) {
    wgmma_fence();
#pragma unroll
    for (int g = 0; g < kAtOnce; ++g)
      Wgmma<32>::e4m3_rs(dot[g], tile.codes[first + g], kDescriptorHigh << 32 | (queries + 2 * (first + g)), false);
    wgmma_commit();
    if (!expanded && first + kAtOnce < kGroups) expand_keys(tile, first + kAtOnce);
    wgmma_wait<0>();
#pragma unroll
    for (int g = 0; g < kAtOnce; ++g) wgmma_hold(dot[g]);
    if (plain) {
      add_groups(dot, first, tile, total);
    } else {
      add_groups_apart(dot, first, tile, s, r, total);
    }
  }
  add_heads<plain>(total, tile, weights, sum);
}

// The score of key 16 warp + lane / 4 + 8 (lane % 2), complete in every lane. A tile whose first groups alone are expanded is
// expanded while they are multiplied.
template <bool expanded, typename Weights>
__device__ __forceinline__ float score_row(KeyTile& tile, const Shared& s, const Lane& l, int r, const Weights& weights) {
  float sum[2];
  if (tile.plain && weights.plain) {
    multiply<true, expanded>(tile, s, l, r, weights, sum);
  } else {
    multiply<false, expanded>(tile, s, l, r, weights, sum);
  }
  const bool odd = threadIdx.x & 1;
  float mine = odd ? sum[1] : sum[0];
  mine += __shfl_xor_sync(0xFFFFFFFFu, odd ? sum[0] : sum[1], 1);
  return mine + __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
}

// Takes the tile at `turn`, whose first column is `first`, out of the ring; returns the row, of the request, of this thread's
// key.
template <bool pool>
__device__ __forceinline__ int take_tile(const IndexCall& c, const Shared& s, const Lane& l, const Turn& turn, int first,
                                         KeyTile& tile) {
  const uint32_t stage = turn.stage(), full = l.full + 8 * stage;
  mbarrier_wait_at(full, turn.phase());
  load_keys(stage, l, tile);
  expand_keys(tile, 0);
  int key = first + l.place;
  if (pool) {
    const int piece = s.first_row[stage][l.place >> c.piece_shift];
    key = piece < 0 ? INT32_MAX : piece + (l.place & ((1 << c.piece_shift) - 1));
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive_at(full + 8 * kStages);  // of `empty`, which follows `full`
  return key;
}

}  // namespace
}  // namespace di
