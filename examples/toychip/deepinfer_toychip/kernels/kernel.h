// How a kernel of the toy chip is written: KERNEL(op) { ... } takes its arguments from `call` in the order of the op's card.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "deepinfer/hal.h"

namespace toy {

struct BadCall : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A tensor as code on the chip sees it. Sizes and strides are in elements.
struct Tensor : di_tensor {
  bool present() const { return dtype != DI_NONE; }
  int64_t rows() const { return shape[0]; }
  int64_t width() const { return shape[ndim - 1]; }

  /// Element offset of an index; dimensions that are not named are 0.
  int64_t offset(int64_t a, int64_t b = 0, int64_t c = 0) const {
    return a * stride[0] + (ndim > 1 ? b * stride[1] : 0) + (ndim > 2 ? c * stride[2] : 0);
  }
  template <class T>
  T* at(int64_t a, int64_t b = 0, int64_t c = 0) const {
    return static_cast<T*>(data) + offset(a, b, c);
  }
  int32_t i32(int64_t a, int64_t b = 0) const { return *at<int32_t>(a, b); }
};

/// A weight in the checkpoint's own layout: values, and scales where the format has them.
struct Weight {
  Tensor values, scales;
};

/// The arguments of one call, handed out in signature order.
class Call {
 public:
  Call(const di_tensor* tensors, int count, const di_params* scalars) : tensors_(tensors), count_(count), scalars_(scalars) {}

  Tensor tensor();
  Weight weight() {
    Tensor values = tensor();
    return {values, tensor()};
  }
  int64_t integer() {
    if (integers_ == scalars_->n_i) throw BadCall("an integer argument is missing");
    return scalars_->i[integers_++];
  }
  float number() {
    if (numbers_ == scalars_->n_d) throw BadCall("a float argument is missing");
    return static_cast<float>(scalars_->d[numbers_++]);
  }

 private:
  const di_tensor* tensors_;
  int count_, next_ = 0, integers_ = 0, numbers_ = 0;
  const di_params* scalars_;
};

/// Runs a kernel body and turns what it throws into the status and sentence of the C ABI.
int run(void (*body)(Call&), const di_tensor* t, int n, const di_params* p, di_error* e);

/// Rows that may be read and written: the device count clamped to 0..rows, or all of them.
inline int64_t valid_rows(const Tensor& count, int64_t rows) {
  return count.present() ? std::clamp<int64_t>(count.i32(0), 0, rows) : rows;
}

}  // namespace toy

#define KERNEL(op)                                                                                              \
  static void body_##op(toy::Call& call);                                                                       \
  extern "C" int di_##op(const di_tensor* t, int n, const di_params* p, void*, void*, size_t, di_error* e) {   \
    return toy::run(&body_##op, t, n, p, e);                                                                    \
  }                                                                                                             \
  static void body_##op(toy::Call& call)
