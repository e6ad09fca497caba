// A warpgroup of linear_few.cuh that multiplies 128 weight rows, 64 at a time, by the rows in shared memory: of up to 128
// activation rows, where four warpgroups of 64 weight rows would have too few registers each.
#pragma once

#include "linear_few_products.cuh"
#include "linear_few_units.cuh"

namespace di::linear {

// sums[m] = the only slice of W x^T of weight rows 64 m of the warpgroup's, without the operands' factors. Both are expanded a half
// step at a time in turn, while the products of the other one run.
template <typename C, bool half>
__device__ __forceinline__ void multiply_two(const FewConsumer<C>& consumer, float (&sums)[2][C::T / 2], const uint32_t (&words)[2]) {
  const FewShared<C>& shared = consumer.shared;
  const int lane = consumer.thread % 32, steps = consumer.w.steps;
  uint32_t fragments[2][4][4];
  Ring<C::kRowStages> rows;
  Ring<C::kWeightStages> weights;
  int previous = -1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const uint32_t row_tiles = __shfl_sync(0xFFFFFFFFu, descriptor128_base(shared.rows(rows.stage)), 0);
    mbarrier_wait(shared.weights_full(weights.stage), weights.parity);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const Factor factor = factor_of<half>(__shfl_sync(0xFFFFFFFFu, words[m], step), consumer.thread % 4);
        consumer.template expand<half>(fragments[m], consumer.load_codes(weights.stage, h, m), factor, h);
        if (h == 0 && m == 0) mbarrier_wait(shared.rows_full(rows.stage), rows.parity);
        consumer.template issue<half>(sums[m], fragments[m], row_tiles + h * (C::T * 128 / 16), step == 0 && h == 0);
        // Products have begun from what was loaded, so all loads have come: an arrival by itself waits for none.
        if (h == 1 && m == 1 && lane == 0) mbarrier_arrive(shared.weights_empty(weights.stage));
        wgmma_wait<1>();
        if (h == 0 && m == 0 && previous >= 0 && lane == 0) mbarrier_arrive(shared.rows_empty(previous));
      }
    previous = rows.stage;
    rows.next();
    weights.next();
  }
  wgmma_wait<0>();
  wgmma_hold(sums[0]);
  wgmma_hold(sums[1]);
}

// words, top: as of consume_few, for both 64 weight rows.
template <typename C>
__device__ __forceinline__ void consume_two(const FewShared<C>& shared, const Problem& p, const FewWork& w, int id, int valid,
                                            const uint32_t (&words)[2], const uint32_t (&top)[2]) {
  static_assert(C::kSlices == kOne);
  const FewConsumer<C> consumer(shared, p, w, id);
  float sums[2][C::T / 2];
  const bool half = top[0] != 0;
  if (half) multiply_two<C, true>(consumer, sums, {half_exponents(words[0], top[0]), half_exponents(words[1], top[1])});
  else multiply_two<C, false>(consumer, sums, words);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    consumer.undo_factors(sums[m], half ? half_undo(top[m]) : 1.0f);
    store_whole<C>(shared, p, w, (id / 128 * 2 + m) * 128 + id % 128, valid, sums[m]);
  }
}

}  // namespace di::linear
