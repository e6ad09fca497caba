// Expands fp8_32 rows to BF16 tiles in the order in which linear_tile.cuh multiplies them.
#pragma once

#include "di_launch.cuh"
#include "linear_problem.cuh"

namespace di::linear {

constexpr int kExpanders = 128;

// Codes of one 16-byte piece of a row, and the scale of its group.
struct Piece {
  uint4 codes;
  uint32_t scale;
};

// Zeros where there is no row or no column.
__device__ __forceinline__ Piece load_piece(const Problem& p, bool inside, int64_t row, int64_t column) {
  Piece piece{make_uint4(0, 0, 0, 0), 127};
  if (!inside) return piece;
  const uint8_t* from = p.x + row * p.x_stride + column;
  if (p.x_aligned) {
    piece.codes = __ldg(reinterpret_cast<const uint4*>(from));
  } else {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i / 4] |= static_cast<uint32_t>(__ldg(from + i)) << 8 * (i % 4);
    piece.codes = make_uint4(words[0], words[1], words[2], words[3]);
  }
  piece.scale = __ldg(p.x_scale + row * p.x_scale_stride + column / 32);
  return piece;
}

// For each k16 step of a sub-tile, one word of even and one of odd codes. `offset`: a multiple of 1024 bytes.
template <bool two_factors>
__device__ __forceinline__ void store_codes(uint32_t to, int offset, const Piece& piece) {
  const uint32_t factor = code_factor(piece.scale), second = second_factor(piece.scale);
  const uint32_t words[4] = {piece.codes.x, piece.codes.y, piece.codes.z, piece.codes.w};
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t even = scale_bf16x2(even_codes(words[s]), factor), odd = scale_bf16x2(odd_codes(words[s]), factor);
    if (two_factors) even = scale_bf16x2(even, second), odd = scale_bf16x2(odd, second);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"((to ^ (s << 5)) + offset), "r"(even) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"((to ^ (s << 5 | 16)) + offset), "r"(odd) : "memory");
  }
}
__device__ __forceinline__ void store_piece(uint32_t to, int offset, const Piece& piece) {
  if (piece.scale <= kOneFactor) store_codes<false>(to, offset, piece);
  else store_codes<true>(to, offset, piece);
}

__host__ __device__ constexpr int expanded_rows(int tile_rows) { return tile_rows % 64 == 0 ? 64 : 32; }

// Block (group, row tile, k step, part) makes `expanded_rows` rows of two sub-tiles. A thread has piece t % 8
// of rows 8 (warp / 2) + 2 (lane / 8) + warp % 2 of every 16: the four rows of a warp are all even or all odd, so its stores meet
// no bank twice.
template <int T>
__global__ void __launch_bounds__(kExpanders) expand_rows(const Problem p) {
  constexpr int kRows = expanded_rows(T), kParts = T / kRows, kItems = kRows / 16;
  __shared__ __align__(1024) uint8_t tile[2 * kRows * 128];
  launch_dependents();
  const int valid = valid_rows(p), chunks = p.chunks(), thread = threadIdx.x;
  const int part = blockIdx.x % kParts, step = blockIdx.x / kParts;
  const int chunk = step % chunks, row_tile = step / chunks % p.row_tiles, group = step / chunks / p.row_tiles;
  const int64_t first = static_cast<int64_t>(row_tile) * T + part * kRows;
  if (first >= valid) return;
  const int piece = thread % 8, row = thread / 64 * 8 + thread % 32 / 8 * 2 + thread / 32 % 2, sub_tile = piece % 2;
  const int in_group = chunk * kChunk + piece * 16, left = in_group < p.k ? valid - static_cast<int>(first) - row : 0;
  const int64_t column = static_cast<int64_t>(group) * p.k + in_group;
  const uint32_t to = shared_address(tile) + sub_tile * (kRows * 128) + row * 128 + ((sub_tile ^ row % 8) << 4) + piece / 2 * 4;
  Piece pieces[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) pieces[i] = load_piece(p, i * 16 < left, first + row + i * 16, column);
#pragma unroll
  for (int i = 0; i < kItems; ++i) store_piece(to, i * 2048, pieces[i]);
  fence_proxy_async();
  __syncthreads();
  if (thread < 2) {
    uint8_t* stage = p.expanded + (static_cast<int64_t>(step) * 2 + thread) * (T * 128) + part * (kRows * 128);
    bulk_store(stage, tile + thread * (kRows * 128), kRows * 128);
  }
}

