// Ops that move tokens and rows: embedding_gather, gather_tokens, advance_step, copy_rows, copy_blocks, snapshot_state,
// draft_features.
#include "kernels.h"

namespace di::DI_LEVEL {

// ids i32[T], table W[V, H], count?, out S*[T, m, H]
int embedding_gather(DI_ARGS) {
  DI_NEED_CALL(5, 0, 0);
  const di_tensor &ids = t[0], &table = t[1], &count = t[3], &out = t[4];
  DI_NEED(table.layout == DI_LAYOUT_STRIDED && is_stream(table) && table.ndim == 2 && last_contiguous(table),
          "embedding_gather: the table was not prepared by this backend as rows of bf16 or f32");
  const int64_t all = ids.shape[0], width = table.shape[1];
  DI_NEED(out.ndim == 3 && is_stream(out) && out.shape[0] >= all && out.shape[2] == width && last_contiguous(out),
          "embedding_gather: out must be [T, m, %ld]", (long)width);
  DI_NEED(is_vector(ids, DI_I32, all) && is_count(count), "embedding_gather: ids must be int32 [T]");
  const int64_t rows = valid_rows(count, all);
  Scratch scratch;
  float* x = scratch.floats(width);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t id = data_of<int32_t>(ids)[r];
    if (id < 0 || id >= table.shape[0])
      memset(x, 0, width * 4);
    else
      read_row(row_at(table, id), table.dtype, width, x);
    for (int64_t j = 0; j < out.shape[1]; ++j)
      write_row(row_at(out, r) + j * out.stride[1] * item_bytes(out.dtype), out.dtype, width, x);
  }
  return DI_OK;
}

// history i32[slots, L], slots i32[R], row_to_req i32[T], positions i32[T], count?, ids i32[T], ngrams i32[T, N]?
int gather_tokens(DI_ARGS) {
  DI_NEED_CALL(7, 0, 0);
  const di_tensor &history = t[0], &slots = t[1], &owner = t[2], &positions = t[3], &count = t[4], &ids = t[5],
                  &ngrams = t[6];
  const int64_t all = positions.ndim == 1 ? positions.shape[0] : 0;
  DI_NEED(history.dtype == DI_I32 && history.ndim == 2 && last_contiguous(history),
          "gather_tokens: history must be int32 [slots, L]");
  DI_NEED(slots.ndim == 1 && is_vector(slots, DI_I32, 0) && is_vector(owner, DI_I32, all) &&
              is_vector(positions, DI_I32, all) && is_vector(ids, DI_I32, all),
          "gather_tokens: slots, row_to_req, positions and ids must be int32");
  DI_NEED(absent(ngrams) || (ngrams.dtype == DI_I32 && ngrams.ndim == 2 && is_matrix(ngrams, all, ngrams.shape[1])),
          "gather_tokens: ngrams must be int32 [T, N]");
  DI_NEED(is_count(count), "gather_tokens: count must be int32");
  const int64_t rows = valid_rows(count, all);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t request = data_of<int32_t>(owner)[r], position = data_of<int32_t>(positions)[r];
    if (request < 0 || request >= slots.shape[0] || position < 0 || position >= history.shape[1]) continue;
    const int64_t slot = data_of<int32_t>(slots)[request];
    if (slot < 0 || slot >= history.shape[0]) continue;
    const int32_t* known = reinterpret_cast<const int32_t*>(row_at(history, slot));
    data_of<int32_t>(ids)[r] = known[position];
    if (absent(ngrams)) continue;
    int32_t* to = reinterpret_cast<int32_t*>(row_at(ngrams, r));
    for (int64_t i = 0; i < ngrams.shape[1]; ++i) to[i] = position >= i ? known[position - i] : -1;
  }
  return DI_OK;
}

