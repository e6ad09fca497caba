// Which tiles of a grouped GEMM a block computes, found on the device from the experts' offsets: the host knows no counts.
//
// An expert's matrix is cut into granules of 64 rows (output features), its tokens into tiles of at most kMostTokens. All
// (expert, token tile, granule) are put in one line, each as long as it costs, and the line is cut into equal shares: a block
// takes every granule that starts inside its share, as many at a time as a step has. So the last block ends when the first does,
// up to one granule. At 64 tokens, where arithmetic binds, shares are cut at multiples of what a step's warpgroups take together
// if the largest stays as it is: a step of four granules takes three warpgroups longer than two thirds of one of six.
//
// Where it costs nothing, each expert is dealt blocks of its own instead, so that no block needs another step because its share
// crosses into the next expert, as long as all tokens stay in L2. Otherwise, where experts of many tokens are a good part of the
// work, the line is cut into waves first, so that blocks at work at the same time share weights and tokens in L2; fewer tokens are
// many if all tokens together do not stay in L2. Which block computes a tile changes no bit of it.
#pragma once

#include <stdint.h>

namespace di {

constexpr int kGranuleRows = 64;
constexpr int kMostExperts = 1024;
constexpr int kWidths = 5;  // of a tile of tokens
constexpr int64_t kTokensOfL2 = 32 << 20;  // bytes
constexpr int kMostDealt = 128;  // experts of which each may have blocks of its own

struct GroupedStep {
  int expert;
  int row;      // first row of x
  int tokens;   // rows of x in this tile
  int width;    // log2 of the tile's tokens / 8: 0 (8 tokens) to 4 (128)
  int granule;  // first granule
  int granules; // at most those of the form's step
};

// What all threads of a block share; experts + 1 entries are in use.
struct GroupedPlan {
  int first_block[kMostDealt + 1];  // if dealt
  int dealt;                        // each expert has blocks of its own
  int cost_before[kMostExperts + 1];
  int rows[kMostExperts + 1];  // offsets, clipped to the rows of this launch
  int crowded;                 // blocks at work at the same time should share experts
};

// What a launch computes: the experts' matrices, where their rows are, and the rows of this launch.
struct GroupedShape {
  const uint8_t* weights;
  const int* offsets;
  void* out;
  int64_t out_pitch;  // elements from row to row
  int experts, granules, k_blocks;
  int first_row, last_row;
};

// Cost of a granule by the tile's width: bytes of weights up to 16 tokens, then more and more arithmetic.
__host__ __device__ constexpr int granule_cost(int width) { return width <= 1 ? 7 : width == 2 ? 9 : width == 3 ? 12 : 20; }
__host__ __device__ constexpr int full_cost(int most) {
  return granule_cost(most <= 16 ? 1 : most == 32 ? 2 : most == 64 ? 3 : 4);
}

__host__ __device__ constexpr int tile_width(int tokens) {
  return tokens <= 8 ? 0 : tokens <= 16 ? 1 : tokens <= 32 ? 2 : tokens <= 64 ? 3 : 4;
}
// Cost where no tile takes an instruction of fewer than `narrow` tokens.
__host__ __device__ constexpr int granule_cost(int width, int narrow) {
  return granule_cost(width > tile_width(narrow) ? width : tile_width(narrow));
}

// Whether experts of many tokens, which cost `crowded` of `total`, are enough of the work to cut the line into waves: where a wave
// ends, a step is cut in two, which costs the others more than those few gain.
__host__ __device__ constexpr bool is_crowded(int crowded, int total) { return crowded > total / 4; }

// Blocks of an expert that costs `mine` of `total`, if each expert has its own. The product has 32 bits: rows that all stay in L2
// (which is when experts are dealt blocks), of 128 columns or more, and up to 100 000 features cost less than would leave them.
__host__ __device__ constexpr int blocks_of(int mine, int total, int blocks) {
  const int share = mine == 0 ? 0 : static_cast<uint32_t>(mine) * blocks / total;
  return mine > 0 && share == 0 ? 1 : share;
}

// Whether dealing is as good as one line: enough blocks, and the largest share, in whole granules, is no larger.
__host__ __device__ constexpr bool is_dealt(int needed, int worst, int total, int blocks, int cost) {
  return needed <= blocks && (worst + cost - 1) / cost <= ((total + blocks - 1) / blocks + cost - 1) / cost;
}

// The sum of `value` over the lanes up to this one.
__device__ __forceinline__ int sum_up_to(int value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (threadIdx.x % 32 >= step) value += other;
  }
  return value;
}

