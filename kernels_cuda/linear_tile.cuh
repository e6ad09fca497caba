// A tile of y = x W^T from fp8_32 codes: 128 weight rows times T activation rows, exact BF16 products, FP32 sums.
//
// The product is made transposed, so that the weights are wgmma's operand in registers: a consumer thread reads the codes of
// its two weight rows from shared memory, folds in the block's scale and multiplies. Weights are expanded nowhere else and stay
// in the checkpoint's layout. The activations are wgmma's operand in shared memory, as BF16: linear_rows.cuh expands them
// to the workspace, tile by tile as wgmma reads them, and one thread copies tiles. Few rows: linear_few.cuh.
//
//   A step of 128 K is two sub-tiles of 64. Piece p (16 codes) of a row's 128 bytes belongs to sub-tile p % 2 and there to the
//   lanes l with l % 4 = p / 2. Word s of a piece holds what those lanes need for the k16 step s: its even bytes and its odd
//   bytes, in the halves of K named by `p % 2`. So a fragment's scale is that of the group p / 2, and both ends agree on the
//   order of K by construction.
//
// The order of a sum is fixed by n and k alone: slices of K (Problem::slices) are summed by themselves, then in order, whether
// one block goes through all of them or each has its own, and wherever these meet. So a row's bits do not depend
// on T, on its place, or on how many rows there are.
#pragma once

#include "linear_combine.cuh"
#include "linear_rows.cuh"
#include "linear_stages.cuh"

namespace di::linear {

template <typename C>
struct Consumer {
  const Shared<C>& shared;
  const Problem& p;
  int thread, warpgroup, lane_row;  // lane_row: of the warpgroup's 64
  uint32_t weight_place[2];         // of pieces 2 q and 2 q + 1 of lane_row; row + 8 lies 1024 bytes on
  Ring<C::kRowStages> rows;
  Ring<C::kWeightStages> weights;

  __device__ Consumer(const Shared<C>& s, const Problem& problem, int id) : shared(s), p(problem) {
    thread = id % 128, warpgroup = id / 128, lane_row = thread / 32 * 16 + thread % 32 / 4;
    const int row = warpgroup * 64 + lane_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) weight_place[h] = row * 128 + (((thread % 4 * 2 + h) ^ (row % 8)) << 4);
  }

  // This warp has multiplied a row stage.
  __device__ __forceinline__ void release(int stage) const {
    if (thread % 32 == 0) mbarrier_arrive(shared.rows_empty(stage));
  }

  // Scale codes of eight chunks from `chunk` on: lane 4 i + j has group j of chunk + i.
  __device__ __forceinline__ uint32_t load_scales(const uint8_t* scales, int chunk) const {
    const int group = chunk * 4 + thread % 32;
    return group < p.scale_columns() ? __ldg(scales + group) : 127;
  }
  // Whether a code of this warpgroup, whose warps multiply together, takes two factors: hardly ever.
  __device__ __forceinline__ bool far(uint32_t scale) const { return !named_barrier_all(3 + warpgroup, 128, scale <= kOneFactor); }

