// Host side of a kernel: refusing a call, reading its tensors, launching.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>

#include <cstdarg>

#include "deepinfer/hal.h"

#define DI_EXPORT extern "C" __attribute__((visibility("default")))

namespace di {

// Puts a sentence into `e` and gives the status back: `return refuse(e, DI_UNSUPPORTED, "K is %d", k);`
__attribute__((format(printf, 3, 4))) inline int refuse(di_error* e, int status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(e->message, sizeof e->message, format, list);
  va_end(list);
  return status;
}

// The last launch's outcome as a status. A sticky error of earlier work shows here too; nothing is waited for.
inline int finish(di_error* e, const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? DI_OK : refuse(e, DI_FAILED, "%s: %s (%s)", kernel, cudaGetErrorName(status), cudaGetErrorString(status));
}

inline bool present(const di_tensor& t) { return t.dtype != DI_NONE; }

template <typename T>
T* data(const di_tensor& t) {
  return static_cast<T*>(t.data);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

constexpr int kMostGridRows = 65535;  // blocks of a grid's second and third dimension

constexpr int kMostDevices = 64;

// Multiprocessors of the current device; asked once a device. 1 where it cannot tell: the launch will then say why.
inline int multiprocessors() {
  static int known[kMostDevices] = {};
  int& count = known[current_device() % kMostDevices];
  if (count == 0 && cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_device()) != cudaSuccess) return 1;
  return count;
}

// Lets `kernel` have `bytes` of dynamic shared memory; asked once a device and kernel, so that a captured launch asks nothing.
template <auto kernel>
cudaError_t allow_shared(int bytes) {
  static int allowed[kMostDevices] = {};
  int& known = allowed[current_device() % kMostDevices];
  if (bytes <= known) return cudaSuccess;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) known = bytes;
  return status;
}

constexpr int kLargestCluster = 8;  // that every GPU of this architecture takes

// How many clusters of `size` blocks of `kernel` the device holds at once, 0 where it cannot tell; an answer is asked for once a
// device and size.
template <auto kernel>
int resident_clusters(int size, int threads, int shared_bytes) {
  static int known[kMostDevices][kLargestCluster + 1] = {};  // the answer + 1
  int& answer = known[current_device() % kMostDevices][size];
  if (answer == 0) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(size)), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
    config.attrs = &cluster, config.numAttrs = 1;
    int count = 0;
    const bool told = allow_shared<kernel>(shared_bytes) == cudaSuccess &&
                      cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess;
    if (!told) return cudaGetLastError(), 0;
    answer = count + 1;
  }
  return answer - 1;
}

// Starts `kernel` in clusters of `cluster` blocks; `early`: while the kernel before it on the stream still runs; it must then call wait_for_producer() (di_ptx.cuh) before it
// touches what that one, or any earlier one, reads or writes.
template <typename... Parameters, typename... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream, int cluster, bool early,
                     const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = early ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The same without clusters.
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                  const Arguments&... arguments) {
  launch_clusters(kernel, grid, threads, shared_bytes, stream, 1, true, arguments...);
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A function of the driver, found at run time so that the library needs no libcuda to load; null where it is absent.
template <typename Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &result);
  return reinterpret_cast<Function>(entry);
}

// Gives this thread the context of its device. One that has called nothing of CUDA yet has none, and the driver's functions want one.
inline bool take_context() {
  static const auto current = driver_function<CUresult (*)(CUcontext*)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  const bool has = current != nullptr && current(&context) == CUDA_SUCCESS && context != nullptr;
  return has || cudaSetDevice(current_device()) == cudaSuccess;
}

// The driver's cuTensorMapEncodeTiled.
inline EncodeTiled tensor_map_encoder() {
  static const auto found = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  thread_local bool ready = false;
  ready = ready || take_context();
  return ready ? found : nullptr;
}

// A map of a row-major matrix [rows, columns] in boxes [box_rows, box_columns]; what lies outside the matrix reads as zero.
// `pitch` is the bytes from row to row, a multiple of 16, as is the address. False where the driver refuses it.
inline bool matrix_map(CUtensorMap* map, CUtensorMapDataType type, const void* address, int64_t rows, int64_t columns, int64_t pitch,
                       int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitches[1] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const EncodeTiled encode = tensor_map_encoder();
  return encode != nullptr && encode(map, type, 2, const_cast<void*>(address), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                     swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace di
