// The scales of few rows, whether F16 takes them, and the warps that expand rows to the sub-tiles that wgmma reads.
#pragma once

#include "di_fp8.cuh"
#include "linear_few_stages.cuh"

namespace di::linear {

// Scales of one operand that F16 takes: the largest, as 2^7, and down to 2^-12 of it, so that no code but zero is subnormal. What
// is the largest lies within these bounds, so that what undoes both operands' factors is a float.
constexpr int kHalfWindow = 12, kLeastWeightScale = 106, kLeastRowScale = 112, kMostWeightScale = 142, kMostRowScale = 174;

// Four scales of a row's step, a word; what lies beyond the columns, or is not `inside`, is 127.
__device__ __forceinline__ uint32_t scale_word(const uint8_t* row, int column, int columns, bool words, bool inside) {
  uint32_t four = 0x7F7F7F7Fu;
  if (!inside || column >= columns) return four;
  if (words) return __ldg(reinterpret_cast<const uint32_t*>(row + column));
#pragma unroll 1
  for (int j = 0; j < min(4, columns - column); ++j) four ^= (row[column + j] ^ 0x7Fu) << 8 * j;
  return four;
}

// The window of scales that `four` of all lanes lie in: its top, at least `least`; 0 if they lie in none that F16 takes.
__device__ __forceinline__ uint32_t half_window(uint32_t four, uint32_t least, uint32_t most) {
  const uint32_t a = four & 255u, b = four >> 8 & 255u, c = four >> 16 & 255u, d = four >> 24;
  const uint32_t top = max(__reduce_max_sync(0xFFFFFFFFu, max(max(a, b), max(c, d))), least);
  const uint32_t low = __reduce_min_sync(0xFFFFFFFFu, min(min(a, b), min(c, d)));
  return top <= most && low + kHalfWindow >= top ? top : 0;
}
// Scales as exponents of F16 factors: 2^7 for the top of the window.
__device__ __forceinline__ uint32_t half_exponents(uint32_t four, uint32_t top) {
  return four + 22u * 0x01010101u - top * 0x01010101u;
}
// 2^(top - 127 - 7): what undoes an operand's factor.
__device__ __forceinline__ float half_undo(uint32_t top) { return __uint_as_float((top - 7u) << 23); }

// What makes values of a step's codes, from byte `which` of a word. F16 needs no `second`.
struct Factor {
  uint32_t first, second;
};
template <bool half>
__device__ __forceinline__ Factor factor_of(uint32_t four, uint32_t which) {
  const uint32_t byte = __byte_perm(four, 0, 0x4440u | which);
  if (half) return {byte * 0x04000400u, 0};
  return {code_factor(byte), second_factor(byte)};
}
// Codes 0, 1 and 2, 3 of a word as F16, or 0, 2 and 1, 3 as BF16, with their scale.
template <bool half>
__device__ __forceinline__ uint32_t low_values(uint32_t word, const Factor& factor) {
  if (half) return scale_f16x2(low_codes_f16(word), factor.first);
  return scale_bf16x2(scale_bf16x2(even_codes(word), factor.first), factor.second);
}
template <bool half>
__device__ __forceinline__ uint32_t high_values(uint32_t word, const Factor& factor) {
  if (half) return scale_f16x2(high_codes_f16(word), factor.first);
  return scale_bf16x2(scale_bf16x2(odd_codes(word), factor.first), factor.second);
}

// Whether all threads that expand and consume say yes.
template <typename C>
__device__ __forceinline__ bool agree(bool yes) {
  __syncwarp();
  return named_barrier_all(1, C::kConsumers + C::kExpanders, yes);
}

// The scales of this warp's weight rows, of 64 of its warpgroup's: lane i has the word of step i.
template <typename C>
__device__ __forceinline__ uint32_t ask_weight_scales(const Problem& p, const FewWork& w, int id, int granule) {
  const int blocks = (p.n + 31) / 32, columns = p.scale_columns(), lane = id % 32;
  const int block = min(w.at.feature_tile * (C::kFeatures / 32) + (id / 128 * C::M + granule) * 2 + id % 128 / 64, blocks - 1);
  const bool words = (reinterpret_cast<uintptr_t>(p.w_scale) | columns) % 4 == 0;
  const uint8_t* from = p.w_scale + static_cast<int64_t>(w.at.group * blocks + block) * columns;
  return scale_word(from, (w.start + lane) * 4, columns, words, lane < w.steps);
}

// What a thread of those that expand and consume has asked for, and nothing has waited for yet: scales take longer than anything
// else that a block needs before its first product, so all of them are on their way at once, and before the block meets.
template <typename C>
struct FewScales {
  static constexpr int kWarps = (C::kConsumers + C::kExpanders) / 32, kItems = (C::T + kWarps - 1) / kWarps;
  uint32_t weights[C::M];  // of ask_weight_scales, where the warp consumes
  uint32_t rows[kItems];   // of rows warp + i * kWarps: lane i has the word of step i
  int valid;               // rows of the call