  // The codes of half a chunk of this thread's two weight rows: 16 K of each of the row's halves.
  struct Codes {
    uint4 upper, lower;
  };
  __device__ __forceinline__ Codes load_codes(int h) const {
    const uint8_t* at = shared.weights(weights.stage) + weight_place[h];
    return {*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + 1024)};
  }

  // What multiply_codes has at hand between steps.
  struct Running {
    Codes codes;    // of the step that is next
    int previous;   // the stage whose products may still run
  };

  // Chunks chunk .. last of start .. stop, whose scales are `eight`. Codes are read while the products before theirs run.
  template <bool two_factors>
  __device__ __forceinline__ void multiply_eight(float (&sums)[C::T / 2], Running& running, uint32_t eight, int chunk, int last,
                                                 int start, int stop) {
    constexpr int kGroup = C::kGroup, kParts = 4 / kGroup;
    uint32_t fragment[2][kGroup][4];
    uint32_t row_tiles = 0;  // where the sub-tiles of rows are: the same in all lanes, which the compiler is to know
    const int first = chunk;
    Codes& codes = running.codes;
#pragma unroll 1
    for (; chunk < last; ++chunk) {
      const uint32_t scale = __shfl_sync(0xFFFFFFFFu, eight, (chunk - first) * 4 + thread % 4), factor = code_factor(scale);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_tiles = __shfl_sync(0xFFFFFFFFu, descriptor128_base(shared.rows(rows.stage)), 0);
        const uint32_t words[2][4] = {{codes.upper.x, codes.upper.y, codes.upper.z, codes.upper.w},
                                      {codes.lower.x, codes.lower.y, codes.lower.z, codes.lower.w}};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int buffer = (h * kParts + part) % 2;
#pragma unroll
          for (int i = 0; i < kGroup; ++i)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              const uint32_t word = words[row][kGroup * part + i];
              uint32_t even = scale_bf16x2(even_codes(word), factor), odd = scale_bf16x2(odd_codes(word), factor);
              if (two_factors) even = scale_bf16x2(even, second_factor(scale)), odd = scale_bf16x2(odd, second_factor(scale));
              fragment[buffer][i][row + 2 * h] = even, fragment[buffer][i][row + 2 - 2 * h] = odd;
            }
          if (part == 0) mbarrier_wait(shared.rows_full(rows.stage), rows.parity);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
            const uint64_t b = descriptor128_of(row_tiles + (kGroup * part + i) * 2);
            Wgmma<C::T>::bf16_rs(sums, fragment[buffer][i], b, chunk > start || h + part + i > 0);
          }
          wgmma_commit();
          if (part + 1 == kParts) {
            if (h == 0) {
              codes = load_codes(1);
            } else {
              __syncwarp();
              if (thread % 32 == 0) mbarrier_arrive(shared.weights_empty(weights.stage));
              weights.next();
              if (chunk + 1 < stop) {
                mbarrier_wait(shared.weights_full(weights.stage), weights.parity);
                codes = load_codes(0);
              }
            }
          }
          wgmma_wait<1>();
          if (part == 0 && running.previous >= 0) release(running.previous);
        }
        running.previous = rows.stage;
        rows.next();
      }
    }
  }

  // sums = W x^T over chunks start .. stop. `scales`: of this warp's weight rows; `first_scales`: those of the first eight. Where a
  // code takes two factors the products of eight chunks are waited for, so that the other loop is as if there were no such.
  __device__ __forceinline__ void multiply_codes(float (&sums)[C::T / 2], const uint8_t* scales, uint32_t first_scales, int start,
                                                 int stop) {
    uint32_t eight = first_scales;
    mbarrier_wait(shared.weights_full(weights.stage), weights.parity);
    Running running{load_codes(0), -1};
#pragma unroll 1
    for (int first = start; first < stop; first += 8) {
      const uint32_t next_eight = load_scales(scales, first + 8);  // not touched before the eight chunks are done
      const int last = min(stop, first + 8);
      if (far(eight)) {
        wgmma_wait<0>();
        multiply_eight<true>(sums, running, eight, first, last, start, stop);
        wgmma_wait<0>();
      } else {
        multiply_eight<false>(sums, running, eight, first, last, start, stop);
      }
      eight = next_eight;
    }
    wgmma_wait<0>();
    wgmma_hold(sums);
    release(running.previous);
  }

  // The same from BF16 on both sides.
  __device__ __forceinline__ void multiply_dense(float (&sums)[C::T / 2], int start, int stop) {
    int previous = -1;
#pragma unroll 1
    for (int chunk = start; chunk < stop; ++chunk) {
      mbarrier_wait(shared.rows_full(rows.stage), rows.parity);
      const uint64_t a = wgmma_descriptor128(shared.weights(rows.stage) + warpgroup * (C::kWeightStage / 2));
      const uint64_t b = wgmma_descriptor128(shared.rows(rows.stage));
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) Wgmma<C::T>::bf16_ss(sums, a + 2 * s, b + 2 * s, chunk > start || s > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0) release(previous);
      previous = rows.stage;
      rows.next();
    }
    wgmma_wait<0>();
    wgmma_hold(sums);
    release(previous);
  }

  __device__ __forceinline__ void multiply(float (&sums)[C::T / 2], const uint8_t* scales, uint32_t first_scales, int start, int stop) {
    if constexpr (C::kDense) multiply_dense(sums, start, stop);
    else multiply_codes(sums, scales, first_scales, start, stop);
  }

  // Scales of this warp's weight rows in a tile; of some tile where there is no such.
  __device__ __forceinline__ const uint8_t* scale_rows(const Work& w, int unit) const {
    if (C::kDense || unit >= w.total) return p.w_scale;
    const Place at = w.place(unit);
    const int blocks = (p.n + 31) / 32, block = at.feature_tile * 4 + warpgroup * 2 + lane_row / 32;
    return p.w_scale + static_cast<int64_t>(at.group * blocks + min(block, blocks - 1)) * p.scale_columns();
  }
  __device__ __forceinline__ uint32_t first_scales(const uint8_t* scales, int start) const {
    return C::kDense ? 0 : load_scales(scales, start);
  }

  // Where sums[4 j + i] of this thread lie in a tile [activation row][column].
  template <int pitch>
  __device__ __forceinline__ void stage(float* to, const float (&sums)[C::T / 2], int first_group, int groups) const {
#pragma unroll
    for (int j = 0; j < C::T / 8; ++j)
      if (j >= first_group && j < first_group + groups) {
        float* at = to + ((j - first_group) * 8 + thread % 4 * 2) * pitch + lane_row;
        at[0] = sums[4 * j], at[pitch] = sums[4 * j + 1];
        at[8] = sums[4 * j + 2], at[pitch + 8] = sums[4 * j + 3];
      }
  }

  // 16 weight rows by 16 activation rows of a warp, transposed: sums[8 j ..] to rows 16 j .. of a part of 128-byte rows whose
  // 16-byte pieces are swizzled as wgmma's operands are.
  __device__ __forceinline__ void stage_bf16(uint32_t to, const float (&sums)[C::T / 2], int j) const {
    const int lane = thread % 32, row = lane / 16 * 8 + lane % 8, piece = thread / 32 * 2 + lane / 8 % 2;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = bf16_pair(sums[8 * j + 2 * i], sums[8 * j + 2 * i + 1]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + row * 128 + ((piece ^ (row % 8)) << 4)),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3]) : "memory");
  }

  __device__ __forceinline__ void store_bf16_tile(const float (&sums)[C::T / 2], int first, int rows_left, int64_t column) const {
#pragma unroll
    for (int part = 0; part < C::T / C::kPart; ++part) {
      uint8_t* staging = shared.staging(warpgroup) + part % 2 * (C::kPart * 128);
#pragma unroll
      for (int j = 0; j < C::kPart / 16; ++j) stage_bf16(shared_address(staging) + j * 2048, sums, part * (C::kPart / 16) + j);
      named_barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int i = 0; i < C::kPart / 16; ++i) {
        const int row = i * 16 + thread / 8, in_tile = part * C::kPart + row;
        const uint4 eight = *reinterpret_cast<const uint4*>(staging + row * 128 + ((thread % 8 ^ row % 8) << 4));
        if (in_tile < rows_left)
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + (first + in_tile) * p.out_stride + column + thread % 8 * 8) = eight;
      }
    }
  }

  __device__ __forceinline__ void store_wide_tile(const float (&sums)[C::T / 2], int first, int rows_left, int group, int n) const {
    float* staging = reinterpret_cast<float*>(shared.staging(warpgroup));
#pragma unroll
    for (int part = 0; part < C::T / C::kWidePart; ++part) {
      named_barrier_sync(1 + warpgroup, 128);
      stage<C::kWidePitch>(staging, sums, part * (C::kWidePart / 8), C::kWidePart / 8);
      named_barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int i = 0; i < C::kWidePart / 16; ++i) {
        const int row = i * 16 + thread / 8, in_tile = part * C::kWidePart + row;
        const float4* from = reinterpret_cast<const float4*>(staging + row * C::kWidePitch + thread % 8 * 8);
        const float4 a = from[0], b = from[1];
        store_unit(p, first + in_tile, group, n + thread % 8 * 8, in_tile < rows_left, {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w});
      }
    }
  }

  __device__ __forceinline__ void store(const float (&sums)[C::T / 2], int valid, const Place& at) const {
    const int n = at.feature_tile * kTileFeatures + warpgroup * 64, first = at.row_tile * C::T;
    named_barrier_sync(1 + warpgroup, 128);  // the tile before has left the staging room
    if (p.output == kBf16 && p.out_aligned && n + 64 <= p.n)
      store_bf16_tile(sums, first, valid - first, static_cast<int64_t>(at.group) * p.n + n);
    else
      store_wide_tile(sums, first, valid - first, at.group, n);
  }

  // The sums of all slices of a tile, which the blocks of a cluster have: each adds some rows of it, in the slices' order.
  __device__ __forceinline__ void store_joined(const float (&sums)[C::T / 2], int rows_left, const Place& at) const {
    float* tile = shared.tile();
    named_barrier_sync(1, kConsumers);  // both have read the stages, which the sums now replace
    stage<kTilePitch>(tile + warpgroup * 64, sums, 0, C::T / 8);
    cluster_sync();
    const uint32_t own = shared_address(tile);
#pragma unroll 1
    for (int two = threadIdx.x / 32 * p.slices + static_cast<int>(cluster_rank()); two < C::T / 2; two += kConsumers / 32 * p.slices) {
      const int row = two * 2 + threadIdx.x % 32 / 16, column = threadIdx.x % 16 * 8;
      const uint32_t from = own + (row * kTilePitch + column) * 4;
      const float4 a = add_joined(from, p.slices), b = add_joined(from + 16, p.slices);
      store_unit(p, at.row_tile * C::T + row, at.group, at.feature_tile * kTileFeatures + column, row < rows_left,
                 {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w});
    }
    cluster_arrive_relaxed();  // no block ends while others read from it
    cluster_wait();
  }

  // The sums so far of a tile's slices, while its block goes through them: [fours of a thread's][thread].
  __device__ __forceinline__ float4* aside() const {
    return reinterpret_cast<float4*>(p.partial) + static_cast<int64_t>(blockIdx.x) * (C::T * kTileFeatures / 4) + threadIdx.x;
  }
  __device__ __forceinline__ void put_aside(const float (&sums)[C::T / 2]) const {
#pragma unroll
    for (int i = 0; i < C::T / 8; ++i)
      __stcg(aside() + i * kConsumers, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  }
  __device__ __forceinline__ void add_aside(float (&sums)[C::T / 2]) const {
#pragma unroll
    for (int i = 0; i < C::T / 8; ++i) {
      const float4 four = __ldcg(aside() + i * kConsumers);
      sums[4 * i] += four.x, sums[4 * i + 1] += four.y, sums[4 * i + 2] += four.z, sums[4 * i + 3] += four.w;
    }
  }

  // The sums as they are, rows of kTilePitch, into the workspace: of few rows by their threads, of many by the copy engine. Both
  // warpgroups call it, once.
  __device__ __forceinline__ void store_partial(const float (&sums)[C::T / 2], int rows_left) const {
    float* room = p.partial + static_cast<int64_t>(blockIdx.x) * (C::T * kTilePitch);
    if constexpr (C::T <= 64) {
      stage<kTilePitch>(room + warpgroup * 64, sums, 0, C::T / 8);
      return;
    }
    float* tile = shared.tile();
    named_barrier_sync(1, kConsumers);  // both have read the stages, which the sums now replace
    stage<kTilePitch>(tile + warpgroup * 64, sums, 0, C::T / 8);
    fence_proxy_async();
    named_barrier_sync(1, kConsumers);
    if (threadIdx.x == 0) {
      launch_dependents();
      bulk_store(room, tile, min(C::T, rows_left) * kTilePitch * 4);
    }
  }
};

