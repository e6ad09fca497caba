#include "shadow.h"

namespace twin {
namespace TWIN_LEVEL {
namespace {

constexpr uint32_t kBits = 27, kMask = (1u << kBits) - 1;

inline bool ordered(const Run& r, uint32_t e) { return (e & kMask) <= r.known[e >> kBits] || e == r.epoch; }
inline bool fresh(const Run& r, uint32_t e) { return (e & kMask) > r.birth[e >> kBits]; }

// The common case is that neighbouring blocks were last touched by the same instructions: one check serves up to 32.
uint32_t read(const Run& r, uint32_t first, uint32_t last) {
  uint32_t* seen = r.reader[r.slot];
  while (first < last) {
    const uint32_t n = last - first < 32 ? last - first : 32, w = r.writer[first];
    uint32_t differs = 0, holes = 0;
    for (uint32_t i = 0; i < n; ++i) {
      differs |= r.writer[first + i] ^ w;
      holes |= ~r.valid[first + i];
    }
    if (differs == 0 && ordered(r, w) && (!r.need_valid || (holes == 0 && fresh(r, w)))) {
      for (uint32_t i = 0; i < n; ++i) seen[first + i] = r.epoch;
      first += n;
      continue;
    }
    for (uint32_t i = 0; i < n; ++i, ++first) {
      const uint32_t e = r.writer[first];
      if (!ordered(r, e) || (r.need_valid && (!fresh(r, e) || r.valid[first] != ~0u))) return first;
      seen[first] = r.epoch;
    }
  }
  return last;
}

template <int Readers> uint32_t write_with(const Run& r, uint32_t first, uint32_t last) {
  while (first < last) {
    const uint32_t n = last - first < 32 ? last - first : 32;
    const uint32_t w = r.writer[first];
    uint32_t differs = 0;
    for (uint32_t i = 0; i < n; ++i) differs |= r.writer[first + i] ^ w;
    bool good = ordered(r, w);
    for (int k = 0; k < Readers; ++k) {
      const uint32_t* seen = r.reader[k];
      const uint32_t s = seen[first];
      for (uint32_t i = 0; i < n; ++i) differs |= seen[first + i] ^ s;
      good = good && ordered(r, s);
    }
    if (differs == 0 && good) {
      for (uint32_t i = 0; i < n; ++i) r.writer[first + i] = r.epoch;
      for (uint32_t i = 0; i < n; ++i) r.valid[first + i] = ~0u;
      first += n;
      continue;
    }
    for (uint32_t i = 0; i < n; ++i, ++first) {
      good = ordered(r, r.writer[first]);
      for (int k = 0; k < Readers; ++k) good = good && ordered(r, r.reader[k][first]);
      if (!good) return first;
      r.writer[first] = r.epoch;
      r.valid[first] = ~0u;
    }
  }
  return last;
}

uint32_t write(const Run& r, uint32_t first, uint32_t last) {
  return r.readers == 1 ? write_with<1>(r, first, last) : r.readers == 2 ? write_with<2>(r, first, last) : write_with<3>(r, first, last);
}

}  // namespace

extern const ShadowKernels kShadow;
const ShadowKernels kShadow = {read, write};

}  // namespace TWIN_LEVEL
}  // namespace twin
