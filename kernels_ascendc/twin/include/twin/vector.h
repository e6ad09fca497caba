// Vector instructions on local memory: contiguous (count) and sliced (mask, repeats, strides) forms.
#pragma once

#include "twin/mutation.h"
#include "twin/pipe.h"

namespace AscendC {

struct UnaryRepeatParams {
  uint16_t dstBlkStride = 1, srcBlkStride = 1;
  uint8_t dstRepStride = 8, srcRepStride = 8;
  UnaryRepeatParams() = default;
  UnaryRepeatParams(uint16_t dst_block, uint16_t src_block, uint8_t dst_repeat, uint8_t src_repeat)
      : dstBlkStride(dst_block), srcBlkStride(src_block), dstRepStride(dst_repeat), srcRepStride(src_repeat) {}
};
struct BinaryRepeatParams {
  uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1, dstRepStride = 8, src0RepStride = 8,
          src1RepStride = 8;
  BinaryRepeatParams() = default;
  BinaryRepeatParams(uint8_t dst_block, uint8_t src0_block, uint8_t src1_block, uint8_t dst_repeat, uint8_t src0_repeat,
                     uint8_t src1_repeat)
      : dstBlkStride(dst_block),
        src0BlkStride(src0_block),
        src1BlkStride(src1_block),
        dstRepStride(dst_repeat),
        src0RepStride(src0_repeat),
        src1RepStride(src1_repeat) {}
};
enum class DivAlgo {
  INTRINSIC = 0,
  DIFF_COMPENSATION,
  PRECISION_1ULP_FTZ_TRUE,
  PRECISION_0ULP_FTZ_TRUE,
  PRECISION_0ULP_FTZ_FALSE,
  PRECISION_1ULP_FTZ_FALSE
};
enum class ExpAlgo { INTRINSIC = 0, PRECISION_1ULP_FTZ_TRUE, PRECISION_1ULP_FTZ_FALSE };
enum class LnAlgo { INTRINSIC = 0, PRECISION_1ULP_FTZ_TRUE, PRECISION_1ULP_FTZ_FALSE };
enum class ReciprocalAlgo { INTRINSIC = 0, PRECISION_1ULP_FTZ_TRUE, PRECISION_1ULP_FTZ_FALSE };
enum class SqrtAlgo {
  INTRINSIC = 0,
  FAST_INVERSE,
  PRECISION_1ULP_FTZ_TRUE,
  PRECISION_0ULP_FTZ_FALSE,
  PRECISION_1ULP_FTZ_FALSE
};
enum class RsqrtAlgo {
  INTRINSIC = 0,
  FAST_INVERSE,
  PRECISION_1ULP_FTZ_TRUE,
  PRECISION_0ULP_FTZ_FALSE,
  PRECISION_1ULP_FTZ_FALSE
};
struct DivConfig {
  DivAlgo algo = DivAlgo::INTRINSIC;
};
struct ExpConfig {
  ExpAlgo algo = ExpAlgo::INTRINSIC;
};
struct LnConfig {
  LnAlgo algo = LnAlgo::INTRINSIC;
};
struct ReciprocalConfig {
  ReciprocalAlgo algo = ReciprocalAlgo::INTRINSIC;
};
struct SqrtConfig {
  SqrtAlgo algo = SqrtAlgo::INTRINSIC;
};
struct RsqrtConfig {
  RsqrtAlgo algo = RsqrtAlgo::INTRINSIC;
};
inline constexpr DivConfig DEFAULT_DIV_CONFIG = {};
inline constexpr ExpConfig DEFAULT_EXP_CONFIG = {};
inline constexpr LnConfig DEFAULT_LN_CONFIG = {};
inline constexpr ReciprocalConfig DEFAULT_RECIPROCAL_CONFIG = {};
inline constexpr SqrtConfig DEFAULT_SQRT_CONFIG = {};
inline constexpr RsqrtConfig DEFAULT_RSQRT_CONFIG = {};
enum class MaskMode : uint8_t { NORMAL = 0, COUNTER };
constexpr uint64_t MASK_PLACEHOLDER = 0;

}  // namespace AscendC

