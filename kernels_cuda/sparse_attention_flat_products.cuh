// The warpgroups of sparse attention over BF16 rows that multiply, and what they share with the one that gathers.
#pragma once

#include "sparse_attention.cuh"

namespace di::attention::flat {

constexpr int kThreads = 4 * kGroup, kRowBytes = 2 * kWidth;
constexpr int kQuarter = 2 * kSlab, kUnit = 2 * kQuarter, kUnits = 5;  // Bytes of 64 rows by 128 and by 256 columns.
constexpr int kFinders = 64, kCopiers = 64;  // Threads of the warpgroup that gathers.
enum NamedBarrier { kListing = 1, kScoring = 2, kFirstValue = 3 };

struct Shared {
  alignas(1024) uint8_t q[kUnit];                 // One half of the query, then the other, which stays.
  alignas(1024) uint8_t units[kUnits][kUnit];     // Halves of the steps' columns, in a ring.
  alignas(1024) uint8_t weights[2][2][kSlab];     // Of two steps, in two parts.
  float shrink[2][kHeads], share[2][kHeads];      // By weights: what the output is multiplied by before them, and in the end.
  uint64_t full[kUnits], empty[kUnits];
  uint64_t scored[2], weighed[2][2], unweighed[2];  // By step; weights are handed on by halves of 32 keys.
  uint64_t listed[2], unlisted[2], queried;         // By row of the block.
  uint64_t found[2], copied[2];                     // By step: the places in `from` are there, and read.
  int keys_of[2], selected[2];
  alignas(16) uint64_t from[2][2][kStep / 2];       // Where the keys of two steps begin; of every second key side by side.
};
static_assert(sizeof(Shared) <= 232448);

// A place in the ring, and the parity of the phase in which its unit is full.
struct Place {
  int unit = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++unit == kUnits) unit = 0, parity ^= 1;
  }
  __device__ __forceinline__ int next() const { return unit + 1 == kUnits ? 0 : unit + 1; }
};

// The rows of a block: every gridDim.x-th. Those left after whole rounds are divided where blocks would have nothing to do: two or
// four of them make the same weights of a row, and each adds the values of its own half or quarter of the columns.
struct Rows {
  int whole, left, parts;
  __device__ __forceinline__ explicit Rows(const Arguments& a) {
    const int tokens = rows_of(a), blocks = gridDim.x;
    left = tokens % blocks, whole = tokens - left;
    parts = 4 * left <= blocks ? 4 : 2 * left <= blocks ? 2 : 1;
  }
  __device__ __forceinline__ int first() const { return after(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)); }
  // The row after row t, or -1.
  __device__ __forceinline__ int after(int t) const {
    const int next = t + gridDim.x, place = blockIdx.x;
    if (next < whole) return next;
    return t < whole && place < left * parts ? whole + place / parts : -1;
  }
  __device__ __forceinline__ bool divides(int t) const { return t >= whole && parts > 1; }
};

__device__ __forceinline__ int take_keys(Shared& s, int index) {
  mbarrier_wait(&s.listed[index % 2], index / 2 & 1);
  const int keys = s.keys_of[index % 2];
  mbarrier_arrive(&s.unlisted[index % 2]);
  return keys;
}

// ---- score

struct Score {
  const Arguments& a;
  const CUtensorMap& query;
  Shared& s;
  int warp, lane;
  uint32_t held[16][4];  // Fragments of the query's first half, by 16 columns.
  float scores[32], reference[2], sum[2], sink[2];

  __device__ __forceinline__ int row(int i) const { return 16 * warp + (lane >> 2) + 8 * i; }

  // Asks for a half of the query of row t, once every warp is done with what is there.
  __device__ __forceinline__ void ask_query(int t, int half) {
    named_barrier_sync(kScoring, kGroup);
    if (warp != 0 || lane != 0) return;
    mbarrier_arrive_expect(&s.queried, sizeof s.q);
#pragma unroll 1
    for (int i = 0; i < 4; ++i)
      tensor_copy3_hint(s.q + i * kSlab, &query, 256 * half + 64 * i, 0, t, &s.queried, evict_first_policy());
  }
  // Takes the first half of the query of row t into registers, and asks for the second.
  __device__ __forceinline__ void take_query(int t) {
    mbarrier_wait(&s.queried, 0);
    const uint32_t base = shared_address(s.q);
#pragma unroll
    for (int i = 0; i < 16; ++i) load_matrices(base + piece_offset(16 * warp + (lane & 15), 2 * i + (lane >> 4)), held[i]);
    fence_proxy_async();  // The loads come before the copies that follow.
    ask_query(t, 1);
  }

