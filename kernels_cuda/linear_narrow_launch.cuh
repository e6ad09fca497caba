// Host side of linear_narrow.cuh: which of its tiles serves a call.
#pragma once

#include <initializer_list>

#include "linear_narrow.cuh"

namespace di::linear {

constexpr int kNarrowRound = 64;  // what a round of blocks costs besides, in rows
constexpr int kMostNarrow = 300;  // beyond this cost, tiles that are read fewer times are faster

template <typename C>
dim3 narrow_grid(const Problem& p) {
  return dim3(p.slices, static_cast<unsigned>(ceil_div(p.n, C::F)), static_cast<unsigned>(ceil_div(p.rows, C::T)));
}

// Activation and weight rows that a multiprocessor reads, a round of blocks after another.
template <typename C>
int64_t narrow_cost(const Problem& p) {
  const dim3 grid = narrow_grid<C>(p);
  const int resident = resident_clusters<narrow_kernel<C>>(p.slices, C::kThreads, C::kShared);
  return resident == 0 ? INT64_MAX : ceil_div(static_cast<int64_t>(grid.y) * grid.z, resident) * (C::T + C::F + kNarrowRound);
}

template <typename C>
int launch_narrow(const Problem& p, const void* x, int64_t x_stride, const void* w, cudaStream_t stream, di_error* e) {
  const auto type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap weight_map, row_map;
  if (!matrix_map(&weight_map, type, w, p.n, p.k, static_cast<int64_t>(p.k) * 2, C::F, kDenseChunk, swizzle) ||
      !matrix_map(&row_map, type, x, p.rows, p.k, x_stride * 2, dense_rows<C>(p), kDenseChunk, swizzle))
    return refuse(e, DI_FAILED, "linear: the driver refuses a map of x [%d, %d] or of the weight [%d, %d]", p.rows, p.k,
                  p.n, p.k);
  NarrowPlan plan = {};
  for (int i = 0; i <= p.slices; ++i) plan.step[i] = static_cast<uint16_t>(p.slice_start(i));
  if (allow_shared<narrow_kernel<C>>(C::kShared) != cudaSuccess) return finish(e, "linear: shared memory");
  launch_clusters(narrow_kernel<C>, narrow_grid<C>(p), C::kThreads, C::kShared, stream, p.slices, true, weight_map, row_map, p, plan);
  return finish(e, "linear");
}

struct NarrowTile {
  int64_t cost;
  int (*launch)(const Problem&, const void* x, int64_t x_stride, const void* w, cudaStream_t, di_error*);
};
template <int F>
NarrowTile narrow_tile(const Problem& p) {
  return {narrow_cost<NarrowConfig<F>>(p), launch_narrow<NarrowConfig<F>>};
}

// A BF16 product of few features; false where this kernel does not serve it.
inline bool choose_narrow(const Problem& p, const void* x, int64_t x_stride, const void* w, cudaStream_t stream, di_error* e,
                          int* status) {
  if (p.slices == 1 || p.groups > 1 || p.chunks() > UINT16_MAX) return false;
  NarrowTile best = {kMostNarrow + 1, nullptr};
  for (const NarrowTile& tile : {narrow_tile<16>(p), narrow_tile<64>(p), narrow_tile<128>(p)})
    if (tile.cost < best.cost) best = tile;
  if (best.launch == nullptr) return false;
  *status = best.launch(p, x, x_stride, w, stream, e);
  return true;
}

}  // namespace di::linear
