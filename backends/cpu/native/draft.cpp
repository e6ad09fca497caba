// The draft's sequential heads: markov_logits and confidence_head.
#include "gemm.h"

namespace di::DI_LEVEL {

// base f32[R, V], prev i32[R], embed W[V, r], head W[V, r], out f32[R, V], mu S*[R, r]
int markov_logits(DI_ARGS) {
  DI_NEED_CALL(8, 0, 0);
  const di_tensor &base = t[0], &prev = t[1], &embed = t[2], &head = t[4], &out = t[6], &mu = t[7];
  DI_NEED(embed.layout == DI_LAYOUT_STRIDED && is_stream(embed) && embed.ndim == 2 && last_contiguous(embed) &&
              is_panels(head, 2),
          "markov_logits: embed must be prepared as a table of bf16 or f32 rows, head as a matrix");
  const int64_t rows = mu.ndim == 2 ? mu.shape[0] : 0, vocab = head.shape[0], rank = head.shape[1];
  DI_NEED(base.dtype == DI_F32 && is_matrix(base, rows, vocab) && out.dtype == DI_F32 && is_matrix(out, rows, vocab) &&
              is_vector(prev, DI_I32, rows),
          "markov_logits: base and out must be float32 [R, %ld], prev int32 [R]", (long)vocab);
  DI_NEED(is_stream(mu) && is_matrix(mu, rows, rank) && embed.shape[1] == rank, "markov_logits: mu must be [R, %ld]",
          (long)rank);
  if (rows == 0) return DI_OK;
  Scratch scratch;
  float* x = scratch.floats(rank);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t id = data_of<int32_t>(prev)[r];
    if (id >= 0 && id < embed.shape[0])
      read_row(row_at(embed, id), embed.dtype, rank, x);
    else
      memset(x, 0, rank * 4);
    write_row(row_at(mu, r), mu.dtype, rank, x);
  }
  int64_t lda;
  const float* a = expand_rows(mu, {}, rows, rank, scratch, &lda);
  const int64_t panels = panel_count(vocab), step = Product::kMostPanels;
  const Sink sink = sink_of(out, {});
  parallel((panels + step - 1) / step, product_ns(rows, vocab, rank), [&](int64_t task) {
    const int64_t last = (task + 1) * step < panels ? (task + 1) * step : panels;
    Scratch own;
    float* kept = own.floats(rows * step * 16);  // `out` may be the storage of `base`
    const int64_t column = task * step * 16, width = (last * 16 < vocab ? last * 16 : vocab) - column;
    for (int64_t r = 0; r < rows; ++r) memcpy(kept + r * step * 16, row_at(base, r) + column * 4, width * 4);
    Product{a, lda, data_of<float>(head), rank, vocab}.run(0, rows, task * step, last, sink, 0);
    for (int64_t r = 0; r < rows; ++r) {
      float* to = reinterpret_cast<float*>(row_at(out, r)) + column;
      for (int64_t i = 0; i < width; ++i) to[i] = kept[r * step * 16 + i] + to[i];
    }
  });
  return DI_OK;
}

// raw S*[R, H], mu S*[R, r], weight [1, H + r], temperature, logit f32[R], probability f32[R]
int confidence_head(DI_ARGS) {
  DI_NEED_CALL(5, 0, 1);
  const di_tensor &raw = t[0], &mu = t[1], &weight = t[2];
  DI_NEED(raw.ndim == 2 && is_stream(raw) && last_contiguous(raw) && mu.ndim == 2 && is_stream(mu) &&
              is_matrix(mu, raw.shape[0], mu.shape[1]),
          "confidence_head: raw must be [R, H], mu [R, r]");
  const int64_t rows = raw.shape[0], hidden = raw.shape[1], rank = mu.shape[1], width = hidden + rank;
  DI_NEED(is_stream(weight) && is_packed(weight, width), "confidence_head: weight must be [1, %ld]", (long)width);
  DI_NEED(is_vector(t[3], DI_F32, rows) && is_vector(t[4], DI_F32, rows) && p->d[0] > 0,
          "confidence_head: outputs must be float32 [R], temperature positive");
  Scratch scratch;
  float *w = scratch.floats(width), *x = scratch.floats(width);
  read_row(weight.data, weight.dtype, width, w);
  for (int64_t r = 0; r < rows; ++r) {
    read_row(row_at(raw, r), raw.dtype, hidden, x);
    read_row(row_at(mu, r), mu.dtype, rank, x + hidden);
    double total = 0.0;  // terms are much larger than their sum, and there are few rows
    for (int64_t i = 0; i < width; ++i) total += (double)x[i] * w[i];
    const float logit = (float)total, scaled = logit / (float)p->d[0];
    data_of<float>(t[3])[r] = logit;
    float lanes[16];
    store(lanes, sigmoid(splat(scaled > 60.0f ? 60.0f : scaled < -60.0f ? -60.0f : scaled)));
    data_of<float>(t[4])[r] = lanes[0];
  }
  return DI_OK;
}

}  // namespace di::DI_LEVEL
