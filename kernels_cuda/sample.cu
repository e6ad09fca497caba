// sample: a cluster of blocks per row, as many as leave no multiprocessor idle.
//
// Without top-k, top-p and min-p a row is read once: a greedy row for its largest logit, another for its largest noisy one. With
// them the row stays in shared memory (what does not fit comes from the L2 cache) while the boundaries are found
// (sample_boundary.cuh), and noise is drawn for what survives.
//
// Noise costs Philox for every four tokens, but its two logarithms only where a bound of one approximate logarithm says that the
// token may win: whatever is skipped could not have. So threads share how high they have come, and no order decides a result.
#include <algorithm>

#include "di_noise.cuh"
#include "sample_boundary.cuh"

namespace di {
namespace sampling {
namespace {

constexpr int kKeptAt = (sizeof(Shared) + 15) / 16 * 16, kSharedBytes = 227 * 1024;
constexpr int kMostKept = (kSharedBytes - kKeptAt) / (16 * 32);  // chunks

struct Call {
  Rows rows;
  const float *temperature, *top_p, *min_p;
  const int *top_k, *positions;
  const int64_t* seeds;
  int* tokens;
  uint32_t purpose;
  int kept_chunks;
};

// What survives: logits above `floor`, those equal to it up to column `last`, and of these what comes to `least` when divided.
struct Survivors {
  float floor;
  int last;
  float least;
};

// Draws for one token after the other.
struct Draw {
  Noise noise;
  float temperature, inverse;
  Survivors keep;

