/* The runtime library of the toy chip: what a chip vendor ships in C.
 *
 * Device addresses and the memory behind them are apart. An address that toychip_malloc returns lies in a reservation
 * without any access rights, so whatever the host reads or writes there is a segmentation fault, at any time. The bytes
 * lie elsewhere, and only code that "runs on the chip" finds them, with toychip_view. */
#ifndef TOYCHIP_RUNTIME_H
#define TOYCHIP_RUNTIME_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Device memory of at least `bytes`, 64-byte aligned; NULL when it is used up. */
void* toychip_malloc(size_t bytes);
void toychip_free(void* device);

/* Copies; 0, or -1 when the device range is not inside the chip's memory. */
int toychip_copy_to_device(void* device, const void* host, size_t bytes);
int toychip_copy_to_host(void* host, const void* device, size_t bytes);

void toychip_memory_info(size_t* free_bytes, size_t* total_bytes);

/* 1 for a device address. */
int toychip_owns(const void* device);

/* For code that runs on the chip alone: where the bytes of a device address lie; NULL for any other address. */
void* toychip_view(const void* device);

#ifdef __cplusplus
}
#endif
#endif
