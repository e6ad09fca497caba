// What every kernel source includes: the device API, the C ABI, launches, and the small pieces that kernels share.
#pragma once

#include <stdio.h>

#include "di_launch.h"
#include "kernel_operator.h"

#ifndef DI_CALLER  // helpers that set flags: the twin is told where their caller stands, a device needs nothing
#define DI_CALLER
#define DI_OF_CALLER
#endif
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
__aicore__ inline float FloatOf(uint32_t bits) {
  union {
    uint32_t bits;
    float value;
  } both;
  both.bits = bits;
  return both.value;
}
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
  if constexpr (sizeof(T) == 4) AscendC::Muls(to, from, 1.0f, items);
  else AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, items);
}

}  // namespace
