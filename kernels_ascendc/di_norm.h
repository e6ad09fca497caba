// Norm and rotary embedding of a float32 row in local memory, as composites need them between loading and storing.
#pragma once

#include "di_rows.h"

namespace {

// row = weight * row / sqrt(mean(row^2) + eps). The order of operations is that of rms_norm.asc, to the bit. `square` has
// the row's size, `sum` 8 items.
__aicore__ inline void NormaliseRow(const AscendC::LocalTensor<float>& row, const AscendC::LocalTensor<float>& weight,
                                    const AscendC::LocalTensor<float>& square, const AscendC::LocalTensor<float>& sum, int32_t width, float eps) {
  using namespace AscendC;
  Mul(square, row, row, width);
  ReduceSum(sum, square, square, width);
  Sync<HardEvent::V_S>();
  const float mean = sum.GetValue(0) / (float)width + eps;
  Sync<HardEvent::S_V>();
  Duplicate(sum, mean, 8);
  Sqrt(sum, sum, 8);
  Duplicate(square, 1.0f, 8);
  Div(sum, square, sum, 8);
  Sync<HardEvent::V_S>();
  const float scale = sum.GetValue(0);
  Sync<HardEvent::S_V>();
  Mul(row, row, weight, width);
  Muls(row, row, scale, width);
}

// The values of `row` as they are once stored as Y; `room` has space for `items` of Y.
template <class Y>
__aicore__ inline void RoundTo(const AscendC::LocalTensor<float>& row, const AscendC::LocalTensor<float>& room, uint32_t items) {
  if constexpr (sizeof(Y) == 2) {
    const AscendC::LocalTensor<Y> rounded = room.ReinterpretCast<Y>();
    AscendC::Cast(rounded, row, AscendC::RoundMode::CAST_RINT, items);
    AscendC::Cast(row, rounded, AscendC::RoundMode::CAST_NONE, items);
  }
}

// Adjacent pairs of `heads` times `width` items in `wide` turn by the angles [cosines | sines] that all heads share. The
// result is in `apart`; `wide` and `work`, of the same size, are used up.
__aicore__ inline void TurnPairs(const AscendC::LocalTensor<float>& apart, const AscendC::LocalTensor<float>& wide,
                                 const AscendC::LocalTensor<float>& work, const AscendC::LocalTensor<float>& angles, uint32_t width, uint32_t heads) {
  using namespace AscendC;
  const uint32_t half = width / 2, items = heads * width, blocks = half / 8;
  const LocalTensor<float> even = apart, odd = apart[items / 2], cosine = angles, sine = angles[half];
  DeInterleave(even, odd, wide, wide[items / 2], items / 2);
  const BinaryRepeatParams shared(1, 1, 1, blocks, blocks, 0);
  const LocalTensor<float> first = wide, second = wide[items / 2];
  Mul(first, even, cosine, half, heads, shared);
  Mul(work, odd, sine, half, heads, shared);
  Sub(first, first, work, items / 2);
  Mul(second, even, sine, half, heads, shared);
  Mul(work, odd, cosine, half, heads, shared);
  Add(second, second, work, items / 2);
  Interleave(apart, apart[items / 2], first, second, items / 2);
}

}  // namespace
