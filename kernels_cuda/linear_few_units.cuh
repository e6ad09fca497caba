// How sums leave a block of linear_few.cuh: as they lie in registers, in units of eight rows by a warpgroup's 64 columns. A
// thread has four sums of a unit: rows 2 q and 2 q + 1 (q = lane % 4) of column lane / 4 of its warp's sixteen, then the same of
// the column eight on.
#pragma once

#include "linear_few_stages.cuh"

namespace di::linear {

// The units that a warpgroup of a block adds.
struct FewShare {
  int first, units;

  // Odd warpgroups share them out the other way round, so that a block has about as many as another in all.
  static __device__ __forceinline__ FewShare of(const FewPlan& plan, int slices, int slice, int warpgroup) {
    const int i = warpgroup % 2 == 0 ? slice : slices - 1 - slice;
    return {plan.part[i], plan.part[i + 1] - plan.part[i]};
  }
};

constexpr int kRowsExpanded = 8;  // a named barrier

// The blocks of the cluster can be sent to: they run, and have read the stages, where sums take their place. Warps that expand rows
// have arrived at kRowsExpanded when they were through. rows_full has ordered their stores before all that follows, but racecheck
// does not follow that, and tells of a race between them and the sums.
template <typename C>
__device__ __forceinline__ void wait_for_room() {
  if (C::kInPlace) named_barrier_sync(kRowsExpanded, C::kConsumers + C::kExpanders);
  cluster_wait();
  if (C::kInPlace) cluster_sync();
}

// A thread's sums of its warpgroup's own units, where it alone will read them.
template <typename C>
__device__ __forceinline__ void keep_units(const FewShare& share, float4* own, const float (&sums)[C::T / 2]) {
#pragma unroll
  for (int j = 0; j < C::kUnits; ++j)
    if (j >= share.first && j < share.first + share.units) own[(j - share.first) * 128] = unit_of(sums, j);
}

// Rounds and stores units of a warpgroup, all of whose threads put the same ones, from row `first` of the tile on. BF16 leaves
// from registers, turned within the warp so that a thread has four columns of a row; what else there is, through rows in shared
// memory, which take the place of stages that all have read by then.
template <typename C>
struct UnitStore {
  const Problem& p;
  int thread, group, column, first, valid;  // column: of the warpgroup's first
  float* rows;  // of kHalfPitch; null where units leave from registers
  __nv_bfloat16* to;  // of the first unit, this thread's four columns
  int left;  // rows from this thread's first on that there are, none if its columns lie outside

  __device__ __forceinline__ UnitStore(const FewShared<C>& shared, const Problem& problem, const FewWork& w, int id, int row,
                                       int count)
      : p(problem), thread(id % 128), group(w.at.group), first(row), valid(count) {
    const int warpgroup = id / 128, lane = thread % 32;
    column = w.at.feature_tile * C::kFeatures + warpgroup * 64;
    const int mine = column + thread / 32 * 16 + lane % 2 * 8 + lane % 4 / 2 * 4;
    to = static_cast<__nv_bfloat16*>(p.out) + (first + lane / 4) * p.out_stride + static_cast<int64_t>(group) * p.n + mine;
    left = mine < p.n ? valid - first - lane / 4 : 0;
    rows = p.output == kBf16 && p.out_aligned && p.n % 4 == 0 ? nullptr : shared.results(warpgroup);
  }

  __device__ __forceinline__ void put(int unit, const float4& v) const {
    if (rows == nullptr) {
      const uint32_t near = transpose_pairs(bf16_pair(v.x, v.y)), far = transpose_pairs(bf16_pair(v.z, v.w));
      const bool odd = thread % 2 != 0;  // takes the far columns of its neighbour, and gives the near ones
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? near : far, 1);
      if (unit * 8 < left)
        *reinterpret_cast<uint2*>(to + unit * 8 * p.out_stride) = odd ? make_uint2(other, far) : make_uint2(near, other);
    } else {
      float* at = rows + (unit * 8 + thread % 4 * 2) * kHalfPitch + thread / 32 * 16 + thread % 32 / 4;
      at[0] = v.x, at[kHalfPitch] = v.y, at[8] = v.z, at[kHalfPitch + 8] = v.w;
    }
  }

  // After the last of `units`.
  __device__ __forceinline__ void finish(int units) const {
    if (rows == nullptr) return;
    named_barrier_sync(4 + column % C::kFeatures / 64, 128);
    const int eight = thread % 8 * 8;
#pragma unroll 1
    for (int row = thread / 8; row < units * 8; row += 16) {
      const float4* at = reinterpret_cast<const float4*>(rows + row * kHalfPitch + eight);
      const float4 a = at[0], b = at[1];
      const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      store_unit(p, first + row, group, column + eight, first + row < valid, v);
    }
  }
};

// The only slice. id / 128: which 64 of the block's weight rows.
template <typename C>
__device__ __forceinline__ void store_whole(const FewShared<C>& shared, const Problem& p, const FewWork& w, int id, int valid,
                                            const float (&sums)[C::T / 2]) {
  const UnitStore<C> store(shared, p, w, id, 0, valid);
  if (store.rows != nullptr) named_barrier_sync(3, C::kConsumers);  // all have read the stages
#pragma unroll
  for (int j = 0; j < C::kUnits; ++j) store.put(j, unit_of(sums, j));
  store.finish(C::kUnits);
}

}  // namespace di::linear
