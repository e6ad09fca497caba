// quantise of BF16 rows to fp8_32: a thread has sixteen values and loads them at once.
#include "quantise_groups.cuh"

namespace di {
namespace {

constexpr int kThreads = 128;

struct Quantise {
  const __nv_bfloat16* x;
  const int* count;
  uint8_t *codes, *scales, *flags;
  int64_t stride;
  int rows, width;
};

template <bool wide>
__global__ void __launch_bounds__(kThreads) quantise_kernel(const Quantise q) {
  const int row = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * kSixteen;
  const bool inside = column < q.width;
  start_dependents();
  const __nv_bfloat16* from = settled(q.x + row * q.stride + (inside ? column : 0));
  const int64_t at = static_cast<int64_t>(row) * q.width + column;
  uint8_t *codes = settled(q.codes + at), *scales = settled(q.scales + at / 32), *flags = q.flags;
  const int *count = q.count, rows = q.rows;
  wait_for_producer_with(from, codes, scales, flags, count, rows);
  if (count && row >= valid_rows(count, rows)) return;
  uint4 half[2];
  load_sixteen<wide>(half, from);
  const uint32_t scale = fp8_scale_of_bits(largest_of_two_lanes(max(largest_of_eight(half[0]), largest_of_eight(half[1]))));
  if (!inside) return;
  store_sixteen<wide>(codes, scales, sixteen_codes(half[0], half[1], scale), scale);
  if (scale == 255u && flags) flags[row] |= 1;  // whoever does it stores the same byte
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
  if (q.rows == 0 || q.width == 0) return DI_OK;
  const dim3 grid(q.rows, static_cast<unsigned>(ceil_div(q.width, kSixteen * kThreads)));
  const bool wide = q.stride % 8 == 0 && (reinterpret_cast<uintptr_t>(q.x) | reinterpret_cast<uintptr_t>(q.codes)) % 16 == 0;
  launch_early(wide ? quantise_kernel<true> : quantise_kernel<false>, grid, kThreads, 0, static_cast<cudaStream_t>(stream), q);
  return finish(e, "quantise");
}
