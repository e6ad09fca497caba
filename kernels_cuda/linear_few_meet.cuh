// How the slices of a tile of linear_few.cuh meet. Each has left its sums in its block's shared memory, at `tile()`; a block adds
// those of some rows, in the slices' order, rounds once and stores.
#pragma once

#include "linear_few_stages.cuh"

namespace di::linear {

constexpr int kMostNearSlices = 4;

// Rows first .. stop, eight columns of kAtOnce rows a thread: part(to, slice, row, column) reads a row's sums.
template <typename C, int kMost, int kAtOnce, typename Part>
__device__ __forceinline__ void add_slices(const Problem& p, const FewWork& w, int id, int slices, int first, int stop, int valid,
                                           const Part& part) {
  constexpr int kLanes = C::kFeatures / 8, kRows = C::kConsumers / kLanes;
  const int column = id % kLanes * 8;
#pragma unroll 1
  for (int base = first; base < stop; base += kRows * kAtOnce) {
    float4 parts[kAtOnce][kMost][2];  // all on their way before the first is used
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int row = base + id / kLanes + r * kRows;
#pragma unroll
      for (int slice = 0; slice < kMost; ++slice)
        if (slice < slices && row < stop) part(parts[r][slice], slice, row, column);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int row = base + id / kLanes + r * kRows;
      float v[8] = {};
#pragma unroll
      for (int slice = 0; slice < kMost; ++slice)
        if (slice < slices && row < stop) {
          const float4 a = parts[r][slice][0], b = parts[r][slice][1];
          const float more[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] = slice == 0 ? more[i] : v[i] + more[i];
        }
      store_unit(p, row, w.at.group, w.at.feature_tile * C::kFeatures + column, row < stop && row < valid, v);
    }
  }
}

// The only slice.
template <typename C>
__device__ __forceinline__ void store_whole(const FewShared<C>& shared, const Problem& p, const FewWork& w, int id, int valid) {
  add_slices<C, 1, 1>(p, w, id, 1, 0, C::T, valid, [&](float4 (&to)[2], int, int row, int column) {
    const float4* at = reinterpret_cast<const float4*>(shared.tile() + row * C::kPitch + column);
    to[0] = at[0], to[1] = at[1];
  });
}

// Blocks of a cluster: each sends each of the others its rows of the tile, and adds its own from where they are.
template <typename C>
__device__ __forceinline__ void store_joined(const FewShared<C>& shared, const Problem& p, const FewPlan& plan, const FewWork& w,
                                             int id, int valid) {
  const int first = plan.row[w.slice], stop = plan.row[w.slice + 1];
  static_assert(C::kConsumers / 32 >= kMostSlices);
  if (const int to = id / 32; id % 32 == 0 && to < p.slices && to != w.slice) {  // a warp each: copies of one warp go out in turn
    const int row = plan.row[to], rows = plan.row[to + 1] - row;
    bulk_copy_cluster(shared.received() + w.slice * rows * C::kPitch, shared.tile() + row * C::kPitch, rows * C::kPitch * 4,
                      shared.sums_full(), to);
  }
  mbarrier_wait_cluster(shared.sums_full(), 0);
  add_slices<C, kMostSlices, 1>(p, w, id, p.slices, first, stop, valid, [&](float4 (&to)[2], int slice, int row, int column) {
    const float* tile = shared.tile() + row * C::kPitch;
    const float* from = slice == w.slice ? tile : shared.received() + (slice * (stop - first) + row - first) * C::kPitch;
    const float4* at = reinterpret_cast<const float4*>(from + column);
    to[0] = at[0], to[1] = at[1];
  });
}

// Words that two blocks agree by: what any thread of the block stored before it met the one that tells is seen by all who meet the
// one that heard.
__device__ __forceinline__ void tell(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t heard(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// Blocks that are no cluster, through global memory. The blocks of a tile wait for each other: they follow one another, and
// GPUs begin blocks in order, so a call has at most one tile of which some blocks run and others do not yet; and all blocks of
// the kernel fit the device. A flag is the call's nonce once the rows are there; the block that waited for it takes it away, so
// that a replay of the call begins without. Whatever else was in the workspace is no call's nonce.
template <typename C>
__device__ __forceinline__ void store_near(const FewShared<C>& shared, const Problem& p, const FewPlan& plan, const FewWork& w,
                                           int id, int valid) {
  constexpr int kLanes = C::kFeatures / 4;
  const int slices = p.slices, first = plan.row[w.slice], stop = plan.row[w.slice + 1];
  float* partial = p.partial + static_cast<int64_t>(w.tile) * slices * (C::T * C::kFeatures);
#pragma unroll 4
  for (int row = id / kLanes; row < C::T; row += C::kConsumers / kLanes) {
    const int column = id % kLanes * 4;
    if (row < first || row >= stop)
      __stcg(reinterpret_cast<float4*>(partial + (w.slice * C::T + row) * C::kFeatures + column),
             *reinterpret_cast<const float4*>(shared.tile() + row * C::kPitch + column));
  }
  named_barrier_sync(3, C::kConsumers);
  if (id < 32) {
    uint64_t* flags = plan.flags + static_cast<int64_t>(w.tile) * slices * slices;
    const bool other = id < slices && id != w.slice;
    if (other) tell(flags + id * slices + w.slice, plan.nonce);
    __syncwarp();
    uint64_t* flag = flags + w.slice * slices + id;
    while (!__all_sync(0xFFFFFFFFu, !other || heard(flag) == plan.nonce)) {
    }
    if (other) *flag = 0;
    __syncwarp();
  }
  named_barrier_sync(3, C::kConsumers);
  const auto part = [&](float4 (&to)[2], int slice, int row, int column) {
    const float4* own = reinterpret_cast<const float4*>(shared.tile() + row * C::kPitch + column);
    const float4* from = reinterpret_cast<const float4*>(partial + (slice * C::T + row) * C::kFeatures + column);
    if (slice == w.slice) to[0] = own[0], to[1] = own[1];
    else to[0] = __ldcg(from), to[1] = __ldcg(from + 1);
  };
  add_slices<C, kMostNearSlices, C::T == 64 ? 2 : 1>(p, w, id, slices, first, stop, valid, part);
}

}  // namespace di::linear