namespace twin {

// Numbers of src/lanes.h. The precise variants differ from the plain ones only in what happens to subnormal values.
constexpr int lanes_of(AscendC::DivAlgo a) { return a >= AscendC::DivAlgo::PRECISION_0ULP_FTZ_FALSE ? 10 : 3; }
constexpr int lanes_of(AscendC::ExpAlgo a) { return a == AscendC::ExpAlgo::PRECISION_1ULP_FTZ_FALSE ? 10 : 0; }
constexpr int lanes_of(AscendC::LnAlgo a) { return a == AscendC::LnAlgo::PRECISION_1ULP_FTZ_FALSE ? 11 : 1; }
constexpr int lanes_of(AscendC::ReciprocalAlgo a) {
  return a == AscendC::ReciprocalAlgo::PRECISION_1ULP_FTZ_FALSE ? 12 : 3;
}
constexpr int lanes_of(AscendC::SqrtAlgo a) {
  using A = AscendC::SqrtAlgo;
  return a == A::FAST_INVERSE || a == A::PRECISION_0ULP_FTZ_FALSE ? 15 : a == A::PRECISION_1ULP_FTZ_FALSE ? 13 : 4;
}
constexpr int lanes_of(AscendC::RsqrtAlgo a) {
  using A = AscendC::RsqrtAlgo;
  return a == A::FAST_INVERSE || a == A::PRECISION_0ULP_FTZ_FALSE ? 16 : a == A::PRECISION_1ULP_FTZ_FALSE ? 14 : 5;
}

// How an instruction walks its operands. count >= 0: that many contiguous lanes. Otherwise `repeats` times the lanes
// that `mask` names, operands advancing by 32-byte blocks.
struct Walk {
  int64_t count;
  uint64_t mask[2];
  int repeats;
  uint16_t block_stride[3], repeat_stride[3];  // destination, first and second source
};
inline Walk contiguous(int64_t count) { return {count, {0, 0}, 0, {1, 1, 1}, {8, 8, 8}}; }
Walk sliced(const uint64_t* mask, bool by_bit, bool set_mask, int repeats, const AscendC::UnaryRepeatParams& p,
            Type widest, Where where);
Walk sliced(const uint64_t* mask, bool by_bit, bool set_mask, int repeats, const AscendC::BinaryRepeatParams& p,
            Type widest, Where where);

void run_binary(Op op, int lane_op, Type type, View d, View a, View b, const Walk& walk, Where where);
void run_unary(Op op, int lane_op, Type type, View d, View a, const Walk& walk, Where where);
void run_scalar(Op op, int lane_op, Type type, View d, View a, const void* scalar, const Walk& walk, Where where);
void run_interleave(bool back, Type type, View d0, View d1, View a, View b, int64_t count, Where where);
void run_duplicate(Type type, View d, const void* scalar, const Walk& walk, Where where);
void run_cast(Type to, View d, Type from, View a, AscendC::RoundMode mode, const Walk& walk, Where where);

}  // namespace twin

namespace AscendC {

#define TWIN_BINARY(Name, code) \
  template <class T> inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, \
                                      const LocalTensor<T>& src1, int32_t count, TWIN_HERE) { \
    twin::run_binary(twin::op_##Name, code, twin::type_of<T>, dst.view(), src0.view(), src1.view(), \
                     twin::contiguous(count), where); \
  } \
  template <class T, bool isSetMask = true> \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask, \
                   uint8_t repeatTime, const BinaryRepeatParams& p, TWIN_HERE) { \
    twin::run_binary(twin::op_##Name, code, twin::type_of<T>, dst.view(), src0.view(), src1.view(), \
                     twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where); \
  } \
  template <class T, bool isSetMask = true> \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask[], \
                   uint8_t repeatTime, const BinaryRepeatParams& p, TWIN_HERE) { \
    twin::run_binary(twin::op_##Name, code, twin::type_of<T>, dst.view(), src0.view(), src1.view(), \
                     twin::sliced(mask, true, isSetMask, repeatTime, p, twin::type_of<T>, where), where); \
  }