// Of one warp, once cost_before is there.
__device__ __forceinline__ void deal(GroupedPlan& plan, int experts, int cost) {
  const int total = plan.cost_before[experts];
  int needed = 0, worst = 0;
  for (int first = 0; first < experts; first += 32) {
    const int e = first + threadIdx.x, mine = e < experts ? plan.cost_before[e + 1] - plan.cost_before[e] : 0;
    const int blocks = blocks_of(mine, total, gridDim.x), sum = sum_up_to(blocks);
    if (blocks > 0) worst = max(worst, (mine + blocks - 1) / blocks);
    if (e < experts) plan.first_block[e] = needed + sum - blocks;
    needed += __shfl_sync(~0u, sum, 31);
  }
  worst = __reduce_max_sync(~0u, worst);
  if (threadIdx.x == 0) plan.first_block[experts] = needed, plan.dealt = is_dealt(needed, worst, total, gridDim.x, cost);
}

// floor(length * part / parts) in 32-bit numbers; part is at most parts, fewer than 2^15.
__device__ __forceinline__ int cut(int length, int part, int parts) {
  const uint32_t whole = static_cast<uint32_t>(length) / parts, rest = static_cast<uint32_t>(length) % parts;
  return whole * part + rest * part / parts;
}

// The last place whose value is at most `wanted`, of `count` that do not fall.
__device__ __forceinline__ int last_at_most(const int* values, int count, int wanted) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (values[middle] <= wanted ? low : high) = middle;
  }
  return low;
}

// Fills the plan for tiles of at most `most` tokens and instructions of at least `narrow`; every thread of the block calls it, and
// it ends with a barrier.
template <int most, int narrow>
__device__ void make_plan(GroupedPlan& plan, const GroupedShape& shape) {
  constexpr int kFullCost = full_cost(most);
  for (int e = threadIdx.x; e <= shape.experts; e += blockDim.x)
    plan.rows[e] = min(max(shape.offsets[e], shape.first_row), shape.last_row);
  // Tiles that are bound by arithmetic share weights; tokens that do not all stay in L2 are to be read by many blocks at once.
  const int64_t token_bytes = static_cast<int64_t>(shape.last_row - shape.first_row) * shape.k_blocks * 256;
  const int crowd = token_bytes > kTokensOfL2 ? 16 : 64;
  if (threadIdx.x == 0) plan.dealt = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    int before = 0, crowded = 0;
    for (int first = 0; first < shape.experts; first += 32) {
      const int e = first + threadIdx.x;
      const int tokens = e < shape.experts ? max(plan.rows[e + 1] - plan.rows[e], 0) : 0, rest = tokens % most;
      const int mine = shape.granules * (tokens / most * kFullCost + (rest ? granule_cost(tile_width(rest), narrow) : 0));
      if (tokens > crowd) crowded += mine;
      const int sum = sum_up_to(mine);
      if (e < shape.experts) plan.cost_before[e] = before + sum - mine;
      before += __shfl_sync(~0u, sum, 31);
    }
    crowded = __reduce_add_sync(~0u, crowded);
    if (threadIdx.x == 0) plan.cost_before[shape.experts] = before, plan.crowded = is_crowded(crowded, before);
    __syncwarp();
    if (shape.experts <= kMostDealt && token_bytes <= kTokensOfL2) deal(plan, shape.experts, kFullCost);
  }
  __syncthreads();
}

