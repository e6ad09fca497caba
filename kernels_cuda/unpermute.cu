// unpermute of BF16 rows: a thread adds eight columns of a token's rows, in the order of its choices; all of them are on their way
// before the first is added.
#include "di_fp8_groups.cuh"
#include "di_launch_small.cuh"

namespace di {
namespace {

constexpr int kThreads = 128, kEach = 8, kMostChoices = 8;

struct Unpermute {
  const __nv_bfloat16 *rows, *shared;
  const int *inverse, *count;
  __nv_bfloat16* out;
  int tokens, k, hidden;
};

__device__ __forceinline__ void add_eight(float (&sum)[kEach], uint4 eight) {
  float value[kEach];
  widen_eight(value, eight);
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum[i] += value[i];
}

__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// kChoices: at least k.
template <int kChoices>
__global__ void __launch_bounds__(kThreads) unpermute_kernel(const Unpermute u) {
  const int token = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * kEach;
  start_dependents();
  const int64_t at = static_cast<int64_t>(token) * u.hidden + column;
  const int* inverse = settled(u.inverse + static_cast<int64_t>(token) * u.k);
  const __nv_bfloat16 *rows = settled(u.rows + column), *shared = settled(u.shared ? u.shared + at : u.rows);
  const bool adds = u.shared != nullptr;
  const int *count = u.count, tokens = u.tokens, k = u.k;
  const uint32_t hidden = u.hidden;
  wait_for_producer_with(inverse, rows, shared, u.out + at, count, tokens, k, hidden);
  if (column >= hidden) return;
  int row[kChoices];
#pragma unroll
  for (int j = 0; j < kChoices; ++j) row[j] = j < k ? inverse[j] : -1;
  const bool counts = token < valid_rows(count, tokens);  // a token that does not count names no rows either
  uint4 own = {}, chosen[kChoices] = {};
  if (adds) own = *reinterpret_cast<const uint4*>(shared);
#pragma unroll
  for (int j = 0; j < kChoices; ++j)
    if (counts && row[j] >= 0)
      chosen[j] = *reinterpret_cast<const uint4*>(rows + static_cast<uint64_t>(static_cast<uint32_t>(row[j])) * hidden);
  if (!counts) return;
  float sum[kEach] = {};
#pragma unroll
  for (int j = 0; j < kChoices; ++j) add_eight(sum, chosen[j]);  // zeros add nothing
  add_eight(sum, own);
  *reinterpret_cast<uint4*>(u.out + at) = {rounded_pair(sum[0], sum[1]), rounded_pair(sum[2], sum[3]),
                                           rounded_pair(sum[4], sum[5]), rounded_pair(sum[6], sum[7])};
}

// Whether the rows of a tensor follow one another, and lie where 16 bytes are read at once.
bool packed(const di_tensor& t, bool wide) {
  return rows_follow(t) && (!wide || !present(t) || reinterpret_cast<uintptr_t>(t.data) % 16 == 0);
}

}  // namespace
}  // namespace di

DI_EXPORT int di_unpermute(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  if (n != 5) return refuse(e, DI_BAD_CALL, "unpermute: 5 tensors make a call, got %d", n);
  for (int i : {0, 2, 4})
    if (present(t[i]) && t[i].dtype != DI_BF16) return refuse(e, DI_UNSUPPORTED, "unpermute: rows of BF16 are served, on both sides");
  Unpermute u = {};
  u.rows = data<__nv_bfloat16>(t[0]), u.inverse = data<int>(t[1]);
  u.shared = present(t[2]) ? data<__nv_bfloat16>(t[2]) : nullptr, u.count = present(t[3]) ? data<int>(t[3]) : nullptr;
  u.out = data<__nv_bfloat16>(t[4]);
  u.tokens = static_cast<int>(t[4].shape[0]), u.hidden = static_cast<int>(t[4].shape[1]), u.k = static_cast<int>(t[1].shape[1]);
  if (u.k > kMostChoices || u.hidden % kEach != 0)
    return refuse(e, DI_UNSUPPORTED, "unpermute: up to %d choices and multiples of %d columns, got %d and %d", kMostChoices, kEach, u.k,
                  u.hidden);
  if (u.tokens == 0 || u.hidden == 0) return DI_OK;
  for (int i : {0, 1, 2, 4})
    if (!packed(t[i], i != 1)) return refuse(e, DI_UNSUPPORTED, "unpermute: rows must follow one another, and begin at multiples of 16 bytes");
  const dim3 grid(u.tokens, static_cast<unsigned>(ceil_div(u.hidden, kEach * kThreads)));
  const auto kernel = u.k <= 2 ? unpermute_kernel<2> : u.k <= 4 ? unpermute_kernel<4> : u.k <= 6 ? unpermute_kernel<6> : unpermute_kernel<8>;
  launch_early(kernel, grid, kThreads, 0, static_cast<cudaStream_t>(stream), u);
  return finish(e, "unpermute");
}
