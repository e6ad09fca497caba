// How the clang check reads the keywords of device code: address spaces are different types, and functions of the device
// and of the host cannot call each other (clang's CUDA mode has that rule). In the host's pass address spaces are empty, as
// the host's half of a source fills the structures that it hands to a kernel.
#pragma once

#include <stdint.h>

#ifdef DI_DEVICE_PASS
#define __gm__ __attribute__((address_space(1)))
#define __ubuf__ __attribute__((address_space(2)))
#define __cbuf__ __attribute__((address_space(3)))
#define __ca__ __attribute__((address_space(4)))
#define __cb__ __attribute__((address_space(5)))
#define __cc__ __attribute__((address_space(6)))
#define __fbuf__ __attribute__((address_space(7)))
#define __ssbuf__ __attribute__((address_space(8)))
#else
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __ssbuf__
#endif
#define __aicore__ __attribute__((device))
#define __simd_vf__ __attribute__((device))
#define __simd_callee__ __attribute__((device))
#define __global__ __attribute__((global))
#define __vector__
#define __cube__
#define __mix__(cubes, vectors)
#define __schedmode__(mode)
#define GM_ADDR __gm__ uint8_t*
#define __NPU_ARCH__ 3510
#define ASCEND_IS_AIC (DiIsCube())
#define ASCEND_IS_AIV (!DiIsCube())

__aicore__ bool DiIsCube();
