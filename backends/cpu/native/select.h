// Picking the best of a row without sorting it: one tie rule for the indexer and the sampler.
#pragma once

#include "kernels.h"

namespace di::DI_LEVEL {

// Order-preserving integer of a score; 0 for -infinity and NaN, which are never picked. -0 and 0 are equal.
DI_INLINE uint32_t rank_of(float score) {
  if (!(score > -__builtin_inff())) return 0;
  score += 0.0f;
  uint32_t bits;
  memcpy(&bits, &score, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The k-th highest of `count` ranks, and how many equal to it may be picked. Ranks of 0 do not count.
static inline uint32_t threshold(const uint32_t* ranks, int64_t count, int64_t k, int64_t* equal) {
  int64_t valid = 0;
  for (int64_t i = 0; i < count; ++i) valid += ranks[i] != 0;
  *equal = k;
  if (valid <= k) return 1;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int32_t bins[256] = {};
    for (int64_t i = 0; i < count; ++i)
      if (ranks[i] != 0 && (shift == 24 || ranks[i] >> (shift + 8) == prefix)) ++bins[ranks[i] >> shift & 255];
    int bin = 255;
    while (bins[bin] < k) k -= bins[bin--];
    prefix = prefix << 8 | (uint32_t)bin;
  }
  *equal = k;
  return prefix;
}

// Ids of the k best, ascending by column, ties to the lower column, -1 at the end.
template <class Id>
static inline void pick(const uint32_t* ranks, int64_t count, int64_t k, int32_t* to, Id id) {
  int64_t equal, picked = 0;
  const uint32_t least = k > 0 ? threshold(ranks, count, k, &equal) : 0;
  for (int64_t i = 0; i < count && picked < k; ++i) {
    if (ranks[i] < least || ranks[i] == 0) continue;
    if (ranks[i] == least && equal-- <= 0) continue;
    to[picked++] = id(i);
  }
  for (; picked < k; ++picked) to[picked] = -1;
}

}  // namespace di::DI_LEVEL
