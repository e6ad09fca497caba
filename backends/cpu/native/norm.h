// Root-mean-square norm and rotation of one float32 row: shared by every kernel that norms or rotates.
#pragma once

#include "kernels.h"

namespace di::DI_LEVEL {

// Sum of squares in one order for every caller: lanes over the row, then lanes from wide to narrow, then the tail.
DI_INLINE float sum_squares(const float* x, int64_t width) {
  vf a = splat(0.0f), b = splat(0.0f);
  int64_t i = 0;
  for (; i + 32 <= width; i += 32) {
    vf u = load(x + i), v = load(x + i + 16);
    a = fma(u, u, a), b = fma(v, v, b);
  }
  for (; i + 16 <= width; i += 16) {
    vf u = load(x + i);
    a = fma(u, u, a);
  }
  float total = sum(a + b);
  for (; i < width; ++i) total = __builtin_fmaf(x[i], x[i], total);
  return total;
}

// x <- weight * x / sqrt(mean(x^2) + eps), not yet rounded. `weight` is [width] bf16 or f32.
DI_INLINE void norm_row(float* x, int64_t width, const di_tensor& weight, float eps) {
  const float factor = 1.0f / square_root(sum_squares(x, width) / (float)width + eps);
  const uint16_t* half = static_cast<const uint16_t*>(weight.data);
  const float* full = static_cast<const float*>(weight.data);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    vf w = weight.dtype == DI_BF16 ? load_bf16(half + i) : load(full + i);
    store(x + i, w * load(x + i) * splat(factor));
  }
  for (; i < width; ++i) x[i] = item(weight.data, weight.dtype, i) * x[i] * factor;
}

// Rotates adjacent pairs of x[0 .. width) by the angles of a table row [cos(width / 2) | sin(width / 2)].
DI_INLINE void rotate_row(float* x, int64_t width, const float* angles, bool inverse) {
  const float* sine = angles + width / 2;
  for (int64_t i = 0; i < width / 2; ++i) {
    const float c = angles[i], s = inverse ? -sine[i] : sine[i], a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = a * s + b * c;
  }
}

DI_INLINE bool is_norm_weight(const di_tensor& w, int64_t width) {
  return is_stream(w) && is_packed(w, width) && w.ndim == 1;
}
DI_INLINE bool is_rope_table(const di_tensor& table, int64_t width) {
  return table.dtype == DI_F32 && table.ndim == 2 && table.shape[1] % 2 == 0 && table.shape[1] <= width &&
         is_matrix(table, 0, table.shape[1]);
}

// Where a row goes: dense, and / or fp8_32 codes with scales.
DI_INLINE bool are_codes(const di_tensor& codes, const di_tensor& scales, int64_t rows, int64_t width) {
  if (absent(codes)) return absent(scales);
  return codes.dtype == DI_U8 && scales.dtype == DI_U8 && width % 32 == 0 && is_matrix(codes, rows, width) &&
         is_matrix(scales, rows, width / 32);
}

// Rounds a normed row to `dtype`, stores it and its codes (either may be absent).
DI_INLINE void put_row(float* x, int64_t width, int dtype, int64_t row, const di_tensor& out, const di_tensor& codes,
                       const di_tensor& scales) {
  round_row(dtype, width, x);
  if (!absent(out)) write_row(row_at(out, row), dtype, width, x);
  if (!absent(codes)) quantise_row(x, width, DI_FP8_32, row_at(codes, row), row_at(scales, row));
}

}  // namespace di::DI_LEVEL
