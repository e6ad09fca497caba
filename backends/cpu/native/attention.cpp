// sparse_attention and draft_attention.
#include "attention.h"

namespace di::DI_LEVEL {
namespace {

constexpr int64_t kNeighbours = 8;  // query rows of a task: those of one request decode their common keys once

int open_window(const char* op, const di_tensor* t, int64_t format, int64_t width, int64_t tokens, Window* window,
                di_error* e) {
  DI_NEED(open_cache(t[0], format, width, 0, &window->cache), "%s: window cannot hold rows of %ld values", op,
          (long)width);
  const int64_t requests = t[1].ndim == 1 ? t[1].shape[0] : 0;
  DI_NEED(is_vector(t[1], DI_I32, requests) && is_vector(t[2], DI_I32, requests) && is_vector(t[3], DI_I32, requests),
          "%s: window_base, window_origin and window_modulo must be int32 [R]", op);
  DI_NEED(tokens >= 0, "%s: window_tokens must not be negative", op);
  window->base = data_of<int32_t>(t[1]), window->origin = data_of<int32_t>(t[2]),
  window->modulo = data_of<int32_t>(t[3]);
  window->requests = requests, window->tokens = tokens;
  return DI_OK;
}

bool is_heads(const di_tensor& x, int64_t rows, int64_t heads, int64_t dim) {
  return is_stream(x) && x.ndim == 3 && x.shape[0] >= rows && x.shape[1] == heads && x.shape[2] == dim &&
         last_contiguous(x);
}

// [heads][dim] float32 of one row of a [T, h, D] view.
void read_heads(const di_tensor& x, int64_t row, float* q) {
  for (int64_t h = 0; h < x.shape[1]; ++h)
    read_row(row_at(x, row) + h * x.stride[1] * item_bytes(x.dtype), x.dtype, x.shape[2], q + h * x.shape[2]);
}
void write_heads(const di_tensor& x, int64_t row, const float* o) {
  for (int64_t h = 0; h < x.shape[1]; ++h)
    write_row(row_at(x, row) + h * x.stride[1] * item_bytes(x.dtype), x.dtype, x.shape[2], o + h * x.shape[2]);
}

double attention_ns(int64_t rows, int64_t keys, int64_t heads, int64_t dim) {
  return rows * keys * dim * (0.04 + heads * 0.02);
}

}  // namespace

// q, window, base, origin, modulo, window_format, compressed?, block_table?, compressed_format, block_rows, rows?,
// row_to_req, positions, sink, scale, window_tokens, count?, out
int sparse_attention(DI_ARGS) {
  DI_NEED_CALL(13, 4, 1);
  const di_tensor &q = t[0], &compressed = t[5], &table = t[6], &selected = t[7], &owner = t[8], &positions = t[9],
                  &sink = t[10];
  const di_tensor &count = t[11], &out = t[12];
  DI_NEED(q.ndim == 3, "sparse_attention: q must be [T, h, D]");
  const int64_t all = q.shape[0], heads = q.shape[1], dim = q.shape[2];
  DI_NEED(is_heads(q, all, heads, dim) && is_heads(out, all, heads, dim) && dim % 16 == 0,
          "sparse_attention: q and out must be [T, h, D] bf16 or f32, D a multiple of 16");
  Window window;
  if (int status = open_window("sparse_attention", t + 1, p->i[0], dim, p->i[3], &window, e)) return status;
  Cache pages;
  const bool paged = !absent(selected);
  DI_NEED(
      !paged || (open_cache(compressed, p->i[1], dim, p->i[2], &pages) && table.dtype == DI_I32 && table.ndim == 2 &&
                 last_contiguous(table) && selected.dtype == DI_I32 && is_matrix(selected, all, selected.shape[1])),
      "sparse_attention: rows need a compressed cache of rows of %ld values and an int32 block_table", (long)dim);
  DI_NEED(is_vector(owner, DI_I32, all) && is_vector(positions, DI_I32, all),
          "sparse_attention: row_to_req and positions must be int32 [T]");
  DI_NEED(is_vector(sink, DI_F32, heads) && is_count(count), "sparse_attention: sink must be float32 [h]");
  const int64_t rows = valid_rows(count, all), k = paged ? selected.shape[1] : 0;
  const float scale = (float)p->d[0];
  const int32_t *request_of = data_of<int32_t>(owner), *position_of = data_of<int32_t>(positions);
  const int64_t most = window.tokens + k;
  parallel((rows + kNeighbours - 1) / kNeighbours, attention_ns(rows, most, heads, dim), [&](int64_t task) {
    Scratch scratch;
    Key* keys = static_cast<Key*>(scratch.bytes(most * sizeof(Key)));
    float *x = scratch.floats(heads * dim), *o = scratch.floats(heads * dim);
    const int64_t first = task * kNeighbours, last = first + kNeighbours < rows ? first + kNeighbours : rows;
    auto same = [&](int64_t a, int64_t b) { return a >= first && b < last && request_of[a] == request_of[b]; };
    bool any = false;
    for (int64_t row = first; row + 1 < last; ++row) any |= same(row, row + 1);
    Decoded decoded(scratch, dim, most, any);
    for (int64_t row = first; row < last; ++row) {
      const int64_t request = request_of[row], position = position_of[row];
      if (request < 0 || request >= window.requests || position < 0) continue;
      int64_t found = 0;
      window.add(request, position, keys, &found);
      for (int64_t j = 0; j < k; ++j) {
        const int64_t one = reinterpret_cast<const int32_t*>(row_at(selected, row))[j];
        if (one < 0) break;
        add_key(pages, paged_slot(pages, table, request, one), keys, &found);
      }
      read_heads(q, row, x);
      const bool shares = same(row - 1, row) || same(row, row + 1);
      attend(x, heads, dim, keys, found, data_of<float>(sink), heads, scale, o, shares ? &decoded : nullptr);
      write_heads(out, row, o);
    }
  });
  return DI_OK;
}

// q [R * B, h, D], window, base, origin, modulo, window_format, anchor i32[R], draft_kv u8[R * B, row_bytes],
// draft_block, sink, scale, window_tokens, count? (requests), out
int draft_attention(DI_ARGS) {
  DI_NEED_CALL(10, 3, 1);
  const di_tensor &q = t[0], &anchor = t[5], &fresh = t[6], &sink = t[7], &count = t[8], &out = t[9];
  DI_NEED(q.ndim == 3 && p->i[1] >= 1, "draft_attention: q must be [R * B, h, D], draft_block at least 1");
  const int64_t all = q.shape[0], heads = q.shape[1], dim = q.shape[2], block = p->i[1];
  DI_NEED(is_heads(q, all, heads, dim) && is_heads(out, all, heads, dim) && dim % 16 == 0,
          "draft_attention: q and out must be [R * B, h, D] bf16 or f32, D a multiple of 16");
  Window window;
  if (int status = open_window("draft_attention", t + 1, p->i[0], dim, p->i[2], &window, e)) return status;
  Cache drafts;
  DI_NEED(open_cache(fresh, p->i[0], dim, 0, &drafts), "draft_attention: draft_kv cannot hold rows of %ld values",
          (long)dim);
  DI_NEED(anchor.ndim == 1 && is_vector(anchor, DI_I32, 0) && anchor.shape[0] * block <= all,
          "draft_attention: anchor must be int32 [R]");
  DI_NEED(is_vector(sink, DI_F32, heads) && is_count(count), "draft_attention: sink must be float32 [h]");
  const int64_t requests = valid_rows(count, anchor.shape[0]);
  parallel(requests, attention_ns(requests, window.tokens + block, heads * block, dim), [&](int64_t r) {
    const int64_t last = data_of<int32_t>(anchor)[r];
    if (last < 0) return;
    Scratch scratch;
    Key* keys = static_cast<Key*>(scratch.bytes((window.tokens + block) * sizeof(Key)));
    float *x = scratch.floats(block * heads * dim), *o = scratch.floats(block * heads * dim);
    int64_t found = 0;
    window.add(r, last, keys, &found);
    for (int64_t i = 0; i < block; ++i) {
      add_key(drafts, r * block + i, keys, &found);
      read_heads(q, r * block + i, x + i * heads * dim);
    }
    attend(x, block * heads, dim, keys, found, data_of<float>(sink), heads, (float)p->d[0], o, nullptr);
    for (int64_t i = 0; i < block; ++i) write_heads(out, r * block + i, o + i * heads * dim);
  });
  return DI_OK;
}

}  // namespace di::DI_LEVEL
