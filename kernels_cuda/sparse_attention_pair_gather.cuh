// The warps of a pair's block that list, gather and expand the block's 32 keys of each step; a warp has every eighth.
#pragma once

#include "sparse_attention_gather.cuh"
#include "sparse_attention_pair_shared.cuh"

namespace di::attention::pair {

template <class E, bool fp4, bool drafts, int rank>
struct Gather {
  static constexpr int kBatch = 4;

  const Arguments& a;
  Shared& s;
  int warp, lane;
  int window, keys, steps;
  uint4 codes[kBatch];
  uint32_t scales[kBatch];

  // ---- the list, of which a warp makes what it reads itself

  // Key number `e` of the warp's.
  __device__ __forceinline__ int key_of(int e) const { return kStep * (e >> 2) + kHalf * rank + 8 * (e & 3) + warp; }

  // Lists row t's first eight steps and asks for its first keys. The window's need no block table and go first.
  __device__ __forceinline__ void list(int t) {
    const int lane = anew(this->lane);
    const int request = drafts ? t / a.block : a.row_to_req[t], position = a.positions[drafts ? request : t], tokens = rows_of(a);
    const bool alive = t < tokens && request >= 0 && position >= 0;
    const int origin = alive ? a.window_origin[request] : 0, base = alive ? a.window_base[request] : 0;
    const unsigned modulo = alive ? max(a.window_modulo[request], 1) : 1;
    const int first = first_of_window(a, position, origin);
    keys = window = alive ? max(position - first + 1, 0) : 0;
#pragma unroll 1
    for (int e = lane; key_of(e) < window; e += 32)
      s.offset[key_of(e)] =
          static_cast<uint32_t>((base + static_cast<unsigned>(first + key_of(e) - origin) % modulo) * a.window_pitch >> 4);
    __syncwarp();
    const bool early = fp4 ? window > kHalf * rank : window >= kHalf * (rank + 1);
    if (early) load_all<false>(0);
    prefetch<false>(0, window);
    mbarrier_wait(&s.listed, 0);
    keys = s.keys_of, steps = keys > 0 ? steps_of(keys) : 0;
    if (keys <= 0) return;
    find(t, request, lane);
    __syncwarp();
    if (!early) load_all<fp4>(0);
    prefetch<true>(window, keys);
    if (!fp4 || window <= kHalf * rank + kStep) list_on(t);
  }
  // The rest of the list, where nobody waits for the first keys any more.
  __device__ __forceinline__ void list_on(int t) {
#pragma unroll 1
    for (int e = anew(lane) + 32; key_of(e) < keys; e += 32) find(t, drafts ? t / a.block : a.row_to_req[t], e);
    __syncwarp();
  }

  // The place of the warp's key number `e` if it is a selected row.
  __device__ __forceinline__ void find(int t, int request, int e) {
    const int at = key_of(e);
    if (at < window || at >= keys) return;
    int64_t place;
    if (drafts) {
      place = static_cast<int64_t>(request * a.block + at - window) * a.block_pitch;
    } else {
      const unsigned row = a.rows[t * a.rows_pitch + at - window], block = row / static_cast<unsigned>(a.block_rows);
      place = a.block_table[request * a.table_pitch + block] * a.block_pitch +
              static_cast<int64_t>(row - block * a.block_rows) * (fp4 ? kFp4Row : kFp8Row);
    }
    s.offset[at] = static_cast<uint32_t>(place >> 4);
  }

  // Asks L2 for those of the rows of the second to the fourth step that are keys from `low` to `high`: they are waited for one
  // after the other, and nothing is under way yet that could hide it.
  template <bool selected>
  __device__ __forceinline__ void prefetch(int low, int high) const {
    constexpr int bytes = fp4 && selected ? kFp4Row : kFp8Row;
    const uint8_t* store = selected ? a.compressed : a.window;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int at = key_of(4 + 4 * i + (lane >> 3)), byte = min(128 * (lane & 7), bytes - 1);
      if (at >= low && at < high) prefetch_line_l2(store + (static_cast<uint64_t>(s.offset[at]) << 4) + byte);
    }
  }

  // ---- bytes: a thread holds 16 of each of four rows, of fp8_32 of those of a step (a warp takes a row), of fp4_16 of those of
  // two steps (half a warp takes a row)

  template <bool four>
  __device__ __forceinline__ int row(int i) const {  // Among the 32 keys, from the warp's first on.
    return four ? 16 * (i & 1) + 8 * (anew(lane) >> 4) : 8 * i;
  }
  template <bool four>
  __device__ __forceinline__ int key(int step, int i) const {
    return kStep * (step + (four ? i >> 1 : 0)) + kHalf * rank + warp + row<four>(i);
  }

