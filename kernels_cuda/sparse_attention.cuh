// Attention of query rows over their own lists of stored rows, on Hopper's matrix unit: a persistent block takes every
// gridDim-th row, and what it does for a row depends on that row alone.
//
// The 64 heads are one M tile. Five warpgroups, a step being 64 keys of the row's list:
//   gather 2x gather the stored bytes of a row's keys and expand them to 16-bit floats in shared memory (two stages)
//   score     Q K^T of a step, the softmax's weights into shared memory
//   value 2x  output += weights V, each for 256 of the 512 columns, which stay in registers for the row; meanwhile they list the
//             next row's keys, since they wait for weights anyway. Half of a row's columns leave beside the next row's first step
#pragma once

#include "sparse_attention_gather.cuh"
#include "sparse_attention_list.cuh"

namespace di::attention {

// 2^x within two units of the last place; what lies below 2^-126 is zero.
__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- score

template <class E>
struct Score {
  const Arguments& a;
  const CUtensorMap& query;
  Shared& s;
  int warp, lane;
  float scores[32];
  float reference[2], sum[2];

  __device__ __forceinline__ int row(int i) const { return anew(16 * warp) + (lane >> 2) + 8 * i; }

  // Asks for the query of row t, once every warp is done with the one that is there.
  __device__ __forceinline__ void ask_query(int t) {
    named_barrier_sync(2, kGroup);
    if (warp != 0 || lane != 0) return;
    mbarrier_arrive_expect(&s.queried, kTile);
#pragma unroll 1
    for (int i = 0; i < kWidth / 64; ++i) tensor_copy3(s.q + i * kSlab, &query, 64 * i, 0, t, &s.queried);
  }

  __device__ __forceinline__ void prefetch_query(int t) {
#pragma unroll 1
    for (int i = 0; i < kWidth / 64; ++i) prefetch_box3(&query, 64 * i, 0, t);
  }

  __device__ __forceinline__ void multiply(uint32_t serial) {
    const int stage = serial % kStages;
    mbarrier_wait(&s.full[stage], serial / kStages & 1);
    fence_proxy_async();  // For the gathering threads' stores.
    const uint64_t q = wgmma_descriptor128(s.q), k = wgmma_descriptor128(s.keys[stage]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      const uint32_t at = ((i >> 2) * kSlab + (i & 3) * 32) >> 4;
      E::template product<64, 0>(scores, q + at, k + at, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(scores);
    if (lane == 0) mbarrier_arrive(&s.scored);
  }

  // Scores to weights relative to `reference`, into shared memory.
  __device__ __forceinline__ void weigh(int left, bool last, int turn, uint32_t serial) {
    const int lane = anew(this->lane);
    const float log2_scale = a.scale * (kLog2e * E::kUnit);
#pragma unroll
    for (int j = 0; j < 32; ++j) scores[j] *= log2_scale;
    if (left < kStep) {
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (2 * (lane & 3) + 8 * (j / 4) + (j & 1) >= left) scores[j] = -INFINITY;
    }
    float highest[2] = {-INFINITY, -INFINITY}, shrink[2] = {1.0f, 1.0f};
#pragma unroll
    for (int j = 0; j < 32; ++j) highest[(j >> 1) & 1] = fmaxf(highest[(j >> 1) & 1], scores[j]);
    if (__any_sync(0xFFFFFFFFu, highest[0] > reference[0] + kHeadroom || highest[1] > reference[1] + kHeadroom)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], 1));
        highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], 2));
        if (highest[i] > reference[i] + kHeadroom) {
          shrink[i] = power2(reference[i] - highest[i]);
          reference[i] = highest[i];
          sum[i] *= shrink[i];
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mbarrier_wait(&s.unweighed[half], (serial & 1) ^ 1);  // The step before is done with this half, and with `shrink`.
      if (half == 0 && (lane & 3) == 0) s.shrink[row(0)] = shrink[0], s.shrink[row(1)] = shrink[1];
      store(2 * half);
      if (half == 0) mbarrier_arrive(&s.begun);
      store(2 * half + 1);
      if (half == 1 && last) share(0, turn), share(1, turn);
      mbarrier_arrive(&s.weighed[half]);  // Who waits for the weights fences.
    }
  }

  // Weights of 16 keys in two parts.
  __device__ __forceinline__ void store(int quarter) {
    const int lane = anew(this->lane);
    uint32_t coarse[4], fine[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int j = 8 * quarter + 2 * k, i = k & 1;
      const float x = power2(scores[j] - reference[i]), y = power2(scores[j + 1] - reference[i]);
      coarse[k] = E::pack(x, y);
      fine[k] = E::pack(x - E::low(coarse[k]), y - E::high(coarse[k]));
      sum[i] += x + y;
    }
    // Matrices of a store: rows 0 to 7 and 8 to 15 of a piece, then of the next.
    const uint32_t to = shared_address(s.weights) + piece_offset(16 * anew(warp) + (lane & 15), 2 * quarter + (lane >> 4));
    store_matrices(to, coarse);
    store_matrices(to + kSlab, fine);
  }

  __device__ __forceinline__ void share(int i, int turn) {
    float total = sum[i] + __shfl_xor_sync(0xFFFFFFFFu, sum[i], 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    if ((lane & 3) == 0) s.share[turn][row(i)] = E::kUnit / (total + power2(s.sink[row(i)] - reference[i]));
  }

  __device__ __forceinline__ void run() {
    const int tokens = rows_of(a);
    uint32_t serial = 0;
    int index = 0, turn = 0;  // Of the rows that have keys.
    if (blockIdx.x < tokens) ask_query(blockIdx.x);
    if (lane < 16) s.sink[16 * warp + lane] = 16 * warp + lane < a.heads ? a.sink[16 * warp + lane] * kLog2e : 0.0f;
    __syncwarp();
    for (int t = blockIdx.x; t < tokens; t += gridDim.x, ++index) {
      const int keys = take_keys(s, index), steps = keys > 0 ? steps_of(keys) : 0;
      mbarrier_wait(&s.queried, index & 1);
      reference[0] = reference[1] = -INFINITY;
      sum[0] = sum[1] = 0.0f;
      for (int step = 0; step < steps; ++step, ++serial) {
        multiply(serial);
        if (step == 0 && warp == 0 && lane == 0 && t + gridDim.x < tokens) prefetch_query(t + gridDim.x);
        if (step + 1 == steps && t + gridDim.x < tokens) ask_query(t + gridDim.x);
        weigh(keys - step * kStep, step + 1 == steps, turn, serial);
      }
      if (steps == 0 && t + gridDim.x < tokens) ask_query(t + gridDim.x);
      if (steps > 0) turn ^= 1;
    }
  }
};

