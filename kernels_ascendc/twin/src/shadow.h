// Runs over shadow entries, compiled for several instruction levels.
#pragma once

#include <stdint.h>

namespace twin {

struct Run {
  uint32_t* writer;
  uint32_t* valid;
  uint32_t* reader[3];
  int readers, slot;      // reader arrays in use; the one that this access updates
  const uint32_t* known;  // of the accessing pipe
  const uint32_t* birth;  // clocks when the launch began
  uint32_t epoch;         // of the accessing instruction
  bool need_valid;        // reading what was never written is an error
};

// Both work on full blocks [first, last) and return the first block that breaks a rule, or `last`. Blocks before it are
// done. The caller handles the block named, then goes on behind it.
struct ShadowKernels {
  uint32_t (*read)(const Run&, uint32_t first, uint32_t last);
  uint32_t (*write)(const Run&, uint32_t first, uint32_t last);
};
const ShadowKernels& shadow_kernels();

}  // namespace twin
