// The lightning indexer: score_index, select_topk, select_candidate_blocks.
#include "attention.h"
#include "select.h"

namespace di::DI_LEVEL {
namespace {

constexpr int64_t kKeys = 16;   // keys decoded together
constexpr int64_t kTokens = 8;  // neighbouring token rows of one request that share decoded keys

struct Scorer {
  const di_tensor &q, &q_scale, &weights, &table;
  Cache cache;
  int64_t heads, dim;

  void read_query(int64_t row, float* x, float* w) const {
    for (int64_t h = 0; h < heads; ++h) {
      const uint8_t* from = row_at(q, row) + h * q.stride[1] * item_bytes(q.dtype);
      if (q.dtype != DI_U8)
        read_row(from, q.dtype, dim, x + h * dim);
      else
        dequantise_row(from, row_at(q_scale, row) + h * q_scale.stride[1], dim, DI_MXFP4_32, x + h * dim);
      w[h] = item(row_at(weights, row), weights.dtype, h);
    }
  }

  // Decodes a request's rows first .. first + 16 (zeros where there is none); bit i of the answer: row i is there.
  uint32_t read_keys(int64_t request, int64_t first, int64_t end, float* k) const {
    uint32_t there = 0;
    for (int64_t i = 0; i < kKeys; ++i) {
      const int64_t slot = first + i < end ? paged_slot(cache, table, request, first + i) : -1;
      if (slot < 0) {
        memset(k + i * dim, 0, dim * 4);
        continue;
      }
      cache.read(slot, k + i * dim);
      there |= 1u << i;
    }
    return there;
  }