TWIN_BINARY(Add, 0)
TWIN_BINARY(Sub, 1)
TWIN_BINARY(Mul, 2)
TWIN_BINARY(Max, 4)
TWIN_BINARY(Min, 5)
TWIN_BINARY(And, 6)
TWIN_BINARY(Or, 7)
TWIN_BINARY(Xor, 8)
TWIN_BINARY(MulAddDst, 9)
#undef TWIN_BINARY

#define TWIN_UNARY(Name, code) \
  template <class T> \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count, TWIN_HERE) { \
    twin::run_unary(twin::op_##Name, code, twin::type_of<T>, dst.view(), src.view(), twin::contiguous(count), where); \
  } \
  template <class T, bool isSetMask = true> inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, \
                                                             uint64_t mask, uint8_t repeatTime, \
                                                             const UnaryRepeatParams& p, TWIN_HERE) { \
    twin::run_unary(twin::op_##Name, code, twin::type_of<T>, dst.view(), src.view(), \
                    twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where); \
  } \
  template <class T, bool isSetMask = true> inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, \
                                                             uint64_t mask[], uint8_t repeatTime, \
                                                             const UnaryRepeatParams& p, TWIN_HERE) { \
    twin::run_unary(twin::op_##Name, code, twin::type_of<T>, dst.view(), src.view(), \
                    twin::sliced(mask, true, isSetMask, repeatTime, p, twin::type_of<T>, where), where); \
  }
TWIN_UNARY(Abs, 2)
TWIN_UNARY(Relu, 6)
TWIN_UNARY(Neg, 7)
TWIN_UNARY(Not, 8)
TWIN_UNARY(Copy, 9)
#undef TWIN_UNARY

// Division and the elementary functions take a precision.
template <class T, const DivConfig& config = DEFAULT_DIV_CONFIG>
inline void Div(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count,
                TWIN_HERE) {
  twin::run_binary(twin::op_Div, twin::lanes_of(config.algo), twin::type_of<T>, dst.view(), src0.view(), src1.view(),
                   twin::contiguous(count), where);
}
template <class T, bool isSetMask = true, const DivConfig& config = DEFAULT_DIV_CONFIG>
inline void Div(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,
                uint8_t repeatTime, const BinaryRepeatParams& p, TWIN_HERE) {
  twin::run_binary(twin::op_Div, twin::lanes_of(config.algo), twin::type_of<T>, dst.view(), src0.view(), src1.view(),
                   twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where);
}
template <class T, bool isSetMask = true, const DivConfig& config = DEFAULT_DIV_CONFIG>
inline void Div(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask[],
                uint8_t repeatTime, const BinaryRepeatParams& p, TWIN_HERE) {
  twin::run_binary(twin::op_Div, twin::lanes_of(config.algo), twin::type_of<T>, dst.view(), src0.view(), src1.view(),
                   twin::sliced(mask, true, isSetMask, repeatTime, p, twin::type_of<T>, where), where);
}
#define TWIN_FUNCTION(Name, Config, standard) \
  template <class T, const Config& config = standard> \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count, TWIN_HERE) { \
    twin::run_unary(twin::op_##Name, twin::lanes_of(config.algo), twin::type_of<T>, dst.view(), src.view(), \
                    twin::contiguous(count), where); \
  } \
  template <class T, bool isSetMask = true, const Config& config = standard> \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, uint8_t repeatTime, \
                   const UnaryRepeatParams& p, TWIN_HERE) { \
    twin::run_unary(twin::op_##Name, twin::lanes_of(config.algo), twin::type_of<T>, dst.view(), src.view(), \
                    twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where); \
  } \
  template <class T, bool isSetMask = true, const Config& config = standard> \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask[], uint8_t repeatTime, \
                   const UnaryRepeatParams& p, TWIN_HERE) { \
    twin::run_unary(twin::op_##Name, twin::lanes_of(config.algo), twin::type_of<T>, dst.view(), src.view(), \
                    twin::sliced(mask, true, isSetMask, repeatTime, p, twin::type_of<T>, where), where); \
  }
