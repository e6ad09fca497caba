// How a block of linear_few.cuh is laid out, what it does, and the threads that copy.
#pragma once

#include "di_launch.cuh"
#include "di_ptx.cuh"
#include "linear_stages.cuh"

namespace di::linear {

// What the host divides, so that a block begins without divisions.
struct FewPlan {
  uint64_t* flags;  // in the workspace, [tiles][slice that posts][slice that reads]; kPaired: [tiles][slice that reads - 1]
  uint64_t nonce;   // of this call
  uint16_t step[kMostSlices + 1];  // where a slice begins
  uint16_t part[kMostSlices + 1];  // first of the units that its block adds
};

// Sums leave in units of eight rows by 64 columns (linear_few_units.cuh); as rows they lie at a pitch in words.
constexpr int kUnitBytes = 2048, kHalfPitch = 68;

// The most units that a block of two warpgroups gets from others, of `units` a warpgroup; own: with its own.
constexpr int most_received(int units, bool own) {
  int most = 0;
  for (int slices = 2; slices <= kMostSlices; ++slices)
    for (int i = 0; i < slices; ++i) {
      const int other = slices - 1 - i, even = units * (i + 1) / slices - units * i / slices;
      const int odd = units * (other + 1) / slices - units * other / slices;
      const int all = (own ? slices : slices - 1) * (even + odd);
      if (all > most) most = all;
    }
  return most;
}

// What a block needs at its end, in shared memory: parameters are fetched from memory where they are used first.
struct FewCall {
  Problem problem;
  FewPlan plan;
};

// G: warpgroups that multiply, M times 64 weight rows each. More than 128 rows are two passes of half as many in each step, with the
// same weights (linear_few_passes.cuh). Slices meet as in linear_stages.cuh, or kNear (linear_few_mail.cuh, linear_few_near.cuh) or
// kPaired (linear_few_pairs.cuh).
template <int T_, int G_, Slices kSlices_, int M_ = 1>
struct FewConfig {
  static constexpr int T = T_, G = G_, M = M_, kFeatures = 64 * G * M, kUnits = T / 8;
  static constexpr int kPasses = T > 128 ? 2 : 1, kPassRows = T / kPasses;
  static constexpr Slices kSlices = kSlices_;
  static constexpr bool kClusters = kSlices == kJoined || kSlices == kPaired;
  static constexpr bool kMail = kSlices == kNear && T < 64;  // slices meet word by word (linear_few_mail.cuh), not by flags
  static constexpr int kMostUnits = kSlices == kOne ? kUnits : (kUnits + 1) / 2;  // that a warpgroup adds
  static constexpr int kConsumers = 128 * G, kExpanders = kFeatures == 128 && T > 16 && kPasses == 1 ? 256 : 128;
  static constexpr int kThreads = kConsumers + kExpanders + 128;
  static constexpr bool kUneven = T >= 64;  // warpgroups have as many registers as their work needs
  static constexpr int kConsumerRegisters = M * kPasses == 2 ? 208 : T == 128 ? 152 : G == 2 ? 128 : 96;
  static constexpr int kExpanderRegisters = 72, kCopierRegisters = 24;
  static constexpr int kRowStages = T == 192 ? 4 : M == 2 ? 2 : T >= 128 || (G == 4 && T == 64) ? 3 : 4;
  static constexpr int kRawStages = T == 192 ? 4 : T < 64 ? 8 : T >= 128 ? 3 : G == 4 ? 5 : 4;
  static constexpr int kWeightStages = M * kPasses == 2 ? 3 : G == 4 || T == 128 ? 4 : T < 64 ? 8 : kSlices == kJoined ? 5 : 6;
  static constexpr int kEarlySteps = kFeatures == 256 ? 2 : T >= 64 ? 3 : 4;  // whose weights are copied before the rows are there
  static constexpr bool kScalesAlone = T >= 64 && kFeatures == 128;  // no more weights until the scales are there
  static constexpr int kRowStage = kPassRows * 256, kRawStage = kPassRows * kChunk, kWeightStage = kFeatures * kChunk;
  static constexpr int kParts = kPassRows / 16;  // of a step of a pass's rows: 32 of a sub-tile each, or 16 of both
  static constexpr int kSharers = T == 192 ? 2 : kParts * 32 < kExpanders ? kParts : kExpanders / 32;  // warps that expand them
  static constexpr int kPitch = kFeatures + 4;
  static constexpr int kBarriers = 2 * (kRowStages + kRawStages + kWeightStages) + 2 + G;
  static constexpr int kRaw = kRowStages * kRowStage, kWeights = kRaw + kRawStages * kRawStage;
  static constexpr int kStages = kWeights + kWeightStages * kWeightStage;
  // A warpgroup's own sums, and results, in the stages' place.
  static constexpr int kResultUnits = kPasses == 2 ? kUnits / 4 : kMostUnits;  // that leave at a time
  static constexpr int kOwn = kSlices == kOne || kPasses == 2 ? 0 : kMostUnits * kUnitBytes;
  static constexpr int kResult = kResultUnits * 8 * kHalfPitch * 4;
  // Other slices' sums of this block's units. Those of 128 rows and more have no room beside the stages: they come in their place.
  static constexpr int kReceivedUnits =
      kSlices == kJoined ? most_received(kUnits, kPasses == 2) : kSlices == kPaired ? G * kUnits / 2 : 0;
  static constexpr bool kInPlace = T >= 128 && kClusters;
  static constexpr int kReceived = kInPlace ? G * (kOwn + kResult) : kStages;
  static constexpr int kScales = kInPlace ? kStages : kReceived + kReceivedUnits * kUnitBytes;
  static constexpr int kUndo = kScales + T * kScalePitch * 4;
  static constexpr int kBarrierPlace = (kUndo + T * 4 + 7) / 8 * 8;
  static constexpr int kCall = kBarrierPlace + (kBarriers + 1) / 2 * 16;
  static constexpr int kShared = kCall + sizeof(FewCall);
  static_assert(kShared <= 232448 && kRaw % 1024 == 0 && kWeights % 1024 == 0);
  static_assert(G * M * (kOwn + kResult) <= kStages && T * kPitch * 4 <= kStages);
  static_assert(!kInPlace || kReceived + kReceivedUnits * kUnitBytes <= kStages);
};

// What a block does: a tile and the steps of a slice. Block (slice, feature tile, group), but for pairs.
struct FewWork {
  Place at;
  int tile, slice, start, steps;

