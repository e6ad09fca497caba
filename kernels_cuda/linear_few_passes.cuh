// Of 129 to 256 activation rows: a warpgroup of linear_few.cuh multiplies its 64 weight rows by two passes of 96 or 128 rows in
// each step, expanding its weights once, and slices meet with fewer sums in registers at a time.
#pragma once

#include "linear_few_meet.cuh"
#include "linear_few_pairs.cuh"
#include "linear_few_products.cuh"

namespace di::linear {

// sums = the slice of W x^T, those of the first pass before those of the second, without the operands' factors. The fragments of
// half a step are multiplied twice; each is made anew while the products of the other one run.
template <typename C, bool half>
__device__ __forceinline__ void multiply_passes(const FewConsumer<C>& consumer, float (&sums)[C::T / 2], uint32_t words) {
  static_assert(C::kPasses == 2);
  constexpr int kSums = C::kPassRows / 2, kSubTile = C::kPassRows * 128 / 16;
  float (&first)[kSums] = *reinterpret_cast<float (*)[kSums]>(sums);
  float (&second)[kSums] = *reinterpret_cast<float (*)[kSums]>(sums + kSums);
  const FewShared<C>& shared = consumer.shared;
  const int lane = consumer.thread % 32, steps = consumer.w.steps;
  uint32_t even[4][4], odd[4][4];
  Ring<C::kRowStages> rows;
  Ring<C::kWeightStages> weights;
  Factor factor = factor_of<half>(__shfl_sync(0xFFFFFFFFu, words, 0), consumer.thread % 4);
  int previous = -1;
  mbarrier_wait(shared.weights_full(0), 0);
  auto codes = consumer.load_codes(0, 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint32_t row_tiles = __shfl_sync(0xFFFFFFFFu, descriptor128_base(shared.rows(rows.stage)), 0);
    consumer.template expand<half>(even, codes, factor, 0);
    codes = consumer.load_codes(weights.stage, 1);
    mbarrier_wait(shared.rows_full(rows.stage), rows.parity);
    consumer.template issue<half>(first, even, row_tiles, step == 0);
    wgmma_wait<1>();
    if (previous >= 0 && lane == 0) mbarrier_arrive(shared.rows_empty(previous));
    consumer.template expand<half>(odd, codes, factor, 1);  // it waits for all loads from the stage, which an arrival does not
    factor = factor_of<half>(__shfl_sync(0xFFFFFFFFu, words, step + 1), consumer.thread % 4);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.weights_empty(weights.stage));
    weights.next();
    consumer.template issue<half>(first, odd, row_tiles + kSubTile, false);
    previous = rows.stage;
    rows.next();
    row_tiles = __shfl_sync(0xFFFFFFFFu, descriptor128_base(shared.rows(rows.stage)), 0);
    mbarrier_wait(shared.rows_full(rows.stage), rows.parity);
    consumer.template issue<half>(second, even, row_tiles, step == 0);
    wgmma_wait<1>();
    if (lane == 0) mbarrier_arrive(shared.rows_empty(previous));
    consumer.template issue<half>(second, odd, row_tiles + kSubTile, false);
    previous = rows.stage;
    rows.next();
    if (step + 1 < steps) {
      mbarrier_wait(shared.weights_full(weights.stage), weights.parity);
      codes = consumer.load_codes(weights.stage, 0);
    }
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  wgmma_hold(sums);
}

// Of two blocks of a cluster: each sends the other half of its units and adds those it gets to its own half. `second`: which half
// the block adds; other: the rank of the other block. begin.sum adds the sums of a unit, in the slices' order; before that,
// begin.ask(base) may ask for what it needs for the kResultUnits units of the half from `base` on.
template <typename C, typename Begin>
__device__ __forceinline__ void trade_halves(const FewShared<C>& shared, const Problem& p, const FewWork& w, int id, int valid,
                                             const float (&sums)[C::T / 2], bool second, int other, Begin& begin) {
  constexpr int kHalf = C::kUnits / 2, kAtOnce = C::kResultUnits;
  static_assert(kHalf % kAtOnce == 0);
  const int thread = id % 128, warpgroup = id / 128;
  float4* received = shared.received() + warpgroup * (kHalf * 128) + thread;
#pragma unroll
  for (int u = 0; u < kHalf; ++u)
    store_cluster16(received + u * 128, second ? unit_of(sums, u) : unit_of(sums, kHalf + u), shared.sums_full(warpgroup), other);
#pragma unroll
  for (int base = 0; base < kHalf; base += kAtOnce) {
    begin.ask(base);
    const UnitStore<C> store(shared, p, w, id, (second ? kHalf + base : base) * 8, valid);
    if (base == 0) mbarrier_wait_cluster(shared.sums_full(warpgroup), 0);
    else if (store.rows != nullptr) named_barrier_sync(4 + warpgroup, 128);  // the units before have left
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const float4 own = second ? unit_of(sums, kHalf + base + u) : unit_of(sums, base + u);
      store.put(u, begin.sum(u, own, received[(base + u) * 128]));
    }
    store.finish(kAtOnce);
  }
}

