// Comparing, selecting, gathering and compacting on the vector unit.
#pragma once

#include "twin/vector.h"

namespace AscendC {

enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR = 0, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
struct GatherMaskParams {
  uint8_t src0BlockStride = 1;
  uint16_t repeatTimes = 0, src0RepeatStride = 8;
  uint8_t src1RepeatStride = 0;
  GatherMaskParams() = default;
  GatherMaskParams(uint8_t block, uint16_t repeats, uint16_t repeat, uint8_t pattern)
      : src0BlockStride(block), repeatTimes(repeats), src0RepeatStride(repeat), src1RepeatStride(pattern) {}
};

}  // namespace AscendC

namespace twin {

// `b` is a tensor, or a scalar of the type when its memory is null.
void run_compare(Op op, Type type, AscendC::CMPMODE mode, View d, View a, View b, const void* scalar, const Walk& walk,
                 Where where);
void run_select(Type type, AscendC::SELMODE mode, View d, View mask, View a, View b, const void* scalar,
                const Walk& walk, Where where);
void run_gather(Type type, View d, View source, View offsets, uint32_t base, int64_t count, Where where);
void run_gather_mask(Type type, View d, View source, View pattern, int fixed, bool counted, uint32_t lanes,
                     const AscendC::GatherMaskParams& p, uint64_t* kept, Where where);
void run_index(Type type, View d, const void* first, int64_t count, Where where);

}  // namespace twin

namespace AscendC {

template <class T, class U> inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                                                const LocalTensor<T>& src1, CMPMODE mode, uint32_t count, TWIN_HERE) {
  static_assert(sizeof(U) == 1, "results are bits in bytes");
  twin::run_compare(twin::op_Compare, twin::type_of<T>, mode, dst.view(), src0.view(), src1.view(), nullptr,
                    twin::contiguous(count), where);
}
template <class T, class U, bool isSetMask = true>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode,
                    uint64_t mask, uint8_t repeatTime, const BinaryRepeatParams& p, TWIN_HERE) {
  twin::run_compare(twin::op_Compare, twin::type_of<T>, mode, dst.view(), src0.view(), src1.view(), nullptr,
                    twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where);
}
template <class T, class U, bool isSetMask = true>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode,
                    const uint64_t mask[], uint8_t repeatTime, const BinaryRepeatParams& p, TWIN_HERE) {
  twin::run_compare(twin::op_Compare, twin::type_of<T>, mode, dst.view(), src0.view(), src1.view(), nullptr,
                    twin::sliced(mask, true, isSetMask, repeatTime, p, twin::type_of<T>, where), where);
}
// The newest pages call the form with a scalar Compares; CompareScalar is its older name.
template <class T, class U, class S> inline void Compares(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                                                          const S& src1, CMPMODE mode, uint32_t count, TWIN_HERE) {
  static_assert(sizeof(U) == 1, "results are bits in bytes");
  const T scalar = T(src1);
  twin::run_compare(twin::op_Compares, twin::type_of<T>, mode, dst.view(), src0.view(), {nullptr, 0}, &scalar,
                    twin::contiguous(count), where);
}
template <class T, class U, class S> inline void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                                                               const S& src1, CMPMODE mode, uint32_t count, TWIN_HERE) {
  Compares(dst, src0, src1, mode, count, where);
}

template <class T, class U> inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                                               const LocalTensor<T>& src0, const LocalTensor<T>& src1, SELMODE mode,
                                               uint32_t count, TWIN_HERE) {
  twin::run_select(twin::type_of<T>, mode, dst.view(), selMask.view(), src0.view(), src1.view(), nullptr,
                   twin::contiguous(count), where);
}
template <class T, class U> inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                                               const LocalTensor<T>& src0, T src1, SELMODE mode, uint32_t count,
                                               TWIN_HERE) {
  twin::run_select(twin::type_of<T>, mode, dst.view(), selMask.view(), src0.view(), {nullptr, 0}, &src1,
                   twin::contiguous(count), where);
}
template <class T, class U, bool isSetMask = true>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
                   const LocalTensor<T>& src1, SELMODE mode, uint64_t mask, uint8_t repeatTime,
                   const BinaryRepeatParams& p, TWIN_HERE) {
  twin::run_select(twin::type_of<T>, mode, dst.view(), selMask.view(), src0.view(), src1.view(), nullptr,
                   twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where);
}
template <class T, class U, bool isSetMask = true>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
                   SELMODE mode, uint64_t mask, uint8_t repeatTime, const BinaryRepeatParams& p, TWIN_HERE) {
  twin::run_select(twin::type_of<T>, mode, dst.view(), selMask.view(), src0.view(), {nullptr, 0}, &src1,
                   twin::sliced(&mask, false, isSetMask, repeatTime, p, twin::type_of<T>, where), where);
}

template <class T> inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                                      const LocalTensor<uint32_t>& srcOffset, uint32_t srcBaseAddr, uint32_t count,
                                      TWIN_HERE) {
  twin::run_gather(twin::type_of<T>, dst.view(), src.view(), srcOffset.view(), srcBaseAddr, count, where);
}

template <class T, class U> inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
                                                   const LocalTensor<U>& src1Pattern, bool reduceMode, uint32_t mask,
                                                   const GatherMaskParams& p, uint64_t& rsvdCnt, TWIN_HERE) {
  static_assert(sizeof(U) == sizeof(T), "the pattern's items are as wide as the values");
  twin::run_gather_mask(twin::type_of<T>, dst.view(), src0.view(), src1Pattern.view(), 0, reduceMode, mask, p, &rsvdCnt,
                        where);
}
template <class T> inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, uint8_t src1Pattern,
                                          bool reduceMode, uint32_t mask, const GatherMaskParams& p, uint64_t& rsvdCnt,
                                          TWIN_HERE) {
  twin::run_gather_mask(twin::type_of<T>, dst.view(), src0.view(), {nullptr, 0}, src1Pattern, reduceMode, mask, p,
                        &rsvdCnt, where);
}

template <class T, class S>
inline void CreateVecIndex(const LocalTensor<T>& dst, const S& firstValue, uint32_t count, TWIN_HERE) {
  const T first = T(firstValue);
  twin::run_index(twin::type_of<T>, dst.view(), &first, count, where);
}

}  // namespace AscendC
