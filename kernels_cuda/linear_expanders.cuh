// Few activation rows: warps of the block itself expand them to the sub-tiles that its consumers multiply, a step at a time, from
// codes that a copying warp brings. So a block reads half the bytes that expanded rows have, and no kernel runs before it. The
// weights' copies do not wait for the kernel before; the rows do.
#pragma once

#include "linear_rows.cuh"
#include "linear_stages.cuh"

namespace di::linear {

// The four scales of each row and step of a slice, a word, to shared memory: loads during the steps would be waited for by every
// fence that hands expanded rows over. Rows that are not valid get none.
template <typename C>
__device__ __forceinline__ void keep_scales(uint32_t* to, const Problem& p, const Work& w, int valid, int thread) {
  const int steps = w.stop - w.start, columns = p.scale_columns(), step = thread % 32;
  const int64_t first = static_cast<int64_t>(w.place(w.first).group) * columns + (w.start + step) * 4;
  const bool words = (reinterpret_cast<uintptr_t>(p.x_scale) | p.x_scale_stride | first | columns) % 4 == 0;
  if (step < steps) {
    const uint8_t* from = p.x_scale + first;
    for (int row = thread / 32; row < min(C::T, valid); row += C::kExpanders / 32) {
      if (words) {
        async_copy4(shared_address(to + row * kScalePitch + step), from + row * p.x_scale_stride);
      } else {
        uint32_t four = 0;
        for (int j = 0; j < min(4, columns - (w.start + step) * 4); ++j)
          four |= static_cast<uint32_t>(from[row * p.x_scale_stride + j]) << 8 * j;
        to[row * kScalePitch + step] = four;
      }
    }
  }
  async_copy_commit();
  async_copy_wait<0>();
}

// Thread t has piece t % 8 of row 8 (t / 64) + 2 (t / 8 % 4) + t / 32 % 2 of every kPass: no store meets a bank twice.
template <typename C>
struct Expander {
  static constexpr int kPass = C::kExpanders / 8, kItems = C::T / kPass;
  int piece, row;
  uint32_t places[8];  // of the thread's words in two sub-tiles: places[2 s + 1] has the odd codes of k16 step s

  __device__ explicit Expander(int thread) {
    const int lane = thread % 32, sub_tile = lane % 2;
    piece = lane % 8, row = thread / 64 * 8 + lane / 8 * 2 + thread / 32 % 2;
    const uint32_t place = sub_tile * C::kRowStage + row * 128 + ((sub_tile ^ row % 8) << 4) + piece / 2 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) places[i] = place ^ (i << 4);
  }

  // A step, from `raw` with the scales of rows at `scales`, to `rows`. What lies beyond K is zero, codes and scales.
  __device__ __forceinline__ void expand(uint32_t rows, uint32_t raw, uint32_t scales) const {
    uint4 codes[kItems];
    uint32_t factors[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      codes[i] = load_shared16(raw + (row + i * kPass) * 128 + piece * 16);
      factors[i] = code_factor<kRowOffset>(load_shared1(scales + ((row + i * kPass) * kScalePitch) * 4 + piece / 2));
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        store_shared4(rows + places[2 * s] + i * (kPass * 128), scale_bf16x2(even_codes(words[s]), factors[i]));
        store_shared4(rows + places[2 * s + 1] + i * (kPass * 128), scale_bf16x2(odd_codes(words[s]), factors[i]));
      }
    }
  }
};

template <typename C>
__device__ __forceinline__ void expand_in_block(const Shared<C>& shared, const Problem& p, const Work& w, int thread) {
  const int steps = w.steps(), lane = thread % 32;
  const Expander<C> expander(thread);
  wait_for_predecessor();
  keep_scales<C>(shared.scales(), p, w, valid_rows(p), thread);
  named_barrier_sync(3, C::kExpanders);
  Ring<C::kRawStages> raw;
  Ring<C::kRowStages / 2> ring;
  int chunk = w.start;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = 2 * ring.stage;
    mbarrier_wait(shared.raw_full(raw.stage), raw.parity);
    mbarrier_wait(shared.rows_empty(stage), ring.parity ^ 1);
    expander.expand(shared_address(shared.rows(stage)), shared_address(shared.raw(raw.stage)),
                    shared_address(shared.scales() + (chunk - w.start)));
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.rows_full(stage));
    if (lane == 1) mbarrier_arrive(shared.raw_empty(raw.stage));
    ring.next();
    raw.next();
    if (++chunk == w.stop) chunk = w.start;
  }
}

// The copying warps' one thread each.
template <typename C>
__device__ __forceinline__ void produce_weights(const Shared<C>& shared, const CUtensorMap* map, const Problem& p, const Work& w) {
  const int steps = w.steps();
  Cursor cursor(w);
  Ring<C::kWeightStages> ring;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(shared.weights_empty(ring.stage), ring.parity ^ 1);
    copy_weights(shared, map, p, w, cursor, ring);
  }
}
template <typename C>
__device__ __forceinline__ void produce_raw(const Shared<C>& shared, const CUtensorMap* map, const Problem& p, const Work& w) {
  const int steps = w.steps();
  Cursor cursor(w);
  Ring<C::kRawStages> ring;
  wait_for_predecessor();
  for (int step = 0; step < steps; ++step) {
    uint64_t* full = shared.raw_full(ring.stage);
    mbarrier_wait(shared.raw_empty(ring.stage), ring.parity ^ 1);
    mbarrier_arrive_expect(full, C::kRawStage);
    tensor_copy(shared.raw(ring.stage), map, cursor.at.group * p.k + cursor.chunk * kChunk, cursor.at.row_tile * C::T, full);
    cursor.next(w);
    ring.next();
  }
}

}  // namespace di::linear
