// Sparse attention over rows of BF16, which go from memory to the matrix unit as they are.
//
// A step is 64 keys of the row's list, as over quantised rows, with the same products in the same order: the bits are equal.
// Four warpgroups:
//   gather    lists a row's keys and asks for their bytes, by copies that need no registers
//   score     Q K^T of a step, the softmax's weights into shared memory
//   value 2x  output += weights V, each for two quarters of the columns, which stay in registers for the row
// Keys wait in a ring of units, each a quarter of the columns of 64 rows, and every unit is free as soon as its last product
// has read it. Half of the query comes by the ring as well, into registers of the score group, so that its products take half
// the bytes from shared memory, and the output leaves by the units that its last values came in.
#pragma once

#include "sparse_attention_flat_products.cuh"

namespace di::attention::flat {

// The warpgroup that gathers must never wait for memory while units are free, and a warp waits as soon as it uses what it asked
// for. So what it needs of a step is found in three parts, each a step after the one before, and the next row is listed bit by
// bit between the units of this one.
struct Gather {
  const Arguments& a;
  const CUtensorMap& query;
  Shared& s;
  int warp, lane;
  int request, window, keys, start, base, modulo;                                      // The row; its window begins `start` after the origin.
  int next_request, next_position, next_origin, next_base, next_modulo;                // The next row.
  int selected, ahead, probe;  // Its first -1 among the entries before `ahead`, but for the last ones, of which this thread holds one.

  __device__ __forceinline__ void look_ahead(int t) {
    const int thread = 32 * warp + lane;
    if (probe < 0) selected = min(selected, ahead - kGroup + thread);
    probe = ahead + thread < a.chosen ? a.rows[t * a.rows_pitch + ahead + thread] : 0;
    if (ahead == 0) next_request = a.row_to_req[t], next_position = a.positions[t];
    if (ahead == kGroup && next_request >= 0)
      next_origin = a.window_origin[next_request], next_base = a.window_base[next_request], next_modulo = a.window_modulo[next_request];
    ahead += kGroup;
  }
  __device__ __forceinline__ bool looks_ahead() const { return ahead < max(a.chosen, 1) + 2 * kGroup - 1; }
  // Goes on to row t, the block's row number `index`, and tells the others how many keys it has.
  __device__ __forceinline__ void advance(int t, int index) {
    while (looks_ahead()) look_ahead(t);
    selected = __reduce_min_sync(0xFFFFFFFFu, selected);
    if (lane == 0) s.selected[warp] = selected;
    named_barrier_sync(kListing, kGroup);
    selected = min(min(s.selected[0], s.selected[1]), min(s.selected[2], s.selected[3]));
    request = next_request, base = next_base, modulo = max(next_modulo, 1);
    window = 0, keys = -1;
    if (request >= 0 && next_position >= 0) {
      const int first = max(max(next_position - a.window_tokens + 1, 0), next_origin);
      start = first - next_origin, window = max(next_position - first + 1, 0), keys = window + selected;
    }
    if (warp == 0 && lane == 0) {
      mbarrier_wait(&s.unlisted[index % 2], (index / 2 & 1) ^ 1);
      s.keys_of[index % 2] = keys;
      mbarrier_arrive(&s.listed[index % 2]);
    }
    named_barrier_sync(kListing, kGroup);
    selected = a.chosen, ahead = 0, probe = 0;
  }

