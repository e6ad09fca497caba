// BF16 rows times a BF16 weight of few features (router, compressor, indexer): y = x W^T in one kernel, sums and their order as in
// linear_tile.cuh.
//
// Such a product takes no longer than its start and the way of its few bytes, so many blocks share them: a tile is 64 activation
// rows, which are the matrix instruction's A, by F weight rows, its N, and a block has one slice of its K, mostly with a stage for
// each step, so that all it needs is on its way at once, weights before the kernel that makes the rows has ended. The blocks of a
// tile's slices are a cluster. Each thread sends its sums to the block that adds them, and that one stores them from registers.
#pragma once

#include "di_wgmma.cuh"
#include "linear_stages.cuh"

namespace di::linear {

template <int F_>
struct NarrowConfig {
  static constexpr int F = F_, T = 64, kConsumers = 128, kThreads = kConsumers + 32;
  static constexpr int kRowStage = T * 128, kWeightStage = F * 128, kStage = kRowStage + kWeightStage;
  static constexpr int kStages = F == 128 ? 7 : 10;
  // A unit is a warp's sums of eight features, 16 bytes a lane. Received: those of the other slices that a block adds.
  static constexpr int kGroups = F / 8, kUnitBytes = 512, kMostReceived = kGroups * kConsumers / 32 + kMostSlices;
  static constexpr int kReceived = kStages * kStage, kBarriers = kReceived + kMostReceived * kUnitBytes;
  static constexpr int kShared = kBarriers + (2 * kStages + 1) * 8;
  static_assert(kShared <= 232448);
};

template <typename C>
struct NarrowShared {
  uint8_t* base;
  __device__ uint8_t* rows(int stage) const { return base + stage * C::kStage; }
  __device__ uint8_t* weights(int stage) const { return rows(stage) + C::kRowStage; }
  __device__ float4* received(int unit) const { return reinterpret_cast<float4*>(base + C::kReceived + unit * C::kUnitBytes); }
  __device__ uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(base + C::kBarriers) + stage; }
  __device__ uint64_t* empty(int stage) const { return full(C::kStages + stage); }
  __device__ uint64_t* sums_full() const { return full(2 * C::kStages); }
};

// Where the steps of each slice begin, which the host has divided.
struct NarrowPlan {
  uint16_t step[kMostSlices + 1];
};

// Block (slice, feature tile, row tile).
template <typename C>
struct NarrowWork {
  int slice, feature, row, start, steps;
  int warps;  // that have rows

  static __device__ __forceinline__ NarrowWork of(const Problem& p, const NarrowPlan& plan) {
    NarrowWork w;
    w.slice = blockIdx.x, w.feature = blockIdx.y * C::F, w.row = blockIdx.z * C::T;
    w.start = plan.step[w.slice], w.steps = plan.step[w.slice + 1] - w.start;
    w.warps = min(C::T, p.rows - w.row + 15) / 16;
    return w;
  }
  __device__ __forceinline__ int own_units(int slices) const { return (C::kGroups * warps - slice + slices - 1) / slices; }
};

// Goes through the units of a warp, which are numbered by (eight features, warp) and dealt to the blocks of the slices in turn.
struct Dealer {
  int to, place;  // the block that adds the unit, and where it has the first of the other slices' sums of it
  const int warps, slices;

  __device__ __forceinline__ Dealer(int warp, int warps, int slices) : to(warp), place(0), warps(warps), slices(slices) { settle(); }
  __device__ __forceinline__ void next() {
    to += warps;
    settle();
  }
  __device__ __forceinline__ void settle() {  // four warps at most, two slices at least
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (to >= slices) to -= slices, place += slices - 1;
  }
};

// ---- the thread that copies

template <typename C>
__device__ __forceinline__ void copy_narrow_weights(const NarrowShared<C>& shared, const CUtensorMap* map, const Problem& p,
                                                    const NarrowWork<C>& w, int step, int stage) {
  mbarrier_arrive_expect(shared.full(stage), C::kWeightStage + dense_rows<C>(p) * 128);
  tensor_copy(shared.weights(stage), map, (w.start + step) * kDenseChunk, w.feature, shared.full(stage));
}
template <typename C>
__device__ __forceinline__ void copy_narrow_rows(const NarrowShared<C>& shared, const CUtensorMap* map, const NarrowWork<C>& w,
                                                 int step, int stage) {
  tensor_copy(shared.rows(stage), map, (w.start + step) * kDenseChunk, w.row, shared.full(stage));
}

// The barriers, and the weights of the first steps.
template <typename C>
__device__ __forceinline__ void begin_narrow(const NarrowShared<C>& shared, const CUtensorMap* map, const Problem& p,
                                             const NarrowWork<C>& w) {
#pragma unroll
  for (int i = 0; i < C::kStages; ++i) {
    mbarrier_init(shared.full(i), 1);
    mbarrier_init(shared.empty(i), C::kConsumers / 32);
  }
  mbarrier_init(shared.sums_full(), 1);
  fence_mbarrier_init();
#pragma unroll 1
  for (int step = 0; step < min(w.steps, C::kStages); ++step) copy_narrow_weights<C>(shared, map, p, w, step, step);
  mbarrier_arrive_expect(shared.sums_full(), w.own_units(p.slices) * (p.slices - 1) * C::kUnitBytes);
}

