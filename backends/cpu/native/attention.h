// Attention of a few query rows over one key list, K = V: the single numeric definition of sparse and draft attention.
//
// Keys are taken 64 at a time. A piece is decoded once for all heads; its scores are lane sums over the head dimension; the
// running maximum, sum and weighted values absorb the piece, left to right. Only the key list itself matters to the bits.
#pragma once

#include "cache.h"

namespace di::DI_LEVEL {

constexpr int64_t kSplit = 64;
constexpr int kHeadTile = 4, kKeyTile = kWidth == 16 ? 4 : 1, kValueTile = kWidth == 16 ? 4 : 1;

// A stored row: where its codes and scales are, and in which format.
struct Key {
  const uint8_t *codes, *scales;
  int format;
};

DI_INLINE void add_key(const Cache& cache, int64_t slot, Key* keys, int64_t* count) {
  if (cache.holds(slot)) keys[(*count)++] = {cache.codes_at(slot), cache.scales_at(slot), cache.format};
}

// scores[h * stride + j] = q_h . k_j for `keys` keys (a multiple of kKeyTile) of `dim` values (a multiple of 16).
template <int H> DI_INLINE void score_tile(const float* q, const float* k, int64_t keys, int64_t dim, float* scores, int64_t stride) {
  for (int64_t j = 0; j < keys; j += kKeyTile) {
    vf acc[H][kKeyTile];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
      for (int i = 0; i < kKeyTile; ++i) acc[h][i] = splat(0.0f);
    for (int64_t c = 0; c < dim; c += 16) {
      vf key[kKeyTile];
#pragma GCC unroll 4
      for (int i = 0; i < kKeyTile; ++i) key[i] = load(k + (j + i) * dim + c);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const vf x = load(q + h * dim + c);
#pragma GCC unroll 4
        for (int i = 0; i < kKeyTile; ++i) acc[h][i] = fma(x, key[i], acc[h][i]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
      for (int i = 0; i < kKeyTile; ++i) scores[h * stride + j + i] = sum(acc[h][i]);
  }
}

static inline void score_keys(const float* q, int64_t heads, const float* k, int64_t keys, int64_t dim, float* scores, int64_t stride) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) score_tile<4>(q + h * dim, k, keys, dim, scores + h * stride, stride);
  for (; h + 2 <= heads; h += 2) score_tile<2>(q + h * dim, k, keys, dim, scores + h * stride, stride);
  for (; h < heads; ++h) score_tile<1>(q + h * dim, k, keys, dim, scores + h * stride, stride);
}

// o_h <- o_h * keep_h + sum_j weights[h * kSplit + j] k_j.
template <int H, int C> DI_INLINE void value_tile(float* o, const float* keep, const float* weights, const float* k, int64_t keys, int64_t dim) {
  vf acc[H][C];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[h][c] = load(o + h * dim + c * 16) * splat(keep[h]);
  for (int64_t j = 0; j < keys; ++j) {
    vf key[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) key[c] = load(k + j * dim + c * 16);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const vf w = splat(weights[h * kSplit + j]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[h][c] = fma(w, key[c], acc[h][c]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(o + h * dim + c * 16, acc[h][c]);
}

template <int H> static void add_values(float* o, const float* keep, const float* weights, const float* k, int64_t keys, int64_t dim) {
  int64_t c = 0;
  for (; c + kValueTile * 16 <= dim; c += kValueTile * 16) value_tile<H, kValueTile>(o + c, keep, weights, k + c, keys, dim);
  for (; c < dim; c += 16) value_tile<H, 1>(o + c, keep, weights, k + c, keys, dim);
}

// Turns a head's scores into weights and moves its running maximum and sum; returns what the old values are worth.
DI_INLINE float soften(float* scores, int64_t keys, float scale, float* top, float* total) {
  for (int64_t j = keys; j < kSplit; ++j) scores[j] = -__builtin_inff();
  vf x[kSplit / 16], highest = splat(*top);
  for (int i = 0; i < kSplit / 16; ++i) x[i] = load(scores + 16 * i) * splat(scale), highest = max(highest, x[i]);
  const float peak = max_lane(highest), keep = exp(*top - peak);
  vf added = splat(0.0f);
  for (int i = 0; i < kSplit / 16; ++i) {
    const vf w = exp(x[i] - splat(peak));
    store(scores + 16 * i, w);
    added = added + w;
  }
  *total = __builtin_fmaf(*total, keep, sum(added));
  *top = peak;
  return keep;
}

// q [heads][dim] over the key list into o [heads][dim]; sink[h % sinks] joins the denominator. Without keys: zeros.
static inline void attend(const float* q, int64_t heads, int64_t dim, const Key* keys, int64_t count, const float* sink, int64_t sinks,
                          float scale, float* o) {
  memset(o, 0, heads * dim * 4);
  if (count == 0) return;
  Scratch scratch;
  float *k = scratch.floats(kSplit * dim), *weights = scratch.floats(heads * kSplit);
  float *top = scratch.floats(heads), *total = scratch.floats(heads), *keep = scratch.floats(heads);
  for (int64_t h = 0; h < heads; ++h) top[h] = -__builtin_inff(), total[h] = 0.0f;
  for (int64_t first = 0; first < count; first += kSplit) {
    const int64_t size = count - first < kSplit ? count - first : kSplit, padded = round_up(size, kKeyTile);
    for (int64_t j = 0; j < size; ++j) dequantise_row(keys[first + j].codes, keys[first + j].scales, dim, keys[first + j].format, k + j * dim);
    if (padded > size) memset(k + size * dim, 0, (padded - size) * dim * 4);
    score_keys(q, heads, k, padded, dim, weights, kSplit);
    for (int64_t h = 0; h < heads; ++h) keep[h] = soften(weights + h * kSplit, size, scale, top + h, total + h);
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) add_values<4>(o + h * dim, keep + h, weights + h * kSplit, k, size, dim);
    for (; h < heads; ++h) add_values<1>(o + h * dim, keep + h, weights + h * kSplit, k, size, dim);
  }
  for (int64_t h = 0; h < heads; ++h) {
    const vf denominator = splat(total[h] + exp(sink[h % sinks] - top[h]));
    for (int64_t c = 0; c < dim; c += 16) store(o + h * dim + c, load(o + h * dim + c) / denominator);
  }
}

// The window of a request: position s is at base + (s - origin) % modulo.
struct Window {
  Cache cache;
  const int32_t *base, *origin, *modulo;
  int64_t requests, tokens;

  void add(int64_t request, int64_t last, Key* keys, int64_t* count) const {
    if (request < 0 || request >= requests || modulo[request] <= 0) return;
    int64_t first = last - tokens + 1;
    first = first < 0 ? 0 : first;
    first = first < origin[request] ? origin[request] : first;
    for (int64_t s = first; s <= last; ++s) add_key(cache, base[request] + (s - origin[request]) % modulo[request], keys, count);
  }
};

}  // namespace di::DI_LEVEL
