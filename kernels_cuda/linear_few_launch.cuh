// Host side of linear_few.cuh: which of its kernels serves a call.
#pragma once

#include <atomic>

#include "linear_few.cuh"

namespace di::linear {

// Bytes of the workspace that sums of slices take, and the flags after them.
inline int64_t few_sums_bytes(const Problem& p, int tile_rows) {
  return round_up(static_cast<int64_t>(p.groups) * p.feature_tiles() * p.slices * tile_rows * kTilePitch * 4, 256);
}
inline int64_t few_bytes(const Problem& p, int tile_rows) {
  return few_sums_bytes(p, tile_rows) + static_cast<int64_t>(p.groups) * p.feature_tiles() * p.slices * p.slices * 8;
}

// A number that no other call of the process has, and that memory is not likely to hold.
inline uint64_t next_nonce() {
  static std::atomic<uint64_t> calls{0x5DEECE66Dull};
  return (calls.fetch_add(1) + 1) * 0x9E3779B97F4A7C15ull;
}

template <typename C>
int launch_few(Problem p, const CUtensorMap& map, const CUtensorMap& row_map, cudaStream_t stream, di_error* e) {
  p.row_tiles = 1, p.partial = reinterpret_cast<float*>(p.expanded);
  const auto tiles = static_cast<unsigned>(ceil_div(p.n, C::kFeatures));
  dim3 grid(static_cast<unsigned>(p.slices), tiles, static_cast<unsigned>(p.groups));
  if (C::kSlices == kPaired) grid = dim3(2, tiles / 2 * 3);
  FewPlan plan = {};
  plan.flags = reinterpret_cast<uint64_t*>(p.expanded + few_sums_bytes(p, C::T)), plan.nonce = next_nonce();
  for (int i = 0; i <= p.slices; ++i)
    plan.step[i] = static_cast<uint16_t>(p.slice_start(i)), plan.part[i] = static_cast<uint16_t>(C::kUnits * i / p.slices);
  if (allow_shared<few_kernel<C>>(C::kShared) != cudaSuccess) return finish(e, "linear: shared memory");
  const int cluster = C::kSlices == kJoined ? p.slices : C::kSlices == kPaired ? 2 : 1;
  launch_clusters(few_kernel<C>, grid, C::kThreads, C::kShared, stream, cluster, true, map, row_map, p, plan);
  if constexpr (C::kSlices == kApart)
    launch_early(combine_slices<C::T>, dim3(grid.y * grid.z * (C::T / kCombineRows)), kCombineThreads, 0, stream, p);
  return finish(e, "linear");
}

// Whether more than 128 rows go faster by two passes than expanded beforehand. That saves the expansion and, of more than two
// slices, the kernel that adds them. Up to 192 rows a step takes hardly longer for it. One of 256 rows takes 1.7 us for 1.3, as
// shared memory is busier than the matrix unit: so a block's steps must be few, or those that are expanded (of all groups and
// slices) many for each of them.
inline bool passes_pay(const Problem& p) {
  if (p.slices == 1 || p.rows <= 192) return p.slices > 1;
  return (p.slices > 2 && ceil_div(p.chunks(), p.slices) <= 6) || p.groups * p.slices >= 16;
}

// Up to T rows. False where these kernels do not serve them, or not faster than others do.
template <int T>
bool choose_few(const Problem& p, const CUtensorMap& map, int64_t room, cudaStream_t stream, di_error* e, int* status) {
  const bool one_group = p.groups == 1 || p.k % kChunk == 0;  // a step of rows has the columns of one group
  const int64_t tiles = static_cast<int64_t>(p.groups) * p.feature_tiles();
  const bool fits = ceil_div(p.chunks(), p.slices) <= kMostRawSteps && p.feature_tiles() <= kMostGridRows && p.groups <= kMostGridRows;
  if (!p.x_aligned || !one_group || !fits || (T > 128 && !passes_pay(p))) return false;
  const int64_t columns = static_cast<int64_t>(p.groups) * p.k;
  CUtensorMap row_map;
  const auto bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (!matrix_map(&row_map, bytes, p.x, p.rows, columns, p.x_stride, T > 128 ? T / 2 : T, kChunk, CU_TENSOR_MAP_SWIZZLE_128B))
    return false;
  if constexpr (T <= 128) {
    using Whole = FewConfig<T, T == 128 ? 2 : 4, kOne, T == 128 ? 2 : 1>;  // four warpgroups have no registers for 128 rows
    if (p.slices == 1) return *status = launch_few<Whole>(p, map, row_map, stream, e), true;
  }
  using Joined = FewConfig<T, 2, kJoined>;
  if (tiles <= resident_clusters<few_kernel<Joined>>(p.slices, Joined::kThreads, Joined::kShared))
    return *status = launch_few<Joined>(p, map, row_map, stream, e), true;
  if (few_bytes(p, T) > room) return false;
  using Paired = FewConfig<T, 2, kPaired>;
  if (p.slices == 3 && p.groups == 1 && tiles % 2 == 0 &&
      tiles / 2 * 3 <= resident_clusters<few_kernel<Paired>>(2, Paired::kThreads, Paired::kShared))
    return *status = launch_few<Paired>(p, map, row_map, stream, e), true;
  if constexpr (T <= 192) {  // rows of 256 took as long as before
    if (p.slices <= kMostNearSlices && tiles * p.slices <= multiprocessors())
      return *status = launch_few<FewConfig<T, 2, kNear>>(p, map, row_map, stream, e), true;
  }
  if constexpr (T <= 128) return *status = launch_few<FewConfig<T, 2, kApart>>(p, map, row_map, stream, e), true;
  return false;
}

}  // namespace di::linear
