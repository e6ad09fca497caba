// route_topk: a block has a token row, four warps a quarter of its experts each. A warp picks its own k best, one after the other,
// and the first warp puts the picks of all four in order by counting.
//
// A kernel before clears the counts, to which every row adds. Integers add up to the same in any order, and a row's experts depend on
// the row and the bias alone.
#include <algorithm>

#include "di_fp8_groups.cuh"
#include "di_launch_small.cuh"

namespace di {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kMostChosen = 32 / kWarps, kMostEach = 4, kMostExperts = kMostEach * kThreads;
constexpr uint32_t kAll = 0xFFFFFFFFu;

struct Route {
  const float *logits, *bias;
  const int *expert_map, *count;
  int* ids;
  float* weights;
  int* counts;
  int rows, experts, k, physical;
  float scaling;
};

// Scores ordered as unsigned numbers: NaN first, -0 as 0, -inf last; 0 is below all of them.
__device__ __forceinline__ uint32_t ordered(float value) {
  if (isnan(value)) return kAll;
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// sqrt(max(x, 0) + log1p(exp(-|x|))), with log1p(e) = 2 atanh(e / (2 + e)) by its odd series: a fast logarithm would lose the
// small scores.
__device__ __forceinline__ float root_softplus(float x) {
  const float e = __expf(-fabsf(x)), s = __fdividef(e, 2.0f + e), q = s * s;
  float series = 1.0f / 11 + q * (1.0f / 13);
  series = 1.0f / 9 + q * series;
  series = 1.0f / 7 + q * series;
  series = 1.0f / 5 + q * series;
  series = 1.0f / 3 + q * series;
  return sqrtf((x > 0.0f ? x : 0.0f) + 2.0f * s * (1.0f + q * series));
}

struct Picks {
  ulonglong2 order[kWarps * kMostChosen / 2];  // key and, inverted, expert: of two picks
  float score[kWarps * kMostChosen];
};

// The k best of a warp's experts into its part of `picks`. A lane's experts lie side by side, and before those of the next lane:
// equal keys go to the first lane.
template <int each>
__device__ __forceinline__ void pick(const Route& route, const float (&score)[each], uint32_t (&key)[each], Picks& picks) {
  const int lane = threadIdx.x % 32, first = threadIdx.x * each;
  int place = threadIdx.x / 32 * route.k;
#pragma unroll 1
  for (int j = 0; j < route.k; ++j, ++place) {
    uint32_t best = key[0];
#pragma unroll
    for (int i = 1; i < each; ++i) best = max(best, key[i]);
    const uint32_t highest = __reduce_max_sync(kAll, best);
    if (__ffs(__ballot_sync(kAll, best == highest)) != lane + 1) continue;
    int at = 0;
    float its = score[0];
#pragma unroll
    for (int i = each - 1; i >= 0; --i)
      if (key[i] == best) at = i, its = score[i];
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (i == at) key[i] = 0;
    reinterpret_cast<uint64_t*>(picks.order)[place] = static_cast<uint64_t>(best) << 32 | ~static_cast<uint32_t>(first + at);
    picks.score[place] = its;
  }
}

// One warp: the k best of the picks of all four, in order; the expert of a lane that has one, or -1.
__device__ __forceinline__ int place_picks(const Route& route, int64_t row, int lane, const Picks& picks, float* scores) {
  const int count = kWarps * route.k;  // even
  const uint64_t mine = lane < count ? reinterpret_cast<const uint64_t*>(picks.order)[lane] : 0;
  int rank = 0;
#pragma unroll
  for (int two = 0; two < kWarps * kMostChosen / 2; ++two) {
    const ulonglong2 other = picks.order[two];
    rank += 2 * two < count && other.x > mine;
    rank += 2 * two < count && other.y > mine;
  }
  const bool taken = lane < count && rank < route.k;
  const float score = taken ? picks.score[lane] : 0.0f;
  if (taken) scores[rank] = score;
  __syncwarp();
  if (!taken) return -1;
  const int expert = static_cast<int>(~static_cast<uint32_t>(mine)), physical = route.expert_map ? route.expert_map[expert] : expert;
  float total = scores[0];
  for (int j = 1; j < route.k; ++j) total += scores[j];
  route.ids[row * route.k + rank] = physical;
  route.weights[row * route.k + rank] = __fdividef(score, total + 1e-20f) * route.scaling;
  return physical;
}

__global__ void clear_kernel(int* counts, int physical) {
  start_dependents();
  wait_for_producer();
  for (int i = threadIdx.x; i < physical; i += blockDim.x) counts[i] = 0;
}

template <int each>
__global__ void __launch_bounds__(kThreads) route_kernel(const Route route) {
  __shared__ Picks picks;
  __shared__ float scores[kMostChosen];
  const int row = blockIdx.x, first = threadIdx.x * each;
  start_dependents();
  float score[each], bias[each];
#pragma unroll
  for (int i = 0; i < each; ++i) bias[i] = first + i < route.experts ? __ldg(route.bias + first + i) : 0.0f;  // weights
  const float* logits = settled(route.logits + static_cast<int64_t>(row) * route.experts + first);
  const int experts = route.experts, *count = route.count;
  wait_for_producer_with(logits, count, experts, route.rows, route.k, route.expert_map, route.ids, route.weights, route.counts);
#pragma unroll
  for (int i = 0; i < each; ++i) score[i] = first + i < experts ? logits[i] : 0.0f;
  const int rows = valid_rows(count, route.rows);
  uint32_t key[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    score[i] = root_softplus(score[i]);
    key[i] = first + i < route.experts ? ordered(score[i] + bias[i]) : 0;
  }
  pick<each>(route, score, key, picks);
  __syncthreads();
  if (threadIdx.x >= 32 || row >= rows) return;
  const int physical = place_picks(route, row, threadIdx.x, picks, scores);
  if (physical >= 0) atomicAdd(&route.counts[physical], 1);
}

template <int each>
void launch(const Route& route, cudaStream_t on) {
  const int clearing = std::min(static_cast<int>(round_up(std::max(route.physical, 1), 32)), kMostExperts);
  launch_early(clear_kernel, dim3(1), clearing, 0, on, route.counts, route.physical);
  if (route.rows > 0) launch_early(route_kernel<each>, dim3(route.rows), kThreads, 0, on, route);
}

}  // namespace
}  // namespace di

