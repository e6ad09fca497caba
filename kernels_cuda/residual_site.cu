// residual_site and hyper_connection_pre for BF16 streams of four, in two launches.
//
// take_kernel: a warp has 16 columns of the four streams of 16 token rows in registers, from reading to the sums:
//   1. the streams get the previous sub-layer's result (residual_site) and are stored, rounded;
//   2. the collapsed row is made from them, rounded, and left in the output;
//   3. the 24 projections are products with mma.sync of BF16 operands. The float32 projection is read before the kernel waits for the
//      one before it, and cut into three parts while rows are on their way, or, where a block has many, before. The columns of both
//      operands are permuted alike, so that a thread's fragments are the very values that it read;
//   4. the block adds its warps' sums into the workspace.
// finish_kernel: a warp turns a row's sums into coefficients (Sinkhorn's sixteen numbers in the registers of each thread) while a
// block norms and quantises the row.
//
// Registers are such that both kernels fit a multiprocessor at once, so that each is there when the other ends.
//
// How columns are dealt to warps and blocks depends on nothing, and so does the order of every sum.
#include <algorithm>

#include "site_parts.cuh"

namespace di {
namespace {

constexpr int kEach = 16, kFours = kEach / 4, kFinishers = 320, kFinisherRegisters = 64, kTakerRegisters = 136;

__device__ __forceinline__ void load_weights(float (&to)[kFours][4], const Site& site, int column) {
#pragma unroll
  for (int i = 0; i < kFours; ++i) load_weight(to[i], site, column + 4 * i);
}

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
__device__ __forceinline__ void read_row(Read& read, const Place& at, int half, int last, int hidden) {
  if (at.row + 8 * half >= last) return;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) read.streams[i] = load_four(at.streams + (half * 8 * kStreams + i) * hidden);
  read.mix.pre = at.pre[half * 8];
  if constexpr (kPost) {
    read.result = load_four(at.y + half * 8 * hidden);
    read.mix.post = at.post[half * 8];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) read.mix.comb[i] = at.comb[half * 8 * kStreams + i];
  }
}

// Makes a row's streams new, writes them, collapses them; rows from `last` on are left alone.
template <bool kPost>
__device__ __forceinline__ void take_row(Read& read, const Place& at, int half, int last, int hidden, Kept& kept) {
  if (at.row + 8 * half >= last) return;
  uint2(&made)[kStreams] = kept.made[half];
  float wide[kStreams][4];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    made[i] = read.streams[i];
    widen(wide[i], made[i]);
  }
  const uint2 collapsed = renew<kPost>(read.mix, wide, read.result, made, kept.squares[half], kept.norm[half]);
  if constexpr (kPost) {
#pragma unroll
    for (int k = 0; k < kStreams; ++k) store_four(at.streams + (half * 8 * kStreams + k) * hidden, made[k]);
  }
  store_four(at.out + half * 8 * hidden, collapsed);
}

// A warp's projections and squares, into its part of shared memory.
__device__ __forceinline__ void leave_sums(float (&sums)[kSums][kPitch], const Projection& projection, const Place& at,
                                           const Kept& kept) {
  float d[2][2][4] = {};
  project(projection, kept.made, d);
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

// kMany: a block has every gridDim.y-th tile of 16 rows, so that it cuts its columns of the projection once.
template <bool kPost, bool kMany>
__global__ void __maxnreg__(kTakerRegisters) take_kernel(const Site site) {
  __shared__ float sums[kWarps][kSums][kPitch];
  extern __shared__ __align__(16) uint8_t room[];
  constexpr int kTurns = (kSums * kRows + kThreads - 1) / kThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x, hidden = site.hidden;
  const int column = block * kWidth + warp * kColumns + lane % 4 * 4;
  int first = site.first_row + blockIdx.y * kRows;
  const int warps = min(kWarps, (hidden - block * kWidth + kColumns - 1) / kColumns);
  start_dependents();
  float4 fn[kStreams][3] = {};
  if (warp < warps) load_projection(fn, site, lane / 4, column);  // weights: no kernel before writes them
  Place at(site, first + lane / 4, column, lane);
  float* to[kTurns];  // of the sums that this thread adds
  int from[kTurns], row_of[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = threadIdx.x + turn * kThreads, mix = i % kSums;
    row_of[turn] = i / kSums, from[turn] = settled(mix * kPitch + min(row_of[turn], kRows - 1));
    const int64_t place = static_cast<int64_t>(blockIdx.y * kRows + row_of[turn]) * blocks + block;
    to[turn] = settled(mix < kNorm ? site.sums + place * (kMixes + 1) + mix : site.norms + place);
  }
  const int *count = site.count, rows = site.end_row;
  const Projection projection(room);
  if (kMany && warp < warps) put_projection(projection, fn);
  wait_for_producer_with(at.streams, at.out, at.y, at.pre, at.post, at.comb, at.row, to[0], to[1], from[0], from[1], count, rows, first,
                         projection.whole);
  const int last = valid_rows(count, rows);
  if (first >= last) return;
#pragma unroll 1
  while (true) {
    if (warp < warps) {
      Kept kept;
      Read low, high;
      read_row<kPost>(low, at, 0, last, hidden);
      if constexpr (!kMany) {  // the projection may still be on its way, and so are the rows while it is cut
        keep_loads_ahead(last);
        put_projection(projection, fn);
      }
      read_row<kPost>(high, at, 1, last, hidden);
      take_row<kPost>(low, at, 0, last, hidden, kept);
      take_row<kPost>(high, at, 1, last, hidden, kept);
      leave_sums(sums[warp], projection, at, kept);
    }
    __syncthreads();
    float sum[kTurns] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) sum[turn] += w < warps ? (&sums[w][0][0])[from[turn]] : 0.0f;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
      if (row_of[turn] < kRows && first + row_of[turn] < last) *to[turn] = sum[turn];
    if constexpr (!kMany) return;
    const int step = gridDim.y * kRows;
    first += step;
    if (first >= last) return;
    at.advance(step, hidden);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
      to[turn] += static_cast<int64_t>(step) * blocks * ((threadIdx.x + turn * kThreads) % kSums < kNorm ? kMixes + 1 : 1);
    __syncthreads();  // the sums are read
  }
}

