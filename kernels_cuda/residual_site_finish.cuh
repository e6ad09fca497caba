// residual_site's second kernels: a row's sums become coefficients, and its collapsed row is normed and quantised.
#pragma once

#include "residual_site_parts.cuh"
#include "residual_site_sinkhorn.cuh"

namespace di {
namespace {

constexpr int kEach = 16, kFours = kEach / 4, kFinishers = 320;  // kEach: columns of a thread
constexpr int kFinisherRegisters = 64, kNormedTogether = 2;

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

// A warp turns the sums of one row, [blocks][kMixes + 1], into its coefficients; lanes 8 to 23 get what the Sinkhorn begins with.
__device__ __forceinline__ float mix_row(const Site& site, const Mix& mix, const float* sums, int blocks, int lane) {
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
  return share;
}

__device__ __forceinline__ void store_matrix(float4* to, const float (&k)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = {k[4 * i], k[4 * i + 1], k[4 * i + 2], k[4 * i + 3]};
}

// A row by a warp: every lane has its matrix.
__device__ __forceinline__ void finish_row(const Site& site, const Mix& mix, const float* sums, int blocks, int lane) {
  const float share = mix_row(site, mix, sums, blocks, lane);
  float k[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) k[i] = __shfl_sync(~0u, share, 8 + i);
  sinkhorn(k, mix.eps, mix.iterations);
  if (lane == 0) store_matrix(mix.comb, k);
}

__device__ __forceinline__ void load_weight(float (&to)[4], const Site& site, int column) {
  if (site.wide_weight) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(site.norm_weight) + column);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
    widen(to, load_four(static_cast<const __nv_bfloat16*>(site.norm_weight) + column));
  }
}

__device__ __forceinline__ void load_weights(float (&to)[kFours][4], const Site& site, int column) {
#pragma unroll
  for (int i = 0; i < kFours; ++i) load_weight(to[i], site, column + 4 * i);
}

__device__ __forceinline__ uint2 norm_four(uint2 collapsed, const float (&weight)[4], float factor) {
  float value[4];
  widen(value, collapsed);
#pragma unroll
  for (int c = 0; c < 4; ++c) value[c] = weight[c] * value[c] * factor;
  return narrow(value);
}

// Norms sixteen columns of a row that lies collapsed in the output, and makes their codes if asked for. `total`: of the row's
// squares.
__device__ __forceinline__ void norm_columns(const Site& site, const uint4 (&half)[2], const float (&weight)[kFours][4],
                                             float total, int64_t at, bool inside) {
  const float factor = rsqrtf(__fdividef(total, static_cast<float>(site.hidden)) + site.rms_eps);
  uint4 normed[2] = {};
  if (inside) {
    uint4* to = reinterpret_cast<uint4*>(site.out + at);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 low = norm_four({half[i].x, half[i].y}, weight[2 * i], factor);
      const uint2 high = norm_four({half[i].z, half[i].w}, weight[2 * i + 1], factor);
      to[i] = normed[i] = {low.x, low.y, high.x, high.y};
    }
  }
  if (site.codes == nullptr) return;
  const uint32_t scale = fp8_scale_of_bits(largest_of_two_lanes(max(largest_of_eight(normed[0]), largest_of_eight(normed[1]))));
  if (inside) store_sixteen<true>(site.codes + at, site.scales + at / kGroup, sixteen_codes(normed[0], normed[1], scale), scale);
}

