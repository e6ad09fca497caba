// Hopper's matrix instruction: one warpgroup multiplies a tile of 64 rows, accumulating FP32 in registers.
//
//   Wgmma<64>::bf16_ss(d, a, b, true)      D[64, 64] += A[64, 16] B[64, 16]^T, both BF16 in shared memory (descriptors)
//   Wgmma<64>::bf16_rs(d, fragment, b, true)   the same with A in registers; f16_rs: both F16
//   Wgmma<64>::e4m3_ss / e4m3_rs           K = 32, both operands e4m3; e5m2_rs: both e5m2
//
// d[N / 2]: thread t of the warpgroup (warp w = t / 32, lane l = t % 32) holds, for column group j < N / 8,
//   d[4 j], d[4 j + 1]     row 16 w + l / 4,     columns 8 j + 2 (l % 4) and + 1
//   d[4 j + 2], d[4 j + 3] row 16 w + l / 4 + 8, the same columns
// A in registers (BF16): a[0] row 16 w + l / 4, K 2 (l % 4), + 1; a[1] row + 8; a[2] K + 8; a[3] row + 8, K + 8.
// A in registers (e4m3, e5m2): the same with four codes of K 4 (l % 4) .. + 3, and K + 16 in a[2], a[3].
//
// Call wgmma_fence() before the first of a series, wgmma_commit() after its last, wgmma_wait<0>() before d is read.
#pragma once

#include <stdint.h>

#include "di_ptx.cuh"

namespace di {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving uses of accumulator registers across a wait.
template <int count>
__device__ __forceinline__ void wgmma_hold(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// What a thread has of columns 8 j to 8 j + 7 of an instruction's sums.
template <int count>
__device__ __forceinline__ float4 unit_of(const float (&sums)[count], int j) {
  return make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
}
__device__ __forceinline__ void add_to(float4& sum, const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

enum Swizzle : uint64_t { kNoSwizzle = 0, kSwizzle128 = 1, kSwizzle64 = 2, kSwizzle32 = 3 };

// Descriptor of an operand in shared memory. For a K-major tile with a 128-byte swizzle (rows of 128 bytes, the 16-byte
// piece c of row r stored at piece c ^ (r % 8), tile aligned to 1024 bytes): leading = 16 (unused), stride = 1024 bytes
// between groups of 8 rows; a step along K adds its bytes to the address.
// Without swizzle: 8 x 16-byte core matrices, `leading` bytes between cores along K and `stride` along M or N.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>((leading & 0x3FFFF) >> 4) << 16 |
         static_cast<uint64_t>((stride & 0x3FFFF) >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
// The same in two steps: the lower word, to which a step along K is added, and the whole.
__device__ __forceinline__ uint32_t descriptor128_base(const void* tile) { return (shared_address(tile) & 0x3FFFF) >> 4 | 1 << 16; }
__device__ __forceinline__ uint64_t descriptor128_of(uint32_t lower) {
  return static_cast<uint64_t>(1024 >> 4 | static_cast<uint32_t>(kSwizzle128) << 30) << 32 | lower;
}
__device__ __forceinline__ uint64_t wgmma_descriptor128(const void* tile) {
  return wgmma_descriptor(shared_address(tile), 16, 1024, kSwizzle128);
}

// Lists of registers in an instruction, and of the operands behind them.
// clang-format off
#define DI_R4 "%0, %1, %2, %3"
#define DI_R8 DI_R4 ", %4, %5, %6, %7"
#define DI_R12 DI_R8 ", %8, %9, %10, %11"
#define DI_R16 DI_R12 ", %12, %13, %14, %15"
#define DI_R24 DI_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define DI_R32 DI_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define DI_R48 DI_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DI_R64 DI_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DI_R80 DI_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define DI_R96 DI_R80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DI_R128 DI_R96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define DI_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DI_F8(d, i) DI_F4(d, i), DI_F4(d, i + 4)
#define DI_F12(d, i) DI_F8(d, i), DI_F4(d, i + 8)
#define DI_F16(d, i) DI_F8(d, i), DI_F8(d, i + 8)
#define DI_F24(d, i) DI_F16(d, i), DI_F8(d, i + 16)
#define DI_F32(d, i) DI_F16(d, i), DI_F16(d, i + 16)
#define DI_F48(d, i) DI_F32(d, i), DI_F16(d, i + 32)
#define DI_F64(d, i) DI_F32(d, i), DI_F32(d, i + 32)
#define DI_F80(d, i) DI_F64(d, i), DI_F16(d, i + 64)
#define DI_F96(d, i) DI_F64(d, i), DI_F32(d, i + 64)
#define DI_F128(d, i) DI_F64(d, i), DI_F64(d, i + 64)
// clang-format on

template <int N>
struct Wgmma;

// R: registers of the accumulator (N / 2); P0 .. P6: the numbers of the operands that follow them.
// Transposed B (N-major in shared memory) is a template argument of the BF16 forms; e4m3 operands are always K-major.
#define DI_WGMMA(N, R, P0, P1, P2, P3, P4, P5, P6)                                                                             \
  template <>                                                                                                                  \
  struct Wgmma<N> {                                                                                                            \
    template <int transposed_b = 0>                                                                                            \
    static __device__ __forceinline__ void bf16_ss(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) {                   \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                          \
                   "k16.f32.bf16.bf16 {" DI_R##R "}, %" #P0 ", %" #P1 ", p, 1, 1, 0, %" #P3 "; }"                              \
                   : DI_F##R(d, 0) : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(transposed_b));                    \
    }                                                                                                                          \
    template <int transposed_b = 0>                                                                                            \
    static __device__ __forceinline__ void bf16_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) {       \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                          \
                   "k16.f32.bf16.bf16 {" DI_R##R "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 "; }" \
                   : DI_F##R(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                       \
                     "r"(static_cast<int>(accumulate)), "n"(transposed_b));                                                    \
    }                                                                                                                          \
    template <int transposed_b = 0>                                                                                            \
    static __device__ __forceinline__ void f16_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) {        \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                          \
                   "k16.f32.f16.f16 {" DI_R##R "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 "; }"   \
                   : DI_F##R(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                       \
                     "r"(static_cast<int>(accumulate)), "n"(transposed_b));                                                    \
    }                                                                                                                          \
    static __device__ __forceinline__ void e4m3_ss(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) {                   \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                          \
                   "k32.f32.e4m3.e4m3 {" DI_R##R "}, %" #P0 ", %" #P1 ", p, 1, 1; }"                                           \
                   : DI_F##R(d, 0) : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                       \
    }                                                                                                                          \
    static __device__ __forceinline__ void e4m3_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) {       \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                          \
                   "k32.f32.e4m3.e4m3 {" DI_R##R "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1; }"           \
                   : DI_F##R(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                       \
                     "r"(static_cast<int>(accumulate)));                                                                       \
    }                                                                                                                          \
    static __device__ __forceinline__ void e5m2_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) {       \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                          \
                   "k32.f32.e5m2.e5m2 {" DI_R##R "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1; }"           \
                   : DI_F##R(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                       \
                     "r"(static_cast<int>(accumulate)));                                                                       \
    }                                                                                                                          \
  };

DI_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
DI_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
DI_WGMMA(24, 12, 12, 13, 14, 15, 16, 17, 18)
DI_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
DI_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
DI_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
DI_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
DI_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
DI_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
DI_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
DI_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef DI_WGMMA

}  // namespace di
