// What the warps of a pair of blocks share in sparse attention of few rows, and where things lie.
#pragma once

#include "sparse_attention_shared.cuh"

namespace di::attention::pair {

constexpr int kGatherWarps = 8, kThreads = 32 * kGatherWarps + 2 * kGroup;
constexpr int kHalf = kStep / 2, kHalfSlab = kHalf * 128;  // 32 keys, and 64 columns of them.
constexpr int kOwnTile = kWidth / 64 * kHalfSlab, kStageBytes = kOwnTile + kOwnTile / 2;
constexpr int kRounds = 3;  // Stages.
constexpr int kPieces = 5;  // Of 16 bytes, of a thread's scores: sixteen of them, and the highest of its two rows.

// A stage holds the block's own 32 keys of a step, all columns, and then of the other block's keys the columns that this block
// puts out: slabs of 64 columns.
struct Shared {
  alignas(1024) uint8_t q[kTile / 2];  // Columns 256 to 511 of the query; the others pass through the last stage into registers.
  alignas(1024) uint8_t keys[kRounds][kStageBytes];
  float4 scores[2][kPieces][kGroup];  // Of the keys of both blocks, of the one of rank 0 first.
  uint32_t offset[kMostKeys];         // Of the keys' rows in their store, in units of 16 bytes; each by the warp that reads it.
  uint64_t full[kRounds], got[kRounds], empty[kRounds], scored, taken, listed, queried, held;
  int selected[4];  // By warps that look for the list's end.
  int keys_of;      // -1 for a row that is left as it is.
};

__device__ __forceinline__ int first_of_window(const Arguments& a, int position, int origin) {
  return max(max(position - a.window_tokens + 1, 0), origin);
}

// Where the 16-byte piece `piece` of row `row` lies in a tile of 32 rows.
__device__ __forceinline__ uint32_t half_piece(int row, int piece) {
  return (piece >> 3) * kHalfSlab + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

}  // namespace di::attention::pair
