// The k highest columns of each row, ties to the lower column, columns ascending: what select_topk and
// select_candidate_blocks share. -inf and NaN are never picked; -0 and +0 are equal.
//
// A row belongs to a cluster of 1, 2, 4 or 8 blocks, each with a contiguous slice that it keeps in shared memory as ordered
// integers (or reads again where it is too long). A lower bound of the k-th value, from the threads' own maxima, leaves few
// columns to count. Histograms of 2048 bins, the first over what lies between that bound and the highest value, narrow the
// k-th value's interval until it is one value or all of it is taken: one to three of them. A last pass gives every picked
// column its place: the columns above the k-th value before it, plus the equal ones before it that still fit.
// Counting is by integers, so nothing depends on the order in which threads run.
#pragma once

#include <cooperative_groups.h>

#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {

namespace select {

using Cluster = cooperative_groups::cluster_group;

constexpr int kThreads = 256, kWarps = 8, kMostBlocks = 8, kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kStep = 128;         // columns of a warp's step, four a lane
constexpr int kMostCached = 4096;  // columns a warp keeps
constexpr uint32_t kAll = 0xFFFFFFFFu;

struct Call {
  const float* scores;
  const int32_t *candidates, *visible, *count;
  int32_t* out;
  int64_t scores_stride, candidates_stride, out_stride;
  int rows, score_columns, columns, k, block;  // columns: what is chosen from; block: rows of a candidate block
  int blocks, segment;                         // of a cluster; columns of a warp, a multiple of kStep
  bool vectors, cached;                        // scores can be read 16 bytes at a time; the slice is kept
};

// Ordered as the scores are; 0 for what is never picked.
__device__ __forceinline__ uint32_t ordered(float score) {
  if (!(score > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Shared {
  uint32_t bins[kBins], sums[kBins];  // this block's columns; in the first block also the cluster's
  uint32_t maxima[kThreads];
  uint32_t bounds[kMostBlocks], tops[kMostBlocks];
  int above[kMostBlocks], equal[kMostBlocks];  // counts of each block of the cluster
  int warp_above[kWarps], warp_equal[kWarps];
  uint32_t own_bound, own_top;
  uint32_t low;  // no value above the k-th's interval is below it; with nothing wanted, what is above it is picked
  int wanted;    // how many of the columns in the interval from `low` on are still to be taken
};

struct Place {
  int row, rank, warp, lane, first;  // first: the warp's first column
};

// Calls each(step, keys) for the warp's steps, from memory: several loads are under way at a time where nothing is cut off.
template <typename Source, typename Each>
__device__ __forceinline__ void sweep_memory(const Call& c, const Place& at, Each each) {
  constexpr int kBatch = Source::kBatch;
  const int steps = c.segment / kStep, plain = min(steps, max(0, Source::plain_columns(c, at.row) - at.first) / kStep);
  int step = 0;
  for (; step + kBatch <= plain; step += kBatch) {
    typename Source::Raw raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) raw[i] = Source::fetch(c, at.row, at.first + (step + i) * kStep + 4 * at.lane);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) each(step + i, Source::keys(raw[i]));
  }
#pragma unroll 1
  for (; step < steps; ++step) {
    const int column = at.first + step * kStep + 4 * at.lane;
    each(step, make_uint4(Source::key(c, at.row, column), Source::key(c, at.row, column + 1), Source::key(c, at.row, column + 2),
                          Source::key(c, at.row, column + 3)));
  }
}

// The same from what is kept, or from memory again.
template <typename Source, typename Each>
__device__ __forceinline__ void sweep(const Call& c, const Place& at, const uint4* kept, Each each) {
  if (!c.cached) return sweep_memory<Source>(c, at, each);
  const int steps = c.segment / kStep;
  const uint4* mine = kept + at.warp * steps * 32 + at.lane;
#pragma unroll 2
  for (int step = 0; step < steps; ++step) each(step, mine[step * 32]);
}

// One more in `bin` for each active lane; equal bins of a warp are added together, twice over.
__device__ __forceinline__ void count_bin(uint32_t* bins, uint32_t bin, bool active, int lane) {
#pragma unroll
  for (int round = 0; round < 2; ++round) {
    const uint32_t waiting = __ballot_sync(kAll, active);
    if (waiting == 0) return;
    const int first = __ffs(waiting) - 1;
    const uint32_t its = __shfl_sync(kAll, bin, first);  // by every lane, active or not
    const bool same = active && bin == its;
    const uint32_t together = __ballot_sync(kAll, same);
    if (lane == first) atomicAdd(&bins[bin], __popc(together));
    active = active && !same;
  }
  if (active) atomicAdd(&bins[bin], 1);
}

// Histogram of this block's columns from `low` to `low` + `span`, 2^shift values a bin.
template <typename Source>
__device__ __forceinline__ void count_columns(const Call& c, const Place& at, const uint4* kept, uint32_t* bins, uint32_t low,
                                              uint32_t span, int shift) {
  sweep<Source>(c, at, kept, [&](int, const uint4& keys) {
    const uint32_t key[4] = {keys.x, keys.y, keys.z, keys.w};
    bool active[4], any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      active[i] = key[i] >= low && key[i] - low <= span;
      any |= active[i];
    }
    if (!__any_sync(kAll, any)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) count_bin(bins, (key[i] - low) >> shift, active[i], at.lane);
  });
}

// The highest bin at which the count from above reaches s.wanted, told to every block of the cluster: the new interval, or, where
// all of the bin is wanted, that nothing more is. By the first block's threads.
__device__ __forceinline__ void choose_bin(const Cluster& cluster, Shared& s, const Place& at, int blocks, int shift) {
  constexpr int kMine = kBins / kThreads;
  uint32_t mine[kMine], sum = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int bin = kBins - 1 - (threadIdx.x * kMine + i);
    mine[i] = s.sums[bin];
    s.sums[bin] = 0;
    sum += mine[i];
  }
  uint32_t before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, before, step);
    if (at.lane >= step) before += other;
  }
  if (at.lane == 31) s.maxima[at.warp] = before;
  __syncthreads();
  before -= sum;
  uint32_t all = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < at.warp) before += s.maxima[warp];
    all += s.maxima[warp];
  }
  const uint32_t wanted = s.wanted;
  const uint32_t low = s.low;
  __syncthreads();  // both are read before they change
  if (all < wanted && threadIdx.x == 0) {  // fewer than k can be picked at all
    for (int block = 0; block < blocks; ++block) {
      Shared* other = cluster.map_shared_rank(&s, block);
      other->low = 0, other->wanted = 0;
    }
  }
  if (wanted <= before || wanted > before + sum) return;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (wanted > before && wanted <= before + mine[i]) {
      const uint32_t start = low + (static_cast<uint32_t>(kBins - 1 - (threadIdx.x * kMine + i)) << shift), take = wanted - before;
      const bool whole = take == mine[i];
      for (int block = 0; block < blocks; ++block) {
        Shared* other = cluster.map_shared_rank(&s, block);
        other->low = whole ? start - 1 : start;
        other->wanted = whole ? 0 : take;
      }
    }
    before += mine[i];
  }
}

