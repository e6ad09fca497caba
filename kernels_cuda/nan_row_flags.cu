// nan_row_flags: a cluster of blocks per row, each with a part of it; a row is read once.
#include "sample_row.cuh"

namespace di {
namespace sampling {
namespace {

// Two blocks run on a multiprocessor: the loads of one cover the end of another.
__global__ void __launch_bounds__(kThreads) flags_kernel(const Rows rows, uint8_t* flags) {
  __shared__ int seen;  // 1: a finite logit, 2: NaN or +inf
  const Cluster cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) seen = 0;
  __syncwarp();
  start_dependents();
  wait_for_producer();
  const int64_t row = blockIdx.x / rows.blocks;
  const Row r = rows.row(row, static_cast<int>(blockIdx.x) % rows.blocks);
  Watch watch;
  cluster_arrive();
  read_row<8>(r, r.warp, [&](int, const float4& x) { watch.see(x); });
  const int mine = (__any_sync(kAll, watch.top > -INFINITY) ? 1 : 0) | (__any_sync(kAll, watch.broken) ? 2 : 0);
  cluster_wait();  // the first block's word is set
  if (r.lane == 0 && mine != 0) atomicOr(cluster.map_shared_rank(&seen, 0), mine);
  __syncwarp();
  cluster_sync();
  if (r.rank == 0 && threadIdx.x == 0) flags[row] = seen == 1 ? 0 : 1;
}

}  // namespace
}  // namespace sampling
}  // namespace di

DI_EXPORT int di_nan_row_flags(const di_tensor* t, int n, const di_params*, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  using namespace di::sampling;
  if (n != 2) return refuse(e, DI_BAD_CALL, "nan_row_flags: 2 tensors make a call, got %d", n);
  const int64_t rows = t[0].shape[0];
  if (rows == 0) return DI_OK;
  if (t[0].stride[1] != 1 && t[0].shape[1] > 1) return refuse(e, DI_UNSUPPORTED, "nan_row_flags: rows must be dense");
  if (rows * kMostBlocks > INT32_MAX)
    return refuse(e, DI_UNSUPPORTED, "nan_row_flags: %lld rows are too many", static_cast<long long>(rows));
  Rows shared = share_rows(data<float>(t[0]), t[0].stride[0], static_cast<int>(t[0].shape[1]), rows, INT32_MAX);
  const int chunks = static_cast<int>(ceil_div(shared.vocabulary, kChunk));
  shared.blocks = chunks >= 16 * kWarps ? kMostBlocks : 1, shared.chunks = static_cast<int>(ceil_div(chunks, shared.blocks));
  const dim3 grid(static_cast<unsigned>(rows * shared.blocks));
  const auto on = static_cast<cudaStream_t>(stream);
  launch_clusters(flags_kernel, grid, kThreads, 0, on, shared.blocks, true, shared, data<uint8_t>(t[1]));
  return finish(e, "nan_row_flags");
}
