// How sparse attention lists the keys of the block's rows: by the two value groups, a row ahead, while they wait for weights.
#pragma once

#include "sparse_attention_shared.cuh"

namespace di::attention {

constexpr int kListers = 2 * kGroup;
constexpr int kFinds = 2;  // Selected rows that a thread looks up at once.

// drafts: the rows selected are those of the query's own draft block, in place of what a list of rows names.
template <bool fp4, bool drafts>
struct Lister {
  const Arguments& a;
  Shared& s;
  int thread;

  // Lists row t, the block's row number `index`: window rows, then selected rows up to the first -1. What the row after it will
  // be listed from is asked for, so that this waits for the block table alone.
  __device__ __forceinline__ void list(int t, int index) {
    const int thread = anew(this->thread), warp = thread / 32, lane = thread % 32;
    const int request = drafts ? t / a.block : a.row_to_req[t], position = a.positions[drafts ? request : t];
    const int* rows = drafts ? nullptr : a.rows + t * a.rows_pitch;
    int selected = a.chosen;
#pragma unroll 1
    for (int i = thread; i < a.chosen && !drafts; i += kFinds * kListers) {
      int row[kFinds];
#pragma unroll
      for (int j = 0; j < kFinds; ++j) row[j] = i + j * kListers < a.chosen ? rows[i + j * kListers] : 0;
#pragma unroll
      for (int j = kFinds - 1; j >= 0; --j)
        if (row[j] < 0) selected = min(selected, i + j * kListers);
    }
    selected = __reduce_min_sync(0xFFFFFFFFu, selected);
    if (lane == 0) s.selected[warp] = selected;
    named_barrier_sync(1, kListers);
#pragma unroll
    for (int i = 0; i < kListers / 32; ++i) selected = min(selected, s.selected[i]);
    mbarrier_wait(&s.unlisted[index % kLists], (index / kLists & 1) ^ 1);
    int window = 0, keys = -1;
    if (request >= 0 && position >= 0) {
      uint32_t* to = s.offset[index % kLists];
      const int origin = a.window_origin[request], base = a.window_base[request], modulo = max(a.window_modulo[request], 1);
      uint32_t found[kFinds];
      find(rows, request, thread, selected, found);
      const int first = max(max(position - a.window_tokens + 1, 0), origin);
      window = max(position - first + 1, 0);
#pragma unroll 1
      for (int i = thread; i < window; i += kListers)
        to[i] = static_cast<uint32_t>((base + (first + i - origin) % modulo) * a.window_pitch >> 4);
#pragma unroll 1
      for (int i = thread; i < selected; i += kFinds * kListers) {
        if (i != thread) find(rows, request, i, selected, found);
#pragma unroll
        for (int j = 0; j < kFinds; ++j)
          if (i + j * kListers < selected) to[window + i + j * kListers] = found[j];
      }
      keys = window + selected;
    }
    if (thread == 0) s.window_of[index % kLists] = window, s.keys_of[index % kLists] = keys;
    mbarrier_arrive(&s.listed[index % kLists]);
    if (!drafts && t + gridDim.x < a.tokens) {
      const int next = t + gridDim.x;
      if (32 * thread < a.chosen) prefetch_line(a.rows + next * a.rows_pitch + 32 * thread);
      if (thread == 0) prefetch_line(a.row_to_req + next), prefetch_line(a.positions + next);
    }
    named_barrier_sync(1, kListers);
  }

  // Offsets of the selected rows i and i + 256.
  __device__ __forceinline__ void find(const int* rows, int request, int i, int selected, uint32_t (&found)[kFinds]) const {
    if constexpr (drafts) {
#pragma unroll
      for (int j = 0; j < kFinds; ++j)
        found[j] = static_cast<uint32_t>((static_cast<int64_t>(request) * a.block + i + j * kListers) * a.block_pitch >> 4);
      return;
    }
    const int* table = a.block_table + request * a.table_pitch;
    int row[kFinds], block[kFinds];
#pragma unroll
    for (int j = 0; j < kFinds; ++j) row[j] = i + j * kListers < selected ? rows[i + j * kListers] : 0;
#pragma unroll
    for (int j = 0; j < kFinds; ++j) {
      block[j] = i + j * kListers < selected ? row[j] / a.block_rows : 0;
      row[j] -= block[j] * a.block_rows;
    }
#pragma unroll
    for (int j = 0; j < kFinds; ++j) block[j] = i + j * kListers < selected ? table[block[j]] : 0;
#pragma unroll
    for (int j = 0; j < kFinds; ++j)
      found[j] = static_cast<uint32_t>((block[j] * a.block_pitch + static_cast<int64_t>(row[j]) * (fp4 ? kFp4Row : kFp8Row)) >> 4);
  }
};

}  // namespace di::attention