// Their rows, and all other steps.
template <typename C>
__device__ __forceinline__ void copy_narrow(const NarrowShared<C>& shared, const CUtensorMap* weight_map,
                                            const CUtensorMap* row_map, const Problem& p, const NarrowWork<C>& w) {
#pragma unroll 1
  for (int step = 0; step < min(w.steps, C::kStages); ++step) copy_narrow_rows<C>(shared, row_map, w, step, step);
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int step = C::kStages; step < w.steps; ++step) {
    mbarrier_wait(shared.empty(ring.stage), ring.parity);
    copy_narrow_weights<C>(shared, weight_map, p, w, step, ring.stage);
    copy_narrow_rows<C>(shared, row_map, w, step, ring.stage);
    ring.next();
  }
}

// ---- the warpgroup that multiplies

template <typename C>
__device__ __forceinline__ void multiply_narrow(const NarrowShared<C>& shared, const NarrowWork<C>& w, float (&sums)[C::F / 2]) {
  Ring<C::kStages> ring;
  int previous = -1;
#pragma unroll 1
  for (int step = 0; step < w.steps; ++step) {
    mbarrier_wait(shared.full(ring.stage), ring.parity);
    const uint64_t a = wgmma_descriptor128(shared.rows(ring.stage)), b = wgmma_descriptor128(shared.weights(ring.stage));
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) Wgmma<C::F>::bf16_ss(sums, a + 2 * s, b + 2 * s, step > 0 || s > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty(previous));
    previous = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
  wgmma_hold(sums);
}

// Sums of a row's columns n and n + 1; n is even.
__device__ __forceinline__ void store_pair(const Problem& p, int64_t row, int n, bool inside, float first, float second) {
  if (!inside || n >= p.n) return;
  const int64_t at = row * p.out_stride + n;
  const bool both = n + 1 < p.n;
  if (p.output == kF32) {
    float* to = static_cast<float*>(p.out) + at;
    if (both && p.out_aligned) {
      *reinterpret_cast<float2*>(to) = make_float2(first, second);
    } else {
      to[0] = first;
      if (both) to[1] = second;
    }
  } else {
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.out) + at;
    if (both && p.out_aligned) {
      *reinterpret_cast<uint32_t*>(to) = bf16_pair(first, second);
    } else {
      to[0] = __float2bfloat16_rn(first);
      if (both) to[1] = __float2bfloat16_rn(second);
    }
  }
}

// Sends the other blocks' units to them.
template <typename C>
__device__ __forceinline__ void send_narrow(const NarrowShared<C>& shared, const NarrowWork<C>& w, int slices, int warp, int lane,
                                            const float (&sums)[C::F / 2]) {
  Dealer unit(warp, w.warps, slices);
#pragma unroll
  for (int eight = 0; eight < C::kGroups; ++eight, unit.next())
    if (unit.to != w.slice) {
      const int place = unit.place + (w.slice < unit.to ? w.slice : w.slice - 1);
      store_cluster16(shared.received(place) + lane, unit_of(sums, eight), shared.sums_full(), unit.to);
    }
}

// Adds this block's units, which a warp has of its own rows, in the slices' order.
template <typename C>
__device__ __forceinline__ void add_narrow(const NarrowShared<C>& shared, const Problem& p, const NarrowWork<C>& w, int warp,
                                           int lane, int valid, const float (&sums)[C::F / 2]) {
  const int slices = p.slices, row = w.row + warp * 16 + lane / 4;
  Dealer unit(warp, w.warps, slices);
#pragma unroll
  for (int eight = 0; eight < C::kGroups; ++eight, unit.next())
    if (unit.to == w.slice) {
      const float4 own = unit_of(sums, eight), *others = shared.received(unit.place) + lane;
      float4 v = w.slice == 0 ? own : others[0];
#pragma unroll
      for (int i = 1; i < kMostSlices; ++i)
        if (i < slices) {
          const float4 more = i == w.slice ? own : others[(i < w.slice ? i : i - 1) * 32];
          add_to(v, more);
        }
      const int n = w.feature + eight * 8 + lane % 4 * 2;
      store_pair(p, row, n, row < valid, v.x, v.y);
      store_pair(p, row + 8, n, row + 8 < valid, v.z, v.w);
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads)
narrow_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap row_map, const Problem p,
              const __grid_constant__ NarrowPlan plan) {
  extern __shared__ __align__(1024) uint8_t memory[];
  launch_dependents();  // they wait for this kernel's end, whatever they do before
  const NarrowShared<C> shared{memory};
  const NarrowWork<C> w = NarrowWork<C>::of(p, plan);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == C::kConsumers) begin_narrow<C>(shared, &weight_map, p, w);
  __syncthreads();
  cluster_arrive_relaxed();  // the barriers have a fence of their own
  wait_for_predecessor();
  if (warp < C::kConsumers / 32) {
    float sums[C::F / 2];
    const int valid = valid_rows(p);
    multiply_narrow<C>(shared, w, sums);
    cluster_wait();  // the others can be sent to
    if (warp < w.warps) {
      send_narrow<C>(shared, w, p.slices, warp, lane, sums);
      mbarrier_wait_cluster(shared.sums_full(), 0);  // no block ends before all that is sent to it is there
      add_narrow<C>(shared, p, w, warp, lane, valid, sums);
    }
  } else {
    if (lane == 0) copy_narrow<C>(shared, &weight_map, &row_map, p, w);
    __syncwarp();
    cluster_wait();
  }
}

}  // namespace di::linear
