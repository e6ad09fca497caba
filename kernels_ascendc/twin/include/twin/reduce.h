// Reductions on the vector unit, and the broadcast that undoes them. Sums are binary trees of neighbouring pairs.
#pragma once

#include "twin/vector.h"

namespace AscendC {

enum class ReduceType : uint8_t { SUM = 0, MAX, MIN };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX = 0, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };
struct BrcbRepeatParams {
  uint16_t dstBlkStride = 1, dstRepStride = 8;
  BrcbRepeatParams() = default;
  BrcbRepeatParams(uint16_t block, uint16_t repeat) : dstBlkStride(block), dstRepStride(repeat) {}
};

}  // namespace AscendC

namespace twin {

using AscendC::ReduceOrder;
using AscendC::ReduceType;
struct Reduction {
  ReduceType how;
  ReduceOrder order;
  bool index;
};
// Everything of `count` elements (or of the masked repeats) to one value, and its index if asked for.
void reduce_all(Op op, Reduction r, Type type, View d, View a, const Walk& walk, int source_repeat_stride, Where where);
void reduce_repeats(Op op, Reduction r, Type type, View d, View a, const Walk& walk, int target_stride, Where where);
void reduce_blocks(Op op, Reduction r, Type type, View d, View a, const Walk& walk, int target_stride, Where where);
void run_brcb(Type type, View d, View a, int repeats, int block_stride, int repeat_stride, Where where);
Walk reduce_walk(const uint64_t* mask, bool by_bit, bool set_mask, int repeats, int block_stride, int repeat_stride,
                 Type type, Where where);

}  // namespace twin

namespace AscendC {

#define TWIN_REDUCE_ALL(Name, HOW) \
  template <class T> inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>&, \
                                      int32_t count, TWIN_REDUCE_INDEX TWIN_HERE) { \
    twin::reduce_all(twin::op_##Name, {ReduceType::HOW, ReduceOrder::ORDER_VALUE_INDEX, TWIN_REDUCE_VALUE}, \
                     twin::type_of<T>, dst.view(), src.view(), twin::contiguous(count), 8, where); \
  } \
  template <class T> inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>&, \
                                      int32_t mask, int32_t repeatTime, int32_t srcRepStride, \
                                      TWIN_REDUCE_INDEX TWIN_HERE) { \
    const uint64_t lanes = (uint64_t)mask; \
    twin::reduce_all(twin::op_##Name, {ReduceType::HOW, ReduceOrder::ORDER_VALUE_INDEX, TWIN_REDUCE_VALUE}, \
                     twin::type_of<T>, dst.view(), src.view(), \
                     twin::reduce_walk(&lanes, false, true, repeatTime, 1, srcRepStride, twin::type_of<T>, where), \
                     srcRepStride, where); \
  } \
  template <class T> inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>&, \
                                      const uint64_t mask[], int32_t repeatTime, int32_t srcRepStride, \
                                      TWIN_REDUCE_INDEX TWIN_HERE) { \
    twin::reduce_all(twin::op_##Name, {ReduceType::HOW, ReduceOrder::ORDER_VALUE_INDEX, TWIN_REDUCE_VALUE}, \
                     twin::type_of<T>, dst.view(), src.view(), \
                     twin::reduce_walk(mask, true, true, repeatTime, 1, srcRepStride, twin::type_of<T>, where), \
                     srcRepStride, where); \
  }
#define TWIN_REDUCE_INDEX
#define TWIN_REDUCE_VALUE false
TWIN_REDUCE_ALL(ReduceSum, SUM)
#undef TWIN_REDUCE_INDEX
#undef TWIN_REDUCE_VALUE
#define TWIN_REDUCE_INDEX bool calIndex = false,
#define TWIN_REDUCE_VALUE calIndex
TWIN_REDUCE_ALL(ReduceMax, MAX)
TWIN_REDUCE_ALL(ReduceMin, MIN)
#undef TWIN_REDUCE_INDEX
#undef TWIN_REDUCE_VALUE
#undef TWIN_REDUCE_ALL