  template <bool four>
  __device__ __forceinline__ uint32_t place(int step, int i) const {
    const int at = key<four>(step, i);
    return at < (fp4 && !four ? window : keys) && (!four || at >= window) ? s.offset[at] : kNone;
  }
  // Asks for row i; one that has no place gives zeros.
  template <bool four>
  __device__ __forceinline__ void load(int step, int i, uint32_t place) {
    const uint8_t* store = four || (!fp4 && key<four>(step, i) >= window) ? a.compressed : a.window;
    const uint8_t* bytes = store + (static_cast<uint64_t>(place) << 4);
    const int lane = anew(this->lane), part = four ? lane & 15 : lane;
    load_some16(codes[i], bytes + 16 * part, place != kNone);
    load_some2(scales[i], bytes + (four ? kWidth / 2 + 2 * part : kWidth + (part >> 1 & ~1)), place != kNone);
  }
  template <bool four>
  __device__ __forceinline__ void load_all(int step) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load<four>(step, i, place<four>(step, i));
  }

  // ---- expansion

  // Waits until a step's stage is empty; the address of its tile at the warp's first row.
  __device__ __forceinline__ uint32_t enter(int step) const {
    const int stage = step % kRounds;
    if (step == kRounds - 1) mbarrier_wait(&s.held, 0);
    mbarrier_wait_cluster(&s.empty[stage], (step / kRounds & 1) ^ 1);
    return shared_address(s.keys[stage]);
  }
  __device__ __forceinline__ void leave(int step) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.full[step % kRounds]);  // Who waits for it fences.
  }

  // Expands the window's rows of a step, or all; asks for the unit after it.
  template <bool next_four>
  __device__ __forceinline__ void expand8(int step, int next_step) {
    const uint32_t tile = enter(step);
    const int lane = anew(this->lane), late = (lane >> 2) & 1;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t next_place = place<next_four>(next_step, i);
      if (i < kBatch - 1) hold(codes[i + 1], scales[i + 1]);
      const uint4 c = codes[i];
      const uint32_t scale = E::ue8m0(lane & 2 ? scales[i] >> 8 : scales[i] & 0xFF);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t v[4];
        E::fp8(late == j ? c.x : c.z, scale, v[0], v[1]);
        E::fp8(late == j ? c.y : c.w, scale, v[2], v[3]);
        store16(tile + half_piece(warp, 2 * lane + (late ^ j)) + 1024 * i, v, !fp4 || key<false>(step, i) < window);
      }
      load<next_four>(next_step, i, next_place);
    }
  }

  // The same for compressed rows of fp4_16, and zeros behind the list.
  __device__ __forceinline__ void expand4(int step) {
    const int lane = anew(this->lane), h = lane & 15, turn = (h >> 1) & 3;
    uint32_t at = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i == 2 && step + 1 >= steps) return;
      if (i % 2 == 0) at = enter(step + i / 2) + half_piece(warp, 4 * h + turn) + 1024 * (lane >> 4);
      const uint32_t next_place = place<true>(step + 2, i);
      if (i < kBatch - 1) hold(codes[i + 1], scales[i + 1]);
      uint4 c = codes[i];
      if (turn & 1) c = make_uint4(c.y, c.x, c.w, c.z);
      if (turn & 2) c = make_uint4(c.z, c.w, c.x, c.y);
      const uint32_t words[4] = {c.x, c.y, c.z, c.w};
      const uint32_t low = E::e4m3_scale(turn & 2 ? scales[i] >> 8 : scales[i] & 0xFF);
      const uint32_t high = E::e4m3_scale(turn & 2 ? scales[i] & 0xFF : scales[i] >> 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t v[4];
        E::fp4(words[j], j & 2 ? high : low, v);
        store16((at ^ j << 4) + 2048 * (i & 1), v, i >= 2 || key<true>(step, i) >= window);
      }
      load<true>(step + 2, i, next_place);
      if (i % 2 == 1) leave(step + i / 2);
    }
  }

  __device__ __forceinline__ void run(int t) {
    list(t);
    if (keys <= 0) return;
    int step = 0;
    if constexpr (fp4) {
      // A step whose keys are not all in the window has rows of both kinds.
#pragma unroll 1
      for (int left = window - kHalf * rank; left > 0; left -= kStep) {
        if (left > kStep)
          expand8<false>(step, step + 1);
        else
          expand8<true>(step, left >= kHalf ? step + 1 : step);
        if (left >= kHalf) leave(step++);
        if (left > kStep && step == 1) list_on(t);
      }
#pragma unroll 1
      for (; step < steps; step += 2) expand4(step);
    } else {
#pragma unroll 1
      for (; step < steps; ++step) {
        expand8<false>(step, step + 1);
        leave(step);
      }
    }
  }
};

}  // namespace di::attention::pair