// Norms sixteen columns of a row that lies collapsed in the output, and makes their codes if asked for. `total`: of the row's squares.
__device__ __forceinline__ void norm_columns(const Site& site, const uint4 (&half)[2], const float (&weight)[kFours][4], float total,
                                             int64_t at, bool inside) {
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

// The first blocks norm, `parts` of them a row; the others make coefficients, a warp a row, `each` rows a block. Few rows have a block
// each for their coefficients, so that the warp that is longest at it shares no multiprocessor with those that norm. The latter come
// first: blocks pile up where take_kernel has none, and there a warp of coefficients would be slow.
template <bool kNormed>
__global__ void __maxnreg__(kFinisherRegisters) finish_kernel(const Site site, int blocks, int rows, int each, int parts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, norming = kNormed ? rows * parts : 0, block = blockIdx.x;
  const bool mixes = block >= norming;
  const int row = mixes ? (block - norming) * each + warp : block / parts, hidden = site.hidden;
  start_dependents();
  if (mixes && (warp >= each || row >= rows)) return;
  const int64_t place = static_cast<int64_t>(row) * blocks, of_all = site.first_row + row;
  const int *count = site.count, all = site.rows;
  if (mixes) {
    const Mix mix = mix_of(site, lane, of_all);
    const float* sums = settled(site.sums + place * (kMixes + 1));
    wait_for_producer_with(sums, count, all, blocks, mix.to, mix.comb, __float_as_int(mix.eps), mix.iterations);
    if (of_all < valid_rows(count, all)) finish_row(site, mix, sums, blocks, lane);
  } else if constexpr (kNormed) {
    const int column = (block % parts * blockDim.x + threadIdx.x) * kEach;
    const bool inside = column < hidden;
    float weight[kFours][4] = {};
    if (inside) load_weights(weight, site, column);  // weights: no kernel before writes them
    const int64_t at = of_all * hidden + column;
    const float* norms = settled(site.norms + place + lane);
    const uint4* mixed = settled(reinterpret_cast<const uint4*>(site.out + at));
    wait_for_producer_with(norms, mixed, count, all, hidden, blocks, site.codes, site.scales);
    if (of_all >= valid_rows(count, all)) return;
    uint4 half[2] = {};
    if (inside) half[0] = mixed[0], half[1] = mixed[1];
    float total = 0.0f;
#pragma unroll 1
    for (int i = lane; i < blocks; i += 32, norms += 32) total += *norms;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    norm_columns(site, half, weight, total, at, inside);
  }
}

template <bool kPost, bool kNormed>
int launch(Site site, cudaStream_t stream, void* ws, size_t ws_bytes, di_error* e) {
  if (site.hidden == 0 || site.hidden % kGroup != 0)
    return refuse(e, DI_UNSUPPORTED, "the hidden size must be a positive multiple of 32, it is %d", site.hidden);
  const int blocks = static_cast<int>(ceil_div(site.hidden, kWidth)), bytes = kRoom;
  const int64_t room = static_cast<int64_t>(ws_bytes / (blocks * kSums * sizeof(float))) / kRows * kRows;
  if (room == 0 && site.rows > 0) return refuse(e, DI_BAD_CALL, "residual_site needs a workspace, it got %zu bytes", ws_bytes);
  const cudaError_t status = std::max(allow_shared<take_kernel<kPost, false>>(bytes), allow_shared<take_kernel<kPost, true>>(bytes));
  if (status != cudaSuccess) return refuse(e, DI_FAILED, "residual_site: %s", cudaGetErrorString(status));
  const int64_t most_tiles = std::max(1, multiprocessors() / blocks);  // of 16 rows, at a time
  const int finishers = std::min(static_cast<int>(round_up(site.hidden / kEach, 32)), kFinishers);
  for (; site.first_row < site.rows; site.first_row += room) {
    const int rows = static_cast<int>(std::min<int64_t>(room, site.rows - site.first_row));
    site.end_row = site.first_row + rows;
    site.sums = static_cast<float*>(ws), site.norms = site.sums + static_cast<int64_t>(rows) * blocks * (kMixes + 1);
    const int64_t tiles = ceil_div(rows, kRows);
    const dim3 grid(blocks, static_cast<unsigned>(std::min(tiles, most_tiles)));
    launch_early(tiles > most_tiles ? take_kernel<kPost, true> : take_kernel<kPost, false>, grid, kThreads, bytes, stream, site);
    const int each = 2 * rows <= multiprocessors() ? 1 : finishers / 32, parts = static_cast<int>(ceil_div(site.hidden, kEach * finishers));
    const int64_t finishing = ceil_div(rows, each) + (kNormed ? static_cast<int64_t>(rows) * parts : 0);
    launch_early(finish_kernel<kNormed>, dim3(static_cast<unsigned>(finishing)), finishers, 0, stream, site, blocks, rows, each, parts);
  }
  return finish(e, "residual_site");
}

// What both ops share: the tensors from fn to pre_prev at `t`, and the streams.
Site site_of(const di_tensor* t, const di_tensor& streams, const di_tensor& count, const di_params* p) {
  Site site = {};
  site.fn = data<float>(t[0]), site.base = data<float>(t[1]), site.scale = data<float>(t[2]), site.pre_prev = data<float>(t[3]);
  site.streams = data<__nv_bfloat16>(streams);
  site.count = present(count) ? data<int>(count) : nullptr;
  site.rows = static_cast<int>(streams.shape[0]), site.hidden = static_cast<int>(streams.shape[2]);
  site.rms_eps = static_cast<float>(p->d[0]), site.hc_eps = static_cast<float>(p->d[1]);
  site.iterations = static_cast<int>(p->i[0]);
  return site;
}

int refuse_types(const di_tensor& streams, const di_tensor* y, const di_tensor& out, di_error* e) {
  if (streams.dtype != DI_BF16 || streams.shape[1] != kStreams)
    return refuse(e, DI_UNSUPPORTED, "streams must be BF16 and four a row, got dtype %d and %d streams", streams.dtype,
                  static_cast<int>(streams.shape[1]));
  if (out.dtype != DI_BF16 || (y != nullptr && present(*y) && y->dtype != DI_BF16))
    return refuse(e, DI_UNSUPPORTED, "out and y must be BF16 as the streams are, got dtypes %d and %d", out.dtype,
                  y == nullptr ? DI_NONE : y->dtype);
  return DI_OK;
}

}  // namespace
}  // namespace di

