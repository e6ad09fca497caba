// DataCopy and DataCopyPad between global and local memory and within a core.
#pragma once

#include "twin/pipe.h"

namespace AscendC {

struct DataCopyParams {  // lengths and gaps in units of 32 bytes
  uint16_t blockCount = 1, blockLen = 0;
  union {
    uint16_t srcStride = 0, srcGap;
  };
  union {
    uint16_t dstStride = 0, dstGap;
  };
  DataCopyParams() = default;
  DataCopyParams(uint16_t count, uint16_t length, uint16_t source_gap, uint16_t target_gap)
      : blockCount(count), blockLen(length), srcStride(source_gap), dstStride(target_gap) {}
};
struct DataCopyExtParams {  // blockLen in bytes; a gap counts bytes in global memory and 32-byte blocks in local memory
  uint16_t blockCount = 1;
  uint32_t blockLen = 0;
  int64_t srcStride = 0, dstStride = 0;
  uint32_t rsv = 0;
  DataCopyExtParams() = default;
  DataCopyExtParams(uint16_t count, uint32_t length, int64_t source_gap, int64_t target_gap, uint32_t reserved)
      : blockCount(count), blockLen(length), srcStride(source_gap), dstStride(target_gap), rsv(reserved) {}
};
template <class T> struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue = T(0);
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};
struct DataCopyPadParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  uint64_t paddingValue = 0;
  DataCopyPadParams() = default;
  DataCopyPadParams(bool pad, uint8_t left, uint8_t right, uint64_t value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

}  // namespace AscendC

namespace twin {

struct Bursts {
  int64_t count, bytes, source_gap, target_gap;  // all in bytes
};
struct Padding {
  bool on;
  uint32_t left_bytes, right_bytes, item_bytes;
  uint64_t value;
};
void copy_in(Op op, View target, const uint8_t* source, Bursts bursts, Padding padding, bool padded, Where where);
void copy_out(Op op, uint8_t* target, View source, Bursts bursts, bool padded, Type type, Where where);
void copy_inside(View target, View source, Bursts bursts, Where where);
uint64_t whole_blocks(uint64_t elements, uint64_t item_bytes, Where where);

// Bytes of global memory that bursts cover, gaps included.
inline uint64_t global_extent(const Bursts& b, int64_t gap) {
  return b.count <= 0 ? 0 : (uint64_t)(b.count * b.bytes + (b.count - 1) * gap);
}

inline Bursts bursts_of(const AscendC::DataCopyParams& p) {
  return {p.blockCount, p.blockLen * 32, p.srcStride * 32, p.dstStride * 32};
}
// DataCopyPad counts bytes, and gaps by where they are.
inline Bursts pad_in(int64_t count, int64_t bytes, int64_t source, int64_t target) {
  return {count, bytes, source, target * 32};
}
inline Bursts pad_out(int64_t count, int64_t bytes, int64_t source, int64_t target) {
  return {count, bytes, source * 32, target};
}

template <class T>
void check_extent(const AscendC::GlobalTensor<T>& t, const Bursts& b, int64_t gap, Op op, Where where) {
  if (t.GetSize() == ~0ull || global_extent(b, gap) <= t.GetSize() * sizeof(T) / kPerItem<T>) return;
  give_up("%s at %s:%d reaches %llu bytes of a GlobalTensor of %llu elements of %d bytes", kOpNames[op], where.file,
          where.line, (unsigned long long)global_extent(b, gap), (unsigned long long)t.GetSize(), (int)sizeof(T));
}

}  // namespace twin

