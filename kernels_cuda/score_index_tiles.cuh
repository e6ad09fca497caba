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
  uint32_t own;      // and of the key whose score it has in the end
  uint32_t full;     // address of the first tile's barrier
  int place;         // of the key in the tile whose score it has in the end
  uint32_t queries;  // low half of the descriptor of the first query row
};

__device__ __forceinline__ Lane lane_of_thread(const Shared& s) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16, row = first + lane % 8, group = lane / 8;
  Lane l;
  l.keys = shared_address(s.keys[0]) + row / 2 * 128 + ((((row & 1) << 2 | group) ^ (row >> 1 & 7)) << 4);
  l.scales = shared_address(&s.scales[0][first + lane / 4]);
  l.own = shared_address(&s.scales[0][first + lane / 4 + 8 * (lane & 1)]);
  l.full = shared_address(&s.full[0]);
  l.place = first + lane / 4 + 8 * (lane & 1);
  l.queries = static_cast<uint32_t>(wgmma_descriptor128(s.queries[0]));
  asm volatile("" : "+r"(l.keys), "+r"(l.scales), "+r"(l.full), "+r"(l.queries));  // kept, not worked out again
  return l;
}

// What a key's four scales make: ratio[g] = scale g / scale 0 / 2^kMostOver, and the sum over heads is multiplied by
// scale 0 / 2^kDotShift: powers of two, so that gives the bits of scaling each group's sum, as long as nothing leaves the range
// of float and the sum over groups stays below 1 (its relu is a saturation). Where scales or weights are so far from one, or a
// key's scales so far from its first, that it might not ("not plain"), each product is scaled by itself.
struct KeyScales {
  uint32_t codes, over;
  float ratio[kGroups];  // but of group 0, which is one

  // Byte 0 of `over` is the first code - 16, byte g is code g - the first + 127 - kMostOver: from 96 to 127 for a plain key, and
  // for no other.
  __device__ __forceinline__ explicit KeyScales(uint32_t c) : codes(c) {
    over = c - __byte_perm(c, 0, 0x0004) + 0x787877F0u;  // less the first code, in bytes 1 to 3
    ratio[1] = __uint_as_float(__byte_perm(over, 0, 0x4144) << 7);
    ratio[2] = __uint_as_float(__byte_perm(over, 0, 0x4244) << 7);
    ratio[3] = __uint_as_float(__byte_perm(over, 0, 0x4344) << 7);
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
};

// A row of ldmatrix is a key's 16 bytes of a group, so a lane gets the word of its place in the quad. `at`: 8 times the tile's
// place in the ring.
__device__ __forceinline__ void load_keys(uint32_t at, const Lane& l, KeyTile& tile) {
  const uint32_t keys = l.keys + at * (kIndexTile * kCodes / 8);
  load_matrices(keys, tile.words[0]);
  load_matrices((keys ^ 64) + 8 * kCodes, tile.words[1]);  // eight rows on, the swizzle flips bit 6
}

__device__ __forceinline__ KeyScales load_scales(uint32_t at, const Lane& l, int half) {
  return KeyScales(load_shared4(l.scales + at * (kIndexTile * 4 / 8) + 8 * 4 * half));
}

// By what the sum over heads is multiplied for the lane's own key, if that is plain.
__device__ __forceinline__ float own_factor(uint32_t at, const Lane& l) {
  return __uint_as_float(load_shared1(l.own + at * (kIndexTile * 4 / 8)) * 0x800000u + (static_cast<uint32_t>(-kDotShift) << 23));
}

// Bit 31 of an own_factor, which no plain key's has: what also needs it needs that load to have come.
__device__ __forceinline__ uint32_t sign_of(float own) { return __float_as_uint(own) & 0x80000000u; }

// Whether all keys of the warp are plain, and nothing else speaks against it.
__device__ __forceinline__ bool are_plain(const KeyScales (&of)[2], uint32_t against) {
  return __all_sync(0xFFFFFFFFu, ((of[0].over ^ 0x60606060u | of[1].over ^ 0x60606060u) & 0xE0E0E0E0u | against) == 0);
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

// Lets the ring have the tile's place. What was loaded there has been needed by then: codes by products that have begun, scales
// by a branch.
__device__ __forceinline__ void give_back(uint32_t at, const Lane& l) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive_at(l.full + at + 8 * kStages);  // of `empty`, which follows `full`
}

}  // namespace
}  // namespace di