  // `first`: of a row; the second half of its query may still be on its way.
  __device__ __forceinline__ void multiply(Place& place, uint32_t serial, bool first) {
    const uint64_t q = wgmma_descriptor128(s.q);
#pragma unroll
    for (int half = 0; half < 2; ++half, place.advance()) {
      if (half == 1 && first) mbarrier_wait(&s.queried, 1);
      mbarrier_wait(&s.full[place.unit], place.parity);
      fence_proxy_async();  // The copies were ordinary accesses.
      const uint64_t k = wgmma_descriptor128(s.units[place.unit]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint32_t at = ((i >> 2) * kSlab + (i & 3) * 32) >> 4;
        if (half == 0)
          Wgmma<64>::bf16_rs(scores, held[i], k + at, i > 0);
        else
          Wgmma<64>::bf16_ss(scores, q + at, k + at, true);
        if (i % 8 == 7) wgmma_commit();
      }
    }
    mbarrier_wait(&s.unweighed[serial & 1], (serial >> 1 & 1) ^ 1);  // For weigh(), beside the products.
    wgmma_wait<1>();
    if (lane == 0) mbarrier_arrive(&s.scored[serial & 1]);  // All but made; nobody reads them by it.
    wgmma_wait<0>();
    wgmma_hold(scores);
  }

  // The reference follows the maximum only where that passes it by the headroom, so that most steps need no exchange.
  __device__ __forceinline__ void follow(float (&shrink)[2]) {
    float highest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 8 * j + 2 * i;
        most[j] = fmaxf(fmaxf(scores[at], scores[at + 1]), fmaxf(scores[at + 4], scores[at + 5]));
      }
      highest[i] = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    }
    const bool passes = highest[0] > reference[0] + kHeadroom || highest[1] > reference[1] + kHeadroom;
    if (!__any_sync(0xFFFFFFFFu, passes)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], 1));
      highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], 2));
      if (highest[i] > reference[i] + kHeadroom) {
        shrink[i] = power2(reference[i] - highest[i]);
        reference[i] = highest[i];
      }
      sum[i] *= shrink[i];
    }
  }
  // Scores to weights relative to `reference`, into shared memory.
  __device__ __forceinline__ void weigh(int left, bool last, uint32_t serial, int next) {
    const float log2_scale = a.scale * kLog2e * a.unit;
#pragma unroll
    for (int j = 0; j < 32; ++j) scores[j] *= log2_scale;
    if (left < kStep) {
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (2 * (lane & 3) + 8 * (j / 4) + (j & 1) >= left) scores[j] = -INFINITY;
    }
    float shrink[2] = {1.0f, 1.0f};
    follow(shrink);
    const int buffer = serial & 1;
    const uint32_t base = shared_address(s.weights[buffer]) + (16 * warp + (lane & 15)) * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t coarse[4], fine[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int j = 8 * k + 2 * m, i = m & 1;
        const float x = power2(scores[j] - reference[i]), y = power2(scores[j + 1] - reference[i]);
        coarse[m] = Bf16::pack(x, y);
        fine[m] = Bf16::pack(x - Bf16::low(coarse[m]), y - Bf16::high(coarse[m]));
        sum[i] += x + y;
      }
      const uint32_t at = base + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4);
      store_matrices(at, coarse), store_matrices(at + kSlab, fine);
      if (k % 2 == 0) continue;
      if (k == 1 && (lane & 3) == 0) s.shrink[buffer][row(0)] = shrink[0], s.shrink[buffer][row(1)] = shrink[1];
      if (k == 3 && last) share(buffer);
      fence_proxy_async();
      mbarrier_arrive(&s.weighed[buffer][k / 2]);
      if (k == 1 && last && next >= 0) take_query(next);
    }
  }
  // Of four lanes that have a part of two rows' sums, two make a row's share each.
  __device__ __forceinline__ void share(int buffer) {
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] = sum[i] + __shfl_xor_sync(0xFFFFFFFFu, sum[i], 1);
      total[i] += __shfl_xor_sync(0xFFFFFFFFu, total[i], 2);
    }
    const bool second = lane & 1;
    const float all = (second ? total[1] : total[0]) + power2(second ? sink[1] - reference[1] : sink[0] - reference[0]);
    if ((lane & 2) == 0) s.share[buffer][row(lane & 1)] = a.unit / all;
  }

  __device__ __forceinline__ void run() {
    const Rows rows(a);
    uint32_t serial = 0;
    int index = 0, t = rows.first();
    Place place;
    for (int i = 0; i < 2; ++i) sink[i] = row(i) < a.heads ? a.sink[row(i)] * kLog2e : 0.0f;
    if (t >= 0) ask_query(t, 0), take_query(t);
    for (int next; t >= 0; t = next, ++index) {
      const int keys = take_keys(s, index), steps = keys > 0 ? steps_of(keys) : 0;
      next = rows.after(t);
      reference[0] = reference[1] = -INFINITY;
      sum[0] = sum[1] = 0.0f;
      for (int step = 0; step < steps; ++step, ++serial) {
        const bool last = step + 1 == steps;
        multiply(place, serial, step == 0);
        if (last && next >= 0) ask_query(next, 0);
        weigh(keys - step * kStep, last, serial, next);
      }
      if (steps > 0) continue;
      mbarrier_wait(&s.queried, 1);
      if (next >= 0) ask_query(next, 0), take_query(next);
    }
  }
};

