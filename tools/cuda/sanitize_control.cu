// Two kernels that are wrong on purpose: what compute-sanitizer must find before its silence about others means anything.
#include <cuda_runtime.h>

__global__ void writes_past_the_end(int* memory, int words) { memory[words + threadIdx.x] = 1; }

// Every thread reads its neighbour's word without a barrier after the write.
__global__ void races_in_shared_memory(int* out) {
  __shared__ int words[128];
  words[threadIdx.x] = static_cast<int>(threadIdx.x) + *out;
  out[threadIdx.x] = words[(threadIdx.x + 33) % 128];
}

// which: 0 writes 32 words past an allocation, 1 races. Returns the CUDA error, 0 if the device saw none.
extern "C" int planted(int which) {
  int* memory = nullptr;
  const int words = 128;
  if (cudaMalloc(&memory, words * sizeof(int)) != cudaSuccess) return -1;
  cudaMemset(memory, 0, words * sizeof(int));
  if (which == 0) writes_past_the_end<<<1, 32>>>(memory, words);
  else races_in_shared_memory<<<1, 128>>>(memory);
  const cudaError_t error = cudaDeviceSynchronize();
  cudaFree(memory);
  return static_cast<int>(error);
}
