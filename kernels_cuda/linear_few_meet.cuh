// How the slices of a tile of linear_few.cuh meet: a block adds the sums of some rows, in the slices' order, rounds once and
// stores.
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

// ---- blocks of a cluster: sums stay as they lie in registers until they are added, in units of eight rows by a warpgroup's 64
// columns, four sums a thread

// The units that a warpgroup of a block adds.
struct FewShare {
  int first, units;

  // Odd warpgroups share them out the other way round, so that a block has about as many as another in all.
  static __device__ __forceinline__ FewShare of(const FewPlan& plan, int slices, int slice, int warpgroup) {
    const int i = warpgroup % 2 == 0 ? slice : slices - 1 - slice;
    return {plan.part[i], plan.part[i + 1] - plan.part[i]};
  }
};

// Where block `to` gets the units of slice `from` of a warpgroup.
template <typename C>
__device__ __forceinline__ float4* received_units(const FewShared<C>& shared, const FewPlan& plan, int slices, int warpgroup,
                                                  int from, int to) {
  const int before = warpgroup == 0 ? 0 : (slices - 1) * FewShare::of(plan, slices, to, 0).units;
  const int place = from < to ? from : from - 1;
  return shared.received() + (before + place * FewShare::of(plan, slices, to, warpgroup).units) * 128;
}

// `staged`: all units of this warpgroup.
template <typename C>
__device__ __forceinline__ void send_units(const FewShared<C>& shared, const FewPlan& plan, const FewWork& w, int slices,
                                           int warpgroup, int warp, const float4* staged) {
#pragma unroll 1
  for (int to = warp; to < slices; to += 4) {
    const FewShare share = FewShare::of(plan, slices, to, warpgroup);
    if (to != w.slice && share.units > 0)
      bulk_copy_cluster(received_units<C>(shared, plan, slices, warpgroup, w.slice, to), staged + share.first * 128,
                        share.units * kUnitBytes, shared.sums_full(warpgroup), to);
  }
}

// Adds this thread's sums of the warpgroup's own units into `tile`, rows of kHalfPitch. own, others: of the first of them.
__device__ __forceinline__ void add_units(float* tile, int thread, int units, int slices, int slice, const float4* own,
                                          const float4* others) {
  float* to = tile + thread % 4 * 2 * kHalfPitch + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit, to += 8 * kHalfPitch) {
    float4 parts[kMostSlices];  // all on their way before the first is used
#pragma unroll
    for (int i = 0; i < kMostSlices; ++i)
      if (i < slices) parts[i] = (i == slice ? own : others + (i > slice ? i - 1 : i) * (units * 128))[unit * 128];
    float4 v = parts[0];
#pragma unroll
    for (int i = 1; i < kMostSlices; ++i)
      if (i < slices) v.x += parts[i].x, v.y += parts[i].y, v.z += parts[i].z, v.w += parts[i].w;
    to[0] = v.x, to[kHalfPitch] = v.y, to[8] = v.z, to[kHalfPitch + 8] = v.w;
  }
}

// Rows of such a tile, from `first` of the call on: eight columns a thread.
__device__ __forceinline__ void store_units(const Problem& p, const float* tile, int thread, int rows, int first, int valid,
                                            int group, int n) {
  const int column = thread % 8 * 8;
#pragma unroll 1
  for (int row = thread / 8; row < rows; row += 16) {
    const float4* at = reinterpret_cast<const float4*>(tile + row * kHalfPitch + column);
    const float4 a = at[0], b = at[1];
    const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    store_unit(p, first + row, group, n + column, first + row < valid, v);
  }
}

// Each block sends each of the others its units, and adds its own from where they are; a warpgroup by itself.
template <typename C>
__device__ __forceinline__ void meet_joined(const FewShared<C>& shared, const Problem& p, const FewPlan& plan,
                                            const FewWork& w, int id, int valid, const float (&sums)[C::T / 2]) {
  const int slices = p.slices, thread = id % 128, warpgroup = id / 128;
  const FewShare share = FewShare::of(plan, slices, w.slice, warpgroup);
  float4* staged = reinterpret_cast<float4*>(shared.base) + warpgroup * (C::kUnits * 128);
  named_barrier_sync(3, C::kConsumers);  // all have read the stages, which the sums now replace
#pragma unroll
  for (int j = 0; j < C::kUnits; ++j)
    staged[j * 128 + thread] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
  fence_proxy_async();
  named_barrier_sync(4 + warpgroup, 128);
  cluster_wait();  // the others can be sent to
  // a warp for each of the others: copies of one warp go out in turn
  if (thread % 32 == 0) send_units<C>(shared, plan, w, slices, warpgroup, thread / 32, staged);
  __syncwarp();
  const float4* others = received_units<C>(shared, plan, slices, warpgroup, w.slice == 0 ? 1 : 0, w.slice);
  float* tile = shared.result(warpgroup);
  mbarrier_wait_cluster(shared.sums_full(warpgroup), 0);
  add_units(tile, thread, share.units, slices, w.slice, staged + share.first * 128 + thread, others + thread);
  named_barrier_sync(4 + warpgroup, 128);
  const int column = w.at.feature_tile * C::kFeatures + warpgroup * 64;
  store_units(p, tile, thread, share.units * 8, share.first * 8, valid, w.at.group, column);
}

// ---- blocks that are no cluster

// Words that two blocks agree by: what a thread of the block stored before it met the one that tells is seen by all who meet the
// one that heard.
__device__ __forceinline__ void tell(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t heard(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// Sums that lie in `tile()`, through global memory. The blocks of a tile wait for each other: they follow one another, and
// GPUs begin blocks in order, so a call has at most one tile of which some blocks run and others do not yet; and all blocks of
// the kernel fit the device. A flag is the call's nonce once the rows are there; the block that waited for it takes it away, so
// that a replay of the call begins without. Whatever else was in the workspace is no call's nonce.
template <typename C>
__device__ __forceinline__ void store_near(const FewShared<C>& shared, const Problem& p, const FewPlan& plan, const FewWork& w,
                                           int id, int valid) {
  constexpr int kLanes = C::kFeatures / 4;
  const int slices = p.slices, first = plan.part[w.slice], stop = plan.part[w.slice + 1];
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
