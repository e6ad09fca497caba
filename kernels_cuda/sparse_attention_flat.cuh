// Sparse attention over rows of BF16, which go from memory to the matrix unit as they are.
//
// A step is 64 keys of the row's list, as over quantised rows, with the same products in the same order: the bits are equal.
// Four warpgroups:
//   gather    two warps find where a row's keys begin, two copy their bytes, by copies that need no registers
//   score     Q K^T of a step, the softmax's weights into shared memory
//   value 2x  output += weights V, each for two quarters of the columns, which stay in registers for the row
// Keys wait in a ring of units, each a half of the columns of 64 rows, and every unit is free as soon as its last product
// has read it. Half of the query goes to registers of the score group, so that as much of shared memory again is the ring's; the
// output leaves by the units that its last values came in.
#pragma once

#include "sparse_attention_flat_products.cuh"

namespace di::attention::flat {

// Two warps find where the keys of a step begin. What they need of it is found in parts, each a step after the one before, and the
// next row is listed bit by bit meanwhile. They run two steps ahead of the warps that copy.
struct Find {
  const Arguments& a;
  const CUtensorMap& query;
  Shared& s;
  int thread, lane;  // The thread finds that key of a step.
  int window, keys;  // Of the row.
  // By lanes, of the row: the request; how far after the window's origin its keys begin (of the next row: its position); the origin;
  // the base; the modulo.
  int facts, next_facts;
  // The next row's first -1 among the entries before `ahead`, but for the last ones, of which this thread holds one.
  int selected, ahead, probe;

  static __device__ __forceinline__ int fact(int facts, int i) { return __shfl_sync(0xFFFFFFFFu, facts, i); }
  __device__ __forceinline__ void look_ahead(int t) {
    if (probe < 0) selected = min(selected, ahead - kFinders + thread);
    probe = ahead + thread < a.chosen ? a.rows[t * a.rows_pitch + ahead + thread] : 0;
    if (ahead == 0) ask_row(t);
    if (ahead == kFinders) ask_window();
    ahead += kFinders;
  }
  __device__ __forceinline__ void ask_row(int t) {
    if (lane < 2) next_facts = (lane == 0 ? a.row_to_req : a.positions)[t];
  }
  __device__ __forceinline__ void ask_window() {
    const int request = fact(next_facts, 0);
    const int* const from = lane == 2 ? a.window_origin : lane == 3 ? a.window_base : a.window_modulo;
    if (request >= 0 && lane >= 2 && lane < 5) next_facts = from[request];
  }
  // All of it at once for the block's first row, for which everyone waits.
  __device__ __forceinline__ void look_at_first(int t) {
    ask_row(t);
    constexpr int kBatch = 10;
    for (int first = thread; first < a.chosen; first += kBatch * kFinders) {
      int entries[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = first + i * kFinders;
        entries[i] = at < a.chosen ? a.rows[t * a.rows_pitch + at] : 0;
      }
#pragma unroll
      for (int i = kBatch - 1; i >= 0; --i)
        if (entries[i] < 0) selected = min(selected, first + i * kFinders);
    }
    ask_window();
    ahead = max(a.chosen, 1) + 2 * kFinders - 1;
  }
  __device__ __forceinline__ bool looks_ahead() const { return ahead < max(a.chosen, 1) + 2 * kFinders - 1; }
  // Goes on to row t, the block's row number `index`, and tells the others how many keys it has.
  __device__ __forceinline__ void advance(int t, int index) {
    while (looks_ahead()) look_ahead(t);
    selected = __reduce_min_sync(0xFFFFFFFFu, selected);
    if (lane == 0) s.selected[thread / 32] = selected;
    named_barrier_sync(kListing, kFinders);
    selected = min(s.selected[0], s.selected[1]);
    window = 0, keys = -1, facts = next_facts;
    const int position = fact(facts, 1), origin = fact(facts, 2);
    if (fact(facts, 0) >= 0 && position >= 0) {
      const int first = max(max(position - a.window_tokens + 1, 0), origin);
      window = max(position - first + 1, 0), keys = window + selected;
      if (lane == 1) facts = first - origin;
    }
    if (thread == 0) {
      mbarrier_wait(&s.unlisted[index % 2], (index / 2 & 1) ^ 1);
      s.keys_of[index % 2] = keys;
      mbarrier_arrive(&s.listed[index % 2]);
    }
    named_barrier_sync(kListing, kFinders);
    selected = a.chosen, ahead = 0, probe = 0;
  }

  // Whether the thread's key of a step is a selected row.
  __device__ __forceinline__ bool selects(int step) const { return step * kStep + thread >= window && step * kStep + thread < keys; }
  __device__ __forceinline__ int look(int t, int step) const {
    return selects(step) ? a.rows[t * a.rows_pitch + step * kStep + thread - window] : 0;
  }
  __device__ __forceinline__ int2 enter(int step, int row) const {
    const int block = static_cast<uint32_t>(row) / static_cast<uint32_t>(a.block_rows), request = fact(facts, 0);
    return make_int2(selects(step) ? a.block_table[request * a.table_pitch + block] : 0, row - block * a.block_rows);
  }
  // Where it begins; past the list, some address that may be read.
  __device__ __forceinline__ uint64_t place_of(int step, int2 entry) const {
    const uint32_t key = step * kStep + thread, start = fact(facts, 1), base = fact(facts, 3), modulo = max(fact(facts, 4), 1);
    if (selects(step))
      return reinterpret_cast<uint64_t>(a.compressed) + entry.x * a.block_pitch + entry.y * static_cast<int64_t>(kRowBytes);
    const uint64_t window = reinterpret_cast<uint64_t>(a.window);
    return step * kStep + thread < keys ? window + (base + (start + key) % modulo) * a.window_pitch : window;
  }

