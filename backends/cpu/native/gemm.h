// The one matrix product of this library: float32 rows times packed panels [N/16][K][16].
//
// Every element of the result is one chain of fused multiply-adds over k = 0, 1, ... from zero. Row tiles, panel tiles,
// threads and the number of rows only choose which elements are computed together, so they cannot change a bit.
#pragma once

#include "kernels.h"

namespace di::DI_LEVEL {

template <int R, int P>
DI_INLINE void gemm_tile(const float* a, int64_t lda, const float* b, int64_t depth, float* c, int64_t ldc) {
  vf acc[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int q = 0; q < P; ++q) acc[r][q] = splat(0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    vf column[P];
#pragma GCC unroll 8
    for (int q = 0; q < P; ++q) column[q] = load(b + (q * depth + k) * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      vf x = splat(a[r * lda + k]);
#pragma GCC unroll 8
      for (int q = 0; q < P; ++q) acc[r][q] = fma(x, column[q], acc[r][q]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int q = 0; q < P; ++q) store(c + r * ldc + q * 16, acc[r][q]);
}

constexpr int kAccumulators = kWidth == 16 ? 16 : 6;  // logical ones that the registers hold

template <int R>
static void gemm_rows(const float* a, int64_t lda, const float* b, int64_t depth, int64_t panels, float* c,
                      int64_t ldc) {
  constexpr int fit = kAccumulators / R;
  constexpr int P = fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
  int64_t q = 0;
  for (; q + P <= panels; q += P) gemm_tile<R, P>(a, lda, b + q * depth * 16, depth, c + q * 16, ldc);
  if constexpr (P > 4)
    for (; q + 4 <= panels; q += 4) gemm_tile<R, 4>(a, lda, b + q * depth * 16, depth, c + q * 16, ldc);
  if constexpr (P > 2)
    for (; q + 2 <= panels; q += 2) gemm_tile<R, 2>(a, lda, b + q * depth * 16, depth, c + q * 16, ldc);
  if constexpr (P > 1)
    for (; q < panels; ++q) gemm_tile<R, 1>(a, lda, b + q * depth * 16, depth, c + q * 16, ldc);
}

// c[rows][panels * 16] for rows <= kRowTile.
static inline void gemm_block(int64_t rows, const float* a, int64_t lda, const float* b, int64_t depth, int64_t panels,
                              float* c, int64_t ldc) {
  switch (rows) {
    case 1:
      return gemm_rows<1>(a, lda, b, depth, panels, c, ldc);
    case 2:
      return gemm_rows<2>(a, lda, b, depth, panels, c, ldc);
    case 3:
      return gemm_rows<3>(a, lda, b, depth, panels, c, ldc);
    case 4:
      return gemm_rows<4>(a, lda, b, depth, panels, c, ldc);
#if defined(__AVX2__)
    case 5:
      return gemm_rows<5>(a, lda, b, depth, panels, c, ldc);
    case 6:
      return gemm_rows<6>(a, lda, b, depth, panels, c, ldc);
#endif
#if defined(__AVX512F__)
    case 7:
      return gemm_rows<7>(a, lda, b, depth, panels, c, ldc);
    case 8:
      return gemm_rows<8>(a, lda, b, depth, panels, c, ldc);
#endif
  }
}

// Where results go: dense rows, or fp8_32 codes with scales.
struct Sink {
  uint8_t* rows;
  int64_t row_bytes;
  int dtype;
  uint8_t* scales;
  int64_t scale_stride;

  void put(int64_t row, int64_t column, int64_t width, const float* x) const {
    uint8_t* to = rows + row * row_bytes + column * item_bytes(dtype);
    if (dtype != DI_U8) return write_row(to, dtype, width, x);
    quantise_row(x, width, DI_FP8_32, to, scales + row * scale_stride + column / 32);
  }
};

DI_INLINE Sink sink_of(const di_tensor& out, const di_tensor& scales) {
  return {data_of<uint8_t>(out), out.ndim > 1 ? out.stride[0] * item_bytes(out.dtype) : 0, out.dtype,
          data_of<uint8_t>(scales), absent(scales) ? 0 : scales.stride[0]};
}

// Rows [row0, row1) x panels [panel0, panel1) of one product, into columns from `column0` of the sink.
struct Product {
  const float* a;
  int64_t lda;
  const float* b;
  int64_t depth, width;  // K and N

  static constexpr int64_t kMostPanels = 8;

  void run(int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, const Sink& sink, int64_t column0) const {
    float c[kRowTile * kMostPanels * 16] __attribute__((aligned(64)));
    const int64_t panels = panel1 - panel0, first = panel0 * 16;
    const int64_t columns = first + panels * 16 <= width ? panels * 16 : width - first;
    for (int64_t r = row0; r < row1; r += kRowTile) {
      const int64_t rows = row1 - r < kRowTile ? row1 - r : kRowTile;
      gemm_block(rows, a + r * lda, lda, b + panel0 * depth * 16, depth, panels, c, panels * 16);
      for (int64_t i = 0; i < rows; ++i) sink.put(r + i, column0 + first, columns, c + i * panels * 16);
    }
  }
};

DI_INLINE bool is_panels(const di_tensor& w, int ndim) {
  return w.layout == DI_LAYOUT_PANEL16 && w.dtype == DI_F32 && w.ndim == ndim;
}
DI_INLINE int64_t panel_count(int64_t width) { return (width + 15) / 16; }

// A guess of the time of a product: panels come from the last-level cache, products at about 60 GFLOP/s.
DI_INLINE double product_ns(int64_t rows, int64_t width, int64_t depth) {
  return (double)width * depth * (0.2 + rows / 30.0);
}

// x as float32 rows: its own memory if it is float32, else a copy. x is [rows, width] bf16, f32, or fp8_32 codes.
static inline const float* expand_rows(const di_tensor& x, const di_tensor& scale, int64_t rows, int64_t width,
                                       Scratch& scratch, int64_t* lda) {
  if (x.dtype == DI_F32) {
    *lda = x.stride[0];
    return data_of<float>(x);
  }
  // Rows an odd number of cache lines apart, so that a tile's rows do not share a cache set.
  const int64_t stride = *lda = (round_up(width, 16) / 16 | 1) * 16;
  float* a = scratch.floats(rows * stride);
  constexpr int64_t kBatch = 8;
  parallel((rows + kBatch - 1) / kBatch, rows * width * 0.12, [&](int64_t task) {
    for (int64_t r = task * kBatch; r < rows && r < (task + 1) * kBatch; ++r) {
      if (x.dtype == DI_U8)
        dequantise_row(row_at(x, r), row_at(scale, r), width, DI_FP8_32, a + r * stride);
      else
        read_row(row_at(x, r), x.dtype, width, a + r * stride);
    }
  });
  return a;
}

// x and its scales: u8 codes [rows, width] with u8 [rows, width / 32], or dense without.
DI_INLINE bool is_activation(const di_tensor& x, const di_tensor& scale, int64_t rows, int64_t width) {
  if (!is_matrix(x, rows, width)) return false;
  if (x.dtype != DI_U8) return is_stream(x) && absent(scale);
  return width % 32 == 0 && scale.dtype == DI_U8 && is_matrix(scale, rows, width / 32);
}

// Rows offsets[e] .. offsets[e + 1] of x times expert e. Segments outside [0, most) are cut.
static inline void expert_products(const di_tensor& x, const di_tensor& scale, const di_tensor& w,
                                   const int32_t* offsets, int64_t most, const Sink& sink) {
  const int64_t experts = w.shape[0], width = w.shape[1], depth = w.shape[2], panels = panel_count(width);
  const int64_t end = experts ? offsets[experts] : 0, rows = end < 0 ? 0 : end < most ? end : most;
  if (rows == 0 || width == 0) return;
  Scratch scratch;
  int64_t lda;
  const float* a = expand_rows(x, scale, rows, depth, scratch, &lda);
  const int64_t step = rows <= 2 * experts ? 8 : 4, chunks = (panels + step - 1) / step;
  const int64_t busy = rows < experts ? rows : experts;
  parallel(experts * chunks, product_ns(rows / busy, width, depth) * busy, [&](int64_t task) {
    const int64_t expert = task / chunks, panel = task % chunks * step;
    const int64_t first = offsets[expert] < 0 ? 0 : offsets[expert],
                  last = offsets[expert + 1] < rows ? offsets[expert + 1] : rows;
    if (first >= last) return;
    const Product product{a, lda, data_of<float>(w) + expert * panels * depth * 16, depth, width};
    product.run(first, last, panel, panel + step < panels ? panel + step : panels, sink, 0);
  });
}

// out and its scales, [rows, width]; a scale's group must not straddle two products of `part` columns each.
DI_INLINE bool is_result(const di_tensor& out, const di_tensor& scale, int64_t rows, int64_t width, int64_t part) {
  if (!is_matrix(out, rows, width)) return false;
  if (out.dtype != DI_U8) return is_stream(out) && absent(scale);
  return part % 32 == 0 && scale.dtype == DI_U8 && is_matrix(scale, rows, width / 32);
}

}  // namespace di::DI_LEVEL
