#include "fiber.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace twin {
namespace {

Fiber* running = nullptr;

void take_stack(Fiber& fiber) {
  if (fiber.stack != nullptr) return;
  void* memory =
      mmap(nullptr, kStackBytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, 4096, PROT_NONE);  // an overflow faults instead of spoiling a neighbour
  fiber.stack = static_cast<uint8_t*>(memory) + 4096;
}

}  // namespace

#if defined(__x86_64__)

extern "C" void twin_switch_stack(void** save, void* to);
asm(R"(
.text
.globl twin_switch_stack
.hidden twin_switch_stack
.type twin_switch_stack,@function
twin_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size twin_switch_stack, .-twin_switch_stack
)");

namespace {
void* scheduler_stack = nullptr;

void first_steps() {
  Fiber& self = *running;
  self.body(self.context);
  for (;;) leave_fiber(self);  // a finished fiber is not entered again before it is prepared anew
}
}  // namespace

void prepare_fiber(Fiber& fiber, void (*body)(void*), void* context) {
  take_stack(fiber);
  fiber.body = body;
  fiber.context = context;
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(first_steps);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void enter_fiber(Fiber& fiber) {
  running = &fiber;
  twin_switch_stack(&scheduler_stack, fiber.stack_pointer);
}
void leave_fiber(Fiber& fiber) { twin_switch_stack(&fiber.stack_pointer, scheduler_stack); }

#else

namespace {
ucontext_t scheduler_state;
void first_steps() {
  Fiber& self = *running;
  self.body(self.context);
  for (;;) leave_fiber(self);
}
}  // namespace

void prepare_fiber(Fiber& fiber, void (*body)(void*), void* context) {
  take_stack(fiber);
  fiber.body = body;
  fiber.context = context;
  if (fiber.platform == nullptr) fiber.platform = new ucontext_t;
  auto* state = static_cast<ucontext_t*>(fiber.platform);
  getcontext(state);
  state->uc_stack.ss_sp = fiber.stack;
  state->uc_stack.ss_size = kStackBytes;
  state->uc_link = nullptr;
  makecontext(state, first_steps, 0);
}
void enter_fiber(Fiber& fiber) {
  running = &fiber;
  swapcontext(&scheduler_state, static_cast<ucontext_t*>(fiber.platform));
}
void leave_fiber(Fiber& fiber) { swapcontext(static_cast<ucontext_t*>(fiber.platform), &scheduler_state); }

#endif

}  // namespace twin
