// Starting kernels from the host part of a kernel source: on the twin here, by the vendor's launch syntax on a device.
//
//   DI_LAUNCH(kernel, blocks, stream, args...)       a __vector__ kernel, one vector core a block
//   DI_LAUNCH_CUBE(kernel, blocks, stream, args...)  a __cube__ kernel, one cube core a block
//   DI_LAUNCH_MIX(kernel, blocks, stream, args...)   a __mix__(1, 2) kernel, one cube core and its two vector cores a
// block
#pragma once

#include "deepinfer/hal.h"
#include "twin/machine.h"
#include "twin/peer.h"

namespace twin {

template <class F>
inline void launch_kernel(void* stream, const char* name, int cubes, int vectors, int64_t blocks, F body) {
  if (stream_of(stream)->seat != nullptr) return enqueue(*stream_of(stream), name, cubes, vectors, blocks, body);
  launch(*stream_of(stream), name, cubes, vectors, blocks, [](void* f) { (*static_cast<F*>(f))(); }, &body);
}
int finish_call(void* stream, di_error* e);

}  // namespace twin

#define DI_LAUNCH(kernel, blocks, stream, ...) \
  ::twin::launch_kernel(stream, #kernel, 0, 1, blocks, [=] { kernel(__VA_ARGS__); })
#define DI_LAUNCH_CUBE(kernel, blocks, stream, ...) \
  ::twin::launch_kernel(stream, #kernel, 1, 0, blocks, [=] { kernel(__VA_ARGS__); })
#define DI_LAUNCH_MIX(kernel, blocks, stream, ...) \
  ::twin::launch_kernel(stream, #kernel, 1, 2, blocks, [=] { kernel(__VA_ARGS__); })

// For helpers of kernels that set flags: a last parameter and argument that keep the caller's place in the source, so that
// reports name the use and not the helper. Empty on a device.
#define DI_CALLER TWIN_HERE
#define DI_OF_CALLER , where

// What a C ABI function returns after its launches: DI_OK, or DI_FAILED with what the twin has to say.
inline int di_finish(void* stream, di_error* e) { return ::twin::finish_call(stream, e); }

// Cores of the device behind a stream, for the host's tiling.
inline int di_cube_cores(void* stream) { return ::twin::stream_of(stream)->groups; }
inline int di_vector_cores(void* stream) { return ::twin::stream_of(stream)->groups * 2; }
