// The two warpgroups of sparse attention that gather the stored bytes of a row's keys and expand them.
#pragma once

#include "sparse_attention_rows.cuh"
#include "sparse_attention_shared.cuh"

namespace di::attention {

constexpr uint32_t kNone = 0xFFFFFFFFu;

// 16 bytes, or zeros without an access. These loads keep their place among other accesses to memory: loads that may move are put
// together by the compiler behind three quarters of the batch before theirs.
__device__ __forceinline__ void load_some16(uint4& v, const uint8_t* from, bool some) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(from), "r"(static_cast<int>(some)) : "memory");
}

// Two bytes, or zero without an access.
__device__ __forceinline__ void load_some2(uint32_t& v, const uint8_t* from, bool some) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.u16 %0, [%1]; }"
               : "=&r"(v) : "l"(from), "r"(static_cast<int>(some)) : "memory");
}

// Raw bytes of one batch of rows, held by a thread between its loads and its stores.
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
  int window, keys;  // Keys of the list: in the window, and all.
};

template <class E, bool fp4>
struct Gather {
  const Arguments& a;
  Shared& s;
  int warp, lane;
  Batch batch;

  // Where a thread finds the rows of a batch: the first of them and how far on the next is, which rows of the list are of the
  // batch's kind, and its own bytes of a row.
  struct Source {
    const uint8_t* store;
    const uint32_t* offsets;
    int row, pitch, low, high, window, codes, scales;
  };

  // Whether step `step` of a list has a batch of this kind.
  __device__ __forceinline__ bool has(const Unit& u, int kind) const {
    if (!fp4) return kind < 2;
    const int window_rows = u.window - u.step * kStep;
    return kind == 0 ? window_rows > 0 : kind == 1 ? window_rows > 32 : window_rows < kStep;
  }
  __device__ __forceinline__ Unit first_of(int slot, int keys) const {
    const int window = s.window_of[slot];
    return Unit{slot, 0, fp4 && window <= 0 ? 2 : 0, window, keys};
  }
  // Makes `u` the batch after it of the same list; false where that is the last.
  __device__ __forceinline__ bool advance(Unit& u) const {
    for (int kind = u.kind + 1; kind < 3; ++kind)
      if (has(u, kind)) {
        u.kind = kind;
        return true;
      }
    ++u.step;
    if (u.step >= steps_of(u.keys)) return false;
    u.kind = fp4 && !has(u, 0) ? 2 : 0;
    return true;
  }

  __device__ __forceinline__ Source source(const Unit& u) const {
    const int lane = anew(this->lane), warp = anew(this->warp), window = u.window, keys = u.keys;
    Source from;
    from.offsets = s.offset[u.slot], from.window = window;
    if (fp4 && u.kind == 2) {
      from.store = a.compressed, from.low = window, from.high = keys;
      from.row = u.step * kStep + 2 * warp + (lane >> 4), from.pitch = 2 * kGatherWarps;
      from.codes = 16 * (lane & 15), from.scales = kWidth / 2 + 2 * (lane & 15);
    } else {
      from.store = a.window, from.low = 0, from.high = fp4 ? window : keys;
      from.row = u.step * kStep + 32 * u.kind + warp, from.pitch = kGatherWarps;
      from.codes = 16 * lane, from.scales = kWidth + (lane >> 1 & ~1);
    }
    return from;
  }
  // The place of row i of a batch; rows past the list, and those of the other kind, have none.
  __device__ __forceinline__ uint32_t place(const Source& from, int i) const {
    const int row = from.row + i * from.pitch;
    return row >= from.low && row < from.high ? from.offsets[row] : kNone;
  }
  // Asks for row i; one that has no place gives zeros.
  __device__ __forceinline__ void load(const Source& from, int i, uint32_t place) {
    const uint8_t* store = fp4 || from.row + i * from.pitch < from.window ? from.store : a.compressed;
    const uint8_t* bytes = store + (static_cast<uint64_t>(place) << 4);
    load_some16(batch.codes[i], bytes + from.codes, place != kNone);
    load_some2(batch.scales[i], bytes + from.scales, place != kNone);
  }