// Goes through a block's tiles and the slices of each. The scales that a slice begins with are loaded a slice ahead.
template <typename C>
__device__ __forceinline__ void consume(const Shared<C>& shared, const Problem& p, const Work& w, int valid, int id) {
  Consumer<C> consumer(shared, p, id);
  constexpr bool kInParts = C::kSlices == kInTurn || C::kSlices == kAside;
  const int slices = kInParts ? p.slices : 1;
  const uint8_t* scales = consumer.scale_rows(w, w.first);
  uint32_t upcoming = consumer.first_scales(scales, w.start);
  for (int unit = w.first; unit < w.total; unit += w.stride) {
    float total[C::T / 2];
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      const uint8_t* here = scales;
      const uint32_t first = upcoming;
      const int start = kInParts ? p.slice_start(slice) : w.start, stop = kInParts ? p.slice_start(slice + 1) : w.stop;
      if constexpr (!C::kSplit) {
        if (slice + 1 == slices) scales = consumer.scale_rows(w, unit + w.stride);
        upcoming = consumer.first_scales(scales, slice + 1 == slices ? w.start : stop);
      }
      if (C::kSlices == kInTurn && slice > 0) {
        float sums[C::T / 2];
        consumer.multiply(sums, here, first, start, stop);
#pragma unroll
        for (int i = 0; i < C::T / 2; ++i) total[i] += sums[i];
      } else {
        consumer.multiply(total, here, first, start, stop);
      }
      if constexpr (C::kSlices == kAside) {
        if (slice > 0) consumer.add_aside(total);
        if (slice + 1 < slices) consumer.put_aside(total);
      }
    }
    const Place at = w.place(unit);
    if constexpr (C::kSlices == kApart) consumer.store_partial(total, valid - at.row_tile * C::T);
    else if constexpr (C::kSlices == kJoined) consumer.store_joined(total, valid - at.row_tile * C::T, at);
    else consumer.store(total, valid, at);
    if constexpr (C::kSplit) return;
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
linear_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap row_map, const Problem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> shared{memory};
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kRowStages; ++i) {
      mbarrier_init(shared.rows_full(i), 1);
      mbarrier_init(shared.rows_empty(i), kConsumers / 32);
    }
    for (int i = 0; i < C::kWeightStages; ++i) {
      mbarrier_init(shared.weights_full(i), 1);
      mbarrier_init(shared.weights_empty(i), kConsumers / 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (C::kAhead) launch_dependents();  // the next part's blocks get their weights, then wait until this kernel has ended
  const int valid = valid_rows(p);
  const Work w = Work::of<C>(p, valid);
  if (threadIdx.x < kConsumers) {
    registers_up<C::kConsumerRegisters>();
    consume<C>(shared, p, w, valid, threadIdx.x);
  } else {
    registers_down<C::kProducerRegisters>();
    if (threadIdx.x == kConsumers) {
      if constexpr (C::kDense) produce_dense<C>(shared, &weight_map, &row_map, p, w);
      else produce_codes<C>(shared, &weight_map, p, w);
    } else if (C::kAhead && threadIdx.x >= kConsumers + 32) {
      const int warp = threadIdx.x / 32 - kConsumers / 32 - 1;
      wait_for_predecessor();  // which multiplies the rows that were in the next ones' place
      expand_ahead<C::T>(p, shared.ahead(warp), blockIdx.x * C::kAheadWarps + warp, gridDim.x * C::kAheadWarps, threadIdx.x % 32);
    }
  }
}

}  // namespace di::linear
