// Rows between global memory and float32 in local memory, dense or quantised: what most kernels here share.
#pragma once

#include "di_kernel.h"

namespace {

// Everything issued so far on the first pipe of the event happens before what the second does from here on.
template <AscendC::HardEvent event> __aicore__ inline void Sync(DI_CALLER) {
  AscendC::SetFlag<event>(EVENT_ID0 DI_OF_CALLER);
  AscendC::WaitFlag<event>(EVENT_ID0 DI_OF_CALLER);
}

template <class T> __aicore__ inline AscendC::GlobalTensor<T> Global(__gm__ void* address) {
  AscendC::GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer((__gm__ T*)address);
  return tensor;
}

// Rows that a call may touch: `count` on the device, clamped.
__aicore__ inline int32_t ValidRows(__gm__ int32_t* count, int32_t rows) {
  return count == nullptr ? rows : Min32(rows, Max32(0, count[0]));
}

// float32 to the items of a dense result.
template <class T>
__aicore__ inline void Narrow(const AscendC::LocalTensor<T>& to, const AscendC::LocalTensor<float>& from, uint32_t items) {
  if constexpr (sizeof(T) == 4) AscendC::Muls(to, from, 1.0f, items);
  else AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, items);
}

// Dense rows in and out, widened to float32, in pieces of at most `most` items.
template <class X, class Y> class DenseRows {
 public:
  __aicore__ inline void Init(AscendC::TPipe& pipe, uint32_t most) {
    const uint32_t padded = AlignUp(most, 64);
    pipe.InitBuffer(in_, 2, padded * sizeof(X));
    pipe.InitBuffer(out_, 2, padded * sizeof(Y));
  }
  __aicore__ inline void Load(const AscendC::LocalTensor<float>& to, const AscendC::GlobalTensor<X>& from, uint32_t items) {
    AscendC::LocalTensor<X> raw = in_.template AllocTensor<X>();
    LoadRow(raw, from, items);
    in_.EnQue(raw);
    raw = in_.template DeQue<X>();
    Widen(to, raw, items);
    in_.FreeTensor(raw);
  }
  __aicore__ inline void Store(const AscendC::GlobalTensor<Y>& to, const AscendC::LocalTensor<float>& from, uint32_t items) {
    AscendC::LocalTensor<Y> raw = out_.template AllocTensor<Y>();
    Narrow(raw, from, items);
    out_.EnQue(raw);
    raw = out_.template DeQue<Y>();
    StoreRow(to, raw, items);
    out_.FreeTensor(raw);
  }

 private:
  AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
};

// Bytes from one place of global memory to another, in pieces.
class ByteMover {
 public:
  static constexpr uint32_t kPiece = 16384;
  __aicore__ inline void Init(AscendC::TPipe& pipe) { pipe.InitBuffer(queue_, 2, kPiece); }
  __aicore__ inline void Move(__gm__ uint8_t* to, __gm__ uint8_t* from, uint64_t bytes) {
    for (uint64_t first = 0; first < bytes; first += kPiece) {
      const uint32_t piece = (uint32_t)(bytes - first < kPiece ? bytes - first : kPiece);
      AscendC::LocalTensor<uint8_t> data = queue_.AllocTensor<uint8_t>();
      LoadRow(data, Global<uint8_t>(from + first), piece);
      queue_.EnQue(data);
      data = queue_.DeQue<uint8_t>();
      StoreRow(Global<uint8_t>(to + first), data, piece);
      queue_.FreeTensor(data);
    }
  }

 private:
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> queue_;
};

}  // namespace

// Host side: a launch by the types of one or two tensors, each BF16 or float32.
#define DI_BY_TYPES(kernel, a, b, blocks, stream, args) \
  do { \
    const bool a16 = (a) == DI_BF16, b16 = (b) == DI_BF16; \
    if (a16 && b16) DI_LAUNCH((kernel<bfloat16_t, bfloat16_t>), blocks, stream, args); \
    else if (a16) DI_LAUNCH((kernel<bfloat16_t, float>), blocks, stream, args); \
    else if (b16) DI_LAUNCH((kernel<float, bfloat16_t>), blocks, stream, args); \
    else DI_LAUNCH((kernel<float, float>), blocks, stream, args); \
  } while (0)
