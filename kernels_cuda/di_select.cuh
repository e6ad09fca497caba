// The k highest columns of each row, ties to the lower column, columns ascending: what select_topk and
// select_candidate_blocks share. -inf and NaN are never picked; -0 and +0 are equal.
//
// A row belongs to a cluster of 1, 2, 4 or 8 blocks, each with a contiguous slice that it keeps in shared memory as ordered
// integers (or reads again where it is too long), each thread with a run of it. A lower bound of the k-th value, from maxima of
// parts, leaves few columns to count. Histograms of 2048 bins, the first over what lies between that bound and the highest value,
// narrow the k-th value's interval until it is one value or all of it is taken: one to three of them. Every block reads all
// blocks' bins and works out the same, also what is picked before its own slice, so a histogram costs one barrier of the
// cluster. A last pass gives every picked column its place: the columns above the k-th value before it, plus the equal ones
// before it that still fit. Counting is by integers, so nothing depends on the order in which threads run.
#pragma once

#include <cooperative_groups.h>

#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {

namespace select {

using Cluster = cooperative_groups::cluster_group;

constexpr int kThreads = 1024, kFewThreads = 256;  // of a block; of one that has a short row to itself, several to a multiprocessor
constexpr int kMostBlocks = 8, kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kMostCached = 8;  // fours of columns a thread keeps
constexpr uint32_t kAll = 0xFFFFFFFFu;

struct Call {
  const float* scores;
  const int32_t *candidates, *visible, *count;
  int32_t* out;
  int64_t scores_stride, candidates_stride, out_stride;
  int rows, score_columns, columns, k, block;  // columns: what is chosen from; block: rows of a candidate block
  int blocks, fours;                           // of a cluster; a thread's columns over four
  bool vectors, cached;                        // scores can be read 16 bytes at a time; the slice is kept
};

// Ordered as the scores are; 0 for what is never picked.
__device__ __forceinline__ uint32_t ordered(float score) {
  if (!(score > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Choice {
  uint32_t bin;
  int take, inside;                 // columns of the bin still wanted, and all of them
  int lower_above, lower_inside;    // columns of the blocks before this one: in the bins above, in the bin
};

struct Shared {
  alignas(16) uint32_t bins[2][kBins];  // of this block's columns, read by the cluster; used in turn
  uint32_t top, least;                  // of the threads' maxima
  Choice choice;
  uint2 scan[32];  // of the warps
};

struct Place {
  int row, rank, warp, lane;
};

template <int threads>
__device__ __forceinline__ int first_column(const Call& c, const Place& at) {
  return (at.rank * threads + static_cast<int>(threadIdx.x)) * 4 * c.fours;
}

// Where the fours of thread `thread` are kept, an odd number apart so that neighbours read from different banks.
__device__ __forceinline__ int kept_at(const Call& c, int thread) { return thread * (c.fours | 1); }

// Four keys from memory, from `column` on.
template <typename Source>
__device__ __forceinline__ uint4 keys_at(const Call& c, int row, int column) {
  return make_uint4(Source::key(c, row, column), Source::key(c, row, column + 1), Source::key(c, row, column + 2),
                    Source::key(c, row, column + 3));
}

// Reads the warp's columns, the lanes side by side and several loads under way, and keeps them. Returns a maximum for each
// thread.
template <typename Source, int threads>
__device__ __forceinline__ uint32_t load(const Call& c, const Place& at, uint4* kept) {
  constexpr int kBatch = Source::kBatch;
  const int first = (at.rank * threads + 32 * at.warp) * 4 * c.fours;
  const int plain = min(c.fours, max(0, Source::plain_columns(c, at.row) - first) / 128);
  const uint32_t inverse = 65536 / c.fours + 1;  // exact for the fours of a warp that are kept
  uint32_t largest = 0;
  const auto place = [&](int four) {
    const int thread = static_cast<int>(four * inverse >> 16);
    return kept + kept_at(c, 32 * at.warp + thread) + four - thread * c.fours;
  };
  const auto take_four = [&](int four, const uint4& key) {
    if (c.cached) *place(four) = key;
    largest = max(largest, max(max(key.x, key.y), max(key.z, key.w)));
  };
  const auto take_one = [&](int four, int part, uint32_t key) {
    if (c.cached) reinterpret_cast<uint32_t*>(place(four))[part] = key;
    largest = max(largest, key);
  };
  for (int base = 0; base < plain; base += kBatch) {
    typename Source::Raw raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (base + i < plain) raw[i] = Source::fetch(c, at.row, first + (base + i) * 128, at.lane);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (base + i < plain) Source::give(raw[i], 32 * (base + i), at.lane, take_four, take_one);
  }
#pragma unroll 1
  for (int step = plain; step < c.fours; ++step)
    take_four(32 * step + at.lane, keys_at<Source>(c, at.row, first + step * 128 + 4 * at.lane));
  return largest;
}

// Calls each(four, keys) for the thread's own run, in order, from what is kept or from memory again.
template <typename Source, int threads, typename Each>
__device__ __forceinline__ void sweep(const Call& c, const Place& at, const uint4* kept, Each each) {
  const uint4* mine = kept + kept_at(c, threadIdx.x);
#pragma unroll 1
  for (int four = 0; four < c.fours; ++four)
    each(four, c.cached ? mine[four] : keys_at<Source>(c, at.row, first_column<threads>(c, at) + 4 * four));
}

// Which columns of the thread's run reach the bound, where they are kept, and whether the warp has few: later passes look at no
// others.
struct Marks {
  uint32_t bits;
  bool few;
};

// Calls each(column of the run, key) for the marked columns, in order.
template <typename Each>
__device__ __forceinline__ void visit_marked(const Call& c, const uint4* kept, const Marks& marks, Each each) {
  const uint32_t* mine = reinterpret_cast<const uint32_t*>(kept + kept_at(c, threadIdx.x));
  for (uint32_t bits = marks.bits; bits != 0; bits &= bits - 1) each(__ffs(bits) - 1, mine[__ffs(bits) - 1]);
}

// Exclusive sums over the threads of the block, and the whole in `all`.
template <int threads>
__device__ __forceinline__ uint2 scan(Shared& s, const Place& at, uint2 value, uint2& all) {
  const auto up = [&](uint2 v) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t x = __shfl_up_sync(kAll, v.x, step), y = __shfl_up_sync(kAll, v.y, step);
      if (at.lane >= step) v.x += x, v.y += y;
    }
    return v;
  };
  const uint2 mine = up(value);
  if (at.lane == 31) s.scan[at.warp] = mine;
  __syncthreads();
  const uint2 warps = up(at.lane < threads / 32 ? s.scan[at.lane] : make_uint2(0, 0));
  all = make_uint2(__shfl_sync(kAll, warps.x, 31), __shfl_sync(kAll, warps.y, 31));
  const uint32_t x = __shfl_sync(kAll, warps.x, max(at.warp - 1, 0)), y = __shfl_sync(kAll, warps.y, max(at.warp - 1, 0));
  return make_uint2(mine.x - value.x + (at.warp > 0 ? x : 0), mine.y - value.y + (at.warp > 0 ? y : 0));
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

// Which columns of the thread's run, as it is kept, are from `low` (above 0) to `low` + `span`.
__device__ __forceinline__ Marks mark_columns(const Call& c, const uint4* kept, uint32_t low, uint32_t span) {
  constexpr int kFewMarked = 8, kAtOnce = 4;  // columns of a thread; fours
  const uint4* mine = kept + kept_at(c, threadIdx.x);
  uint32_t bits = 0;
  for (int first = 0; first < c.fours; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint4 keys = first + i < c.fours ? mine[first + i] : make_uint4(0, 0, 0, 0);
      const uint32_t active = (keys.x - low <= span ? 1 : 0) | (keys.y - low <= span ? 2 : 0) | (keys.z - low <= span ? 4 : 0) |
                              (keys.w - low <= span ? 8 : 0);
      bits |= active << 4 * (first + i);
    }
  }
  return {bits, __reduce_max_sync(kAll, __popc(bits)) <= kFewMarked};
}

// Histogram of this block's columns from `low` to `low` + `span`, 2^shift values a bin, where they are many.
template <typename Source, int threads>
__device__ __forceinline__ void count_many(const Call& c, const Place& at, const uint4* kept, uint32_t* bins, uint32_t low,
                                           uint32_t span, int shift) {
  constexpr int kFew = 16;  // of a warp's 128 columns: then equal ones are not worth looking for
  uint32_t equal = 0;
  sweep<Source, threads>(c, at, kept, [&](int, const uint4& keys) {
    const uint32_t above[4] = {keys.x - low, keys.y - low, keys.z - low, keys.w - low};
    uint32_t active = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) active += above[i] <= span;
    if (span == 0) {
      equal += active;
      return;
    }
    const int all = __reduce_add_sync(kAll, active);
    if (all == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (all > kFew) {
        count_bin(bins, above[i] >> shift, above[i] <= span, at.lane);
      } else if (above[i] <= span) {
        atomicAdd(&bins[above[i] >> shift], 1);
      }
    }
  });
  equal = __reduce_add_sync(kAll, equal);
  if (at.lane == 0 && equal != 0) atomicAdd(&bins[0], equal);
}

// The same histogram, however many they are. Returns which they are.
template <typename Source, int threads>
__device__ __forceinline__ Marks count_columns(const Call& c, const Place& at, const uint4* kept, uint32_t* bins, uint32_t low,
                                               uint32_t span, int shift) {
  const Marks marks = c.cached ? mark_columns(c, kept, low, span) : Marks{0, false};
  if (marks.few) {
    visit_marked(c, kept, marks, [&](int, uint32_t key) { atomicAdd(&bins[(key - low) >> shift], 1); });
    __syncwarp();
  } else {
    count_many<Source, threads>(c, at, kept, bins, low, span, shift);
  }
  return marks;
}

// Finds the highest bin of the cluster's histograms at which the count from above reaches `wanted`. Returns how many columns were
// counted, and how many of them by the blocks before this one; there is a choice if the former is enough.
template <int threads>
__device__ __forceinline__ uint2 choose_bin(const Cluster& cluster, const Call& c, Shared& s, const Place& at, uint32_t* bins,
                                            uint32_t wanted, Choice& choice) {
  constexpr int kMine = kBins / threads, kReads = 4;
  const int first = kBins - kMine * (threadIdx.x + 1);
  uint32_t mine[kMine] = {}, lower[kMine] = {};
#pragma unroll kReads
  for (int block = 0; block < kMostBlocks; ++block) {
    if (block < c.blocks) {
      const uint2* from = reinterpret_cast<const uint2*>(cluster.map_shared_rank(bins, block) + first);
#pragma unroll
      for (int i = 0; i < kMine; i += 2) {
        const uint2 two = from[i / 2];
        mine[i] += two.x, mine[i + 1] += two.y;
        if (block < at.rank) lower[i] += two.x, lower[i + 1] += two.y;
      }
    }
  }
  uint2 sum = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < kMine; ++i) sum.x += mine[i], sum.y += lower[i];
  uint2 all, before = scan<threads>(s, at, sum, all);
  if (wanted > before.x && wanted <= before.x + sum.x) {
#pragma unroll
    for (int i = kMine - 1; i >= 0; --i) {
      if (wanted > before.x && wanted <= before.x + mine[i]) {
        s.choice = {static_cast<uint32_t>(first + i), static_cast<int>(wanted - before.x), static_cast<int>(mine[i]),
                    static_cast<int>(before.y), static_cast<int>(lower[i])};
      }
      before.x += mine[i], before.y += lower[i];
    }
  }
  __syncthreads();
  choice = s.choice;
  return all;
}