namespace AscendC {

template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p, TWIN_HERE) {
  twin::check_extent(src, twin::bursts_of(p), p.srcStride * 32, twin::op_DataCopy, where);
  twin::copy_in(twin::op_DataCopy, dst.view(), src.bytes(), twin::bursts_of(p), {}, false, where);
}
template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count, TWIN_HERE) {
  const twin::Bursts b{1, (int64_t)twin::whole_blocks(count / twin::kPerItem<T>, sizeof(T), where), 0, 0};
  twin::check_extent(src, b, 0, twin::op_DataCopy, where);
  twin::copy_in(twin::op_DataCopy, dst.view(), src.bytes(), b, {}, false, where);
}
template <class T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p, TWIN_HERE) {
  twin::check_extent(dst, twin::bursts_of(p), p.dstStride * 32, twin::op_DataCopy, where);
  twin::copy_out(twin::op_DataCopy, dst.bytes(), src.view(), twin::bursts_of(p), false, twin::type_of<T>, where);
}
template <class T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, TWIN_HERE) {
  const twin::Bursts b{1, (int64_t)twin::whole_blocks(count / twin::kPerItem<T>, sizeof(T), where), 0, 0};
  twin::check_extent(dst, b, 0, twin::op_DataCopy, where);
  twin::copy_out(twin::op_DataCopy, dst.bytes(), src.view(), b, false, twin::type_of<T>, where);
}
template <class T, class U>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const DataCopyParams& p, TWIN_HERE) {
  twin::copy_inside(dst.view(), src.view(), twin::bursts_of(p), where);
}
template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, TWIN_HERE) {
  twin::copy_inside(dst.view(), src.view(),
                    {1, (int64_t)twin::whole_blocks(count / twin::kPerItem<T>, sizeof(T), where), 0, 0}, where);
}

template <class T> inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                                           const DataCopyExtParams& p, const DataCopyPadExtParams<T>& pad, TWIN_HERE) {
  const twin::Bursts b = twin::pad_in(p.blockCount, p.blockLen, p.srcStride, p.dstStride);
  twin::check_extent(src, b, p.srcStride, twin::op_DataCopyPad, where);
  uint64_t value = 0;
  memcpy(&value, &pad.paddingValue, sizeof(T));
  twin::copy_in(
      twin::op_DataCopyPad, dst.view(), src.bytes(), b,
      {pad.isPad, (uint32_t)(pad.leftPadding * sizeof(T)), (uint32_t)(pad.rightPadding * sizeof(T)), sizeof(T), value},
      true, where);
}
template <class T> inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                                           const DataCopyParams& p, const DataCopyPadParams& pad, TWIN_HERE) {
  const twin::Bursts b = twin::pad_in(p.blockCount, p.blockLen, p.srcStride, p.dstStride);
  twin::check_extent(src, b, p.srcStride, twin::op_DataCopyPad, where);
  twin::copy_in(twin::op_DataCopyPad, dst.view(), src.bytes(), b,
                {pad.isPad, (uint32_t)(pad.leftPadding * sizeof(T)), (uint32_t)(pad.rightPadding * sizeof(T)),
                 sizeof(T), pad.paddingValue},
                true, where);
}
template <class T, class Params>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const Params& p, TWIN_HERE) {
  const twin::Bursts b = twin::pad_out(p.blockCount, p.blockLen, p.srcStride, p.dstStride);
  twin::check_extent(dst, b, p.dstStride, twin::op_DataCopyPad, where);
  twin::copy_out(twin::op_DataCopyPad, dst.bytes(), src.view(), b, true, twin::type_of<T>, where);
}

template <class T> inline void SetAtomicAdd(TWIN_HERE) {
  twin::current->atomic_where = where, twin::current->atomic_op = 1, twin::current->atomic_type = twin::type_of<T>;
}
template <class T> inline void SetAtomicMax(TWIN_HERE) {
  twin::current->atomic_where = where, twin::current->atomic_op = 2, twin::current->atomic_type = twin::type_of<T>;
}
template <class T> inline void SetAtomicMin(TWIN_HERE) {
  twin::current->atomic_where = where, twin::current->atomic_op = 3, twin::current->atomic_type = twin::type_of<T>;
}
inline void SetAtomicNone() { twin::current->atomic_op = 0; }
inline void DisableDmaAtomic() { twin::current->atomic_op = 0; }

}  // namespace AscendC
