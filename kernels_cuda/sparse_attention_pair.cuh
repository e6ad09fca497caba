// Attention of few query rows over their own lists of stored rows: two blocks share a row, as a cluster. A row has the bits that
// sparse_attention.cuh gives it.
//
// A step is 64 keys of the row's list, as there. Each block gathers, expands and multiplies with the query 32 of them; it sends the
// other their scores and, of the keys, the columns that the other puts out. Both make all weights by the same arithmetic, and each
// adds weights times V for its own 256 of the 512 columns. The warps of a block:
//   gather 8   list the block's keys, gather their stored bytes and expand them to 16-bit floats in shared memory (three stages)
//   product 4  Q K^T of the block's keys, scaled and with the highest of each row, to both blocks
//   value 4    the softmax's weights, and output += weights V, both in registers
#pragma once

#include "sparse_attention.cuh"
#include "sparse_attention_pair_gather.cuh"

namespace di::attention::pair {

// ---- Q K^T

template <class E, int rank>
struct Product {
  const Arguments& a;
  const CUtensorMap& query;
  Shared& s;
  int warp, lane;
  uint32_t held[16][4];  // Columns 0 to 255 of the query, as operands.
  float made[16];

  __device__ __forceinline__ void ask_query(int t) {
    if (warp != 0 || lane != 0) return;
    mbarrier_arrive_expect(&s.queried, kTile);
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      tensor_copy3(s.keys[kRounds - 1] + i * kSlab, &query, 64 * i, 0, t, &s.queried);
      tensor_copy3(s.q + i * kSlab, &query, 256 + 64 * i, 0, t, &s.queried);
    }
  }

  __device__ __forceinline__ void hold_query() {
    mbarrier_wait(&s.queried, 0);
    const uint32_t base = shared_address(s.keys[kRounds - 1]);
#pragma unroll
    for (int i = 0; i < 16; ++i) load_matrices(base + piece_offset(16 * warp + (lane & 15), 2 * i + (lane >> 4)), held[i]);
    mbarrier_arrive(&s.held);
  }

  __device__ __forceinline__ void multiply(int step) {
    const int stage = step % kRounds;
    mbarrier_wait(&s.full[stage], step / kRounds & 1);
    fence_proxy_async();  // For the gathering threads' stores.
    if (warp == 0 && lane == 0) {
      mbarrier_arrive_expect(&s.got[stage], kOwnTile / 2);
      const uint8_t* others = s.keys[stage] + (rank ^ 1) * (kOwnTile / 2);  // Columns.
      bulk_copy_cluster(s.keys[stage] + kOwnTile, others, kOwnTile / 2, &s.got[stage], rank ^ 1);
    }
    __syncwarp();
    const uint64_t q = wgmma_descriptor128(s.q), k = wgmma_descriptor128(s.keys[stage]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 16; ++i) Wgmma<32>::bf16_rs(made, held[i], k + (((i >> 2) * kHalfSlab + (i & 3) * 32) >> 4), i > 0);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int at = (i & 3) * 32;
      Wgmma<32>::bf16_ss(made, q + (((i >> 2) * kSlab + at) >> 4), k + (((4 + (i >> 2)) * kHalfSlab + at) >> 4), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(made);
  }

  // The scores of the step's keys, of which `left` are there, to the threads of both blocks that weigh these rows.
  __device__ __forceinline__ void send(int step, int left) {
    const float log2_scale = a.scale * (kLog2e * E::kUnit);
    float scaled[16], highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 16; ++j) scaled[j] = __fmul_rn(made[j], log2_scale);
    if (left < kHalf) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if (2 * (lane & 3) + 8 * (j / 4) + (j & 1) >= left) scaled[j] = -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) highest[(j >> 1) & 1] = fmaxf(highest[(j >> 1) & 1], scaled[j]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], 1));
      highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], 2));
    }
    mbarrier_wait_cluster(&s.taken, (step & 1) ^ 1);
    float4(&to)[kPieces][kGroup] = s.scores[rank];
    const int thread = 32 * warp + lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j][thread] = make_float4(scaled[4 * j], scaled[4 * j + 1], scaled[4 * j + 2], scaled[4 * j + 3]);
    to[4][thread] = make_float4(highest[0], highest[1], 0.0f, 0.0f);
    fence_proxy_async();
    named_barrier_sync(2, kGroup);
    if (thread == 0) {
      mbarrier_arrive_expect(&s.scored, sizeof(to));
      bulk_copy_cluster(&to, &to, sizeof(to), &s.scored, rank ^ 1);
    } else {
      mbarrier_arrive(&s.scored);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run(int t) {
    ask_query(t);
    __syncwarp();
    hold_query();
    mbarrier_wait(&s.listed, 0);
    const int keys = s.keys_of, steps = keys > 0 ? steps_of(keys) : 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      multiply(step);
      send(step, keys - step * kStep - rank * kHalf);
    }
  }
};

// ---- weights, and weights times V

