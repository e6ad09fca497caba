// The n-gram memory: engram_hash, engram_lookup, engram_gate.
#include "norm.h"

namespace di::DI_LEVEL {

// ngrams i32[T, N], token_map i32[V], multipliers i64[N], primes i64[C], offsets i64[C], pad, count?, out i64[T, C]
int engram_hash(DI_ARGS) {
  DI_NEED_CALL(7, 1, 0);
  const di_tensor &ngrams = t[0], &map = t[1], &multipliers = t[2], &primes = t[3], &offsets = t[4], &count = t[5],
                  &out = t[6];
  DI_NEED(ngrams.dtype == DI_I32 && ngrams.ndim == 2 && last_contiguous(ngrams),
          "engram_hash: ngrams must be int32 [T, N]");
  const int64_t all = ngrams.shape[0], size = ngrams.shape[1], columns = primes.ndim == 1 ? primes.shape[0] : 0;
  DI_NEED(size >= 2 && columns % (size - 1) == 0 && is_vector(multipliers, DI_I64, size) &&
              is_vector(primes, DI_I64, columns) && is_vector(offsets, DI_I64, columns),
          "engram_hash: multipliers int64 [N], primes and offsets int64 [(N-1)Q]");
  DI_NEED(map.ndim == 1 && is_vector(map, DI_I32, 0) && out.dtype == DI_I64 && is_matrix(out, all, columns) &&
              is_count(count),
          "engram_hash: token_map must be int32 [V], out int64 [T, %ld]", (long)columns);
  const int64_t rows = valid_rows(count, all), heads = columns / (size - 1), vocab = map.shape[0];
  for (int64_t i = 0; i < columns; ++i)
    DI_NEED(data_of<int64_t>(primes)[i] > 0, "engram_hash: primes must be positive");
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* ids = reinterpret_cast<const int32_t*>(row_at(ngrams, r));
    int64_t* to = reinterpret_cast<int64_t*>(row_at(out, r));
    uint64_t mixed = 0;
    bool inside = true;
    for (int64_t i = 0; i < size; ++i) {
      inside = inside && ids[i] >= 0 && ids[i] < vocab;
      const int64_t compressed = inside ? data_of<int32_t>(map)[ids[i]] : p->i[0];
      mixed ^= (uint64_t)compressed * (uint64_t)data_of<int64_t>(multipliers)[i];
      for (int64_t c = (i - 1) * heads; i > 0 && c < i * heads; ++c) {
        const int64_t prime = data_of<int64_t>(primes)[c], rest = (int64_t)mixed % prime;
        to[c] = (rest < 0 ? rest + prime : rest) + data_of<int64_t>(offsets)[c];
      }
    }
  }
  return DI_OK;
}

// rows i64[T, C], table W[R, d], count?, out, out_scale?
int engram_lookup(DI_ARGS) {
  DI_NEED_CALL(6, 0, 0);
  const di_tensor &rows = t[0], &values = t[1], &scales = t[2], &count = t[3], &out = t[4], &out_scale = t[5];
  DI_NEED(values.layout == DI_LAYOUT_STRIDED && values.dtype == DI_U8 && values.ndim == 2 && scales.dtype == DI_U8 &&
              values.shape[1] % 32 == 0 && last_contiguous(values) &&
              is_matrix(scales, values.shape[0], values.shape[1] / 32),
          "engram_lookup: the table was not prepared by this backend as fp8 rows");
  DI_NEED(rows.dtype == DI_I64 && rows.ndim == 2 && last_contiguous(rows), "engram_lookup: rows must be int64 [T, C]");
  const int64_t all = rows.shape[0], columns = rows.shape[1], width = values.shape[1], whole = columns * width;
  const bool coded = out.dtype == DI_U8;
  DI_NEED(is_matrix(out, all, whole) && (coded ? out_scale.dtype == DI_U8 && is_matrix(out_scale, all, whole / 32)
                                               : is_stream(out) && absent(out_scale)),
          "engram_lookup: out must be [T, %ld], with scales if codes", (long)whole);
  DI_NEED(is_count(count), "engram_lookup: count must be int32");
  Scratch scratch;
  float* x = scratch.floats(width);
  for (int64_t r = 0; r < valid_rows(count, all); ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t row = reinterpret_cast<const int64_t*>(row_at(rows, r))[c];
      const bool known = row >= 0 && row < values.shape[0];
      uint8_t* to = row_at(out, r) + c * width * item_bytes(out.dtype);
      if (!coded) {
        if (known)
          dequantise_row(row_at(values, row), row_at(scales, row), width, DI_FP8_32, x);
        else
          memset(x, 0, width * 4);
        write_row(to, out.dtype, width, x);
        continue;
      }
      uint8_t* to_scale = row_at(out_scale, r) + c * width / 32;
      if (known)
        memcpy(to, row_at(values, row), width), memcpy(to_scale, row_at(scales, row), width / 32);
      else
        memset(to, 0, width), memset(to_scale, 127, width / 32);  // zeros under a scale of 1
    }
  }
  return DI_OK;
}

