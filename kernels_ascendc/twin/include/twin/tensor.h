// GlobalTensor and LocalTensor: typed views of memory.
#pragma once

#include "twin/machine.h"
#include "twin/types.h"

#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __ssbuf__
#define __global__
#define __vector__
#define __cube__
#define __mix__(cubes, vectors)
#define __aicore__
#define __simd_vf__
#define __simd_callee__
#define __schedmode__(mode)
#define GM_ADDR uint8_t*
#define ASCEND_IS_AIC (::twin::current->kind == ::twin::kCube)
#define ASCEND_IS_AIV (::twin::current->kind != ::twin::kCube)
#ifndef __NPU_ARCH__
#define __NPU_ARCH__ 3510
#endif

enum pipe_t { PIPE_S = twin::kS, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL = twin::kAll };
enum event_t : int32_t { EVENT_ID0 = 0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
using TEventID = int32_t;

namespace AscendC {

enum class TPosition : uint8_t {
  GM,
  A1,
  A2,
  B1,
  B2,
  C1,
  C2,
  CO1,
  CO2,
  VECIN,
  VECOUT,
  VECCALC,
  LCM,
  C2PIPE2GM,
  TSCM,
  MAX
};
using QuePosition = TPosition;
enum class Hardware : uint8_t { GM, UB, L1, L0A, L0B, L0C, BIAS, FIXBUF };
enum class CacheMode { CACHE_MODE_DISABLE = 0, CACHE_MODE_NORMAL, CACHE_MODE_LAST, CACHE_MODE_PERSISTENT };
enum class DcciDst { CACHELINE_OUT = 0, CACHELINE_UB, CACHELINE_ALL, CACHELINE_ATOMIC };
enum class CacheLine { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };

}  // namespace AscendC

namespace twin {

inline Memory& memory_at(Core& core, AscendC::TPosition position) {
  using P = AscendC::TPosition;
  switch (position) {
    case P::VECIN:
    case P::VECOUT:
    case P::VECCALC:
    case P::LCM: return core.memory[kUb];
    case P::A1:
    case P::B1:
    case P::C1:
    case P::TSCM: return core.group->core[0].memory[kL1];
    case P::A2: return core.memory[kL0a];
    case P::B2: return core.memory[kL0b];
    case P::CO1: return core.memory[kL0c];
    case P::C2: return core.memory[kBias];
    case P::C2PIPE2GM: return core.memory[kFixbuf];
    default: give_up("no local memory belongs to position %d", (int)position);
  }
}

// A place in a local memory, without its element type.
struct View {
  Memory* memory;
  uint64_t offset;
};

// Packed pairs of 4-bit values count as two elements a byte, everything else as one element an item.
template <class T> constexpr int kPerItem = type_of<T> == E2M1X2 ? 2 : 1;

}  // namespace twin

namespace AscendC {

template <class T> class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;
  LocalTensor(TPosition position, uint32_t address, uint32_t size)
      : memory_(&twin::memory_at(*twin::current, position)), offset_(address), size_(size), position_(position) {}
  LocalTensor(twin::Memory* memory, uint64_t offset, uint32_t size, TPosition position, int32_t slot = -1)
      : memory_(memory), offset_(offset), size_(size), position_(position), slot_(slot) {}

  LocalTensor operator[](uint32_t elements) const {
    LocalTensor part = *this;
    part.offset_ += (uint64_t)elements * sizeof(T) / twin::kPerItem<T>;
    part.size_ = elements < size_ ? size_ - elements : 0;
    part.slot_ = -1;
    return part;
  }
  T GetValue(uint32_t index, TWIN_HERE) const {
    twin::Pipe& pipe = twin::begin(twin::kS, twin::op_GetValue, where);
    T value;
    memcpy(&value, twin::load(pipe, *memory_, offset_ + (uint64_t)index * sizeof(T), sizeof(T), "the tensor"),
           sizeof(T));
    twin::done(pipe, twin::op_GetValue, where, sizeof(T), 1);
    return value;
  }
  template <class V> void SetValue(uint32_t index, V value, TWIN_HERE) const {
    twin::Pipe& pipe = twin::begin(twin::kS, twin::op_SetValue, where);
    const T item = T(value);
    memcpy(twin::store(pipe, *memory_, offset_ + (uint64_t)index * sizeof(T), sizeof(T), "the tensor"), &item,
           sizeof(T));
    twin::done(pipe, twin::op_SetValue, where, sizeof(T), 1);
  }
  template <class U> LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(memory_, offset_,
                          (uint32_t)((uint64_t)size_ * sizeof(T) * twin::kPerItem<U> / twin::kPerItem<T> / sizeof(U)),
                          position_, slot_);
  }
  T* GetPhyAddr() const { return reinterpret_cast<T*>(memory_->data + offset_); }
  T* GetPhyAddr(uint32_t elements) const { return GetPhyAddr() + elements; }
  uint32_t GetSize() const { return size_; }
  void SetSize(uint32_t size) { size_ = size; }
  uint32_t GetLength() const { return size_ * (uint32_t)sizeof(T); }
  TPosition GetPosition() const { return position_; }

