// Stackful coroutines on one thread: the cores of the modelled chip.
#pragma once

#include <stdint.h>

namespace twin {

struct Fiber {
  void* stack_pointer;
  uint8_t* stack;  // lowest address
  void (*body)(void*);
  void* context;
  void* platform;  // state of the portable form
};

constexpr uint32_t kStackBytes = 256 * 1024;

void prepare_fiber(Fiber& fiber, void (*body)(void*), void* context);  // reuses the stack
void enter_fiber(Fiber& fiber);                                        // from the scheduler
void leave_fiber(Fiber& fiber);  // to the scheduler; a later enter comes back here

}  // namespace twin
