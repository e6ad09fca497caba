// Mixture of experts, around the grouped GEMM: routing, sorting by expert, activation, and the sum that ends a layer.
#include <cmath>
#include <numeric>

#include "numeric.h"

using namespace toy;

KERNEL(route_topk) {
  Tensor logits = call.tensor(), bias = call.tensor();
  int64_t k = call.integer();
  float scaling = call.number();
  Tensor expert_map = call.tensor(), count = call.tensor(), ids = call.tensor(), weights = call.tensor(), counts = call.tensor();
  int64_t rows = valid_rows(count, logits.rows()), experts = logits.width();
  for (int64_t p = 0; p < counts.rows(); ++p) *counts.at<int32_t>(p) = 0;
  std::vector<float> score(experts), biased(experts);
  std::vector<int32_t> order(experts);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      float x = *logits.at<float>(t, e);
      score[e] = std::sqrt(x > 20 ? x : std::log1p(std::exp(x)));
      biased[e] = score[e] + *bias.at<float>(e);
    }
    std::iota(order.begin(), order.end(), 0);
    auto better = [&](int32_t a, int32_t b) {
      if (std::isnan(biased[a]) || std::isnan(biased[b])) return std::isnan(biased[a]) && !std::isnan(biased[b]);
      return biased[a] > biased[b];
    };
    std::stable_sort(order.begin(), order.end(), better);
    float total = 0;
    for (int64_t j = 0; j < k; ++j) total += score[order[j]];
    for (int64_t j = 0; j < k; ++j) {
      int32_t physical = expert_map.present() ? expert_map.i32(order[j]) : order[j];
      *ids.at<int32_t>(t, j) = physical;
      *weights.at<float>(t, j) = score[order[j]] / (total + 1e-20f) * scaling;
      if (physical >= 0 && physical < counts.rows()) ++*counts.at<int32_t>(physical);
    }
  }
}

KERNEL(permute) {
  Tensor x = call.tensor(), x_scale = call.tensor(), ids = call.tensor();
  int64_t experts = call.integer();
  Tensor count = call.tensor(), out = call.tensor(), out_scale = call.tensor(), offsets = call.tensor(), source = call.tensor();
  Tensor inverse = call.tensor();
  int64_t rows = valid_rows(count, ids.rows()), k = ids.width(), next = 0;
  size_t value_bytes = size_t(x.width()) * (x.dtype == DI_F32 ? 4 : x.dtype == DI_BF16 ? 2 : 1);
  int64_t element = int64_t(value_bytes) / x.width();
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t j = 0; j < k; ++j) *inverse.at<int32_t>(t, j) = -1;
  }
  for (int64_t e = 0; e < experts; ++e) {
    *offsets.at<int32_t>(e) = int32_t(next);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t j = 0; j < k; ++j) {
        if (ids.i32(t, j) != e) continue;
        *source.at<int32_t>(next) = int32_t(t * k + j);
        *inverse.at<int32_t>(t, j) = int32_t(next);
        std::memcpy(out.at<char>(0) + out.offset(next) * element, x.at<char>(0) + x.offset(t) * element, value_bytes);
        if (out_scale.present()) std::memcpy(out_scale.at<char>(next), x_scale.at<char>(t), size_t(out_scale.width()));
        ++next;
      }
    }
  }
  *offsets.at<int32_t>(experts) = int32_t(next);
}

KERNEL(swiglu_quantise) {
  Tensor gate_up = call.tensor(), weights = call.tensor(), source = call.tensor();
  float limit = call.number();
  Tensor count = call.tensor(), out = call.tensor(), out_scale = call.tensor();
  int64_t rows = valid_rows(count, gate_up.rows()), width = out.width();
  std::vector<float> both(2 * width), value(width);
  auto at_most = [](float x, float most) { return x > most ? most : x; };  // a NaN stays a NaN
  for (int64_t r = 0; r < rows; ++r) {
    load(gate_up, gate_up.offset(r), 2 * width, both.data());
    float weight = weights.present() ? static_cast<const float*>(weights.data)[source.i32(r) * weights.stride[0]] : 1.0f;
    for (int64_t i = 0; i < width; ++i) {
      float gate = at_most(both[i], limit), up = -at_most(-at_most(both[width + i], limit), limit);
      value[i] = gate / (1 + std::exp(-gate)) * up * weight;
    }
    store_row(out, out_scale, r, value.data());
  }
}

KERNEL(unpermute) {
  Tensor rows = call.tensor(), inverse = call.tensor(), shared = call.tensor(), count = call.tensor(), out = call.tensor();
  int64_t tokens = valid_rows(count, out.rows()), width = out.width();
  std::vector<float> sum(width), row(width);
  auto add = [&](const Tensor& t, int64_t index) {
    load(t, t.offset(index), width, row.data());
    for (int64_t i = 0; i < width; ++i) sum[i] += row[i];
  };
  for (int64_t t = 0; t < tokens; ++t) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t j = 0; j < inverse.width(); ++j) {
      if (inverse.i32(t, j) >= 0) add(rows, inverse.i32(t, j));
    }
    if (shared.present()) add(shared, t);
    store_row(out, Tensor{}, t, sum.data());
  }
}
