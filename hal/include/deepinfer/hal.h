/* The C ABI of the HAL's native kernels, version 1.
 *
 * Every library of kernels exports, for each op it implements,
 *
 *     int di_<op>(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes, di_error* e);
 *
 * and a caller builds `t` and `p` from the op card's signature alone:
 *   - tensors in signature order. An absent optional tensor has data == NULL and dtype == DI_NONE. A tensor without
 *     elements may have data == NULL too, but keeps its dtype.
 *   - a weight contributes exactly two tensors: its values and its scales (DI_NONE if the layout has none). Both carry
 *     the layout; the values' shape is the logical [..., N, K], whatever the layout's padding.
 *   - int64 and double scalars in two arrays, each in signature order; a bool is an int64, a string is one of the
 *     di_format or di_rule codes.
 *
 * The return value is DI_OK or a di_status; `e` then holds a sentence for the user. A call only enqueues on `stream`
 * (cudaStream_t, aclrtStream, a twin stream, or NULL for the CPU, where a call has finished when it returns). What
 * changes from step to step is read from the tensors' memory, so a captured graph stays right. */
#ifndef DEEPINFER_HAL_H
#define DEEPINFER_HAL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DI_HAL_VERSION 1
#define DI_MAX_DIMS 5

typedef enum di_dtype { DI_NONE = 0, DI_F32 = 1, DI_BF16 = 2, DI_U8 = 3, DI_I32 = 4, DI_I64 = 5, DI_F64 = 6, DI_OTHER = 7 } di_dtype;

/* How a tensor's bytes are laid out.
 * DI_LAYOUT_STRIDED: as shape and strides say.
 * DI_LAYOUT_PANEL16: float32 [..., ceil(N / 16), K, 16], rows past N zero; stride[0] of a stacked weight is the number of
 *                    elements between two of its matrices.
 * DI_LAYOUT_CUBE_FP8, _FP4: quantised weights in the fractals of an Ascend cube core (deepinfer_ascend/weights.py).
 * DI_LAYOUT_WGMMA_FP4: FP4 weights with their scales as fragments of Hopper's matrix instruction (deepinfer_cuda/weights.py);
 *                      the scales are inside the values. */
typedef enum di_layout {
  DI_LAYOUT_STRIDED = 0,
  DI_LAYOUT_PANEL16 = 1,
  DI_LAYOUT_CUBE_FP8 = 2,
  DI_LAYOUT_CUBE_FP4 = 3,
  DI_LAYOUT_WGMMA_FP4 = 4
} di_layout;

/* Quantised row formats, in the order of deepinfer_hal.formats. */
typedef enum di_format { DI_FP8_32 = 1, DI_FP4_16 = 2, DI_MXFP4_32 = 3, DI_ROW_F32 = 4, DI_ROW_BF16 = 5 } di_format;

/* Verification rules of verify_drafts. */
typedef enum di_rule { DI_COUPLED = 1, DI_REJECTION = 2 } di_rule;

typedef enum di_status {
  DI_OK = 0,
  DI_BAD_CALL = 1,    /* the call breaks the op's card; nothing was written */
  DI_UNSUPPORTED = 2, /* legal, but not served by this library */
  DI_FAILED = 3       /* the device or the system failed */
} di_status;

typedef struct di_tensor {
  void* data;
  int32_t dtype;  /* di_dtype */
  int32_t layout; /* di_layout */
  int32_t device; /* index of the device; -1 = host memory */
  int32_t ndim;
  int64_t shape[DI_MAX_DIMS];
  int64_t stride[DI_MAX_DIMS]; /* in elements */
} di_tensor;

typedef struct di_params {
  const int64_t* i;
  const double* d;
  int32_t n_i;
  int32_t n_d;
} di_params;

typedef struct di_error {
  char message[256];
} di_error;

typedef int (*di_kernel)(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes, di_error* e);

#ifdef __cplusplus
}
#endif
#endif