// Into s.low a value that at least k columns of the cluster reach, if that many can be picked: the smallest of what each block's
// threads reach often enough. Returns the highest value less that.
__device__ __forceinline__ uint32_t bound_below(const Cluster& cluster, const Call& c, Shared& s, const Place& at,
                                                uint32_t largest) {
  if (threadIdx.x == 0) s.own_top = 0;
  __syncthreads();
  const uint32_t top_of_warp = __reduce_max_sync(kAll, largest);
  if (at.lane == 0) atomicMax(&s.own_top, top_of_warp);
  const int wanted = (c.k + c.blocks - 1) / c.blocks;
  if (wanted <= kThreads) {
    s.maxima[threadIdx.x] = largest;
    __syncthreads();
    int above = 0;
    for (int i = 0; i < kThreads; i += 4) {
      const uint4 other = *reinterpret_cast<const uint4*>(&s.maxima[i]);
      const uint32_t value[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) above += value[k] > largest || (value[k] == largest && i + k < static_cast<int>(threadIdx.x));
    }
    if (above == wanted - 1) s.own_bound = largest;
  } else if (threadIdx.x == 0) {
    s.own_bound = 1;
  }
  cluster_wait();  // every block has begun
  __syncthreads();
  if (threadIdx.x < c.blocks) {
    Shared* other = cluster.map_shared_rank(&s, threadIdx.x);
    other->bounds[at.rank] = s.own_bound, other->tops[at.rank] = s.own_top;
  }
  cluster_sync();
  uint32_t bound = s.bounds[0], top = s.tops[0];
  for (int block = 1; block < c.blocks; ++block) bound = min(bound, s.bounds[block]), top = max(top, s.tops[block]);
  bound = max(bound, 1u);
  if (threadIdx.x == 0) s.low = bound;
  __syncthreads();
  return top > bound ? top - bound : 0;
}

