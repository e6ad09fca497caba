// How the slices of a tile of linear_few.cuh meet in a cluster: each block sends each of the others the units that it adds, and
// adds its own, in the slices' order, rounds once and stores.
#pragma once

#include "linear_few_units.cuh"

namespace di::linear {

// Where block `to` gets the units of slice `from` of a warpgroup.
template <typename C>
__device__ __forceinline__ float4* received_units(const FewShared<C>& shared, const FewPlan& plan, int slices, int warpgroup,
                                                  int from, int to) {
  const int before = warpgroup == 0 ? 0 : (slices - 1) * FewShare::of(plan, slices, to, 0).units;
  const int place = from < to ? from : from - 1;
  return shared.received() + (before + place * FewShare::of(plan, slices, to, warpgroup).units) * 128;
}

// Sends the units that others add, from registers.
template <typename C>
__device__ __forceinline__ void send_units(const FewShared<C>& shared, const FewPlan& plan, const FewWork& w, int slices,
                                           int warpgroup, int thread, const float (&sums)[C::T / 2]) {
#pragma unroll
  for (int j = 0; j < C::kUnits; ++j) {
    const int part = ((j + 1) * slices - 1) / C::kUnits;  // plan.part[part] <= j < plan.part[part + 1]
    const int to = warpgroup % 2 == 0 ? part : slices - 1 - part;
    if (to == w.slice) continue;
    float4* at = received_units<C>(shared, plan, slices, warpgroup, w.slice, to) + (j - plan.part[part]) * 128 + thread;
    store_cluster16(at, unit_of(sums, j), shared.sums_full(warpgroup), to);
  }
}

// Adds this thread's sums of the warpgroup's units. own, others: of the first of them. kAtOnce units are on their way together.
template <int kMost, int kAtOnce, typename Store>
__device__ __forceinline__ void add_units(const Store& store, int units, int slices, int slice, const float4* own,
                                          const float4* others) {
#pragma unroll 1
  for (int base = 0; base < units; base += kAtOnce) {
    float4 parts[kAtOnce][kMost];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
      for (int i = 0; i < kMost; ++i)
        if (i < slices && base + u < units)
          parts[u][i] = (i == slice ? own : others + (i > slice ? i - 1 : i) * (units * 128))[(base + u) * 128];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
      for (int i = 1; i < kMost; ++i)
        if (i < slices) add_to(parts[u][0], parts[u][i]);
      if (base + u < units) store.put(base + u, parts[u][0]);
    }
  }
}

// A warpgroup by itself.
template <typename C>
__device__ __forceinline__ void meet_joined(const FewShared<C>& shared, const Problem& p, const FewPlan& plan,
                                            const FewWork& w, int id, int valid, const float (&sums)[C::T / 2]) {
  const int slices = p.slices, thread = id % 128, warpgroup = id / 128;
  const FewShare share = FewShare::of(plan, slices, w.slice, warpgroup);
  wait_for_room<C>();
  send_units<C>(shared, plan, w, slices, warpgroup, thread, sums);
  named_barrier_sync(3, C::kConsumers);  // all have read the stages
  float4* own = shared.own_units(warpgroup) + thread;
  keep_units<C>(share, own, sums);
  const UnitStore<C> store(shared, p, w, id, share.first * 8, valid);
  const float4* others = received_units<C>(shared, plan, slices, warpgroup, w.slice == 0 ? 1 : 0, w.slice) + thread;
  mbarrier_wait_cluster(shared.sums_full(warpgroup), 0);
  if (slices == 2) add_units<2, C::kMostUnits>(store, share.units, slices, w.slice, own, others);
  else add_units<kMostSlices, 1>(store, share.units, slices, w.slice, own, others);
  store.finish(share.units);
}

}  // namespace di::linear
