// KV rows into the caches and out of them.
#include <cmath>

#include "numeric.h"

using namespace toy;

namespace {

void store_rows(const Tensor& x, const Tensor& slots, int64_t format, int64_t block_rows, const Tensor& count, const Tensor& cache) {
  std::vector<float> row(x.width());
  for (int64_t t = 0; t < valid_rows(count, x.rows()); ++t) {
    if (slots.i32(t) < 0) continue;
    load(x, x.offset(t), x.width(), row.data());
    write_row(cache, slots.i32(t), format, x.width(), block_rows, row.data());
  }
}

void store_paged(Call& call) {
  Tensor x = call.tensor(), slots = call.tensor();
  int64_t format = call.integer(), block_rows = call.integer();
  Tensor count = call.tensor(), cache = call.tensor();
  store_rows(x, slots, format, block_rows, count, cache);
}

/// Rounds values to a dtype and back.
void round_to(int32_t dtype, std::vector<float>& values) {
  if (dtype != DI_BF16) return;
  for (float& value : values) value = from_bf16(to_bf16(value));
}

/// Sum by halving, which is how the reference adds: its bits depend on the row alone.
float row_sum(std::vector<float> values) {
  while (values.size() > 1) {
    size_t half = values.size() / 2;
    for (size_t i = 0; i < half; ++i) values[i] += values[half + i];
    if (values.size() % 2) values[half] = values.back();
    values.resize(values.size() - half);
  }
  return values.empty() ? 0 : values[0];
}

/// The last r values of a row turned by its position's angles; adjacent values are pairs.
void rotate(std::vector<float>& row, const Tensor& table, int64_t position) {
  int64_t half = table.width() / 2;
  const float *cosine = table.at<float>(position), *sine = cosine + half;
  float* pair = row.data() + row.size() - 2 * half;
  for (int64_t i = 0; i < half; ++i, pair += 2) {
    float a = pair[0], b = pair[1];
    pair[0] = a * cosine[i] - b * sine[i];
    pair[1] = a * sine[i] + b * cosine[i];
  }
}

}  // namespace

KERNEL(store_window_kv) {
  Tensor x = call.tensor(), slots = call.tensor();
  int64_t format = call.integer();
  Tensor count = call.tensor(), cache = call.tensor();
  store_rows(x, slots, format, 0, count, cache);
}

KERNEL(store_compressed_kv) { store_paged(call); }

KERNEL(store_index_k) { store_paged(call); }

// [write_kv]
KERNEL(write_kv) {
  Tensor x = call.tensor(), norm_weight = call.tensor();
  float eps = call.number();
  Tensor positions = call.tensor(), table = call.tensor(), slots = call.tensor();
  int64_t format = call.integer(), block_rows = call.integer();
  Tensor count = call.tensor(), cache = call.tensor(), latent = call.tensor();
  const int64_t width = x.width();
  std::vector<float> row(width), squares(width), weight(width);
  load(norm_weight, 0, width, weight.data());
  for (int64_t t = 0; t < valid_rows(count, x.rows()); ++t) {
    if (slots.i32(t) < 0) continue;
    load(x, x.offset(t), width, row.data());
    for (int64_t i = 0; i < width; ++i) squares[i] = row[i] * row[i];
    float scale = 1.0f / std::sqrt(row_sum(squares) / float(width) + eps);
    for (int64_t i = 0; i < width; ++i) row[i] = weight[i] * row[i] * scale;
    round_to(x.dtype, row);
    if (latent.present()) store(latent, latent.offset(t), width, row.data());
    rotate(row, table, positions.i32(t));
    round_to(x.dtype, row);
    write_row(cache, slots.i32(t), format, width, block_rows, row.data());
  }
}
// [/write_kv]

KERNEL(load_kv) {
  Tensor cache = call.tensor(), slots = call.tensor();
  int64_t format = call.integer(), block_rows = call.integer();
  Tensor out = call.tensor();
  std::vector<float> row(out.width());
  for (int64_t t = 0; t < out.rows(); ++t) {
    if (slots.i32(t) < 0) continue;
    read_row(cache, slots.i32(t), format, out.width(), block_rows, row.data());
    store(out, out.offset(t), out.width(), row.data());
  }
}

KERNEL(compress_kv) {
  Tensor value = call.tensor(), gate = call.tensor(), positions = call.tensor(), row_to_req = call.tensor(), cu_q = call.tensor();
  Tensor state_slots = call.tensor(), complete = call.tensor();
  int64_t ratio = call.integer();
  Tensor carry = call.tensor(), out = call.tensor();
  const int64_t width = value.width(), length = carry.shape[1];
  auto kept = [&](int64_t slot, int64_t position, int64_t which) { return carry.at<float>(slot, position % length, which); };
  std::vector<float> pooled(width);
  for (int64_t g = 0; g < complete.rows(); ++g) {
    if (complete.i32(g) < 0) continue;
    int64_t last = complete.i32(g), request = row_to_req.i32(last), start = cu_q.i32(request);
    std::vector<const float*> values, gates;
    for (int64_t position = positions.i32(last) - ratio + 1; position <= positions.i32(last); ++position) {
      int64_t row = start + position - positions.i32(start), slot = std::max(state_slots.i32(request), 0);
      values.push_back(row >= start ? value.at<float>(row) : kept(slot, position, 0));
      gates.push_back(row >= start ? gate.at<float>(row) : kept(slot, position, 1));
    }
    for (int64_t i = 0; i < width; ++i) {
      float highest = gates[0][i], sum = 0, weighed = 0;
      for (auto* one : gates) highest = std::max(highest, one[i]);
      for (size_t m = 0; m < values.size(); ++m) {
        float weight = std::exp(gates[m][i] - highest);
        sum += weight, weighed += weight * values[m][i];
      }
      pooled[i] = weighed / sum;
    }
    store(out, out.offset(g), width, pooled.data());
  }
  for (int64_t request = 0; request < state_slots.rows(); ++request) {
    int64_t first = std::max<int64_t>(cu_q.i32(request), cu_q.i32(request + 1) - length);
    for (int64_t row = first; row < cu_q.i32(request + 1) && state_slots.i32(request) >= 0; ++row) {
      std::memcpy(kept(state_slots.i32(request), positions.i32(row), 0), value.at<float>(row), size_t(4 * width));
      std::memcpy(kept(state_slots.i32(request), positions.i32(row), 1), gate.at<float>(row), size_t(4 * width));
    }
  }
}
