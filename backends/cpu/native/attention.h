// Attention of a few query rows over one key list, K = V: the single numeric definition of sparse and draft attention.
//
// Keys are taken 64 at a time. A piece is decoded once for all heads; its scores are lane sums over the head dimension;
// the running maximum, sum and weighted values absorb the piece, left to right. Only the key list itself matters to the
// bits.
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

// scores[h * stride + j] = q_h . k_j for `keys` decoded rows (a multiple of kKeyTile) of `dim` values (a multiple of
// 16).
template <int H>
DI_INLINE void score_tile(const float* q, const float* const* k, int64_t keys, int64_t dim, float* scores,
                          int64_t stride) {
  for (int64_t j = 0; j < keys; j += kKeyTile) {
    vf acc[H][kKeyTile];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
      for (int i = 0; i < kKeyTile; ++i) acc[h][i] = splat(0.0f);
    const float* row[kKeyTile];
#pragma GCC unroll 4
    for (int i = 0; i < kKeyTile; ++i) row[i] = k[j + i];
    for (int64_t c = 0; c < dim; c += 16) {
      vf key[kKeyTile];
#pragma GCC unroll 4
      for (int i = 0; i < kKeyTile; ++i) key[i] = load(row[i] + c);
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

static inline void score_keys(const float* q, int64_t heads, const float* const* k, int64_t keys, int64_t dim,
                              float* scores, int64_t stride) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) score_tile<4>(q + h * dim, k, keys, dim, scores + h * stride, stride);
  for (; h + 2 <= heads; h += 2) score_tile<2>(q + h * dim, k, keys, dim, scores + h * stride, stride);
  for (; h < heads; ++h) score_tile<1>(q + h * dim, k, keys, dim, scores + h * stride, stride);
}

// o_h <- o_h * keep_h + sum_j weights[h * kSplit + j] k_j, for the 16 C columns from `column` on.
template <int H, int C>
DI_INLINE void value_tile(float* o, const float* keep, const float* weights, const float* const* k, int64_t column,
                          int64_t keys, int64_t dim) {
  o += column;
  vf acc[H][C];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[h][c] = load(o + h * dim + c * 16) * splat(keep[h]);
  for (int64_t j = 0; j < keys; ++j) {
    vf key[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) key[c] = load(k[j] + column + c * 16);
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

template <int H>
static void add_values(float* o, const float* keep, const float* weights, const float* const* k, int64_t keys,
                       int64_t dim) {
  int64_t c = 0;
  for (; c + kValueTile * 16 <= dim; c += kValueTile * 16) value_tile<H, kValueTile>(o, keep, weights, k, c, keys, dim);
  for (; c < dim; c += 16) value_tile<H, 1>(o, keep, weights, k, c, keys, dim);
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

// Rows decoded for a few neighbouring query rows of one request, whose key lists nearly coincide. A hash of the stored
// rows' addresses; emptied when it is full, between two query rows.
class Decoded {
 public:
  // `longest`: keys of a query row at most. Room for three times as many, so that a row rarely finds no room for its
  // own.
  Decoded(Scratch& scratch, int64_t dim, int64_t longest, bool wanted) : dim_(dim), capacity_(3 * longest) {
    if (!wanted) return;
    while (size_ < 2 * capacity_) size_ *= 2;
    rows_ = scratch.floats(capacity_ * dim);
    at_ = scratch.ints(size_);
    names_ = static_cast<const uint8_t**>(scratch.bytes(capacity_ * sizeof(uint8_t*)));
    clear();
  }

  void clear() {
    memset(at_, 0xFF, size_ * 4);
    used_ = 0;
  }
  void reserve(int64_t keys) {
    if (used_ + keys > capacity_) clear();
  }

  const float* find(const Key& key) {
    int64_t i = (int64_t)(((uint64_t)(uintptr_t)key.codes * 0x9E3779B97F4A7C15u) >> 32) & (size_ - 1);
    for (; at_[i] >= 0; i = (i + 1) & (size_ - 1))
      if (names_[at_[i]] == key.codes) return rows_ + at_[i] * dim_;
    at_[i] = (int32_t)used_;
    names_[used_] = key.codes;
    float* row = rows_ + used_++ * dim_;
    dequantise_row(key.codes, key.scales, dim_, key.format, row);
    return row;
  }

 private:
  int64_t dim_, capacity_, size_ = 64, used_ = 0;
  float* rows_ = nullptr;
  int32_t* at_ = nullptr;
  const uint8_t** names_ = nullptr;
};

// Starts the loads of a stored row: rows of a paged cache lie where no prefetcher expects them.
DI_INLINE void prefetch(const Key& key, int64_t dim) {
  const int64_t bytes = format_value_bytes(key.format, dim);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(key.codes + i);
  __builtin_prefetch(key.scales);
}

// q [heads][dim] over the key list into o [heads][dim]; sink[h % sinks] joins the denominator. Without keys: zeros.
// `shared` (or null) holds rows that other query rows decoded.
static inline void attend(const float* q, int64_t heads, int64_t dim, const Key* keys, int64_t count, const float* sink,
                          int64_t sinks, float scale, float* o, Decoded* shared) {
  memset(o, 0, heads * dim * 4);
  if (count == 0) return;
  Scratch scratch;
  float *buffer = scratch.floats((shared ? 1 : kSplit) * dim), *weights = scratch.floats(heads * kSplit);
  float *top = scratch.floats(heads), *total = scratch.floats(heads), *keep = scratch.floats(heads);
  const float* k[kSplit];
  if (shared) shared->reserve(count);
  for (int64_t h = 0; h < heads; ++h) top[h] = -__builtin_inff(), total[h] = 0.0f;
  for (int64_t first = 0; first < count; first += kSplit) {
    const int64_t size = count - first < kSplit ? count - first : kSplit, padded = round_up(size, kKeyTile);
    for (int64_t j = 0; j < size; ++j) {
      const Key& key = keys[first + j];
      if (shared) {
        k[j] = shared->find(key);
        continue;
      }
      if (first + j + 2 < count) prefetch(keys[first + j + 2], dim);
      dequantise_row(key.codes, key.scales, dim, key.format, buffer + j * dim);
      k[j] = buffer + j * dim;
    }
    for (int64_t j = size; j < padded; ++j) k[j] = k[0];  // scored, then ignored
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
    for (int64_t s = first; s <= last; ++s)
      add_key(cache, base[request] + (s - origin[request]) % modulo[request], keys, count);
  }
};

}  // namespace di::DI_LEVEL