// A value that at least k columns of the cluster reach, if that many can be picked, and the highest value less that in `span`.
template <int threads>
__device__ __forceinline__ uint32_t bound_below(const Cluster& cluster, const Call& c, Shared& s, const Place& at,
                                                uint32_t largest, uint32_t& span) {
  constexpr int kShift = 32 - kBinBits;
  const uint32_t top = __reduce_max_sync(kAll, largest), least = __reduce_min_sync(kAll, largest);
  if (at.lane == 0) atomicMax(&s.top, top), atomicMin(&s.least, least);
  count_bin(s.bins[0], largest >> kShift, largest != 0, at.lane);
  cluster_sync();
  uint32_t highest = s.top, lowest = s.least;
  for (int block = 0; block < c.blocks; ++block) {
    const Shared* other = cluster.map_shared_rank(&s, block);
    highest = max(highest, other->top), lowest = min(lowest, other->least);
  }
  Choice choice;
  const bool enough = choose_bin<threads>(cluster, c, s, at, s.bins[0], c.k, choice).x >= c.k;
  const uint32_t bound = enough ? max(max(choice.bin << kShift, lowest), 1u) : 1u;
  span = highest > bound ? highest - bound : 0;
  return bound;
}

// What is picked: columns above `kth`, and the first `fit` that equal it. `above`, `equal`: how many such lie before this block.
struct Picked {
  uint32_t kth;
  int fit, above, equal, all;
};

