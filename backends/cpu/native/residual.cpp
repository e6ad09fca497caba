// Single-pass hyper-connections: hyper_connection_pre and _post, stream_collapse, and the composite residual_site.
//
// A token's work: the sum of the old streams (post), the projection of the new ones (pre), their weighted sum, a norm
// and its codes. All rows stay in cache between the parts. Sinkhorn runs for sixteen tokens at once, one token a lane.
#include "norm.h"

namespace di::DI_LEVEL {
namespace {

constexpr int64_t kMostStreams = 8, kMostMixes = (2 + kMostStreams) * kMostStreams;
constexpr int64_t kTokens = 16;  // tokens of a task, and lanes of the Sinkhorn

struct Site {
  const di_tensor &streams, &fn, &base, &scale, &pre_prev, &pre, &post, &comb;
  float rms_eps, hc_eps;
  int64_t iterations, m, hidden, mixes;
};

// The float32 streams of one token, m * hidden values.
DI_INLINE void read_streams(const di_tensor& streams, int64_t row, float* s) {
  read_row(row_at(streams, row), streams.dtype, streams.shape[1] * streams.shape[2], s);
}

// S'_k = post[k] y + sum_i comb[i, k] S_i, rounded to the streams' dtype; s is [m][hidden], y [hidden].
void mix_streams(float* s, const float* y, const float* post, const float* comb, int64_t m, int64_t hidden, int dtype) {
  for (int64_t i = 0; i < hidden; i += 16) {
    vf old[kMostStreams];
    const vf fresh = load(y + i);
    for (int64_t j = 0; j < m; ++j) old[j] = load(s + j * hidden + i);
    for (int64_t k = 0; k < m; ++k) {
      vf value = splat(post[k]) * fresh;
      for (int64_t j = 0; j < m; ++j) value = fma(splat(comb[j * m + k]), old[j], value);
      store(s + k * hidden + i, dtype == DI_BF16 ? round_bf16(value) : value);
    }
  }
}

// sum_j pre[j] S_j, not yet rounded.
void collapse(const float* s, const float* pre, int64_t m, int64_t hidden, float* x) {
  for (int64_t i = 0; i < hidden; i += 16) {
    vf value = splat(pre[0]) * load(s + i);
    for (int64_t j = 1; j < m; ++j) value = fma(splat(pre[j]), load(s + j * hidden + i), value);
    store(x + i, value);
  }
}

template <int R>
DI_INLINE void dots(const float* s, const float* w, int64_t width, float* z) {
  vf acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = splat(0.0f);
  for (int64_t i = 0; i < width; i += 16) {
    const vf x = load(s + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = fma(x, load(w + r * width + i), acc[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) z[r] = sum(acc[r]);
}

// z = (f fn^T) / sqrt(mean(f^2) + eps), scaled and shifted: the coefficients before their non-linear maps.
void project(const Site& site, const float* s, float* z) {
  const int64_t width = site.m * site.hidden;
  const float* fn = data_of<float>(site.fn);
  int64_t r = 0;
  for (; r + 8 <= site.mixes; r += 8) dots<8>(s, fn + r * width, width, z + r);
  for (; r < site.mixes; ++r) dots<1>(s, fn + r * width, width, z + r);
  const float factor = 1.0f / square_root(sum_squares(s, width) / (float)width + site.rms_eps);
  for (r = 0; r < site.mixes; ++r) {
    const int part = r < site.m ? 0 : r < 2 * site.m ? 1 : 2;
    z[r] = __builtin_fmaf(z[r] * factor, data_of<float>(site.scale)[part], data_of<float>(site.base)[r]);
  }
}

// k: m * m vectors, one token a lane. Row softmax + eps, then alternating normalisation.
void sinkhorn(vf* k, int64_t m, float eps, int64_t iterations) {
  const vf tiny = splat(eps);
  for (int64_t i = 0; i < m; ++i) {
    vf top = k[i * m], total = splat(0.0f);
    for (int64_t j = 1; j < m; ++j) top = max(top, k[i * m + j]);
    for (int64_t j = 0; j < m; ++j) k[i * m + j] = exp(k[i * m + j] - top), total = total + k[i * m + j];
    for (int64_t j = 0; j < m; ++j) k[i * m + j] = k[i * m + j] / total + tiny;
  }
  for (int64_t step = 0; step < iterations; ++step) {
    if (step > 0)
      for (int64_t i = 0; i < m; ++i) {
        vf total = k[i * m];
        for (int64_t j = 1; j < m; ++j) total = total + k[i * m + j];
        const vf inverse = splat(1.0f) / (total + tiny);
        for (int64_t j = 0; j < m; ++j) k[i * m + j] = k[i * m + j] * inverse;
      }
    for (int64_t j = 0; j < m; ++j) {
      vf total = k[j];
      for (int64_t i = 1; i < m; ++i) total = total + k[i * m + j];
      const vf inverse = splat(1.0f) / (total + tiny);
      for (int64_t i = 0; i < m; ++i) k[i * m + j] = k[i * m + j] * inverse;
    }
  }
}

// z [tokens][mixes] to pre, post and comb of rows first .. first + tokens.
void coefficients(const Site& site, const float* z, int64_t first, int64_t tokens) {
  const int64_t m = site.m;
  vf lanes[kMostMixes];
  for (int64_t r = 0; r < site.mixes; ++r) {
    float column[16] = {};
    for (int64_t i = 0; i < tokens; ++i) column[i] = z[i * site.mixes + r];
    lanes[r] = load(column);
  }
  for (int64_t j = 0; j < m; ++j) {
    lanes[j] = sigmoid(lanes[j]) + splat(site.hc_eps);
    lanes[m + j] = splat(2.0f) * sigmoid(lanes[m + j]);
  }
  sinkhorn(lanes + 2 * m, m, site.hc_eps, site.iterations);
  for (int64_t r = 0; r < site.mixes; ++r) {
    float column[16];
    store(column, lanes[r]);
    float* to = r < m       ? data_of<float>(site.pre) + first * m + r
                : r < 2 * m ? data_of<float>(site.post) + first * m + r - m
                            : data_of<float>(site.comb) + first * m * m + r - 2 * m;
    const int64_t stride = r < 2 * m ? m : m * m;
    for (int64_t i = 0; i < tokens; ++i) to[i * stride] = column[i];
  }
}

int check_site(const Site& site, int64_t rows, di_error* e) {
  const int64_t m = site.m, mixes = site.mixes;
  DI_NEED(m >= 1 && m <= kMostStreams && site.hidden % 16 == 0,
          "hyper-connections: 1 to 8 streams of a multiple of 16, got %ld of %ld", (long)m, (long)site.hidden);
  DI_NEED(is_stream(site.streams) && is_packed(site.streams, rows * m * site.hidden),
          "hyper-connections: streams must be [T, m, H], contiguous");
  DI_NEED(is_packed(site.fn, DI_F32, mixes * m * site.hidden), "hyper-connections: fn must be float32 [(2+m)m, mH]");
  DI_NEED(is_packed(site.base, DI_F32, mixes) && is_packed(site.scale, DI_F32, 3),
          "hyper-connections: base and scale must be float32");
  DI_NEED(is_packed(site.pre_prev, DI_F32, rows * m) && is_packed(site.pre, DI_F32, rows * m) &&
              is_packed(site.post, DI_F32, rows * m) && is_packed(site.comb, DI_F32, rows * m * m),
          "hyper-connections: pre, post and comb must be float32 [T, m] and [T, m, m], contiguous");
  return DI_OK;
}

double site_ns(const Site& site, int64_t rows) {
  return rows * (600.0 + site.m * site.hidden * (0.15 + site.mixes / 25.0));
}

// Runs the site for all rows: before(row, s) may change the streams, after(row, x) takes the collapsed input.
template <class Before, class After>
void run_site(const Site& site, int64_t rows, Before before, After after) {
  const int64_t width = site.m * site.hidden;
  // One token a task when there are few, so that threads share them; lanes of the Sinkhorn stay apart in any case.
  const int64_t step = rows <= 8 ? 1 : kTokens;
  parallel((rows + step - 1) / step, site_ns(site, rows), [&](int64_t task) {
    Scratch scratch;
    float *s = scratch.floats(width), *x = scratch.floats(site.hidden), *z = scratch.floats(step * site.mixes);
    const int64_t first = task * step, tokens = first + step <= rows ? step : rows - first;
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t row = first + i;
      read_streams(site.streams, row, s);
      before(row, s);
      project(site, s, z + i * site.mixes);
      collapse(s, data_of<float>(site.pre_prev) + row * site.m, site.m, site.hidden, x);
      after(row, x);
    }
    coefficients(site, z, first, tokens);
  });
}

}  // namespace

// streams, fn, base, scale, pre_prev, rms_eps, hc_eps, iterations, count?, out, pre, post, comb
int hyper_connection_pre(DI_ARGS) {
  DI_NEED_CALL(10, 1, 2);
  const di_tensor &streams = t[0], &count = t[5], &out = t[6];
  DI_NEED(streams.ndim == 3, "hyper_connection_pre: streams must be [T, m, H]");
  const int64_t rows = streams.shape[0], m = streams.shape[1], hidden = streams.shape[2];
  const Site site{streams, t[1],           t[2],           t[3],    t[4], t[7],   t[8],
                  t[9],    (float)p->d[0], (float)p->d[1], p->i[0], m,    hidden, (2 + m) * m};
  if (int status = check_site(site, rows, e)) return status;
  DI_NEED(is_stream(out) && is_matrix(out, rows, hidden), "hyper_connection_pre: out must be [T, %ld]", (long)hidden);
  DI_NEED(is_count(count), "hyper_connection_pre: count must be int32");
  run_site(
      site, valid_rows(count, rows), [](int64_t, float*) {},
      [&](int64_t row, float* x) { write_row(row_at(out, row), out.dtype, hidden, x); });
  return DI_OK;
}

// y [T, H], post, comb, count?, streams inout
int hyper_connection_post(DI_ARGS) {
  DI_NEED_CALL(5, 0, 0);
  const di_tensor &y = t[0], &post = t[1], &comb = t[2], &count = t[3], &streams = t[4];
  DI_NEED(streams.ndim == 3 && is_stream(streams) && streams.shape[1] <= kMostStreams && streams.shape[2] % 16 == 0,
          "hyper_connection_post: streams must be [T, m, H] with at most 8 streams and H a multiple of 16");
  const int64_t all = streams.shape[0], m = streams.shape[1], hidden = streams.shape[2];
  DI_NEED(is_packed(streams, 0) && is_stream(y) && is_matrix(y, all, hidden),
          "hyper_connection_post: y must be [T, H], streams contiguous");
  DI_NEED(is_packed(post, DI_F32, all * m) && is_packed(comb, DI_F32, all * m * m),
          "hyper_connection_post: post and comb must be float32");
  DI_NEED(is_count(count), "hyper_connection_post: count must be int32");
  const int64_t rows = valid_rows(count, all);
  parallel(rows, rows * m * hidden * 0.4, [&](int64_t row) {
    Scratch scratch;
    float *s = scratch.floats(m * hidden), *fresh = scratch.floats(hidden);
    read_streams(streams, row, s);
    read_row(row_at(y, row), y.dtype, hidden, fresh);
    mix_streams(s, fresh, data_of<float>(post) + row * m, data_of<float>(comb) + row * m * m, m, hidden, streams.dtype);
    write_row(row_at(streams, row), streams.dtype, m * hidden, s);
  });
  return DI_OK;
}

// streams, pre f32[T, m], count?, out
int stream_collapse(DI_ARGS) {
  DI_NEED_CALL(4, 0, 0);
  const di_tensor &streams = t[0], &pre = t[1], &count = t[2], &out = t[3];
  DI_NEED(streams.ndim == 3 && is_stream(streams) && is_packed(streams, 0) && streams.shape[2] % 16 == 0,
          "stream_collapse: streams must be [T, m, H], contiguous, H a multiple of 16");
  const int64_t all = streams.shape[0], m = streams.shape[1], hidden = streams.shape[2];
  DI_NEED(is_packed(pre, DI_F32, all * m), "stream_collapse: pre must be float32 [T, m]");
  DI_NEED(is_stream(out) && is_matrix(out, all, hidden) && is_count(count), "stream_collapse: out must be [T, %ld]",
          (long)hidden);
  const int64_t rows = valid_rows(count, all);
  parallel(rows, rows * m * hidden * 0.2, [&](int64_t row) {
    Scratch scratch;
    float *s = scratch.floats(m * hidden), *x = scratch.floats(hidden);
    read_streams(streams, row, s);
    collapse(s, data_of<float>(pre) + row * m, m, hidden, x);
    write_row(row_at(out, row), out.dtype, hidden, x);
  });
  return DI_OK;
}

// y?, post?, comb?, fn, base, scale, pre_prev, norm_weight, rms_eps, hc_eps, iterations, count?, streams inout, out,
// out_codes?, out_scales?, pre, post_out, comb_out
int residual_site(DI_ARGS) {
  DI_NEED_CALL(16, 1, 2);
  const di_tensor &y = t[0], &post = t[1], &comb = t[2], &weight = t[7], &count = t[8], &streams = t[9], &out = t[10];
  const di_tensor &codes = t[11], &scales = t[12];
  DI_NEED(streams.ndim == 3, "residual_site: streams must be [T, m, H]");
  const int64_t rows = streams.shape[0], m = streams.shape[1], hidden = streams.shape[2];
  const Site site{streams, t[3],           t[4],           t[5],    t[6], t[13],  t[14],
                  t[15],   (float)p->d[0], (float)p->d[1], p->i[0], m,    hidden, (2 + m) * m};
  if (int status = check_site(site, rows, e)) return status;
  const bool add = !absent(y);
  DI_NEED(!add || (is_stream(y) && is_matrix(y, rows, hidden) && is_packed(post, DI_F32, rows * m) &&
                   is_packed(comb, DI_F32, rows * m * m)),
          "residual_site: y, post and comb go together: [T, H], float32 [T, m] and [T, m, m]");
  DI_NEED(is_norm_weight(weight, hidden) && is_stream(out) && is_matrix(out, rows, hidden),
          "residual_site: out must be [T, %ld]", (long)hidden);
  DI_NEED(are_codes(codes, scales, rows, hidden),
          "residual_site: out_codes must be uint8 [T, H] with scales [T, H/32]");
  DI_NEED(is_count(count), "residual_site: count must be int32");
  run_site(
      site, valid_rows(count, rows),
      [&](int64_t row, float* s) {
        if (!add) return;
        Scratch scratch;
        float* fresh = scratch.floats(hidden);
        read_row(row_at(y, row), y.dtype, hidden, fresh);
        mix_streams(s, fresh, data_of<float>(post) + row * m, data_of<float>(comb) + row * m * m, m, hidden,
                    streams.dtype);
        write_row(row_at(streams, row), streams.dtype, m * hidden, s);
      },
      [&](int64_t row, float* x) {
        round_row(out.dtype, hidden, x);
        norm_row(x, hidden, weight, site.rms_eps);
        put_row(x, hidden, out.dtype, row, out, codes, scales);
      });
  return DI_OK;
}

}  // namespace di::DI_LEVEL
