// Starting kernels on an NPU, by the launch syntax of CANN's compiler: the device build's counterpart of the twin's header
// of this name. Written from documentation pages (docs/ascend-sources.md), never compiled by that compiler.
//
//   DI_LAUNCH(kernel, blocks, stream, args...)       a __vector__ kernel, one vector core a block
//   DI_LAUNCH_CUBE(kernel, blocks, stream, args...)  a __cube__ kernel, one cube core a block
//   DI_LAUNCH_MIX(kernel, blocks, stream, args...)   a __mix__(1, 2) kernel, one cube core and its two vector cores a
// block
//
// All three are the same launch: what a block is follows from how the kernel is declared. A template's instance comes in
// parentheses for the macro's sake, and goes into the launch without them.
#pragma once

#include <stdio.h>

#include "acl/acl.h"
#include "deepinfer/hal.h"

#define DI_BARE(name) DI_BARE_2(DI_BARE_1 name)
#define DI_BARE_1(...) DI_BARE_1 __VA_ARGS__
#define DI_BARE_2(...) DI_BARE_3(__VA_ARGS__)
#define DI_BARE_3(...) DI_NO_##__VA_ARGS__
#define DI_NO_DI_BARE_1

// Blocks, bytes of dynamic UB (none: kernels take their buffers from TPipe), stream.
#define DI_LAUNCH(kernel, blocks, stream, ...) DI_BARE(kernel)<<<(uint32_t)(blocks), 0, (aclrtStream)(stream)>>>(__VA_ARGS__)
#define DI_LAUNCH_CUBE DI_LAUNCH
#define DI_LAUNCH_MIX DI_LAUNCH

// What a C ABI function returns after its launches: DI_OK, or DI_FAILED with the runtime's code. A launch only enqueues, so
// a kernel that fails later is told by whoever waits for the stream.
inline int di_finish(void*, di_error* e) {
  const aclError code = aclrtGetLastError(ACL_RT_THREAD_LEVEL);
  if (code == ACL_SUCCESS) return DI_OK;
  const char* words = aclGetRecentErrMsg();
  snprintf(e->message, sizeof e->message, "a launch, or a runtime call of this thread before it, failed, error code is %d: %s", (int)code,
           words == nullptr ? "" : words);
  return DI_FAILED;
}

// Cores of this thread's device, for the host's tiling. Results do not depend on them, so one is taken where it cannot tell.
inline int di_cores(aclrtDevAttr which) {
  int32_t device = 0;
  int64_t cores = 0;
  if (aclrtGetDevice(&device) != ACL_SUCCESS || aclrtGetDeviceInfo((uint32_t)device, which, &cores) != ACL_SUCCESS) return 1;
  return cores < 1 ? 1 : (int)cores;
}
inline int di_cube_cores(void*) { return di_cores(ACL_DEV_ATTR_CUBE_CORE_NUM); }
inline int di_vector_cores(void*) { return di_cores(ACL_DEV_ATTR_VECTOR_CORE_NUM); }
