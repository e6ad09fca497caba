// What a call of linear or grouped_linear must look like before its pointers are used.
#pragma once

#include "di_launch.cuh"

namespace di::linear {

enum Argument { kX, kXScale, kWeight, kWeightScale, kCount, kOut, kOutScale, kArguments };

// A matrix [rows, columns] whose columns follow one another. Where it has one row, its stride says nothing.
inline bool is_matrix(const di_tensor& t, int64_t rows, int64_t columns) {
  return t.ndim == 2 && t.shape[0] == rows && t.shape[1] == columns && (columns <= 1 || rows == 0 || t.stride[1] == 1);
}
inline int64_t row_stride(const di_tensor& t) { return t.shape[0] > 1 ? t.stride[0] : t.shape[1]; }

// A weight's values or scales without gaps: [groups, rows, columns], without groups for linear.
inline bool is_whole(const di_tensor& t, int64_t groups, int64_t rows, int64_t columns) {
  const int last = t.ndim - 1;
  if (last < 1 || t.shape[last] != columns || t.shape[last - 1] != rows || (last == 2 && t.shape[0] != groups)) return false;
  if (rows == 0 || columns == 0) return true;
  const bool inner = (columns == 1 || t.stride[last] == 1) && (rows == 1 || t.stride[last - 1] == columns);
  return inner && (last == 1 || groups == 1 || t.stride[0] == rows * columns);
}

// DI_OK, or why the call is refused. `codes`: of fp8_32 rows and FP8 weights of 32 x 32 blocks.
inline int check_call(const char* op, const di_tensor* t, bool codes, int64_t groups, int64_t n, int64_t k, di_error* e) {
  const int64_t rows = t[kX].shape[0], columns = groups * k, features = groups * n, blocks = ceil_div(n, 32), scales = ceil_div(k, 32);
  if (rows > INT32_MAX || columns > INT32_MAX || features > INT32_MAX)
    return refuse(e, DI_UNSUPPORTED, "%s takes at most 2^31 - 1 rows, columns and features, got %lld, %lld and %lld", op,
                  static_cast<long long>(rows), static_cast<long long>(columns), static_cast<long long>(features));
  if (!is_matrix(t[kX], rows, columns) || !is_matrix(t[kOut], rows, features))
    return refuse(e, DI_BAD_CALL, "%s needs x [%lld, %lld] and out [%lld, %lld], rows without gaps, got [%lld, %lld] and [%lld, %lld]", op,
                  static_cast<long long>(rows), static_cast<long long>(columns), static_cast<long long>(rows),
                  static_cast<long long>(features), static_cast<long long>(t[kX].shape[0]), static_cast<long long>(t[kX].shape[1]),
                  static_cast<long long>(t[kOut].shape[0]), static_cast<long long>(t[kOut].shape[1]));
  if (codes && (t[kXScale].dtype != DI_U8 || !is_matrix(t[kXScale], rows, columns / 32)))
    return refuse(e, DI_BAD_CALL, "%s needs x_scale u8 [%lld, %lld]", op, static_cast<long long>(rows), static_cast<long long>(columns / 32));
  if (!is_whole(t[kWeight], groups, n, k) || (codes && !is_whole(t[kWeightScale], groups, blocks, scales)))
    return refuse(e, DI_UNSUPPORTED, "%s takes a weight and its scales without gaps", op);
  if (present(t[kCount]) && (t[kCount].dtype != DI_I32 || t[kCount].data == nullptr))
    return refuse(e, DI_BAD_CALL, "%s needs count as i32", op);
  if (t[kOut].dtype == DI_U8 && (t[kOutScale].dtype != DI_U8 || !is_matrix(t[kOutScale], rows, features / 32)))
    return refuse(e, DI_BAD_CALL, "%s needs out_scale u8 [%lld, %lld]", op, static_cast<long long>(rows), static_cast<long long>(features / 32));
  return DI_OK;
}

}  // namespace di::linear