  twin::View view() const {
    if (memory_ == nullptr) twin::give_up("a LocalTensor is used that no queue, buffer or allocator has given out");
    return {memory_, offset_};
  }
  int32_t slot() const { return slot_; }

 private:
  twin::Memory* memory_ = nullptr;
  uint64_t offset_ = 0;
  uint32_t size_ = 0;
  TPosition position_ = TPosition::MAX;
  int32_t slot_ = -1;
};

template <class T> class GlobalTensor {
 public:
  using PrimType = T;
  void SetGlobalBuffer(T* address, uint64_t elements = ~0ull) { address_ = address, size_ = elements; }
  GlobalTensor operator[](uint64_t elements) const {
    GlobalTensor part = *this;
    part.address_ = address_ + elements / twin::kPerItem<T>;
    if (size_ != ~0ull) part.size_ = elements < size_ ? size_ - elements : 0;
    return part;
  }
  T GetValue(uint64_t index, TWIN_HERE) const {
    twin::Pipe& pipe = twin::begin(twin::kS, twin::op_GlobalGetValue, where);
    check(pipe, index * sizeof(T), sizeof(T), where);
    twin::global_access(pipe, address_ + index, sizeof(T), twin::kRead, "the tensor");
    twin::done(pipe, twin::op_GlobalGetValue, where, sizeof(T), 1);
    return address_[index];
  }
  void SetValue(uint64_t index, T value, TWIN_HERE) const {
    twin::Pipe& pipe = twin::begin(twin::kS, twin::op_GlobalSetValue, where);
    check(pipe, index * sizeof(T), sizeof(T), where);
    twin::global_access(pipe, address_ + index, sizeof(T), twin::kWrite, "the tensor");
    twin::done(pipe, twin::op_GlobalSetValue, where, sizeof(T), 1);
    address_[index] = value;
  }
  template <class U> GlobalTensor<U> ReinterpretCast() const {
    GlobalTensor<U> other;
    other.SetGlobalBuffer(reinterpret_cast<U*>(address_), size_ == ~0ull ? size_ : size_ * sizeof(T) / sizeof(U));
    return other;
  }
  const T* GetPhyAddr() const { return address_; }
  T* GetPhyAddr(uint64_t elements) const { return address_ + elements; }
  uint64_t GetSize() const { return size_; }
  void SetL2CacheHint(CacheMode) const {}

  // Whether [offset, offset + bytes) lies inside what SetGlobalBuffer was given.
  void check(const twin::Pipe& pipe, uint64_t offset, uint64_t bytes, twin::Where where) const {
    if (size_ == ~0ull || offset + bytes <= size_ * sizeof(T) / twin::kPerItem<T>) return;
    twin::give_up("%s at %s:%d reaches bytes [%llu, %llu) of a GlobalTensor of %llu elements of %d bytes",
                  twin::op_now(pipe), where.file, where.line, (unsigned long long)offset,
                  (unsigned long long)(offset + bytes), (unsigned long long)size_, (int)sizeof(T));
  }
  uint8_t* bytes() const { return reinterpret_cast<uint8_t*>(address_); }

 private:
  T* address_ = nullptr;
  uint64_t size_ = ~0ull;
};

inline int64_t GetBlockIdx() { return twin::current->block; }
inline int64_t GetBlockNum() { return twin::current->blocks; }
inline int64_t GetSubBlockIdx() { return twin::current->sub_block; }
inline int64_t GetSubBlockNum() { return twin::current->ratio; }
inline int64_t GetTaskRatio() { return twin::current->ratio; }

template <class T, CacheLine line = CacheLine::SINGLE_CACHE_LINE, DcciDst dst = DcciDst::CACHELINE_OUT>
inline void DataCacheCleanAndInvalid(const GlobalTensor<T>&, TWIN_HERE) {
  twin::Pipe& pipe = twin::begin(twin::kS, twin::op_DataCacheCleanAndInvalid, where);
  twin::done(pipe, twin::op_DataCacheCleanAndInvalid, where, 64, 1);
}

}  // namespace AscendC