template <class E, bool drafts, int rank>
struct Value {
  const Arguments& a;
  const CUtensorMap& out;
  Shared& s;
  int warp, lane;
  float output[2][64];  // The first and second 128 of the block's columns.
  float scores[32];
  uint32_t coarse[2][8], fine[2][8];  // A step's weights in two parts, as operands, by halves of 32 keys.
  float reference[2], sum[2], shrink[2], sink[2];  // The sinks times log2 e.

  __device__ __forceinline__ int row(int i) const { return 16 * warp + (lane >> 2) + 8 * i; }

  // The keys of row t, for all warps: of its window, and selected ones up to the first -1.
  __device__ __forceinline__ int count(int t) {
    const int thread = 32 * warp + lane;
    const int request = drafts ? t / a.block : a.row_to_req[t], position = a.positions[drafts ? request : t], tokens = rows_of(a);
    int selected = a.chosen;
    if (!drafts) {
      const int* rows = a.rows + t * a.rows_pitch;
#pragma unroll 4
      for (int i = thread; i < a.chosen; i += kGroup)
        if (rows[i] < 0) selected = min(selected, i);
      selected = __reduce_min_sync(0xFFFFFFFFu, selected);
      if (lane == 0) s.selected[warp] = selected;
      named_barrier_sync(1, kGroup);
#pragma unroll
      for (int i = 0; i < 4; ++i) selected = min(selected, s.selected[i]);
    }
    int keys = -1;
    if (t < tokens && request >= 0 && position >= 0)
      keys = max(position - first_of_window(a, position, a.window_origin[request]) + 1, 0) + selected;
    if (thread == 0) {
      s.keys_of = keys;
      mbarrier_arrive(&s.listed);
    }
    __syncwarp();
    return keys;
  }

  // Takes a step's scores; what the output so far is to be multiplied by.
  __device__ __forceinline__ void take(int step) {
    mbarrier_wait_cluster(&s.scored, step & 1);
    fence_proxy_async();  // For the gathering threads' stores.
    const int thread = 32 * warp + lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 v = s.scores[half][j][thread];
        float* of = scores + 16 * half + 4 * j;
        of[0] = v.x, of[1] = v.y, of[2] = v.z, of[3] = v.w;
      }
    }
    const float4 first = s.scores[0][4][thread], second = s.scores[1][4][thread];
    const float highest[2] = {fmaxf(first.x, second.x), fmaxf(first.y, second.y)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shrink[i] = 1.0f;
      if (highest[i] > reference[i] + kHeadroom) {
        shrink[i] = power2(reference[i] - highest[i]);
        reference[i] = highest[i];
      }
      sum[i] = __fmul_rn(sum[i], shrink[i]);
    }
  }

  // Weights of 32 keys relative to `reference`.
  template <int half>
  __device__ __forceinline__ void weigh() {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int j = 16 * half + 2 * k, i = k & 1;
      const float x = power2(scores[j] - reference[i]), y = power2(scores[j + 1] - reference[i]);
      coarse[half][k] = E::pack(x, y);
      fine[half][k] = E::pack(x - E::low(coarse[half][k]), y - E::high(coarse[half][k]));
      sum[i] += x + y;
    }
    // They are made here, and not where they are needed, behind a wait for the matrix unit.