  template <typename C>
  static __device__ __forceinline__ FewWork of(const FewPlan& plan) {
    FewWork w;
    if constexpr (C::kSlices == kPaired) {
      // of two tiles, the first slices, then the pair of either: as near as can be, since blocks of a tile wait for each other
      const int rank = blockIdx.x, which = blockIdx.y % 3, tiles = blockIdx.y / 3 * 2;
      w.tile = tiles + (which == 0 ? rank : which - 1), w.slice = which == 0 ? 0 : 1 + rank;
      w.at = {0, w.tile, 0};
    } else {
      w.slice = blockIdx.x, w.at = {0, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
      w.tile = blockIdx.z * gridDim.y + blockIdx.y;
    }
    w.start = plan.step[w.slice], w.steps = plan.step[w.slice + 1] - w.start;
    return w;
  }
};

template <typename C>
struct FewShared {
  uint8_t* base;
  __device__ uint8_t* rows(int stage) const { return base + stage * C::kRowStage; }
  __device__ uint8_t* raw(int stage) const { return base + C::kRaw + stage * C::kRawStage; }
  __device__ uint8_t* weights(int stage) const { return base + C::kWeights + stage * C::kWeightStage; }
  __device__ float* tile() const { return reinterpret_cast<float*>(base); }
  __device__ float4* received() const { return reinterpret_cast<float4*>(base + C::kReceived); }
  // A warpgroup's sums and results, in place of the stages.
  __device__ float4* own_units(int warpgroup) const { return reinterpret_cast<float4*>(base + warpgroup * C::kOwn); }
  __device__ float* results(int warpgroup) const {
    return reinterpret_cast<float*>(base + C::G * C::M * C::kOwn + warpgroup * C::kResult);
  }
  __device__ uint32_t* scales() const { return reinterpret_cast<uint32_t*>(base + C::kScales); }
  __device__ float* undo() const { return reinterpret_cast<float*>(base + C::kUndo); }
  __device__ FewCall& call() const { return *reinterpret_cast<FewCall*>(base + C::kCall); }
  __device__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(base + C::kBarrierPlace) + i; }
  __device__ uint64_t* rows_full(int stage) const { return barrier(stage); }
  __device__ uint64_t* rows_empty(int stage) const { return barrier(C::kRowStages + stage); }
  __device__ uint64_t* raw_full(int stage) const { return barrier(2 * C::kRowStages + stage); }
  __device__ uint64_t* raw_empty(int stage) const { return raw_full(stage) + C::kRawStages; }
  __device__ uint64_t* weights_full(int stage) const { return barrier(2 * (C::kRowStages + C::kRawStages) + stage); }
  __device__ uint64_t* weights_empty(int stage) const { return weights_full(stage) + C::kWeightStages; }
  __device__ uint64_t* scales_known() const { return barrier(C::kBarriers - 1); }
  __device__ uint64_t* may_post() const { return barrier(C::kBarriers - 2); }
  __device__ uint64_t* sums_full(int warpgroup) const { return barrier(C::kBarriers - 3 - warpgroup); }
};

// Those that no copy completes on before the block has met. A thread that has asked for scales must not do it: the fence before
// an mbarrier is made waits for its loads.
template <typename C>
__device__ __forceinline__ void init_few_barriers(const FewShared<C>& shared) {
#pragma unroll
  for (int i = 0; i < C::kRowStages; ++i) {
    mbarrier_init(shared.rows_full(i), C::kSharers);
    mbarrier_init(shared.rows_empty(i), C::kConsumers / 32);
  }
#pragma unroll
  for (int i = 0; i < C::kRawStages; ++i) mbarrier_init(shared.raw_empty(i), C::kSharers);
#pragma unroll
  for (int i = 0; i < C::kWeightStages; ++i) mbarrier_init(shared.weights_empty(i), C::kConsumers / 32);
#pragma unroll
  for (int i = 0; i < C::G; ++i) mbarrier_init(shared.sums_full(i), 1);
  mbarrier_init(shared.scales_known(), 1);
  mbarrier_init(shared.may_post(), 1);
  fence_mbarrier_init();
}

// ---- copies, a thread each. Rows go by units, a pass of a step each.

template <typename C>
__device__ __forceinline__ void copy_few_step(const FewShared<C>& shared, const CUtensorMap* map, const Problem& p,
                                              const FewWork& w, int step, int stage) {
  const int row = w.at.group * p.n + w.at.feature_tile * C::kFeatures;
  mbarrier_arrive_expect(shared.weights_full(stage), C::kWeightStage);
#pragma unroll
  for (int part = 0; part < C::kFeatures / kTileFeatures; ++part)
    tensor_copy_hint(shared.weights(stage) + part * (kTileFeatures * kChunk), map, (w.start + step) * kChunk,
                     row + part * kTileFeatures, shared.weights_full(stage), evict_first_policy());  // nobody reads them again
}
// The first steps, while the kernel before still runs; this thread makes their barriers. Not as many as there are stages: the
// rows' scales, for which all wait then, would queue behind them.
template <typename C>
__device__ __forceinline__ void copy_first_weights(const FewShared<C>& shared, const CUtensorMap* map, const Problem& p,
                                                   const FewWork& w) {
#pragma unroll 1
  for (int step = 0; step < min(w.steps, C::kEarlySteps); ++step) copy_few_step<C>(shared, map, p, w, step, step);
}
template <typename C>
__device__ __forceinline__ void copy_few_weights(const FewShared<C>& shared, const CUtensorMap* map, const Problem& p,
                                                 const FewWork& w) {
  if constexpr (C::kScalesAlone) mbarrier_wait(shared.scales_known(), 0);
  else wait_for_predecessor();
#pragma unroll 1
  for (int step = C::kEarlySteps; step < min(w.steps, C::kWeightStages); ++step) copy_few_step<C>(shared, map, p, w, step, step);
  Ring<C::kWeightStages> ring;
#pragma unroll 1
  for (int step = C::kWeightStages; step < w.steps; ++step) {
    mbarrier_wait(shared.weights_empty(ring.stage), ring.parity);
    copy_few_step<C>(shared, map, p, w, step, ring.stage);
    ring.next();
  }
}
template <typename C>
__device__ __forceinline__ void copy_row_step(const FewShared<C>& shared, const CUtensorMap* map, const Problem& p,
                                              const FewWork& w, int unit, int stage) {
  mbarrier_arrive_expect(shared.raw_full(stage), C::kRawStage);
  tensor_copy(shared.raw(stage), map, w.at.group * p.k + (w.start + unit / C::kPasses) * kChunk, unit % C::kPasses * C::kPassRows,
              shared.raw_full(stage));
}
// The units that have stages of their own; this thread makes their barriers.
template <typename C>
__device__ __forceinline__ void copy_first_rows(const FewShared<C>& shared, const CUtensorMap* map, const Problem& p,
                                                const FewWork& w) {
#pragma unroll 1
  for (int unit = 0; unit < min(w.steps * C::kPasses, C::kRawStages); ++unit) copy_row_step<C>(shared, map, p, w, unit, unit);
}
template <typename C>
__device__ __forceinline__ void copy_few_rows(const FewShared<C>& shared, const CUtensorMap* map, const Problem& p,
                                              const FewWork& w) {
  Ring<C::kRawStages> ring;
#pragma unroll 1
  for (int unit = C::kRawStages; unit < w.steps * C::kPasses; ++unit) {
    mbarrier_wait(shared.raw_empty(ring.stage), ring.parity);
    copy_row_step<C>(shared, map, p, w, unit, ring.stage);
    ring.next();
  }
}

}  // namespace di::linear
