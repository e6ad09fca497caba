// The two warpgroups of sparse attention that list a row's keys, gather their stored bytes and expand them.
#pragma once

#include "sparse_attention_rows.cuh"
#include "sparse_attention_shared.cuh"

namespace di::attention {

constexpr uint32_t kNone = 0xFFFFFFFFu;

// 16 bytes, or zeros without an access.
__device__ __forceinline__ void load_some16(uint4& v, const uint8_t* from, bool some) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(from), "r"(static_cast<int>(some)));
}

// Two bytes, or zero without an access.
__device__ __forceinline__ void load_some2(uint32_t& v, const uint8_t* from, bool some) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.u16 %0, [%1]; }"
               : "=&r"(v) : "l"(from), "r"(static_cast<int>(some)));
}
// Raw bytes of one batch of rows, held by a thread between its loads and its stores.
constexpr int kFinds = 16 / kGatherWarps;  // Rows that a thread looks up at once.
constexpr int kBatch = 32 / kGatherWarps;
struct Batch {
  uint4 codes[kBatch];
  uint32_t scales[kBatch];
};

// A batch of a step of a list. Kinds 0 and 1 hold 32 rows of fp8_32 each (a warp takes a row), kind 2 holds all 64 rows of fp4_16
// (half a warp takes a row).
struct Unit {
  int slot;  // The list.
  int step, kind;
};

// drafts: the rows selected are those of the query's own draft block, in place of what a list of rows names.
template <class E, bool fp4, bool drafts>
struct Gather {
  const Arguments& a;
  Shared& s;
  int warp, lane;
  Batch batch;

  // Lists row t, the block's row number `index`: window rows, then selected rows up to the first -1. What the row after it will
  // be listed from is asked for, so that this waits for the block table alone.
  __device__ __forceinline__ void list(int t, int index) {
    const int lane = anew(this->lane), warp = anew(this->warp), thread = 32 * warp + lane;
    const int request = drafts ? t / a.block : a.row_to_req[t], position = a.positions[drafts ? request : t];
    const int* rows = drafts ? nullptr : a.rows + t * a.rows_pitch;
    int selected = a.chosen;
#pragma unroll 1
    for (int i = thread; i < a.chosen && !drafts; i += kFinds * kGather) {
      int row[kFinds];
#pragma unroll
      for (int j = 0; j < kFinds; ++j) row[j] = i + j * kGather < a.chosen ? rows[i + j * kGather] : 0;
#pragma unroll
      for (int j = kFinds - 1; j >= 0; --j)
        if (row[j] < 0) selected = min(selected, i + j * kGather);
    }
    selected = __reduce_min_sync(0xFFFFFFFFu, selected);
    if (lane == 0) s.selected[warp] = selected;
    named_barrier_sync(1, kGather);
#pragma unroll
    for (int i = 0; i < kGatherWarps; ++i) selected = min(selected, s.selected[i]);
    int window = 0, keys = -1;
    if (request >= 0 && position >= 0) {
      uint32_t* to = s.offset[index % kLists];
      const int origin = a.window_origin[request], base = a.window_base[request], modulo = max(a.window_modulo[request], 1);
      uint32_t found[kFinds];
      find(rows, request, thread, selected, found);
      const int first = max(max(position - a.window_tokens + 1, 0), origin);
      window = max(position - first + 1, 0);
#pragma unroll 1
      for (int i = thread; i < window; i += kGather)
        to[i] = static_cast<uint32_t>((base + (first + i - origin) % modulo) * a.window_pitch >> 4);
#pragma unroll 1
      for (int i = thread; i < selected; i += kFinds * kGather) {
        if (i != thread) find(rows, request, i, selected, found);
#pragma unroll
        for (int j = 0; j < kFinds; ++j)
          if (i + j * kGather < selected) to[window + i + j * kGather] = found[j];
      }
      keys = window + selected;
    }
    if (thread == 0) {
      mbarrier_wait(&s.unlisted[index % kLists], (index / kLists & 1) ^ 1);
      s.window_of[index % kLists] = window, s.keys_of[index % kLists] = keys;
      mbarrier_arrive(&s.listed[index % kLists]);
    }
    if (!drafts && t + gridDim.x < a.tokens) {
      const int next = t + gridDim.x;
      if (32 * thread < a.chosen) prefetch_line(a.rows + next * a.rows_pitch + 32 * thread);
      if (thread == 0) prefetch_line(a.row_to_req + next), prefetch_line(a.positions + next);
    }
    named_barrier_sync(1, kGather);
  }

