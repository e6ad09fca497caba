// A row of logits and the cluster that it belongs to: what `sample` with its boundaries and verify_drafts share.
//
// Each block has a contiguous part of the row in chunks of 128 columns, 16 bytes a lane: warp w has the chunks w, w + 16
// and so on. A part stays in shared memory as far as that reaches, and the rest of it comes from the L2 cache again.
#pragma once

#include <cooperative_groups.h>

#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {
namespace sampling {

using Cluster = cooperative_groups::cluster_group;

constexpr int kThreads = 512, kWarps = kThreads / 32, kMostBlocks = 8, kBinBits = 11, kBins = 1 << kBinBits, kChunk = 128;
constexpr uint32_t kAll = 0xFFFFFFFFu;

// Ordered as logits are, both zeros as one; 0 for -inf and NaN, which are never drawn.
__device__ __forceinline__ uint32_t ordered(float logit) {
  if (!(logit > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

struct Row {
  const float* logits;
  float4* kept;
  int vocabulary, first, chunks, kept_chunks;  // first: this block's first column
  int rank, blocks, warp, lane;
  bool vectors;  // 16-byte loads are possible
};

// A thread's best noisy logit, of equal ones that of the lowest column.
struct Best {
  float value = -INFINITY;
  int column = 0;
};

// The search for the highest noisy logit of a row, of equal ones that of the lowest column, in the blocks' shared memory.
struct Race {
  uint64_t best[kWarps];  // of a warp: its key above its inverted column; 0: none
  uint32_t bar;           // key of a noisy logit that was reached: what cannot come up to it needs no noise

  // What a value must exceed that is known to a hundredth and to a millionth of itself; several may read it while it rises.
  __device__ __forceinline__ float hopeless() const {
    const uint32_t reached = *const_cast<const volatile uint32_t*>(&bar);
    const float high = reached == 0 ? -INFINITY : value_of(reached);
    return high - 0.01f - 1e-6f * fabsf(high);
  }
  __device__ __forceinline__ void offer(float value, int column, Best& mine) {
    if (!(value > mine.value || (value == mine.value && column < mine.column))) return;
    mine = {value, column};
    atomicMax(&bar, ordered(value));
  }
  __device__ __forceinline__ void keep(const Row& r, const Best& mine) {
    const uint64_t packed = static_cast<uint64_t>(ordered(mine.value)) << 32 | ~static_cast<uint32_t>(mine.column);
    const uint64_t highest = largest(mine.value > -INFINITY ? packed : 0);
    if (r.lane == 0) best[r.warp] = highest;
  }
  // After a barrier of the cluster: the best of all its blocks, for every lane that asks; -1: none.
  __device__ __forceinline__ int winner(const Cluster& cluster, const Row& r) {
    uint64_t packed = 0;
    for (int block = 0; block < r.blocks; ++block) {
      const uint64_t its = cluster.map_shared_rank(best, block)[r.lane % kWarps];
      packed = packed > its ? packed : its;
    }
    packed = largest(packed);
    return packed == 0 ? -1 : static_cast<int>(~static_cast<uint32_t>(packed));
  }

 private:
  static __device__ __forceinline__ uint64_t largest(uint64_t packed) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const uint64_t other = __shfl_xor_sync(kAll, packed, step);
      packed = packed > other ? packed : other;
    }
    return packed;
  }
};

// What a warp saw of its columns.
struct Stats {
  uint32_t tops[4];         // the largest key of eight lanes each
  uint32_t least_top;       // the least of the lanes' largest keys
  uint32_t lowest, broken;  // the lowest key of a finite logit; whether there is a NaN or +inf
};

struct Choice {
  uint64_t above, inside;  // weight before the bin or key, and in it
  uint32_t at;
};

struct Candidate {
  float logit;
  int column;
};

// A candidate beside those of the other blocks.
struct Joined {
  uint32_t key;
  int column;
  uint64_t weight;
};

constexpr int kMostAbove = 480, kMostInside = 128, kMostJoined = kBins / 2;

struct Shared {
  alignas(16) uint32_t low[kBins], high[kBins];  // weights of bins in two halves; Joined[kMostJoined] once they were read
  Stats stats[kWarps];
  uint64_t scan[kWarps], totals[kWarps];
  Choice choice;
  Candidate above[kMostAbove], inside[2][kMostInside];  // of this block: above the bin of a boundary, and in those of two
  int above_count, inside_count[2];
  Race race;
};

// Row `row` of a matrix of logits, for a block of a cluster that shares it.
struct Rows {
  const float* logits;
  int64_t stride;
  int vocabulary, blocks, chunks;  // blocks of a cluster, chunks of a block
  bool vectors;

  __device__ __forceinline__ Row row(int64_t row, int rank) const {
    const int first = rank * chunks * kChunk, all = max(0, (vocabulary - first + kChunk - 1) / kChunk);
    return {logits + row * stride, nullptr, vocabulary, first, min(chunks, all), 0, rank, blocks,
            static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32, vectors};
  }
};

// More blocks share a row where it is long and all still run at once, or where it has more chunks than one may `keep`.
inline Rows share_rows(const float* logits, int64_t stride, int vocabulary, int64_t rows, int keep) {
  const int chunks = static_cast<int>(ceil_div(vocabulary, kChunk));
  int blocks = 1;
  while (blocks < kMostBlocks && chunks > 64 * blocks &&
         (2 * blocks * rows <= multiprocessors() || (blocks == 1 && chunks > keep)))
    blocks *= 2;
  const bool vectors = stride % 4 == 0 && reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  return {logits, stride, vocabulary, blocks, static_cast<int>(ceil_div(chunks, blocks)), vectors};
}

__device__ __forceinline__ float4 load(const Row& r, int column) {
  if (r.vectors && column + 4 <= r.vocabulary) return __ldg(reinterpret_cast<const float4*>(r.logits + column));
  float4 x;
  x.x = column < r.vocabulary ? __ldg(r.logits + column) : -INFINITY;
  x.y = column + 1 < r.vocabulary ? __ldg(r.logits + column + 1) : -INFINITY;
  x.z = column + 2 < r.vocabulary ? __ldg(r.logits + column + 2) : -INFINITY;
  x.w = column + 3 < r.vocabulary ? __ldg(r.logits + column + 3) : -INFINITY;
  return x;
}

__device__ __forceinline__ int column_of(const Row& r, int chunk) { return r.first + chunk * kChunk + 4 * r.lane; }

// Calls each(chunk, four logits) for the warp's chunks from memory, several on their way.
template <int kBatch, typename Each>
__device__ __forceinline__ void read_row(const Row& r, int from, Each each) {
#pragma unroll 1
  for (int start = from; start < r.chunks; start += kBatch * kWarps) {
    float4 x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (start + i * kWarps < r.chunks) x[i] = load(r, column_of(r, start + i * kWarps));
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (start + i * kWarps < r.chunks) each(start + i * kWarps, x[i]);
  }
}

// The same for a long `each`, of which the loop has one copy.
template <typename Each>
__device__ __forceinline__ void stream_row(const Row& r, Each each) {
  constexpr int kAhead = 4;
  float4 next[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (r.warp + i * kWarps < r.chunks) next[i] = load(r, column_of(r, r.warp + i * kWarps));
#pragma unroll 1
  for (int chunk = r.warp; chunk < r.chunks; chunk += kWarps) {
    const float4 x = next[0];
#pragma unroll
    for (int i = 1; i < kAhead; ++i) next[i - 1] = next[i];
    if (chunk + kAhead * kWarps < r.chunks) next[kAhead - 1] = load(r, column_of(r, chunk + kAhead * kWarps));
    each(chunk, x);
  }
}

// The warp's first chunk from `chunk` on.
__device__ __forceinline__ int first_chunk(const Row& r, int chunk) {
  return chunk + (r.warp - chunk % kWarps + kWarps) % kWarps;
}

// The same once the row was kept. Of what was not, kAhead chunks are on their way meanwhile.
template <int kAhead, typename Each>
__device__ __forceinline__ void sweep(const Row& r, Each each) {
  const int behind = first_chunk(r, r.kept_chunks);
  float4 x[kAhead + 1];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (behind + i * kWarps < r.chunks) x[i] = load(r, column_of(r, behind + i * kWarps));
#pragma unroll 2
  for (int chunk = r.warp; chunk < r.kept_chunks; chunk += kWarps) each(chunk, r.kept[chunk * 32 + r.lane]);
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (behind + i * kWarps < r.chunks) each(behind + i * kWarps, x[i]);
  read_row<2>(r, behind + kAhead * kWarps, each);
}

// Collects what Stats has of the chunks that a warp passes by.
struct Watch {
  float top = -INFINITY, lowest = INFINITY;
  bool broken = false;

  __device__ __forceinline__ void see(const float4& x) {
    broken |= !(x.x < INFINITY) | !(x.y < INFINITY) | !(x.z < INFINITY) | !(x.w < INFINITY);
    top = fmaxf(fmaxf(fmaxf(top, x.x), fmaxf(x.y, x.z)), x.w);
  }
  __device__ __forceinline__ void see_lowest(const float4& x) {
    const float all[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) lowest = fminf(lowest, all[i] > -INFINITY ? all[i] : INFINITY);
  }
  __device__ __forceinline__ void store(Stats& to, int lane) const {
    const uint32_t key = ordered(top), least = lowest < INFINITY ? ordered(lowest) : kAll;
    uint32_t of_eight = key;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) of_eight = max(of_eight, __shfl_xor_sync(kAll, of_eight, step));
    if (lane % 8 == 0) to.tops[lane / 8] = of_eight;
    const uint32_t least_top = __reduce_min_sync(kAll, key), lowest_key = __reduce_min_sync(kAll, least);
    const bool any = __any_sync(kAll, broken);
    if (lane == 0) to.least_top = least_top, to.lowest = lowest_key, to.broken = any;
  }
};

// What the whole row holds; every warp works it out, after a barrier of the cluster.
struct Whole {
  uint32_t top, least_of_eights, least_of_threads, lowest;
  bool usable;
};

__device__ __forceinline__ Whole whole_row(const Cluster& cluster, Shared& s, const Row& r) {
  Whole w = {0, kAll, kAll, kAll, true};
  for (int block = 0; block < r.blocks; ++block) {
    const Stats& its = cluster.map_shared_rank(s.stats, block)[r.lane % kWarps];
#pragma unroll
    for (int i = 0; i < 4; ++i) w.top = max(w.top, its.tops[i]), w.least_of_eights = min(w.least_of_eights, its.tops[i]);
    w.least_of_threads = min(w.least_of_threads, its.least_top), w.lowest = min(w.lowest, its.lowest);
    w.usable = w.usable && its.broken == 0;
  }
  w.top = __reduce_max_sync(kAll, w.top), w.least_of_eights = __reduce_min_sync(kAll, w.least_of_eights);
  w.least_of_threads = __reduce_min_sync(kAll, w.least_of_threads), w.lowest = __reduce_min_sync(kAll, w.lowest);
  w.usable = __all_sync(kAll, w.usable) && w.top != 0;
  return w;
}

}  // namespace sampling
}  // namespace di
