// residual_site and hyper_connection_pre for BF16 streams of four, in two launches.
//
// take_kernel: a warp has 16 columns of the four streams of 16 token rows in registers, from reading to the sums:
//   1. the streams get the previous sub-layer's result (residual_site) and are stored, rounded;
//   2. the collapsed row is made from them, rounded, and left in the output;
//   3. the 24 projections are products with mma.sync of BF16 operands. The float32 projection is read before the kernel waits
//      for the one before it, and cut into three parts while rows are on their way. The columns of both operands are permuted
//      alike, so that a thread's fragments are the very values that it read;
//   4. the block adds its warps' sums into the workspace.
// finish_kernel: a warp turns a row's sums into coefficients (Sinkhorn's sixteen numbers in the registers of each thread) while a
// block norms and quantises the row.
//
// Registers are such that both kernels fit a multiprocessor at once, so that each is there when the other ends. More rows than
// the multiprocessors take at once have kernels of their own, with the same bits (residual_site_many.cuh, finish_many_kernel).
//
// How columns are dealt to warps and blocks depends on nothing, and so does the order of every sum.
#include <algorithm>

#include "residual_site_finish.cuh"
#include "residual_site_many.cuh"
#include "residual_site_rows.cuh"

namespace di {
namespace {

constexpr int kTakerRegisters = 136;

template <bool kPost>
__global__ void __maxnreg__(kTakerRegisters) take_kernel(const Site site) {
  __shared__ __align__(16) float sums[kWarps][kSums][kPitch];
  extern __shared__ __align__(16) uint8_t room[];
  constexpr int kTurns = (kSums * kRows + kThreads - 1) / kThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x, hidden = site.hidden;
  const int column = block * kWidth + warp * kColumns + lane % 4 * 4, first = site.first_row + blockIdx.y * kRows;
  const int warps = min(kWarps, (hidden - block * kWidth + kColumns - 1) / kColumns);
  start_dependents();
  float4 fn[kStreams][3] = {};
  if (warp < warps) load_projection(fn, site, lane / 4, column);  // weights: no kernel before writes them
  const Place at(site, first + lane / 4, column, lane);
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
  const Projection projection(room, threadIdx.x);
  wait_for_producer_with(at.streams, at.out, at.y, at.pre, at.post, at.comb, at.row, to[0], to[1], from[0], from[1], count, rows,
                         first, projection.whole);
  const int last = valid_rows(count, rows);
  if (first >= last) return;
  if (warp < warps) {
    Kept kept;
    Read low, high;
    uint2* const ahead = reinterpret_cast<uint2*>(sums[warp]) + lane;  // the sums come later
    read_first<kPost>(low, at, last, hidden);
    ask_second<kPost>(ahead, at, last, hidden);
    keep_loads_ahead(last);  // the projection may still be on its way, and so are the rows while it is cut
    put_projection(projection, fn);
    read_mix<kPost>(high, at, 1, last);
    take_row<kPost>(low, at, 0, last, hidden, kept);
    read_second<kPost>(high, ahead);
    take_row<kPost>(high, at, 1, last, hidden, kept);
    float d[2][2][4] = {};
    project([&](int stream, int i) { return projection.operand(stream, i); }, kept.made, d);
    __syncwarp();  // what was on its way has been read
    leave_sums(sums[warp], d, at, kept);
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
}

// Enqueues what makes the rows of this launch: first_row to end_row, sums and norms in the workspace.
template <bool kPost, bool kNormed>
void launch_rows(const Site& site, int blocks, cudaStream_t stream) {
  const int rows = site.end_row - site.first_row;
  const int finishers = std::min(static_cast<int>(round_up(site.hidden / kEach, 32)), kFinishers);
  const int parts = static_cast<int>(ceil_div(site.hidden, kEach * finishers));
  const int64_t tiles = ceil_div(rows, kRows), most_tiles = std::max(1, multiprocessors() / blocks);  // at a time
  const auto grid_of = [&](int64_t mixing, int64_t norming) {
    return dim3(static_cast<unsigned>(mixing + (kNormed ? norming * parts : 0)));
  };
  Maps maps;
  if (tiles > most_tiles && make_maps(&maps, site)) {
    const dim3 grid(blocks, static_cast<unsigned>(most_tiles));
    launch_early(take_many_kernel<kPost>, grid, kManyThreads, sizeof(ManyRoom), stream, site, maps);
    const dim3 finishing = grid_of(ceil_div(rows, 32), ceil_div(rows, kNormedTogether));
    launch_early(finish_many_kernel<kNormed>, finishing, finishers, 0, stream, site, blocks, rows, parts);
  } else {
    launch_early(take_kernel<kPost>, dim3(blocks, static_cast<unsigned>(tiles)), kThreads, kRoom, stream, site);
    const int each = 2 * rows <= multiprocessors() ? 1 : finishers / 32;
    const dim3 finishing = grid_of(ceil_div(rows, each), rows);
    launch_early(finish_kernel<kNormed>, finishing, finishers, 0, stream, site, blocks, rows, each, parts);
  }
}

template <bool kPost, bool kNormed>
int launch(Site site, cudaStream_t stream, void* ws, size_t ws_bytes, di_error* e) {
  if (site.hidden == 0 || site.hidden % kGroup != 0)
    return refuse(e, DI_UNSUPPORTED, "the hidden size must be a positive multiple of 32, it is %d", site.hidden);
  const int blocks = static_cast<int>(ceil_div(site.hidden, kWidth));
  const auto fit = static_cast<int64_t>(ws_bytes / (blocks * kSums * sizeof(float))) / kRows;  // tiles, of which a grid has a row each
  const int64_t room = std::min<int64_t>(fit, kMostGridRows) * kRows;
  if (room == 0 && site.rows > 0) return refuse(e, DI_BAD_CALL, "residual_site needs a workspace, it got %zu bytes", ws_bytes);
  const cudaError_t few = allow_shared<take_kernel<kPost>>(kRoom), many = allow_shared<take_many_kernel<kPost>>(sizeof(ManyRoom));
  const cudaError_t status = std::max(few, many);
  if (status != cudaSuccess) return refuse(e, DI_FAILED, "residual_site: %s", cudaGetErrorString(status));
  for (; site.first_row < site.rows; site.first_row = site.end_row) {
    site.end_row = static_cast<int>(std::min<int64_t>(site.first_row + room, site.rows));
    site.sums = static_cast<float*>(ws);
    site.norms = site.sums + static_cast<int64_t>(site.end_row - site.first_row) * blocks * (kMixes + 1);
    launch_rows<kPost, kNormed>(site, blocks, stream);
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