  static __device__ __forceinline__ FewScales ask(const Problem& p, const FewWork& w, int id) {
    FewScales asked;
#pragma unroll
    for (int m = 0; m < C::M; ++m) asked.weights[m] = id < C::kConsumers ? ask_weight_scales<C>(p, w, id, m) : 0x7F7F7F7Fu;
    const int lane = id % 32, columns = p.scale_columns(), column = (w.start + lane) * 4;
    const uint8_t* from = p.x_scale + static_cast<int64_t>(w.at.group) * columns;
    const bool words = (reinterpret_cast<uintptr_t>(from) | p.x_scale_stride | columns) % 4 == 0;
    const bool begins = lane < w.steps && (lane % 8 == 0 || lane == w.steps - 1);  // a sector of 32 bytes, or ends in one
#pragma unroll
    for (int i = 0; C::kFeatures == 128 && i < kItems; ++i) {  // L2 has them, ahead of the weights, once the kernel before has ended
      const int row = id / 32 + i * kWarps;
      if (begins && row < min(C::T, p.rows)) prefetch_line_l2(from + row * p.x_scale_stride + column);
    }
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {  // before it is known which rows are valid
      const int row = id / 32 + i * kWarps;
      const bool inside = row < min(C::T, p.rows) && lane < w.steps;
      asked.rows[i] = scale_word(from + row * p.x_scale_stride, column, columns, words, inside);
    }
    asked.valid = valid_rows(p);
    return asked;
  }
};

// Keeps a slice's scales of all rows in shared memory as exponents of F16 factors, and what undoes a row's. All warps that expand
// and consume call it, each for some rows. Says whether F16 is used: its window has the scales of each row and `weights_fit`.
template <typename C>
__device__ __forceinline__ bool keep_few_scales(const FewShared<C>& shared, const FewWork& w, const FewScales<C>& asked, int warp,
                                                bool weights_fit) {
  const int lane = threadIdx.x % 32;
  bool fit = weights_fit;
#pragma unroll
  for (int i = 0; i < FewScales<C>::kItems; ++i) {
    const int row = warp + i * FewScales<C>::kWarps;
    if (row >= C::T) continue;
    const uint32_t four = row < asked.valid ? asked.rows[i] : 0x7F7F7F7Fu, first = __shfl_sync(0xFFFFFFFFu, four, 0);
    const uint32_t top = half_window(lane < w.steps ? four : first, kLeastRowScale, kMostRowScale);
    fit = fit && top != 0;
    shared.scales()[row * kScalePitch + lane] = half_exponents(four, top);
    if (lane == 0) shared.undo()[row] = half_undo(top);
  }
  return agree<C>(fit);
}

// The same where there are many rows: a thread looks at all scales of a row once they are in shared memory, since each reduction
// over a warp's lanes takes as long as eight of its other instructions.
template <typename C>
__device__ __forceinline__ bool keep_many_scales(const FewShared<C>& shared, const FewWork& w, const FewScales<C>& asked, int id,
                                                 bool weights_fit) {
  static_assert(C::T <= C::kConsumers + C::kExpanders);
#pragma unroll
  for (int i = 0; i < FewScales<C>::kItems; ++i) {
    const int row = id / 32 + i * FewScales<C>::kWarps;
    if (row < C::T) shared.scales()[row * kScalePitch + id % 32] = row < asked.valid ? asked.rows[i] : 0x7F7F7F7Fu;
  }
  __syncwarp();
  named_barrier_sync(2, C::kConsumers + C::kExpanders);
  uint32_t* row = shared.scales() + id * kScalePitch;
  bool fit = weights_fit;
  if (id < C::T) {
    uint32_t most = kLeastRowScale, least = 0x00FF00FFu;  // of bytes 0 and 1, and of bytes 2 and 3
#pragma unroll 4
    for (int step = 0; step < w.steps; ++step) {
      const uint32_t four = row[step], even = four & 0x00FF00FFu, odd = four >> 8 & 0x00FF00FFu;
      most = __vimax3_u16x2(most, even, odd), least = __vimin3_u16x2(least, even, odd);
    }
    const uint32_t top = max(most & 0xFFFFu, most >> 16);
    fit = fit && top <= kMostRowScale && min(least & 0xFFFFu, least >> 16) + kHalfWindow >= top;
    const uint32_t shift = half_exponents(0, top);
#pragma unroll 4
    for (int step = 0; step < w.steps; ++step) row[step] += shift;
    shared.undo()[id] = half_undo(top);
  }
  return agree<C>(fit);
}

// The scales as they are, for BF16; by the warps that expand rows.
template <typename C>
__device__ __forceinline__ void keep_plain_scales(const FewShared<C>& shared, const Problem& p, const FewWork& w, int valid,
                                                  int thread) {
  const int lane = thread % 32, columns = p.scale_columns(), column = (w.start + lane) * 4;
  const uint8_t* from = p.x_scale + static_cast<int64_t>(w.at.group) * columns;
  const bool words = (reinterpret_cast<uintptr_t>(from) | p.x_scale_stride | columns) % 4 == 0;
#pragma unroll 1
  for (int row = thread / 32; row < C::T; row += C::kExpanders / 32) {
    shared.scales()[row * kScalePitch + lane] =
        scale_word(from + row * p.x_scale_stride, column, columns, words, row < valid && lane < w.steps);
    if (lane == 0) shared.undo()[row] = 1.0f;
  }
  __syncwarp();
  named_barrier_sync(2, C::kExpanders);
}

// A lane's part of a step: 64 codes of a row, sub-tile `h`: pieces 2 q + h, whose word s is k16 step s.
template <bool half>
__device__ __forceinline__ void expand_row(uint32_t to, uint32_t from, uint32_t four, int row, int h) {
  uint4 codes[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) codes[q] = load_shared16(from + row * 128 + (((2 * q + h) ^ row % 8) << 4));
  Factor factors[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) factors[q] = factor_of<half>(four, q);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t low[4], high[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t word = s == 0 ? codes[q].x : s == 1 ? codes[q].y : s == 2 ? codes[q].z : codes[q].w;
      low[q] = low_values<half>(word, factors[q]), high[q] = high_values<half>(word, factors[q]);
    }
    // the lower half of K has a piece's even words where h is 0, its odd ones where it is 1
    store_shared16(to + row * 128 + (((2 * s + h) ^ row % 8) << 4), low);
    store_shared16(to + row * 128 + (((2 * s + 1 - h) ^ row % 8) << 4), high);
  }
}

