// What residual_site's warps do to 16 columns of 16 token rows, and to a row's sums. Straight code is kept short: at decode a
// warp runs it once, and fetching instructions is much of its time.
#pragma once

#include <cuda_bf16.h>

#include "di_fp8.cuh"
#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {
namespace {

constexpr int kStreams = 4, kMixes = 24, kSums = 26, kRows = 16, kColumns = 16, kGroup = 32;
constexpr int kWarps = 10, kThreads = kWarps * 32, kWidth = kWarps * kColumns;  // of a block that takes streams
constexpr int kPitch = kWidth + 4;  // floats from line to line of the projection: the lanes of a load meet different banks
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
  int rows, hidden, iterations, first_row;
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


// D[16, 8] += A[16, 8] B[8, 8] of float32 bits, of which the unit reads the first 11 mantissa bits.
__device__ __forceinline__ void multiply(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// What the matrix unit leaves out of a float32, exactly.
__device__ __forceinline__ float left_over(float value) {
  return value - __uint_as_float(__float_as_uint(value) & 0xFFFFE000u);
}

// One row's coefficients as a thread needs them: how a result and each old stream go into each new stream.
struct RowMix {
  float4 post, comb[kStreams], pre;
};

template <bool kPost>
__device__ __forceinline__ RowMix load_mix(const Site& site, int row) {
  RowMix mix;
  mix.pre = reinterpret_cast<const float4*>(site.pre_prev)[row];
  if constexpr (kPost) {
    mix.post = reinterpret_cast<const float4*>(site.post)[row];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) mix.comb[i] = reinterpret_cast<const float4*>(site.comb)[row * kStreams + i];
  }
  return mix;
}

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

// Alternating division of a positive 4 x 4 matrix k by its column sums and its row sums, each plus eps, `iterations` of them
// ending with columns. The matrix stays as it was until the end: only factors of rows and columns change.
__device__ __forceinline__ void sinkhorn(float (&k)[16], float eps, int iterations) {
  float rows[4] = {1, 1, 1, 1}, columns[4] = {1, 1, 1, 1};
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration) {
    if (iteration > 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = columns[0] * k[4 * i];
#pragma unroll
        for (int j = 1; j < 4; ++j) sum += columns[j] * k[4 * i + j];
        rows[i] *= reciprocal(rows[i] * sum + eps);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float sum = rows[0] * k[j];
#pragma unroll
      for (int i = 1; i < 4; ++i) sum += rows[i] * k[4 * i + j];
      columns[j] *= reciprocal(columns[j] * sum + eps);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) k[i] *= rows[i / 4] * columns[i % 4];
}

__device__ __forceinline__ float sum_of_four_lanes(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// A warp turns the sums of one row, [blocks][kMixes + 1], into its coefficients.
__device__ __forceinline__ void finish_row(const Site& site, const float* sums, int blocks, int64_t row, int lane) {
  float sum = 0.0f;
#pragma unroll 32
  for (int block = 0; block < blocks; ++block) sum += lane <= kMixes ? sums[block * (kMixes + 1) + lane] : 0.0f;
  const float squares = __shfl_sync(~0u, sum, kSquares);
  const float factor = rsqrtf(squares / static_cast<float>(kStreams * site.hidden) + site.rms_eps);
  const int mix = min(lane, kMixes - 1), kind = mix < 4 ? 0 : mix < 8 ? 1 : 2;
  const float z = sum * factor * site.scale[kind] + site.base[mix];
  const float gate = 1.0f / (1.0f + expf(-z));
  float highest = fmaxf(z, __shfl_xor_sync(~0u, z, 1));  // lanes 8 to 23 have the logits, four of a row beside each other
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
  const float raised = expf(z - highest), share = raised / sum_of_four_lanes(raised) + site.hc_eps;
  float k[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) k[i] = __shfl_sync(~0u, share, 8 + i);
  sinkhorn(k, site.hc_eps, site.iterations);
  if (lane < 4) site.pre[row * 4 + lane] = gate + site.hc_eps;
  else if (lane < 8) site.post_out[row * 4 + lane - 4] = 2.0f * gate;
  if (lane == 0) {
    float4* to = reinterpret_cast<float4*>(site.comb_out) + row * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = {k[4 * i], k[4 * i + 1], k[4 * i + 2], k[4 * i + 3]};
  }
}

__device__ __forceinline__ uint2 norm_four(uint2 collapsed, const float (&weight)[4], float factor) {
  float value[4];
  widen(value, collapsed);
#pragma unroll
  for (int c = 0; c < 4; ++c) value[c] = weight[c] * value[c] * factor;
  return narrow(value);
}

__device__ __forceinline__ uint32_t largest_bits(uint2 four) {
  const uint32_t a = max((four.x << 16) & 0x7FFFFFFFu, four.x & 0x7FFF0000u);
  return max(a, max((four.y << 16) & 0x7FFFFFFFu, four.y & 0x7FFF0000u));
}

__device__ __forceinline__ uint32_t encode_four(uint2 four, uint32_t scale) {
  return fp8_pair(low_half(four.x), high_half(four.x), scale) | fp8_pair(low_half(four.y), high_half(four.y), scale) << 16;
}

// The block's columns of the projection, by the copy engine: [mix][stream][kPitch] floats. Each lane of one warp calls it.
__device__ __forceinline__ void fetch_projection(const Site& site, float* room, uint64_t* barrier, int column, int lane) {
  const uint32_t bytes = min(kWidth, site.hidden - column) * sizeof(float);
  if (lane == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect(barrier, bytes * kMixes * kStreams);
  }
  __syncwarp();
  for (int line = lane; line < kMixes * kStreams; line += 32)
    bulk_copy(room + line * kPitch, site.fn + static_cast<int64_t>(line) * site.hidden + column, bytes, barrier);
}

// A warp's share of the 24 projections of 16 rows, over its 16 columns of every stream.
// d: [mixes 0..15 or 16..23][rows 0..7 or 8..15], as mma.sync holds them.
__device__ __forceinline__ void project(const float* room, const float (&made)[2][kStreams][4], int g, float (&d)[2][2][4]) {
  float rest[2][2][4] = {};
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    float4 fn[3];  // mixes g, g + 8 and g + 16
#pragma unroll
    for (int i = 0; i < 3; ++i) fn[i] = *reinterpret_cast<const float4*>(room + ((g + 8 * i) * kStreams + stream) * kPitch);
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      const float lower[4] = {part(fn[0], c), part(fn[1], c), part(fn[0], c + 1), part(fn[1], c + 1)};
      const float upper[4] = {part(fn[2], c), 0.0f, part(fn[2], c + 1), 0.0f};
      const float lower_rest[4] = {left_over(lower[0]), left_over(lower[1]), left_over(lower[2]), left_over(lower[3])};
      const float upper_rest[4] = {left_over(upper[0]), 0.0f, left_over(upper[2]), 0.0f};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply(d[0][half], lower, made[half][stream][c], made[half][stream][c + 1]);
        multiply(d[1][half], upper, made[half][stream][c], made[half][stream][c + 1]);
        multiply(rest[0][half], lower_rest, made[half][stream][c], made[half][stream][c + 1]);
        multiply(rest[1][half], upper_rest, made[half][stream][c], made[half][stream][c + 1]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i) d[0][half][i] += rest[0][half][i], d[1][half][i] += rest[1][half][i];
}

}  // namespace
}  // namespace di
