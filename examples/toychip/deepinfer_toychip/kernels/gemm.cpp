// GEMM: each weight row is decoded once and multiplied with every token row. A result depends on its two rows alone.
#include "numeric.h"

using namespace toy;

namespace {

/// out[t, column + n] = x[t] . W[e, n] for rows first..last-1; x holds their `k` decoded values.
void multiply(const std::vector<float>& x, int64_t rows, int64_t x_stride, int64_t x_offset, const Weight& weight, int64_t e,
              std::vector<float>& out, int64_t out_stride, int64_t out_offset) {
  const Tensor& w = weight.values;
  int64_t n = w.shape[w.ndim - 2], k = w.width();
  std::vector<float> row(k);
  for (int64_t i = 0; i < n && rows; ++i) {
    weight_row(weight, e, i, row.data());
    for (int64_t t = 0; t < rows; ++t) {
      out[t * out_stride + out_offset + i] = dot(&x[t * x_stride + x_offset], row.data(), k);
    }
  }
}

std::vector<float> decoded(const Tensor& x, const Tensor& scale, int64_t first, int64_t rows) {
  std::vector<float> values(rows * x.width());
  for (int64_t t = 0; t < rows; ++t) load_row(x, scale, first + t, &values[t * x.width()]);
  return values;
}

void store_rows(const Tensor& out, const Tensor& scale, int64_t first, int64_t rows, const std::vector<float>& values) {
  for (int64_t t = 0; t < rows; ++t) store_row(out, scale, first + t, &values[t * out.width()]);
}

}  // namespace

// [linear]
KERNEL(linear) {
  Tensor x = call.tensor(), x_scale = call.tensor();
  Weight weight = call.weight();
  Tensor count = call.tensor(), out = call.tensor(), out_scale = call.tensor();
  int64_t rows = valid_rows(count, x.rows());
  std::vector<float> values = decoded(x, x_scale, 0, rows), result(rows * out.width());
  multiply(values, rows, x.width(), 0, weight, 0, result, out.width(), 0);
  store_rows(out, out_scale, 0, rows, result);
}
// [/linear]

KERNEL(grouped_linear) {
  Tensor x = call.tensor(), x_scale = call.tensor();
  Weight weight = call.weight();
  Tensor count = call.tensor(), out = call.tensor(), out_scale = call.tensor();
  int64_t rows = valid_rows(count, x.rows()), groups = weight.values.shape[0];
  std::vector<float> values = decoded(x, x_scale, 0, rows), result(rows * out.width());
  for (int64_t g = 0; g < groups; ++g) {
    multiply(values, rows, x.width(), g * weight.values.width(), weight, g, result, out.width(), g * weight.values.shape[1]);
  }
  store_rows(out, out_scale, 0, rows, result);
}

KERNEL(grouped_gemm) {
  Tensor x = call.tensor(), x_scale = call.tensor();
  Weight weight = call.weight();
  Tensor offsets = call.tensor(), out = call.tensor(), out_scale = call.tensor();
  for (int64_t e = 0; e < weight.values.shape[0]; ++e) {
    int64_t first = offsets.i32(e), rows = offsets.i32(e + 1) - first;
    if (rows <= 0) continue;
    std::vector<float> values = decoded(x, x_scale, first, rows), result(rows * out.width());
    multiply(values, rows, x.width(), 0, weight, e, result, out.width(), 0);
    store_rows(out, out_scale, first, rows, result);
  }
}
