// The warpgroups of sparse attention over BF16 rows that multiply, and what they share with the one that gathers.
#pragma once

#include "sparse_attention.cuh"

namespace di::attention::flat {

constexpr int kThreads = 4 * kGroup, kRowBytes = 2 * kWidth;
constexpr int kQuarters = 4, kHeld = 2;  // Of the columns; of the query, in registers.
constexpr int kUnit = 2 * kSlab, kUnits = 10;
constexpr int kFinders = 64, kCopiers = 64;  // Threads of the warpgroup that gathers.
enum NamedBarrier { kListing = 1, kScoring = 2, kFirstValue = 3 };

struct Shared {
  alignas(1024) uint8_t q[(kQuarters - kHeld) * kUnit];
  alignas(1024) uint8_t units[kUnits][kUnit];     // A row's query quarters, then its steps' quarters, and so on in a ring.
  alignas(1024) uint8_t weights[2][2][kSlab];     // Of two steps, in two parts.
  float shrink[2][kHeads], share[2][kHeads];      // By weights: what the output is multiplied by before them, and in the end.
  uint64_t full[kUnits], empty[kUnits];
  uint64_t scored[2], weighed[2][2], unweighed[2];  // By step; weights are handed on by halves of 32 keys.
  uint64_t listed[2], unlisted[2], queried;         // By row of the block.
  uint64_t found[2], copied[2];                     // By step: the places in `from` are there, and read.
  int keys_of[2], selected[2];
  alignas(16) uint64_t from[2][4][kStep / 4];       // Where the keys of two steps begin; of every fourth key side by side.
};
static_assert(sizeof(Shared) <= 232448);

// A place in the ring, and the parity of the phase in which its unit is full.
struct Place {
  int unit = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int units) {
    unit += units;
    if (unit >= kUnits) unit -= kUnits, parity ^= 1;
  }
  __device__ __forceinline__ int after(int units) const { return unit + units >= kUnits ? unit + units - kUnits : unit + units; }
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
  uint32_t held[8 * kHeld][4];  // Fragments of the query's first quarters, by 16 columns.
  float scores[32], reference[2], sum[2], sink[2];

  __device__ __forceinline__ int row(int i) const { return 16 * warp + (lane >> 2) + 8 * i; }

  // Asks for the other quarters of the query of row t, once every warp is done with those that are there.
  __device__ __forceinline__ void ask_query(int t) {
    named_barrier_sync(kScoring, kGroup);
    if (warp != 0 || lane != 0) return;
    mbarrier_arrive_expect(&s.queried, sizeof s.q);
#pragma unroll 1
    for (int i = 0; i < 2 * (kQuarters - kHeld); ++i) tensor_copy3(s.q + i * kSlab, &query, 128 * kHeld + 64 * i, 0, t, &s.queried);
  }
  __device__ __forceinline__ void take_query(Place& place) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j, place.advance(1)) {
      mbarrier_wait(&s.full[place.unit], place.parity);
      const uint32_t base = shared_address(s.units[place.unit]);
#pragma unroll
      for (int i = 0; i < 8; ++i) load_matrices(base + piece_offset(16 * warp + (lane & 15), 2 * i + (lane >> 4)), held[8 * j + i]);
      mbarrier_arrive(&s.empty[place.unit]);
    }
  }

  // `first`: of a row, the block's row number `index`; the quarters of its query in shared memory may still be on their way.
  __device__ __forceinline__ void multiply(Place& place, uint32_t serial, bool first, int index) {
    const uint64_t q = wgmma_descriptor128(s.q);
#pragma unroll
    for (int j = 0; j < kQuarters; ++j, place.advance(1)) {
      if (j == kHeld && first) mbarrier_wait(&s.queried, index & 1);
      if (j % 2 == 0) {
        Place other = place;
        other.advance(1);
        mbarrier_wait(&s.full[place.unit], place.parity), mbarrier_wait(&s.full[other.unit], other.parity);
        fence_proxy_async();  // The copies were ordinary accesses.
      }
      const uint64_t k = wgmma_descriptor128(s.units[place.unit]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t at = ((i >> 2) * kSlab + (i & 3) * 32) >> 4;
        if (j < kHeld)
          Wgmma<64>::bf16_rs(scores, held[8 * j + i], k + at, i + j > 0);
        else
          Wgmma<64>::bf16_ss(scores, q + ((j - kHeld) * kUnit >> 4) + at, k + at, true);
      }
      wgmma_commit();
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
  __device__ __forceinline__ void weigh(int left, bool last, uint32_t serial) {
    const float log2_scale = a.scale * kLog2e;
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
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (k == 1 && (lane & 3) == 0) s.shrink[buffer][row(i)] = shrink[i];
        if (k == 3 && last) share(i, buffer);
      }
      fence_proxy_async();
      mbarrier_arrive(&s.weighed[buffer][k / 2]);
    }
  }
  __device__ __forceinline__ void share(int i, int buffer) {
    float total = sum[i] + __shfl_xor_sync(0xFFFFFFFFu, sum[i], 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    if ((lane & 3) == 0) s.share[buffer][row(i)] = 1.0f / (total + power2(sink[i] - reference[i]));
  }

  __device__ __forceinline__ void run() {
    const int tokens = rows_of(a);
    uint32_t serial = 0;
    int index = 0;
    Place place;
    for (int i = 0; i < 2; ++i) sink[i] = row(i) < a.heads ? a.sink[row(i)] * kLog2e : 0.0f;
    if (blockIdx.x < tokens) ask_query(blockIdx.x);
    for (int t = blockIdx.x; t < tokens; t += gridDim.x, ++index) {
      const int keys = take_keys(s, index), steps = keys > 0 ? steps_of(keys) : 0;
      if (steps > 0)
        take_query(place);
      else
        mbarrier_wait(&s.queried, index & 1);
      reference[0] = reference[1] = -INFINITY;
      sum[0] = sum[1] = 0.0f;
      for (int step = 0; step < steps; ++step, ++serial) {
        multiply(place, serial, step == 0, index);
        if (step + 1 == steps && t + gridDim.x < tokens) ask_query(t + gridDim.x);
        weigh(keys - step * kStep, step + 1 == steps, serial);
      }
      if (steps == 0 && t + gridDim.x < tokens) ask_query(t + gridDim.x);
    }
  }
};

