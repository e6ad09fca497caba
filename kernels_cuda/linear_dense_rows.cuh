// BF16 products that the tiles of linear_tile.cuh cannot begin with: rows that the copy engine cannot read are copied to where it
// can, and a weight that it cannot read is multiplied without tiles.
#pragma once

#include "linear_call.cuh"
#include "linear_problem.cuh"

namespace di::linear {

constexpr int kCopiers = 256;  // threads a row

// Whether rows begin at multiples of 16 bytes and do not overlap.
inline bool lies_well(const di_tensor& x, int64_t columns) {
  const int64_t pitch = row_stride(x);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && pitch % 8 == 0 && pitch >= columns;
}

// A block a row. Rows past the valid ones stay what they are: no row's sums have anything of another row.
__global__ void __launch_bounds__(kCopiers) gather_rows(const Problem p, const __nv_bfloat16* x, int64_t pitch, int columns) {
  const int64_t row = blockIdx.x;
  if (row >= valid_rows(p)) return;
  __nv_bfloat16* to = reinterpret_cast<__nv_bfloat16*>(p.expanded) + row * columns;
  for (int i = threadIdx.x; i < columns; i += kCopiers) to[i] = x[row * pitch + i];
}

// Copies the rows of p, which begin at `x`, to the beginning of the workspace; what they are there.
inline di_tensor gather(const Problem& p, const __nv_bfloat16* x, int64_t pitch, cudaStream_t stream) {
  const int columns = p.groups * p.k;
  gather_rows<<<static_cast<unsigned>(p.rows), kCopiers, 0, stream>>>(p, x, pitch, columns);
  di_tensor there = {};
  there.data = p.expanded, there.dtype = DI_BF16, there.ndim = 2;
  there.shape[0] = p.rows, there.shape[1] = columns, there.stride[0] = columns, there.stride[1] = 1;
  return there;
}

// Any BF16 product whose weight the copy engine cannot read, or whose groups end within a step: a warp an output.
__global__ void __launch_bounds__(256) plain_dense(const Problem p, const __nv_bfloat16* x, int64_t stride, const __nv_bfloat16* w) {
  const int64_t column = blockIdx.x * 8 + threadIdx.x / 32;
  if (column >= static_cast<int64_t>(p.groups) * p.n) return;
  for (int64_t row = blockIdx.y; row < valid_rows(p); row += gridDim.y) {
    const __nv_bfloat16 *a = x + row * stride + column / p.n * p.k, *b = w + column * p.k;
    float sum = 0.0f;
    for (int k = threadIdx.x % 32; k < p.k; k += 32) sum = fmaf(__bfloat162float(a[k]), __bfloat162float(b[k]), sum);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (threadIdx.x % 32 != 0) continue;
    if (p.output == kF32) static_cast<float*>(p.out)[row * p.out_stride + column] = sum;
    else static_cast<__nv_bfloat16*>(p.out)[row * p.out_stride + column] = __float2bfloat16_rn(sum);
  }
}

}  // namespace di::linear