template <typename Source, int threads>
__device__ __forceinline__ Picked find_kth(const Cluster& cluster, const Call& c, Shared& s, const Place& at, const uint4* kept,
                                           uint32_t largest, Marks& marks) {
  uint32_t span;
  Picked p{bound_below<threads>(cluster, c, s, at, largest, span), c.k, 0, 0, c.k};
  int width = 32 - __clz(span);
  bool first = true;
  for (int turn = 1;; turn ^= 1) {
    const int shift = max(width - kBinBits, 0);
    if (!first && marks.few) {
      visit_marked(c, kept, marks, [&](int, uint32_t key) {
        if (key - p.kth <= span) atomicAdd(&s.bins[turn][(key - p.kth) >> shift], 1);
      });
      __syncwarp();
    } else {
      const Marks now = count_columns<Source, threads>(c, at, kept, s.bins[turn], p.kth, span, shift);
      if (first) marks = now;
    }
    first = false;
    cluster_sync();
    for (int bin = threadIdx.x; bin < kBins; bin += threads) s.bins[turn ^ 1][bin] = 0;  // every block has read them
    Choice choice;
    const uint2 counted = choose_bin<threads>(cluster, c, s, at, s.bins[turn], p.fit, choice);
    if (counted.x < p.fit) return {0, 0, static_cast<int>(counted.y), 0, static_cast<int>(counted.x)};
    p.kth += choice.bin << shift, p.fit = choice.take, p.above += choice.lower_above, p.equal = choice.lower_inside;
    if (choice.take == choice.inside) return {p.kth - 1, 0, p.above + p.equal, 0, c.k};
    if (shift == 0) return p;
    width = shift, span = (1u << shift) - 1;
  }
}

