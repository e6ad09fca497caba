// Shared by the probe kernels: byte images of UB and the choice of a type by number.
#pragma once

#include "di_kernel.h"

namespace {

struct Images {
  __gm__ uint8_t *x0, *x1, *y;
  int32_t x0_bytes, x1_bytes, y_bytes;
};

inline Images ImagesOf(const di_tensor* t) {
  return {(uint8_t*)t[0].data,    (uint8_t*)t[1].data,    (uint8_t*)t[2].data,
          (int32_t)t[0].shape[0], (int32_t)t[1].shape[0], (int32_t)t[2].shape[0]};
}

// x0, x1 and y each own 64 KiB of UB. y is loaded too, so that what an instruction leaves alone can be seen.
class ProbeUb {
 public:
  __aicore__ inline void Load(const Images& images) {
    using namespace AscendC;
    pipe_.InitBuffer(x0_, 65536);
    pipe_.InitBuffer(x1_, 65536);
    pipe_.InitBuffer(y_, 65536);
    CopyIn(X0<uint8_t>(), images.x0, images.x0_bytes);
    CopyIn(X1<uint8_t>(), images.x1, images.x1_bytes);
    CopyIn(Y<uint8_t>(), images.y, images.y_bytes);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
  }
  __aicore__ inline void Store(const Images& images) {
    using namespace AscendC;
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    GlobalTensor<uint8_t> y;
    y.SetGlobalBuffer(images.y, images.y_bytes);
    DataCopyPad(y, Y<uint8_t>(), DataCopyExtParams(1, images.y_bytes, 0, 0, 0));
  }
  template <class T> __aicore__ inline AscendC::LocalTensor<T> X0() { return x0_.Get<T>(); }
  template <class T> __aicore__ inline AscendC::LocalTensor<T> X1() { return x1_.Get<T>(); }
  template <class T> __aicore__ inline AscendC::LocalTensor<T> Y() { return y_.Get<T>(); }

 private:
  __aicore__ inline void CopyIn(const AscendC::LocalTensor<uint8_t>& to, __gm__ uint8_t* from, int32_t bytes) {
    using namespace AscendC;
    if (bytes == 0) return;
    GlobalTensor<uint8_t> x;
    x.SetGlobalBuffer(from, bytes);
    DataCopyPad(to, x, DataCopyExtParams(1, bytes, 0, 0, 0), DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
  }
  AscendC::TPipe pipe_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> x0_, x1_, y_;
};

}  // namespace

// A device build makes one library for each instruction and type, so that a pair which its compiler does not know takes no
// other along: PROBE_ONE is then the only instruction, PROBE_TYPE the only type (for Cast, PROBE_FROM its source).
#ifdef PROBE_ONE
#define PROBE_HAS(instruction) ((instruction) == PROBE_ONE)
#else
#define PROBE_HAS(instruction) true
#endif

#ifdef PROBE_TYPE
#define PROBE_BY_TYPE(number, ...) \
  { \
    using T = PROBE_TYPE; \
    __VA_ARGS__; \
  }
#else
// Types by the numbers of twin::Type's first nine.
#define PROBE_BY_TYPE(number, ...) \
  switch (number) { \
    case 0: { \
      using T = float; \
      __VA_ARGS__; \
      break; \
    } \
    case 1: { \
      using T = half; \
      __VA_ARGS__; \
      break; \
    } \
    case 2: { \
      using T = bfloat16_t; \
      __VA_ARGS__; \
      break; \
    } \
    case 3: { \
      using T = int32_t; \
      __VA_ARGS__; \
      break; \
    } \
    case 4: { \
      using T = uint32_t; \
      __VA_ARGS__; \
      break; \
    } \
    case 5: { \
      using T = int16_t; \
      __VA_ARGS__; \
      break; \
    } \
    case 6: { \
      using T = uint16_t; \
      __VA_ARGS__; \
      break; \
    } \
    case 7: { \
      using T = int8_t; \
      __VA_ARGS__; \
      break; \
    } \
    default: { \
      using T = uint8_t; \
      __VA_ARGS__; \
      break; \
    } \
  }
#endif
