// Stores and loads of KV rows: store_window_kv, store_compressed_kv, store_index_k, write_kv, store_draft_kv, load_kv,
// and the compressor's pooling, compress_kv.
#include "cache.h"
#include "norm.h"

namespace di::DI_LEVEL {
namespace {

int store_rows(const char* op, const di_tensor& x, const di_tensor& slots, int64_t format, int64_t block_rows,
               const di_tensor& count, const di_tensor& to, di_error* e) {
  DI_NEED(x.ndim == 2 && is_stream(x) && last_contiguous(x), "%s: x must be [T, D] bf16 or f32", op);
  Cache cache;
  DI_NEED(open_cache(to, format, x.shape[1], block_rows, &cache), "%s: the cache cannot hold rows of %ld values", op,
          (long)x.shape[1]);
  DI_NEED(is_vector(slots, DI_I32, x.shape[0]) && is_count(count), "%s: slots must be int32 [T]", op);
  const int64_t rows = valid_rows(count, x.shape[0]), width = x.shape[1];
  parallel(rows, rows * width * 0.2, [&](int64_t r) {
    const int64_t slot = data_of<int32_t>(slots)[r];
    if (!cache.holds(slot)) return;
    Scratch scratch;
    float* y = scratch.floats(width);
    read_row(row_at(x, r), x.dtype, width, y);
    cache.write(slot, y);
  });
  return DI_OK;
}

struct Write {
  const di_tensor &x, &weight, &positions, &table, &slots, &count, &cache, &latent;
  float eps;
  int64_t format, block_rows;
};

int write_rows(const char* op, const Write& a, di_error* e) {
  const di_tensor &x = a.x, &latent = a.latent, &table = a.table;
  DI_NEED(x.ndim == 2 && is_stream(x) && last_contiguous(x), "%s: x must be [T, D] bf16 or f32", op);
  const int64_t width = x.shape[1];
  Cache cache;
  DI_NEED(open_cache(a.cache, a.format, width, a.block_rows, &cache), "%s: the cache cannot hold rows of %ld values",
          op, (long)width);
  DI_NEED(is_norm_weight(a.weight, width), "%s: norm_weight must be [%ld]", op, (long)width);
  DI_NEED(is_rope_table(table, width), "%s: the table must be float32 [P, r] with even r <= %ld", op, (long)width);
  DI_NEED(is_vector(a.positions, DI_I32, x.shape[0]) && is_vector(a.slots, DI_I32, x.shape[0]),
          "%s: positions and slots must be int32 [T]", op);
  DI_NEED(absent(latent) || (is_stream(latent) && is_matrix(latent, x.shape[0], width)), "%s: latent must be [T, %ld]",
          op, (long)width);
  DI_NEED(is_count(a.count), "%s: count must be int32", op);
  const int64_t rows = valid_rows(a.count, x.shape[0]), turned = table.shape[1];
  parallel(rows, rows * width * 0.5, [&](int64_t r) {
    const int64_t slot = data_of<int32_t>(a.slots)[r], position = data_of<int32_t>(a.positions)[r];
    if (!cache.holds(slot)) return;
    Scratch scratch;
    float* y = scratch.floats(round_up(width, 16));
    read_row(row_at(x, r), x.dtype, width, y);
    norm_row(y, width, a.weight, a.eps);
    round_row(x.dtype, width, y);
    if (!absent(latent)) write_row(row_at(latent, r), latent.dtype, width, y);
    if (position >= 0 && position < table.shape[0]) {
      rotate_row(y + width - turned, turned, reinterpret_cast<const float*>(row_at(table, position)), false);
      round_row(x.dtype, turned, y + width - turned);
    }
    cache.write(slot, y);
  });
  return DI_OK;
}

}  // namespace

// x ~[T, D], slots i32[T], format, count?, cache u8[N, row_bytes] inout
int store_window_kv(DI_ARGS) {
  DI_NEED_CALL(4, 1, 0);
  return store_rows("store_window_kv", t[0], t[1], p->i[0], 0, t[2], t[3], e);
}

// x ~[G, D], slots i32[G], format, block_rows, count?, cache u8[B, block_bytes] inout
int store_compressed_kv(DI_ARGS) {
  DI_NEED_CALL(4, 2, 0);
  return store_rows("store_compressed_kv", t[0], t[1], p->i[0], p->i[1], t[2], t[3], e);
}

int store_index_k(DI_ARGS) {
  DI_NEED_CALL(4, 2, 0);
  return store_rows("store_index_k", t[0], t[1], p->i[0], p->i[1], t[2], t[3], e);
}

// x ~[T, D], norm_weight [D], eps, positions, table, slots, format, block_rows, count?, cache inout, latent [T, D]?
int write_kv(DI_ARGS) {
  DI_NEED_CALL(8, 2, 1);
  return write_rows("write_kv", {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], (float)p->d[0], p->i[0], p->i[1]}, e);
}

