// Launches as the clang check reads them: the device's pass instantiates the kernel, the host's pass also checks that the
// arguments fit its parameters.
#pragma once

#include "deepinfer/hal.h"
#include "spaces.h"

template <class... P> struct DiCall {
  void operator()(P...) const {}
};
template <class... P> DiCall<P...> DiKernel(void (*)(P...)) { return {}; }
inline void DiWhere(int64_t, void*) {}

#ifdef DI_DEVICE_PASS
#define DI_LAUNCH(kernel, blocks, stream, ...) (DiWhere(blocks, stream), (void)DiKernel(&kernel))
#else
#define DI_LAUNCH(kernel, blocks, stream, ...) (DiWhere(blocks, stream), DiKernel(&kernel)(__VA_ARGS__))
#endif
#define DI_LAUNCH_CUBE DI_LAUNCH
#define DI_LAUNCH_MIX DI_LAUNCH

int di_finish(void* stream, di_error* e);
int di_cube_cores(void* stream);
int di_vector_cores(void* stream);