// Writes the picked columns of this warp to their places, and -1 behind the last.
template <typename Source>
__device__ __forceinline__ void write_picked(const Cluster& cluster, const Call& c, Shared& s, const Place& at,
                                             const uint4* kept) {
  const int fit = s.wanted;
  const uint32_t kth = s.low;
  int above = 0, equal = 0;
  sweep<Source>(c, at, kept, [&](int, const uint4& key) {
    above += (key.x > kth) + (key.y > kth) + (key.z > kth) + (key.w > kth);
    equal += (key.x == kth) + (key.y == kth) + (key.z == kth) + (key.w == kth);
  });
  above = __reduce_add_sync(kAll, above), equal = __reduce_add_sync(kAll, equal);
  if (at.lane == 0) s.warp_above[at.warp] = above, s.warp_equal[at.warp] = equal;
  __syncthreads();
  above = equal = 0;
  if (threadIdx.x < c.blocks) {
    for (int warp = 0; warp < kWarps; ++warp) above += s.warp_above[warp], equal += s.warp_equal[warp];
    Shared* other = cluster.map_shared_rank(&s, threadIdx.x);
    other->above[at.rank] = above, other->equal[at.rank] = equal;
  }
  cluster_sync();
  int all_above = 0, all_equal = 0;
  above = equal = 0;
  for (int block = 0; block < c.blocks; ++block) {
    if (block == at.rank) above = all_above, equal = all_equal;
    all_above += s.above[block], all_equal += s.equal[block];
  }
  for (int warp = 0; warp < at.warp; ++warp) above += s.warp_above[warp], equal += s.warp_equal[warp];
  int32_t* out = c.out + at.row * c.out_stride;
  const int picked = all_above + min(all_equal, fit);
  for (int i = picked + at.rank * kThreads + threadIdx.x; i < c.k; i += c.blocks * kThreads) out[i] = -1;
  sweep<Source>(c, at, kept, [&](int step, const uint4& keys) {
    const uint32_t key[4] = {keys.x, keys.y, keys.z, keys.w};
    uint32_t mine = 0;  // above, and equal in the upper half
#pragma unroll
    for (int i = 0; i < 4; ++i) mine += (key[i] > kth) + ((key[i] == kth && equal < fit) << 16);
    if (!__any_sync(kAll, mine != 0)) return;
    uint32_t sum = mine;
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
      const uint32_t less = __shfl_up_sync(kAll, sum, other);
      if (at.lane >= other) sum += less;
    }
    int my_above = above + ((sum - mine) & 0xFFFF), my_equal = equal + ((sum - mine) >> 16);
    const int column = at.first + step * kStep + 4 * at.lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool higher = key[i] > kth, tied = key[i] == kth;
      if (higher || (tied && my_equal < fit)) out[my_above + min(my_equal, fit)] = Source::name(c, at.row, column + i);
      my_above += higher, my_equal += tied;
    }
    sum = __shfl_sync(kAll, sum, 31);
    above += sum & 0xFFFF, equal += sum >> 16;
  });
}

template <typename Source>
__global__ void __launch_bounds__(kThreads, 4) kernel(const __grid_constant__ Call c) {
  __shared__ __align__(16) Shared s;
  extern __shared__ uint4 kept[];
  const Cluster cluster = cooperative_groups::this_cluster();
  Place at{static_cast<int>(blockIdx.x) / c.blocks, static_cast<int>(blockIdx.x) % c.blocks, static_cast<int>(threadIdx.x) / 32,
           static_cast<int>(threadIdx.x) % 32, 0};
  if (c.count != nullptr && at.row >= *c.count) return;
  at.first = (at.rank * kWarps + at.warp) * c.segment;
  cluster_arrive();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) s.bins[bin] = s.sums[bin] = 0;
  if (threadIdx.x == 0) s.wanted = c.k;
  uint32_t largest = 0;
  sweep_memory<Source>(c, at, [&](int step, const uint4& key) {
    if (c.cached) kept[(at.warp * (c.segment / kStep) + step) * 32 + at.lane] = key;
    largest = max(largest, max(max(key.x, key.y), max(key.z, key.w)));
  });
  int width = 32 - __clz(bound_below(cluster, c, s, at, largest));  // the interval has 2^width values
  do {
    const int shift = max(width - kBinBits, 0);
    count_columns<Source>(c, at, kept, s.bins, s.low, width == 32 ? kAll : (1u << width) - 1, shift);
    __syncthreads();
    uint32_t* sums = cluster.map_shared_rank(s.sums, 0);
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
      const uint32_t count = s.bins[bin];
      if (count != 0) atomicAdd(&sums[bin], count);
      s.bins[bin] = 0;
    }
    cluster_sync();
    if (at.rank == 0) choose_bin(cluster, s, at, c.blocks, shift);
    cluster_sync();
    width = shift;
  } while (s.wanted != 0 && width > 0);
  write_picked<Source>(cluster, c, s, at, kept);
}

// Enqueues the selection; `c.columns`, `c.k` and the tensors are set, the rest is chosen here.
template <typename Source>
int launch(Call c, cudaStream_t stream, di_error* e, const char* name) {
  if (c.rows == 0 || c.k == 0) return DI_OK;
  c.blocks = c.columns <= 2048 ? 1 : c.columns <= 8192 ? 2 : c.columns <= 16384 ? 4 : 8;
  c.segment = static_cast<int>(round_up(ceil_div(c.columns, c.blocks * kWarps), kStep));
  c.cached = c.segment <= kMostCached;
  c.vectors = c.scores_stride % 4 == 0 && reinterpret_cast<uintptr_t>(c.scores) % 16 == 0;
  const int bytes = c.cached ? kWarps * c.segment * 4 : 0;
  if (allow_shared<kernel<Source>>(kWarps * kMostCached * 4) != cudaSuccess) return finish(e, name);
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = c.blocks, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.gridDim = dim3(static_cast<unsigned>(c.rows) * c.blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel<Source>, c);
  if (status != cudaSuccess) return refuse(e, DI_FAILED, "%s: %s", name, cudaGetErrorString(status));
  return finish(e, name);
}

}  // namespace select
}  // namespace di
