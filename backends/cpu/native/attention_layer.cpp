// attention_decode_layer: the op's default decomposition in one call, over scratch memory.
#include "kernels.h"

namespace di::DI_LEVEL {
namespace {

const di_tensor kNone{};

di_tensor matrix(void* data, int dtype, int64_t rows, int64_t width, int64_t row_stride) {
  return {data, dtype, DI_LAYOUT_STRIDED, -1, 2, {rows, width}, {row_stride, 1}};
}
di_tensor heads_of(const di_tensor& flat, int64_t heads) {
  const int64_t rows = flat.shape[0], all = flat.shape[1], width = all / heads;
  return {flat.data, flat.dtype, DI_LAYOUT_STRIDED, -1, 3, {rows, heads, width}, {flat.stride[0], width, 1}};
}
di_tensor first_rows(di_tensor x, int64_t rows) {
  if (!absent(x) && x.shape[0] > rows) x.shape[0] = rows;
  return x;
}

// A dense or quantised activation in scratch memory.
struct Activation {
  di_tensor values, scales = kNone;

  Activation(Scratch& scratch, bool quantised, int dtype, int64_t rows, int64_t width) {
    const int kind = quantised ? DI_U8 : dtype;
    values = matrix(scratch.bytes(rows * width * item_bytes(kind) + 64), kind, rows, width, width);
    if (quantised) scales = matrix(scratch.bytes(rows * (width / 32) + 64), DI_U8, rows, width / 32, width / 32);
  }
};

struct Call {
  di_error* e;

  template <size_t N, size_t I, size_t D>
  int operator()(di_kernel op, const di_tensor (&t)[N], const int64_t (&i)[I], const double (&d)[D]) const {
    const di_params p{i, d, (int32_t)I, (int32_t)D};
    return op(t, (int)N, &p, nullptr, nullptr, 0, e);
  }
  template <size_t N, size_t I>
  int ints(di_kernel op, const di_tensor (&t)[N], const int64_t (&i)[I]) const {
    const di_params p{i, nullptr, (int32_t)I, 0};
    return op(t, (int)N, &p, nullptr, nullptr, 0, e);
  }
  template <size_t N>
  int plain(di_kernel op, const di_tensor (&t)[N]) const {
    const di_params p{nullptr, nullptr, 0, 0};
    return op(t, (int)N, &p, nullptr, nullptr, 0, e);
  }
  template <size_t N>
  int real(di_kernel op, const di_tensor (&t)[N], double d) const {
    const di_params p{nullptr, &d, 0, 1};
    return op(t, (int)N, &p, nullptr, nullptr, 0, e);
  }
};

}  // namespace

#define DI_TRY(call) \
  if (int status = (call)) return status

// x, x_scale?, attn_in[A, H], q_norm, kv_norm, wq_b, sink, wo_a[G, L, K], wo_b, eps, positions, table, row_to_req,
// window_slots, window_base, window_origin, window_modulo, window_format, compressed?, block_table?, compressed_format,
// block_rows, rows?, scale, window_tokens, count?, window inout, out
int attention_decode_layer(DI_ARGS) {
  DI_NEED_CALL(26, 4, 2);
  const di_tensor &attn_in = t[2], &q_norm = t[4], &kv_norm = t[5], &wq_b = t[6], &sink = t[8], &wo_a = t[9];
  const di_tensor &table = t[14], &window = t[24];
  DI_NEED(t[0].ndim == 2 && t[25].ndim == 2 && is_stream(t[25]) && is_count(t[23]),
          "attention_decode_layer: x and out must be [T, H]");
  DI_NEED(attn_in.ndim == 2 && wq_b.ndim == 2 && wo_a.ndim == 3 && kv_norm.ndim == 1 && sink.ndim == 1,
          "attention_decode_layer: weights and vectors have wrong ranks");
  const int64_t rows = valid_rows(t[23], t[0].shape[0]), width = kv_norm.shape[0], lora = attn_in.shape[0] - width;
  const int64_t heads = sink.shape[0], all = heads * width, low_width = wo_a.shape[0] * wo_a.shape[1];
  DI_NEED(lora > 0 && wq_b.shape[0] == all && wq_b.shape[1] == lora && all % wo_a.shape[0] == 0,
          "attention_decode_layer: the weights' shapes do not fit each other");
  if (rows == 0) return DI_OK;
  const bool quantised = t[0].dtype == DI_U8;
  const int dtype = t[25].dtype;
  DI_NEED(!quantised || (lora % 32 == 0 && all % 32 == 0 && low_width % 32 == 0),
          "attention_decode_layer: quantised widths must be multiples of 32");
  const di_tensor x = first_rows(t[0], rows), x_scale = first_rows(t[1], rows), positions = first_rows(t[13], rows);
  const di_tensor slots = first_rows(t[16], rows), out = first_rows(t[25], rows);
  const Call call{e};
  Scratch scratch;
  const Activation joined(scratch, false, dtype, rows, lora + width), query(scratch, false, dtype, rows, all);
  const Activation attended(scratch, false, dtype, rows, all), latent(scratch, quantised, dtype, rows, lora);
  const di_tensor latent_raw = matrix(joined.values.data, dtype, rows, lora, lora + width);
  const di_tensor kv = matrix(static_cast<uint8_t*>(joined.values.data) + lora * item_bytes(dtype), dtype, rows, width,
                              lora + width);
  const di_tensor q = heads_of(query.values, heads), o = heads_of(attended.values, heads);
  const double eps = p->d[0];

  DI_TRY(call.plain(linear, {x, x_scale, attn_in, t[3], kNone, joined.values, kNone}));
  const di_tensor dense = quantised ? kNone : latent.values, codes = quantised ? latent.values : kNone;
  DI_TRY(call.real(rms_norm, {latent_raw, q_norm, kNone, dense, codes, latent.scales}, eps));
  DI_TRY(call.plain(linear, {latent.values, latent.scales, wq_b, t[7], kNone, query.values, kNone}));
  DI_TRY(call.ints(rope, {positions, table, kNone, q}, {0}));
  DI_TRY(call(write_kv, {kv, kv_norm, positions, table, slots, kNone, window, kNone}, {p->i[0], 0}, {eps}));
  memset(o.data, 0, rows * all * item_bytes(dtype));
  DI_TRY(call(sparse_attention,
              {q, window, t[17], t[18], t[19], t[20], t[21], first_rows(t[22], rows), first_rows(t[15], rows), positions,
               sink, kNone, o},
              {p->i[0], p->i[1], p->i[2], p->i[3]}, {p->d[1]}));
  DI_TRY(call.ints(rope, {positions, table, kNone, o}, {1}));
  const Activation low(scratch, quantised, dtype, rows, low_width);
  di_tensor flat = attended.values, flat_scale = kNone;
  if (quantised) {
    const Activation rounded(scratch, true, dtype, rows, all);
    DI_TRY(call.ints(quantise, {attended.values, kNone, rounded.values, rounded.scales, kNone}, {DI_FP8_32}));
    flat = rounded.values, flat_scale = rounded.scales;
  }
  DI_TRY(call.plain(grouped_linear, {flat, flat_scale, wo_a, t[10], kNone, low.values, low.scales}));
  return call.plain(linear, {low.values, low.scales, t[11], t[12], kNone, out, kNone});
}

}  // namespace di::DI_LEVEL
