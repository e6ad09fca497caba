// linear, grouped_linear and grouped_gemm.
#include "gemm.h"

namespace di::DI_LEVEL {
namespace {

constexpr int64_t kRowBlock = 32;

// y = x W^T for `groups` independent column groups of x and of the result.
void multiply(const di_tensor& x, const di_tensor& scale, const di_tensor& w, int64_t rows, int64_t groups,
              int64_t width, int64_t depth, const Sink& sink) {
  if (rows == 0 || width == 0) return;
  Scratch scratch;
  int64_t lda;
  const float* a = expand_rows(x, scale, rows, groups * depth, scratch, &lda);
  const int64_t panels = panel_count(width), step = rows <= 2 ? 8 : 4, chunks = (panels + step - 1) / step;
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  parallel(groups * chunks * blocks, product_ns(rows, groups * width, depth), [&](int64_t task) {
    const int64_t block = task % blocks, chunk = task / blocks % chunks, g = task / blocks / chunks;
    const Product product{a + g * depth, lda, data_of<float>(w) + g * panels * depth * 16, depth, width};
    const int64_t last_row = (block + 1) * kRowBlock < rows ? (block + 1) * kRowBlock : rows;
    const int64_t last_panel = (chunk + 1) * step < panels ? (chunk + 1) * step : panels;
    product.run(block * kRowBlock, last_row, chunk * step, last_panel, sink, g * width);
  });
}

}  // namespace

// x ~, x_scale?, weight[N, K], count?, out ~[T, N], out_scale?
int linear(DI_ARGS) {
  DI_NEED_CALL(7, 0, 0);
  const di_tensor &x = t[0], &scale = t[1], &w = t[2], &count = t[4], &out = t[5], &out_scale = t[6];
  DI_NEED(is_panels(w, 2), "linear: the weight was not prepared by this backend");
  const int64_t width = w.shape[0], depth = w.shape[1], rows = x.shape[0];
  DI_NEED(is_activation(x, scale, rows, depth), "linear: x must be [T, %ld] bf16 or f32, or fp8_32 codes with scales",
          (long)depth);
  DI_NEED(is_result(out, out_scale, rows, width, width),
          "linear: out must be [T, %ld] bf16 or f32, or fp8_32 codes with scales", (long)width);
  DI_NEED(is_count(count), "linear: count must be int32");
  multiply(x, scale, w, valid_rows(count, rows), 1, width, depth, sink_of(out, out_scale));
  return DI_OK;
}

// x ~[T, G * K], x_scale?, weight[G, N, K], count?, out ~[T, G * N], out_scale?
int grouped_linear(DI_ARGS) {
  DI_NEED_CALL(7, 0, 0);
  const di_tensor &x = t[0], &scale = t[1], &w = t[2], &count = t[4], &out = t[5], &out_scale = t[6];
  DI_NEED(is_panels(w, 3), "grouped_linear: the weight was not prepared by this backend");
  const int64_t groups = w.shape[0], width = w.shape[1], depth = w.shape[2], rows = x.shape[0], all = groups * width;
  DI_NEED(is_activation(x, scale, rows, groups * depth),
          "grouped_linear: x must be [T, %ld] bf16 or f32, or fp8_32 codes with scales", (long)(groups * depth));
  const bool shared_scales = out.dtype == DI_U8 && width % 32 != 0;  // a scale spans the ends of two groups
  DI_NEED(is_result(out, out_scale, rows, all, shared_scales ? all : width),
          "grouped_linear: out must be [T, %ld] bf16 or f32, or fp8_32 codes with scales", (long)all);
  DI_NEED(is_count(count), "grouped_linear: count must be int32");
  const int64_t valid = valid_rows(count, rows);
  const Sink sink = sink_of(out, out_scale);
  if (!shared_scales) {
    multiply(x, scale, w, valid, groups, width, depth, sink);
    return DI_OK;
  }
  Scratch scratch;
  float* sums = scratch.floats(valid * all);
  multiply(x, scale, w, valid, groups, width, depth, {reinterpret_cast<uint8_t*>(sums), all * 4, DI_F32, nullptr, 0});
  for (int64_t row = 0; row < valid; ++row) sink.put(row, 0, all, sums + row * all);
  return DI_OK;
}

// x [M, K], x_scale?, weight[E, N, K], offsets i32[E + 1], out [M, N], out_scale?
int grouped_gemm(DI_ARGS) {
  DI_NEED_CALL(7, 0, 0);
  const di_tensor &x = t[0], &scale = t[1], &w = t[2], &offsets = t[4], &out = t[5], &out_scale = t[6];
  DI_NEED(is_panels(w, 3), "grouped_gemm: the weight was not prepared by this backend");
  const int64_t experts = w.shape[0], width = w.shape[1], depth = w.shape[2], most = x.shape[0];
  DI_NEED(is_activation(x, scale, most, depth),
          "grouped_gemm: x must be [M, %ld] bf16 or f32, or fp8_32 codes with scales", (long)depth);
  DI_NEED(is_vector(offsets, DI_I32, experts + 1), "grouped_gemm: offsets must be int32 [%ld]", (long)experts + 1);
  DI_NEED(is_result(out, out_scale, most, width, width),
          "grouped_gemm: out must be [M, %ld] bf16 or f32, or fp8_32 codes with scales", (long)width);
  expert_products(x, scale, w, data_of<int32_t>(offsets), most, sink_of(out, out_scale));
  return DI_OK;
}

}  // namespace di::DI_LEVEL
