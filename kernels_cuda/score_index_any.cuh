// score_index for every shape and format that the fast kernel does not serve: one thread a column, FP32 products in order.
#pragma once

#include "di_index.cuh"
#include "di_launch.cuh"

namespace di {

constexpr int kAnyColumns = 32;  // columns, and threads, of a block

struct IndexAny {
  IndexCall call;
  int width, key_format, query_dtype;  // di_format, di_dtype; a DI_U8 query is MXFP4 with scales
  bool query_kept;                     // decoded in shared memory
};

__device__ inline float any_e2m1(uint32_t code) {
  const uint32_t magnitude = code & 7;
  const int exponent = static_cast<int>(magnitude >> 1) - 1;
  const float value = magnitude < 2 ? 0.5f * magnitude : ldexpf(1.0f + 0.5f * (magnitude & 1), exponent);
  return code & 8 ? -value : value;
}
__device__ inline float any_e4m3(uint32_t code) {
  const int magnitude = code & 0x7F, exponent = magnitude >> 3, fraction = magnitude & 7;
  if (magnitude == 0x7F) return NAN;
  const float value = exponent == 0 ? ldexpf(fraction, -9) : ldexpf(8 + fraction, exponent - 10);
  return code & 0x80 ? -value : value;
}
__device__ inline float any_ue8m0(uint32_t code) { return code == 255 ? NAN : ldexpf(1.0f, static_cast<int>(code) - 127); }
__device__ inline float any_nibble(const uint8_t* codes, int i) { return any_e2m1(codes[i / 2] >> (4 * (i & 1)) & 15); }

// Value i of row `row` of a block.
__device__ inline float any_key(const uint8_t* block, int row, int block_rows, int width, int format, int i) {
  if (format == DI_ROW_F32) return reinterpret_cast<const float*>(block)[static_cast<int64_t>(row) * width + i];
  if (format == DI_MXFP4_32) {
    const uint8_t* scales = block + static_cast<int64_t>(block_rows) * (width / 2);
    return any_nibble(block + static_cast<int64_t>(row) * (width / 2), i) * any_ue8m0(scales[row * (width / 32) + i / 32]);
  }
  if (format == DI_FP8_32) {
    const uint8_t* codes = block + static_cast<int64_t>(row) * (width + width / 32);
    return any_e4m3(codes[i]) * any_ue8m0(codes[width + i / 32]);
  }
  const uint8_t* codes = block + static_cast<int64_t>(row) * (width / 2 + width / 16);
  return any_nibble(codes, i) * any_e4m3(codes[width / 2 + i / 16]);
}

__device__ inline float any_query(const IndexAny& a, int64_t row, int head, int i) {
  const IndexCall& c = a.call;
  const int64_t at = row * c.q_stride + head * c.q_head_stride;
  if (a.query_dtype == DI_F32) return reinterpret_cast<const float*>(c.q)[at + i];
  if (a.query_dtype == DI_BF16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(c.q)[at + i]);
  return any_nibble(c.q + at, i) * any_ue8m0(c.q_scale[row * c.q_scale_stride + head * c.q_scale_head_stride + i / 32]);
}

// Block x: kAnyColumns columns of one row. Shared memory: the keys [kAnyColumns, width + 1], then the query [heads, width] if it
// is kept.
static __global__ void __launch_bounds__(kAnyColumns) score_index_any_kernel(const __grid_constant__ IndexAny a) {
  extern __shared__ float room[];
  const IndexCall& c = a.call;
  const int tiles = (c.columns + kAnyColumns - 1) / kAnyColumns;
  const int64_t row = blockIdx.x / tiles;
  const int column = blockIdx.x % tiles * kAnyColumns + threadIdx.x;
  if (row >= index_live_rows(c) || c.row_to_req[row] < 0) return;
  float *query = room + kAnyColumns * (a.width + 1), *key = room + threadIdx.x * (a.width + 1);
  for (int i = threadIdx.x; a.query_kept && i < c.heads * a.width; i += kAnyColumns)
    query[i] = any_query(a, row, i / a.width, i % a.width);
  int64_t place = column;
  if (c.candidates != nullptr && column < c.columns) {
    const int chosen = c.candidates[row * c.candidates_stride + column / c.candidate_block];
    place = chosen < 0 ? -1 : static_cast<int64_t>(chosen) * c.candidate_block + column % c.candidate_block;
  }
  const bool there = column < c.columns && place >= 0 && place < c.visible[row];
  if (there) {
    const int64_t block = c.block_table[c.row_to_req[row] * c.table_stride + place / c.block_rows];
    const uint8_t* stored = c.cache + block * c.block_stride;
    const int inside = static_cast<int>(place % c.block_rows);
    for (int i = 0; i < a.width; ++i) key[i] = any_key(stored, inside, c.block_rows, a.width, a.key_format, i);
  }
  __syncthreads();
  if (column >= c.columns) return;
  float total = 0.0f;
  for (int head = 0; there && head < c.heads; ++head) {
    float dot = 0.0f;
    for (int i = 0; i < a.width; ++i)
      dot = fmaf(a.query_kept ? query[head * a.width + i] : any_query(a, row, head, i), key[i], dot);
    total = fmaf(dot < 0.0f ? 0.0f : dot, index_weight(c, row, head), total);
  }
  c.scores[row * c.scores_stride + column] = there ? total : kNoScore;
}

inline int score_index_any(IndexAny a, cudaStream_t stream, di_error* e) {
  constexpr int64_t kRoom = 220 << 10;
  const IndexCall& c = a.call;
  const int64_t blocks = ceil_div(c.columns, kAnyColumns) * c.rows;
  const int64_t keys = 4LL * kAnyColumns * (a.width + 1), query = 4LL * c.heads * a.width;
  if (keys > kRoom) return refuse(e, DI_UNSUPPORTED, "keys of %d values are wider than the kernel keeps", a.width);
  if (blocks > INT32_MAX) return refuse(e, DI_UNSUPPORTED, "%d rows of %d columns are too many", c.rows, c.columns);
  a.query_kept = keys + query <= kRoom;
  const int64_t bytes = keys + (a.query_kept ? query : 0);
  if (allow_shared<score_index_any_kernel>(static_cast<int>(bytes)) != cudaSuccess) return finish(e, "score_index");
  score_index_any_kernel<<<static_cast<unsigned>(blocks), kAnyColumns, bytes, stream>>>(a);
  return finish(e, "score_index");
}

}  // namespace di
