// The vector side of attention: a running softmax over scores that the cube wrote, and the sums that it gives back.
//
// Scores of a piece of 64 keys are rows of 64 floats, one a head; pieces lie in a ring. Lines hold a float for each head.
#pragma once

#include "di_nz.h"

namespace {

constexpr int32_t kKeys = 64;      // of a piece
constexpr int32_t kColumns = 128;  // of the sums that come back at once
constexpr float kLowest = -1e30f;

// Where a run of pieces lies in the ring.
__simd_callee__ inline uint32_t PieceAt(uint32_t first, uint32_t j, uint32_t ring, uint32_t heads) {
  const uint32_t at = first + j;
  return (at < ring ? at : at - ring) * heads * kKeys;
}

// The largest scaled score of each head over `keys` keys.
__simd_vf__ inline void Peaks(__ubuf__ float* peak, __ubuf__ float* scores, uint16_t heads, uint32_t keys, uint32_t first, uint32_t ring, float scale) {
  using namespace AscendC;
  Reg::RegTensor<float> most, x;
  Reg::MaskReg all = Reg::CreateMask<float>();
  for (uint16_t h = 0; h < heads; ++h) {
    uint32_t left = keys;
    const uint16_t pieces = (uint16_t)((keys + kKeys - 1) / kKeys);
    Reg::Duplicate(most, kLowest);
    for (uint16_t j = 0; j < pieces; ++j) {
      Reg::MaskReg some = Reg::UpdateMask<float>(left);
      Reg::LoadAlign(x, scores + PieceAt(first, j, ring, heads) + h * kKeys);
      Reg::Muls(x, x, scale, some);
      Reg::Max<float, Reg::MaskMergeMode::MERGING>(most, most, x, some);
    }
    Reg::Reduce<ReduceType::MAX>(x, most, all);
    Reg::StoreAlign<float, Reg::StoreDist::DIST_FIRST_ELEMENT_B32>(peak + h, x, all);
  }
}

// The new maximum, by how much what was summed shrinks, and the shrunk total.
__simd_vf__ inline void Advance(__ubuf__ float* largest, __ubuf__ float* shrink, __ubuf__ float* total, __ubuf__ float* peak, uint32_t heads, uint16_t fresh) {
  using namespace AscendC;
  Reg::RegTensor<float> old, now, sum, x;
  Reg::MaskReg some = Reg::UpdateMask<float>(heads);
  Reg::LoadAlign(x, peak);
  if (fresh) {
    Reg::Duplicate(old, kLowest);
    Reg::Duplicate(sum, 0.0f);
  } else {
    Reg::LoadAlign(old, largest);
    Reg::LoadAlign(sum, total);
  }
  Reg::Max(now, old, x, some);
  Reg::Sub(x, old, now, some);
  Reg::Exp(x, x, some);
  Reg::Mul(sum, sum, x, some);
  Reg::StoreAlign(largest, now, some);
  Reg::StoreAlign(shrink, x, some);
  Reg::StoreAlign(total, sum, some);
}

// exp(score - maximum) of two pieces as lines of the cube's left operand: float, or BF16 in two parts that add up to within
// 2^-16 of it. `sums` takes the pieces' sum for each head.
template <class T>
__simd_vf__ inline void Weights(__ubuf__ T* to, __ubuf__ float* sums, __ubuf__ float* largest, __ubuf__ float* a, __ubuf__ float* b, uint16_t heads,
                                uint32_t keys_a, uint32_t keys_b, uint32_t pitch, uint32_t part, float scale) {
  using namespace AscendC;
  Reg::RegTensor<float> most, x, y, sum;
  Reg::RegTensor<uint32_t> upper, cut;
  Reg::RegTensor<bfloat16_t> high, low, rest, brief_x, brief_y;
  Reg::MaskReg all = Reg::CreateMask<float>(), every = Reg::CreateMask<bfloat16_t>();
  Reg::MaskReg some_a = Reg::UpdateMask<float>(keys_a), some_b = Reg::UpdateMask<float>(keys_b);
  Reg::Duplicate(upper, 0xffff0000u);
  for (uint16_t h = 0; h < heads; ++h) {
    Reg::LoadAlign<float, Reg::LoadDist::DIST_BRC_B32>(most, largest + h);
    Reg::LoadAlign(x, a + h * kKeys);
    Reg::LoadAlign(y, b + h * kKeys);
    Reg::Muls(x, x, scale, some_a);
    Reg::Muls(y, y, scale, some_b);
    Reg::Sub(x, x, most, some_a);
    Reg::Sub(y, y, most, some_b);
    Reg::Exp(x, x, some_a);
    Reg::Exp(y, y, some_b);
    Reg::Add(sum, x, y, all);
    Reg::Reduce<ReduceType::SUM>(sum, sum, all);
    Reg::StoreAlign<float, Reg::StoreDist::DIST_FIRST_ELEMENT_B32>(sums + h, sum, all);
    __ubuf__ T* place = to + h * (32 / sizeof(T));
    if constexpr (sizeof(T) == 4) {
      Reg::StoreAlign<float, Reg::DataCopyMode::DATA_BLOCK_COPY>(place, x, pitch, all);
      Reg::StoreAlign<float, Reg::DataCopyMode::DATA_BLOCK_COPY>(place + 64 * pitch, y, pitch, all);
    } else {
      Reg::DeInterleave(rest, high, (Reg::RegTensor<bfloat16_t>&)x, (Reg::RegTensor<bfloat16_t>&)y);
      Reg::StoreAlign<bfloat16_t, Reg::DataCopyMode::DATA_BLOCK_COPY>(place, high, pitch, every);
      Reg::And(cut, (Reg::RegTensor<uint32_t>&)x, upper, all);
      Reg::Sub(x, x, (Reg::RegTensor<float>&)cut, all);
      Reg::And(cut, (Reg::RegTensor<uint32_t>&)y, upper, all);
      Reg::Sub(y, y, (Reg::RegTensor<float>&)cut, all);
      Reg::Cast<bfloat16_t, float, kRound0>(brief_x, x, all);
      Reg::Cast<bfloat16_t, float, kRound0>(brief_y, y, all);
      Reg::DeInterleave(low, rest, brief_x, brief_y);
      Reg::StoreAlign<bfloat16_t, Reg::DataCopyMode::DATA_BLOCK_COPY>(place + part, low, pitch, every);
    }
  }
}

// `pairs` lines of sums join the total.
__simd_vf__ inline void AddSums(__ubuf__ float* total, __ubuf__ float* sums, uint32_t heads, uint16_t pairs) {
  using namespace AscendC;
  Reg::RegTensor<float> sum, x;
  Reg::MaskReg some = Reg::UpdateMask<float>(heads);
  Reg::LoadAlign(sum, total);
  for (uint16_t p = 0; p < pairs; ++p) {
    Reg::LoadAlign(x, sums + p * 64);
    Reg::Add(sum, sum, x, some);
  }
  Reg::StoreAlign(total, sum, some);
}

// 1 / (total + exp(sink - maximum)).
__simd_vf__ inline void Invert(__ubuf__ float* inverse, __ubuf__ float* total, __ubuf__ float* largest, __ubuf__ float* sink, uint32_t heads) {
  using namespace AscendC;
  Reg::RegTensor<float> sum, most, x, one;
  Reg::MaskReg some = Reg::UpdateMask<float>(heads);
  Reg::LoadAlign(sum, total);
  Reg::LoadAlign(most, largest);
  Reg::LoadAlign(x, sink);
  Reg::Duplicate(one, 1.0f);
  Reg::Sub(x, x, most, some);
  Reg::Exp(x, x, some);
  Reg::Add(sum, sum, x, some);
  Reg::Div(sum, one, sum, some);
  Reg::StoreAlign(inverse, sum, some);
}

// `columns` of the weighted sums take what the cube adds: rows of `width` floats, and of kColumns in `more`.
template <bool fresh>
__simd_vf__ inline void Merge(__ubuf__ float* sums, __ubuf__ float* more, __ubuf__ float* shrink, uint16_t heads, uint32_t columns, uint32_t width) {
  using namespace AscendC;
  Reg::RegTensor<float> factor, old, x;
  Reg::MaskReg all = Reg::CreateMask<float>();
  for (uint16_t h = 0; h < heads; ++h) {
    if constexpr (!fresh) Reg::LoadAlign<float, Reg::LoadDist::DIST_BRC_B32>(factor, shrink + h);
    for (uint32_t c = 0; c < columns; c += 64) {
      Reg::LoadAlign(x, more + h * kColumns + c);
      if constexpr (!fresh) {
        Reg::LoadAlign(old, sums + h * width + c);
        Reg::MulAddDst(x, old, factor, all);
      }
      Reg::StoreAlign(sums + h * width + c, x, all);
    }
  }
}

// The same for the last time: the sums times the inverse of their total. Results of type X take the place of the sums.
template <class X, bool fresh>
__simd_vf__ inline void Finish(__ubuf__ float* sums, __ubuf__ float* more, __ubuf__ float* shrink, __ubuf__ float* inverse, uint16_t heads, uint32_t columns,
                               uint32_t width) {
  using namespace AscendC;
  Reg::RegTensor<float> factor, share, old, x;
  Reg::RegTensor<bfloat16_t> brief;
  Reg::MaskReg all = Reg::CreateMask<float>();
  for (uint16_t h = 0; h < heads; ++h) {
    if constexpr (!fresh) Reg::LoadAlign<float, Reg::LoadDist::DIST_BRC_B32>(factor, shrink + h);
    Reg::LoadAlign<float, Reg::LoadDist::DIST_BRC_B32>(share, inverse + h);
    for (uint32_t c = 0; c < columns; c += 64) {
      Reg::LoadAlign(x, more + h * kColumns + c);
      if constexpr (!fresh) {
        Reg::LoadAlign(old, sums + h * width + c);
        Reg::MulAddDst(x, old, factor, all);
      }
      Reg::Mul(x, x, share, all);
      if constexpr (sizeof(X) == 4) {
        Reg::StoreAlign(sums + h * width + c, x, all);
      } else {
        Reg::Cast<bfloat16_t, float, kRound0>(brief, x, all);
        Reg::StoreAlign<bfloat16_t, Reg::StoreDist::DIST_PACK_B32>((__ubuf__ bfloat16_t*)(sums + h * width) + c, brief, all);
      }
    }
  }
}

}  // namespace
