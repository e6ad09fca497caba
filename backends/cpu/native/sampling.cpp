// Sampling: nan_row_flags, sample, top_logprobs, mask_logits.
#include <stdlib.h>

#include "select.h"

namespace di::DI_LEVEL {
namespace {

constexpr float kNever = -__builtin_inff();

bool is_logits(const di_tensor& x) { return x.dtype == DI_F32 && x.ndim == 2 && last_contiguous(x); }
float* logit_row(const di_tensor& x, int64_t row) { return reinterpret_cast<float*>(row_at(x, row)); }

// A row can be sampled from if its largest logit is finite and none is NaN.
bool usable(const float* x, int64_t vocab) {
  float top = kNever;
  bool number = true;
  int64_t i = 0;
  vf highest = splat(kNever), poison = splat(0.0f);
  for (; i + 16 <= vocab; i += 16) {
    const vf v = load(x + i);
    highest = max(highest, v);
    poison = poison + less_select(v, splat(__builtin_inff()), splat(0.0f), v);  // NaN and infinity stay
  }
  float lanes[16];
  store(lanes, poison);
  for (float lane : lanes) number &= lane == 0.0f;
  if (i > 0) top = max_lane(highest);
  for (; i < vocab; ++i) number &= x[i]<__builtin_inff(), top = x[i]> top ? x[i] : top;
  return number && top > kNever;
}

int64_t best_of(const float* x, int64_t vocab) {
  int64_t best = 0;
  for (int64_t i = 1; i < vocab; ++i)
    if (x[i] > x[best]) best = i;
  return best;
}

// Philox4x32-10 of sixteen blocks, whose third counter words are first .. first + 15; words[4 * lane + w].
void philox(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t first, uint32_t* words) {
  uint32_t c0[16], c1[16], c2[16], c3[16], k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int i = 0; i < 16; ++i) c0[i] = position, c1[i] = purpose, c2[i] = first + i, c3[i] = 0;
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 16; ++i) {
      const uint64_t a = (uint64_t)c0[i] * 0xD2511F53u, b = (uint64_t)c2[i] * 0xCD9E8D57u;
      const uint32_t kept = c1[i] ^ k0, other = c3[i] ^ k1;
      c0[i] = (uint32_t)(b >> 32) ^ kept, c1[i] = (uint32_t)b, c2[i] = (uint32_t)(a >> 32) ^ other, c3[i] = (uint32_t)a;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < 16; ++i)
    words[4 * i] = c0[i], words[4 * i + 1] = c1[i], words[4 * i + 2] = c2[i], words[4 * i + 3] = c3[i];
}

// Gumbel noise of sixteen 32-bit words. Above one half 1 - u is exact where u is not.
vf gumbel(const uint32_t* words) {
  int32_t from[16];
  memcpy(from, words, 64);
  const vi top = shift_right<8>(load_i(from)), half = splat_i(1 << 23);
  const vi near = less_select(top, half, top, splat_i((1 << 24) - 1) - top);
  const vf distance = (to_float(near) + splat(0.5f)) * splat(5.9604644775390625e-8f);
  const vf negative = splat(0.0f) - less_select(top, half, log(distance), log_one_minus(distance));
  return splat(0.0f) - log(negative);
}

// The best of x + noise, ties to the lower id.
int64_t draw(const float* x, int64_t vocab, uint64_t seed, int32_t position, int64_t purpose) {
  int64_t best = 0;
  float highest = kNever;
  for (int64_t first = 0; first < vocab; first += 64) {
    uint32_t words[64];
    philox(seed, (uint32_t)position, (uint32_t)purpose, (uint32_t)(first / 4), words);
    for (int part = 0; part < 4; ++part) {
      float noise[16];
      store(noise, gumbel(words + 16 * part));
      for (int64_t i = first + 16 * part; i < first + 16 * part + 16 && i < vocab; ++i) {
        const float value = x[i] + noise[i - first - 16 * part];
        if (value > highest) highest = value, best = i;
      }
    }
  }
  return best;
}

