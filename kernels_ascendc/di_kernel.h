// What every kernel source includes: the device API, the C ABI, launches, and the small pieces that kernels share.
#pragma once

#include <stdio.h>

#include "di_launch.h"
#include "kernel_operator.h"

#define DI_EXPORT extern "C" __attribute__((visibility("default")))
// Host side: the number of arguments must be the card's.
#define DI_NEED_CALL(op, tensors, ints, reals) \
  do { \
    if (n != (tensors) || p->n_i != (ints) || p->n_d != (reals)) { \
      snprintf(e->message, sizeof e->message, "%s takes %d tensors, %d integers and %d reals; got %d, %d, %d", op, tensors, ints, reals, n, p->n_i, p->n_d); \
      return DI_BAD_CALL; \
    } \
  } while (0)
static inline int DiMin(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

namespace {

__aicore__ inline int32_t Min32(int32_t a, int32_t b) { return a < b ? a : b; }
__aicore__ inline int32_t Max32(int32_t a, int32_t b) { return a > b ? a : b; }
__aicore__ inline uint32_t AlignUp(uint32_t x, uint32_t to) { return (x + to - 1) / to * to; }

// One row of any length between global and local memory.
template <class T> __aicore__ inline void LoadRow(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from, uint32_t items) {
  AscendC::DataCopyExtParams copy(1, items * (uint32_t)sizeof(T), 0, 0, 0);
  AscendC::DataCopyPadExtParams<T> pad(false, 0, 0, T(0));
  AscendC::DataCopyPad(to, from, copy, pad);
}
template <class T> __aicore__ inline void StoreRow(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& from, uint32_t items) {
  AscendC::DataCopyExtParams copy(1, items * (uint32_t)sizeof(T), 0, 0, 0);
  AscendC::DataCopyPad(to, from, copy);
}

// Exact float32 values of bf16 or float32 items.
template <class T> __aicore__ inline void Widen(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<T>& from, uint32_t items) {
  if constexpr (sizeof(T) == 4) AscendC::Adds(to, from, 0.0f, items);
  else AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, items);
}

// fp8_32: e4m3 codes with one power-of-two scale for every 32 elements. The scale's exponent is that of amax / 448, one
// more if its mantissa is not zero; all of it on bits, so that every backend gives the same bytes.
class RowQuantiser {
 public:
  __aicore__ inline void Init(AscendC::TPipe& pipe, uint32_t width) {
    groups_ = width / 32;
    const uint32_t padded = AlignUp(groups_, 64);
    pipe.InitBuffer(work_, AlignUp(width, 64) * sizeof(float));
    pipe.InitBuffer(amax_, padded * sizeof(float));
    pipe.InitBuffer(bits_, padded * sizeof(float));
    pipe.InitBuffer(spread_, padded * 32);
    pipe.InitBuffer(codes_, 2, AlignUp(width, 64));
    pipe.InitBuffer(bytes_, 2, padded);
  }

  // `row` holds width floats, and is scaled in place.
  __aicore__ inline void Store(const AscendC::LocalTensor<float>& row, const AscendC::GlobalTensor<fp8_e4m3fn_t>& codes,
                               const AscendC::GlobalTensor<uint8_t>& scales) {
    using namespace AscendC;
    const uint32_t width = groups_ * 32;
    LocalTensor<float> work = work_.Get<float>(), amax = amax_.Get<float>();
    LocalTensor<int32_t> bits = bits_.Get<int32_t>(), exponent = amax_.Get<int32_t>();
    const uint32_t padded = AlignUp(groups_, 8);  // what Brcb reads
    Duplicate(amax, 1.0f, padded);
    Abs(work, row, width);
    for (uint32_t first = 0; first < groups_; first += 64) {  // 32 elements are half a repeat
      const uint32_t groups = groups_ - first < 64 ? groups_ - first : 64;
      WholeReduceMax(amax[first], work[first * 32], 32, groups, 1, 1, 4, ReduceOrder::ORDER_ONLY_VALUE);
    }
    Duplicate(bits.ReinterpretCast<float>(), 448.0f, padded);
    Div(amax, amax, bits.ReinterpretCast<float>(), padded);
    // exponent + (mantissa != 0) = (bits + 0x7fffff) >> 23
    Adds(exponent, amax.ReinterpretCast<int32_t>(), 0x7fffff, padded);
    ShiftRight(exponent, exponent, 23, padded);
    LocalTensor<uint8_t> bytes = bytes_.AllocTensor<uint8_t>();
    Cast(bytes, exponent, RoundMode::CAST_NONE, groups_);
    bytes_.EnQue(bytes);
    // 2^-(exponent - 127) has the exponent field 254 - exponent
    Muls(bits, exponent, -1, padded);
    Adds(bits, bits, 254, padded);
    ShiftLeft(bits, bits, 23, padded);
    LocalTensor<float> spread = spread_.Get<float>();
    Brcb(spread, bits.ReinterpretCast<float>(), padded / 8, BrcbRepeatParams(1, 8));
    for (uint32_t first = 0; first < groups_; first += 64) {  // four blocks of 8 lanes share one factor
      const uint32_t groups = groups_ - first < 64 ? groups_ - first : 64;
      Mul(row[first * 32], row[first * 32], spread[first * 8], 32, groups, BinaryRepeatParams(1, 1, 0, 4, 4, 1));
    }
    LocalTensor<fp8_e4m3fn_t> small = codes_.AllocTensor<fp8_e4m3fn_t>();
    Cast(small, row, RoundMode::CAST_RINT, width);
    codes_.EnQue(small);
    small = codes_.DeQue<fp8_e4m3fn_t>();
    StoreRow(codes, small, width);
    codes_.FreeTensor(small);
    bytes = bytes_.DeQue<uint8_t>();
    StoreRow(scales, bytes, groups_);
    bytes_.FreeTensor(bytes);
  }

 private:
  uint32_t groups_ = 0;
  AscendC::TBuf<AscendC::TPosition::VECCALC> work_, amax_, bits_, spread_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> codes_, bytes_;
};

}  // namespace
