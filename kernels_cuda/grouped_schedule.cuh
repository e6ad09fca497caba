// Which tiles of a grouped GEMM a block computes, found on the device from the experts' offsets: the host knows no counts.
//
// An expert's matrix is cut into granules of 64 rows (output features), its tokens into tiles of at most kMostTokens. All
// (expert, token tile, granule) are put in one line, each as long as it costs, and the line is cut into equal shares: a block
// takes every granule that starts inside its share, up to one a warpgroup at a time. So the last block ends when the first does,
// up to one granule. Where experts have many tokens the line is cut into waves first, so that blocks at work at the same time
// share weights and tokens in L2. Which block computes a tile changes no bit of it.
#pragma once

#include <stdint.h>

namespace di {

constexpr int kGranuleRows = 64;
constexpr int kMostExperts = 1024;

struct GroupedStep {
  int expert;
  int row;      // first row of x
  int tokens;   // rows of x in this tile
  int width;    // log2 of the tile's tokens / 8: 0 (8 tokens) to 4 (128)
  int granule;  // first granule
  int granules; // at most a block's warpgroups
};

// What all threads of a block share; experts + 1 entries are in use.
struct GroupedPlan {
  int cost_before[kMostExperts + 1];
  int rows[kMostExperts + 1];  // offsets, clipped to the rows of this launch
  int crowded;                 // some expert has a tile that is bound by arithmetic
};

// What a launch computes: the experts' matrices, where their rows are, and the rows of this launch.
struct GroupedShape {
  const uint8_t* weights;
  const int* offsets;
  void* out;
  int64_t out_pitch;  // elements from row to row
  int experts, granules, k_blocks, features;
  int first_row, last_row;
};

// Cost of a granule by the tile's width: bytes of weights up to 32 tokens, then more and more arithmetic.
__host__ __device__ constexpr int granule_cost(int width) { return width <= 2 ? 4 : width == 3 ? 6 : 10; }

__device__ __forceinline__ int tile_width(int tokens) {
  return tokens <= 8 ? 0 : tokens <= 16 ? 1 : tokens <= 32 ? 2 : tokens <= 64 ? 3 : 4;
}

// Fills the plan for tiles of at most `most` tokens; every thread of the block calls it, and it ends with a barrier.
template <int most>
__device__ void make_plan(GroupedPlan& plan, const GroupedShape& shape) {
  constexpr int kFullCost = granule_cost(most <= 32 ? 2 : most == 64 ? 3 : 4);
  for (int e = threadIdx.x; e <= shape.experts; e += blockDim.x)
    plan.rows[e] = min(max(shape.offsets[e], shape.first_row), shape.last_row);
  if (threadIdx.x == 0) plan.crowded = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    int before = 0;
    for (int first = 0; first < shape.experts; first += 32) {
      const int e = first + threadIdx.x;
      const int tokens = e < shape.experts ? max(plan.rows[e + 1] - plan.rows[e], 0) : 0, rest = tokens % most;
      const int mine = shape.granules * (tokens / most * kFullCost + (rest ? granule_cost(tile_width(rest)) : 0));
      if (tokens > 64) plan.crowded = 1;
      int sum = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (threadIdx.x >= step) sum += other;
      }
      if (e < shape.experts) plan.cost_before[e] = before + sum - mine;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (threadIdx.x == 0) plan.cost_before[shape.experts] = before;
  }
  __syncthreads();
}

// The steps of this block, one after the other, of at most `most` tokens and `groups` granules.
template <int most, int groups>
struct GroupedWalk {
  static constexpr int kMostWidth = most <= 8 ? 0 : most == 16 ? 1 : most == 32 ? 2 : most == 64 ? 3 : 4;
  static constexpr int kFullCost = granule_cost(kMostWidth);

  int wave = -1, at = 0, end = 0, expert = 0;

  // False when there is no wave left. All waves but the last cost what gives every block one step of full tiles.
  __device__ bool start_wave(const GroupedPlan& plan, int experts) {
    const int total = plan.cost_before[experts], full = gridDim.x * groups * kFullCost;
    const int waves = plan.crowded ? max(1, (total + full / 2) / full) : 1;
    if (++wave >= waves) return false;
    const int64_t length = wave + 1 < waves ? full : total - wave * full;
    at = wave * full + static_cast<int>(length * blockIdx.x / gridDim.x);
    end = wave * full + static_cast<int>(length * (blockIdx.x + 1) / gridDim.x);
    int low = 0, high = experts;  // the last expert that starts at or before `at`
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (plan.cost_before[middle] <= at ? low : high) = middle;
    }
    expert = low;
    return true;
  }

  // The block's next step; false when there is none.
  __device__ bool next(const GroupedPlan& plan, int experts, int granules, GroupedStep& step) {
    for (;;) {
      if (at >= end) {
        if (!start_wave(plan, experts)) return false;
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
      const int cost = granule_cost(step.width), start = before + tile * granules * kFullCost;
      step.granule = (at - start + cost - 1) / cost;
      const int count = min(granules, (end - start + cost - 1) / cost) - step.granule;
      if (count <= 0) {
        at = step.granule < granules ? end : start + granules * cost;
        continue;
      }
      const int parts = (count + groups - 1) / groups;
      step.granules = (count + parts - 1) / parts;
      step.expert = expert;
      step.row = plan.rows[expert] + tile * most;
      at = start + (step.granule + step.granules) * cost;
      return true;
    }
  }
};

}  // namespace di