  // Offsets of the selected rows i, i + 128, i + 256 and i + 384.
  __device__ __forceinline__ void find(const int* rows, int request, int i, int selected, uint32_t (&found)[kFinds]) const {
    if constexpr (drafts) {
#pragma unroll
      for (int j = 0; j < kFinds; ++j)
        found[j] = static_cast<uint32_t>((static_cast<int64_t>(request) * a.block + i + j * kGather) * a.block_pitch >> 4);
      return;
    }
    const int* table = a.block_table + request * a.table_pitch;
    int row[kFinds], block[kFinds];
#pragma unroll
    for (int j = 0; j < kFinds; ++j) row[j] = i + j * kGather < selected ? rows[i + j * kGather] : 0;
#pragma unroll
    for (int j = 0; j < kFinds; ++j) {
      block[j] = i + j * kGather < selected ? row[j] / a.block_rows : 0;
      row[j] -= block[j] * a.block_rows;
    }
#pragma unroll
    for (int j = 0; j < kFinds; ++j) block[j] = i + j * kGather < selected ? table[block[j]] : 0;
#pragma unroll
    for (int j = 0; j < kFinds; ++j)
      found[j] = static_cast<uint32_t>((block[j] * a.block_pitch + static_cast<int64_t>(row[j]) * (fp4 ? kFp4Row : kFp8Row)) >> 4);
  }

  // Whether step `step` of a list has a batch of this kind.
  __device__ __forceinline__ bool has(const Unit& u, int kind) const {
    if (!fp4) return kind < 2;
    const int window_rows = s.window_of[u.slot] - u.step * kStep;
    return kind == 0 ? window_rows > 0 : kind == 1 ? window_rows > 32 : window_rows < kStep;
  }
  // Makes `u` the batch after it of the same list; false where that is the last.
  __device__ __forceinline__ bool advance(Unit& u) const {
    for (int kind = u.kind + 1; kind < 3; ++kind)
      if (has(u, kind)) {
        u.kind = kind;
        return true;
      }
    ++u.step;
    if (u.step >= steps_of(s.keys_of[u.slot])) return false;
    u.kind = fp4 && !has(u, 0) ? 2 : 0;
    return true;
  }

  // Asks for a batch. Rows past the list, and those of the other kind, give zeros. Their places are read first, so that no load
  // waits for the place of the one after it.
  __device__ __forceinline__ void load(const Unit& u) {
    const int lane = anew(this->lane), warp = anew(this->warp);
    const bool narrow = fp4 && u.kind == 2;
    const int window = s.window_of[u.slot], keys = s.keys_of[u.slot];
    const int first = u.step * kStep + (narrow ? 2 * warp + (lane >> 4) : 32 * u.kind + warp), pitch = narrow ? 16 : 8;
    uint32_t place[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + pitch * i;
      place[i] = row < keys && (!fp4 || (row < window) != narrow) ? s.offset[u.slot][row] : kNone;
    }
    const int codes = 16 * (narrow ? lane & 15 : lane), scales = narrow ? kWidth / 2 + 2 * (lane & 15) : kWidth + (lane >> 1 & ~1);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load_row(i, fp4 ? !narrow : first + pitch * i < window, place[i], codes, scales);
  }
  __device__ __forceinline__ void load_row(int i, bool in_window, uint32_t place, int codes, int scales) {
    const uint8_t* from = (in_window ? a.window : a.compressed) + (static_cast<uint64_t>(place) << 4);
    load_some16(batch.codes[i], from + codes, place != kNone);
    load_some2(batch.scales[i], from + scales, place != kNone);
  }
  // Row i of a step's second batch of fp8_32 rows.
  __device__ __forceinline__ void load8(const Unit& u, int i) {
    const int lane = anew(this->lane), warp = anew(this->warp), row = u.step * kStep + 32 + warp + 8 * i;
    const bool in_window = row < s.window_of[u.slot];
    const uint32_t place = row < s.keys_of[u.slot] && (!fp4 || in_window) ? s.offset[u.slot][row] : kNone;
    load_row(i, fp4 || in_window, place, 16 * lane, kWidth + (lane >> 1 & ~1));
  }

