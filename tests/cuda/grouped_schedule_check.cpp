// Runs kernels_cuda/grouped_schedule.cuh on the host: every granule of every tile of tokens exactly once, shares nearly equal.
#define __device__
#define __host__
#define __forceinline__ inline

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

using std::max;
using std::min;
struct {
  unsigned x;
} gridDim, blockIdx, threadIdx, blockDim;
inline void __syncthreads() {}
inline int __shfl_up_sync(unsigned, int value, int) { return value; }
inline int __shfl_sync(unsigned, int value, int) { return value; }
inline int __reduce_max_sync(unsigned, int value) { return value; }
inline void __syncwarp() {}

#include "grouped_schedule.cuh"

static di::GroupedPlan plan;
static int crowd = 64;  // tokens of an expert that make it crowded
static int most_steps;  // of a block, in the last check

[[noreturn]] static void fail(const char* what) {
  printf("%s\n", what);
  exit(1);
}

static void deal(size_t experts, int total, int granule) {
  const int blocks = static_cast<int>(gridDim.x);
  int needed = 0, worst = 0;
  plan.dealt = 0;
  if (experts > di::kMostDealt || plan.crowded) return;
  for (size_t e = 0; e < experts; ++e) {
    const int mine = plan.cost_before[e + 1] - plan.cost_before[e], own = di::blocks_of(mine, total, blocks);
    plan.first_block[e] = needed, needed += own;
    if (own) worst = max(worst, (mine + own - 1) / own);
  }
  plan.first_block[experts] = needed;
  plan.dealt = di::is_dealt(needed, worst, total, blocks, granule);
}

// The plan as make_plan leaves it. Returns the whole cost.
template <int most>
static int fill_plan(const std::vector<int>& counts, int granules) {
  const int full = di::granule_cost(di::tile_width(most));
  int cost = 0;
  plan.rows[0] = 3, plan.crowded = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    const int rest = counts[e] % most;
    plan.rows[e + 1] = plan.rows[e] + counts[e], plan.cost_before[e] = cost;
    cost += granules * (counts[e] / most * full + (rest ? di::granule_cost(di::tile_width(rest)) : 0));
    if (counts[e] > crowd) plan.crowded = 1;
  }
  plan.cost_before[counts.size()] = cost;
  deal(counts.size(), cost, full);
  return cost;
}

// Largest cost of a block over the mean, after checking that the blocks' steps cover everything once.
template <int most, int groups, int together = 1>
static double check(const std::vector<int>& counts, int granules, int blocks) {
  gridDim.x = blocks;
  const int experts = static_cast<int>(counts.size()), total = fill_plan<most>(counts, granules);
  std::map<std::tuple<int, int, int>, int> seen;
  int worst = 0;
  most_steps = 0;
  for (int block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    di::GroupedWalk<most, groups, together> walk;
    di::GroupedStep step;
    int cost = 0, steps = 0;
    while (walk.next(plan, experts, granules, step)) {
      most_steps = max(most_steps, ++steps);
      cost += step.granules * di::granule_cost(step.width);
      if (step.granules < 1 || step.granules > groups) fail("a step of too many granules, or none");
      if (step.tokens < 1 || step.tokens > most || step.tokens > 8 << step.width) fail("a step of too many tokens, or none");
      const int* rows = plan.rows + step.expert;
      if (step.row < rows[0] || step.row + step.tokens > rows[1]) fail("rows of another expert");
      if ((step.row - rows[0]) % most) fail("a tile that begins elsewhere");
      for (int g = 0; g < step.granules; ++g)
        if (seen[{step.expert, step.row, step.granule + g}]++) fail("a granule twice");
    }
    worst = max(worst, cost);
  }
  size_t wanted = 0;
  for (int count : counts) wanted += static_cast<size_t>((count + most - 1) / most) * granules;
  if (seen.size() != wanted) fail("a granule is missing");
  return total ? worst * static_cast<double>(blocks) / total : 1;
}

int main() {
  std::mt19937 random(7);
  for (int i = 0; i < 400; ++i) {
    std::vector<int> counts(1 + random() % 40);
    const int granules = 1 + random() % 80, blocks = 1 + random() % 140, largest = 1 << random() % 10;
    crowd = i % 2 ? 64 : 16;
    for (int& count : counts) count = random() % 3 ? static_cast<int>(random() % (largest + 1)) : 0;
    check<16, 5>(counts, granules, blocks), check<32, 6, 3>(counts, granules, blocks);
    check<64, 4>(counts, granules, blocks), check<128, 4>(counts, granules, blocks);
  }
  crowd = 64;
  for (int experts : {16, 48, 384})
    for (int granules : {72, 80}) {
      if (check<16, 5>(std::vector<int>(experts, 16), granules, 132) > 1.04) fail("uneven shares at 16 rows an expert");
      if (check<64, 4>(std::vector<int>(experts, 64), granules, 132) > 1.04) fail("uneven shares at 64 rows an expert");
      if (check<128, 4>(std::vector<int>(experts, 1024), granules, 132) > 1.04) fail("uneven shares at 1024 rows an expert");
    }
  for (int granules : {72, 80}) {
    check<32, 6, 3>(std::vector<int>(16, 16), granules, 132);
    if (!plan.dealt || most_steps > 2) fail("more than two steps a block for 16 experts");
  }
  printf("covered\n");
}
