// A warpgroup of linear_few.cuh that multiplies: 64 weight rows, expanded in registers, times the rows in shared memory.
#pragma once

#include "di_wgmma.cuh"
#include "linear_few_rows.cuh"

namespace di::linear {

template <typename C>
struct FewConsumer {
  const FewShared<C>& shared;
  const Problem& p;
  const FewWork& w;
  int thread, warpgroup, lane_row;  // lane_row: of the warpgroup's first 64
  uint32_t weight_place[2];         // of pieces 2 q and 2 q + 1 of lane_row; row + 8 lies 1024 bytes on

  __device__ FewConsumer(const FewShared<C>& s, const Problem& problem, const FewWork& work, int id)
      : shared(s), p(problem), w(work) {
    thread = id % 128, warpgroup = id / 128, lane_row = thread / 32 * 16 + thread % 32 / 4;
    const int row = warpgroup * (64 * C::M) + lane_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) weight_place[h] = row * 128 + (((thread % 4 * 2 + h) ^ (row % 8)) << 4);
  }

  // The codes of half a step of this thread's two weight rows.
  struct Codes {
    uint4 upper, lower;
  };
  __device__ __forceinline__ Codes load_codes(int stage, int h, int granule = 0) const {
    const uint32_t at = shared_address(shared.weights(stage)) + weight_place[h] + granule * (64 * kChunk);
    return {load_shared16(at), load_shared16(at + 1024)};
  }
  // half: to F16 and not BF16.
  template <bool half>
  __device__ __forceinline__ void expand(uint32_t (&fragment)[4][4], const Codes& codes, const Factor& factor, int h) const {
    const uint32_t words[2][4] = {{codes.upper.x, codes.upper.y, codes.upper.z, codes.upper.w},
                                  {codes.lower.x, codes.lower.y, codes.lower.z, codes.lower.w}};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t word = words[row][i];
        fragment[i][row + 2 * h] = low_values<half>(word, factor), fragment[i][row + 2 - 2 * h] = high_values<half>(word, factor);
      }
  }
  template <bool half>
  __device__ __forceinline__ void issue(float (&sums)[C::kPassRows / 2], uint32_t (&fragment)[4][4], uint32_t row_tile,
                                        bool first) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (half) Wgmma<C::kPassRows>::f16_rs(sums, fragment[i], descriptor128_of(row_tile + i * 2), !first || i > 0);
      else Wgmma<C::kPassRows>::bf16_rs(sums, fragment[i], descriptor128_of(row_tile + i * 2), !first || i > 0);
    wgmma_commit();
  }

  // sums = the slice of W x^T, without the operands' factors. words: of load_scales, where `half` as half_exponents.
  template <bool half>
  __device__ __forceinline__ void multiply(float (&sums)[C::T / 2], uint32_t words) {
    constexpr int kPending = C::G == 2 ? 1 : 0;  // of many warpgroups, others expand while one's products run
    uint32_t even[4][4], second_buffer[4][4], (&odd)[4][4] = C::G == 2 ? second_buffer : even;
    Ring<C::kRowStages> rows;
    Ring<C::kWeightStages> weights;
    Factor factor = factor_of<half>(__shfl_sync(0xFFFFFFFFu, words, 0), thread % 4);
    int previous = -1;
    mbarrier_wait(shared.weights_full(0), 0);
    Codes codes = load_codes(0, 0);
#pragma unroll 1
    for (int step = 0; step < w.steps; ++step) {
      Codes second;  // early where there are registers for it
      if (C::G == 2) second = load_codes(weights.stage, 1);
      const uint32_t row_tiles = __shfl_sync(0xFFFFFFFFu, descriptor128_base(shared.rows(rows.stage)), 0);
      expand<half>(even, codes, factor, 0);
      mbarrier_wait(shared.rows_full(rows.stage), rows.parity);
      issue<half>(sums, even, row_tiles, step == 0);
      if (C::G != 2) second = load_codes(weights.stage, 1);
      wgmma_wait<kPending>();
      if (previous >= 0 && thread % 32 == 0) mbarrier_arrive(shared.rows_empty(previous));
      previous = rows.stage;
      rows.next();
      expand<half>(odd, second, factor, 1);  // it waits for all loads from the stage, which an arrival does not
      factor = factor_of<half>(__shfl_sync(0xFFFFFFFFu, words, step + 1), thread % 4);
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(shared.weights_empty(weights.stage));
      weights.next();
      issue<half>(sums, odd, row_tiles + C::T * 128 / 16, false);
      if (step + 1 < w.steps) {
        mbarrier_wait(shared.weights_full(weights.stage), weights.parity);
        codes = load_codes(weights.stage, 0);
      }
      wgmma_wait<kPending>();
    }
    wgmma_wait<0>();
    wgmma_hold(sums);
  }

  // Takes the operands' factors from the sums: 4 j and 4 j + 2 are of row 8 j + thread % 4 * 2, the others of the row after it.
  __device__ __forceinline__ void undo_factors(float (&sums)[C::T / 2], float weight_undo) const {
#pragma unroll
    for (int j = 0; j < C::kUnits; ++j) {
      const float2 undo = *reinterpret_cast<const float2*>(shared.undo() + j * 8 + thread % 4 * 2);
      const float first = undo.x * weight_undo, second = undo.y * weight_undo;
      sums[4 * j] *= first, sums[4 * j + 1] *= second, sums[4 * j + 2] *= first, sums[4 * j + 3] *= second;
    }
  }

  // The sums without their factors, to a tile [activation row][column] of a pitch. A row's factors are read where it is stored:
  // all of them beforehand took longer.
  __device__ __forceinline__ void stage(float* tile, int pitch, const float (&sums)[C::T / 2], float weight_undo) const {
#pragma unroll
    for (int j = 0; j < C::kUnits; ++j) {
      const int row = j * 8 + thread % 4 * 2;
      const float2 undo = *reinterpret_cast<const float2*>(shared.undo() + row);
      float* at = tile + row * pitch + warpgroup * 64 + lane_row;
      const float first = undo.x * weight_undo, second = undo.y * weight_undo;
      at[0] = sums[4 * j] * first, at[pitch] = sums[4 * j + 1] * second;
      at[8] = sums[4 * j + 2] * first, at[pitch + 8] = sums[4 * j + 3] * second;
    }
  }
};

}  // namespace di::linear
