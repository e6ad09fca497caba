// swiglu_quantise of BF16 rows to fp8_32: a thread has eight columns of the gate and of the up part.
#include "di_fp8_groups.cuh"
#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {
namespace {

constexpr int kThreads = 96, kFewRows = 2048;

struct Swiglu {
  const __nv_bfloat16* gate_up;
  const float* weights;
  const int *source, *count;
  uint8_t *out, *scales;
  int64_t stride;
  int rows, width;
  float limit;
};

// silu(min(gate, limit)) * clamp(up); NaN stays NaN, and where exp(-gate) is infinite the result is -0 or, of an infinity, NaN.
__device__ __forceinline__ float activate(float gate, float up, float limit) {
  gate = smallest_or_nan(gate, limit);
  up = largest_or_nan(smallest_or_nan(up, limit), -limit);
  float raised, share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(raised) : "f"(gate * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + raised));
  return gate * share * up;
}

template <bool wide>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const Swiglu s) {
  const int row = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * 8;
  const bool inside = column < s.width;
  start_dependents();
  const __nv_bfloat16 *gates = settled(s.gate_up + row * s.stride + (inside ? column : 0)), *ups = settled(gates + s.width);
  const int *source_of = settled(s.source + row), *count = s.count, rows = settled(s.rows);
  const float* weights = s.weights;
  wait_for_producer();
  // Few rows are read before it is known how many count: they are memory of the call, whatever they hold.
  if (rows > kFewRows && row >= valid_rows(count, rows)) return;
  const uint4 gate = load_eight<wide>(gates), up = load_eight<wide>(ups);
  const int source = weights ? *source_of : 0;
  __syncwarp();  // the loads stay before what waits for the count
  const bool counts = row < valid_rows(count, rows);
  const float weight = weights && counts ? weights[source] : 1.0f;
  float value[8], other[8];
  widen_eight(value, gate), widen_eight(other, up);
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = activate(value[i], other[i], s.limit) * weight;
  store_eight(s.out, s.scales, static_cast<int64_t>(row) * s.width + column, value, largest_of_eight(value), inside && counts);
}

}  // namespace
}  // namespace di

DI_EXPORT int di_swiglu_quantise(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  if (n != 6 || p->n_d != 1) return refuse(e, DI_BAD_CALL, "swiglu_quantise takes 6 tensors and a limit, got %d tensors", n);
  if (t[0].dtype != DI_BF16 || t[4].dtype != DI_U8) return refuse(e, DI_UNSUPPORTED, "swiglu_quantise: BF16 rows to fp8_32 are served");
  if (t[0].shape[0] > 0 && t[0].stride[1] != 1) return refuse(e, DI_UNSUPPORTED, "swiglu_quantise: rows must be dense");
  Swiglu s = {};
  s.gate_up = data<__nv_bfloat16>(t[0]), s.stride = t[0].stride[0];
  s.weights = present(t[1]) ? data<float>(t[1]) : nullptr, s.source = present(t[2]) ? data<int>(t[2]) : nullptr;
  s.count = present(t[3]) ? data<int>(t[3]) : nullptr;
  s.out = data<uint8_t>(t[4]), s.scales = data<uint8_t>(t[5]);
  s.rows = static_cast<int>(t[4].shape[0]), s.width = static_cast<int>(t[4].shape[1]);
  s.limit = static_cast<float>(p->d[0]);
  if (s.rows == 0) return DI_OK;
  const dim3 grid(s.rows, static_cast<unsigned>(ceil_div(s.width, 8 * kThreads)));
  const bool wide = s.stride % 8 == 0 && s.width % 8 == 0 && reinterpret_cast<uintptr_t>(s.gate_up) % 16 == 0;
  launch_early(wide ? swiglu_kernel<true> : swiglu_kernel<false>, grid, kThreads, 0, static_cast<cudaStream_t>(stream), s);
  return finish(e, "swiglu_quantise");
}
