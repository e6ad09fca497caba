#pragma once

#include "deepinfer/hal.h"

namespace di {

int kernel_count();
const char* kernel_name(int i);
di_kernel kernel(int i);

// The instruction level in use: "base", "avx2" or "avx512". set_level takes the best one that is at most `at_most` and
// that the processor has; tests use it to show that all levels give the same bits.
const char* level();
const char* set_level(const char* at_most);

}  // namespace di
