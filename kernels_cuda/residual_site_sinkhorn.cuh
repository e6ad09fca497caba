// residual_site's Sinkhorn: sixteen numbers in the registers of a thread.
#pragma once

#include <stdint.h>

namespace di {
namespace {

__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// A power of two near over^(3/4) / under; both are positive and normal. A float's bits are its logarithm, nearly.
__device__ __forceinline__ float power_of_ratio(float over, float under) {
  constexpr uint32_t bias = 0x4F600000u, half = 0x00400000u;  // of 127 + 127 / 4, so that 127 remain
  const uint32_t of_over = __float_as_uint(over) - (__float_as_uint(over) >> 2) + (bias + half);
  return __uint_as_float((of_over - __float_as_uint(under)) & 0x7F800000u);
}

// to[i] = the product of the others of four; returns the product of all.
__device__ __forceinline__ float products_of_others(float (&to)[4], const float (&of)[4]) {
  const float low = of[0] * of[1], high = of[2] * of[3];
  to[0] = of[1] * high, to[1] = of[0] * high, to[2] = of[3] * low, to[3] = of[2] * low;
  return low * high;
}

// Row i of k times `columns`, and column j times `rows`.
__device__ __forceinline__ float sum_of_row(const float (&k)[16], const float (&columns)[4], int i) {
  float sum = k[4 * i] * columns[0];
#pragma unroll
  for (int j = 1; j < 4; ++j) sum = fmaf(k[4 * i + j], columns[j], sum);
  return sum;
}
__device__ __forceinline__ float sum_of_column(const float (&k)[16], const float (&rows)[4], int j) {
  float sum = k[j] * rows[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) sum = fmaf(k[4 * i + j], rows[i], sum);
  return sum;
}

// The Sinkhorn's turns without the terms of eps: alternating division of a positive 4 x 4 matrix by its row sums and its column
// sums, beginning with the rows, `iterations` - 1 of each. C: the column sums before them, and after them. The matrix stays as it
// was, and there is no division: factors of rows are the reciprocals of sums R, and instead of 1 / R[i] there is the product of
// the other R times a scale that all share, which the next sums C inherit.
//
// Nobody needs the scale, but R and C must stay in float's range: rows begin with a power of two that brings the product of R back
// to between 2^-9 and 2^3, whatever it was. That is enough for entries from 2^-22 to 1 in rows that add up to about one, however
// many turns there are. The sums by which rows are divided, were nothing scaled, are from 1/4 to 4, since columns add up to one
// then; R[i] and R[j] differ by no more than the entries do, as do C[i] and C[j]; so C and its products stay between 2^-126 and
// 2^126.
__device__ __forceinline__ void turns_without_eps(const float (&k)[16], float (&rows)[4], float (&C)[4], int iterations) {
  float columns[4], R[4], of_rows = 1.0f;
#pragma unroll 1
  for (int iteration = 1; iteration < iterations; ++iteration) {
    const float scale = power_of_ratio(of_rows, products_of_others(columns, C));
#pragma unroll
    for (int i = 0; i < 4; ++i) R[i] = sum_of_row(k, columns, i) * scale;  // the sums do not wait for the scale
    of_rows = products_of_others(rows, R);
#pragma unroll
    for (int j = 0; j < 4; ++j) C[j] = sum_of_column(k, rows, j);
  }
}

__device__ __forceinline__ void divide_rows(float (&k)[16], float eps) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = ((k[4 * i] + k[4 * i + 1]) + (k[4 * i + 2] + k[4 * i + 3])) + eps;
#pragma unroll
    for (int j = 0; j < 4; ++j) k[4 * i + j] /= sum;
  }
}
__device__ __forceinline__ void divide_columns(float (&k)[16], float eps) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float sum = ((k[j] + k[4 + j]) + (k[8 + j] + k[12 + j])) + eps;
#pragma unroll
    for (int i = 0; i < 4; ++i) k[4 * i + j] /= sum;
  }
}

// Alternating division of k, a softmax plus eps, by its column sums and its row sums, each plus eps, `iterations` of them ending
// with columns. An eps of models is small beside sums of about one: it makes the last sums larger, and matters otherwise in the
// first ones alone, which may be small. With any other eps every division is made.
__device__ __forceinline__ void sinkhorn(float (&k)[16], float eps, int iterations) {
  constexpr float kLeast = 0x1p-22f, kMost = 1e-6f;
  if (iterations <= 0) return;
  if (!(eps >= kLeast && eps <= kMost)) {
    divide_columns(k, eps);
#pragma unroll 1
    for (int iteration = 1; iteration < iterations; ++iteration) divide_rows(k, eps), divide_columns(k, eps);
    return;
  }
  float rows[4] = {1, 1, 1, 1}, C[4], columns[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) C[j] = ((k[j] + k[4 + j]) + (k[8 + j] + k[12 + j])) + eps;
  turns_without_eps(k, rows, C, iterations);
  const float of_last = iterations > 1 ? 1.0f + eps : 1.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) columns[j] = reciprocal(C[j] * of_last);
#pragma unroll
  for (int i = 0; i < 16; ++i) k[i] *= rows[i / 4] * columns[i % 4];
}

}  // namespace
}  // namespace di