struct Ranked {
  float value;
  int32_t id;
};
int by_rank(const void* a, const void* b) {
  const Ranked &x = *static_cast<const Ranked*>(a), &y = *static_cast<const Ranked*>(b);
  if (x.value != y.value) return x.value > y.value ? -1 : 1;
  return x.id < y.id ? -1 : 1;
}

// Removes what top-k, then top-p, then min-p do not keep.
void filter(float* x, int64_t vocab, int64_t top_k, float top_p, float min_p) {
  Scratch scratch;
  if (top_k > 0 && top_k < vocab) {
    uint32_t* ranks = reinterpret_cast<uint32_t*>(scratch.ints(vocab));
    for (int64_t i = 0; i < vocab; ++i) ranks[i] = rank_of(x[i]);
    int64_t equal;
    const uint32_t least = threshold(ranks, vocab, top_k, &equal);
    for (int64_t i = 0; i < vocab; ++i)
      if (ranks[i] < least || (ranks[i] == least && equal-- <= 0)) x[i] = kNever;
  }
  const float top = x[best_of(x, vocab)];
  if (top_p < 1.0f) {
    Ranked* kept = static_cast<Ranked*>(scratch.bytes(vocab * sizeof(Ranked)));
    int64_t count = 0;
    for (int64_t i = 0; i < vocab; ++i)
      if (x[i] > kNever) kept[count++] = {x[i], (int32_t)i};
    qsort(kept, count, sizeof(Ranked), by_rank);
    float *mass = scratch.floats(round_up(count, 16)), total = 0.0f, before = 0.0f;
    for (int64_t i = 0; i < round_up(count, 16); ++i) mass[i] = i < count ? kept[i].value - top : kNever;
    for (int64_t i = 0; i < count; i += 16) store(mass + i, exp(load(mass + i)));
    for (int64_t i = 0; i < count; ++i) total += mass[i];
    for (int64_t i = 0; i < count; ++i) {
      if (i > 0 && before >= top_p) x[kept[i].id] = kNever;
      before += mass[i] / total;
    }
  }
  if (min_p > 0.0f) {
    const float floor = top + (float)__builtin_log((double)min_p);
    for (int64_t i = 0; i < vocab; ++i)
      if (x[i] < floor) x[i] = kNever;
  }
}

}  // namespace

// logits f32[S, V], flags u8[S]
int nan_row_flags(DI_ARGS) {
  DI_NEED_CALL(2, 0, 0);
  DI_NEED(is_logits(t[0]) && is_vector(t[1], DI_U8, t[0].shape[0]),
          "nan_row_flags: logits must be float32 [S, V], flags uint8 [S]");
  const int64_t rows = t[0].shape[0], vocab = t[0].shape[1];
  parallel(rows, rows * vocab * 0.1,
           [&](int64_t r) { data_of<uint8_t>(t[1])[r] = !usable(logit_row(t[0], r), vocab); });
  return DI_OK;
}

// logits f32[S, V], temperature, top_k i32, top_p, min_p, seeds i64, positions i32, purpose, tokens i32[S]
int sample(DI_ARGS) {
  DI_NEED_CALL(8, 1, 0);
  const di_tensor& logits = t[0];
  DI_NEED(is_logits(logits), "sample: logits must be float32 [S, V]");
  const int64_t rows = logits.shape[0], vocab = logits.shape[1];
  DI_NEED(is_vector(t[1], DI_F32, rows) && is_vector(t[2], DI_I32, rows) && is_vector(t[3], DI_F32, rows) &&
              is_vector(t[4], DI_F32, rows) && is_vector(t[5], DI_I64, rows) && is_vector(t[6], DI_I32, rows) &&
              is_vector(t[7], DI_I32, rows),
          "sample: temperature, top_p, min_p float32; top_k, positions, tokens int32; seeds int64; all [S]");
  parallel(rows, rows * vocab * 3.0, [&](int64_t r) {
    const float *x = logit_row(logits, r), temperature = data_of<float>(t[1])[r];
    int32_t* token = data_of<int32_t>(t[7]) + r;
    if (!usable(x, vocab)) {
      *token = -1;
      return;
    }
    if (!(temperature > 0.0f)) {
      *token = (int32_t)best_of(x, vocab);
      return;
    }
    Scratch scratch;
    float* scaled = scratch.floats(vocab);
    for (int64_t i = 0; i < vocab; ++i) scaled[i] = x[i] / temperature;
    const int64_t top_k = data_of<int32_t>(t[2])[r];
    const float top_p = data_of<float>(t[3])[r], min_p = data_of<float>(t[4])[r];
    filter(scaled, vocab, top_k, top_p, min_p);
    *token = (int32_t)draw(scaled, vocab, (uint64_t)data_of<int64_t>(t[5])[r], data_of<int32_t>(t[6])[r], p->i[0]);
  });
  return DI_OK;
}

