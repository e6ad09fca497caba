// swiglu_quantise of BF16 rows to fp8_32: a thread has sixteen columns of the gate and of the up part.
#include "quantise_groups.cuh"

namespace di {
namespace {

constexpr int kThreads = 160, kFewRows = 2048;

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

// Eight columns of both parts, and the largest magnitude.
__device__ __forceinline__ float activate_eight(float (&value)[8], uint4 gate, uint4 up, float limit) {
  float other[8];
  widen_eight(value, gate), widen_eight(other, up);
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = activate(value[i], other[i], limit);
  return __uint_as_float(largest_of_eight(value));
}

template <bool wide>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const Swiglu s) {
  const int row = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * kSixteen;
  const bool inside = column < s.width;
  start_dependents();
  const __nv_bfloat16 *gates = settled(s.gate_up + row * s.stride + (inside ? column : 0)), *ups = settled(gates + s.width);
  const int64_t at = static_cast<int64_t>(row) * s.width + column;
  uint8_t *codes = settled(s.out + at), *scales = settled(s.scales + at / 32);
  const int *source_of = s.source + row, *count = s.count, rows = s.rows;
  const float* weights = s.weights;
  const float limit = s.limit;
  wait_for_producer_with(gates, ups, codes, scales, source_of, count, rows, weights, __float_as_int(limit));
  // Few rows are read before it is known how many count: they are memory of the call, whatever they hold.
  if (rows > kFewRows && row >= valid_rows(count, rows)) return;
  const int source = weights ? *source_of : 0;
  uint4 gate[2], up[2];
  load_sixteen<wide>(gate, gates), load_sixteen<wide>(up, ups);
  __syncwarp();  // the loads stay before what waits for the count
  const bool counts = row < valid_rows(count, rows);
  const float weight = weights && counts ? weights[source] : 1.0f;
  float value[2][8];
  float largest = activate_eight(value[0], gate[0], up[0], limit);
  largest = largest_or_nan(largest, activate_eight(value[1], gate[1], up[1], limit));
  const uint32_t scale = fp8_scale_of_bits(largest_of_two_lanes(__float_as_uint(fabsf(largest * weight))));
  if (!inside || !counts) return;
  const float factor = weight * __uint_as_float((254u - min(scale, 254u)) << 23);  // exact: a power of two
  uint32_t four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* of = value[i / 2] + i % 2 * 4;
    four[i] = four_codes(of[0] * factor, of[1] * factor, of[2] * factor, of[3] * factor);
  }
  store_sixteen<wide>(codes, scales, {four[0], four[1], four[2], four[3]}, scale);
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
  if (s.rows == 0 || s.width == 0) return DI_OK;
  const dim3 grid(s.rows, static_cast<unsigned>(ceil_div(s.width, kSixteen * kThreads)));
  const bool wide = s.stride % 8 == 0 && (reinterpret_cast<uintptr_t>(s.gate_up) | reinterpret_cast<uintptr_t>(s.out)) % 16 == 0;
  launch_early(wide ? swiglu_kernel<true> : swiglu_kernel<false>, grid, kThreads, 0, static_cast<cudaStream_t>(stream), s);
  return finish(e, "swiglu_quantise");
}
