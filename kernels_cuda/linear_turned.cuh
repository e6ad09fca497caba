// How the sums of a turned tile of linear_tile.cuh leave: a warp has 16 rows of T columns, and stores them by itself.
#pragma once

#include "di_ptx.cuh"
#include "linear_problem.cuh"

namespace di::linear {

constexpr int kWarpStaging = 4096;  // bytes of shared memory that a warp has for it
constexpr int kTurnedPitch = 40;    // FP32 sums of a row on their way: 8 more than the columns, for the banks' sake

// sums[4 j ..]: columns 8 j + 2 (lane % 4) and + 1 of row lane / 4, then of the row 8 below.
template <int T>
struct TurnedStore {
  static constexpr int kPart = T % 64 == 0 ? 64 : 32, kPieces = kPart / 8;  // columns at a time, and 16-byte pieces of a row
  static_assert(T % 32 == 0 && 2 * 16 * kPart * 2 <= kWarpStaging && 16 * kTurnedPitch * 4 <= kWarpStaging);

  const Problem& p;
  uint8_t* staging;
  int lane, first, rows_left;  // of the warp's 16 rows

  // A piece of a row, so placed that eight rows of it meet no bank twice.
  static __device__ __forceinline__ int place(int row, int piece) {
    return row * (kPart * 2) + ((kPieces == 8 ? piece ^ row % 8 : piece ^ row / 2 % 4) << 4);
  }

  __device__ __forceinline__ void store_bf16(const float (&sums)[T / 2], int64_t column) const {
#pragma unroll
    for (int part = 0; part < T / kPart; ++part) {
      uint8_t* half = staging + part % 2 * (16 * kPart * 2);
#pragma unroll
      for (int j = 0; j < kPieces; j += 2) {
        const int at = part * (kPart / 2) + 4 * j;
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[i] = bf16_pair(sums[at + 2 * i], sums[at + 2 * i + 1]);
        store_matrices(shared_address(half) + place(lane % 16, j + lane / 16), packed);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPieces / 2; ++i) {
        const int row = i * (32 / kPieces) + lane / kPieces, piece = lane % kPieces;
        const uint4 eight = *reinterpret_cast<const uint4*>(half + place(row, piece));
        if (row < rows_left)
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + (first + row) * p.out_stride + column + part * kPart + piece * 8) = eight;
      }
    }
  }

  __device__ __forceinline__ void store_wide(const float (&sums)[T / 2], int group, int n) const {
    float* tile = reinterpret_cast<float*>(staging);
#pragma unroll
    for (int part = 0; part < T / 32; ++part) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* at = tile + lane / 4 * kTurnedPitch + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(at) = make_float2(sums[part * 16 + 4 * j], sums[part * 16 + 4 * j + 1]);
        *reinterpret_cast<float2*>(at + 8 * kTurnedPitch) = make_float2(sums[part * 16 + 4 * j + 2], sums[part * 16 + 4 * j + 3]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = i * 8 + lane / 4;
        const float4* from = reinterpret_cast<const float4*>(tile + row * kTurnedPitch + lane % 4 * 8);
        const float4 a = from[0], b = from[1];
        store_unit(p, first + row, group, n + part * 32 + lane % 4 * 8, row < rows_left, {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w});
      }
    }
  }

  __device__ __forceinline__ void store(const float (&sums)[T / 2], int group, int n) const {
    __syncwarp();  // the tile before has left the staging room
    if (p.output == kBf16 && p.out_aligned && n + T <= p.n) store_bf16(sums, static_cast<int64_t>(group) * p.n + n);
    else store_wide(sums, group, n);
  }
};

}  // namespace di::linear
