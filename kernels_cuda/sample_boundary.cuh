// Where top-k and top-p end in a row: the highest key at which the weight from above reaches a target.
//
// Weights are integers (1 for top-k, 2^40 times the exponential for top-p), so sums are exact and nothing depends on the order of
// threads or on how many blocks share a row. A histogram of bins of equal width by value below the largest logit says in which
// bin the boundary lies; a second pass lists that bin's columns and those above it. Few in the bin: the blocks join them and compare
// each with all. Many: more histograms divide the bin's keys, until a bin is one key. Few above it: later passes see the list
// alone.
#pragma once

#include "sample_row.cuh"

namespace di {
namespace sampling {

// The key at which the target is reached (0: the row does not come up to it), the weight above it and its own.
struct Boundary {
  uint32_t key;
  uint64_t above, at;
};

struct ByCount {
  static constexpr bool kMass = false;
  __device__ __forceinline__ float of(float) const { return 1.0f; }
  __device__ __forceinline__ uint64_t whole(float) const { return 1; }
};

struct ByMass {
  static constexpr bool kMass = true;
  float peak, rate;
  __device__ __forceinline__ float of(float x) const {
    float weight;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"((x - peak) * rate));
    return weight;
  }
  __device__ __forceinline__ uint64_t whole(float weight) const { return __float2ull_rn(weight * 0x1p40f); }
};

// By whom a row is searched, and what is known already.
struct Search {
  const Cluster& cluster;
  Shared& s;
  const Row& r;
  int found = 0;        // boundaries so far
  bool listed = false;  // all that can survive is in the lists of candidates
  int joined = 0;       // candidates of the last boundary's bin, if they were joined
};

__device__ __forceinline__ void add_weight(Shared& s, int bin, uint64_t weight) {
  const uint32_t low = static_cast<uint32_t>(weight), before = atomicAdd(&s.low[bin], low);
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + (before + low < low);
  if (high != 0) atomicAdd(&s.high[bin], high);
}

// The sum of `weight`, below 2^48, over the lanes of `lanes`, which all call it.
__device__ __forceinline__ uint64_t sum_lanes(uint32_t lanes, uint64_t weight) {
  const uint32_t low = __reduce_add_sync(lanes, static_cast<uint32_t>(weight) & 0xFFFFu);
  const uint32_t middle = __reduce_add_sync(lanes, static_cast<uint32_t>(weight >> 16) & 0xFFFFu);
  const uint32_t high = __reduce_add_sync(lanes, static_cast<uint32_t>(weight >> 32));
  return low + (static_cast<uint64_t>(middle) << 16) + (static_cast<uint64_t>(high) << 32);
}

__device__ __forceinline__ uint64_t sum_warp(uint64_t value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}

// Calls each(logit, column) for this block's candidates.
template <typename Each>
__device__ __forceinline__ void visit_listed(const Shared& s, Each each) {
  for (int i = threadIdx.x; i < s.above_count; i += kThreads) each(s.above[i].logit, s.above[i].column);
  for (int i = threadIdx.x; i < s.inside_count[0]; i += kThreads) each(s.inside[0][i].logit, s.inside[0][i].column);
}

// Histogram of this block's columns: bin_of(logit, column) is below 0 for what has no part, and kBins for what has only weight.
// In `totals`: the weight of all that has part, of four columns at a time or (`singly`) each for itself.
template <int kAhead, typename Bin, typename Weight>
__device__ __forceinline__ void count_row(const Search& of, bool singly, Bin bin_of, const Weight& weight) {
  Shared& s = of.s;
  const Row& r = of.r;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) s.low[bin] = s.high[bin] = 0;
  __syncthreads();
  uint64_t total = 0;
  const auto count_one = [&](float x, int bin) {
    if (bin < 0) return;
    const uint64_t whole = weight.whole(weight.of(x));
    total += whole;
    if (bin < kBins) add_weight(s, bin, whole);
  };
  if (of.listed) {
    visit_listed(s, [&](float x, int column) { count_one(x, bin_of(x, column)); });
  } else {
    sweep<kAhead>(r, [&](int chunk, const float4& x) {
      const int column = column_of(r, chunk);
      const int bins[4] = {bin_of(x.x, column), bin_of(x.y, column + 1), bin_of(x.z, column + 2), bin_of(x.w, column + 3)};
      const float all[4] = {x.x, x.y, x.z, x.w};
      if constexpr (Weight::kMass) {
        if (!singly) {
          float mass[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) mass[i] = bins[i] < 0 ? 0.0f : weight.of(all[i]);
          total += weight.whole((mass[0] + mass[1]) + (mass[2] + mass[3]));
        }
      }
      const int last = singly ? kBins : kBins - 1;  // of the bins whose columns count each for itself
      const auto counts = [&](int bin) { return bin >= 0 && bin <= last; };
      if (!__any_sync(kAll, counts(bins[0]) || counts(bins[1]) || counts(bins[2]) || counts(bins[3]))) return;
      if (__all_sync(kAll, bins[0] == bins[1] && bins[0] == bins[2] && bins[0] == bins[3])) {
        const uint32_t alike = __match_any_sync(kAll, bins[0]);  // in a row with few values they would wait for each other
        if (!counts(bins[0])) return;
        const uint64_t sum = (weight.whole(weight.of(x.x)) + weight.whole(weight.of(x.y))) +
                             (weight.whole(weight.of(x.z)) + weight.whole(weight.of(x.w)));
        if (singly) total += sum;
        const uint64_t together = sum_lanes(alike, sum);
        if (bins[0] < kBins && r.lane == __ffs(alike) - 1) add_weight(s, bins[0], together);
        return;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!counts(bins[i])) continue;
        const uint64_t whole = weight.whole(weight.of(all[i]));
        if (singly) total += whole;
        if (bins[i] < kBins) add_weight(s, bins[i], whole);
      }
    });
  }
  __syncwarp();
  if constexpr (Weight::kMass) {
    total = sum_warp(total);
    if (r.lane == 0) s.totals[r.warp] = total;
  }
}