// ---- value

struct Value {
  const Arguments& a;
  const CUtensorMap& result;
  Shared& s;
  int half, warp, lane;
  float output[2][64];  // This half of the columns of a step's first unit, and of its second.

  __device__ __forceinline__ int row(int i) const { return 16 * warp + (lane >> 2) + 8 * i; }

  // This group's columns of a unit.
  __device__ __forceinline__ uint8_t* quarter(int unit) const { return s.units[unit] + half * kQuarter; }

  // Adds a step, and at a row's last one writes the row. A warpgroup's products take turns with another's one by one, so those of
  // the next step's scores, which are short, get a fifth of the matrix unit beside these of two groups. The second half of these
  // therefore waits until the scores are made, and the weights after them are made beside it. The first half does not wait: its
  // units are free long before the scores after the next need them filled.
  template <bool last, bool waits>
  __device__ __forceinline__ void accumulate(int t, uint32_t serial, const Place& place, bool first) {
    const int buffer = serial & 1;
    mbarrier_wait(&s.weighed[buffer][0], serial >> 1 & 1);
    const float shrink[2] = {s.shrink[buffer][row(0)], s.shrink[buffer][row(1)]};
    if (__any_sync(0xFFFFFFFFu, !first && (shrink[0] != 1.0f || shrink[1] != 1.0f))) {
#pragma unroll
      for (int j = 0; j < 64; ++j) output[0][j] *= shrink[(j >> 1) & 1], output[1][j] *= shrink[(j >> 1) & 1];
    }
    const int unit[2] = {place.unit, place.next()};
    add<0>(output[0], unit[0], buffer, !first);
    mbarrier_wait(&s.weighed[buffer][1], serial >> 1 & 1);
    const float share[2] = {last ? s.share[buffer][row(0)] : 0.0f, last ? s.share[buffer][row(1)] : 0.0f};
    add<1>(output[0], unit[0], buffer, true);
    wgmma_commit();
    if (!waits) {
      add<0>(output[1], unit[1], buffer, !first), add<1>(output[1], unit[1], buffer, true);
      wgmma_commit();
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    wgmma_hold(output[0]);
    leave<last>(t, output[0], 0, unit[0], share);
    if (waits) {
      mbarrier_wait(&s.scored[(serial + 1) & 1], (serial + 1) >> 1 & 1);
      add<0>(output[1], unit[1], buffer, !first), add<1>(output[1], unit[1], buffer, true);
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_hold(output[1]);
    mbarrier_arrive(&s.unweighed[buffer]);
    leave<last>(t, output[1], 1, unit[1], share);
  }
  // 32 keys with both parts of their weights.
  template <int keys>
  __device__ __forceinline__ void add(float (&columns)[64], int unit, int buffer, bool accumulate) {
    const uint64_t v = wgmma_descriptor(shared_address(quarter(unit)), kSlab, 1024, kSwizzle128), w = wgmma_descriptor128(s.weights[buffer]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 2 * keys + (i & 1), part = i >> 1;
      Wgmma<128>::bf16_ss<1>(columns, w + ((part * kSlab + k * 32) >> 4), v + (k * 2048 >> 4), accumulate || i > 0);
    }
  }
  template <bool last>
  __device__ __forceinline__ void leave(int t, const float (&columns)[64], int n, int unit, const float (&share)[2]) {
    if (last)
      write(t, columns, n, unit, share);
    else
      mbarrier_arrive(&s.empty[unit]);
  }
  // A quarter of the row's columns, by way of the unit that held the quarter's last values.
  __device__ __forceinline__ void write(int t, const float (&columns)[64], int n, int unit, const float (&share)[2]) {
    named_barrier_sync(kFirstValue + half, kGroup);  // Every warp's products have read the unit.
    const int lane = anew(this->lane);
    const uint32_t base = shared_address(quarter(unit));
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int c = 4 * j + 2 * k;
        v[k] = Bf16::pack(columns[c] * share[k & 1], columns[c + 1] * share[k & 1]);
      }
      store_matrices(base + piece_offset(16 * warp + (lane & 15), j + (lane >> 4)), v);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      for (int i = 0; i < 2; ++i)
        tensor_store3(&result, quarter(unit) + i * kSlab + warp * 2048, 256 * n + 128 * half + 64 * i, 16 * warp, t, evict_first_policy());
      tensor_stores_read();
    }
    __syncwarp();
    mbarrier_arrive(&s.empty[unit]);
  }