TWIN_FUNCTION(Exp, ExpConfig, DEFAULT_EXP_CONFIG)
TWIN_FUNCTION(Ln, LnConfig, DEFAULT_LN_CONFIG)
TWIN_FUNCTION(Reciprocal, ReciprocalConfig, DEFAULT_RECIPROCAL_CONFIG)
TWIN_FUNCTION(Sqrt, SqrtConfig, DEFAULT_SQRT_CONFIG)
TWIN_FUNCTION(Rsqrt, RsqrtConfig, DEFAULT_RSQRT_CONFIG)
#undef TWIN_FUNCTION

#define TWIN_SCALAR(Name, code) \
  template <class T, class S> inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, \
                                               const S& scalarValue, int32_t count, TWIN_HERE) { \
    const T scalar = T(scalarValue); \
    twin::run_scalar(twin::op_##Name, code, twin::type_of<T>, dst.view(), src.view(), &scalar, \
                     twin::contiguous(count), where); \
  } \
  template <class T, class S, bool isSetMask = true> \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const S& scalarValue, uint64_t mask, \
                   uint8_t repeatTime, const UnaryRepeatParams& p, TWIN_HERE) { \
    const T scalar = T(scalarValue); \
    twin::run_scalar(twin::op_##Name, code, twin::type_of<T>, dst.view(), src.view(), &scalar, \
                     twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where); \
  } \
  template <class T, class S, bool isSetMask = true> \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const S& scalarValue, uint64_t mask[], \
                   uint8_t repeatTime, const UnaryRepeatParams& p, TWIN_HERE) { \
    const T scalar = T(scalarValue); \
    twin::run_scalar(twin::op_##Name, code, twin::type_of<T>, dst.view(), src.view(), &scalar, \
                     twin::sliced(mask, true, isSetMask, repeatTime, p, twin::type_of<T>, where), where); \
  }
TWIN_SCALAR(Adds, 0)
TWIN_SCALAR(Muls, 1)
TWIN_SCALAR(Maxs, 2)
TWIN_SCALAR(Mins, 3)
TWIN_SCALAR(ShiftLeft, 4)
TWIN_SCALAR(ShiftRight, 5)
TWIN_SCALAR(LeakyRelu, 6)
TWIN_SCALAR(Axpy, 7)
#undef TWIN_SCALAR

template <class T, class S>
inline void Duplicate(const LocalTensor<T>& dst, const S& scalarValue, int32_t count, TWIN_HERE) {
  const T scalar = T(scalarValue);
  twin::run_duplicate(twin::type_of<T>, dst.view(), &scalar, twin::contiguous(count), where);
}
template <class T, class S, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const S& scalarValue, uint64_t mask, uint8_t repeatTime,
                      uint16_t dstBlockStride, uint8_t dstRepeatStride, TWIN_HERE) {
  const T scalar = T(scalarValue);
  const UnaryRepeatParams p(dstBlockStride, dstBlockStride, dstRepeatStride, dstRepeatStride);
  twin::run_duplicate(twin::type_of<T>, dst.view(), &scalar,
                      twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where);
}
template <class T, class S, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const S& scalarValue, uint64_t mask[], uint8_t repeatTime,
                      uint16_t dstBlockStride, uint8_t dstRepeatStride, TWIN_HERE) {
  const T scalar = T(scalarValue);
  const UnaryRepeatParams p(dstBlockStride, dstBlockStride, dstRepeatStride, dstRepeatStride);
  twin::run_duplicate(twin::type_of<T>, dst.view(), &scalar,
                      twin::sliced(mask, true, isSetMask, repeatTime, p, twin::type_of<T>, where), where);
}