DI_EXPORT int di_hyper_connection_pre(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes,
                                      di_error* e) {
  using namespace di;
  if (n != 10) return refuse(e, DI_BAD_CALL, "hyper_connection_pre: 10 tensors make a call, got %d", n);
  if (const int status = refuse_types(t[0], nullptr, t[6], e)) return status;
  Site site = site_of(t + 1, t[0], t[5], p);
  site.out = data<__nv_bfloat16>(t[6]);
  site.pre = data<float>(t[7]), site.post_out = data<float>(t[8]), site.comb_out = data<float>(t[9]);
  return launch<false, false>(site, static_cast<cudaStream_t>(stream), ws, ws_bytes, e);
}

DI_EXPORT int di_residual_site(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes,
                                      di_error* e) {
  using namespace di;
  if (n != 16) return refuse(e, DI_BAD_CALL, "residual_site: 16 tensors make a call, got %d", n);
  if (const int status = refuse_types(t[9], t, t[10], e)) return status;
  Site site = site_of(t + 3, t[9], t[8], p);
  site.norm_weight = t[7].data, site.wide_weight = t[7].dtype == DI_F32;
  site.out = data<__nv_bfloat16>(t[10]);
  if (present(t[11])) site.codes = data<uint8_t>(t[11]), site.scales = data<uint8_t>(t[12]);
  site.pre = data<float>(t[13]), site.post_out = data<float>(t[14]), site.comb_out = data<float>(t[15]);
  if (!present(t[0])) return launch<false, true>(site, static_cast<cudaStream_t>(stream), ws, ws_bytes, e);
  site.y = data<__nv_bfloat16>(t[0]), site.post = data<float>(t[1]), site.comb = data<float>(t[2]);
  return launch<true, true>(site, static_cast<cudaStream_t>(stream), ws, ws_bytes, e);
}
