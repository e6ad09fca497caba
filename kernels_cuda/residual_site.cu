// residual_site and hyper_connection_pre for BF16 streams of four, in two launches.
//
// take_kernel: a warp has 16 columns of the four streams of 16 token rows in registers, from reading to the sums:
//   1. the streams get the previous sub-layer's result (residual_site) and are stored, rounded;
//   2. the collapsed row is made from them, rounded, and left in the output;
//   3. the 24 projections are products with mma.sync of BF16 operands, to which the float32 projection is cut into three parts
//      before the kernel waits for the one before it. The columns of both operands are permuted alike, so that a thread's
//      fragments are the very values that it read;
//   4. the block adds its warps' sums into the workspace.
// finish_kernel: a block has a row. One warp turns the row's sums into coefficients (Sinkhorn's sixteen numbers in the registers
// of each thread) while the others norm and quantise it.
//
// Registers are such that both kernels fit a multiprocessor at once, so that each is there when the other ends.
//
// How columns are dealt to warps and blocks depends on nothing, and so does the order of every sum.
#include <algorithm>

#include "site_parts.cuh"

namespace di {
namespace {

constexpr int kEach = 16, kFours = kEach / 4, kMostFinishers = 32 + 320, kFinisherRegisters = 64;

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

// Reads the streams, makes them new, writes them, collapses them; rows from `last` on are left alone.
template <bool kPost>
__device__ __forceinline__ void take_streams(const Place& at, int last, int hidden, Kept& kept) {
  uint2 result[2] = {};
  RowMix mix[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (at.row + 8 * half >= last) continue;
#pragma unroll
    for (int i = 0; i < kStreams; ++i) kept.made[half][i] = load_four(at.streams + (half * 8 * kStreams + i) * hidden);
    mix[half].pre = at.pre[half * 8];
    if constexpr (kPost) {
      result[half] = load_four(at.y + half * 8 * hidden);
      mix[half].post = at.post[half * 8];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) mix[half].comb[i] = at.comb[half * 8 * kStreams + i];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (at.row + 8 * half >= last) continue;
    uint2(&made)[kStreams] = kept.made[half];
    float wide[kStreams][4];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) widen(wide[i], made[i]);
    const uint2 collapsed = renew<kPost>(mix[half], wide, result[half], made, kept.squares[half], kept.norm[half]);
    if constexpr (kPost) {
#pragma unroll
      for (int k = 0; k < kStreams; ++k) store_four(at.streams + (half * 8 * kStreams + k) * hidden, made[k]);
    }
    store_four(at.out + half * 8 * hidden, collapsed);
  }
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
__global__ void __launch_bounds__(kThreads, 1) take_kernel(const Site site) {
  __shared__ float sums[kWarps][kSums][kPitch];
  extern __shared__ __align__(16) uint8_t room[];
  constexpr int kTurns = (kSums * kRows + kThreads - 1) / kThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x, hidden = site.hidden;
  const int column = block * kWidth + warp * kColumns + lane % 4 * 4;
  int first = site.first_row + blockIdx.y * kRows;
  const int warps = min(kWarps, (hidden - block * kWidth + kColumns - 1) / kColumns);
  start_dependents();
  const Projection projection(room);
  if (warp < warps) take_projection(site, projection, lane / 4, column);  // weights: no kernel before writes them
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
  const int *count = site.count, rows = settled(site.rows);
  wait_for_producer();
  const int last = valid_rows(count, rows);
  if (first >= last) return;
#pragma unroll 1
  while (true) {
    if (warp < warps) {
      Kept kept;
      take_streams<kPost>(at, last, hidden, kept);
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

// Norms a row that lies collapsed in the output, sixteen columns a thread, and makes its codes if asked for. `weight` is that of
// the thread's first columns.
__device__ __forceinline__ void norm_row(const Site& site, const float* norms, const uint4* from, int blocks, int64_t row,
                                         int thread, int threads, float (&weight)[kFours][4]) {
  const int lane = thread % 32, hidden = site.hidden;
  uint4 half[2] = {};
  if (kEach * thread < hidden) half[0] = from[2 * thread], half[1] = from[2 * thread + 1];
  float total = 0.0f;
#pragma unroll 1
  for (int block = lane; block < blocks; block += 32) total += norms[block];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  const float factor = rsqrtf(__fdividef(total, static_cast<float>(hidden)) + site.rms_eps);
#pragma unroll 1
  for (int start = 0; start < hidden; start += kEach * threads) {  // all lanes take every turn, for the shuffles
    const int column = start + kEach * thread;
    const bool inside = column < hidden;
    if (start > 0 && inside) {
      half[0] = from[column / 8], half[1] = from[column / 8 + 1];
      load_weights(weight, site, column);
    }
    uint2 normed[kFours] = {};
    if (inside) {
      uint4* to = reinterpret_cast<uint4*>(site.out + row * hidden + column);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        normed[2 * i] = norm_four({half[i].x, half[i].y}, weight[2 * i], factor);
        normed[2 * i + 1] = norm_four({half[i].z, half[i].w}, weight[2 * i + 1], factor);
        to[i] = {normed[2 * i].x, normed[2 * i].y, normed[2 * i + 1].x, normed[2 * i + 1].y};
      }
    }
    if (site.codes == nullptr) continue;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kFours; ++i) largest = max(largest, largest_bits(normed[i]));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    const uint32_t scale = fp8_scale(__uint_as_float(largest));
    if (!inside) continue;
    const uint4 codes = {encode_four(normed[0], scale), encode_four(normed[1], scale), encode_four(normed[2], scale),
                         encode_four(normed[3], scale)};
    *reinterpret_cast<uint4*>(site.codes + row * hidden + column) = codes;
    if (lane % 2 == 0) site.scales[(row * hidden + column) / kGroup] = static_cast<uint8_t>(scale);
  }
}

template <bool kNormed>
__global__ void __maxnreg__(kFinisherRegisters) finish_kernel(const Site site, int blocks) {
  const int lane = threadIdx.x % 32, thread = static_cast<int>(threadIdx.x) - 32;
  const int64_t row = site.first_row + blockIdx.x, place = static_cast<int64_t>(blockIdx.x) * blocks;
  start_dependents();
  float weight[kFours][4] = {};  // weights: no kernel before writes them
  Mix mix = {};
  if (thread < 0) mix = mix_of(site, lane, row);
  else if (kNormed && kEach * thread < site.hidden) load_weights(weight, site, kEach * thread);
  const float *sums = settled(site.sums + place * (kMixes + 1)), *norms = settled(site.norms + place);
  const uint4* mixed = settled(reinterpret_cast<const uint4*>(site.out + row * site.hidden));
  const int *count = site.count, rows = settled(site.rows);
  wait_for_producer();
  if (row >= valid_rows(count, rows)) return;
  if (thread < 0) finish_row(site, mix, sums, blocks, lane);
  else if constexpr (kNormed) norm_row(site, norms, mixed, blocks, row, thread, blockDim.x - 32, weight);
}

template <bool kPost, bool kNormed>
int launch(Site site, cudaStream_t stream, void* ws, size_t ws_bytes, di_error* e) {
  if (site.hidden % kGroup != 0)
    return refuse(e, DI_UNSUPPORTED, "the hidden size must be a multiple of 32, it is %d", site.hidden);
  const int blocks = static_cast<int>(ceil_div(site.hidden, kWidth)), bytes = kRoom;
  const int64_t room = static_cast<int64_t>(ws_bytes / (blocks * kSums * sizeof(float))) / kRows * kRows;
  if (room == 0 && site.rows > 0) return refuse(e, DI_BAD_CALL, "residual_site needs a workspace, it got %zu bytes", ws_bytes);
  const cudaError_t status = std::max(allow_shared<take_kernel<kPost, false>>(bytes), allow_shared<take_kernel<kPost, true>>(bytes));
  if (status != cudaSuccess) return refuse(e, DI_FAILED, "residual_site: %s", cudaGetErrorString(status));
  const int64_t most_tiles = std::max(1, multiprocessors() / blocks);  // of 16 rows, at a time
  const int finishers = 32 + (kNormed ? std::min(static_cast<int>(round_up(site.hidden / kEach, 32)), kMostFinishers - 32) : 0);
  for (; site.first_row < site.rows; site.first_row += room) {
    const int rows = static_cast<int>(std::min<int64_t>(room, site.rows - site.first_row));
    site.sums = static_cast<float*>(ws), site.norms = site.sums + static_cast<int64_t>(rows) * blocks * (kMixes + 1);
    const int64_t tiles = ceil_div(rows, kRows);
    const dim3 grid(blocks, static_cast<unsigned>(std::min(tiles, most_tiles)));
    launch_early(tiles > most_tiles ? take_kernel<kPost, true> : take_kernel<kPost, false>, grid, kThreads, bytes, stream, site);
    launch_early(finish_kernel<kNormed>, dim3(rows), finishers, 0, stream, site, blocks);
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

int refuse_streams(const di_tensor& streams, di_error* e) {
  if (streams.dtype != DI_BF16 || streams.shape[1] != kStreams)
    return refuse(e, DI_UNSUPPORTED, "streams must be BF16 and four a row, got dtype %d and %d streams", streams.dtype,
                  static_cast<int>(streams.shape[1]));
  return DI_OK;
}

}  // namespace
}  // namespace di

DI_EXPORT int di_hyper_connection_pre(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes,
                                      di_error* e) {
  using namespace di;
  if (n != 10) return refuse(e, DI_BAD_CALL, "hyper_connection_pre: 10 tensors make a call, got %d", n);
  if (const int status = refuse_streams(t[0], e)) return status;
  Site site = site_of(t + 1, t[0], t[5], p);
  site.out = data<__nv_bfloat16>(t[6]);
  site.pre = data<float>(t[7]), site.post_out = data<float>(t[8]), site.comb_out = data<float>(t[9]);
  return launch<false, false>(site, static_cast<cudaStream_t>(stream), ws, ws_bytes, e);
}

DI_EXPORT int di_residual_site(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes,
                                      di_error* e) {
  using namespace di;
  if (n != 16) return refuse(e, DI_BAD_CALL, "residual_site: 16 tensors make a call, got %d", n);
  if (const int status = refuse_streams(t[9], e)) return status;
  Site site = site_of(t + 3, t[9], t[8], p);
  site.norm_weight = t[7].data, site.wide_weight = t[7].dtype == DI_F32;
  site.out = data<__nv_bfloat16>(t[10]);
  if (present(t[11])) site.codes = data<uint8_t>(t[11]), site.scales = data<uint8_t>(t[12]);
  site.pre = data<float>(t[13]), site.post_out = data<float>(t[14]), site.comb_out = data<float>(t[15]);
  if (!present(t[0])) return launch<false, true>(site, static_cast<cudaStream_t>(stream), ws, ws_bytes, e);
  site.y = data<__nv_bfloat16>(t[0]), site.post = data<float>(t[1]), site.comb = data<float>(t[2]);
  return launch<true, true>(site, static_cast<cudaStream_t>(stream), ws, ws_bytes, e);
}
