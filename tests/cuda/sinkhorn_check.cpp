// Runs kernels_cuda/residual_site_sinkhorn.cuh on the host: `check EPS ITERATIONS` reads matrices of sixteen float32 from its input
// and writes what becomes of them.
#define __device__
#define __forceinline__ inline
#define asm(...) result = 1.0f / value  // reciprocal() holds the one instruction of the device

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

#include "residual_site_sinkhorn.cuh"

int main(int count, char** arguments) {
  if (count != 3) return 1;
  const float eps = strtof(arguments[1], nullptr);
  float k[16];
  while (fread(k, sizeof k, 1, stdin) == 1) {
    di::sinkhorn(k, eps, atoi(arguments[2]));
    if (fwrite(k, sizeof k, 1, stdout) != 1) return 1;
  }
  return 0;
}