// Writes the picked columns of this warp to their places, and -1 behind the last.
template <typename Source, int threads>
__device__ __forceinline__ void write_picked(const Call& c, Shared& s, const Place& at, const uint4* kept, const Picked& p,
                                             const Marks& marks) {
  const int fit = p.fit;
  const uint32_t kth = p.kth;
  uint2 mine = make_uint2(0, 0), all;
  if (marks.few) {
    visit_marked(c, kept, marks, [&](int, uint32_t key) { mine.x += key > kth, mine.y += key == kth; });
  } else {
    sweep<Source, threads>(c, at, kept, [&](int, const uint4& key) {
      mine.x += (key.x > kth) + (key.y > kth) + (key.z > kth) + (key.w > kth);
      mine.y += (key.x == kth) + (key.y == kth) + (key.z == kth) + (key.w == kth);
    });
  }
  __syncwarp();
  const uint2 before = scan<threads>(s, at, mine, all);
  int32_t* out = c.out + at.row * c.out_stride;
  for (int i = p.all + at.rank * threads + threadIdx.x; i < c.k; i += c.blocks * threads) out[i] = -1;
  int above = p.above + static_cast<int>(before.x), equal = p.equal + static_cast<int>(before.y);
  if (mine.x == 0 && (mine.y == 0 || equal >= fit)) return;
  const auto take = [&](int column, uint32_t key) {
    const bool higher = key > kth, tied = key == kth;
    if (higher || (tied && equal < fit)) out[above + min(equal, fit)] = Source::name(c, at.row, first_column<threads>(c, at) + column);
    above += higher, equal += tied;
  };
  if (marks.few) {
    visit_marked(c, kept, marks, take);
  } else {
    sweep<Source, threads>(c, at, kept, [&](int four, const uint4& keys) {
      take(4 * four, keys.x), take(4 * four + 1, keys.y), take(4 * four + 2, keys.z), take(4 * four + 3, keys.w);
    });
  }
}