  __device__ __forceinline__ bool survives(float x, int column) const {
    return x > keep.floor || (x == keep.floor && column <= keep.last);
  }
  __device__ __forceinline__ void weigh(Race& race, float x, uint32_t word, int column, Best& best) const {
    const float scaled = __fdiv_rn(x, temperature);
    if (scaled >= keep.least) race.offer(__fadd_rn(scaled, gumbel(word)), column, best);
  }
  __device__ __forceinline__ void see_one(Race& race, float x, int column, Best& best) const {
    if (survives(x, column)) weigh(race, x, part_of(noise.words(column / 4), column % 4), column, best);
  }
  // Four columns; kFiltered: some may not survive.
  template <bool kFiltered>
  __device__ __forceinline__ void see(Race& race, int column, const float4& x, Best& best) const {
    const float all[4] = {x.x, x.y, x.z, x.w};
    uint32_t live = 15;
    if constexpr (kFiltered) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!survives(all[i], column + i)) live &= ~(1u << i);
      if (!__any_sync(kAll, live != 0)) return;
    }
    const uint4 words = noise.words(column / 4);
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
    const float hopeless = race.hopeless();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (__fmaf_rn(all[i], inverse, gumbel_bound(each[i])) <= hopeless) live &= ~(1u << i);
    while (live != 0) {
      const int i = __ffs(live) - 1;
      live &= live - 1;
      weigh(race, part_of(x, i), part_of(words, i), column + i, best);
    }
    __syncwarp();
  }
};

// One pass: the largest logit of a greedy row, the largest noisy one of another.
__device__ __forceinline__ void draw_from_all(Shared& s, const Row& r, const Draw& draw, bool greedy) {
  Watch watch;
  Best best;
  if (greedy) {
    read_row<6>(r, r.warp, [&](int chunk, const float4& x) {
      const int column = column_of(r, chunk);
      watch.see(x);
      if (x.x > best.value) best = {x.x, column};
      if (x.y > best.value) best = {x.y, column + 1};
      if (x.z > best.value) best = {x.z, column + 2};
      if (x.w > best.value) best = {x.w, column + 3};
    });
  } else {
    read_row<6>(r, r.warp, [&](int chunk, const float4& x) {
      watch.see(x);
      draw.see<false>(s.race, column_of(r, chunk), x, best);
    });
  }
  watch.store(s.stats[r.warp], r.lane);
  s.race.keep(r, best);
}

// At least this much of the mass lies with the largest logits of eight lanes each, in units of the largest logit's.
__device__ __forceinline__ float least_mass(const Search& of, const ByMass& weight) {
  float mass = 0.0f;
  for (int block = 0; block < of.r.blocks; ++block) {
    const Stats& its = of.cluster.map_shared_rank(of.s.stats, block)[of.r.lane % kWarps];
#pragma unroll
    for (int i = 0; i < 4; ++i) mass += of.r.lane < kWarps && its.tops[i] != 0 ? weight.of(value_of(its.tops[i])) : 0.0f;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) mass += __shfl_xor_sync(kAll, mass, step);
  return mass;
}

// Where top-k, then top-p end.
__device__ __forceinline__ Survivors find_survivors(Search& of, const Whole& whole, int top_k, float top_p, float temperature) {
  const Row& r = of.r;
  const float peak = value_of(whole.top);
  Boundary edge = {0, 0, 0};
  uint64_t ties = 0, equal = 0;  // of the columns whose key is the edge's, how many survive, and all
  float most = static_cast<float>(r.vocabulary), mass = 1.0f;
  if (top_k > 0 && top_k < r.vocabulary) {
    const uint32_t of_many = top_k <= r.blocks * kThreads ? whole.least_of_threads : 0;
    const uint32_t bound = top_k <= r.blocks * kWarps * 4 ? whole.least_of_eights : of_many;  // that many come up to it
    const float width = peak - value_of(bound != 0 ? bound : whole.lowest);
    edge = find_boundary(of, 0, peak, width, ByCount{}, [&](uint64_t) { return static_cast<uint64_t>(top_k); });
    ties = top_k - edge.above, equal = edge.at, most = static_cast<float>(top_k);
  }
  if (top_p < 1.0f) {
    const ByMass weight = {peak, fminf(1.4426950408889634f / temperature, 3e38f)};
    if (edge.key == 0) mass = fmaxf(0.99f * least_mass(of, weight), 1.0f);
    const float share = fmaxf(top_p, 0.0f);
    // what lies further below the largest logit has less than 1 - top_p of the mass, all together
    const float width = temperature * (logf(most) - logf(1.0f - share) - logf(mass) + 0.1f);
    const uint64_t own = edge.key != 0 ? weight.whole(weight.of(value_of(edge.key))) : 0, at_edge = own * ties;
    uint64_t heavier = 0, target = 0;
    const Boundary by_mass = find_boundary(of, edge.key, peak, width, weight, [&](uint64_t above) {
      heavier = above;
      target = static_cast<uint64_t>(ceil(static_cast<double>(share) * static_cast<double>(above + at_edge)));
      return target = target == 0 ? 1 : target;
    });
    if (by_mass.key != 0) {
      const uint64_t each = weight.whole(weight.of(value_of(by_mass.key)));
      edge = by_mass, equal = edge.at / each, ties = (target - edge.above + each - 1) / each;
    } else if (own != 0) {  // some of what top-k left of its boundary's equals
      const uint64_t fit = (target - heavier + own - 1) / own;
      ties = fit < ties ? fit : ties;
      of.joined = 0;
    }
  }
  if (edge.key == 0) return {-INFINITY, -1, -INFINITY};
  return {value_of(edge.key), ties < equal ? column_of_tie(of, edge.key, ties) : r.vocabulary, -INFINITY};
}

__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const __grid_constant__ Call c) {
  extern __shared__ uint4 room[];
  Shared& s = *reinterpret_cast<Shared*>(room);
  const Cluster cluster = cooperative_groups::this_cluster();
  const int64_t row = blockIdx.x / c.rows.blocks;
  Row r = c.rows.row(row, static_cast<int>(blockIdx.x) % c.rows.blocks);
  r.kept = reinterpret_cast<float4*>(reinterpret_cast<uint8_t*>(room) + kKeptAt);
  r.kept_chunks = min(r.chunks, c.kept_chunks);
  if (threadIdx.x == 0) s.race.bar = 0, s.above_count = s.inside_count[0] = s.inside_count[1] = 0;
  start_dependents();
  wait_for_producer();
  __syncthreads();
  const float temperature = c.temperature[row], top_p = c.top_p[row], min_p = c.min_p[row];
  const int top_k = c.top_k[row];
  const bool greedy = !(temperature > 0.0f);
  const auto draw_for = [&](const Survivors& keep) {
    return Draw{Noise(c.seeds[row], c.positions[row], c.purpose), temperature, 1.0f / temperature, keep};
  };
  bool usable;
  if (greedy || !((top_k > 0 && top_k < r.vocabulary) || top_p < 1.0f || min_p > 0.0f)) {
    draw_from_all(s, r, draw_for({-INFINITY, -1, -INFINITY}), greedy);
    cluster_sync();
    usable = whole_row(cluster, s, r).usable;
  } else {
    Watch watch;
    read_row<6>(r, r.warp, [&](int chunk, const float4& x) {
      watch.see(x);
      watch.see_lowest(x);
      if (chunk < r.kept_chunks) r.kept[chunk * 32 + r.lane] = x;
    });
    watch.store(s.stats[r.warp], r.lane);
    cluster_sync();
    const Whole whole = whole_row(cluster, s, r);
    usable = whole.usable;
    Best best;
    if (usable) {
      Search search = {cluster, s, r};
      Survivors keep = find_survivors(search, whole, top_k, top_p, temperature);
      const float highest = __fdiv_rn(value_of(whole.top), temperature);
      if (min_p > 0.0f) keep.least = highest + logf(min_p);
      const Draw draw = draw_for(keep);
      if (threadIdx.x == 0) s.race.bar = ordered(highest + kLeastNoise);  // the largest logit survives
      __syncthreads();
      if (search.listed) {
        visit_listed(s, [&](float x, int column) { draw.see_one(s.race, x, column, best); });
      } else {
        sweep<4>(r, [&](int chunk, const float4& x) { draw.see<true>(s.race, column_of(r, chunk), x, best); });
      }
    }
    s.race.keep(r, best);
    cluster_sync();
  }
  if (r.rank == 0 && r.warp == 0) {
    const int token = s.race.winner(cluster, r);  // none: all quotients are -inf
    if (r.lane == 0) c.tokens[row] = usable ? max(token, 0) : -1;
  }
  __syncwarp();
  cluster_sync();  // others read this block's numbers
}

}  // namespace
}  // namespace sampling
}  // namespace di