  // Expands a batch into a tile. Rows of the other kind are left alone. The loops have no branch, so that rows overlap.
  // Lane l holds pieces 2 l and 2 l + 1; every other four lanes begin with the second, so that eight lanes meet eight banks.
  // With `rolling`, a row's registers take the same row of the step's second batch as soon as they are free.
  template <bool rolling>
  __device__ __forceinline__ void expand8(const Unit& u, uint32_t tile, uint64_t* empty, uint32_t parity) {
    const int lane = anew(this->lane), warp = anew(this->warp);
    mbarrier_wait(&empty[u.kind], parity);
    const int late = (lane >> 2) & 1, left = s.window_of[u.slot] - u.step * kStep - 32 * u.kind - warp;
    uint32_t at[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) at[j] = tile + u.kind * 4096 + piece_offset(warp, 2 * lane + (late ^ j));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i < kBatch - 1) hold(batch.codes[i + 1], batch.scales[i + 1]);
      const uint4 c = batch.codes[i];
      const uint32_t scale = E::ue8m0(lane & 2 ? batch.scales[i] >> 8 : batch.scales[i] & 0xFF);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t v[4];
        E::fp8(late == j ? c.x : c.z, scale, v[0], v[1]);
        E::fp8(late == j ? c.y : c.w, scale, v[2], v[3]);
        store16(at[j] + i * 128 * kGatherWarps, v, !fp4 || kGatherWarps * i < left);
      }
      if (rolling) load8(u, i);
    }
  }
  // Lane h of half a warp holds pieces 4 h to 4 h + 3 and takes piece j ^ (h / 2) % 4 of them as its j-th.
  __device__ __forceinline__ void expand4(const Unit& u, uint32_t tile, uint64_t* empty, uint32_t parity) {
    const int lane = anew(this->lane), warp = anew(this->warp);
    mbarrier_wait(&empty[0], parity);
    const int h = lane & 15, turn = (h >> 1) & 3, begin = s.window_of[u.slot] - u.step * kStep - 2 * warp - (lane >> 4);
    const uint32_t at = tile + piece_offset(2 * warp + (lane >> 4), 4 * h + turn);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i < kBatch - 1) hold(batch.codes[i + 1], batch.scales[i + 1]);
      if (i == kBatch / 2) mbarrier_wait(&empty[1], parity);
      uint4 c = batch.codes[i];
      if (turn & 1) c = make_uint4(c.y, c.x, c.w, c.z);
      if (turn & 2) c = make_uint4(c.z, c.w, c.x, c.y);
      const uint32_t words[4] = {c.x, c.y, c.z, c.w};
      const uint32_t low = E::e4m3_scale(turn & 2 ? batch.scales[i] >> 8 : batch.scales[i] & 0xFF);
      const uint32_t high = E::e4m3_scale(turn & 2 ? batch.scales[i] & 0xFF : batch.scales[i] >> 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t v[4];
        E::fp4(words[j], j & 2 ? high : low, v);
        store16((at ^ j << 4) + i * 256 * kGatherWarps, v, 2 * kGatherWarps * i >= begin);
      }
    }
  }

  // Expands a batch into its stage, and asks for the step's second batch where `rolling`.
  __device__ __forceinline__ void expand(const Unit& u, uint32_t serial, bool rolling) {
    const int stage = serial % kStages;
    const uint32_t tile = shared_address(s.keys[stage]), parity = (serial / kStages & 1) ^ 1;
    if (u.kind == 2)
      expand4(u, tile, s.empty[stage], parity);
    else if (rolling)
      expand8<true>(u, tile, s.empty[stage], parity);
    else
      expand8<false>(u, tile, s.empty[stage], parity);
  }

  // Fills a stage for each step of each row; `serial` counts the steps of all rows. The row after it is listed once both stages
  // are full, and at the latest before the last step.
  __device__ __forceinline__ void run() {
    const int tokens = rows_of(a);
    uint32_t serial = 0;
    int index = 0;
    int t = blockIdx.x;
    if (t < tokens) list(t, 0);
    for (; t < tokens; t += gridDim.x, ++index) {
      Unit u{index % kLists, 0, fp4 && s.window_of[index % kLists] <= 0 ? 2 : 0};
      bool listed = t + static_cast<int>(gridDim.x) >= tokens;
      bool some = s.keys_of[u.slot] > 0;
      if (some) load(u);
      while (some) {
        if (!listed && (u.step >= kStages || u.step + 1 == steps_of(s.keys_of[u.slot]))) list(t + gridDim.x, index + 1), listed = true;
        const bool rolling = u.kind == 0 && has(u, 1);
        expand(u, serial, rolling);
        const int step = u.step;
        some = advance(u);
        if (u.step != step) {
          fence_proxy_async();  // It waits for this thread's loads too: no batch may be on its way here.
          mbarrier_arrive(&s.full[serial % kStages]);
          ++serial;
        }
        if (some && !rolling) load(u);
      }
      if (!listed) list(t + gridDim.x, index + 1);
    }
  }
};

}  // namespace di::attention
