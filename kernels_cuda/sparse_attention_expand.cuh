// Stored rows as BF16 rows in the workspace, for calls whose query rows read each of them many times, as a prompt's do: expanded
// once, they go to the matrix unit as they are (sparse_attention_flat.cuh), and a query row has the bits that it has without.
#pragma once

#include "sparse_attention_rows.cuh"
#include "sparse_attention_shared.cuh"

namespace di::attention {

constexpr int kExpandedRow = 2 * kWidth;  // Bytes.
constexpr int kExpandThreads = 256, kExpandFlying = 4;  // Rows that a warp has on their way at once.

// Where a call's expanded rows are: those of the window store, then those of all blocks that the table names, in its order, so
// that the table over them counts up.
struct Expansion {
  uint8_t* window;
  uint8_t* blocks;
  int* table;
  int window_rows, entries;  // Rows of the window store; entries of the table.
  int stored_blocks;         // Of the store that the table's entries are numbers of.
};

// Lane l has codes 8 l to 8 l + 7 of each half of a row, and writes them as 16 bytes.
template <bool fp4>
struct StoredRow {
  uint2 codes[2];
  uint32_t scales[2];

  __device__ __forceinline__ void load(const uint8_t* row, int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (fp4) {
        codes[j].x = *reinterpret_cast<const uint32_t*>(row + 128 * j + 4 * lane);
        scales[j] = row[kWidth / 2 + 16 * j + lane / 2];
      } else {
        codes[j] = *reinterpret_cast<const uint2*>(row + 256 * j + 8 * lane);
        scales[j] = row[kWidth + 8 * j + lane / 4];
      }
    }
  }
  __device__ __forceinline__ void expand(uint8_t* to, int lane) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t v[4];
      if constexpr (fp4) {
        Bf16::fp4(codes[j].x, Bf16::e4m3_scale(scales[j]), v);
      } else {
        const uint32_t scale = Bf16::ue8m0(scales[j]);
        Bf16::fp8(codes[j].x, scale, v[0], v[1]), Bf16::fp8(codes[j].y, scale, v[2], v[3]);
      }
      *reinterpret_cast<uint4*>(to + 512 * j + 16 * lane) = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
};

// Expands some rows of one format; `place(i)` is where row i begins, null for one that is not there.
template <bool fp4, typename Place>
__device__ __forceinline__ void expand_rows(uint8_t* to, int lane, Place place) {
  const uint8_t* from[kExpandFlying];
  StoredRow<fp4> rows[kExpandFlying];
#pragma unroll
  for (int i = 0; i < kExpandFlying; ++i) from[i] = place(i);
#pragma unroll
  for (int i = 0; i < kExpandFlying; ++i)
    if (from[i] != nullptr) rows[i].load(from[i], lane);
#pragma unroll
  for (int i = 0; i < kExpandFlying; ++i)
    if (from[i] != nullptr) rows[i].expand(to + i * kExpandedRow, lane);
}

template <bool fp4>
__global__ void __launch_bounds__(kExpandThreads) expand_stored_rows(const __grid_constant__ Arguments a, const __grid_constant__ Expansion e) {
  wait_for_producer();
  start_dependents();  // After the wait, so that they may read what earlier kernels wrote.
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x, lane = threadIdx.x % 32;
  for (int i = thread; i < e.entries; i += threads) e.table[i] = i;
  const int block_rows = a.block_rows, rows = e.entries * block_rows;
  const int window_turns = (e.window_rows + kExpandFlying - 1) / kExpandFlying, turns = window_turns + (rows + kExpandFlying - 1) / kExpandFlying;
  for (int turn = thread / 32; turn < turns; turn += threads / 32) {
    if (turn < window_turns) {
      const int first = turn * kExpandFlying;
      expand_rows<false>(e.window + static_cast<int64_t>(first) * kExpandedRow, lane, [&](int i) {
        return first + i < e.window_rows ? a.window + (first + i) * a.window_pitch : nullptr;
      });
      continue;
    }
    const int first = (turn - window_turns) * kExpandFlying;
    expand_rows<fp4>(e.blocks + static_cast<int64_t>(first) * kExpandedRow, lane, [&](int i) -> const uint8_t* {
      const uint32_t row = first + i, entry = row / static_cast<uint32_t>(block_rows);
      if (row >= static_cast<uint32_t>(rows)) return nullptr;
      const uint32_t request = entry / static_cast<uint32_t>(a.table_blocks);
      const int block = a.block_table[request * a.table_pitch + entry - request * a.table_blocks];
      if (block < 0 || block >= e.stored_blocks) return nullptr;
      return a.compressed + block * a.block_pitch + static_cast<int64_t>(row - entry * block_rows) * (fp4 ? kFp4Row : kFp8Row);
    });
  }
}

constexpr int kFewestReads = 4;  // Of a row, on average: about what its expansion costs.
constexpr int kFewestQueries = 128;

// Lays expanded rows into the workspace; false where it has no room for them, or where rows are not read often enough.
inline bool plan_expansion(Expansion& e, const Arguments& a, int64_t window_rows, int64_t stored_blocks, void* workspace, size_t bytes) {
  const int64_t entries = a.chosen > 0 ? static_cast<int64_t>(a.requests) * a.table_blocks : 0;
  const int64_t blocks_bytes = entries * a.block_rows * kExpandedRow, window_bytes = window_rows * kExpandedRow;
  const int64_t reads = static_cast<int64_t>(a.tokens) * (a.window_tokens + a.chosen);
  const int64_t expanded = window_bytes + blocks_bytes;
  if (a.tokens < kFewestQueries || expanded == 0 || reads * kExpandedRow < kFewestReads * expanded) return false;
  if (static_cast<size_t>(expanded) + entries * sizeof(int) > bytes) return false;
  e.window = static_cast<uint8_t*>(workspace), e.blocks = e.window + window_bytes;
  e.table = reinterpret_cast<int*>(e.blocks + blocks_bytes);
  e.window_rows = static_cast<int>(window_rows), e.entries = static_cast<int>(entries), e.stored_blocks = static_cast<int>(stored_blocks);
  return true;
}

// Starts the expansion; `a` then reads expanded rows.
template <bool fp4>
void launch_expansion(Arguments& a, const Expansion& e, cudaStream_t stream) {
  const int64_t rows = e.window_rows + static_cast<int64_t>(e.entries) * a.block_rows;
  const int64_t blocks = ceil_div(rows, kExpandFlying * kExpandThreads / 32);
  launch_early(expand_stored_rows<fp4>, static_cast<unsigned>(min(blocks, static_cast<int64_t>(8 * multiprocessors()))), kExpandThreads, 0,
               stream, a, e);
  a.window = e.window, a.window_pitch = kExpandedRow;
  a.compressed = e.blocks, a.block_pitch = static_cast<int64_t>(a.block_rows) * kExpandedRow;
  a.block_table = e.table, a.table_pitch = a.table_blocks;
  a.unit = Bf16::kUnit;
}

}  // namespace di::attention
