// What residual_site's first kernels do to 16 columns of 16 token rows in a warp: reading, making new, storing, leaving the sums.
#pragma once

#include "residual_site_parts.cuh"

namespace di {
namespace {

// Where a thread works: four columns of token rows row and row + 8.
struct Place {
  __nv_bfloat16 *streams, *out;
  const __nv_bfloat16* y;
  const float4 *pre, *post, *comb;
  int row, g, pair;
  __device__ __forceinline__ Place(const Site& site, int row, int column, int lane)
      : streams(settled(site.streams + static_cast<int64_t>(row) * kStreams * site.hidden + column)),
        out(settled(site.out + static_cast<int64_t>(row) * site.hidden + column)),
        y(settled(site.y + static_cast<int64_t>(row) * site.hidden + column)),
        pre(settled(reinterpret_cast<const float4*>(site.pre_prev) + row)),
        post(settled(reinterpret_cast<const float4*>(site.post) + row)),
        comb(settled(reinterpret_cast<const float4*>(site.comb) + static_cast<int64_t>(row) * kStreams)), row(row), g(lane / 4),
        pair(lane % 4) {}
  __device__ __forceinline__ void advance(int rows, int hidden) {
    const int64_t values = static_cast<int64_t>(rows) * hidden;
    streams += values * kStreams, out += values, y += values;
    pre += rows, post += rows, comb += rows * kStreams, row += rows;
  }
};

// What a thread keeps of its two rows.
struct Kept {
  uint2 made[2][kStreams] = {};  // new streams, rounded
  float squares[2] = {}, norm[2] = {};
};

// What of a token row a thread reads.
struct Read {
  uint2 streams[kStreams] = {}, result = {};
  RowMix mix;
};

template <bool kPost>
__device__ __forceinline__ void read_mix(Read& read, const Place& at, int half, int last) {
  if (at.row + 8 * half >= last) return;
  read.mix.pre = at.pre[half * 8];
  if constexpr (kPost) {
    read.mix.post = at.post[half * 8];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) read.mix.comb[i] = at.comb[half * 8 * kStreams + i];
  }
}

// The first of a thread's rows, read into registers.
template <bool kPost>
__device__ __forceinline__ void read_first(Read& read, const Place& at, int last, int hidden) {
  if (at.row >= last) return;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) read.streams[i] = load_four_of_line(at.streams + i * hidden);
  if constexpr (kPost) read.result = load_four_of_line(at.y);
  read_mix<kPost>(read, at, 0, last);
}

// The second, which registers have no room for yet: on its way to `ahead` in shared memory, a lane beside the next. Not its mix.
template <bool kPost>
__device__ __forceinline__ void ask_second(uint2* ahead, const Place& at, int last, int hidden) {
  if (at.row + 8 >= last) return;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) async_copy8(shared_address(ahead + 32 * i), at.streams + (8 * kStreams + i) * hidden);
  if constexpr (kPost) async_copy8(shared_address(ahead + 32 * kStreams), at.y + 8 * hidden);
}

template <bool kPost>
__device__ __forceinline__ void read_second(Read& read, const uint2* ahead) {
  async_copies_done();
#pragma unroll
  for (int i = 0; i < kStreams; ++i) read.streams[i] = ahead[32 * i];
  if constexpr (kPost) read.result = ahead[32 * kStreams];
}

// Makes a row's streams new, into `kept`; returns the collapsed row.
template <bool kPost>
__device__ __forceinline__ uint2 make_row(const Read& read, int half, Kept& kept) {
  uint2(&made)[kStreams] = kept.made[half];
  float wide[kStreams][4];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    made[i] = read.streams[i];
    widen(wide[i], made[i]);
  }
  return renew<kPost>(read.mix, wide, read.result, made, kept.squares[half], kept.norm[half]);
}

// Writes a row's new streams and its collapsed row.
template <bool kPost>
__device__ __forceinline__ void store_row(const Place& at, int half, int hidden, const Kept& kept, uint2 collapsed) {
  if constexpr (kPost) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) store_four(at.streams + (half * 8 * kStreams + i) * hidden, kept.made[half][i]);
  }
  store_four(at.out + half * 8 * hidden, collapsed);
}

// Both; rows from `last` on are left alone.
template <bool kPost>
__device__ __forceinline__ void take_row(const Read& read, const Place& at, int half, int last, int hidden, Kept& kept) {
  if (at.row + 8 * half < last) store_row<kPost>(at, half, hidden, kept, make_row<kPost>(read, half, kept));
}

// A warp's share of the 24 projections of 16 rows, over its 16 columns of every stream. operand(stream, i): of the projection.
// d: [mixes 0..15 or 16..23][rows 0..7 or 8..15], as mma.sync holds them; of mixes 16..23 both halves of d[1] make a sum.
template <typename Operand>
__device__ __forceinline__ void project(Operand operand, const uint2 (&made)[2][kStreams], float (&d)[2][2][4]) {
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const uint4 a = operand(stream, i);
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply(d[i / 3][half], a, made[half][stream]);
    }
  }
}

// A warp's projections (`d` of project) and squares, into its part of shared memory.
__device__ __forceinline__ void leave_sums(float (&sums)[kSums][kPitch], const float (&d)[2][2][4], const Place& at,
                                           const Kept& kept) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int mix = at.g + i / 2 * 8, row = half * 8 + at.pair * 2 + i % 2;
      sums[mix][row] = d[0][half][i];
      if (i < 2) sums[16 + mix][row] = d[1][half][i] + d[1][half][i + 2];
    }
    const float of_streams = sum_of_four_lanes(kept.squares[half]), of_row = sum_of_four_lanes(kept.norm[half]);
    if (at.pair == 0) sums[kSquares][at.g + 8 * half] = of_streams, sums[kNorm][at.g + 8 * half] = of_row;
  }
}

}  // namespace
}  // namespace di