// x ~[T, D], norm_weight, eps, positions, table, slots, format, count?, cache inout
int store_draft_kv(DI_ARGS) {
  DI_NEED_CALL(7, 1, 1);
  const di_tensor none{};
  return write_rows("store_draft_kv", {t[0], t[1], t[2], t[3], t[4], t[5], t[6], none, (float)p->d[0], p->i[0], 0}, e);
}

// cache u8, slots i32[N], format, block_rows, out [N, D]
int load_kv(DI_ARGS) {
  DI_NEED_CALL(3, 2, 0);
  const di_tensor &slots = t[1], &out = t[2];
  DI_NEED(out.ndim == 2 && is_stream(out) && last_contiguous(out), "load_kv: out must be [N, D] bf16 or f32");
  const int64_t rows = out.shape[0], width = out.shape[1];
  Cache cache;
  DI_NEED(open_cache(t[0], p->i[0], width, p->i[1], &cache), "load_kv: the cache cannot hold rows of %ld values",
          (long)width);
  DI_NEED(is_vector(slots, DI_I32, rows), "load_kv: slots must be int32 [N]");
  parallel(rows, rows * width * 0.2, [&](int64_t r) {
    const int64_t slot = data_of<int32_t>(slots)[r];
    if (!cache.holds(slot)) return;
    Scratch scratch;
    float* y = scratch.floats(width);
    cache.read(slot, y);
    write_row(row_at(out, r), out.dtype, width, y);
  });
  return DI_OK;
}

namespace {

struct Pool {
  const di_tensor &value, &gate, &carry;
  const int32_t *positions, *row_to_req, *cu_q, *state_slots;
  int64_t tokens, requests, ratio, width, ring;

  const float* carried(int64_t slot, int64_t position, int part) const {
    return data_of<float>(carry) + slot * carry.stride[0] + position % ring * carry.stride[1] + part * carry.stride[2];
  }

  // Value and gate rows of the token at `position` of `request`; false if it is nowhere.
  bool find(int64_t request, int64_t position, const float** v, const float** g) const {
    const int64_t start = cu_q[request];
    if (start < 0 || start >= tokens || position < 0) return false;
    const int64_t offset = position - positions[start];
    if (offset >= 0) {
      if (start + offset >= tokens) return false;
      *v = reinterpret_cast<const float*>(row_at(value, start + offset));
      *g = reinterpret_cast<const float*>(row_at(gate, start + offset));
      return true;
    }
    const int64_t slot = state_slots[request];
    if (slot < 0 || slot >= carry.shape[0]) return false;
    *v = carried(slot, position, 0), *g = carried(slot, position, 1);
    return true;
  }

