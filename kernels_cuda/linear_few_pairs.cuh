// How three slices of a tile of linear_few.cuh meet where clusters of three are not all resident, and pairs are: slices 1 and 2
// are a pair, which send each other half of their units; slice 0, of the fewest steps, posts its sums to both
// (linear_few_mail.cuh), and is a pair with that of another tile.
#pragma once

#include "linear_few_mail.cuh"

namespace di::linear {

// One warp, while others multiply: who will read mail empties its places and tells slice 0, which waits for both.
template <typename C>
__device__ __forceinline__ void open_pair_mail(const FewShared<C>& shared, const FewWork& w) {
  constexpr int kHalf = C::kUnits / 2;
  const Problem& p = shared.call().problem;
  const FewPlan& plan = shared.call().plan;
  const int lane = threadIdx.x % 32;
  uint64_t* flags = plan.flags + w.tile * 2;
  wait_for_predecessor();
  if (w.slice == 0) {
    while (!__all_sync(0xFFFFFFFFu, lane >= 2 || heard(flags + lane) == plan.nonce)) {
    }
    if (lane < 2) flags[lane] = 0;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.may_post());
    return;
  }
  const float none = __uint_as_float(kNoMail);
#pragma unroll
  for (int warpgroup = 0; warpgroup < C::G; ++warpgroup)
#pragma unroll 4
    for (int i = 0; i < kHalf * 4; ++i)
      post(posted_units<C>(p, w, 0, warpgroup) + (w.slice - 1) * (kHalf * 128) + i * 32 + lane,
           make_float4(none, none, none, none));
  __syncwarp();
  if (lane == 0) tell(flags + w.slice - 1, plan.nonce), mbarrier_arrive(shared.may_post());  // here: may look
}

template <typename C>
__device__ __forceinline__ void meet_paired(const FewShared<C>& shared, const Problem& p, const FewWork& w, int id, int valid,
                                            const float (&sums)[C::T / 2]) {
  constexpr int kHalf = C::kUnits / 2;
  const int thread = id % 128, warpgroup = id / 128;
  float4* mail = posted_units<C>(p, w, 0, warpgroup) + thread;
  wait_for_room<C>();
  mbarrier_wait(shared.may_post(), 0);  // of who reads: the places were emptied before they are looked at
  if (w.slice == 0) {
#pragma unroll
    for (int j = 0; j < C::kUnits; ++j) post(mail + j * 128, unit_of(sums, j));
    return;
  }
  const bool second = w.slice == 2;
  float4* received = shared.received() + warpgroup * (kHalf * 128) + thread;
#pragma unroll
  for (int u = 0; u < kHalf; ++u)
    store_cluster16(received + u * 128, second ? unit_of(sums, u) : unit_of(sums, kHalf + u), shared.sums_full(warpgroup),
                    second ? 0 : 1);
  const int first = second ? kHalf : 0;
  float4 parts[kHalf];
  for (uint32_t largest = kNoMail; largest == kNoMail;) {
    largest = 0;
#pragma unroll
    for (int u = 0; u < kHalf; ++u) parts[u] = look(mail + (first + u) * 128);
#pragma unroll
    for (int u = 0; u < kHalf; ++u) largest = max(largest, largest_word(parts[u]));
  }
  __syncwarp();  // lanes looked by themselves
  const UnitStore<C> store(shared, p, w, id, first * 8, valid);
  mbarrier_wait_cluster(shared.sums_full(warpgroup), 0);
  if (store.rows != nullptr) named_barrier_sync(3, C::kConsumers);  // all have read the stages
#pragma unroll
  for (int u = 0; u < kHalf; ++u) {
    const float4 other = received[u * 128];
    add_to(parts[u], second ? other : unit_of(sums, u));
    add_to(parts[u], second ? unit_of(sums, kHalf + u) : other);
    store.put(u, parts[u]);
  }
  store.finish(kHalf);
}

}  // namespace di::linear