#pragma unroll
    for (int k = 0; k < 8; ++k) asm volatile("" : "+r"(coarse[half][k]), "+r"(fine[half][k]));
  }

  __device__ __forceinline__ float share(int i) const {
    float total = sum[i] + __shfl_xor_sync(0xFFFFFFFFu, sum[i], 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    return E::kUnit / (total + power2(sink[i] - reference[i]));
  }

  // Adds 32 keys with both parts of their weights, those of the block of rank 0 being the first half.
  template <int half>
  __device__ __forceinline__ void add(int step) {
    const int stage = step % kRounds;
    if (half != rank) mbarrier_wait_cluster(&s.got[stage], step / kRounds & 1);
    const uint32_t tile = shared_address(s.keys[stage]) + (half != rank ? kOwnTile : rank * (kOwnTile / 2));
    const uint64_t v = wgmma_descriptor(tile, kHalfSlab, 1024, kSwizzle128);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t(&w)[8] = part == 0 ? coarse[half] : fine[half];
        const uint32_t of[4] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
#pragma unroll
        for (int n = 0; n < 2; ++n)
          Wgmma<128>::template bf16_rs<1>(output[n], of, v + ((i * 2048 + n * 2 * kHalfSlab) >> 4),
                                          step > 0 || half + i + part > 0);
      }
    wgmma_commit();
  }

  __device__ __forceinline__ void rescale(int step) {
    if (!__any_sync(0xFFFFFFFFu, step > 0 && (shrink[0] != 1.0f || shrink[1] != 1.0f))) return;
#pragma unroll
    for (int j = 0; j < 64; ++j) output[0][j] *= shrink[(j >> 1) & 1], output[1][j] *= shrink[(j >> 1) & 1];
  }

  // Gives the places of the step's scores back, which are in registers by now, and those of the keys of the step before.
  __device__ __forceinline__ void release(int step, int steps) {
    if (step + 1 < steps) await_load(scores[16], scores[20], scores[24], scores[28]);  // Nothing has needed the second half yet.
    __syncwarp();
    if (step + 1 < steps) {
      mbarrier_arrive(&s.taken);  // Every thread that has read.
      if (lane == 0) mbarrier_arrive_cluster(&s.taken, rank ^ 1);
    }
    if (lane == 0 && step > 0 && step - 1 + kRounds < steps) {
      uint64_t* empty = &s.empty[(step - 1) % kRounds];
      mbarrier_arrive(empty), mbarrier_arrive_cluster(empty, rank ^ 1);
    }
    __syncwarp();
  }

  // Through the memory of the query, which nobody needs any more; a warp stores its own sixteen rows.
  __device__ __forceinline__ void write(int t, const float (&share)[2]) {
    const uint32_t at = shared_address(s.q) + piece_offset(16 * warp + (lane & 15), lane >> 4);
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int from = 4 * (j % 16) + 2 * k;
        v[k] = Bf16::pack(output[j / 16][from] * share[k & 1], output[j / 16][from + 1] * share[k & 1]);
      }
      store_matrices((at ^ (j & 7) << 4) + j / 8 * kSlab, v);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane != 0) return;
    for (int i = 0; i < 4; ++i)
      tensor_store3(&out, s.q + i * kSlab + warp * 2048, rank * 256 + 64 * i, 16 * warp, t, evict_normal_policy());
    tensor_stores_done();
  }

  // The output of a row without keys; each block writes half of it.
  __device__ __forceinline__ void write_zeros(int t) {
    for (int i = rank * kGroup + 32 * warp + lane; i < a.heads * kWidth / 8; i += 2 * kGroup)
      *reinterpret_cast<uint4*>(a.out + t * a.out_row + i / (kWidth / 8) * a.out_head + i % (kWidth / 8) * 8) = uint4{};
  }

  __device__ __forceinline__ void run(int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sink[i] = row(i) < a.heads ? __fmul_rn(a.sink[row(i)], kLog2e) : 0.0f;
    const int keys = count(t), steps = keys > 0 ? steps_of(keys) : 0;
    if (keys == 0) write_zeros(t);
    if (steps == 0) return;
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
    take(0);
    weigh<0>();
    release(0, steps);
    int step = 0;
#pragma unroll 1
    for (; step + 1 < steps; ++step) {
      rescale(step);
      add<0>(step);
      weigh<1>();
      add<1>(step);
      take(step + 1);
      wgmma_wait<1>();
      weigh<0>();
      wgmma_wait<0>();
      wgmma_hold(output[0]), wgmma_hold(output[1]);
      release(step + 1, steps);
    }
    rescale(step);
    add<0>(step);
    weigh<1>();
    add<1>(step);
    const float share[2] = {this->share(0), this->share(1)};
    wgmma_wait<0>();
    wgmma_hold(output[0]), wgmma_hold(output[1]);
    write(t, share);
  }
};

template <class E, bool fp4, bool drafts, int rank>
__device__ __forceinline__ void attend(const Arguments& a, const CUtensorMap& query, const CUtensorMap& out, Shared& s, int t, int warp,
                                       int lane) {
  if (warp < kGatherWarps) {
    registers_down<80>();
    Gather<E, fp4, drafts, rank> gather{a, s, warp, lane};
    gather.run(t);
  } else if (warp < kGatherWarps + 4) {
    registers_down<112>();
    Product<E, rank> product{a, query, s, warp % 4, lane};
    product.run(t);
  } else {
    registers_up<240>();
    Value<E, drafts, rank> value{a, out, s, warp % 4, lane};
    value.run(t);
  }
}

template <class E, bool fp4, bool drafts>
__global__ void __launch_bounds__(kThreads, 1)
    attend_rows_in_pairs(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap query,
                         const __grid_constant__ CUtensorMap out) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRounds; ++i)
      mbarrier_init(&s.full[i], kGatherWarps), mbarrier_init(&s.got[i], 1), mbarrier_init(&s.empty[i], 8);
    mbarrier_init(&s.scored, kGroup), mbarrier_init(&s.taken, kGroup + 4);
    mbarrier_init(&s.listed, 1), mbarrier_init(&s.queried, 1), mbarrier_init(&s.held, kGroup);
    fence_mbarrier_init();
    prefetch_tensor_map(&query), prefetch_tensor_map(&out);
  }
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  __syncwarp();
  cluster_arrive_relaxed();
  start_dependents();
  if (threadIdx.x < 256) foresee<drafts>(a, blockIdx.x / 2, threadIdx.x);
  wait_for_producer();
  cluster_wait();  // The other block's barriers are there.
  const int t = blockIdx.x / 2;
  if (cluster_rank() == 0)
    attend<E, fp4, drafts, 0>(a, query, out, s, t, warp, lane);
  else
    attend<E, fp4, drafts, 1>(a, query, out, s, t, warp, lane);
  __syncwarp();
  cluster_sync();  // The other block may still copy from here.
}

}  // namespace di::attention::pair