// ---- the rows of the next part, by idle warps of the product of this one

// kAheadRows rows of two sub-tiles: a lane has piece lane % 8 of four of them, which are all even or all odd among the warp's, as in
// expand_rows.
template <int T>
struct AheadItem {
  static constexpr int kParts = T / kAheadRows, kItems = kAheadRows / 4;
  Piece pieces[kItems];
  int step;  // whose sub-tiles these are, of all groups' and row tiles'

  static __device__ __forceinline__ int row_of(int i, int lane) { return i / 2 * 8 + lane / 8 * 2 + i % 2; }

  // Asks for the codes of item (group, row tile that has rows, k step, part).
  __device__ __forceinline__ void load(const Problem& p, int item, int valid, int lane) {
    const int chunks = p.chunks(), tiles = (valid + T - 1) / T, tile = item / kParts / chunks, chunk = item / kParts - tile * chunks;
    const int group = tile / tiles, row_tile = tile - group * tiles, first = row_tile * T + item % kParts * kAheadRows;
    const int in_group = chunk * kChunk + lane % 8 * 16, left = in_group < p.k ? valid - first : 0;
    step = (group * p.next_row_tiles + row_tile) * chunks + chunk;
    const int64_t column = static_cast<int64_t>(group) * p.k + in_group;
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      pieces[i] = load_piece(p, row_of(i, lane) < left, static_cast<int64_t>(p.rows) + first + row_of(i, lane), column);
  }
  // `staging`: kAheadBytes of shared memory.
  __device__ __forceinline__ void store(const Problem& p, int item, uint8_t* staging, int lane) const {
    const int sub_tile = lane % 2;
    const uint32_t place = shared_address(staging) + sub_tile * (kAheadRows * 128) + lane % 8 / 2 * 4;
    if (lane == 0) bulk_store_wait_read();  // the item before has left the staging room
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kItems; ++i) store_piece(place + row_of(i, lane) * 128 + ((sub_tile ^ row_of(i, lane) % 8) << 4), 0, pieces[i]);
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      uint8_t* to = p.next_expanded + static_cast<int64_t>(step) * (2 * T * 128) + item % kParts * (kAheadRows * 128);
      bulk_store_begin(to, staging, kAheadRows * 128);
      bulk_store_begin(to + T * 128, staging + kAheadRows * 128, kAheadRows * 128);
      bulk_store_commit();
    }
  }
};

// Items item, item + stride, .. of all. The next item's codes are on their way while one is stored: three warps of a block with one
// item each under way take as long as the product.
template <int T>
__device__ __forceinline__ void expand_ahead(const Problem& p, uint8_t* staging, int item, int stride, int lane) {
  const int valid = next_valid_rows(p), items = p.groups * ((valid + T - 1) / T) * p.chunks() * AheadItem<T>::kParts;
  AheadItem<T> one, other;
  if (item < items) one.load(p, item, valid, lane);
#pragma unroll 1
  for (; item < items; item += 2 * stride) {
    if (item + stride < items) other.load(p, item + stride, valid, lane);
    one.store(p, item, staging, lane);
    if (item + stride >= items) break;
    if (item + 2 * stride < items) one.load(p, item + 2 * stride, valid, lane);
    other.store(p, item + stride, staging, lane);
  }
  if (lane == 0) bulk_store_wait();
}

}  // namespace di::linear
