// Masks as byte masks.
#pragma once

#include "twin/reg.h"

namespace twin {

struct ByteMask {
  uint64_t bits[4];
};

// Every byte of an active element; `unit` is the element's size.
inline ByteMask spread(const Mask& mask, int unit) {
  ByteMask out{};
  const uint64_t lowest = unit == 1   ? ~0ull
                          : unit == 2 ? 0x5555555555555555ull
                          : unit == 4 ? 0x1111111111111111ull
                                      : 0x0101010101010101ull;
  for (int i = 0; i < 4; ++i) {
    uint64_t b = mask.bits[i] & lowest;
    for (int k = 1; k < unit; k *= 2) b |= b << k;
    out.bits[i] = b;
  }
  return out;
}
inline bool is_full(const ByteMask& m) { return (m.bits[0] & m.bits[1] & m.bits[2] & m.bits[3]) == ~0ull; }

}  // namespace twin