// The steps of this block, one after the other, of at most `most` tokens and `groups` granules (`narrow_groups` where there are
// at most `narrow` tokens), a multiple of `together` where there are as many.
template <int most, int groups, int together, int narrow, int narrow_groups>
struct GroupedWalk {
  static constexpr int kFullCost = full_cost(most), kNarrowStep = narrow_groups * full_cost(narrow);
  static constexpr int kWaveCost = kNarrowStep > groups * kFullCost ? kNarrowStep : groups * kFullCost;  // of a wave's block

  int wave = -1, at = 0, end = 0, expert = 0;
  int whole = 1;  // shares are cut at multiples of so many granules

  // The block's share of an expert of its own.
  __device__ bool start_dealt(const GroupedPlan& plan, int experts) {
    const int block = blockIdx.x;
    if (++wave > 0 || block >= plan.first_block[experts]) return false;
    expert = last_at_most(plan.first_block, experts, block);
    const int before = plan.cost_before[expert], parts = plan.first_block[expert + 1] - plan.first_block[expert];
    const int length = plan.cost_before[expert + 1] - before, part = block - plan.first_block[expert];
    at = before + cut(length, part, parts);
    end = before + cut(length, part + 1, parts);
    return true;
  }

  // Whether shares of one line can be cut at multiples of `together`, and the largest is as large as before.
  static __device__ bool cuts_together(int total, int granules) {
    const int largest = (total + gridDim.x * kFullCost - 1) / (gridDim.x * kFullCost);
    return most == 64 && granules % together == 0 && largest % together == 0;
  }

  // False when there is no wave left. All waves but the last cost what gives every block one full step.
  __device__ bool start_wave(const GroupedPlan& plan, int experts, int granules) {
    if (plan.dealt) return start_dealt(plan, experts);
    const int total = plan.cost_before[experts], full = gridDim.x * kWaveCost;
    const int waves = plan.crowded ? max(1, (total + full / 2) / full) : 1;
    if (++wave >= waves) return false;
    whole = waves == 1 && cuts_together(total, granules) ? together : 1;
    const int length = wave + 1 < waves ? full : total - wave * full;
    at = wave * full + cut(length, blockIdx.x, gridDim.x);
    end = wave * full + cut(length, blockIdx.x + 1, gridDim.x);
    expert = last_at_most(plan.cost_before, experts, at);
    return true;
  }

  // The block's next step; false when there is none.
  __device__ bool next(const GroupedPlan& plan, int experts, int granules, GroupedStep& step) {
    for (;;) {
      if (at >= end) {
        if (!start_wave(plan, experts, granules)) return false;
        continue;
      }
      if (at >= plan.cost_before[expert + 1]) {  // never past the last expert: `end` is at most the total
        ++expert;
        continue;
      }
      const int before = plan.cost_before[expert], tokens = plan.rows[expert + 1] - plan.rows[expert];
      const int full = tokens / most, tile = min((at - before) / (granules * kFullCost), full);
      step.tokens = tile < full ? most : tokens % most;
      step.width = tile_width(step.tokens);
      const int cost = granule_cost(step.width, narrow), start = before + tile * granules * kFullCost;
      const int unit = whole * cost;
      step.granule = (at - start + unit - 1) / unit * whole;
      const int count = min(granules, (end - start + unit - 1) / unit * whole) - step.granule;
      if (count <= 0) {
        at = step.granule < granules ? end : start + granules * cost;
        continue;
      }
      const int at_once = step.tokens <= narrow ? narrow_groups : groups, parts = (count + at_once - 1) / at_once;
      const int even = (count + parts - 1) / parts;
      step.granules = min(count, (even + together - 1) / together * together);
      step.expert = expert;
      step.row = plan.rows[expert] + tile * most;
      at = start + (step.granule + step.granules) * cost;
      return true;
    }
  }
};

}  // namespace di
