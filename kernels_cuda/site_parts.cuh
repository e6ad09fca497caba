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
constexpr int kRoom = kStreams * kThreads * (4 * sizeof(uint4) + sizeof(uint2));  // bytes of a block's projection, in parts
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
__device__ __forceinline__ void store_four(__nv_bfloat16* to, uint2 four) { *reinterpret_cast<uint2*>(to) = four; }

__device__ __forceinline__ void load_weight(float (&to)[4], const Site& site, int column) {
  if (site.wide_weight) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(site.norm_weight) + column);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
    widen(to, load_four(static_cast<const __nv_bfloat16*>(site.norm_weight) + column));
  }
}


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

__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// 2 to the power by which `over` is above `under`, but for their mantissas; both are positive and normal.
__device__ __forceinline__ float power_between(float over, float under) {
  return __uint_as_float(0x3F800000u + (__float_as_uint(over) & 0x7F800000u) - (__float_as_uint(under) & 0x7F800000u));
}

// to[i] = the product of the others of four; returns the product of all.
__device__ __forceinline__ float products_of_others(float (&to)[4], const float (&of)[4]) {
  const float low = of[0] * of[1], high = of[2] * of[3];
  to[0] = of[1] * high, to[1] = of[0] * high, to[2] = of[3] * low, to[3] = of[2] * low;
  return low * high;
}

// Alternating division of a positive 4 x 4 matrix k by its column sums and its row sums, each plus eps, `iterations` of them
// ending with columns. The matrix stays as it was until the end, and there is no division on the way: factors of rows are the
// reciprocals of sums R, and instead of 1 / R[i] there is the product of the other R times a scale that all share, which the next
// sums inherit. `of_rows` and `of_columns` are those scales: sums, were they not scaled, are R / of_columns and C / of_rows.
// They matter to the terms of eps alone, and where the rows begin a power of two keeps them near one.
__device__ __forceinline__ void sinkhorn(float (&k)[16], float eps, int iterations) {
  if (iterations <= 0) return;
  float rows[4] = {1, 1, 1, 1}, columns[4], R[4] = {1, 1, 1, 1}, C[4];
  float of_rows = 1.0f, inverse_of_rows = 1.0f, inverse_of_columns = 1.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) C[j] = ((k[j] + k[4 + j]) + (k[8 + j] + k[12 + j])) + eps;
#pragma unroll 1
  for (int iteration = 1; iteration < iterations; ++iteration) {
    const float all = products_of_others(columns, C), scale = power_between(of_rows, all);
    const float of_columns = all * scale * inverse_of_rows, least = eps * inverse_of_columns * of_columns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // columns and the sums of rows would carry the scale: it is not waited for
      float sum = k[4 * i] * columns[0];
#pragma unroll
      for (int j = 1; j < 4; ++j) sum = fmaf(k[4 * i + j], columns[j], sum);
      R[i] = fmaf(sum, scale, least * R[i]);
    }
    inverse_of_columns = reciprocal(of_columns);
    of_rows = products_of_others(rows, R) * inverse_of_columns;
    const float least_column = eps * inverse_of_rows * of_rows;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float sum = k[j] * rows[0];
#pragma unroll
      for (int i = 1; i < 4; ++i) sum = fmaf(k[4 * i + j], rows[i], sum);
      C[j] = fmaf(least_column, C[j], sum);
    }
    inverse_of_rows = reciprocal(of_rows);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) columns[j] = reciprocal(C[j]);
#pragma unroll
  for (int i = 0; i < 16; ++i) k[i] *= rows[i / 4] * columns[i % 4];
}