  // Softmax-weighted sum over the group that ends at token row `last`, channel by channel, oldest token first.
  void pool(int64_t last, const di_tensor& out, int64_t group) const {
    const int64_t request = last < tokens ? row_to_req[last] : -1;
    if (request < 0 || request >= requests) return;
    Scratch scratch;
    const int64_t padded = round_up(width, 16);
    float *v = scratch.floats(ratio * padded), *g = scratch.floats(ratio * padded), *y = scratch.floats(padded);
    for (int64_t i = 0; i < ratio; ++i) {
      const float *from_v, *from_g;
      if (!find(request, positions[last] - (ratio - 1 - i), &from_v, &from_g)) return;
      memcpy(v + i * padded, from_v, width * 4), memcpy(g + i * padded, from_g, width * 4);
      for (int64_t c = width; c < padded; ++c) v[i * padded + c] = g[i * padded + c] = 0.0f;
    }
    for (int64_t c = 0; c < padded; c += 16) {
      vf top = load(g + c), total = splat(0.0f), mixed = splat(0.0f);
      for (int64_t i = 1; i < ratio; ++i) top = max(top, load(g + i * padded + c));
      for (int64_t i = 0; i < ratio; ++i) {
        const vf weight = exp(load(g + i * padded + c) - top);
        mixed = fma(weight, load(v + i * padded + c), mixed), total = total + weight;
      }
      store(y + c, mixed / total);
    }
    write_row(row_at(out, group), out.dtype, width, y);
  }

  // Keeps the newest tokens of every request, up to the ring's length.
  void keep() const {
    for (int64_t row = 0; row < tokens; ++row) {
      const int64_t request = row_to_req[row];
      if (request < 0 || request >= requests) continue;
      const int64_t begin = cu_q[request], end = cu_q[request + 1], slot = state_slots[request],
                    position = positions[row];
      if (row < begin || row >= end || row < end - ring || slot < 0 || slot >= carry.shape[0] || position < 0) continue;
      memcpy(const_cast<float*>(carried(slot, position, 0)), row_at(value, row), width * 4);
      memcpy(const_cast<float*>(carried(slot, position, 1)), row_at(gate, row), width * 4);
    }
  }
};

}  // namespace

// value f32~[T, D], gate f32~[T, D], positions, row_to_req, cu_q i32[R+1], state_slots i32[R], complete i32[G], ratio,
// carry f32[slots, L, 2, D] inout, out [G, D]
int compress_kv(DI_ARGS) {
  DI_NEED_CALL(9, 1, 0);
  const di_tensor &value = t[0], &gate = t[1], &state_slots = t[5], &complete = t[6], &carry = t[7], &out = t[8];
  DI_NEED(value.ndim == 2 && value.dtype == DI_F32 && gate.dtype == DI_F32 && is_matrix(value, 0, value.shape[1]) &&
              is_matrix(gate, value.shape[0], value.shape[1]),
          "compress_kv: value and gate must be float32 [T, D]");
  const int64_t tokens = value.shape[0], width = value.shape[1],
                requests = state_slots.ndim == 1 ? state_slots.shape[0] : 0;
  DI_NEED(is_vector(t[2], DI_I32, tokens) && is_vector(t[3], DI_I32, tokens) && is_vector(t[4], DI_I32, requests + 1) &&
              is_vector(state_slots, DI_I32, 0) && is_vector(complete, DI_I32, 0),
          "compress_kv: positions, row_to_req, cu_q, state_slots and complete must be int32");
  DI_NEED(carry.dtype == DI_F32 && carry.ndim == 4 && carry.shape[1] > 0 && carry.shape[2] == 2 &&
              carry.shape[3] == width && last_contiguous(carry),
          "compress_kv: carry must be float32 [slots, L, 2, %ld]", (long)width);
  const int64_t groups = complete.shape[0], ratio = p->i[0];
  DI_NEED(is_stream(out) && is_matrix(out, groups, width) && ratio >= 1,
          "compress_kv: out must be [G, %ld], ratio at least 1", (long)width);
  const Pool pool{value,
                  gate,
                  carry,
                  data_of<int32_t>(t[2]),
                  data_of<int32_t>(t[3]),
                  data_of<int32_t>(t[4]),
                  data_of<int32_t>(state_slots),
                  tokens,
                  requests,
                  ratio,
                  width,
                  carry.shape[1]};
  parallel(groups, groups * ratio * width * 1.0, [&](int64_t g) {
    const int64_t last = data_of<int32_t>(complete)[g];
    if (last >= 0) pool.pool(last, out, g);
  });
  pool.keep();
  return DI_OK;
}

}  // namespace di::DI_LEVEL