  __device__ __forceinline__ void run() {
    const Rows rows(a);
    uint32_t serial = 0;
    int index = 0;
    selected = a.chosen, ahead = 0, probe = 0;
    if (rows.first() >= 0) look_at_first(rows.first());
    for (int t = rows.first(), next; t >= 0; t = next) {
      advance(t, index++);
      next = rows.after(t);
      if (keys > 0) row(t, serial, next);
    }
  }
  __device__ __forceinline__ void row(int t, uint32_t& serial, int next) {
    int row = look(t, 1);
    int2 entry = enter(0, look(t, 0));
    uint64_t found = place_of(0, entry);
    entry = enter(1, row), row = look(t, 2);
#pragma unroll 1
    for (int step = 0; step * kStep < keys; ++step, ++serial) {
      mbarrier_wait(&s.copied[serial & 1], (serial >> 1 & 1) ^ 1);
      s.from[serial & 1][thread & 1][thread >> 1] = found;
      mbarrier_arrive(&s.found[serial & 1]);
      const int left = keys - step * kStep;
      const bool query_comes = next >= 0 && left <= 2 * kStep && (step == 0 || left > kStep);
      if (query_comes && thread < kWidth / 64) prefetch_box3_hint(&query, 64 * thread, 0, next, evict_first_policy());
      found = place_of(step + 1, entry), entry = enter(step + 2, row), row = look(t, step + 3);
#pragma unroll 1
      for (int i = 0; i < 4 && next >= 0 && looks_ahead(); ++i) look_ahead(next);
    }
  }
};

// Two warps copy the keys. That takes all of their time: a warp waits where it asks for more than the memory takes.
struct Copy {
  const Arguments& a;
  Shared& s;
  int warp, lane;

  // Half of the columns of 64 rows into a unit: a warp takes 512 bytes of every second row; zeros past the `left` keys of the list.
  __device__ __forceinline__ void copy(int half, int left, int slot, int unit) const {
    const uint32_t at = shared_address(s.units[unit]) + piece_offset(warp, lane), list = shared_address(s.from[slot][warp]);
    const uint32_t offset = half * (kRowBytes / 2) + 16 * lane;
#pragma unroll 1
    for (int n = 0; n < kStep / 2; n += 8) {
      uint4 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = load_shared16(list + 8 * n + 16 * i);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint4 pair = pairs[i / 2];
        const uint64_t from = i % 2 == 0 ? static_cast<uint64_t>(pair.y) << 32 | pair.x : static_cast<uint64_t>(pair.w) << 32 | pair.z;
        const uint32_t to = (at ^ (i % 4 * 32)) + (n + i) * 256;
        async_copy16(to, reinterpret_cast<const uint8_t*>(from + offset), warp + 2 * (n + i) < left);
      }
    }
    async_copy_arrive(&s.full[unit]);
  }
  __device__ __forceinline__ void run() {
    const Rows rows(a);
    uint32_t serial = 0;
    int index = 0;
    Place place;
#pragma unroll 1
    for (int t = rows.first(); t >= 0; t = rows.after(t), ++index) {
      int left = take_keys(s, index);
#pragma unroll 1
      for (; left > 0; left -= kStep, ++serial) {
        mbarrier_wait(&s.found[serial & 1], serial >> 1 & 1);
#pragma unroll 1
        for (int half = 0; half < 2; ++half, place.advance()) {
          mbarrier_wait(&s.empty[place.unit], place.parity ^ 1);
          copy(half, left, serial & 1, place.unit);
        }
        mbarrier_arrive(&s.copied[serial & 1]);
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1) attend_flat_rows(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap query,
                                                                const __grid_constant__ CUtensorMap result) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kUnits; ++i) mbarrier_init(&s.full[i], kCopiers), mbarrier_init(&s.empty[i], 2 * kGroup);
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) mbarrier_init(&s.weighed[i][j], kGroup);
      mbarrier_init(&s.scored[i], 4), mbarrier_init(&s.unweighed[i], 2 * kGroup);
      mbarrier_init(&s.listed[i], 1), mbarrier_init(&s.unlisted[i], 3 * kGroup + kCopiers);
      mbarrier_init(&s.found[i], kFinders), mbarrier_init(&s.copied[i], kCopiers);
    }
    mbarrier_init(&s.queried, 1);
    fence_mbarrier_init();
    prefetch_tensor_map(&query), prefetch_tensor_map(&result);
  }
  start_dependents();
  wait_for_producer();
  __syncthreads();
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp < 4) {
    registers_down<64>();
    if (warp < 2) {
      Copy copy{a, s, warp, lane};
      copy.run();
    } else {
      Find find{a, query, s, 32 * (warp - 2) + lane, lane};
      find.run();
    }
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