// ---- value

template <class E, bool fp4, bool drafts>
struct Value {
  const Arguments& a;
  Shared& s;
  int half, warp, lane;
  float output[2][64];  // Columns of the half's first and second 128.

  __device__ __forceinline__ int row(int i) const { return 16 * warp + (lane >> 2) + 8 * i; }

  // Adds a step, 32 keys at a time; each half of the stage and of the weights is given back as soon as it is read. If the keys of
  // the step after it are there (`more`: it is of the same row), the second half waits for their scores: the matrix unit serves
  // groups in turn, so that beside products of values scores would come last, and the weights after them find the unit idle.
  __device__ __forceinline__ void accumulate(uint32_t serial, bool more) {
    const int stage = serial % kStages;
    mbarrier_wait(&s.begun, serial & 1);
    rescale();
    const uint64_t v = values(stage), w = wgmma_descriptor128(s.weights);
    begin_products();
    add(v, w, 0, 1);
    mbarrier_wait(&s.weighed[0], serial & 1);
    begin_products();
    add(v, w, 1, 4);
    end_products();
    release(stage, 0);
    if (more && mbarrier_over(&s.full[(serial + 1) % kStages], (serial + 1) / kStages & 1)) mbarrier_wait(&s.scored, (serial + 1) & 1);
    mbarrier_wait(&s.weighed[1], serial & 1);
    begin_products();
    add(v, w, 4, 8);
    end_products();
    release(stage, 1);
  }

  // A row's first step, while the second 128 columns of the row before it, if there is one, are written.
  __device__ __forceinline__ void begin(uint32_t serial, int unwritten) {
    const int stage = serial % kStages;
    const uint64_t v = values(stage), w = wgmma_descriptor128(s.weights);
    mbarrier_wait(&s.weighed[0], serial & 1);
    mbarrier_wait(&s.weighed[1], serial & 1);
    begin_products();
    add_columns(0, v, w);
    mbarrier_wait(&s.weighed[1], serial & 1);  // It is over: beyond a wait the compiler moves no products.
    write(unwritten, 1, 0), write(unwritten, 1, 1);
    wgmma_fence();
    add_columns(1, v, w);
    end_products();
    release(stage, 0), release(stage, 1);
  }

  __device__ __forceinline__ void begin_products() {
    fence_proxy_async();  // For the score group's stores.
    wgmma_fence();
  }
  __device__ __forceinline__ void end_products() {
    wgmma_wait<0>();
    wgmma_hold(output[0]), wgmma_hold(output[1]);
  }
  __device__ __forceinline__ uint64_t values(int stage) {
    return wgmma_descriptor(shared_address(s.keys[stage]) + half * (kTile / 2), kSlab, 1024, kSwizzle128);
  }

  // The output follows its rows' maxima.
  __device__ __forceinline__ void rescale() {
    const float shrink[2] = {s.shrink[row(0)], s.shrink[row(1)]};
    if (__any_sync(0xFFFFFFFFu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < 64; ++j) output[0][j] *= shrink[(j >> 1) & 1], output[1][j] *= shrink[(j >> 1) & 1];
    }
  }

