// Host tiling of products: a pure function of shapes and cores. Rows that only the device knows are 0 here; no choice
// moves a bit of the result (di_cube.h), so batch invariance does not depend on it.
#pragma once

struct MatmulPlan {
  int32_t columns;      // of a tile, a multiple of 16
  int32_t blocks;       // cube cores in use
  int32_t chunk_bytes;  // of K that a stage in L1 holds: 256, 512, 1024 or 2048
};

// n columns in each of `groups` products; `rows` of each of them, 0 if unknown; `step` divides a tile's columns. A wave is one tile on every core; it
// lasts as long as the cube multiplies or the tile's operands stream in, whichever is longer, for each item of K.
static inline MatmulPlan PlanMatmul(int64_t n, int64_t groups, int64_t rows, int64_t cores, int64_t step) {
  const int64_t kMostRows = 256, kMost = 256, kFractal = 16, kProducts = 8192, kBytes = 76;  // of a core and cycle, 950DT
  const int64_t row_tiles = rows == 0 ? 1 : (rows + kMostRows - 1) / kMostRows;
  const int64_t tall = rows == 0 ? kFractal : rows > kMostRows ? kMostRows : (rows + kFractal - 1) / kFractal * kFractal;
  MatmulPlan best = {0, 0, 256};
  int64_t best_cost = INT64_MAX;
  const int64_t all = (n + step - 1) / step * step;
  for (int64_t columns = all < kMost ? all : kMost; columns >= step; columns -= step) {
    const int64_t tiles = groups * row_tiles * ((n + columns - 1) / columns);
    const int64_t multiply = tall * columns * kBytes, stream = (tall + columns) * kProducts;
    const int64_t cost = (tiles + cores - 1) / cores * (multiply > stream ? multiply : stream);
    if (cost >= best_cost) continue;
    best_cost = cost;
    best.columns = (int32_t)columns;
    best.blocks = (int32_t)(tiles < cores ? tiles : cores);
  }
  // Copies from HBM take long, and kStages of them are under way: where a tile is small, they are longer.
  const int64_t lines = rows == 0 || tall > best.columns ? (rows == 0 ? kMostRows : tall) : best.columns;
  while (best.chunk_bytes < 2048 && lines * best.chunk_bytes * 2 <= kMostRows * 256) best.chunk_bytes *= 2;
  return best;
}
