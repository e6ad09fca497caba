// The indexer: scores of stored keys, the best rows, the best row blocks.
#include <cmath>
#include <limits>

#include "numeric.h"

using namespace toy;

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

/// Ascending ids of the k best-scored candidates, ties to the lower id, -1 at the end; -inf and NaN are never chosen.
void choose(const std::vector<float>& scores, const std::vector<int32_t>& ids, int32_t* out, int64_t k) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] > kNever) order.push_back(int32_t(i));
  }
  auto better = [&](int32_t a, int32_t b) { return scores[a] > scores[b]; };
  std::stable_sort(order.begin(), order.end(), better);
  order.resize(std::min<size_t>(order.size(), size_t(k)));
  std::sort(order.begin(), order.end());
  for (int64_t j = 0; j < k; ++j) out[j] = j < int64_t(order.size()) ? ids[order[j]] : -1;
}

}  // namespace

KERNEL(score_index) {
  Tensor q = call.tensor(), q_scale = call.tensor(), weights = call.tensor(), cache = call.tensor(), block_table = call.tensor();
  Tensor row_to_req = call.tensor(), visible = call.tensor(), candidates = call.tensor();
  int64_t candidate_block = call.integer(), format = call.integer(), block_rows = call.integer();
  Tensor count = call.tensor(), scores = call.tensor();
  const int64_t heads = q.shape[1], width = q.shape[2] * (q_scale.present() ? 2 : 1);
  std::vector<float> query(heads * width), weight(heads), key(width);
  for (int64_t t = 0; t < valid_rows(count, q.rows()); ++t) {
    int32_t request = row_to_req.i32(t);
    if (request < 0) continue;
    load(weights, weights.offset(t), heads, weight.data());
    for (int64_t h = 0; h < heads; ++h) {
      if (q_scale.present()) {
        dequantise(q.at<uint8_t>(t, h), q_scale.at<uint8_t>(t, h), width, DI_MXFP4_32, &query[h * width]);
      } else {
        load(q, q.offset(t, h), width, &query[h * width]);
      }
    }
    for (int64_t column = 0; column < scores.width(); ++column) {
      int64_t row = column;
      if (candidates.present()) {
        int32_t block = candidates.i32(t, column / candidate_block);
        row = block < 0 ? -1 : block * candidate_block + column % candidate_block;
      }
      float total = kNever;
      if (row >= 0 && row < visible.i32(t)) {
        int64_t slot = block_table.i32(request, row / block_rows) * block_rows + row % block_rows;
        read_row(cache, slot, format, width, block_rows, key.data());
        total = 0;
        for (int64_t h = 0; h < heads; ++h) {
          float product = dot(&query[h * width], key.data(), width);
          total += (product < 0 ? 0 : product) * weight[h];
        }
      }
      *scores.at<float>(t, column) = total;
    }
  }
}

KERNEL(select_topk) {
  Tensor scores = call.tensor(), candidates = call.tensor();
  int64_t block_rows = call.integer();
  Tensor count = call.tensor(), rows = call.tensor();
  std::vector<float> score(scores.width());
  std::vector<int32_t> id(scores.width());
  for (int64_t t = 0; t < valid_rows(count, scores.rows()); ++t) {
    for (int64_t c = 0; c < scores.width(); ++c) {
      int32_t block = candidates.present() ? candidates.i32(t, c / block_rows) : 0;
      score[c] = block < 0 ? kNever : *scores.at<float>(t, c);
      id[c] = candidates.present() ? int32_t(block * block_rows + c % block_rows) : int32_t(c);
    }
    choose(score, id, rows.at<int32_t>(t), rows.width());
  }
}

KERNEL(select_candidate_blocks) {
  Tensor scores = call.tensor(), visible = call.tensor();
  int64_t block = call.integer();
  Tensor count = call.tensor(), out = call.tensor();
  int64_t blocks = (scores.width() + block - 1) / block;
  std::vector<float> best(blocks);
  std::vector<int32_t> id(blocks);
  for (int64_t t = 0; t < valid_rows(count, scores.rows()); ++t) {
    int64_t seen = visible.i32(t);
    for (int64_t b = 0; b < blocks; ++b) {
      id[b] = int32_t(b), best[b] = kNever;
      for (int64_t c = b * block; c < std::min({(b + 1) * block, scores.width(), seen}); ++c) {
        if (*scores.at<float>(t, c) > best[b]) best[b] = *scores.at<float>(t, c);
      }
    }
    if (seen > 0 && (seen - 1) / block < blocks) best[(seen - 1) / block] = std::numeric_limits<float>::infinity();
    choose(best, id, out.at<int32_t>(t), out.width());
  }
}
