// quantise of BF16 rows to fp8_32: a thread has eight values and loads them at once.
#include "di_fp8_groups.cuh"
#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {
namespace {

constexpr int kThreads = 256;

struct Quantise {
  const __nv_bfloat16* x;
  const int* count;
  uint8_t *codes, *scales, *flags;
  int64_t stride;
  int rows, width;
};

template <bool wide>
__global__ void __launch_bounds__(kThreads) quantise_kernel(const Quantise q) {
  const int row = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * 8;
  const bool inside = column < q.width;
  start_dependents();
  const __nv_bfloat16* from = settled(q.x + row * q.stride + (inside ? column : 0));
  const int64_t at = static_cast<int64_t>(row) * q.width + column;
  const int *count = q.count, rows = settled(q.rows);
  wait_for_producer();
  if (row >= valid_rows(count, rows)) return;
  const uint4 eight = load_eight<wide>(from);
  float value[8];
  widen_eight(value, eight);
  const uint32_t scale = store_eight(q.codes, q.scales, at, value, largest_of_eight(eight), inside);
  if (scale == 255u && q.flags) q.flags[row] |= 1;  // whoever does it stores the same byte
}

}  // namespace
}  // namespace di

DI_EXPORT int di_quantise(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  if (n != 5 || p->n_i != 1) return refuse(e, DI_BAD_CALL, "quantise takes 5 tensors and a format, got %d tensors", n);
  if (t[0].dtype != DI_BF16 || p->i[0] != DI_FP8_32) return refuse(e, DI_UNSUPPORTED, "quantise: BF16 rows to fp8_32 are served");
  if (t[0].shape[0] > 0 && t[0].stride[1] != 1) return refuse(e, DI_UNSUPPORTED, "quantise: rows must be dense");
  Quantise q = {};
  q.x = data<__nv_bfloat16>(t[0]), q.count = present(t[1]) ? data<int>(t[1]) : nullptr;
  q.codes = data<uint8_t>(t[2]), q.scales = data<uint8_t>(t[3]), q.flags = present(t[4]) ? data<uint8_t>(t[4]) : nullptr;
  q.rows = static_cast<int>(t[0].shape[0]), q.width = static_cast<int>(t[0].shape[1]), q.stride = t[0].stride[0];
  if (q.rows == 0) return DI_OK;
  const dim3 grid(q.rows, static_cast<unsigned>(ceil_div(q.width, 8 * kThreads)));
  const bool wide = q.stride % 8 == 0 && reinterpret_cast<uintptr_t>(q.x) % 16 == 0;
  launch_early(wide ? quantise_kernel<true> : quantise_kernel<false>, grid, kThreads, 0, static_cast<cudaStream_t>(stream), q);
  return finish(e, "quantise");
}
