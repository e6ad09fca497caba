// The random numbers of deepinfer_hal.philox: Philox4x32-10 with counter (position, purpose, token id / 4, 0), the seed as key;
// word `id % 4` of the block belongs to the id.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace di {

struct Noise {
  uint32_t key0, key1, position, purpose;

  __device__ __forceinline__ Noise(int64_t seed, int position_, uint32_t purpose_)
      : key0(static_cast<uint32_t>(seed)), key1(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)),
        position(static_cast<uint32_t>(position_)), purpose(purpose_) {}

  // The words of ids 4 * group .. 4 * group + 3.
  __device__ __forceinline__ uint4 words(uint32_t group) const {
    uint32_t c0 = position, c1 = purpose, c2 = group, c3 = 0, k0 = key0, k1 = key1;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u, b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
      c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(b);
      c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(a);
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
  }
};

// Word `part` (0 .. 3), without an index at run time into registers.
template <typename Four>
__device__ __forceinline__ auto part_of(const Four& four, int part) {
  return part < 2 ? (part == 0 ? four.x : four.y) : (part == 2 ? four.z : four.w);
}

// (top + 1/2) 2^-24, below 1.
__device__ __forceinline__ float uniform(uint32_t word) {
  return fminf(__fmul_rn(__fadd_rn(static_cast<float>(word >> 8), 0.5f), 0x1p-24f), 1.0f - 0x1p-24f);
}

// -log(-log(u)). Above one half 1 - u is exact and u is not.
__device__ __forceinline__ float gumbel(uint32_t word) {
  const uint32_t top = word >> 8;
  const bool upper = top >= 1u << 23;
  const float distance = __fmul_rn(static_cast<float>(upper ? (1u << 24) - 1 - top : top) + 0.5f, 0x1p-24f);
  return -logf(upper ? -log1pf(-distance) : -logf(distance));
}

// More than gumbel(word), by little where that is large: -log(-log(u)) < -log(1 - u). Infinite for the two largest words.
__device__ __forceinline__ float gumbel_bound(uint32_t word) {
  constexpr float kLog2 = 0.6931472f;
  const float below = __uint_as_float(0x4B000000u | (~word >> 9)) - 0x1p23f;  // 2^23 (1 - u), cut off
  float exponent;
  asm("lg2.approx.f32 %0, %1;" : "=f"(exponent) : "f"(below));
  return __fmaf_rn(exponent, -kLog2, 23.0f * kLog2 + 1e-4f);
}

constexpr float kLeastNoise = -2.86f;  // no noise is less: -log(-log(2^-25)) = -2.852

}  // namespace di
