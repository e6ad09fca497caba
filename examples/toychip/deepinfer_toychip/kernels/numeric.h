// Numbers of the HAL: bfloat16, the quantised formats on bits, and rows in and out of tensors. All arithmetic is float32.
#pragma once

#include "kernel.h"

namespace toy {

float from_bf16(uint16_t bits);
uint16_t to_bf16(float value);  // nearest even

/// Row formats of the HAL (deepinfer_hal.formats): codes and scales of `width` values.
int group_size(int64_t format);
int64_t code_bytes(int64_t format, int64_t width);
int64_t scale_bytes(int64_t format, int64_t width);
void quantise(const float* values, int64_t width, int64_t format, uint8_t* codes, uint8_t* scales);
void dequantise(const uint8_t* codes, const uint8_t* scales, int64_t width, int64_t format, float* values);

/// `width` values from element `offset` on of a bf16 or f32 tensor whose last dimension is contiguous.
void load(const Tensor& t, int64_t offset, int64_t width, float* values);
void store(const Tensor& t, int64_t offset, int64_t width, const float* values);

/// A row of an activation: dense, or fp8_32 codes with scales.
void load_row(const Tensor& x, const Tensor& scale, int64_t row, float* values);
void store_row(const Tensor& out, const Tensor& scale, int64_t row, const float* values);

/// Row `n` of matrix `e` of a weight [N, K] or [E, N, K], decoded. The formats differ in their shapes and strides:
/// fp4 has half a byte a value, fp8 either one scale per 32 x 32 block or one per row and 32 columns.
void weight_row(const Weight& weight, int64_t e, int64_t n, float* values);

/// Sum of products in sixteen fixed lanes, so that a result depends on the two rows alone.
float dot(const float* a, const float* b, int64_t n);

/// Where row `slot` of a cache lies: token-interleaved rows, or (mxfp4_32) all codes of a block before all its scales.
struct RowPlace {
  uint8_t *codes, *scales;
};
RowPlace place(const Tensor& cache, int64_t slot, int64_t format, int64_t width, int64_t block_rows);
void read_row(const Tensor& cache, int64_t slot, int64_t format, int64_t width, int64_t block_rows, float* values);
void write_row(const Tensor& cache, int64_t slot, int64_t format, int64_t width, int64_t block_rows, const float* values);

}  // namespace toy