// Exclusive sums over the threads of the block, and the whole in `all`.
__device__ __forceinline__ uint64_t scan(Shared& s, const Row& r, uint64_t value, uint64_t& all) {
  const auto up = [&](uint64_t v) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t other = __shfl_up_sync(kAll, v, step);
      if (r.lane >= step) v += other;
    }
    return v;
  };
  const uint64_t mine = up(value);
  if (r.lane == 31) s.scan[r.warp] = mine;
  __syncthreads();
  const uint64_t warps = up(r.lane < kWarps ? s.scan[r.lane] : 0);
  all = __shfl_sync(kAll, warps, 31);
  const uint64_t before = __shfl_sync(kAll, warps, max(r.warp - 1, 0));
  return mine - value + (r.warp > 0 ? before : 0);
}

// The first bin at which the weight from bin 0 on reaches target(totals of the row), or false. counted: the weight of all bins.
template <typename Target>
__device__ __forceinline__ bool choose_bin(const Search& of, Target target, Choice& choice, uint64_t& counted) {
  constexpr int kMine = kBins / kThreads;
  static_assert(kMine == 4, "four bins are read at once");
  Shared& s = of.s;
  const Row& r = of.r;
  cluster_sync();
  const int first = kMine * threadIdx.x;
  uint64_t mine[kMine] = {}, total = 0;
#pragma unroll 2
  for (int block = 0; block < r.blocks; ++block) {
    const Shared* its = of.cluster.map_shared_rank(&s, block);
    const uint4 low = *reinterpret_cast<const uint4*>(its->low + first);
    const uint4 high = *reinterpret_cast<const uint4*>(its->high + first);
    mine[0] += static_cast<uint64_t>(high.x) << 32 | low.x, mine[1] += static_cast<uint64_t>(high.y) << 32 | low.y;
    mine[2] += static_cast<uint64_t>(high.z) << 32 | low.z, mine[3] += static_cast<uint64_t>(high.w) << 32 | low.w;
    total += r.lane < kWarps ? its->totals[r.lane] : 0;
  }
  const uint64_t wanted = target(sum_warp(total));
  uint64_t before = scan(s, r, (mine[0] + mine[1]) + (mine[2] + mine[3]), counted);
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (wanted > before && wanted <= before + mine[i]) s.choice = {before, mine[i], static_cast<uint32_t>(first + i)};
    before += mine[i];
  }
  __syncthreads();
  choice = s.choice;
  return wanted <= counted;
}

