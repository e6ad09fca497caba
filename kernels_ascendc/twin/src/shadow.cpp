#include "shadow.h"

namespace twin {
namespace TWIN_LEVEL {
namespace {

constexpr uint32_t kBits = 27, kMask = (1u << kBits) - 1;

inline bool ordered(const Run& r, uint32_t e) { return (e & kMask) <= r.known[e >> kBits] || e == r.epoch; }
inline bool fresh(const Run& r, uint32_t e) { return (e & kMask) > r.birth[e >> kBits]; }

// The common case is that neighbouring blocks were last touched by the same instruction, so that one check serves
// them all. Chunks have a constant size: their loops become a few vector instructions.
template <int N> bool read_chunk(const Run& r, uint32_t* __restrict seen, uint32_t first) {
  const uint32_t *writer = r.writer + first, *valid = r.valid + first, w = writer[0];
  uint32_t differs = 0, holes = 0;
  for (int i = 0; i < N; ++i) differs |= writer[i] ^ w, holes |= ~valid[i];
  if (differs != 0 || !ordered(r, w) || (r.need_valid && (holes != 0 || !fresh(r, w)))) return false;
  for (int i = 0; i < N; ++i) seen[first + i] = r.epoch;
  return true;
}

uint32_t read(const Run& r, uint32_t first, uint32_t last) {
  uint32_t* seen = r.reader[r.slot];
  while (first < last) {
    if (last - first >= 64 && read_chunk<64>(r, seen, first)) first += 64;
    else if (last - first >= 8 && read_chunk<8>(r, seen, first)) first += 8;
    else {
      const uint32_t e = r.writer[first];
      if (!ordered(r, e) || (r.need_valid && (!fresh(r, e) || r.valid[first] != ~0u))) return first;
      seen[first++] = r.epoch;
    }
  }
  return last;
}

template <int Readers, int N> bool write_chunk(const Run& r, uint32_t first) {
  uint32_t* __restrict writer = r.writer + first, * __restrict valid = r.valid + first;
  const uint32_t w = writer[0];
  uint32_t differs = 0;
  for (int i = 0; i < N; ++i) differs |= writer[i] ^ w;
  bool good = ordered(r, w);
  for (int k = 0; k < Readers; ++k) {
    const uint32_t *seen = r.reader[k] + first, s = seen[0];
    for (int i = 0; i < N; ++i) differs |= seen[i] ^ s;
    good = good && ordered(r, s);
  }
  if (differs != 0 || !good) return false;
  for (int i = 0; i < N; ++i) writer[i] = r.epoch;
  for (int i = 0; i < N; ++i) valid[i] = ~0u;
  return true;
}

template <int Readers> uint32_t write_with(const Run& r, uint32_t first, uint32_t last) {
  while (first < last) {
    if (last - first >= 64 && write_chunk<Readers, 64>(r, first)) first += 64;
    else if (last - first >= 8 && write_chunk<Readers, 8>(r, first)) first += 8;
    else {
      bool good = ordered(r, r.writer[first]);
      for (int k = 0; k < Readers; ++k) good = good && ordered(r, r.reader[k][first]);
      if (!good) return first;
      r.writer[first] = r.epoch;
      r.valid[first++] = ~0u;
    }
  }
  return last;
}

uint32_t write(const Run& r, uint32_t first, uint32_t last) {
  return r.readers == 1   ? write_with<1>(r, first, last)
         : r.readers == 2 ? write_with<2>(r, first, last)
                          : write_with<3>(r, first, last);
}

}  // namespace

extern const ShadowKernels kShadow;
const ShadowKernels kShadow = {read, write};

}  // namespace TWIN_LEVEL
}  // namespace twin