// logits f32[S, V], chosen i32[S], chosen_logprob f32[S], chosen_rank i32[S], ids i32[S, k], values f32[S, k]
int top_logprobs(DI_ARGS) {
  DI_NEED_CALL(6, 0, 0);
  const di_tensor &logits = t[0], &ids = t[4], &values = t[5];
  DI_NEED(is_logits(logits) && ids.ndim == 2, "top_logprobs: logits must be float32 [S, V]");
  const int64_t rows = logits.shape[0], vocab = logits.shape[1], k = ids.shape[1];
  DI_NEED(is_vector(t[1], DI_I32, rows) && is_vector(t[2], DI_F32, rows) && is_vector(t[3], DI_I32, rows) &&
              is_packed(ids, DI_I32, rows * k) && is_packed(values, DI_F32, rows * k) && k <= vocab,
          "top_logprobs: chosen and chosen_rank int32, chosen_logprob float32 [S]; ids int32, values float32 [S, k], k "
          "at most V");
  parallel(rows, rows * vocab * 2.0, [&](int64_t r) {
    Scratch scratch;
    const float* x = logit_row(logits, r);
    const bool good = usable(x, vocab);
    const int64_t chosen = data_of<int32_t>(t[1])[r];
    const bool named = chosen >= 0 && chosen < vocab;
    const float top = good ? x[best_of(x, vocab)] : 0.0f;
    vf total = splat(0.0f);
    for (int64_t i = 0; good && i < vocab; i += 16) {
      float part[16];
      for (int64_t j = 0; j < 16; ++j) part[j] = i + j < vocab ? x[i + j] : kNever;
      total = total + exp(load(part) - splat(top));
    }
    const float log_total = good ? log(sum(total)) : 0.0f;
    data_of<float>(t[2])[r] = named && good ? x[chosen] - top - log_total : __builtin_nanf("");
    int32_t rank = named ? 1 : 0;
    for (int64_t i = 0; named && good && i < vocab; ++i) rank += x[i] > x[chosen] || (x[i] == x[chosen] && i < chosen);
    data_of<int32_t>(t[3])[r] = rank;
    uint32_t* ranks = reinterpret_cast<uint32_t*>(scratch.ints(vocab));
    for (int64_t i = 0; k > 0 && i < vocab; ++i) ranks[i] = good ? rank_of(x[i]) : 0, ranks[i] += ranks[i] == 0;
    int32_t* best = data_of<int32_t>(ids) + r * k;
    pick(ranks, vocab, k, best, [](int64_t i) { return (int32_t)i; });
    Ranked* sorted = static_cast<Ranked*>(scratch.bytes(k * sizeof(Ranked)));
    for (int64_t j = 0; j < k; ++j) sorted[j] = {good ? x[best[j]] : kNever, best[j]};
    qsort(sorted, k, sizeof(Ranked), by_rank);
    for (int64_t j = 0; j < k; ++j)
      best[j] = sorted[j].id, data_of<float>(values)[r * k + j] = good ? sorted[j].value - top - log_total : kNever;
  });
  return DI_OK;
}