__device__ __forceinline__ float sum_of_four_lanes(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// What a lane of the warp that makes a row's coefficients reads and writes besides sums: lane l has mix l.
struct Mix {
  float scale, base;
  float* to;     // lanes 0 to 7: of pre and post
  float4* comb;  // lane 0
  float eps, share;  // share: one over the number of values whose squares are added
  int iterations;
};

__device__ __forceinline__ Mix mix_of(const Site& site, int lane, int64_t row) {
  const int mix = min(lane, kMixes - 1);
  Mix of = {site.scale[mix < 4 ? 0 : mix < 8 ? 1 : 2], site.base[mix]};
  of.to = (lane < 4 ? site.pre : site.post_out) + row * kStreams + lane % 4;
  of.comb = reinterpret_cast<float4*>(site.comb_out) + row * kStreams;
  of.eps = site.hc_eps, of.share = __fdividef(1.0f, static_cast<float>(kStreams * site.hidden)), of.iterations = site.iterations;
  asm volatile("" : "+l"(of.to), "+l"(of.comb), "+f"(of.eps), "+f"(of.share), "+r"(of.iterations));
  return of;
}

// A warp turns the sums of one row, [blocks][kMixes + 1], into its coefficients.
__device__ __forceinline__ void finish_row(const Site& site, const Mix& mix, const float* sums, int blocks, int lane) {
  float four[4] = {};
  const float* from = sums + min(lane, kMixes);
  int block = 0;
#pragma unroll 1
  for (; block + 32 <= blocks; block += 32, from += 32 * (kMixes + 1)) {
    float each[32];  // all are on their way before the first is added
#pragma unroll
    for (int i = 0; i < 32; ++i) each[i] = from[i * (kMixes + 1)];
#pragma unroll
    for (int i = 0; i < 32; ++i) four[i % 4] += each[i];
  }
#pragma unroll 1
  for (; block < blocks; ++block, from += kMixes + 1) four[0] += *from;
  const float sum = (four[0] + four[1]) + (four[2] + four[3]);
  const float factor = rsqrtf(__shfl_sync(~0u, sum, kSquares) * mix.share + site.rms_eps);
  const float z = sum * factor * mix.scale + mix.base;
  float highest = fmaxf(z, __shfl_xor_sync(~0u, z, 1));  // lanes 8 to 23 have the logits, four of a row beside each other
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
  const float raised = expf(z - highest), share = raised * reciprocal(sum_of_four_lanes(raised)) + mix.eps;
  const float gate = reciprocal(1.0f + expf(-z));
  if (lane < 8) *mix.to = lane < 4 ? gate + mix.eps : 2.0f * gate;
  float k[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) k[i] = __shfl_sync(~0u, share, 8 + i);
  sinkhorn(k, mix.eps, mix.iterations);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) mix.comb[i] = {k[4 * i], k[4 * i + 1], k[4 * i + 2], k[4 * i + 3]};
  }
}

__device__ __forceinline__ uint2 norm_four(uint2 collapsed, const float (&weight)[4], float factor) {
  float value[4];
  widen(value, collapsed);
#pragma unroll
  for (int c = 0; c < 4; ++c) value[c] = weight[c] * value[c] * factor;
  return narrow(value);
}

// A warp's columns of the projection, in parts, as a thread hands them to mma.sync; nobody but the thread reads its own.
// Of mixes 0 to 15 each part is an operand; the first two of mixes 16 to 23 are one, and their third fills half of one.
struct Projection {
  uint4* whole;  // [stream][4][kThreads]
  uint2* half;   // [stream][kThreads]; fn of load_projection: of mixes g, g + 8 and g + 16
  __device__ __forceinline__ explicit Projection(uint8_t* room)
      : whole(reinterpret_cast<uint4*>(room) + threadIdx.x),
        half(reinterpret_cast<uint2*>(room + kStreams * 4 * kThreads * sizeof(uint4)) + threadIdx.x) {}
};

__device__ __forceinline__ void load_projection(float4 (&fn)[kStreams][3], const Site& site, int g, int column) {
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream)
#pragma unroll
    for (int i = 0; i < 3; ++i)
      fn[stream][i] = __ldg(reinterpret_cast<const float4*>(
          site.fn + static_cast<int64_t>((g + 8 * i) * kStreams + stream) * site.hidden + column));
}

__device__ __forceinline__ void put_projection(const Projection& to, const float4 (&fn)[kStreams][3]) {
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    uint2 low[3], high[3], rest[3];
    split(low, fn[stream][0]), split(high, fn[stream][1]), split(rest, fn[stream][2]);
#pragma unroll
    for (int i = 0; i < 3; ++i) to.whole[(stream * 4 + i) * kThreads] = {low[i].x, high[i].x, low[i].y, high[i].y};
    to.whole[(stream * 4 + 3) * kThreads] = {rest[0].x, rest[1].x, rest[0].y, rest[1].y};
    to.half[stream * kThreads] = rest[2];
  }
}

// A warp's share of the 24 projections of 16 rows, over its 16 columns of every stream.
// d: [mixes 0..15 or 16..23][rows 0..7 or 8..15], as mma.sync holds them; of mixes 16..23 both halves of d[1] make a sum.
__device__ __forceinline__ void project(const Projection& from, const uint2 (&made)[2][kStreams], float (&d)[2][2][4]) {
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      uint4 a;
      if (i < 4) {
        a = from.whole[(stream * 4 + i) * kThreads];
      } else {
        const uint2 two = from.half[stream * kThreads];
        a = {two.x, 0, two.y, 0};
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply(d[i / 3][half], a, made[half][stream]);
    }
  }
}

}  // namespace
}  // namespace di
