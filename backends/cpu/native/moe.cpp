// route_topk, permute, swiglu_quantise, unpermute.
#include "moe.h"

namespace di::DI_LEVEL {

// logits f32[T, E], bias f32[E], k, scaling, expert_map i32[E]?, count?, ids i32[T, k], weights f32[T, k], counts
// i32[P]
int route_topk(DI_ARGS) {
  DI_NEED_CALL(7, 1, 1);
  const di_tensor &logits = t[0], &bias = t[1], &map = t[2], &count = t[3], &ids = t[4], &weights = t[5],
                  &counts = t[6];
  const int64_t k = p->i[0];
  DI_NEED(logits.dtype == DI_F32 && logits.ndim == 2 && last_contiguous(logits),
          "route_topk: logits must be float32 [T, E]");
  const int64_t all = logits.shape[0], experts = logits.shape[1];
  DI_NEED(is_vector(bias, DI_F32, experts) && (absent(map) || is_vector(map, DI_I32, experts)),
          "route_topk: bias and expert_map must be [E]");
  DI_NEED(k >= 1 && k <= experts && k <= kMostChosen, "route_topk: k must be 1 to %ld, got %ld", (long)experts,
          (long)k);
  DI_NEED(is_packed(ids, DI_I32, all * k) && is_packed(weights, DI_F32, all * k) && counts.ndim == 1 &&
              is_packed(counts, DI_I32, 0) && is_count(count),
          "route_topk: ids, weights and counts must be int32 [T, k], float32 [T, k], int32 [P]");
  const int64_t rows = valid_rows(count, all), physical = counts.shape[0];
  int32_t* id = data_of<int32_t>(ids);
  parallel((rows + 15) / 16, rows * (experts * 25.0 * k), [&](int64_t task) {
    Scratch scratch;
    float* score = scratch.floats(experts);
    for (int64_t r = task * 16; r < rows && r < task * 16 + 16; ++r)
      route_row(reinterpret_cast<const float*>(row_at(logits, r)), data_of<float>(bias), experts, k, (float)p->d[0],
                score, id + r * k, data_of<float>(weights) + r * k);
  });
  memset(counts.data, 0, physical * 4);
  for (int64_t i = 0; i < rows * k; ++i) {
    if (!absent(map)) id[i] = data_of<int32_t>(map)[id[i]];
    if (id[i] >= 0 && id[i] < physical) ++data_of<int32_t>(counts)[id[i]];
  }
  return DI_OK;
}

// x ~[T, K], x_scale?, ids i32[T, k], experts, count?, out [T*k, K], out_scale?, offsets i32[E+1], source i32[T*k],
// inverse i32[T, k]
int permute(DI_ARGS) {
  DI_NEED_CALL(9, 1, 0);
  const di_tensor &x = t[0], &x_scale = t[1], &ids = t[2], &count = t[3], &out = t[4], &out_scale = t[5];
  const di_tensor &offsets = t[6], &source = t[7], &inverse = t[8];
  DI_NEED(x.ndim == 2 && ids.ndim == 2 && is_packed(ids, DI_I32, 0),
          "permute: x must be [T, K], ids int32 [T, k], contiguous");
  const int64_t all = ids.shape[0], k = ids.shape[1], width = x.shape[1], experts = p->i[0];
  DI_NEED(
      is_activation(x, x_scale, all, width) && out.dtype == x.dtype && is_result(out, out_scale, all * k, width, width),
      "permute: x and out must be of one dtype, with scales if codes");
  DI_NEED(experts >= 0 && is_vector(offsets, DI_I32, experts + 1) && is_vector(source, DI_I32, all * k) &&
              is_packed(inverse, DI_I32, all * k) && is_count(count),
          "permute: offsets, source and inverse must be int32 [E+1], [T*k], [T, k]");
  const int64_t rows = valid_rows(count, all);
  const int64_t made = sort_choices(data_of<int32_t>(ids), rows * k, experts, data_of<int32_t>(offsets),
                                    data_of<int32_t>(source), data_of<int32_t>(inverse));
  parallel((made + 15) / 16, made * width * 0.05, [&](int64_t task) {
    for (int64_t r = task * 16; r < made && r < task * 16 + 16; ++r) {
      const int64_t token = data_of<int32_t>(source)[r] / k;
      memcpy(row_at(out, r), row_at(x, token), width * item_bytes(x.dtype));
      if (!absent(out_scale)) memcpy(row_at(out_scale, r), row_at(x_scale, token), width / 32);
    }
  });
  return DI_OK;
}

// gate_up ~[M, 2I], weights f32[T*k]?, source i32[M]?, limit, rows i32[1]?, out, out_scale?
int swiglu_quantise(DI_ARGS) {
  DI_NEED_CALL(6, 0, 1);
  const di_tensor &gate_up = t[0], &weights = t[1], &source = t[2], &count = t[3], &out = t[4], &out_scale = t[5];
  DI_NEED(gate_up.ndim == 2 && is_stream(gate_up) && gate_up.shape[1] % 2 == 0 && last_contiguous(gate_up),
          "swiglu_quantise: gate_up must be [M, 2I]");
  const int64_t all = gate_up.shape[0], width = gate_up.shape[1] / 2;
  DI_NEED(is_result(out, out_scale, all, width, width), "swiglu_quantise: out must be [M, %ld], with scales if codes",
          (long)width);
  DI_NEED(absent(weights) || (is_vector(weights, DI_F32, 0) && is_vector(source, DI_I32, all)),
          "swiglu_quantise: weights need source int32 [M]");
  DI_NEED(is_count(count), "swiglu_quantise: rows must be int32");
  const int64_t rows = valid_rows(count, all), known = absent(weights) ? 0 : weights.shape[0];
  const Sink sink = sink_of(out, out_scale);
  parallel((rows + 7) / 8, rows * width * 0.5, [&](int64_t task) {
    Scratch scratch;
    float *x = scratch.floats(2 * width), *y = scratch.floats(round_up(width, 16));
    for (int64_t r = task * 8; r < rows && r < task * 8 + 8; ++r) {
      const int64_t from = absent(weights) ? 0 : data_of<int32_t>(source)[r];
      if (!absent(weights) && (from < 0 || from >= known)) continue;
      read_row(row_at(gate_up, r), gate_up.dtype, 2 * width, x);
      swiglu_row(x, width, (float)p->d[0], absent(weights) ? 1.0f : data_of<float>(weights)[from], y);
      sink.put(r, 0, width, y);
    }
  });
  return DI_OK;
}

// rows S*[M, H], inverse i32[T, k], shared S*[T, H]?, count?, out S*[T, H]
int unpermute(DI_ARGS) {
  DI_NEED_CALL(5, 0, 0);
  const di_tensor &from = t[0], &inverse = t[1], &shared = t[2], &count = t[3], &out = t[4];
  DI_NEED(out.ndim == 2 && is_stream(out) && last_contiguous(out), "unpermute: out must be [T, H]");
  const int64_t all = out.shape[0], width = out.shape[1];
  DI_NEED(is_stream(from) && is_matrix(from, 0, width) && inverse.ndim == 2 && inverse.shape[0] >= all &&
              is_packed(inverse, DI_I32, 0),
          "unpermute: rows must be [M, %ld], inverse int32 [T, k]", (long)width);
  DI_NEED((absent(shared) || (is_stream(shared) && is_matrix(shared, all, width))) && is_count(count),
          "unpermute: shared must be [T, %ld]", (long)width);
  const int64_t rows = valid_rows(count, all), k = inverse.shape[1], most = from.shape[0];
  parallel((rows + 7) / 8, rows * width * (k + 2) * 0.15, [&](int64_t task) {
    Scratch scratch;
    const int64_t padded = round_up(width, 16);
    float *x = scratch.floats(padded), *total = scratch.floats(padded);
    auto add = [&](const di_tensor& rows_of, int64_t row) {
      read_row(row_at(rows_of, row), rows_of.dtype, width, x);
      clear_tail(x, width);
      for (int64_t i = 0; i < padded; i += 16) store(total + i, load(total + i) + load(x + i));
    };
    for (int64_t r = task * 8; r < rows && r < task * 8 + 8; ++r) {
      memset(total, 0, padded * 4);
      for (int64_t j = 0; j < k; ++j) {
        const int64_t row = data_of<int32_t>(inverse)[r * k + j];
        if (row >= 0 && row < most) add(from, row);
      }
      if (!absent(shared)) add(shared, r);
      write_row(row_at(out, r), out.dtype, width, total);
    }
  });
  return DI_OK;
}

}  // namespace di::DI_LEVEL