// Every kStride-th unit, a pass of a step; kParts warps share one, or fewer of which each has kEach parts.
template <typename C, bool half>
__device__ __forceinline__ void expand_steps(const FewShared<C>& shared, const FewWork& w, int thread) {
  constexpr int kEach = C::kParts / C::kSharers, kStride = C::kExpanders / 32 / C::kSharers;
  static_assert(C::kRowStages % kStride == 0 && C::kRawStages % kStride == 0);  // a stage has the same warps always
  const int lane = thread % 32, first = thread / 32 / C::kSharers;
  int raw = first, rows = first;
  uint32_t raw_parity = 0, row_parity = 0;
#pragma unroll 1
  for (int unit = first; unit < w.steps * C::kPasses; unit += kStride) {
    mbarrier_wait(shared.raw_full(raw), raw_parity);
    mbarrier_wait(shared.rows_empty(rows), row_parity ^ 1);
    const uint32_t from = shared_address(shared.raw(raw)), to = shared_address(shared.rows(rows));
#pragma unroll(kEach > 2 ? 1 : kEach)
    for (int each = 0; each < kEach; ++each) {
      const int part = thread / 32 % C::kSharers + each * C::kSharers;
      const int row = C::T == 16 ? lane % 16 : part / 2 * 32 + lane, sub_tile = C::T == 16 ? lane / 16 : part % 2;
      const uint32_t four = shared.scales()[(unit % C::kPasses * C::kPassRows + row) * kScalePitch + unit / C::kPasses];
      expand_row<half>(to + sub_tile * (C::kPassRows * 128), from, four, row, sub_tile);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.rows_full(rows));
    if (lane == 1) mbarrier_arrive(shared.raw_empty(raw));
    raw += kStride, rows += kStride;
    if (raw >= C::kRawStages) raw -= C::kRawStages, raw_parity ^= 1;
    if (rows >= C::kRowStages) rows -= C::kRowStages, row_parity ^= 1;
  }
}

}  // namespace di::linear