// A block norms its part, `parts` a row, of `kTogether` rows of this launch from `row` on, whose last is before `rows`.
template <int kTogether>
__device__ __forceinline__ void norm_rows(const Site& site, int row, int rows, int part, int blocks) {
  const int lane = threadIdx.x % 32, hidden = site.hidden, column = (part * blockDim.x + threadIdx.x) * kEach;
  const bool inside = column < hidden;
  float weight[kFours][4] = {};
  if (inside) load_weights(weight, site, column);  // weights: no kernel before writes them
  const int64_t of_all = site.first_row + row, at = of_all * hidden + column;
  const float* norms = settled(site.norms + static_cast<int64_t>(row) * blocks + lane);
  const uint4* mixed = settled(reinterpret_cast<const uint4*>(site.out + at));
  const int *count = site.count, all = site.rows;
  wait_for_producer_with(norms, mixed, count, all, hidden, blocks, site.codes, site.scales);
  const int left = static_cast<int>(min(static_cast<int64_t>(rows - row), valid_rows(count, all) - of_all));
  if (left <= 0) return;
  uint4 half[kTogether][2] = {};
  float total[kTogether] = {};
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
    const uint4* from = mixed + r * hidden / 8;
    if (inside && r < left) half[r][0] = from[0], half[r][1] = from[1];
  }
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
#pragma unroll 1
    for (int i = lane; i < blocks; i += 32) total[r] += r < left ? norms[r * blocks + i - lane] : 0.0f;
  }
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total[r] += __shfl_xor_sync(~0u, total[r], step);
    norm_columns(site, half[r], weight, total[r], at + r * hidden, inside && r < left);
  }
}

// The first blocks norm, `parts` of them a row; the others make coefficients, a warp a row, `each` rows a block. Few rows have a
// block each for their coefficients, so that the warp that is longest at it shares no multiprocessor with those that norm. The
// latter come first: blocks pile up where take_kernel has none, and there a warp of coefficients would be slow.
template <bool kNormed>
__global__ void __maxnreg__(kFinisherRegisters) finish_kernel(const Site site, int blocks, int rows, int each, int parts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, norming = kNormed ? rows * parts : 0, block = blockIdx.x;
  const bool mixes = block >= norming;
  start_dependents();
  if (mixes) {
    const int row = (block - norming) * each + warp;
    if (warp >= each || row >= rows) return;
    const int64_t place = static_cast<int64_t>(row) * blocks, of_all = site.first_row + row;
    const int *count = site.count, all = site.rows;
    const Mix mix = mix_of(site, lane, of_all);
    const float* sums = settled(site.sums + place * (kMixes + 1));
    wait_for_producer_with(sums, count, all, blocks, mix.to, mix.comb, __float_as_int(mix.eps), mix.iterations);
    if (of_all < valid_rows(count, all)) finish_row(site, mix, sums, blocks, lane);
  } else if constexpr (kNormed) {
    norm_rows<1>(site, block / parts, rows, block % parts, blocks);
  }
}

// The same for many rows: blocks for the coefficients of 32 rows each come first, and in those a thread has a row's Sinkhorn. The
// others norm two rows each, so that more bytes are on their way.
template <bool kNormed>
__global__ void __maxnreg__(kFinisherRegisters) finish_many_kernel(const Site site, int blocks, int rows, int parts) {
  __shared__ float shares[32][17];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, solving = (rows + 31) / 32;
  start_dependents();
  if (blockIdx.x >= solving) {
    const int block = blockIdx.x - solving, all = (rows + kNormedTogether - 1) / kNormedTogether;
    const int row = (all - 1 - block / parts) * kNormedTogether;  // the last rows first: they are still in the L2 cache
    if constexpr (kNormed) norm_rows<kNormedTogether>(site, row, rows, block % parts, blocks);
    return;
  }
  wait_for_producer();
  const int first = blockIdx.x * 32, last = min(rows, valid_rows(site.count, site.rows) - site.first_row);
  for (int i = warp; i < 32 && first + i < last; i += blockDim.x / 32) {
    const Mix mix = mix_of(site, lane, site.first_row + first + i);
    const float share = mix_row(site, mix, site.sums + static_cast<int64_t>(first + i) * blocks * (kMixes + 1), blocks, lane);
    if (lane >= 8 && lane < 24) shares[i][lane - 8] = share;
  }
  __syncthreads();
  if (warp > 0 || first + lane >= last) return;
  float k[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) k[i] = shares[lane][i];
  sinkhorn(k, site.hc_eps, site.iterations);
  store_matrix(reinterpret_cast<float4*>(site.comb_out) + static_cast<int64_t>(site.first_row + first + lane) * kStreams, k);
}

}  // namespace
}  // namespace di