  // Lane i < 16 finds row 2 warp + i % 2 + 8 (i / 2) of a step; `selects` says whether that is a selected row.
  __device__ __forceinline__ int key_of(int step) const { return step * kStep + 2 * warp + (lane & 1) + 4 * (lane & 14); }
  __device__ __forceinline__ bool selects(int step) const { return key_of(step) >= window && key_of(step) < keys; }
  __device__ __forceinline__ int look(int t, int step) const { return selects(step) ? a.rows[t * a.rows_pitch + key_of(step) - window] : 0; }
  __device__ __forceinline__ int2 enter(int step, int row) const {
    const int block = row / a.block_rows;
    return make_int2(selects(step) ? a.block_table[request * a.table_pitch + block] : 0, row - block * a.block_rows);
  }
  // In units of 16 bytes, the highest bit saying in which store; kNone past the list.
  __device__ __forceinline__ uint32_t place_of(int step, int2 entry) const {
    if (key_of(step) >= keys) return kNone;
    if (!selects(step)) return static_cast<uint32_t>((base + (start + key_of(step)) % modulo) * a.window_pitch >> 4);
    return 0x80000000u | static_cast<uint32_t>((entry.x * a.block_pitch + static_cast<int64_t>(entry.y) * kRowBytes) >> 4);
  }
  __device__ __forceinline__ const uint8_t* address(uint32_t where) const {
    return (where >> 31 ? a.compressed : a.window) + (static_cast<uint64_t>(where & 0x7FFFFFFFu) << 4);
  }
  // A quarter of 64 rows into a unit: half a warp takes 256 bytes of a row; zeros past the list.
  __device__ __forceinline__ void copy(const uint32_t (&where)[8], int quarter, int unit) const {
    const uint32_t at = shared_address(s.units[unit]) + piece_offset(2 * warp + (lane >> 4), lane & 15);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool some = where[i] != kNone;
      const uint8_t* from = some ? address(where[i]) : a.window;
      async_copy16(at + i * 1024, from + quarter * kRowBytes / kQuarters + 16 * (lane & 15), some);
    }
    async_copy_arrive(&s.full[unit]);
  }
  // The quarters of the query that go to registers.
  __device__ __forceinline__ void send_query(int t, Place& place) {
#pragma unroll 1
    for (int j = 0; j < kHeld; ++j, place.advance(1)) {
      mbarrier_wait(&s.empty[place.unit], place.parity ^ 1);
      if (warp != 0 || lane != 0) {
        mbarrier_arrive(&s.full[place.unit]);
        continue;
      }
      fence_proxy_async();  // The unit's bytes came and went by ordinary accesses.
      mbarrier_arrive_expect(&s.full[place.unit], kUnit);
      for (int i = 0; i < 2; ++i) tensor_copy3(s.units[place.unit] + i * kSlab, &query, 128 * j + 64 * i, 0, t, &s.full[place.unit]);
    }
  }

  __device__ __forceinline__ void run() {
    const int tokens = rows_of(a), stride = gridDim.x;
    Place place;
    int index = 0, t = blockIdx.x;
    if (t >= tokens) return;
    selected = a.chosen, ahead = 0, probe = 0;
    for (advance(t, 0);; t += stride, advance(t, ++index)) {
      const bool more = t + stride < tokens;
      if (keys > 0) row(t, place, more);
      if (!more) break;
    }
  }
  __device__ __forceinline__ void row(int t, Place& place, bool more) {
    const int steps = steps_of(keys);
    int third = look(t, 2), fourth = look(t, 3);
    const int2 entries[2] = {enter(0, look(t, 0)), enter(1, look(t, 1))};
    int2 entry = enter(2, third);
    uint32_t found = place_of(0, entries[0]), next = place_of(1, entries[1]);
    send_query(t, place);
    for (int step = 0; step < steps; ++step) {
      uint32_t where[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) where[i] = __shfl_sync(0xFFFFFFFFu, found, 2 * i + (lane >> 4));
      found = next, next = place_of(step + 2, entry);
      entry = enter(step + 3, fourth), fourth = look(t, step + 4);
      if (more && step == max(steps - 2, 0) && warp == 0 && lane < kWidth / 64) prefetch_box3(&query, 64 * lane, 0, t + gridDim.x);
#pragma unroll 1
      for (int j = 0; j < kQuarters; ++j, place.advance(1)) {
        mbarrier_wait(&s.empty[place.unit], place.parity ^ 1);
        copy(where, j, place.unit);
        if (more && looks_ahead()) look_ahead(t + gridDim.x);
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1) attend_flat_rows(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap query,
                                                                const __grid_constant__ CUtensorMap result) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kUnits; ++i) mbarrier_init(&s.full[i], kGroup), mbarrier_init(&s.empty[i], kGroup);
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) mbarrier_init(&s.weighed[i][j], kGroup);
      mbarrier_init(&s.scored[i], 4), mbarrier_init(&s.unweighed[i], 2 * kGroup);
      mbarrier_init(&s.listed[i], 1), mbarrier_init(&s.unlisted[i], 3 * kGroup);
    }
    mbarrier_init(&s.queried, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp < 4) {
    registers_down<64>();
    Gather gather{a, query, s, warp, lane};
    gather.run();
  } else if (warp < 8) {
    Score score{a, query, s, warp % 4, lane};
    score.run();
  } else {
    registers_up<160>();
    Value value{a, result, s, warp / 4 - 2, warp % 4, lane};
    value.run();
  }
}

}  // namespace di::attention::flat