// Two slices: a sum of two terms is the same in either order.
struct NothingBefore {
  __device__ __forceinline__ void ask(int) const {}
  __device__ __forceinline__ float4 sum(int, float4 own, const float4& other) const {
    add_to(own, other);
    return own;
  }
};

// Slices 1 and 2 of three, whose first posts its sums (linear_few_mail.cuh).
template <typename C>
struct MailBefore {
  const float4* mail;  // of the half's first unit
  bool second;         // this is slice 2
  float4 parts[C::kResultUnits];

  __device__ __forceinline__ void ask(int base) {
    for (uint32_t largest = kNoMail; largest == kNoMail;) {
      largest = 0;
#pragma unroll
      for (int u = 0; u < C::kResultUnits; ++u) parts[u] = look(mail + (base + u) * 128);
#pragma unroll
      for (int u = 0; u < C::kResultUnits; ++u) largest = max(largest, largest_word(parts[u]));
    }
    __syncwarp();  // lanes looked by themselves
  }
  __device__ __forceinline__ float4 sum(int u, const float4& own, const float4& other) const {
    const float4 &a = own, &b = other;
    float4 v = parts[u];
    add_to(v, second ? make_float4(b.x, b.y, b.z, b.w) : make_float4(a.x, a.y, a.z, a.w));
    add_to(v, second ? make_float4(a.x, a.y, a.z, a.w) : make_float4(b.x, b.y, b.z, b.w));
    return v;
  }
};

// As meet_paired.
template <typename C>
__device__ __forceinline__ void meet_paired_passes(const FewShared<C>& shared, const Problem& p, const FewWork& w, int id,
                                                   int valid, const float (&sums)[C::T / 2]) {
  float4* mail = posted_units<C>(p, w, 0, id / 128) + id % 128;
  wait_for_room<C>();
  mbarrier_wait(shared.may_post(), 0);  // of who reads: the places were emptied before they are looked at
  if (w.slice == 0) {
#pragma unroll
    for (int j = 0; j < C::kUnits; ++j) post(mail + j * 128, unit_of(sums, j));
    return;
  }
  const bool second = w.slice == 2;
  MailBefore<C> before{second ? mail + C::kUnits / 2 * 128 : mail, second};
  trade_halves<C>(shared, p, w, id, valid, sums, second, second ? 0 : 1, before);
}

// As meet_joined; of more than two slices a block keeps its own units where it gets those of the others.
template <typename C>
__device__ __forceinline__ void meet_joined_passes(const FewShared<C>& shared, const Problem& p, const FewPlan& plan,
                                                   const FewWork& w, int id, int valid, const float (&sums)[C::T / 2]) {
  const int slices = p.slices, thread = id % 128, warpgroup = id / 128;
  const FewShare share = FewShare::of(plan, slices, w.slice, warpgroup);
  wait_for_room<C>();
  if (slices == 2) {
    NothingBefore nothing;
    return trade_halves<C>(shared, p, w, id, valid, sums, share.first != 0, 1 - w.slice, nothing);
  }
  const auto units_of = [&](int to) {  // where block `to` has the units of all slices, of this warpgroup
    const int before = warpgroup == 0 ? 0 : slices * FewShare::of(plan, slices, to, 0).units;
    return shared.received() + before * 128 + thread;
  };
#pragma unroll
  for (int j = 0; j < C::kUnits; ++j) {
    const int part = ((j + 1) * slices - 1) / C::kUnits;  // plan.part[part] <= j < plan.part[part + 1]
    const int to = warpgroup % 2 == 0 ? part : slices - 1 - part, first = plan.part[part], units = plan.part[part + 1] - first;
    float4* at = units_of(to) + (w.slice * units + j - first) * 128;
    if (to == w.slice) *at = unit_of(sums, j);
    else store_cluster16(at, unit_of(sums, j), shared.sums_full(warpgroup), to);
  }
  const float4* from = units_of(w.slice);
  mbarrier_wait_cluster(shared.sums_full(warpgroup), 0);
#pragma unroll 1
  for (int base = 0; base < share.units; base += C::kResultUnits) {
    const int units = min(C::kResultUnits, share.units - base);
    const UnitStore<C> store(shared, p, w, id, (share.first + base) * 8, valid);
    if (base > 0 && store.rows != nullptr) named_barrier_sync(4 + warpgroup, 128);  // the units before have left
#pragma unroll 1
    for (int u = 0; u < units; u += 2) {
      float4 parts[2][kMostSlices];  // all on their way before the first is used
#pragma unroll
      for (int v = 0; v < 2; ++v)
#pragma unroll
        for (int i = 0; i < kMostSlices; ++i)
          if (i < slices && u + v < units) parts[v][i] = from[(i * share.units + base + u + v) * 128];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int i = 1; i < kMostSlices; ++i)
          if (i < slices) add_to(parts[v][0], parts[v][i]);
        if (u + v < units) store.put(u + v, parts[v][0]);
      }
    }
    store.finish(units);
  }
}

}  // namespace di::linear
