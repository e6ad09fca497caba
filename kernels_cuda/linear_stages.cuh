// The stages of a tile of `linear`: how shared memory is laid out, what a block goes through, and the thread that fills them.
#pragma once

#include "di_launch.cuh"
#include "di_ptx.cuh"
#include "di_wgmma.cuh"
#include "linear_problem.cuh"

namespace di::linear {

// How the slices of K meet: there is one; a block goes through all of them, with a second set of sums, or puts the sums so far
// aside, in the workspace; each has its own block, which leaves its sums in the workspace for linear_combine.cuh; or these blocks
// are a cluster and add in shared memory; or, of few rows, they wait for one another's sums in the workspace, or two of three do
// so for the third's and are a cluster.
enum Slices : int { kOne, kInTurn, kAside, kApart, kJoined, kNear, kPaired };

// T: activation rows of a tile. Stages: sub-tiles of rows (an even number), steps of weights.
// kOperands: what becomes of the rows.
enum Operands : int {
  kExpanded,  // codes, made BF16 by linear_rows.cuh beforehand
  kAhead,     // the same; all but a call's first part of them while the part before is multiplied, by idle warps
  kDense      // BF16 on both sides; sub-tiles of rows and of weights are one stage
};

template <int T_, Slices kSlices_, int kRowStages_, int kWeightStages_, Operands kOperands_ = kExpanded>
struct Config {
  static constexpr int T = T_, kRowStages = kRowStages_, kWeightStages = kWeightStages_;
  static constexpr Slices kSlices = kSlices_;
  static constexpr Operands kOperands = kOperands_;
  static constexpr bool kDense = kOperands == di::linear::kDense, kAhead = kOperands == di::linear::kAhead;
  static constexpr bool kSplit = kSlices == kApart || kSlices == kJoined;  // a block has one tile and one slice
  static constexpr int kThreads = kConsumers + 128, kConsumerRegisters = kAhead ? 200 : 240, kProducerRegisters = kAhead ? 104 : 24;
  static constexpr int kGroup = T <= 64 ? 4 : 2;  // k16 steps whose fragments are made and multiplied together
  // Products for a K, with what narrow tiles lose.
  static constexpr int kCost = (kDense ? T : T == 160 ? 171 : T == 128 && kSlices == kInTurn ? 160 : T) * 128;
  static constexpr int kRowStage = T * 128, kWeightStage = kTileFeatures * kChunk;
  // Sums on their way out, a warpgroup's 64 columns: kPart rows of BF16, twice, or 32 rows of FP32; or a whole tile in the stages.
  static constexpr int kPart = T % 64 == 0 && !kAhead ? 64 : T < 32 ? T : 32, kWidePart = T < 32 ? T : 32, kWidePitch = 68;
  static constexpr int kStagingHalf = kSplit ? 0 : kAhead ? 9216 : 16384;
  static constexpr int kAheadWarps = kAhead ? 3 : 0;  // of the producer's warpgroup, which has one thread to do besides
  static constexpr int kStages = kRowStages * kRowStage + kWeightStages * kWeightStage;
  static constexpr int kBarriers = kStages + 2 * kStagingHalf + kAheadWarps * kAheadBytes;
  static constexpr int kShared = kBarriers + 2 * (kRowStages + kWeightStages) * 8;
  static_assert(kRowStages % 2 == 0 && kShared <= 232448 && (kSplit || kWidePart * kWidePitch * 4 <= kStagingHalf));
  static_assert(!kSplit || T * kTilePitch * 4 <= kStages);
};

template <typename C>
struct Shared {
  uint8_t* base;
  __device__ uint8_t* rows(int stage) const { return base + stage * C::kRowStage; }
  __device__ uint8_t* weights(int stage) const { return base + C::kRowStages * C::kRowStage + stage * C::kWeightStage; }
  __device__ uint8_t* staging(int warpgroup) const { return base + C::kStages + warpgroup * C::kStagingHalf; }
  __device__ uint8_t* ahead(int warp) const { return base + C::kStages + 2 * C::kStagingHalf + warp * kAheadBytes; }
  __device__ float* tile() const { return reinterpret_cast<float*>(base); }
  __device__ uint64_t* barriers() const { return reinterpret_cast<uint64_t*>(base + C::kBarriers); }
  __device__ uint64_t* rows_full(int stage) const { return barriers() + stage; }
  __device__ uint64_t* rows_empty(int stage) const { return barriers() + C::kRowStages + stage; }
  __device__ uint64_t* weights_full(int stage) const { return barriers() + 2 * C::kRowStages + stage; }
  __device__ uint64_t* weights_empty(int stage) const { return barriers() + 2 * C::kRowStages + C::kWeightStages + stage; }
};

// A place in a ring of stages, and the parity of its present use.
template <int stages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where a tile lies.
struct Place {
  int row_tile, feature_tile, group;
};

// The tiles of a block in order, and the steps of K it does in each.
struct Work {
  int first, stride, total, row_tiles, feature_tiles, start, stop;