  // Expands a batch into a tile. Rows of the other kind are left alone. The loops have no branch, so that rows overlap. A row's
  // registers take the same row of the batch after it (`next`) as soon as they are free.
  // Lane l holds pieces 2 l and 2 l + 1; every other four lanes begin with the second, so that eight lanes meet eight banks.
  __device__ __forceinline__ void expand8(const Unit& u, uint32_t tile, uint64_t* empty, uint32_t parity, const Source& next) {
    const int lane = anew(this->lane), warp = anew(this->warp);
    const int late = (lane >> 2) & 1, left = u.window - u.step * kStep - 32 * u.kind - warp;
    uint32_t at[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) at[j] = tile + u.kind * 4096 + piece_offset(warp, 2 * lane + (late ^ j));
    mbarrier_wait(&empty[u.kind], parity);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t next_place = place(next, i);
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
      load(next, i, next_place);
      __syncwarp();  // Holds the loads in their place.
    }
  }
  // Lane h of half a warp holds pieces 4 h to 4 h + 3 and takes piece j ^ (h / 2) % 4 of them as its j-th.
  __device__ __forceinline__ void expand4(const Unit& u, uint32_t tile, uint64_t* empty, uint32_t parity, const Source& next) {
    const int lane = anew(this->lane), warp = anew(this->warp);
    const int h = lane & 15, turn = (h >> 1) & 3, begin = u.window - u.step * kStep - 2 * warp - (lane >> 4);
    const uint32_t at = tile + piece_offset(2 * warp + (lane >> 4), 4 * h + turn);
    mbarrier_wait(&empty[0], parity);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t next_place = place(next, i);
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
      load(next, i, next_place);
      __syncwarp();  // Holds the loads in their place.
    }
  }

  // The first batch of the block's row number `index`, once it is listed; false where it has no keys.
  __device__ __forceinline__ bool follows(Unit& u, int index) {
    const int slot = index % kLists;
    mbarrier_wait(&s.listed[slot], index / kLists & 1);
    const int keys = s.keys_of[slot];
    if (keys <= 0) return false;
    u = first_of(slot, keys);
    return true;
  }
  // The first batch of the block's row number `index` or of the first row after it that has keys; false where there is none.
  // Lists without a batch are given back.
  __device__ __forceinline__ bool begin(Unit& u, int& index, int rows) {
    for (; index < rows; ++index) {
      if (follows(u, index)) return true;
      mbarrier_arrive(&s.unlisted[index % kLists]);
    }
    return false;
  }

  // Fills a stage for each step of each row; `serial` counts the steps of all rows. The batch after the one that is expanded is on
  // its way meanwhile, also that of the next row, if that has keys: rows behind it are listed only when this one is done with.
  __device__ __forceinline__ void run() {
    const int tokens = rows_of(a), first = blockIdx.x, rows = first < tokens ? (tokens - first - 1) / static_cast<int>(gridDim.x) + 1 : 0;
    uint32_t serial = 0;
    int index = 0;
    Unit u;
    bool some = false;
    for (;;) {
      if (!some) {
        if (!begin(u, index, rows)) return;
        const Source from = source(u);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) load(from, i, place(from, i));
      }
      Unit n = u;
      const bool ends = !advance(n);
      if (ends) some = ++index < rows && follows(n, index);
      else some = true;
      Source next = source(n);
      if (!some) next.high = 0;
      const int stage = serial % kStages;
      const uint32_t tile = shared_address(s.keys[stage]), parity = (serial / kStages & 1) ^ 1;
      if (u.kind == 2)
        expand4(u, tile, s.empty[stage], parity, next);
      else
        expand8(u, tile, s.empty[stage], parity, next);
      if (ends || n.step != u.step) {
        mbarrier_arrive(&s.full[stage]);  // Who waits for it fences: a fence here would wait for the loads on their way.
        ++serial;
      }
      if (ends) mbarrier_arrive(&s.unlisted[u.slot]);
      u = n;
    }
  }
};

}  // namespace di::attention
