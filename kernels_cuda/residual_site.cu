// residual_site and hyper_connection_pre for BF16 streams of four, in two launches.
//
// take_kernel: a warp has 16 columns of the four streams of 16 token rows in registers, from reading to the sums:
//   1. the streams get the previous sub-layer's result (residual_site) and are stored, rounded;
//   2. the collapsed row is made from them, rounded, and left in the output;
//   3. the 24 projections are products with mma.sync of TF32 operands: BF16 values are exact there, and the float32 projection
//      is cut into two parts, what the unit reads and the rest, which together leave out its last two bits at most. The
//      columns of both operands are permuted alike, so that a thread's fragments are the very values that it read;
//   4. the block adds its warps' sums into the workspace.
// finish_kernel: a block has a row. One warp turns the row's sums into coefficients (Sinkhorn's sixteen numbers in the registers
// of each thread) while the others norm and quantise it.
//
// How columns are dealt to warps and blocks depends on nothing, and so does the order of every sum.
#include <algorithm>

#include "site_parts.cuh"

namespace di {
namespace {

constexpr int kMostFinishers = 32 + 640;

// Where a thread works: token rows first + g and first + g + 8 below last, columns column .. + 3.
struct Place {
  int first, last, column, g, pair;
  __device__ __forceinline__ int64_t row(int half) const { return first + g + 8 * half; }
};

// What a thread keeps of its two rows.
struct Kept {
  float made[2][kStreams][4] = {};  // new streams, rounded
  float squares[2] = {}, norm[2] = {};
};

// Reads the streams, makes them new, writes them, collapses them.
template <bool kPost>
__device__ __forceinline__ void take_streams(const Site& site, const Place& at, Kept& kept) {
  const int hidden = site.hidden;
  uint2 old[2][kStreams] = {}, result[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = at.row(half);
    if (row >= at.last) continue;
#pragma unroll
    for (int i = 0; i < kStreams; ++i) old[half][i] = load_four(site.streams + (row * kStreams + i) * hidden + at.column);
    if constexpr (kPost) result[half] = load_four(site.y + row * hidden + at.column);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = at.row(half);
    if (row >= at.last) continue;
    const RowMix mix = load_mix<kPost>(site, row);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) widen(kept.made[half][i], old[half][i]);
    const uint2 collapsed = renew<kPost>(mix, kept.made[half], result[half], old[half], kept.squares[half], kept.norm[half]);
    if constexpr (kPost) {
#pragma unroll
      for (int k = 0; k < kStreams; ++k) store_four(site.streams + (row * kStreams + k) * hidden + at.column, old[half][k]);
    }
    store_four(site.out + row * hidden + at.column, collapsed);
  }
}

// A warp's projections and squares, into its part of shared memory.
__device__ __forceinline__ void leave_sums(float (&sums)[kSums][kRows], const float* room, const Place& at, const Kept& kept) {
  float d[2][2][4] = {};
  project(room, kept.made, at.g, d);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int mix = at.g + i / 2 * 8, row = half * 8 + at.pair * 2 + i % 2;
      sums[mix][row] = d[0][half][i];
      if (i < 2) sums[16 + mix][row] = d[1][half][i];
    }
    const float of_streams = sum_of_four_lanes(kept.squares[half]), of_row = sum_of_four_lanes(kept.norm[half]);
    if (at.pair == 0) sums[kSquares][at.g + 8 * half] = of_streams, sums[kNorm][at.g + 8 * half] = of_row;
  }
}

