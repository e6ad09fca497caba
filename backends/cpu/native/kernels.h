// What every kernel file needs: reading di_tensor arguments, refusing bad calls, rows as float32, and sharing work.
#pragma once

#include <stdarg.h>
#include <stdio.h>

#include "pool.h"
#include "rowformat.h"

#define DI_ARGS const di_tensor *t, int n, const di_params *p, void *, void *, size_t, di_error *e

namespace di::DI_LEVEL {

#define DI_OP(name) int name(DI_ARGS);
#include "ops.def"
#undef DI_OP

__attribute__((cold, noinline, format(printf, 3, 4))) static inline int fail(di_error* e, int status, const char* text,
                                                                             ...) {
  va_list rest;
  va_start(rest, text);
  vsnprintf(e->message, sizeof e->message, text, rest);
  va_end(rest);
  return status;
}

// Kernels check what memory safety needs and nothing more: the card's full check runs when a call is bound.
#define DI_NEED(condition, ...)                                                      \
  do {                                                                               \
    if (__builtin_expect(!(condition), 0)) return fail(e, DI_BAD_CALL, __VA_ARGS__); \
  } while (0)
#define DI_NEED_CALL(tensors, ints, doubles)                                                                    \
  DI_NEED(n == (tensors) && p->n_i == (ints) && p->n_d == (doubles),                                            \
          "%s takes %d tensors, %d integers and %d reals; got %d, %d, %d", __func__, tensors, ints, doubles, n, \
          p->n_i, p->n_d)

DI_INLINE bool absent(const di_tensor& x) { return x.dtype == DI_NONE; }
DI_INLINE bool is_stream(const di_tensor& x) { return x.dtype == DI_BF16 || x.dtype == DI_F32; }
DI_INLINE int64_t item_bytes(int dtype) {
  return dtype == DI_U8 ? 1 : dtype == DI_BF16 ? 2 : dtype == DI_I64 || dtype == DI_F64 ? 8 : 4;
}

DI_INLINE bool last_contiguous(const di_tensor& x) {
  return x.ndim == 0 || x.shape[x.ndim - 1] <= 1 || x.stride[x.ndim - 1] == 1;
}

// A tensor whose dimensions but the last may be strided: rows of `width` items.
DI_INLINE bool is_matrix(const di_tensor& x, int64_t rows, int64_t width) {
  return x.ndim == 2 && x.shape[0] >= rows && x.shape[1] == width && last_contiguous(x);
}
DI_INLINE bool is_vector(const di_tensor& x, int dtype, int64_t size) {
  return x.dtype == dtype && x.ndim == 1 && x.shape[0] >= size && last_contiguous(x);
}
// Contiguous in full, with at least `items` items.
DI_INLINE bool is_packed(const di_tensor& x, int64_t items) {
  int64_t expected = 1;
  bool packed = true;
  for (int i = x.ndim - 1; i >= 0; --i) {
    packed = packed && (x.shape[i] <= 1 || x.stride[i] == expected);
    expected *= x.shape[i];
  }
  return (packed || expected == 0) && expected >= items;
}
DI_INLINE bool is_packed(const di_tensor& x, int dtype, int64_t items) {
  return x.dtype == dtype && is_packed(x, items);
}

DI_INLINE uint8_t* row_at(const di_tensor& x, int64_t row) {
  return static_cast<uint8_t*>(x.data) + row * x.stride[0] * item_bytes(x.dtype);
}
template <class T>
DI_INLINE T* data_of(const di_tensor& x) {
  return static_cast<T*>(x.data);
}

// Device count of valid rows, clamped to the tensor's; all rows when absent.
DI_INLINE bool is_count(const di_tensor& x) { return absent(x) || (x.dtype == DI_I32 && is_packed(x, 1)); }
DI_INLINE int64_t valid_rows(const di_tensor& count, int64_t rows) {
  if (absent(count)) return rows;
  int64_t valid = *data_of<int32_t>(count);
  return valid < 0 ? 0 : valid < rows ? valid : rows;
}

DI_INLINE float item(const void* row, int dtype, int64_t i) {
  return dtype == DI_BF16 ? bf16_value(static_cast<const uint16_t*>(row)[i]) : static_cast<const float*>(row)[i];
}
DI_INLINE void set_item(void* row, int dtype, int64_t i, float x) {
  if (dtype == DI_BF16)
    static_cast<uint16_t*>(row)[i] = to_bf16(x);
  else
    static_cast<float*>(row)[i] = x;
}

// What write_row then read_row would give.
DI_INLINE void round_row(int dtype, int64_t width, float* x) {
  if (dtype != DI_BF16) return;
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(x + i, round_bf16(load(x + i)));
  for (; i < width; ++i) x[i] = bf16_value(to_bf16(x[i]));
}
DI_INLINE void clear_tail(float* x, int64_t width) {  // zeroes up to the next multiple of 16
  for (int64_t i = width; i % 16; ++i) x[i] = 0.0f;
}
DI_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

template <class F>
static inline void parallel(int64_t tasks, double cost_ns, F body) {
  parallel_for(tasks, cost_ns, [](void* f, int64_t task) { (*static_cast<F*>(f))(task); }, &body);
}

}  // namespace di::DI_LEVEL