// The lowest key for which reached(key) holds, which then holds for all above it; every lane gets it. 32 are tried at a time.
template <typename Reached>
__device__ __forceinline__ uint32_t first_key(int lane, Reached reached) {
  uint32_t base = 0;
#pragma unroll 1
  for (int shift = 27; shift > -5; shift -= 5) {
    const int by = max(shift, 0);
    const uint32_t there = __ballot_sync(kAll, reached(base + (static_cast<uint32_t>(lane) << by))) & (shift < 0 ? 0xFu : kAll);
    const int below = there == 0 ? (shift < 0 ? 4 : 32) : __ffs(there) - 1;
    base += static_cast<uint32_t>(max(below - 1, 0)) << by;
  }
  return base + 1;
}

// Finds the boundary among the keys low .. high by histograms. What is higher weighs `above`, which is less than the target.
// key_of(logit, column) gives 0 to what has no part in it.
template <typename Key, typename Weight>
__device__ __forceinline__ Boundary narrow(const Search& of, uint32_t low, uint32_t high, uint64_t above, uint64_t target,
                                           Key key_of, const Weight& weight) {
#pragma unroll 1
  for (;;) {
    cluster_sync();  // every block has read the histograms
    const uint32_t span = high - low;
    const int shift = max(32 - __clz(span) - kBinBits, 0);
    const auto bin_of = [&](float x, int column) {
      const uint32_t below = high - key_of(x, column);
      return below <= span ? static_cast<int>(below >> shift) : -1;
    };
    count_row<0>(of, true, bin_of, weight);
    Choice choice;
    uint64_t counted;
    const uint64_t wanted = target - above;
    if (!choose_bin(of, [&](uint64_t) { return wanted; }, choice, counted)) return {0, above, 0};
    above += choice.above, high -= choice.at << shift;
    if (shift == 0) return {high, above, choice.inside};
    low = max(low, high - ((1u << shift) - 1));
  }
}

// Lists this block's columns of the keys low .. high and, for the first boundary, those above. Then every block joins all blocks'
// columns of low .. high; false if they are too many.
template <typename Weight>
__device__ __forceinline__ bool join_candidates(Search& of, uint32_t low, uint32_t high, const Weight& weight) {
  Shared& s = of.s;
  const Row& r = of.r;
  const int list = of.found;
  const float least = value_of(low), most = value_of(high);
  const auto take = [&](float x, int column) {
    if (!(x >= least)) return;
    if (x > most) {
      if (of.listed || list > 0) return;
      const int place = atomicAdd(&s.above_count, 1);
      if (place < kMostAbove) s.above[place] = {x, column};
    } else {
      const int place = atomicAdd(&s.inside_count[list], 1);
      if (place < kMostInside) s.inside[list][place] = {x, column};
    }
  };
  if (of.listed) {
    visit_listed(s, take);
  } else {
    sweep<6>(r, [&](int chunk, const float4& x) {
      if (!(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)) >= least)) return;
      const int column = column_of(r, chunk);
      take(x.x, column), take(x.y, column + 1), take(x.z, column + 2), take(x.w, column + 3);
    });
    __syncwarp();
  }
  cluster_sync();
  int all = 0;
  bool fit = true, complete = true;
  for (int block = 0; block < r.blocks; ++block) {
    const Shared* its = of.cluster.map_shared_rank(&s, block);
    const int inside = its->inside_count[list];
    fit = fit && inside <= kMostInside && all + inside <= kMostJoined;
    complete = complete && its->above_count <= kMostAbove && inside <= kMostInside;
    if (fit) {
      Joined* to = reinterpret_cast<Joined*>(s.low) + all;
      for (int i = threadIdx.x; i < inside; i += kThreads) {
        const Candidate one = its->inside[list][i];
        to[i] = {ordered(one.logit), one.column, weight.whole(weight.of(one.logit))};
      }
    }
    all += inside;
  }
  if (list == 0) of.listed = complete;
  of.joined = fit ? all : 0;
  __syncthreads();
  return fit;
}

