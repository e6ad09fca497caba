// Where row r of a block lies, for each row format: the twin of deepinfer_hal.row_layout.
#pragma once

#include "kernels.h"

namespace di::DI_LEVEL {

struct Cache {
  uint8_t* base = nullptr;
  int64_t block_stride = 0, blocks = 0, rows = 1, width = 0, values = 0, scales = 0;
  int format = 0;

  int64_t slots() const { return blocks * rows; }
  bool holds(int64_t slot) const { return slot >= 0 && slot < slots(); }

  uint8_t* codes_at(int64_t slot) const {
    uint8_t* block = base + slot / rows * block_stride;
    return block + slot % rows * (format == DI_MXFP4_32 ? values : values + scales);
  }
  uint8_t* scales_at(int64_t slot) const {
    uint8_t* block = base + slot / rows * block_stride;
    if (format == DI_MXFP4_32) return block + rows * values + slot % rows * scales;
    return block + slot % rows * (values + scales) + values;
  }
  void read(int64_t slot, float* x) const { dequantise_row(codes_at(slot), scales_at(slot), width, format, x); }
  void write(int64_t slot, const float* x) const { quantise_row(x, width, format, codes_at(slot), scales_at(slot)); }
};

// The cache behind a uint8 [blocks, >= block bytes] tensor; false if it cannot hold rows of that kind.
DI_INLINE bool open_cache(const di_tensor& t, int64_t format, int64_t width, int64_t block_rows, Cache* cache) {
  if (t.dtype != DI_U8 || t.ndim != 2 || !last_contiguous(t)) return false;
  const int64_t values = format_value_bytes((int)format, width);
  if (values < 0) return false;
  cache->base = data_of<uint8_t>(t), cache->blocks = t.shape[0], cache->block_stride = t.stride[0];
  cache->rows = block_rows < 1 ? 1 : block_rows, cache->width = width, cache->format = (int)format;
  cache->values = values, cache->scales = format_scale_bytes((int)format, width);
  return t.shape[1] >= cache->rows * (cache->values + cache->scales) || cache->blocks == 0;
}

// The slot of row `row` of a request, or -1 where the table or the cache does not reach.
DI_INLINE int64_t paged_slot(const Cache& cache, const di_tensor& table, int64_t request, int64_t row) {
  const int64_t column = row / cache.rows;
  if (row < 0 || request < 0 || request >= table.shape[0] || column >= table.shape[1]) return -1;
  const int64_t block = reinterpret_cast<const int32_t*>(row_at(table, request))[column];
  return block < 0 || block >= cache.blocks ? -1 : block * cache.rows + row % cache.rows;
}

}  // namespace di::DI_LEVEL
