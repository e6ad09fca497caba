// rms_norm, rope, quantise and dequantise.
#include "norm.h"

namespace di::DI_LEVEL {

constexpr int64_t kRowsPerTask = 8;

// Runs body(row, working row) for every row, a few rows a task.
template <class F>
static void each_row(int64_t rows, int64_t width, double item_ns, F body) {
  parallel((rows + kRowsPerTask - 1) / kRowsPerTask, rows * width * item_ns, [&](int64_t task) {
    Scratch scratch;
    float* x = scratch.floats(round_up(width, 16));
    for (int64_t r = task * kRowsPerTask; r < rows && r < (task + 1) * kRowsPerTask; ++r) body(r, x);
  });
}

// x ~[T, N], weight [N], eps, count?, out ~[T, N]?, out_codes?, out_scales?
int rms_norm(DI_ARGS) {
  DI_NEED_CALL(6, 0, 1);
  const di_tensor &x = t[0], &weight = t[1], &count = t[2], &out = t[3], &codes = t[4], &scales = t[5];
  DI_NEED(x.ndim == 2 && is_stream(x) && last_contiguous(x), "rms_norm: x must be [T, N] bf16 or f32");
  const int64_t rows = x.shape[0], width = x.shape[1];
  DI_NEED(is_norm_weight(weight, width) && weight.shape[0] == width, "rms_norm: weight must be [%ld]", (long)width);
  DI_NEED(absent(out) || (is_stream(out) && is_matrix(out, rows, width)), "rms_norm: out must be [T, %ld] bf16 or f32",
          (long)width);
  DI_NEED(are_codes(codes, scales, rows, width), "rms_norm: out_codes must be [T, N] uint8 with scales [T, N/32]");
  DI_NEED(is_count(count), "rms_norm: count must be int32");
  const int dtype = absent(out) ? x.dtype : out.dtype;
  each_row(valid_rows(count, rows), width, 0.2, [&](int64_t r, float* y) {
    read_row(row_at(x, r), x.dtype, width, y);
    norm_row(y, width, weight, (float)p->d[0]);
    put_row(y, width, dtype, r, out, codes, scales);
  });
  return DI_OK;
}

// positions i32[T], table f32[P, r], inverse, count?, x ~[T, h, D] inout
int rope(DI_ARGS) {
  DI_NEED_CALL(4, 1, 0);
  const di_tensor &positions = t[0], &table = t[1], &count = t[2], &x = t[3];
  DI_NEED(x.ndim == 3 && is_stream(x) && last_contiguous(x), "rope: x must be [T, h, D] bf16 or f32");
  const int64_t rows = x.shape[0], heads = x.shape[1], dim = x.shape[2];
  DI_NEED(is_rope_table(table, dim), "rope: the table must be float32 [P, r] with even r <= %ld", (long)dim);
  DI_NEED(is_vector(positions, DI_I32, rows), "rope: positions must be int32 [T]");
  DI_NEED(is_count(count), "rope: count must be int32");
  const int64_t width = table.shape[1], most = table.shape[0], size = item_bytes(x.dtype);
  const bool inverse = p->i[0] != 0;
  each_row(valid_rows(count, rows), heads * width, 0.5, [&](int64_t r, float* y) {
    const int32_t position = data_of<int32_t>(positions)[r];
    if (position < 0 || position >= most) return;
    const float* angles = reinterpret_cast<const float*>(row_at(table, position));
    for (int64_t h = 0; h < heads; ++h) {
      uint8_t* tail = row_at(x, r) + (h * x.stride[1] + dim - width) * size;
      read_row(tail, x.dtype, width, y);
      rotate_row(y, width, angles, inverse);
      write_row(tail, x.dtype, width, y);
    }
  });
  return DI_OK;
}

// Codes and scales of `width` values in `format`; `other` holds the dense rows.
static bool are_format_rows(const di_tensor& codes, const di_tensor& scales, int format, int64_t rows, int64_t width) {
  const int64_t values = is_dense_format(format) ? -1 : format_value_bytes(format, width);
  return values > 0 && codes.dtype == DI_U8 && scales.dtype == DI_U8 && is_matrix(codes, rows, values) &&
         is_matrix(scales, rows, format_scale_bytes(format, width));
}

// x ~[T, N], format, count?, codes, scales, flags u8[T]?
int quantise(DI_ARGS) {
  DI_NEED_CALL(5, 1, 0);
  const di_tensor &x = t[0], &count = t[1], &codes = t[2], &scales = t[3], &flags = t[4];
  const int format = (int)p->i[0];
  DI_NEED(x.ndim == 2 && is_stream(x) && last_contiguous(x), "quantise: x must be [T, N] bf16 or f32");
  const int64_t rows = x.shape[0], width = x.shape[1];
  DI_NEED(are_format_rows(codes, scales, format, rows, width),
          "quantise: codes and scales do not fit rows of %ld values", (long)width);
  DI_NEED(absent(flags) || is_vector(flags, DI_U8, rows), "quantise: flags must be uint8 [T]");
  DI_NEED(is_count(count), "quantise: count must be int32");
  each_row(valid_rows(count, rows), width, 0.2, [&](int64_t r, float* y) {
    read_row(row_at(x, r), x.dtype, width, y);
    const bool bad = quantise_row(y, width, format, row_at(codes, r), row_at(scales, r));
    if (bad && !absent(flags)) data_of<uint8_t>(flags)[r] |= 1;
  });
  return DI_OK;
}

// codes, scales, format, count?, out ~[T, N]
int dequantise(DI_ARGS) {
  DI_NEED_CALL(4, 1, 0);
  const di_tensor &codes = t[0], &scales = t[1], &count = t[2], &out = t[3];
  const int format = (int)p->i[0];
  DI_NEED(out.ndim == 2 && is_stream(out) && last_contiguous(out), "dequantise: out must be [T, N] bf16 or f32");
  const int64_t rows = out.shape[0], width = out.shape[1];
  DI_NEED(are_format_rows(codes, scales, format, rows, width),
          "dequantise: codes and scales do not fit rows of %ld values", (long)width);
  DI_NEED(is_count(count), "dequantise: count must be int32");
  each_row(valid_rows(count, rows), width, 0.2, [&](int64_t r, float* y) {
    dequantise_row(row_at(codes, r), row_at(scales, r), width, format, y);
    write_row(row_at(out, r), out.dtype, width, y);
  });
  return DI_OK;
}

}  // namespace di::DI_LEVEL