// ---- value

struct Value {
  const Arguments& a;
  const CUtensorMap& result;
  Shared& s;
  int half, warp, lane;
  float output[2][64];  // Quarters half and half + 2 of the columns.

  __device__ __forceinline__ int row(int i) const { return 16 * warp + (lane >> 2) + 8 * i; }

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
    const int unit[2] = {place.after(half), place.after(half + 2)};
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
    leave<last>(t, 0, unit[0], share);
    if (waits) {
      mbarrier_wait(&s.scored[(serial + 1) & 1], (serial + 1) >> 1 & 1);
      add<0>(output[1], unit[1], buffer, !first), add<1>(output[1], unit[1], buffer, true);
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_hold(output[1]);
    mbarrier_arrive(&s.unweighed[buffer]);
    leave<last>(t, 1, unit[1], share);
  }
  // 32 keys with both parts of their weights.
  template <int keys>
  __device__ __forceinline__ void add(float (&columns)[64], int unit, int buffer, bool accumulate) {
    const uint64_t v = wgmma_descriptor(shared_address(s.units[unit]), kSlab, 1024, kSwizzle128), w = wgmma_descriptor128(s.weights[buffer]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 2 * keys + (i & 1), part = i >> 1;
      Wgmma<128>::bf16_ss<1>(columns, w + ((part * kSlab + k * 32) >> 4), v + (k * 2048 >> 4), accumulate || i > 0);
    }
  }
  template <bool last>
  __device__ __forceinline__ void leave(int t, int n, int unit, const float (&share)[2]) {
    if (last)
      write(t, n, unit, share);
    else
      mbarrier_arrive(&s.empty[unit]);
  }
  // A quarter of the row's columns, by way of the unit that held the quarter's last values.
  __device__ __forceinline__ void write(int t, int n, int unit, const float (&share)[2]) {
    named_barrier_sync(kFirstValue + half, kGroup);  // Every warp's products have read the unit.
    const int lane = anew(this->lane);
    const uint32_t base = shared_address(s.units[unit]);
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int c = 4 * j + 2 * k;
        v[k] = Bf16::pack(output[n][c] * share[k & 1], output[n][c + 1] * share[k & 1]);
      }
      store_matrices(base + piece_offset(16 * warp + (lane & 15), j + (lane >> 4)), v);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      for (int i = 0; i < 2; ++i)
        tensor_store3(&result, s.units[unit] + i * kSlab + warp * 2048, 128 * (half + 2 * n) + 64 * i, 16 * warp, t, evict_first_policy());
      tensor_stores_read();
    }
    __syncwarp();
    mbarrier_arrive(&s.empty[unit]);
  }

  __device__ __forceinline__ void run() {
    const int tokens = rows_of(a);
    uint32_t serial = 0;
    int index = 0;
    Place place;
    int next = blockIdx.x < tokens ? take_keys(s, 0) : 0;
    for (int t = blockIdx.x; t < tokens; t += gridDim.x) {
      const int keys = next, steps = keys > 0 ? steps_of(keys) : 0;
      if (keys == 0) write_zeros(a, t, anew(half * kGroup + 32 * warp + lane));
      if (steps > 0) place.advance(kHeld);
      for (int step = 0; step < steps - 1; ++step, ++serial, place.advance(kQuarters)) accumulate<false, true>(t, serial, place, step == 0);
      next = t + gridDim.x < tokens ? take_keys(s, ++index) : 0;
      if (steps == 0) continue;
      if (next > 0)
        accumulate<true, true>(t, serial, place, steps == 1);
      else
        accumulate<true, false>(t, serial, place, steps == 1);
      ++serial, place.advance(kQuarters);
    }
  }
};

}  // namespace di::attention::flat
