// Up to 256 activation rows: y = x W^T from fp8_32 codes in one kernel, sums and their order as in linear_tile.cuh.
//
// A block has one tile, 64 or 128 weight rows a warpgroup, and one slice of K. Codes of weights and rows are copied to shared memory; a
// warpgroup expands its weights in registers and multiplies, and a few warps expand the rows to sub-tiles in shared memory, steps
// in turn, so that their waits hide one another. Weights are on their way before the block has met, and before the kernel that
// makes the rows has ended. Where the scales of each weight tile and of each row lie within 2^12, everything is expanded to F16,
// one instruction for two codes, else to BF16: all products are exact and no operand is subnormal, so the bits are the same. That
// is known once all warps have looked at the scales of some rows each.
#pragma once

#include "linear_combine.cuh"
#include "linear_few_meet.cuh"
#include "linear_few_near.cuh"
#include "linear_few_pairs.cuh"
#include "linear_few_passes.cuh"
#include "linear_few_products.cuh"
#include "linear_few_wide.cuh"

namespace di::linear {

// words: the scales of the warp's weight rows; top: of their window, 0 where F16 is not used.
template <typename C>
__device__ __forceinline__ void consume_few(const FewShared<C>& shared, const Problem& p, const FewWork& w, int id,
                                            int valid, const uint32_t (&words)[C::M], const uint32_t (&top)[C::M]) {
  if constexpr (C::M == 2) return consume_two<C>(shared, p, w, id, valid, words, top);
  FewConsumer<C> consumer(shared, p, w, id);
  float sums[C::T / 2];
  float undo = 1.0f;
  if (top[0] != 0) {
    undo = half_undo(top[0]);
    if constexpr (C::kPasses == 2) multiply_passes<C, true>(consumer, sums, half_exponents(words[0], top[0]));
    else consumer.template multiply<true>(sums, half_exponents(words[0], top[0]));
  } else {
    if constexpr (C::kPasses == 2) multiply_passes<C, false>(consumer, sums, words[0]);
    else consumer.template multiply<false>(sums, words[0]);
  }
  const Problem& q = shared.call().problem;
  const FewPlan& late = shared.call().plan;
  if constexpr (C::kSlices == kApart) {
    consumer.stage(p.partial + static_cast<int64_t>(w.tile * p.slices + w.slice) * (C::T * kTilePitch), kTilePitch, sums, undo);
  } else if constexpr (C::kSlices == kNear && !C::kMail) {
    named_barrier_sync(3, C::kConsumers);  // all have read the stages, which the sums now replace
    consumer.stage(shared.tile(), C::kPitch, sums, undo);
    named_barrier_sync(3, C::kConsumers);
    store_near<C>(shared, q, late, w, id, valid);
  } else {
    consumer.undo_factors(sums, undo);
    if constexpr (C::kSlices == kJoined && C::kPasses == 2) meet_joined_passes<C>(shared, q, late, w, id, valid, sums);
    else if constexpr (C::kSlices == kPaired && C::kPasses == 2) meet_paired_passes<C>(shared, q, w, id, valid, sums);
    else if constexpr (C::kSlices == kJoined) meet_joined<C>(shared, q, late, w, id, valid, sums);
    else if constexpr (C::kSlices == kPaired) meet_paired<C>(shared, q, w, id, valid, sums);
    else if constexpr (C::kSlices == kNear) meet_near<C>(shared, q, late, w, id, valid, sums);
    else store_whole<C>(shared, q, w, id, valid, sums);
  }
}

// The warps that multiply (id: from 0) and those that expand rows (from kConsumers on).
template <typename C>
__device__ __forceinline__ void work_few(const FewShared<C>& shared, const Problem& p, const FewWork& w, int id,
                                         const FewScales<C>& asked) {
  const bool consumes = id < C::kConsumers;
  const int valid = asked.valid;
  uint32_t top[C::M];
  bool fits = true;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    top[m] = 127;
    if (!consumes) continue;
    const uint32_t words = asked.weights[m], first = __shfl_sync(0xFFFFFFFFu, words, 0);
    top[m] = half_window(id % 32 < w.steps ? words : first, kLeastWeightScale, kMostWeightScale);
    fits = fits && top[m] != 0;
  }
  bool half;
  if constexpr (C::kPasses == 2) half = keep_many_scales<C>(shared, w, asked, id, fits);
  else half = keep_few_scales<C>(shared, w, asked, id / 32, fits);
#pragma unroll
  for (int m = 0; m < C::M; ++m) top[m] = half ? top[m] : 0;
  if (C::kScalesAlone && id == 0) mbarrier_arrive(shared.scales_known());
  if (consumes) {
    if constexpr (C::kUneven) registers_up<C::kConsumerRegisters>();
    consume_few<C>(shared, p, w, id, valid, asked.weights, top);
  } else {
    if constexpr (C::kUneven) registers_down<C::kExpanderRegisters>();
    if (half) {
      expand_steps<C, true>(shared, w, id - C::kConsumers);
    } else {
      keep_plain_scales<C>(shared, p, w, valid, id - C::kConsumers);
      expand_steps<C, false>(shared, w, id - C::kConsumers);
    }
    __syncwarp();
    if (C::kInPlace) named_barrier_arrive(kRowsExpanded, C::kConsumers + C::kExpanders);
    if (C::kClusters) cluster_wait();
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
few_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap row_map, const Problem p,
           const __grid_constant__ FewPlan plan) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const FewShared<C> shared{memory};
  const FewWork w = FewWork::of<C>(plan);
  const int id = threadIdx.x - C::kConsumers;
  launch_dependents();  // they wait for this kernel's end, whatever they do before
  FewScales<C> asked;
  if (id < C::kExpanders) asked = FewScales<C>::ask(p, w, threadIdx.x);
  if (id == C::kExpanders) {  // the first copies are under way before the block meets
#pragma unroll
    for (int i = 0; i < C::kWeightStages; ++i) mbarrier_init(shared.weights_full(i), 1);
    fence_mbarrier_init();
    copy_first_weights<C>(shared, &weight_map, p, w);
  } else if (id == C::kExpanders + 32) {
    prefetch_tensor_map(&row_map);
#pragma unroll
    for (int i = 0; i < C::kRawStages; ++i) mbarrier_init(shared.raw_full(i), 1);
    fence_mbarrier_init();
    wait_for_predecessor();
    copy_first_rows<C>(shared, &row_map, p, w);
  } else if (id == C::kExpanders + 64) {
    shared.call() = {p, plan};
  } else if (id == C::kExpanders + 96) {
    init_few_barriers<C>(shared);
    if (C::kSlices == kJoined)
#pragma unroll
      for (int i = 0; i < C::G; ++i)
        mbarrier_arrive_expect(shared.sums_full(i), FewShare::of(plan, p.slices, w.slice, i).units * (p.slices - 1) * kUnitBytes);
    if (C::kSlices == kPaired && w.slice != 0)
#pragma unroll
      for (int i = 0; i < C::G; ++i) mbarrier_arrive_expect(shared.sums_full(i), C::kUnits / 2 * kUnitBytes);
  }
  __syncthreads();
  if (C::kClusters) cluster_arrive_relaxed();  // barriers have a fence of their own; releasing would wait for the scales
  if (id < C::kExpanders) {
    work_few<C>(shared, p, w, threadIdx.x, asked);
  } else {
    if constexpr (C::kUneven) registers_down<C::kCopierRegisters>();
    if (id == C::kExpanders) copy_few_weights<C>(shared, &weight_map, p, w);
    else if (id == C::kExpanders + 32) copy_few_rows<C>(shared, &row_map, p, w);
    else if (C::kMail && id / 32 == C::kExpanders / 32 + 2) open_mail<C>(shared, w);
    else if (C::kSlices == kPaired && id / 32 == C::kExpanders / 32 + 2) open_pair_mail<C>(shared, w);
    __syncwarp();
    if (C::kClusters) cluster_wait();
  }
}

}  // namespace di::linear
