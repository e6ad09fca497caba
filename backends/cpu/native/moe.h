// The pieces of a mixture-of-experts layer, shared by the single ops and the composite.
#pragma once

#include "gemm.h"

namespace di::DI_LEVEL {

constexpr int64_t kMostChosen = 64;

// sqrt(softplus(x)), softplus(x) = x above 20.
DI_INLINE float router_score(float x) {
  return square_root(x > 20.0f ? x : (float)__builtin_log1p(__builtin_exp((double)x)));
}

// The k experts of one token with the highest score + bias, descending, ties to the lower id; weights sum to `scaling`.
// `score` has room for E, k <= min(E, kMostChosen).
static inline void route_row(const float* logits, const float* bias, int64_t experts, int64_t k, float scaling,
                             float* score, int32_t* chosen, float* weights) {
  for (int64_t i = 0; i < experts; ++i) score[i] = router_score(logits[i]);
  float total = 0.0f;
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = -1;
    float highest = 0.0f;
    for (int64_t i = 0; i < experts; ++i) {
      bool taken = false;
      for (int64_t other = 0; other < j; ++other) taken |= chosen[other] == i;
      float rank = score[i] + bias[i];
      if (rank != rank) rank = __builtin_inff();
      if (!taken && (best < 0 || rank > highest)) best = i, highest = rank;
    }
    chosen[j] = (int32_t)best;
    weights[j] = score[best];
    total = total + score[best];
  }
  for (int64_t j = 0; j < k; ++j) weights[j] = weights[j] / (total + 1e-20f) * scaling;
}

// Stable counting sort of rows * k choices by expert; an id outside 0 .. experts - 1 gets no row. Returns the row
// count.
static inline int64_t sort_choices(const int32_t* ids, int64_t choices, int64_t experts, int32_t* offsets,
                                   int32_t* source, int32_t* inverse) {
  memset(offsets, 0, (experts + 1) * 4);
  for (int64_t i = 0; i < choices; ++i)
    if (ids[i] >= 0 && ids[i] < experts) ++offsets[ids[i] + 1];
  for (int64_t i = 0; i < experts; ++i) offsets[i + 1] += offsets[i];
  Scratch scratch;
  int32_t* next = scratch.ints(experts + 1);
  memcpy(next, offsets, (experts + 1) * 4);
  for (int64_t i = 0; i < choices; ++i) {
    const bool named = ids[i] >= 0 && ids[i] < experts;
    inverse[i] = named ? next[ids[i]]++ : -1;
    if (named) source[inverse[i]] = (int32_t)i;
  }
  return offsets[experts];
}

// y = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight; NaN stays NaN.
static inline void swiglu_row(const float* gate_up, int64_t width, float limit, float weight, float* y) {
  const vf top = splat(limit), bottom = splat(-limit), one = splat(1.0f);
  int64_t i = 0;
  for (; i < width; i += 16) {
    vf g, u;
    if (i + 16 <= width) {
      g = load(gate_up + i), u = load(gate_up + width + i);
    } else {
      float tail[32] = {};
      memcpy(tail, gate_up + i, (width - i) * 4), memcpy(tail + 16, gate_up + width + i, (width - i) * 4);
      g = load(tail), u = load(tail + 16);
    }
    g = less_select(top, g, top, g);
    u = less_select(top, u, top, less_select(u, bottom, bottom, u));
    store(y + i, g / (one + exp(splat(0.0f) - g)) * u * splat(weight));
  }
}

}  // namespace di::DI_LEVEL
