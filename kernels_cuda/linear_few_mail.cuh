// How the slices of a tile of linear_few.cuh meet where its blocks are no cluster: each posts units of its sums to the workspace,
// where the block that adds them looks for every word by itself. So a sum crosses memory once, and nothing is fenced behind it.
//
// A place that waits for mail holds kNoMail, a NaN that no product has: whatever the GPU computes is NaN as 0x7FFFFFFF. The block
// that will read a place empties it while it multiplies, then tells the block that will post there. The blocks of a tile wait for
// each other: they follow one another, and GPUs begin blocks in order, so a call has at most one tile of which some blocks run
// and others do not yet; and all blocks of the kernel fit the device. A flag is the call's nonce once the places are empty; the
// block that waited for it takes it away, so that a replay of the call begins without. Whatever else was in the workspace is no
// call's nonce.
#pragma once

#include "linear_few_units.cuh"

namespace di::linear {

constexpr int kMostNearSlices = 4;
constexpr uint32_t kNoMail = 0xFFFFFFFFu;

// A flag: what a warp stored before it met and one lane told is seen by those who heard.
__device__ __forceinline__ void tell(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t heard(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// One warp tells the blocks of a tile's other slices, waits until they have told, and takes their flags away.
__device__ __forceinline__ void trade_flags(const FewPlan& plan, const FewWork& w, int slices, int lane) {
  uint64_t* flags = plan.flags + static_cast<int64_t>(w.tile) * slices * slices;  // [slice that posts][slice that reads]
  const bool other = lane < slices && lane != w.slice;
  if (other) tell(flags + lane * slices + w.slice, plan.nonce);
  __syncwarp();
  uint64_t* flag = flags + w.slice * slices + lane;
  while (!__all_sync(0xFFFFFFFFu, !other || heard(flag) == plan.nonce)) {
  }
  if (other) *flag = 0;
  __syncwarp();
}

// Words that are seen by themselves.
__device__ __forceinline__ void post(float4* to, const float4& v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
__device__ __forceinline__ float4 look(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
// kNoMail where a word of `v` has not come.
__device__ __forceinline__ uint32_t largest_word(const float4& v) {
  return max(max(__float_as_uint(v.x), __float_as_uint(v.y)), max(__float_as_uint(v.z), __float_as_uint(v.w)));
}

// Where a warpgroup of slice `from` posts its units, 128 threads each.
template <typename C>
__device__ __forceinline__ float4* posted_units(const Problem& p, const FewWork& w, int from, int warpgroup) {
  return reinterpret_cast<float4*>(p.partial) +
         static_cast<int64_t>((w.tile * p.slices + from) * C::G + warpgroup) * (C::kUnits * 128);
}

// One warp, while others multiply: empties what this block will read, tells the others so, and waits until it may post to them.
template <typename C>
__device__ __forceinline__ void open_mail(const FewShared<C>& shared, const FewWork& w) {
  const Problem& p = shared.call().problem;
  const FewPlan& plan = shared.call().plan;
  const int lane = threadIdx.x % 32, slices = p.slices;
  const float none = __uint_as_float(kNoMail);
  wait_for_predecessor();
#pragma unroll 1
  for (int i = 0; i < slices * C::G; ++i) {
    const int from = i / C::G, warpgroup = i % C::G;
    const FewShare share = FewShare::of(plan, slices, w.slice, warpgroup);
    float4* at = posted_units<C>(p, w, from, warpgroup) + share.first * 128 + lane;
    if (from == w.slice) continue;
#pragma unroll 4
    for (int j = 0; j < share.units * 4; ++j) post(at + j * 32, make_float4(none, none, none, none));
  }
  __syncwarp();
  trade_flags(plan, w, slices, lane);
  if (lane == 0) mbarrier_arrive(shared.may_post());
}

// A warpgroup posts the units that others add. to: of the first of all.
template <typename C>
__device__ __forceinline__ void post_units(const FewShare& share, float4* to, const float (&sums)[C::T / 2]) {
#pragma unroll
  for (int j = 0; j < C::kUnits; ++j)
    if (j < share.first || j >= share.first + share.units) post(to + j * 128, unit_of(sums, j));
}

template <typename C>
__device__ __forceinline__ void meet_near(const FewShared<C>& shared, const Problem& p, const FewPlan& plan, const FewWork& w,
                                          int id, int valid, const float (&sums)[C::T / 2]) {
  constexpr int kFromSlice = C::G * C::kUnits * 128;
  const int slices = p.slices, thread = id % 128, warpgroup = id / 128;
  const FewShare share = FewShare::of(plan, slices, w.slice, warpgroup);
  mbarrier_wait(shared.may_post(), 0);
  post_units<C>(share, posted_units<C>(p, w, w.slice, warpgroup) + thread, sums);
  named_barrier_sync(3, C::kConsumers);  // all have read the stages
  float4* own = shared.own_units(warpgroup) + thread;
  keep_units<C>(share, own, sums);
  const float4* others = posted_units<C>(p, w, 0, warpgroup) + share.first * 128 + thread;
  float4 parts[C::kMostUnits][kMostNearSlices];
  for (uint32_t largest = kNoMail; largest == kNoMail;) {
    largest = 0;
#pragma unroll
    for (int u = 0; u < C::kMostUnits; ++u)
#pragma unroll
      for (int i = 0; i < kMostNearSlices; ++i)
        if (i < slices && i != w.slice && u < share.units) parts[u][i] = look(others + i * kFromSlice + u * 128);
#pragma unroll
    for (int u = 0; u < C::kMostUnits; ++u)
#pragma unroll
      for (int i = 0; i < kMostNearSlices; ++i)
        if (i < slices && i != w.slice && u < share.units) largest = max(largest, largest_word(parts[u][i]));
  }
  __syncwarp();  // lanes looked by themselves
  const UnitStore<C> store(shared, p, w, id, share.first * 8, valid);
#pragma unroll
  for (int u = 0; u < C::kMostUnits; ++u) {
    const float4 mine = own[u * 128];
    float4 sum = w.slice == 0 ? mine : parts[u][0];
#pragma unroll
    for (int i = 1; i < kMostNearSlices; ++i)
      if (i < slices) add_to(sum, i == w.slice ? mine : parts[u][i]);
    if (u < share.units) store.put(u, sum);
  }
  store.finish(share.units);
}

}  // namespace di::linear