// tokens, slots, positions i32[S], history i32[slots, L] inout
int advance_step(DI_ARGS) {
  DI_NEED_CALL(4, 0, 0);
  const di_tensor &tokens = t[0], &slots = t[1], &positions = t[2], &history = t[3];
  const int64_t rows = tokens.ndim == 1 ? tokens.shape[0] : 0;
  DI_NEED(is_vector(tokens, DI_I32, rows) && is_vector(slots, DI_I32, rows) && is_vector(positions, DI_I32, rows),
          "advance_step: tokens, slots and positions must be int32 [S]");
  DI_NEED(history.dtype == DI_I32 && history.ndim == 2 && last_contiguous(history),
          "advance_step: history must be int32 [slots, L]");
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = data_of<int32_t>(tokens)[r], slot = data_of<int32_t>(slots)[r],
                  position = data_of<int32_t>(positions)[r];
    if (token < 0 || slot < 0 || position < 0 || slot >= history.shape[0] || position >= history.shape[1]) continue;
    reinterpret_cast<int32_t*>(row_at(history, slot))[position] = (int32_t)token;
  }
  return DI_OK;
}

static int copy_all(const char* op, const di_tensor& from, const di_tensor& from_rows, const di_tensor& to_rows,
                    const di_tensor& to, di_error* e) {
  DI_NEED(from.dtype == DI_U8 && from.ndim == 2 && last_contiguous(from) && to.dtype == DI_U8 && to.ndim == 2 &&
              last_contiguous(to) && to.shape[1] >= from.shape[1],
          "%s: stores must be uint8 [rows, bytes], the target's rows at least as wide", op);
  const int64_t n = from_rows.ndim == 1 ? from_rows.shape[0] : 0, width = from.shape[1];
  DI_NEED(is_vector(from_rows, DI_I32, n) && is_vector(to_rows, DI_I32, n), "%s: row lists must be int32 [n]", op);
  parallel((n + 15) / 16, n * (20.0 + width * 0.05), [&](int64_t task) {
    for (int64_t i = task * 16; i < n && i < task * 16 + 16; ++i) {
      const int64_t a = data_of<int32_t>(from_rows)[i], b = data_of<int32_t>(to_rows)[i];
      if (a < 0 || b < 0 || a >= from.shape[0] || b >= to.shape[0]) continue;
      memmove(row_at(to, b), row_at(from, a), width);
    }
  });
  return DI_OK;
}

// src u8[N, b], src_rows i32[n], dst_rows i32[n], dst u8[M, b] inout
int copy_rows(DI_ARGS) {
  DI_NEED_CALL(4, 0, 0);
  return copy_all("copy_rows", t[0], t[1], t[2], t[3], e);
}

// src i32[n], dst i32[n], cache u8[B, bytes] inout
int copy_blocks(DI_ARGS) {
  DI_NEED_CALL(3, 0, 0);
  return copy_all("copy_blocks", t[2], t[0], t[1], t[2], e);
}

int snapshot_state(DI_ARGS) {
  DI_NEED_CALL(3, 0, 0);
  return copy_all("snapshot_state", t[2], t[0], t[1], t[2], e);
}

// streams S*[T, m, H], count?, out S*~[T, H]
int draft_features(DI_ARGS) {
  DI_NEED_CALL(3, 0, 0);
  const di_tensor &streams = t[0], &count = t[1], &out = t[2];
  DI_NEED(streams.ndim == 3 && is_stream(streams) && last_contiguous(streams),
          "draft_features: streams must be [T, m, H]");
  const int64_t all = streams.shape[0], m = streams.shape[1], width = streams.shape[2], padded = round_up(width, 16);
  DI_NEED(is_stream(out) && is_matrix(out, all, width) && is_count(count) && m >= 1,
          "draft_features: out must be [T, %ld]", (long)width);
  const int64_t rows = valid_rows(count, all);
  parallel(rows, rows * m * width * 0.2, [&](int64_t r) {
    Scratch scratch;
    float *x = scratch.floats(padded), *total = scratch.floats(padded);
    memset(total, 0, padded * 4);
    for (int64_t j = 0; j < m; ++j) {
      read_row(row_at(streams, r) + j * streams.stride[1] * item_bytes(streams.dtype), streams.dtype, width, x);
      clear_tail(x, width);
      for (int64_t i = 0; i < padded; i += 16) store(total + i, load(total + i) + load(x + i));
    }
    for (int64_t i = 0; i < padded; i += 16) store(total + i, load(total + i) / splat((float)m));
    write_row(row_at(out, r), out.dtype, width, total);
  });
  return DI_OK;
}

}  // namespace di::DI_LEVEL
