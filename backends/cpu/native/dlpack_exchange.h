// The part of DLPack's C exchange table that reads a tensor: declarations of its stable ABI (major version 1), so that
// no header of another project is needed to build.
#pragma once

#include <Python.h>
#include <structmember.h>

#include "deepinfer/hal.h"

namespace di {

struct BorrowedTensor {  // DLTensor
  void* data;
  struct {
    int32_t type, index;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeTable {  // DLPackExchangeAPI
  struct {
    uint32_t major, minor;
  } version;
  ExchangeTable* older;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  int (*borrow)(void* object, BorrowedTensor* out);
  void* current_stream;
};

class TensorReader {
 public:
  void attach(const ExchangeTable* table) {
    while (table != nullptr && table->version.major != 1) table = table->older;
    borrow_ = table == nullptr ? nullptr : table->borrow;
    if (borrow_ == nullptr) throw std::runtime_error("this torch offers no DLPack exchange table of version 1");
  }

  // False with or without a Python error set: not a tensor whose memory can be read.
  bool read(PyObject* object, di_tensor* to) const {
    BorrowedTensor from;
    if (borrow_(object, &from) != 0 || from.ndim > DI_MAX_DIMS) return false;
    to->data = static_cast<char*>(from.data) + from.byte_offset;
    to->dtype = dtype_of(from);
    to->layout = DI_LAYOUT_STRIDED;
    to->device = from.device.type == 1 ? -1 : from.device.index;
    to->ndim = from.ndim;
    for (int i = 0; i < from.ndim; ++i) to->shape[i] = from.shape[i], to->stride[i] = from.strides[i];
    return from.device.type == 1;
  }

 private:
  static int dtype_of(const BorrowedTensor& x) {
    enum { kInt = 0, kUnsigned = 1, kFloat = 2, kBrain = 4, kBool = 6 };
    const int code = x.dtype.code, bits = x.dtype.bits;
    if (code == kFloat) return bits == 32 ? DI_F32 : bits == 64 ? DI_F64 : DI_OTHER;
    if (code == kBrain) return bits == 16 ? DI_BF16 : DI_OTHER;
    if (code == kUnsigned || code == kBool) return bits == 8 ? DI_U8 : DI_OTHER;
    if (code == kInt) return bits == 32 ? DI_I32 : bits == 64 ? DI_I64 : DI_OTHER;
    return DI_OTHER;
  }

  int (*borrow_)(void*, BorrowedTensor*) = nullptr;
};

}  // namespace di
