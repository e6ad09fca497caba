// How a layer's small kernels wait for the one before, and what they ask of rows.
#pragma once

#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {

// A sum of the words of `values`, pointers and 32-bit integers.
template <typename... Values>
__device__ __forceinline__ uint32_t sum_of_words(Values... values) {
  uint32_t n = 0;
  const auto add = [&n](auto value) {
    if constexpr (sizeof(value) == 8) {
      const uint64_t bits = reinterpret_cast<uint64_t>(value);
      n += static_cast<uint32_t>(bits) + static_cast<uint32_t>(bits >> 32);
    } else {
      n += static_cast<uint32_t>(value);
    }
  };
  (add(values), ...);
  return n;
}

// Zero, which is known once `values` have been computed: whether n (n + 1) is odd. A compiler computes addresses and fetches
// parameters where they are used first; what hangs on this zero comes after them.
template <typename... Values>
__device__ __forceinline__ int zero_of(Values... values) {
  uint32_t odd;
  asm volatile("mad.lo.u32 %0, %1, %1, %1; and.b32 %0, %0, 1;" : "=r"(odd) : "r"(sum_of_words(values...)));
  return static_cast<int>(odd);
}

// wait_for_producer (di_ptx.cuh), once `values` have been computed, and not before: what follows finds them at hand.
template <typename... Values>
__device__ __forceinline__ void wait_for_producer_with(Values... values) {
  asm volatile("{ .reg .pred p; setp.eq.s32 p, %0, 0; @p griddepcontrol.wait; }" ::"r"(zero_of(values...)) : "memory");
}

// Loads before it are started before what comes after it: a branch that is never taken, over which a compiler moves none.
__device__ __forceinline__ void keep_loads_ahead(int value) {
  if (zero_of(value) != 0) asm volatile("trap;");
}

// Whether the rows of a matrix follow one another; those of none do.
inline bool rows_follow(const di_tensor& t) { return !present(t) || t.shape[0] <= 1 || t.stride[0] == t.shape[1]; }

}  // namespace di
