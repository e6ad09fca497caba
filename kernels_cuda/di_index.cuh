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
// `seen`: columns to score, the most of its rows.
struct IndexRun {
  int first, rows, request, seen;
};

// Work of a run: tiles to score, then tiles that only get -inf. A tile costs about a row's more than its rows.
struct IndexWork {
  int tiles, fills;
  int64_t tile_cost, fill_cost, cost;
};

__device__ __forceinline__ IndexWork index_work(const IndexCall& c, const IndexRun& run) {
  const int all = (c.columns + kIndexTile - 1) / kIndexTile;
  IndexWork w;
  w.tiles = c.candidates != nullptr ? all : (run.seen + kIndexTile - 1) / kIndexTile;
  w.fills = all - w.tiles;
  w.tile_cost = 32 * run.rows + 32;
  w.fill_cost = run.rows;
  w.cost = w.tiles * w.tile_cost + w.fills * w.fill_cost;
  return w;
}

// Calls visit(run) for the runs of a window, in order, by a whole warp that stays together.
template <typename Visit>
__device__ __forceinline__ void index_runs(const IndexCall& c, int window, int live, Visit visit) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const int lane = threadIdx.x % 32, base = c.first_row + window * kIndexWindow, inside = max(0, min(kIndexWindow, live - base));
  int request = -1, seen = 0;
  if (lane < inside) {
    request = c.row_to_req[base + lane];
    seen = max(0, min(c.visible[base + lane], c.columns));
  }
  const int before = __shfl_up_sync(kAll, request, 1);
  uint32_t starts = __ballot_sync(kAll, lane < inside && (lane == 0 || request != before || c.candidates != nullptr));
  while (starts != 0) {
    const int first = __ffs(starts) - 1;
    starts &= starts - 1;
    const int end = starts != 0 ? __ffs(starts) - 1 : inside;
    IndexRun run;
    run.first = base + first;
    run.rows = end - first;
    run.request = __shfl_sync(kAll, request, first);
    run.seen = __reduce_max_sync(kAll, lane >= first && lane < end ? seen : 0);
    if (run.request >= 0) visit(run);
  }
}

__device__ __forceinline__ int64_t index_window_cost(const IndexCall& c, int window, int live) {
  int64_t cost = 0;
  index_runs(c, window, live, [&](const IndexRun& run) { cost += index_work(c, run).cost; });
  return cost;
}

__device__ __forceinline__ int index_part(int64_t from, int64_t step, int limit) {
  return from <= 0 ? 0 : static_cast<int>(min(static_cast<int64_t>(limit), (from + step - 1) / step));
}

// The share of all work from share[0] to share[1], as visit(run, first tile, end, first fill tile, end). `starts`: prefix sums of the
// windows' costs.
template <typename Visit>
__device__ __forceinline__ void index_share(const IndexCall& c, const int64_t* starts, int windows, int live,
                                            const int64_t (&share)[2], Visit visit) {
  int window = 0;
  while (window + 1 < windows && starts[window + 1] <= share[0]) ++window;
  for (; window < windows && starts[window] < share[1]; ++window) {
    int64_t at = starts[window];
    index_runs(c, window, live, [&](const IndexRun& run) {
      const IndexWork w = index_work(c, run);
      const int64_t tiles_at = at, fills_at = at + w.tiles * w.tile_cost;
      at += w.cost;
      const int64_t low = share[0], high = share[1];
      if (at <= low || tiles_at >= high) return;  // before the divisions, which take long
      const int first = index_part(low - tiles_at, w.tile_cost, w.tiles), end = index_part(high - tiles_at, w.tile_cost, w.tiles);
      const int fill = index_part(low - fills_at, w.fill_cost, w.fills);
      const int fill_end = index_part(high - fills_at, w.fill_cost, w.fills);
      if (first < end || fill < fill_end) visit(run, first, end, w.tiles + fill, w.tiles + fill_end);
    });
  }
}

}  // namespace di