// kv S*~[T, (m+1)H], q_weight S*[m, H], k_weight S*[m, H], eps, count?, streams S*[T, m, H] inout
int engram_gate(DI_ARGS) {
  DI_NEED_CALL(5, 0, 1);
  const di_tensor &kv = t[0], &q_weight = t[1], &k_weight = t[2], &count = t[3], &streams = t[4];
  DI_NEED(streams.ndim == 3 && is_stream(streams) && last_contiguous(streams) && streams.shape[2] % 16 == 0,
          "engram_gate: streams must be [T, m, H], H a multiple of 16");
  const int64_t all = streams.shape[0], m = streams.shape[1], hidden = streams.shape[2];
  DI_NEED(is_stream(kv) && is_matrix(kv, all, (m + 1) * hidden), "engram_gate: kv must be [T, %ld]",
          (long)((m + 1) * hidden));
  DI_NEED(is_stream(q_weight) && is_stream(k_weight) && is_packed(q_weight, m * hidden) &&
              is_packed(k_weight, m * hidden) && is_count(count),
          "engram_gate: q_weight and k_weight must be [m, H]");
  const int64_t rows = valid_rows(count, all);
  const float eps = (float)p->d[0], shrink = 1.0f / square_root((float)hidden);
  parallel(rows, rows * m * hidden * 1.0, [&](int64_t r) {
    Scratch scratch;
    float *s = scratch.floats(hidden), *k = scratch.floats(hidden), *v = scratch.floats(hidden),
          *w = scratch.floats(hidden), *u = scratch.floats(hidden);
    const int64_t size = item_bytes(kv.dtype);
    read_row(row_at(kv, r) + m * hidden * size, kv.dtype, hidden, v);
    for (int64_t j = 0; j < m; ++j) {
      uint8_t* stream = row_at(streams, r) + j * streams.stride[1] * item_bytes(streams.dtype);
      read_row(stream, streams.dtype, hidden, s);
      read_row(row_at(kv, r) + j * hidden * size, kv.dtype, hidden, k);
      read_row(data_of<uint8_t>(q_weight) + j * hidden * item_bytes(q_weight.dtype), q_weight.dtype, hidden, w);
      read_row(data_of<uint8_t>(k_weight) + j * hidden * item_bytes(k_weight.dtype), k_weight.dtype, hidden, u);
      vf total = splat(0.0f);
      for (int64_t i = 0; i < hidden; i += 16) total = fma(load(s + i) * load(w + i) * load(u + i), load(k + i), total);
      float dot = sum(total) * (1.0f / square_root(sum_squares(s, hidden) / (float)hidden + eps));
      dot = dot * (1.0f / square_root(sum_squares(k, hidden) / (float)hidden + eps)) * shrink;
      const float size_of = dot < 0 ? -dot : dot, root = square_root(size_of < 1e-6f ? 1e-6f : size_of);
      const float signed_root = dot > 0 ? root : dot < 0 ? -root : dot;
      const vf gate = sigmoid(splat(signed_root));
      for (int64_t i = 0; i < hidden; i += 16) store(s + i, fma(gate, load(v + i), load(s + i)));
      write_row(stream, streams.dtype, hidden, s);
    }
  });
  return DI_OK;
}

}  // namespace di::DI_LEVEL
