// Attention over gathered rows: pieces of 64 keys of a row's own list, merged left to right, and a sink at the end.
#include <cmath>
#include <limits>

#include "numeric.h"

using namespace toy;

namespace {

constexpr int64_t kPiece = 64;

struct Window {
  Tensor store, base, origin, modulo;
  int64_t format;

  /// Decodes the rows of positions max(0, origin, last - tokens + 1)..last of a request behind `keys`.
  void gather(int64_t request, int64_t last, int64_t tokens, int64_t width, std::vector<float>& keys) const {
    int64_t start = origin.i32(request);
    for (int64_t s = std::max({int64_t(0), start, last - tokens + 1}); s <= last; ++s) {
      keys.resize(keys.size() + width);
      int64_t slot = base.i32(request) + (s - start) % modulo.i32(request);
      read_row(store, slot, format, width, 0, &keys[keys.size() - width]);
    }
  }
};

/// out [width] of one query over keys [n, width]; keys are values too.
void attend(const float* query, const std::vector<float>& keys, int64_t width, float sink, float scale, float* out) {
  const int64_t n = int64_t(keys.size()) / width;
  std::fill(out, out + width, 0.0f);
  if (n == 0) return;
  float peak = -std::numeric_limits<float>::infinity(), total = 0;
  std::vector<float> sum(width);
  for (int64_t first = 0; first < n; first += kPiece) {
    int64_t size = std::min(kPiece, n - first);
    float weight[kPiece], highest = -std::numeric_limits<float>::infinity(), piece = 0;
    for (int64_t j = 0; j < size; ++j) {
      weight[j] = dot(query, &keys[(first + j) * width], width) * scale;
      highest = std::max(highest, weight[j]);
    }
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t j = 0; j < size; ++j) {
      weight[j] = std::exp(weight[j] - highest);
      piece += weight[j];
      const float* key = &keys[(first + j) * width];
      for (int64_t i = 0; i < width; ++i) sum[i] += weight[j] * key[i];
    }
    float merged = std::max(peak, highest), before = std::exp(peak - merged), now = std::exp(highest - merged);
    total = total * before + piece * now;
    for (int64_t i = 0; i < width; ++i) out[i] = out[i] * before + sum[i] * now;
    peak = merged;
  }
  float denominator = total + std::exp(sink - peak);
  for (int64_t i = 0; i < width; ++i) out[i] /= denominator;
}

void attend_heads(const Tensor& q, int64_t row, const std::vector<float>& keys, const Tensor& sink, float scale, const Tensor& out) {
  const int64_t width = q.width();
  std::vector<float> query(width), result(width);
  for (int64_t h = 0; h < q.shape[1]; ++h) {
    load(q, q.offset(row, h), width, query.data());
    attend(query.data(), keys, width, *sink.at<float>(h), scale, result.data());
    store(out, out.offset(row, h), width, result.data());
  }
}

}  // namespace

KERNEL(sparse_attention) {
  Tensor q = call.tensor();
  Window window{call.tensor(), call.tensor(), call.tensor(), call.tensor(), call.integer()};
  Tensor compressed = call.tensor(), block_table = call.tensor();
  int64_t format = call.integer(), block_rows = call.integer();
  Tensor rows = call.tensor(), row_to_req = call.tensor(), positions = call.tensor(), sink = call.tensor();
  float scale = call.number();
  int64_t window_tokens = call.integer();
  Tensor count = call.tensor(), out = call.tensor();
  const int64_t width = q.width();
  std::vector<float> keys;
  for (int64_t t = 0; t < valid_rows(count, q.rows()); ++t) {
    int64_t request = row_to_req.i32(t), position = positions.i32(t);
    if (request < 0 || position < 0) continue;
    keys.clear();
    window.gather(request, position, window_tokens, width, keys);
    for (int64_t j = 0; rows.present() && j < rows.width() && rows.i32(t, j) >= 0; ++j) {
      int64_t row = rows.i32(t, j);
      keys.resize(keys.size() + width);
      int64_t slot = block_table.i32(request, row / block_rows) * block_rows + row % block_rows;
      read_row(compressed, slot, format, width, block_rows, &keys[keys.size() - width]);
    }
    attend_heads(q, t, keys, sink, scale, out);
  }
}

KERNEL(draft_attention) {
  Tensor q = call.tensor();
  Window window{call.tensor(), call.tensor(), call.tensor(), call.tensor(), call.integer()};
  Tensor anchor = call.tensor(), draft_kv = call.tensor();
  int64_t block = call.integer();
  Tensor sink = call.tensor();
  float scale = call.number();
  int64_t window_tokens = call.integer();
  Tensor count = call.tensor(), out = call.tensor();
  const int64_t width = q.width();
  std::vector<float> keys;
  for (int64_t request = 0; request < valid_rows(count, anchor.rows()); ++request) {
    if (anchor.i32(request) < 0) continue;
    keys.clear();
    window.gather(request, anchor.i32(request), window_tokens, width, keys);
    for (int64_t row = request * block; row < (request + 1) * block; ++row) {
      keys.resize(keys.size() + width);
      read_row(draft_kv, row, window.format, width, 0, &keys[keys.size() - width]);
    }
    for (int64_t row = request * block; row < (request + 1) * block; ++row) attend_heads(q, row, keys, sink, scale, out);
  }
}