// The boundary among what was joined, each compared with all.
__device__ __forceinline__ Boundary compare_joined(const Search& of, uint64_t above, uint64_t target) {
  Shared& s = of.s;
  const Joined* joined = reinterpret_cast<const Joined*>(s.low);
  for (int i = threadIdx.x; i < of.joined; i += kThreads) {
    const Joined mine = joined[i];
    uint64_t before = above, equal = 0;
    bool first = true;
#pragma unroll 4
    for (int j = 0; j < of.joined; ++j) {
      const Joined other = joined[j];
      before += other.key > mine.key ? other.weight : 0;
      equal += other.key == mine.key ? other.weight : 0;
      first = first && !(other.key == mine.key && j < i);
    }
    if (first && before < target && target <= before + equal) s.choice = {before, equal, mine.key};
  }
  __syncthreads();
  const Choice choice = s.choice;
  return {choice.at, choice.above, choice.inside};
}

// The column of the number `ties` of those whose key is the boundary's, from the left.
__device__ __forceinline__ int column_of_tie(const Search& of, uint32_t key, uint64_t ties) {
  Shared& s = of.s;
  __syncthreads();  // all have read the choice
  if (of.joined == 0) {
    const auto key_of = [&](float x, int column) { return ordered(x) == key ? ~static_cast<uint32_t>(column) : 0; };
    return static_cast<int>(~narrow(of, ~static_cast<uint32_t>(of.r.vocabulary - 1), kAll, 0, ties, key_of, ByCount{}).key);
  }
  const Joined* joined = reinterpret_cast<const Joined*>(s.low);
  for (int i = threadIdx.x; i < of.joined; i += kThreads) {
    if (joined[i].key != key) continue;
    uint64_t before = 0;
    for (int j = 0; j < of.joined; ++j) before += joined[j].key == key && joined[j].column < joined[i].column;
    if (before + 1 == ties) s.choice.at = joined[i].column;
  }
  __syncthreads();
  return static_cast<int>(s.choice.at);
}

// The boundary among logits whose keys are above `floor`: bins for the `width` below the largest logit, target(weight of all) to
// reach.
template <typename Weight, typename Target>
__device__ __forceinline__ Boundary find_boundary(Search& of, uint32_t floor, float peak, float width, const Weight& weight,
                                                  Target target) {
  constexpr uint32_t kLeastFinite = 0x00800000u;
  const float inverse = static_cast<float>(kBins - 2) / width;
  const auto place = [&](float x) { return min(static_cast<int>((peak - x) * inverse), kBins - 1); };
  const float least = floor == 0 ? -INFINITY : value_of(floor);
  const auto bin_of = [&](float x, int) {
    const int bin = place(x);
    return x > least ? (bin == kBins - 1 ? kBins : bin) : -1;
  };
  of.joined = 0;
  if (of.found > 0) cluster_sync();  // every block has read the histograms
  count_row<6>(of, floor != 0, bin_of, weight);
  Choice choice;
  uint64_t wanted = 0, counted;
  const bool inside = choose_bin(of, [&](uint64_t all) { return wanted = target(all); }, choice, counted);
  const int bin = inside ? static_cast<int>(choice.at) : kBins - 1;
  const uint32_t low = first_key(of.r.lane, [&](uint32_t key) { return key >= kLeastFinite && place(value_of(key)) <= bin; });
  const uint32_t next = first_key(of.r.lane, [&](uint32_t key) { return key >= kLeastFinite && place(value_of(key)) < bin; });
  const uint32_t high = bin == 0 ? ordered(peak) : next - 1, lowest = max(low, floor + 1);
  const uint64_t above = inside ? choice.above : counted;
  Boundary found = {0, above, 0};
  if (inside && join_candidates(of, lowest, high, weight)) {
    found = compare_joined(of, above, wanted);
  } else if (high >= lowest) {
    found = narrow(of, lowest, high, above, wanted, [](float x, int) { return ordered(x); }, weight);
  }
  ++of.found;
  return found;
}

}  // namespace sampling
}  // namespace di
