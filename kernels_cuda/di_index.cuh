// What the kernels of score_index share: the call as the device sees it, and the order in which its work is taken.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

namespace di {

constexpr int kIndexTile = 64;       // columns of a tile
constexpr int kIndexWindow = 16;     // query rows that may share the keys they read
constexpr int kIndexWindows = 512;   // windows of a launch
constexpr float kNoScore = -INFINITY;

struct IndexCall {
  const uint8_t *q, *q_scale, *cache;
  const void* weights;
  const int32_t *block_table, *row_to_req, *visible, *candidates, *count;
  float* scores;
  int64_t q_stride, q_head_stride, q_scale_stride, q_scale_head_stride, weights_stride, weights_head_stride;
  int64_t block_stride, table_stride, candidates_stride, scores_stride;
  int rows, columns, heads, block_rows, candidate_block, weights_bf16;
  int piece_shift, first_row;  // the fast kernel: log2 of a piece's rows; the launch's first row
  uint64_t share;              // 2^64 over its blocks of threads
};

__device__ __forceinline__ float index_weight(const IndexCall& c, int64_t row, int head) {
  const int64_t at = row * c.weights_stride + head * c.weights_head_stride;
  if (c.weights_bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(c.weights)[at]);
  return static_cast<const float*>(c.weights)[at];
}

__device__ __forceinline__ int index_live_rows(const IndexCall& c) {
  return c.count == nullptr ? c.rows : max(0, min(*c.count, c.rows));
}

// Consecutive rows of one request inside a window of kIndexWindow rows; with candidates every row is by itself.
// `seen`: columns to score, the most of its rows. No rows: none.
struct IndexRun {
  int first, rows, request, seen;
};

// Work of a run: its queries to load, tiles to score, then tiles that only get -inf. A tile costs about a row's more than its
// rows, the queries as much as some tiles.
struct IndexWork {
  int tiles, fills, start_cost, tile_cost, fill_cost, cost;
};

__device__ __forceinline__ IndexWork index_work(const IndexCall& c, const IndexRun& run) {
  const int all = (c.columns + kIndexTile - 1) / kIndexTile;
  IndexWork w{};
  if (run.rows == 0) return w;
  w.tiles = c.candidates != nullptr ? all : (run.seen + kIndexTile - 1) / kIndexTile;
  w.fills = all - w.tiles;
  w.tile_cost = 32 * run.rows + 32;
  w.fill_cost = run.rows;
  w.start_cost = w.tiles > 0 ? 7 * w.tile_cost : 0;
  w.cost = w.start_cost + w.tiles * w.tile_cost + w.fills * w.fill_cost;
  return w;
}

// The runs of a window, each in the lane of its first row, by a whole warp that stays together.
__device__ __forceinline__ IndexRun index_run_of_lane(const IndexCall& c, int window, int live) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const int lane = threadIdx.x % 32, base = c.first_row + window * kIndexWindow, inside = max(0, min(kIndexWindow, live - base));
  IndexRun run{base + lane, 0, -1, 0};
  if (lane < inside) {
    run.request = c.row_to_req[base + lane];
    run.seen = max(0, min(c.visible[base + lane], c.columns));
  }
  const int before = __shfl_up_sync(kAll, run.request, 1);
  const bool starts = lane < inside && (lane == 0 || run.request != before || c.candidates != nullptr);
  const uint32_t later = __ballot_sync(kAll, starts) & ~((2u << lane) - 1);  // starts behind this lane
  const int end = later != 0 ? __ffs(later) - 1 : inside;
#pragma unroll
  for (int step = 1; step < kIndexWindow; step *= 2) {
    const int other = __shfl_down_sync(kAll, run.seen, step);
    if (lane + step < end) run.seen = max(run.seen, other);
  }
  if (starts && run.request >= 0) run.rows = end - lane;
  return run;
}

__device__ __forceinline__ int64_t index_window_cost(const IndexCall& c, int window, int live) {
  return __reduce_add_sync(0xFFFFFFFFu, index_work(c, index_run_of_lane(c, window, live)).cost);
}

// Pieces of `step` that start before `from`, of `limit`.
__device__ __forceinline__ int index_part(int from, int step, int limit) {
  return from <= 0 ? 0 : min(limit, (from + step - 1) / step);
}

// The share of all work from share[0] to share[1], as visit(run, first tile, end, first fill tile, end). `starts`: prefix sums of
// the windows' costs.
template <typename Visit>
__device__ __forceinline__ void index_share(const IndexCall& c, const int64_t* starts, int windows, int live,
                                            const int64_t (&share)[2], Visit visit) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const int lane = threadIdx.x % 32;
  int window = 0;
  while (window + 1 < windows && starts[window + 1] <= share[0]) ++window;
  for (; window < windows && starts[window] < share[1]; ++window) {
    const int64_t all = starts[window + 1] - starts[window];
    const IndexRun run = index_run_of_lane(c, window, live);
    const IndexWork w = index_work(c, run);
    int at = w.cost;
#pragma unroll
    for (int step = 1; step < kIndexWindow; step *= 2) {
      const int other = __shfl_up_sync(kAll, at, step);
      if (lane >= step) at += other;
    }
    at -= w.cost;
    at += w.start_cost;
    const int low = static_cast<int>(max(static_cast<int64_t>(0), share[0] - starts[window])) - at;
    const int high = static_cast<int>(min(all, share[1] - starts[window])) - at, fills_at = w.tiles * w.tile_cost;
    int first = 0, end = 0, fill = 0, fill_end = 0;
    if (run.rows > 0 && low < w.cost && high > 0) {
      first = index_part(low, w.tile_cost, w.tiles), end = index_part(high, w.tile_cost, w.tiles);
      fill = w.tiles + index_part(low - fills_at, w.fill_cost, w.fills);
      fill_end = w.tiles + index_part(high - fills_at, w.fill_cost, w.fills);
    }
    uint32_t hits = __ballot_sync(kAll, first < end || fill < fill_end);
    while (hits != 0) {
      const int of = __ffs(hits) - 1;
      hits &= hits - 1;
      const auto its = [&](int value) { return __shfl_sync(kAll, value, of); };
      const IndexRun all_know{its(run.first), its(run.rows), its(run.request), its(run.seen)};
      visit(all_know, its(first), its(end), its(fill), its(fill_end));
    }
  }
}

}  // namespace di
