// How the slices of a tile of 64 rows and more of linear_few.cuh meet where its blocks are no cluster: each leaves rows of its sums
// in the workspace, behind a flag. Word by word, as fewer rows do it (linear_few_mail.cuh), they took longer.
#pragma once

#include "linear_few_mail.cuh"

namespace di::linear {

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

// Sums that lie in `tile()`. Flags, and why blocks may wait for each other, as in linear_few_mail.cuh; here a flag says that the
// rows are there, and the block that adds them takes it away.
template <typename C>
__device__ __forceinline__ void store_near(const FewShared<C>& shared, const Problem& p, const FewPlan& plan, const FewWork& w,
                                           int id, int valid) {
  constexpr int kLanes = C::kFeatures / 4;
  const int slices = p.slices, first = plan.part[w.slice] * 8, stop = plan.part[w.slice + 1] * 8;
  float* partial = p.partial + static_cast<int64_t>(w.tile) * slices * (C::T * C::kFeatures);
#pragma unroll 4
  for (int row = id / kLanes; row < C::T; row += C::kConsumers / kLanes) {
    const int column = id % kLanes * 4;
    if (row < first || row >= stop)
      __stcg(reinterpret_cast<float4*>(partial + (w.slice * C::T + row) * C::kFeatures + column),
             *reinterpret_cast<const float4*>(shared.tile() + row * C::kPitch + column));
  }
  named_barrier_sync(3, C::kConsumers);
  if (id < 32) trade_flags(plan, w, slices, id);
  named_barrier_sync(3, C::kConsumers);
  const auto part = [&](float4 (&to)[2], int slice, int row, int column) {
    const float4* own = reinterpret_cast<const float4*>(shared.tile() + row * C::kPitch + column);
    const float4* from = reinterpret_cast<const float4*>(partial + (slice * C::T + row) * C::kFeatures + column);
    if (slice == w.slice) to[0] = own[0], to[1] = own[1];
    else to[0] = __ldcg(from), to[1] = __ldcg(from + 1);
  };
  add_slices<C, kMostNearSlices, 2>(p, w, id, slices, first, stop, valid, part);
}

}  // namespace di::linear
