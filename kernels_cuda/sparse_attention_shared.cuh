// What the warpgroups of sparse attention share: the call, the block's shared memory, and small helpers.
#pragma once

#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di::attention {

constexpr int kHeads = 64, kWidth = 512, kStep = 64, kStages = 2, kMostKeys = 2048, kLists = 2;
constexpr int kGatherWarps = 8, kGather = 32 * kGatherWarps, kGroup = 128, kThreads = kGather + 3 * kGroup;
constexpr int kSlab = 64 * 128;  // 64 rows of 128 bytes, swizzled: 64 elements of each row.
constexpr int kTile = kSlab * kWidth / 64;
constexpr int kFp8Row = kWidth + kWidth / 32, kFp4Row = kWidth / 2 + kWidth / 16;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kHeadroom = 8.0f;  // Weights may pass 1 by this power of two before the reference follows the maximum.

struct Arguments {
  __nv_bfloat16* out;
  const uint8_t* window;
  const uint8_t* compressed;
  const int *window_base, *window_origin, *window_modulo, *block_table, *rows, *row_to_req, *positions, *count;
  const float* sink;
  int64_t out_row, out_head;          // Elements.
  int64_t window_pitch, block_pitch;  // Bytes.
  int64_t table_pitch, rows_pitch;    // Elements.
  int tokens, requests, heads, chosen, block_rows, table_blocks, window_tokens;
  int block;  // Query rows of what `count` counts: one, or a request's draft block.
  float scale;
  float unit = 1.0f;  // Values of BF16 rows are kept so many times too small.
};

struct Shared {
  alignas(1024) uint8_t q[kTile];
  alignas(1024) uint8_t keys[kStages][kTile];
  alignas(1024) uint8_t weights[2][kSlab];  // The step's weights in two parts.
  uint32_t offset[kLists][kMostKeys];  // Of a list's rows in their store, in units of 16 bytes.
  float shrink[kHeads];                // What the output so far is multiplied by before the step is added; first half of the weights.
  float sink[kHeads];                  // Times log2 e.
  float share[2][kHeads];              // At a row's last step, what the output is multiplied by in the end; rows in turn.
  int selected[8];                     // By warps of the value groups.
  // Stages empty and weights come and go by halves of 32 keys; the first 16 keys' weights are told of by themselves.
  uint64_t full[kStages], empty[kStages][2], weighed[2], unweighed[2], listed[kLists], unlisted[kLists], queried, begun, scored;
  int window_of[kLists], keys_of[kLists];  // Keys of a list: in the window, and all; -1 for a row that is left as it is.
};

// The same value, from which the compiler computes nothing ahead, so that no register holds it meanwhile.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where the 16-byte piece `piece` of row `row` lies in a tile.
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
  return (piece >> 3) * kSlab + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

__device__ __forceinline__ void store16(uint32_t address, const uint32_t (&v)[4], bool some) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p st.shared.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"r"(address), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3]), "r"(static_cast<int>(some)) : "memory");
}

// Work on the values is not moved before the stores that come first, which would fill the registers.
__device__ __forceinline__ void hold(uint4& v, uint32_t& w) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w), "+r"(w)::"memory");
}

__device__ __forceinline__ int rows_of(const Arguments& a) {
  return a.count == nullptr ? a.tokens : max(0, min(*a.count * a.block, a.tokens));
}
__device__ __forceinline__ int steps_of(int keys) { return (keys + kStep - 1) / kStep; }

// Keys of the block's row number `index`, for the groups that use them.
__device__ __forceinline__ int take_keys(Shared& s, int index) {
  const int slot = index % kLists;
  mbarrier_wait(&s.listed[slot], index / kLists & 1);
  const int keys = s.keys_of[slot];
  mbarrier_arrive(&s.unlisted[slot]);
  return keys;
}

// Asks L2 for what listing row t reads first, by 256 threads, before the kernel that comes before has ended. The row's request is
// guessed, as if all had as many rows.
template <bool drafts>
__device__ __forceinline__ void foresee(const Arguments& a, int t, int thread) {
  const int request = drafts ? t / a.block : static_cast<int>(static_cast<int64_t>(t) * a.requests / a.tokens);
  if (request >= a.requests) return;
  if (thread == 0) {
    prefetch_line_l2(a.positions + (drafts ? request : t)), prefetch_line_l2(a.window_modulo + request);
    prefetch_line_l2(a.window_origin + request), prefetch_line_l2(a.window_base + request);
    if (!drafts) prefetch_line_l2(a.row_to_req + t);
  }
  const int chosen = drafts ? 0 : a.chosen, blocks = chosen > 0 ? a.table_blocks : 0;
  for (int i = 32 * thread; i < chosen; i += 32 * 256) prefetch_line_l2(a.rows + t * a.rows_pitch + i);
  for (int i = 32 * thread; i < blocks; i += 32 * 256) prefetch_line_l2(a.block_table + request * a.table_pitch + i);
}

// The output of a row without keys, by the two value groups; `thread` counts theirs.
__device__ __forceinline__ void write_zeros(const Arguments& a, int t, int thread) {
  for (int i = thread; i < a.heads * kWidth / 8; i += 2 * kGroup)
    *reinterpret_cast<uint4*>(a.out + t * a.out_row + i / (kWidth / 8) * a.out_head + i % (kWidth / 8) * 8) = make_uint4(0, 0, 0, 0);
}

}  // namespace di::attention