  // A row that blocks divide, the block's last. The group multiplies one of its quarters, and writes it if it is of the block's part.
  __device__ __forceinline__ void add_quarter(int t, int keys, uint32_t serial, Place place, const Rows& rows) {
    const int part = blockIdx.x % rows.parts, n = rows.parts == 4 ? part >> 1 : part;
    const bool writes = rows.parts == 2 || part % 2 == half;
#pragma unroll 1
    for (int left = keys; left > 0; left -= kStep, ++serial, place.advance(), place.advance()) {
      const int buffer = serial & 1, unit = n == 0 ? place.unit : place.next(), other = n == 0 ? place.next() : place.unit;
      for (int i = 0; i < 2; ++i) mbarrier_wait(&s.weighed[buffer][i], serial >> 1 & 1);
#pragma unroll
      for (int j = 0; j < 64; ++j) output[0][j] *= s.shrink[buffer][row((j >> 1) & 1)];
      const float share[2] = {s.share[buffer][row(0)], s.share[buffer][row(1)]};
      mbarrier_arrive(&s.empty[other]);
      if (left > kStep) mbarrier_wait(&s.scored[buffer ^ 1], (serial + 1) >> 1 & 1);  // As in accumulate().
      add<0>(output[0], unit, buffer, left < keys), add<1>(output[0], unit, buffer, true);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_hold(output[0]);
      mbarrier_arrive(&s.unweighed[buffer]);
      if (left <= kStep && writes)
        write(t, output[0], n, unit, share);
      else
        mbarrier_arrive(&s.empty[unit]);
    }
  }

  __device__ __forceinline__ void run() {
    const Rows rows(a);
    uint32_t serial = 0;
    int index = 0;
    Place place;
    int t = rows.first(), next = t >= 0 ? take_keys(s, 0) : 0;
    for (int after; t >= 0; t = after) {
      const int keys = next, steps = keys > 0 ? steps_of(keys) : 0;
      after = rows.after(t);
      if (keys == 0) write_zeros(a, t, anew(half * kGroup + 32 * warp + lane));
      if (rows.divides(t)) return add_quarter(t, keys, serial, place, rows);
      for (int step = 0; step < steps - 1; ++step, ++serial, place.advance(), place.advance()) accumulate<false, true>(t, serial, place, step == 0);
      next = after >= 0 ? take_keys(s, ++index) : 0;
      if (steps == 0) continue;
      if (next > 0)
        accumulate<true, true>(t, serial, place, steps == 1);
      else
        accumulate<true, false>(t, serial, place, steps == 1);
      ++serial, place.advance(), place.advance();
    }
  }
};

}  // namespace di::attention::flat