// ReduceRepeat and ReduceDataBlock are the names of the newest pages; WholeReduce* and BlockReduce* those before them.
template <ReduceType how, class T, class U = T, bool isSetMask = true>
inline void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, int32_t mask, int32_t repeatTime,
                         int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride,
                         ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, TWIN_HERE) {
  static_assert(twin::type_of<T> == twin::type_of<U>, "only equal types are modelled");
  const uint64_t lanes = (uint64_t)mask;
  twin::reduce_repeats(
      twin::op_ReduceRepeat, {how, order, true}, twin::type_of<T>, dst.view(), src.view(),
      twin::reduce_walk(&lanes, false, isSetMask, repeatTime, srcBlkStride, srcRepStride, twin::type_of<T>, where),
      dstRepStride, where);
}
template <ReduceType how, class T, class U = T, bool isSetMask = true>
inline void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, const uint64_t mask[],
                         int32_t repeatTime, int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride,
                         ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, TWIN_HERE) {
  static_assert(twin::type_of<T> == twin::type_of<U>, "only equal types are modelled");
  twin::reduce_repeats(
      twin::op_ReduceRepeat, {how, order, true}, twin::type_of<T>, dst.view(), src.view(),
      twin::reduce_walk(mask, true, isSetMask, repeatTime, srcBlkStride, srcRepStride, twin::type_of<T>, where),
      dstRepStride, where);
}
template <ReduceType how, class T, class U = T, bool isSetMask = true>
inline void ReduceDataBlock(const LocalTensor<T>& dst, const LocalTensor<U>& src, int32_t mask, int32_t repeatTime,
                            int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride, TWIN_HERE) {
  const uint64_t lanes = (uint64_t)mask;
  twin::reduce_blocks(
      twin::op_ReduceDataBlock, {how, ReduceOrder::ORDER_ONLY_VALUE, false}, twin::type_of<T>, dst.view(), src.view(),
      twin::reduce_walk(&lanes, false, isSetMask, repeatTime, srcBlkStride, srcRepStride, twin::type_of<T>, where),
      dstRepStride, where);
}
template <ReduceType how, class T, class U = T, bool isSetMask = true>
inline void ReduceDataBlock(const LocalTensor<T>& dst, const LocalTensor<U>& src, const uint64_t mask[],
                            int32_t repeatTime, int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride,
                            TWIN_HERE) {
  twin::reduce_blocks(
      twin::op_ReduceDataBlock, {how, ReduceOrder::ORDER_ONLY_VALUE, false}, twin::type_of<T>, dst.view(), src.view(),
      twin::reduce_walk(mask, true, isSetMask, repeatTime, srcBlkStride, srcRepStride, twin::type_of<T>, where),
      dstRepStride, where);
}

template <class T, bool isSetMask = true>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeatTime,
                           int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride, TWIN_HERE) {
  ReduceRepeat<ReduceType::SUM, T, T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                                                 ReduceOrder::ORDER_ONLY_VALUE, where);
}
template <class T, bool isSetMask = true>
inline void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeatTime,
                           int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride,
                           ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, TWIN_HERE) {
  ReduceRepeat<ReduceType::MAX, T, T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                                                 order, where);
}
template <class T, bool isSetMask = true>
inline void WholeReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeatTime,
                           int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride,
                           ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, TWIN_HERE) {
  ReduceRepeat<ReduceType::MIN, T, T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                                                 order, where);
}
#define TWIN_BLOCK_REDUCE(Name, HOW) \
  template <class T, bool isSetMask = true> inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, \
                                                             int32_t repeatTime, int32_t mask, int32_t dstRepStride, \
                                                             int32_t srcBlkStride, int32_t srcRepStride, TWIN_HERE) { \
    ReduceDataBlock<ReduceType::HOW, T, T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, \
                                                      srcRepStride, where); \
  }
TWIN_BLOCK_REDUCE(BlockReduceSum, SUM)
TWIN_BLOCK_REDUCE(BlockReduceMax, MAX) TWIN_BLOCK_REDUCE(BlockReduceMin, MIN)
#undef TWIN_BLOCK_REDUCE

    template <class T>
    inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src0, uint8_t repeatTime,
                     const BrcbRepeatParams& p, TWIN_HERE) {
  twin::run_brcb(twin::type_of<T>, dst.view(), src0.view(), repeatTime, p.dstBlkStride, p.dstRepStride, where);
}

}  // namespace AscendC
