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
inline int __reduce_add_sync(unsigned, int value) { return value; }
inline void __syncwarp() {}

#include "grouped_schedule.cuh"

static di::GroupedPlan plan;
static int crowd = 64;  // tokens of an expert that make it crowded
static bool in_l2 = true;  // all tokens stay there
static int most_steps;  // of a block, in the last check
static int most_turns;  // of a block's warpgroups, where a step of three warpgroups takes as many as one of them has granules

[[noreturn]] static void fail(const char* what) {
  printf("%s\n", what);
  exit(1);
}

static void deal(size_t experts, int total, int granule) {
  const int blocks = static_cast<int>(gridDim.x);
  int needed = 0, worst = 0;
  plan.dealt = 0;
  if (experts > di::kMostDealt || !in_l2) return;
  for (size_t e = 0; e < experts; ++e) {
    const int mine = plan.cost_before[e + 1] - plan.cost_before[e], own = di::blocks_of(mine, total, blocks);
    plan.first_block[e] = needed, needed += own;
    if (own) worst = max(worst, (mine + own - 1) / own);
  }
  plan.first_block[experts] = needed;
  plan.dealt = di::is_dealt(needed, worst, total, blocks, granule);
}

// The plan as make_plan leaves it. Returns the whole cost.
template <int most, int narrow>
static int fill_plan(const std::vector<int>& counts, int granules) {
  const int full = di::granule_cost(di::tile_width(most));
  int cost = 0, crowded = 0;
  plan.rows[0] = 3;
  for (size_t e = 0; e < counts.size(); ++e) {
    const int rest = counts[e] % most;
    plan.rows[e + 1] = plan.rows[e] + counts[e], plan.cost_before[e] = cost;
    const int mine = granules * (counts[e] / most * full + (rest ? di::granule_cost(di::tile_width(rest), narrow) : 0));
    cost += mine;
    if (counts[e] > crowd) crowded += mine;
  }
  plan.crowded = di::is_crowded(crowded, cost);
  plan.cost_before[counts.size()] = cost;
  deal(counts.size(), cost, full);
  return cost;
}

// What grouped_gemm_fp4.cuh's Walk makes of the forms of grouped_gemm.cu: most tokens of a tile, granules of a step, the number
// that they are a multiple of where there are as many, and tokens of a small tile with the granules of its step.
template <int most_, int groups_, int together_, int narrow_, int narrow_groups_>
struct Form {
  static constexpr int most = most_, groups = groups_, narrow = narrow_, narrow_groups = narrow_groups_;
  using Walk = di::GroupedWalk<most_, groups_, together_, narrow_, narrow_groups_>;
};
using Tiny = Form<32, 6, 3, 16, 9>;
using Small = Form<32, 9, 3, 32, 9>;
using Middle = Form<64, 6, 3, 64, 6>;
using Large = Form<128, 4, 1, 128, 4>;
using LargeAndHalf = Form<128, 4, 2, 64, 4>;
using TinyTen = Form<32, 5, 1, 16, 10>;
using SmallTen = Form<32, 10, 5, 32, 10>;
using SmallFour = Form<32, 4, 2, 16, 4>;
using MiddleFour = Form<96, 4, 1, 64, 4>;

// Largest cost of a block over the mean, after checking that the blocks' steps cover everything once.
template <typename F>
static double check(const std::vector<int>& counts, int granules, int blocks) {
  constexpr int most = F::most;
  gridDim.x = blocks;
  const int experts = static_cast<int>(counts.size()), total = fill_plan<most, F::narrow>(counts, granules);
  std::map<std::tuple<int, int, int>, int> seen;
  int worst = 0;
  most_steps = most_turns = 0;
  for (int block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    typename F::Walk walk;
    di::GroupedStep step;
    int cost = 0, steps = 0, turns = 0;
    while (walk.next(plan, experts, granules, step)) {
      most_steps = max(most_steps, ++steps);
      most_turns = max(most_turns, turns += (step.granules + 2) / 3);
      cost += step.granules * di::granule_cost(step.width, F::narrow);
      const int largest = step.tokens <= F::narrow ? F::narrow_groups : F::groups;
      if (step.granules < 1 || step.granules > largest) fail("a step of too many granules, or none");
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
    in_l2 = i % 2, crowd = in_l2 ? 64 : 16;
    for (int& count : counts) count = random() % 3 ? static_cast<int>(random() % (largest + 1)) : 0;
    check<Tiny>(counts, granules, blocks), check<Small>(counts, granules, blocks), check<Middle>(counts, granules, blocks);
    check<Large>(counts, granules, blocks), check<LargeAndHalf>(counts, granules, blocks);
    check<TinyTen>(counts, granules, blocks), check<SmallTen>(counts, granules, blocks);
    check<SmallFour>(counts, granules, blocks), check<MiddleFour>(counts, granules, blocks);
  }
  in_l2 = true, crowd = 64;
  for (int experts : {16, 48, 384})
    for (int granules : {72, 80}) {
      const auto share = [&](auto form, int rows) {
        return check<decltype(form)>(std::vector<int>(experts, rows), granules, 132);
      };
      if (share(Tiny{}, 16) > 1.04) fail("uneven shares at 16 rows an expert");
      if (share(Small{}, 32) > 1.04) fail("uneven shares at 32 rows an expert");
      if (share(Middle{}, 64) > 1.04) fail("uneven shares at 64 rows an expert");
      in_l2 = false;
      if (share(Large{}, 1024) > 1.04) fail("uneven shares at 1024 rows an expert");
      in_l2 = true;
    }
  const auto steps = [](auto form, int experts, int rows, int granules) {
    check<decltype(form)>(std::vector<int>(experts, rows), granules, 132);
    return plan.dealt ? most_steps : 0;
  };
  const bool one_step_of_72 = steps(Tiny{}, 16, 16, 72) == 1 && steps(Small{}, 16, 32, 72) == 1;
  const bool one_step_of_80 = steps(TinyTen{}, 16, 16, 80) == 1 && steps(SmallTen{}, 16, 32, 80) == 1;
  if (!one_step_of_72 || !one_step_of_80) fail("16 experts take more than a step a block");
  if (steps(SmallFour{}, 6, 32, 72) != 1 || steps(MiddleFour{}, 6, 64, 80) != 1) fail("six experts take more than a step a block");
  if (steps(Large{}, 6, 256, 72) != 2) fail("six experts of 256 rows take more than two steps a block");
  check<Middle>(std::vector<int>(48, 64), 72, 132);
  if (most_turns != 9) fail("48 experts of 64 rows have steps that leave warpgroups idle");  // 27 granules at most
  in_l2 = false;
  if (check<Large>({250, 262, 240, 270, 255, 259}, 72, 132) > 1.2) fail("uneven shares where last tiles have few rows");
  in_l2 = true;
  std::vector<int> skewed(384, 4);
  skewed[7] = 174, skewed[100] = 108, skewed[300] = 71;
  if (check<Tiny>(skewed, 72, 132) > 1.04 || plan.crowded) fail("three experts of many rows cut the steps of 381 others");
  printf("covered\n");
}