DI_EXPORT int di_route_topk(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  if (n != 7 || p->n_i != 1 || p->n_d != 1) return refuse(e, DI_BAD_CALL, "route_topk takes 7 tensors, k and a scale, got %d tensors", n);
  Route route = {};
  route.logits = data<float>(t[0]), route.bias = data<float>(t[1]);
  route.expert_map = present(t[2]) ? data<int>(t[2]) : nullptr, route.count = present(t[3]) ? data<int>(t[3]) : nullptr;
  route.ids = data<int>(t[4]), route.weights = data<float>(t[5]), route.counts = data<int>(t[6]);
  route.rows = static_cast<int>(t[0].shape[0]), route.experts = static_cast<int>(t[0].shape[1]);
  route.k = static_cast<int>(p->i[0]), route.physical = static_cast<int>(t[6].shape[0]);
  route.scaling = static_cast<float>(p->d[0]);
  if (route.experts > kMostExperts || route.k > kMostChosen)
    return refuse(e, DI_UNSUPPORTED, "route_topk: up to %d experts, %d of them a token, got %d and %d", kMostExperts, kMostChosen,
                  route.experts, route.k);
  for (int i : {0, 4, 5})
    if (!rows_follow(t[i])) return refuse(e, DI_UNSUPPORTED, "route_topk: the rows of logits, ids and weights must follow one another");
  const auto on = static_cast<cudaStream_t>(stream);
  if (route.experts <= kThreads) launch<1>(route, on);
  else if (route.experts <= 3 * kThreads) launch<3>(route, on);
  else launch<4>(route, on);
  return finish(e, "route_topk");
}