  // 16 scores: heads added in ascending order.
  void score(const float* x, const float* w, const float* k, float* products, float* to) const {
    const float* rows[kKeys];
    for (int64_t i = 0; i < kKeys; ++i) rows[i] = k + i * dim;
    score_keys(x, heads, rows, kKeys, dim, products, kKeys);
    vf total = splat(0.0f);
    for (int64_t h = 0; h < heads; ++h) {
      const vf product = load(products + h * kKeys);
      total = fma(splat(w[h]), less_select(product, splat(0.0f), splat(0.0f), product), total);
    }
    store(to, total);
  }
};

void put_scores(float* row, int64_t first, int64_t end, const float* from, uint32_t there) {
  for (int64_t i = 0; i < kKeys && first + i < end; ++i) row[first + i] = there >> i & 1 ? from[i] : -__builtin_inff();
}

}  // namespace

// q, q_scale?, weights, cache, block_table, row_to_req, visible, candidates?, candidate_block, format, block_rows,
// count?, scores
int score_index(DI_ARGS) {
  DI_NEED_CALL(10, 3, 0);
  const di_tensor &q = t[0], &q_scale = t[1], &weights = t[2], &owner = t[5], &visible = t[6], &candidates = t[7],
                  &count = t[8], &scores = t[9];
  DI_NEED(q.ndim == 3 && last_contiguous(q) && (is_stream(q) || q.dtype == DI_U8), "score_index: q must be [T, h, d]");
  const bool coded = q.dtype == DI_U8, pooled = !absent(candidates);
  const int64_t all = q.shape[0], heads = q.shape[1], dim = q.shape[2] * (coded ? 2 : 1), part = p->i[0];
  DI_NEED(dim % 16 == 0 &&
              (!coded || (dim % 32 == 0 && q_scale.dtype == DI_U8 && q_scale.ndim == 3 && q_scale.shape[0] >= all &&
                          q_scale.shape[1] == heads && q_scale.shape[2] == dim / 32 && last_contiguous(q_scale))),
          "score_index: q must be dense [T, h, d] or mxfp4_32 codes with scales, d a multiple of 16");
  Scorer scorer{q, q_scale, weights, t[4], {}, heads, dim};
  DI_NEED(is_stream(weights) && is_matrix(weights, all, heads), "score_index: weights must be [T, h]");
  DI_NEED(open_cache(t[3], p->i[1], dim, p->i[2], &scorer.cache),
          "score_index: the cache cannot hold rows of %ld values", (long)dim);
  DI_NEED(t[4].dtype == DI_I32 && t[4].ndim == 2 && last_contiguous(t[4]),
          "score_index: block_table must be int32 [R, Bmax]");
  DI_NEED(is_vector(owner, DI_I32, all) && is_vector(visible, DI_I32, all) && is_count(count),
          "score_index: row_to_req and visible must be int32 [T]");
  DI_NEED(scores.dtype == DI_F32 && scores.ndim == 2 && is_matrix(scores, all, scores.shape[1]),
          "score_index: scores must be float32 [T, K]");
  const int64_t columns = scores.shape[1], requests = t[4].shape[0];
  DI_NEED(!pooled || (candidates.dtype == DI_I32 && candidates.ndim == 2 && part >= 1 &&
                      candidates.shape[1] * part == columns && is_matrix(candidates, all, candidates.shape[1])),
          "score_index: candidates must be int32 [T, C] with C * candidate_block = %ld", (long)columns);
  const int64_t rows = valid_rows(count, all), step = pooled || rows <= kTokens ? 1 : kTokens;
  const int32_t *request_of = data_of<int32_t>(owner), *seen = data_of<int32_t>(visible);

  parallel((rows + step - 1) / step, rows * columns * (dim * 0.1 + heads * dim * 0.02 + 5.0), [&](int64_t task) {
    Scratch scratch;
    float *x = scratch.floats(step * heads * dim), *w = scratch.floats(step * heads), *k = scratch.floats(kKeys * dim);
    float *products = scratch.floats(heads * kKeys), found[16];
    const int64_t last = (task + 1) * step < rows ? (task + 1) * step : rows;
    for (int64_t row = task * step; row < last;) {
      const int64_t request = request_of[row];
      int64_t next = row, longest = 0;
      for (; next < last && request_of[next] == request; ++next) longest = seen[next] > longest ? seen[next] : longest;
      if (request < 0 || request >= requests) {
        row = next;
        continue;
      }
      for (int64_t i = row; i < next; ++i) scorer.read_query(i, x + (i - row) * heads * dim, w + (i - row) * heads);
      if (pooled) {
        float* to = reinterpret_cast<float*>(row_at(scores, row));
        for (int64_t c = 0; c < candidates.shape[1]; ++c) {
          const int64_t block = reinterpret_cast<const int32_t*>(row_at(candidates, row))[c];
          for (int64_t i = 0; i < part; i += kKeys) {
            const int64_t first = block * part + i,
                          end = (block + 1) * part < seen[row] ? (block + 1) * part : seen[row];
            const uint32_t there = block < 0 || first >= end ? 0 : scorer.read_keys(request, first, end, k);
            if (there) scorer.score(x, w, k, products, found);
            put_scores(to + c * part, i, part, found, there);
          }
        }
      } else {
        longest = longest < columns ? longest : columns;
        for (int64_t first = 0; first < columns; first += kKeys) {
          const uint32_t there = first < longest ? scorer.read_keys(request, first, longest, k) : 0;
          for (int64_t i = row; i < next; ++i) {
            const int64_t ahead = seen[i] - first;
            const uint32_t shown = ahead >= kKeys ? there : ahead <= 0 ? 0 : there & ((1u << ahead) - 1);
            if (shown) scorer.score(x + (i - row) * heads * dim, w + (i - row) * heads, k, products, found);
            put_scores(reinterpret_cast<float*>(row_at(scores, i)), first, columns, found, shown);
          }
        }
      }
      row = pooled ? row + 1 : next;
    }
  });
  return DI_OK;
}

// scores f32[T, K], candidates i32[T, C]?, candidate_block, count?, rows i32[T, k]
int select_topk(DI_ARGS) {
  DI_NEED_CALL(4, 1, 0);
  const di_tensor &scores = t[0], &candidates = t[1], &count = t[2], &out = t[3];
  DI_NEED(scores.dtype == DI_F32 && scores.ndim == 2 && last_contiguous(scores),
          "select_topk: scores must be float32 [T, K]");
  const int64_t all = scores.shape[0], columns = scores.shape[1], part = p->i[0];
  const bool pooled = !absent(candidates);
  DI_NEED(!pooled || (candidates.dtype == DI_I32 && candidates.ndim == 2 && part >= 1 &&
                      candidates.shape[1] * part == columns && is_matrix(candidates, all, candidates.shape[1])),
          "select_topk: candidates must be int32 [T, C] with C * candidate_block = %ld", (long)columns);
  DI_NEED(out.dtype == DI_I32 && out.ndim == 2 && is_matrix(out, all, out.shape[1]) && is_count(count),
          "select_topk: rows must be int32 [T, k]");
  const int64_t rows = valid_rows(count, all);
  parallel(rows, rows * (columns * 4.0 + 400), [&](int64_t row) {
    Scratch scratch;
    uint32_t* ranks = reinterpret_cast<uint32_t*>(scratch.ints(columns));
    const float* from = reinterpret_cast<const float*>(row_at(scores, row));
    const int32_t* blocks = pooled ? reinterpret_cast<const int32_t*>(row_at(candidates, row)) : nullptr;
    for (int64_t i = 0; i < columns; ++i) ranks[i] = pooled && blocks[i / part] < 0 ? 0 : rank_of(from[i]);
    pick(ranks, columns, out.shape[1], reinterpret_cast<int32_t*>(row_at(out, row)),
         [&](int64_t i) { return (int32_t)(pooled ? blocks[i / part] * part + i % part : i); });
  });
  return DI_OK;
}

// scores f32[T, K], visible i32[T], block, count?, out i32[T, C]
int select_candidate_blocks(DI_ARGS) {
  DI_NEED_CALL(4, 1, 0);
  const di_tensor &scores = t[0], &visible = t[1], &count = t[2], &out = t[3];
  const int64_t block = p->i[0];
  DI_NEED(scores.dtype == DI_F32 && scores.ndim == 2 && last_contiguous(scores) && block >= 1,
          "select_candidate_blocks: scores must be float32 [T, K]");
  const int64_t all = scores.shape[0], columns = scores.shape[1], blocks = (columns + block - 1) / block;
  DI_NEED(is_vector(visible, DI_I32, all) && is_count(count), "select_candidate_blocks: visible must be int32 [T]");
  DI_NEED(out.dtype == DI_I32 && out.ndim == 2 && is_matrix(out, all, out.shape[1]),
          "select_candidate_blocks: out must be int32 [T, C]");
  const int64_t rows = valid_rows(count, all);
  parallel(rows, rows * (columns * 1.0 + blocks * 4.0 + 400), [&](int64_t row) {
    Scratch scratch;
    uint32_t* ranks = reinterpret_cast<uint32_t*>(scratch.ints(blocks + 1));
    const float* from = reinterpret_cast<const float*>(row_at(scores, row));
    const int64_t seen = data_of<int32_t>(visible)[row];
    for (int64_t b = 0; b < blocks; ++b) {
      uint32_t best = 0;
      for (int64_t i = b * block; i < (b + 1) * block && i < columns && i < seen; ++i) {
        const uint32_t rank = rank_of(from[i]);
        best = rank > best ? rank : best;
      }
      ranks[b] = seen > 0 && (seen - 1) / block == b ? rank_of(__builtin_inff()) : best;
    }
    pick(ranks, blocks, out.shape[1], reinterpret_cast<int32_t*>(row_at(out, row)),
         [](int64_t i) { return (int32_t)i; });
  });
  return DI_OK;
}

}  // namespace di::DI_LEVEL