  template <typename C>
  static __device__ Work of(const Problem& p, int valid) {
    Work w;
    w.feature_tiles = p.feature_tiles();
    if (C::kSplit) {
      w.row_tiles = p.row_tiles;
      const int slice = blockIdx.x % p.slices;
      w.first = blockIdx.x / p.slices, w.stride = w.total = w.row_tiles * w.feature_tiles * p.groups;
      w.start = p.slice_start(slice), w.stop = p.slice_start(slice + 1);
      if (w.first % w.row_tiles * C::T >= valid) w.total = 0;
    } else {
      w.row_tiles = (valid + C::T - 1) / C::T;
      w.first = blockIdx.x, w.stride = gridDim.x, w.total = w.row_tiles * w.feature_tiles * p.groups;
      w.start = 0, w.stop = p.chunks();
    }
    return w;
  }
  __device__ int steps() const { return first < total ? (total - first + stride - 1) / stride * (stop - start) : 0; }
  __device__ Place place(int unit) const {
    const int column = unit / max(row_tiles, 1);
    return {unit - column * row_tiles, column % feature_tiles, column / feature_tiles};
  }
};

// Goes through the steps of all tiles of a block. Divides at a tile's first step only: a division takes as long as a copy.
struct Cursor {
  int unit, chunk;
  Place at;
  __device__ explicit Cursor(const Work& w) : unit(w.first), chunk(w.start), at(w.place(w.first)) {}
  __device__ __forceinline__ void next(const Work& w) {
    if (++chunk < w.stop) return;
    chunk = w.start;
    unit += w.stride;
    at = w.place(unit);
  }
};

// ---- the producer: one thread

template <typename C>
__device__ __forceinline__ void copy_weights(const Shared<C>& shared, const CUtensorMap* map, const Problem& p, const Work& w,
                                             Cursor& cursor, Ring<C::kWeightStages>& ring) {
  uint64_t* full = shared.weights_full(ring.stage);
  mbarrier_arrive_expect(full, C::kWeightStage);
  tensor_copy(shared.weights(ring.stage), map, cursor.chunk * kChunk, cursor.at.group * p.n + cursor.at.feature_tile * kTileFeatures, full);
  cursor.next(w);
  ring.next();
}

// Weights run ahead of the rows, and do not wait for the kernel that expands those.
template <typename C>
__device__ __forceinline__ void produce_codes(const Shared<C>& shared, const CUtensorMap* map, const Problem& p, const Work& w) {
  const int steps = w.steps(), chunks = p.chunks();
  Cursor weight_cursor(w), row_cursor(w);
  Ring<C::kWeightStages> weight_ring, freed;
  Ring<C::kRowStages> ring;
  for (int i = 0; i < min(steps, C::kWeightStages); ++i) copy_weights(shared, map, p, w, weight_cursor, weight_ring);
  wait_for_predecessor();
  for (int step = 0; step < steps; ++step) {
    const int64_t tile = static_cast<int64_t>(row_cursor.at.group) * p.row_tiles + row_cursor.at.row_tile;
    const uint8_t* from = p.expanded + (tile * chunks + row_cursor.chunk) * (2 * C::kRowStage);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mbarrier_wait(shared.rows_empty(ring.stage), ring.parity ^ 1);
      mbarrier_arrive_expect(shared.rows_full(ring.stage), C::kRowStage);
      bulk_copy(shared.rows(ring.stage), from + h * C::kRowStage, C::kRowStage, shared.rows_full(ring.stage));
      ring.next();
    }
    // The step that had these row stages before has been consumed, so its weights have too.
    const int consumed = step - C::kRowStages / 2;
    if (consumed >= 0 && consumed + C::kWeightStages < steps) {
      mbarrier_wait(shared.weights_empty(freed.stage), freed.parity);
      freed.next();
      copy_weights(shared, map, p, w, weight_cursor, weight_ring);
    }
    row_cursor.next(w);
  }
}

// Activation rows of a stage: no more than there are of few, since what a copy fills up with zeros takes its time too.
template <typename C>
__host__ __device__ __forceinline__ int dense_rows(const Problem& p) {
  return p.rows < C::T ? (p.rows + 7) / 8 * 8 : C::T;
}

// 128 weight rows and up to T activation rows a step, both of 64 BF16.
template <typename C>
__device__ __forceinline__ void produce_dense(const Shared<C>& shared, const CUtensorMap* weight_map, const CUtensorMap* row_map,
                                              const Problem& p, const Work& w) {
  const int steps = w.steps(), row_bytes = dense_rows<C>(p) * kDenseChunk * 2;
  Cursor cursor(w);
  Ring<C::kRowStages> ring;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(shared.rows_empty(ring.stage), ring.parity ^ 1);
    uint64_t* full = shared.rows_full(ring.stage);
    const int column = cursor.chunk * kDenseChunk, group = cursor.at.group;
    mbarrier_arrive_expect(full, C::kWeightStage + row_bytes);
    tensor_copy(shared.weights(ring.stage), weight_map, column, group * p.n + cursor.at.feature_tile * kTileFeatures, full);
    tensor_copy(shared.rows(ring.stage), row_map, group * p.k + column, cursor.at.row_tile * C::T, full);
    cursor.next(w);
    ring.next();
  }
}

}  // namespace di::linear