// history i32[slots, L], slots, prompt_len, length i32[S], repetition, presence, frequency f32[S], bias_offsets
// i32[S+1], bias_ids i32[n], bias_values f32[n], allowed i32[S, W]?, logits f32[S, V] inout
int mask_logits(DI_ARGS) {
  DI_NEED_CALL(12, 0, 0);
  const di_tensor &history = t[0], &offsets = t[7], &bias_ids = t[8], &allowed = t[10], &logits = t[11];
  DI_NEED(is_logits(logits) && history.dtype == DI_I32 && history.ndim == 2 && last_contiguous(history),
          "mask_logits: logits float32 [S, V], history int32 [slots, L]");
  const int64_t rows = logits.shape[0], vocab = logits.shape[1], entries = bias_ids.ndim == 1 ? bias_ids.shape[0] : 0;
  for (int i = 1; i <= 6; ++i)
    DI_NEED(is_vector(t[i], i <= 3 ? DI_I32 : DI_F32, rows),
            "mask_logits: lengths must be int32 [S], penalties float32 [S]");
  DI_NEED(
      is_vector(offsets, DI_I32, rows + 1) && is_vector(bias_ids, DI_I32, entries) && is_vector(t[9], DI_F32, entries),
      "mask_logits: biases must be int32 [S+1], int32 [n], float32 [n]");
  DI_NEED(absent(allowed) || (allowed.dtype == DI_I32 && allowed.ndim == 2 && allowed.shape[1] * 32 >= vocab &&
                              is_matrix(allowed, rows, allowed.shape[1])),
          "mask_logits: allowed must be int32 [S, ceil(V / 32)]");
  parallel(rows, rows * (vocab * 0.3 + 500), [&](int64_t r) {
    float *x = logit_row(logits, r), repetition = data_of<float>(t[4])[r], presence = data_of<float>(t[5])[r],
          frequency = data_of<float>(t[6])[r];
    const int64_t slot = data_of<int32_t>(t[1])[r], prompt = data_of<int32_t>(t[2])[r];
    int64_t length = slot >= 0 && slot < history.shape[0] ? data_of<int32_t>(t[3])[r] : 0;
    length = length < history.shape[1] ? length : history.shape[1];
    if (length > 0 && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f)) {
      Scratch scratch;
      int32_t* times = scratch.ints(vocab);  // one more than the count in the output; 0: never seen
      memset(times, 0, vocab * 4);
      const int32_t* ids = reinterpret_cast<const int32_t*>(row_at(history, slot));
      for (int64_t i = 0; i < length; ++i)
        if (ids[i] >= 0 && ids[i] < vocab) times[ids[i]] += (times[ids[i]] == 0) + (i >= prompt);
      for (int64_t i = 0; i < length; ++i) {
        const int64_t id = ids[i];
        if (id < 0 || id >= vocab || times[id] == 0) continue;
        const float count = (float)(times[id] - 1);
        float value = x[id] > 0.0f ? x[id] / repetition : x[id] * repetition;
        value = value - frequency * count;
        x[id] = value - (count > 0.0f ? presence : 0.0f);
        times[id] = 0;
      }
    }
    int64_t first = data_of<int32_t>(offsets)[r], last = data_of<int32_t>(offsets)[r + 1];
    first = first < 0 ? 0 : first, last = last < entries ? last : entries;
    for (int64_t i = first; i < last; ++i) {
      const int64_t id = data_of<int32_t>(bias_ids)[i];
      if (id >= 0 && id < vocab) x[id] += data_of<float>(t[9])[i];
    }
    const uint32_t* words = absent(allowed) ? nullptr : reinterpret_cast<const uint32_t*>(row_at(allowed, r));
    for (int64_t i = 0; words != nullptr && i < vocab; ++i)
      if (!(words[i / 32] >> (i % 32) & 1)) x[i] = kNever;
  });
  return DI_OK;
}

}  // namespace di::DI_LEVEL