template <typename Source, int threads>
__global__ void __launch_bounds__(threads, kThreads / threads) kernel(const __grid_constant__ Call c) {
  __shared__ Shared s;
  extern __shared__ uint4 kept[];
  const Cluster cluster = cooperative_groups::this_cluster();
  Place at{static_cast<int>(blockIdx.x) / c.blocks, static_cast<int>(blockIdx.x) % c.blocks, static_cast<int>(threadIdx.x) / 32,
           static_cast<int>(threadIdx.x) % 32};
  for (int bin = threadIdx.x; bin < 2 * kBins; bin += threads) s.bins[0][bin] = 0;
  if (threadIdx.x == 0) s.top = 0, s.least = kAll;
  __syncthreads();
  start_dependents();
  wait_for_producer();
  if (c.count != nullptr && at.row >= *c.count) return;
  const uint32_t largest = load<Source, threads>(c, at, kept);
  Marks marks;
  const Picked picked = find_kth<Source, threads>(cluster, c, s, at, kept, largest, marks);
  cluster_arrive();  // others may still read this block's bins
  write_picked<Source, threads>(c, s, at, kept, picked, marks);
  __syncwarp();
  cluster_wait();
}

template <typename Source, int threads>
int launch(Call c, cudaStream_t stream, di_error* e, const char* name) {
  c.fours = static_cast<int>(ceil_div(c.columns, 4 * threads * c.blocks));
  c.cached = c.fours <= kMostCached;
  c.vectors = c.scores_stride % 4 == 0 && reinterpret_cast<uintptr_t>(c.scores) % 16 == 0;
  const int bytes = c.cached ? 16 * threads * (c.fours | 1) : 0;
  if (allow_shared<kernel<Source, threads>>(16 * threads * (kMostCached | 1)) != cudaSuccess) return finish(e, name);
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = c.blocks, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // the kernel waits for the one before it
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<unsigned>(c.rows) * c.blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel<Source, threads>, c);
  if (status != cudaSuccess) return refuse(e, DI_FAILED, "%s: %s", name, cudaGetErrorString(status));
  return finish(e, name);
}

// Enqueues the selection; `c.columns`, `c.k` and the tensors are set, the rest is chosen here.
template <typename Source>
int enqueue(Call c, cudaStream_t stream, di_error* e, const char* name) {
  if (c.rows == 0 || c.k == 0) return DI_OK;
  c.blocks = 1;
  if (c.columns <= 4 * kMostCached * kFewThreads && c.rows >= 2 * multiprocessors())  // more rows than large blocks run at once
    return launch<Source, kFewThreads>(c, stream, e, name);
  while (c.blocks < kMostBlocks && (c.columns > c.blocks * 4 * kMostCached * kThreads ||
                                    (c.columns > 8192 * c.blocks && 2LL * c.blocks * c.rows <= multiprocessors())))
    c.blocks *= 2;  // where slices are long, or short ones still run all at once
  return launch<Source, kThreads>(c, stream, e, name);
}

}  // namespace select
}  // namespace di