template <bool kPost>
__global__ void __launch_bounds__(kThreads) take_kernel(const Site site) {
  __shared__ float sums[kWarps][kSums][kRows];
  __shared__ __align__(8) uint64_t arrived;
  extern __shared__ __align__(16) float room[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x, hidden = site.hidden;
  start_dependents();
  if (warp == 0) fetch_projection(site, room, &arrived, block * kWidth, lane);  // weights: no kernel before writes them
  wait_for_producer();
  const int last = site.count ? max(0, min(*site.count, site.rows)) : site.rows, first = site.first_row + blockIdx.y * kRows;
  if (first >= last) {
    if (warp == 0) mbarrier_wait(&arrived, 0);  // a block may not end under its copies
    return;
  }
  const Place at = {first, last, block * kWidth + warp * kColumns + lane % 4 * 4, lane / 4, lane % 4};
  const bool busy = block * kWidth + warp * kColumns < hidden;
  Kept kept;
  if (busy) take_streams<kPost>(site, at, kept);
  __syncthreads();  // the barrier of the copies is there
  if (busy) {
    mbarrier_wait(&arrived, 0);
    leave_sums(sums[warp], room + warp * kColumns + at.pair * 4, at, kept);
  }
  __syncthreads();
  const int warps = min(kWarps, (hidden - block * kWidth + kColumns - 1) / kColumns);
  for (int i = threadIdx.x; i < kSums * kRows; i += kThreads) {
    const int mix = i % kSums, row = i / kSums;
    if (first + row >= last) break;
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += sums[w][mix][row];
    const int64_t place = static_cast<int64_t>(first - site.first_row + row) * blocks + block;
    if (mix < kNorm) site.sums[place * (kMixes + 1) + mix] = sum;
    else site.norms[place] = sum;
  }
}

// Norms a row that lies collapsed in the output, eight columns a thread, and makes its codes if asked for.
__device__ __forceinline__ void norm_row(const Site& site, const float* norms, int blocks, int64_t row, int thread, int threads) {
  const int lane = thread % 32, hidden = site.hidden;
  float total = 0.0f;
  for (int block = lane; block < blocks; block += 32) total += norms[block];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  const float factor = rsqrtf(total / static_cast<float>(hidden) + site.rms_eps);
  for (int start = 0; start < hidden; start += 8 * threads) {  // all lanes take every turn, for the shuffles
    const int column = start + 8 * thread;
    const bool inside = column < hidden;
    uint2 normed[2] = {};
    if (inside) {
      const uint4 eight = *reinterpret_cast<const uint4*>(site.out + row * hidden + column);
      float weight[2][4];
      load_weight(weight[0], site, column);
      load_weight(weight[1], site, column + 4);
      normed[0] = norm_four({eight.x, eight.y}, weight[0], factor);
      normed[1] = norm_four({eight.z, eight.w}, weight[1], factor);
      *reinterpret_cast<uint4*>(site.out + row * hidden + column) = {normed[0].x, normed[0].y, normed[1].x, normed[1].y};
    }
    if (site.codes == nullptr) continue;
    uint32_t largest = max(largest_bits(normed[0]), largest_bits(normed[1]));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const uint32_t scale = fp8_scale(__uint_as_float(largest));
    if (!inside) continue;
    const uint2 codes = {encode_four(normed[0], scale), encode_four(normed[1], scale)};
    *reinterpret_cast<uint2*>(site.codes + row * hidden + column) = codes;
    if (lane % 4 == 0) site.scales[(row * hidden + column) / kGroup] = static_cast<uint8_t>(scale);
  }
}

template <bool kNormed>
__global__ void __launch_bounds__(kMostFinishers, 1) finish_kernel(const Site site, int blocks) {
  start_dependents();
  wait_for_producer();
  const int last = site.count ? max(0, min(*site.count, site.rows)) : site.rows, here = blockIdx.x;
  const int64_t row = site.first_row + here;
  if (row >= last) return;
  const int64_t place = static_cast<int64_t>(here) * blocks;
  if (threadIdx.x < 32) finish_row(site, site.sums + place * (kMixes + 1), blocks, row, threadIdx.x);
  else if constexpr (kNormed) norm_row(site, site.norms + place, blocks, row, threadIdx.x - 32, blockDim.x - 32);
}

template <bool kPost, bool kNormed>
int launch(Site site, cudaStream_t stream, void* ws, size_t ws_bytes, di_error* e) {
  if (site.hidden % kGroup != 0)
    return refuse(e, DI_UNSUPPORTED, "the hidden size must be a multiple of 32, it is %d", site.hidden);
  const int blocks = static_cast<int>(ceil_div(site.hidden, kWidth)), bytes = kMixes * kStreams * kPitch * sizeof(float);
  const int64_t room = static_cast<int64_t>(ws_bytes / (blocks * kSums * sizeof(float))) / kRows * kRows;
  if (room == 0 && site.rows > 0) return refuse(e, DI_BAD_CALL, "residual_site needs a workspace, it got %zu bytes", ws_bytes);
  const cudaError_t status = allow_shared<take_kernel<kPost>>(bytes);
  if (status != cudaSuccess) return refuse(e, DI_FAILED, "residual_site: %s", cudaGetErrorString(status));
  const int finishers = 32 + (kNormed ? std::min(static_cast<int>(round_up(site.hidden / 8, 32)), kMostFinishers - 32) : 0);
  for (; site.first_row < site.rows; site.first_row += room) {
    const int rows = static_cast<int>(std::min<int64_t>(room, site.rows - site.first_row));
    site.sums = static_cast<float*>(ws), site.norms = site.sums + static_cast<int64_t>(rows) * blocks * (kMixes + 1);
    const dim3 grid(blocks, static_cast<unsigned>(ceil_div(rows, kRows)));
    launch_early(take_kernel<kPost>, grid, kThreads, bytes, stream, site);
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
