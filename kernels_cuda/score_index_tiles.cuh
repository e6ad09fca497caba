// score_index: a tile of 64 keys in registers.
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
  l.full = shared_address(&s.full[0]);
  l.place = first + lane / 4 + 8 * (lane & 1);
  l.queries = static_cast<uint32_t>(wgmma_descriptor128(s.queries[0]));
  asm volatile("" : "+r"(l.keys), "+r"(l.scales), "+r"(l.full), "+r"(l.queries));  // kept, not worked out again
  return l;
}

// A key's four scales. ratio[g] = scale g / scale 0 / 2^kMostOver, and the sum over heads is multiplied by scale 0 / 2^kDotShift:
// powers of two, so that gives the bits of scaling each group's sum, as long as nothing leaves the range of float and the sum
// over groups stays below 1 (its relu is a saturation). Where scales or weights are so far from one, or a key's scales so far
// from its first, that it might not ("not plain"), each product is scaled by itself.
struct KeyScales {
  uint32_t codes, over;
  float ratio[kGroups];

  // Byte 0 of `over` is the first code - 16, byte g is code g - the first + 127 - kMostOver: from 96 to 127 for a plain key, and
  // for no other.
  __device__ __forceinline__ explicit KeyScales(uint32_t c) : codes(c), over(c + 0x787877F0u - (c & 255) * 0x01010100u) {
    ratio[1] = __uint_as_float(over << 15 & 0x7F800000u);
    ratio[2] = __uint_as_float(over << 7 & 0x7F800000u);
    ratio[3] = __uint_as_float(over >> 1 & 0x7F800000u);
  }
};

// x * by + add by one multiplication, on the pipe of the sums: the pipe of shifts and masks has more to do. The factor comes from
// memory, or the compiler would make a shift of it.
__device__ __forceinline__ uint32_t multiply_add(uint32_t x, uint32_t by, uint32_t add) {
  uint32_t z;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(by), "r"(add));
  return z;
}

struct KeyTile {
  uint32_t words[2][kGroups];  // as they are stored, of this thread's two keys
  uint32_t codes[kGroups][4];  // the register operand of the four wgmma
  uint32_t scales[2];          // of this thread's two keys
};

// A row of ldmatrix is a key's 16 bytes of a group, so a lane gets the word of its place in the quad. Eight rows on, the swizzle
// flips bit 6.
__device__ __forceinline__ void load_keys(uint32_t stage, const Lane& l, KeyTile& tile) {
  const uint32_t keys = l.keys + stage * (kIndexTile * kCodes), scales = l.scales + stage * (kIndexTile * 4);
  load_matrices(keys, tile.words[0]);
  load_matrices((keys ^ 64) + 8 * kCodes, tile.words[1]);
  tile.scales[0] = load_shared4(scales);
  tile.scales[1] = load_shared4(scales + 8 * 4);
}

// Whether all keys of the warp are plain, and nothing else speaks against it.
__device__ __forceinline__ bool are_plain(const KeyScales& a, const KeyScales& b, uint32_t against) {
  return __all_sync(0xFFFFFFFFu, ((a.over ^ 0x60606060u | b.over ^ 0x60606060u) & 0xE0E0E0E0u | against) == 0);
}

// Makes the operand of a group: e5m2 values of the codes, each 2^kKeyShift times as large. The addition carries the sign of a low
// code to its place.
__device__ __forceinline__ void expand_group(KeyTile& tile, int g, uint32_t two) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t w = tile.words[half][g];
    tile.codes[g][half] = multiply_add(w & 0x0F0F0F0Fu, two, 0x70707070u) & 0x8E8E8E8Eu;
    tile.codes[g][half + 2] = (w & 0x80808080u) | (w >> 3 & 0x0E0E0E0Eu);
  }
  // They must be made before the wgmmas' fence; the compiler would make them in between.
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(tile.codes[g][i]));
}

// Takes the tile at `turn`, whose first column is `first`, out of the ring; returns the row, of the request, of this thread's
// key.
template <bool pool>
__device__ __forceinline__ int take_tile(const IndexCall& c, const Shared& s, const Lane& l, const Turn& turn, int first,
                                         KeyTile& tile) {
  const uint32_t stage = turn.stage(), full = l.full + 8 * stage;
  mbarrier_wait_at(full, turn.phase());
  load_keys(stage, l, tile);
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