template <class T, class U> inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src,
                                             const RoundMode& roundMode, uint32_t count, TWIN_HERE) {
  twin::run_cast(twin::type_of<T>, dst.view(), twin::type_of<U>, src.view(), roundMode, twin::contiguous(count), where);
}
template <class T, class U, bool isSetMask = true>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, uint64_t mask,
                 uint8_t repeatTime, const UnaryRepeatParams& p, TWIN_HERE) {
  constexpr twin::Type widest = sizeof(T) > sizeof(U) ? twin::type_of<T> : twin::type_of<U>;
  twin::run_cast(twin::type_of<T>, dst.view(), twin::type_of<U>, src.view(), roundMode,
                 twin::sliced(&mask, false, isSetMask, repeatTime, p, widest, where), where);
}
template <class T, class U, bool isSetMask = true>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, uint64_t mask[],
                 uint8_t repeatTime, const UnaryRepeatParams& p, TWIN_HERE) {
  constexpr twin::Type widest = sizeof(T) > sizeof(U) ? twin::type_of<T> : twin::type_of<U>;
  twin::run_cast(twin::type_of<T>, dst.view(), twin::type_of<U>, src.view(), roundMode,
                 twin::sliced(mask, true, isSetMask, repeatTime, p, widest, where), where);
}

// [dst0 | dst1] takes the elements of src0 and src1 in turn; DeInterleave is the inverse. `count` elements each.
template <class T> inline void Interleave(const LocalTensor<T>& dst0, const LocalTensor<T>& dst1,
                                          const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count,
                                          TWIN_HERE) {
  twin::run_interleave(false, twin::type_of<T>, dst0.view(), dst1.view(), src0.view(), src1.view(), count, where);
}
template <class T> inline void DeInterleave(const LocalTensor<T>& dst0, const LocalTensor<T>& dst1,
                                            const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count,
                                            TWIN_HERE) {
  twin::run_interleave(true, twin::type_of<T>, dst0.view(), dst1.view(), src0.view(), src1.view(), count, where);
}

inline void SetMaskCount() { twin::current->count_mode = true; }
inline void SetMaskNorm() { twin::current->count_mode = false; }
template <class T, MaskMode mode = MaskMode::NORMAL> inline void SetVectorMask(uint64_t high, uint64_t low, TWIN_HERE) {
  if (twin::mutation::at(twin::mutation::kMask, where, 0, 1) == twin::mutation::kDrop) return;
  twin::current->mask[0] = low, twin::current->mask[1] = high, twin::current->count_mode = mode == MaskMode::COUNTER;
}
template <class T, MaskMode mode = MaskMode::NORMAL> inline void SetVectorMask(int32_t lanes, TWIN_HERE) {
  if (twin::mutation::at(twin::mutation::kMask, where, 0, 1) == twin::mutation::kDrop) return;
  twin::current->count_mode = mode == MaskMode::COUNTER;
  if (twin::current->count_mode) {
    twin::current->mask[0] = (uint64_t)lanes, twin::current->mask[1] = 0;
    return;
  }
  twin::current->mask[0] = lanes >= 64 ? ~0ull : (1ull << lanes) - 1;
  twin::current->mask[1] = lanes >= 128 ? ~0ull : lanes > 64 ? (1ull << (lanes - 64)) - 1 : 0;
}
inline void ResetMask() { twin::current->mask[0] = twin::current->mask[1] = ~0ull, twin::current->count_mode = false; }

}  // namespace AscendC