  // Product i of a step's eight, for 128 columns: 16 keys, 16 more, both again with the second part of their weights, and the same
  // for the second 32 keys.
  __device__ __forceinline__ void multiply(int i, int n, uint64_t v, uint64_t w, bool accumulate) {
    const int key = i / 4 * 32 + i % 2 * 16, part = i / 2 % 2;
    E::template product<128, 1>(output[n], w + ((part * kSlab + 2 * key) >> 4), v + ((key * 128 + n * 2 * kSlab) >> 4), accumulate);
  }
  __device__ __forceinline__ void add(uint64_t v, uint64_t w, int begin, int end) {
#pragma unroll
    for (int i = begin; i < end; ++i) multiply(i, 0, v, w, true), multiply(i, 1, v, w, true);
    wgmma_commit();
  }
  // A row's first step, for 128 columns.
  __device__ __forceinline__ void add_columns(int n, uint64_t v, uint64_t w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) multiply(i, n, v, w, i > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void release(int stage, int part) {
    mbarrier_arrive(&s.unweighed[part]);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.empty[stage][part]);
  }

  // Writes 128 columns of a thread's row i; `written` is twice the block's number of the query row, + its turn; negative: of none.
  // Four lanes hold two columns each of a piece of eight: after an exchange each lane holds one whole piece of four.
  __device__ __forceinline__ void write(int written, int n, int i) {
    const int quarter = lane & 3, heads = written >= 0 ? a.heads : 0, t = blockIdx.x + (written >> 1) * gridDim.x;
    const float share = s.share[written & 1][row(i)];
    __nv_bfloat16* out = a.out + t * a.out_row + row(i) * a.out_head + half * 256 + n * 128;
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = 4 * (j + k) + 2 * i;
        v[k] = Bf16::pack(output[n][at] * share, output[n][at + 1] * share);
      }
      exchange<1>(v[0], v[1], quarter), exchange<1>(v[2], v[3], quarter);
      exchange<2>(v[0], v[2], quarter), exchange<2>(v[1], v[3], quarter);
      if (row(i) < heads) *reinterpret_cast<uint4*>(out + 8 * (j + quarter)) = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
  // A lane whose bit is clear keeps `low` and takes its partner's `low` into `high`'s place; the partner does the opposite.
  template <int bit>
  __device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high, int quarter) {
    const bool upper = quarter & bit;
    const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, bit);
    if (upper)
      low = got;
    else
      high = got;
  }

  // The row after a row is listed before what the gathering threads still need of it: before a short one, within a longer one.
  __device__ __forceinline__ void run() {
    const int tokens = rows_of(a);
    uint32_t serial = 0;
    int index = 0;
    Lister<fp4, drafts> lister{a, s, half * kGroup + 32 * warp + lane};
    if (blockIdx.x < tokens) lister.list(blockIdx.x, 0);
    int unwritten = -1;  // The row whose second 128 columns are to be written, as `write` takes it.
    for (int t = blockIdx.x; t < tokens; t += gridDim.x, ++index) {
      const int keys = take_keys(s, index), steps = keys > 0 ? steps_of(keys) : 0, lists = steps > 2 ? 1 : 0;
      if (keys == 0) write_zeros(a, t, half * kGroup + 32 * warp + lane);
      for (int step = 0; step <= steps; ++step) {
        if (step == lists && t + static_cast<int>(gridDim.x) < tokens) lister.list(t + gridDim.x, index + 1);
        if (step == 0 && steps > 0)
          begin(serial++, unwritten);
        else if (step < steps)
          accumulate(serial++, step + 1 < steps);
      }
      if (steps > 0) {
        unwritten = index << 1 | (~unwritten & 1);
        write(unwritten, 0, 0), write(unwritten, 0, 1);
      }
    }
    if (unwritten >= 0) write(unwritten, 1, 0), write(unwritten, 1, 1);
  }
};

template <class E, bool fp4, bool drafts>
__global__ void __launch_bounds__(kThreads, 1) attend_rows(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap query) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&s.full[i], kGather);
      for (int j = 0; j < 2; ++j) mbarrier_init(&s.empty[i][j], 8);
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(&s.weighed[i], kGroup), mbarrier_init(&s.unweighed[i], 2 * kGroup);
    mbarrier_init(&s.queried, 1), mbarrier_init(&s.begun, kGroup), mbarrier_init(&s.scored, 4);
    for (int i = 0; i < kLists; ++i) mbarrier_init(&s.listed[i], kListers), mbarrier_init(&s.unlisted[i], kThreads);
    fence_mbarrier_init();
    prefetch_tensor_map(&query);
  }
  start_dependents();
  if (threadIdx.x >= kThreads - 256) foresee<drafts>(a, blockIdx.x, threadIdx.x - (kThreads - 256));
  wait_for_producer();
  __syncthreads();
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp < kGatherWarps) {
    registers_down<48>();
    Gather<E, fp4> gather{a, s, warp, lane};
    gather.run();
  } else if (warp < kGatherWarps + 4) {
    registers_down<64>();
    Score<E> score{a, query, s, warp % 4, lane};
    score.run();
  } else {
    registers_up<160>();
    Value<E, fp4, drafts> value{a, s, (warp - kGatherWarps) / 4 - 1, warp % 4, lane};
    value.run();
  }
}

}  // namespace di::attention