DI_EXPORT int di_sample(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  using namespace di::sampling;
  if (n != 8 || p->n_i != 1)
    return refuse(e, DI_BAD_CALL, "sample: 8 tensors and a purpose make a call, got %d and %d numbers", n, p->n_i);
  const int64_t rows = t[0].shape[0];
  if (rows == 0) return DI_OK;
  if (t[0].stride[1] != 1 && t[0].shape[1] > 1) return refuse(e, DI_UNSUPPORTED, "sample: rows must be dense");
  if (t[0].shape[1] == 0) return refuse(e, DI_BAD_CALL, "sample: a row has no logit to take");
  Call c = {};
  c.rows = share_rows(data<float>(t[0]), t[0].stride[0], static_cast<int>(t[0].shape[1]), rows, kMostKept);
  c.temperature = data<float>(t[1]), c.top_k = data<int>(t[2]), c.top_p = data<float>(t[3]), c.min_p = data<float>(t[4]);
  c.seeds = data<int64_t>(t[5]), c.positions = data<int>(t[6]), c.tokens = data<int>(t[7]);
  c.purpose = static_cast<uint32_t>(p->i[0]), c.kept_chunks = std::min(c.rows.chunks, kMostKept);
  const int bytes = kKeptAt + c.kept_chunks * 16 * 32;
  if (allow_shared<sample_kernel>(kSharedBytes) != cudaSuccess)
    return refuse(e, DI_FAILED, "a block cannot have %d bytes", kSharedBytes);
  if (rows * c.rows.blocks > INT32_MAX)
    return refuse(e, DI_UNSUPPORTED, "sample: %lld rows are too many", static_cast<long long>(rows));
  const dim3 grid(static_cast<unsigned>(rows * c.rows.blocks));
  launch_clusters(sample_kernel, grid, kThreads, bytes, static_cast<cudaStream_t>(stream), c.rows.blocks, true, c);
  return finish(e, "sample");
}
