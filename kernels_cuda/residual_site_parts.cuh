// What residual_site's warps do to 16 columns of 16 token rows, and to a row's sums. Straight code is kept short: at decode a
// warp runs it once, and fetching instructions is much of its time.
#pragma once

#include <cuda_bf16.h>

#include "quantise_groups.cuh"

namespace di {
namespace {

constexpr int kStreams = 4, kMixes = 24, kSums = 26, kRows = 16, kColumns = 16, kGroup = 32;
constexpr int kWarps = 10, kThreads = kWarps * 32, kWidth = kWarps * kColumns;  // of a block that takes streams
constexpr int kPitch = 25;  // floats from mix to mix of a warp's sums: the lanes that add them up meet different banks
constexpr int kStreamRoom = kThreads * (4 * sizeof(uint4) + sizeof(uint2));  // bytes of a stream of a block's projection
constexpr int kRoom = kStreams * kStreamRoom;
constexpr int kSquares = kMixes, kNorm = kMixes + 1;  // the two sums of squares: of the streams, of the collapsed row

struct Site {
  const __nv_bfloat16* y;
  const float *post, *comb, *fn, *base, *scale, *pre_prev;
  const void* norm_weight;
  const int* count;
  __nv_bfloat16 *streams, *out;
  uint8_t *codes, *scales;
  float *pre, *post_out, *comb_out;
  float rms_eps, hc_eps;
  float *sums, *norms;  // workspace: [row][block of columns][kMixes + 1], [row][block of columns]
  int rows, hidden, iterations, first_row, end_row;  // first_row, end_row: of this launch
  bool wide_weight;
};

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ void widen(float (&to)[4], uint2 from) {
  to[0] = low_half(from.x), to[1] = high_half(from.x), to[2] = low_half(from.y), to[3] = high_half(from.y);
}
__device__ __forceinline__ uint2 narrow(const float (&from)[4]) {
  return {pack_pair(from[0], from[1]), pack_pair(from[2], from[3])};
}

__device__ __forceinline__ uint2 load_four(const __nv_bfloat16* from) { return *reinterpret_cast<const uint2*>(from); }
// The same of a row that may lie in memory: four warps read a line, so L2 is asked for all of it at once.
__device__ __forceinline__ uint2 load_four_of_line(const __nv_bfloat16* from) {
  uint2 four;
  asm volatile("ld.global.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(four.x), "=r"(four.y) : "l"(from) : "memory");
  return four;
}
__device__ __forceinline__ float4 load_weights_of_line(const float* from) {
  float4 four;
  asm volatile("ld.global.nc.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "l"(from));
  return four;
}
__device__ __forceinline__ void store_four(__nv_bfloat16* to, uint2 four) { *reinterpret_cast<uint2*>(to) = four; }

// D[16, 8] += A[16, 16] B[16, 8] of BF16.
__device__ __forceinline__ void multiply(float (&d)[4], uint4 a, uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// Four float32 as three times four BF16 whose sums they are, but for what lies below 2^-24 of them.
__device__ __forceinline__ void split(uint2 (&parts)[3], float4 whole) {
  float left[4] = {whole.x, whole.y, whole.z, whole.w};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    parts[i] = narrow(left);
    float taken[4];
    widen(taken, parts[i]);
#pragma unroll
    for (int c = 0; c < 4; ++c) left[c] -= taken[c];
  }
}

// One row's coefficients as a thread needs them: how a result and each old stream go into each new stream.
struct RowMix {
  float4 post, comb[kStreams], pre;
};

__device__ __forceinline__ float part(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Makes the four streams at four columns of a row new, rounded to BF16, and gives the collapsed row there; adds to both sums of
// squares.
template <bool kPost>
__device__ __forceinline__ uint2 renew(const RowMix& mix, float (&streams)[kStreams][4], uint2 result, uint2 (&made)[kStreams],
                                       float& squares, float& norm) {
  float sum[4] = {};
  if constexpr (kPost) {
    float y[4], value[kStreams][4];
    widen(y, result);
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        value[k][c] = part(mix.post, k) * y[c];
#pragma unroll
        for (int i = 0; i < kStreams; ++i) value[k][c] += part(mix.comb[i], k) * streams[i][c];
      }
    }
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      made[k] = narrow(value[k]);
      widen(streams[k], made[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      squares += streams[k][c] * streams[k][c];
      sum[c] += part(mix.pre, k) * streams[k][c];
    }
  }
  const uint2 collapsed = narrow(sum);
  widen(sum, collapsed);
#pragma unroll
  for (int c = 0; c < 4; ++c) norm += sum[c] * sum[c];
  return collapsed;
}

__device__ __forceinline__ float sum_of_four_lanes(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// A stream's part of a warp's columns of the projection, in parts, as a thread hands them to mma.sync: of mixes 0 to 15 each part
// is an operand; the first two of mixes 16 to 23 are one, and their third fills half of one.
struct Parts {
  uint4 whole[4];
  uint2 half;
  __device__ __forceinline__ uint4 operand(int i) const { return i < 4 ? whole[i] : uint4{half.x, 0, half.y, 0}; }
};

// The same of several streams in shared memory; nobody but the thread reads its own.
struct Projection {
  uint4* whole;  // [stream][4][kThreads]
  uint2* half;   // [stream][kThreads]
  __device__ __forceinline__ Projection(uint8_t* room, int thread, int streams = kStreams)
      : whole(reinterpret_cast<uint4*>(room) + thread),
        half(reinterpret_cast<uint2*>(room + streams * 4 * kThreads * sizeof(uint4)) + thread) {}
  __device__ __forceinline__ void put(int stream, const Parts& parts) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) whole[(stream * 4 + i) * kThreads] = parts.whole[i];
    half[stream * kThreads] = parts.half;
  }
  __device__ __forceinline__ uint4 operand(int stream, int i) const {
    if (i < 4) return whole[(stream * 4 + i) * kThreads];
    const uint2 two = half[stream * kThreads];
    return {two.x, 0, two.y, 0};
  }
};

__device__ __forceinline__ void load_projection(float4 (&fn)[kStreams][3], const Site& site, int g, int column) {
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream)
#pragma unroll
    for (int i = 0; i < 3; ++i)
      fn[stream][i] =
          load_weights_of_line(site.fn + static_cast<int64_t>((g + 8 * i) * kStreams + stream) * site.hidden + column);
}

// fn: a stream's of load_projection, of mixes g, g + 8 and g + 16.
__device__ __forceinline__ Parts cut(const float4 (&fn)[3]) {
  uint2 low[3], high[3], rest[3];
  split(low, fn[0]), split(high, fn[1]), split(rest, fn[2]);
  Parts parts;
#pragma unroll
  for (int i = 0; i < 3; ++i) parts.whole[i] = {low[i].x, high[i].x, low[i].y, high[i].y};
  parts.whole[3] = {rest[0].x, rest[1].x, rest[0].y, rest[1].y}, parts.half = rest[2];
  return parts;
}

__device__ __forceinline__ void put_projection(const Projection& to, const float4 (&fn)[kStreams][3]) {
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) to.put(stream, cut(fn[stream]));
}

}  // namespace
}  // namespace di
