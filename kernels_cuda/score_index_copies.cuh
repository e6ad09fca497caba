// score_index: the warps that copy tiles of keys into the ring, each every fourth tile. Lane l knows piece l of the next 32
// pieces of its warp.
#pragma once

#include "score_index_queries.cuh"

namespace di {
namespace {

// Where a lane's piece is: its first row in the request, -1 if there is none, and its place in the cache.
struct Piece {
  int row, block;
  bool there;
};

template <bool pool>
__device__ __forceinline__ Piece find_piece(const IndexCall& c, const IndexRun& run, int tile, int place, int end) {
  const int column = tile * kIndexTile + place;
  int row = column, limit = run.seen;
  if (pool) {
    const bool has = tile < end && column < c.columns;
    const int chosen = has ? c.candidates[run.first * c.candidates_stride + column / c.candidate_block] : -1;
    row = chosen < 0 ? -1 : chosen * c.candidate_block + column % c.candidate_block;
    limit = c.visible[run.first];
  }
  const bool there = tile < end && row >= 0 && row < limit;
  return {row, there ? c.block_table[run.request * c.table_stride + row / c.block_rows] : 0, there};
}

// A tile of candidate blocks, its pieces those of lanes `from` on, by the warp's own copies: 16 bytes a lane, so that a piece's
// 512 bytes of codes are one instruction. Rows that are not there become zeros.
__device__ __forceinline__ void gather_tile(const IndexCall& c, const Piece& piece, Shared& s, uint32_t stage, int from) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const int lane = threadIdx.x % 32, inside = piece.there ? piece.row % c.block_rows : 0;
  const uint32_t valid = __ballot_sync(kAll, piece.there) >> from;
  const uint64_t block = reinterpret_cast<uint64_t>(c.cache + piece.block * c.block_stride);
  const uint64_t codes = block + inside * kCodes, scales = block + c.block_rows * kCodes + inside * kGroups;
  if (lane / kPieces * kPieces == from) s.first_row[stage][lane % kPieces] = piece.there ? piece.row : -1;
  const uint32_t keys = shared_address(s.keys[stage]) + lane / 8 * 128;
#pragma unroll 1
  for (int p = 0; p < kPieces; ++p) {
    const uint64_t source = __shfl_sync(kAll, codes, from + p) + lane * 16;
    async_copy16(keys + p * 512 + ((lane ^ (p * 4 + lane / 8)) % 8 << 4), reinterpret_cast<const void*>(source), valid >> p & 1);
  }
  const int p = lane / 2 % kPieces;
  const uint64_t source = __shfl_sync(kAll, scales, from + p) + lane % 2 * 16;
  const uint32_t to = shared_address(s.scales[stage]) + lane * 16;
  if (lane < 2 * kPieces) async_copy16(to, reinterpret_cast<const void*>(source), valid >> p & 1);
  async_copy_arrive(&s.full[stage]);
  __syncwarp();
  if (lane == 0) mbarrier_arrive(&s.full[stage]);  // first_row is there
}

template <bool pool>
__device__ __forceinline__ void copy_tiles(const IndexCall& c, const CUtensorMap* map, const IndexRun& run, Shared& s, int first,
                                           int end, uint32_t& index) {
  const int lane = threadIdx.x % 32, piece_rows = 1 << c.piece_shift, pieces = kIndexTile >> c.piece_shift, tiles = 32 / pieces;
  const uint32_t skip = (threadIdx.x / 32 - index) % kProducers;
  const uint32_t bytes = piece_rows * (kCodes + kGroups);
  const uint64_t policy = run.rows == 1 ? evict_first_policy() : evict_normal_policy();  // one row's keys are read once
  uint32_t number = index + skip;
  if (!pool && pieces == 1) {  // the same with less to work out, as most calls are: tiles below `end` are there
    for (int base = first + skip; base < end; base += 32 * kProducers) {
      const Piece at = find_piece<false>(c, run, base + lane * kProducers, 0, end);
      const int inside = at.row % c.block_rows, count = min(32, (end - base + kProducers - 1) / kProducers);
      const uint8_t* const scales = c.cache + at.block * c.block_stride + c.block_rows * kCodes + inside * kGroups;
      for (int t = 0; t < count; ++t, number += kProducers) {
        const uint32_t stage = number % kStages;
        mbarrier_wait(&s.empty[stage], (number / kStages & 1) ^ 1);
        if (lane == t) {
          mbarrier_arrive_expect(&s.full[stage], kIndexTile * (kCodes + kGroups));
          tensor_copy3_hint(s.keys[stage], map, 0, inside / 2, at.block, &s.full[stage], policy);
          bulk_copy_hint(s.scales[stage], scales, kIndexTile * kGroups, &s.full[stage], policy);
        }
      }
    }
    index += end - first;
    return;
  }
  for (int base = first + skip; base < end; base += tiles * kProducers) {
    const Piece at = find_piece<pool>(c, run, base + lane / pieces * kProducers, lane % pieces * piece_rows, end);
    const uint32_t valid = __ballot_sync(0xFFFFFFFFu, at.there);
    const int inside = at.row % c.block_rows;
    for (int t = 0; t < tiles && base + t * kProducers < end; ++t, number += kProducers) {
      const uint32_t stage = number % kStages;
      const int piece = lane - t * pieces;
      const bool mine = piece >= 0 && piece < pieces;
      mbarrier_wait(&s.empty[stage], (number / kStages & 1) ^ 1);
      if (pool) {
        gather_tile(c, at, s, stage, t * kPieces);
        continue;
      }
      const uint32_t these = valid >> (t * pieces) & (pieces == 32 ? 0xFFFFFFFFu : (1u << pieces) - 1);
      if (piece == 0) mbarrier_arrive_expect(&s.full[stage], __popc(these) * bytes);
      if (mine && at.there) {
        tensor_copy3_hint(s.keys[stage] + piece * piece_rows * kCodes, map, 0, inside / 2, at.block, &s.full[stage], policy);
        const uint8_t* scales = c.cache + at.block * c.block_stride + c.block_rows * kCodes + inside * kGroups;
        bulk_copy_hint(&s.scales[stage][piece * piece_rows], scales, piece_rows * kGroups, &s.full[stage], policy);
      }
    }
  }
  index += end - first;
}

}  // namespace
}  // namespace di
