// verify_drafts: the coupled rule is a warp per request. The rejection rule has two kernels.
//
// scan_kernel: a block has 8192 logits of one row, a target's or a draft's, in registers: their largest and the sum of
//   exponentials relative to it. Rows that cannot decide anything, as no draft is offered there, are not read.
// settle_kernel: a cluster per request. Its warps test a draft each; where one is refused, the cluster draws from what is left of
//   the target's distribution. It reads the target's row again and from the draft's only what may win: a logarithm of p with a
//   bound of the noise says what cannot.
//
// Every sum has an order that the vocabulary decides alone.
#include <algorithm>

#include "di_noise.cuh"
#include "sample_row.cuh"

namespace di {
namespace sampling {
namespace {

constexpr int kScanThreads = 256, kEach = 32, kSlice = kScanThreads * kEach, kScanWarps = kScanThreads / 32;
constexpr uint32_t kAccept = 1, kResidual = 2;  // purposes

struct Call {
  const int *target, *drafts, *draft_counts, *positions;
  const float *target_logits, *draft_logits;
  const int64_t* seeds;
  int *accepted, *tokens;
  int64_t target_strides[2], draft_strides[2];  // from request to request, from place to place
  int requests, width, vocabulary, slices;
  float2* stats;  // workspace: [request][place][target or draft][slice] largest, sum
  Rows rows;      // of targets
};

__device__ __forceinline__ const int* drafts_of(const Call& c, int request) {
  return c.drafts + static_cast<int64_t>(request) * c.width;
}

// Drafts that count: up to the first that is not offered. By a warp.
__device__ __forceinline__ int offered(const Call& c, int request, int lane) {
  const int end = min(c.draft_counts[request], c.width);
  for (int start = 0; start < end; start += 32) {
    const bool none = start + lane < end && drafts_of(c, request)[start + lane] < 0;
    const uint32_t without = __ballot_sync(kAll, none);
    if (without != 0) return start + __ffs(without) - 1;
  }
  return max(end, 0);
}

__device__ __forceinline__ const float* target_row(const Call& c, int request, int place) {
  return c.target_logits + request * c.target_strides[0] + place * c.target_strides[1];
}
__device__ __forceinline__ const float* draft_row(const Call& c, int request, int place) {
  return c.draft_logits + request * c.draft_strides[0] + place * c.draft_strides[1];
}

// Writes the drafts that stand and what follows them; by all threads.
__device__ __forceinline__ void store(const Call& c, int request, int count, int token, int thread, int threads) {
  const int64_t first = static_cast<int64_t>(request) * (c.width + 1);
  for (int i = thread; i <= c.width; i += threads)
    c.tokens[first + i] = i < count ? drafts_of(c, request)[i] : i == count ? token : -1;
  if (thread == 0) c.accepted[request] = count;
}

__global__ void __launch_bounds__(kScanThreads) coupled_kernel(const Call c) {
  start_dependents();
  wait_for_producer();
  const int request = blockIdx.x * kScanWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (request >= c.requests) return;
  const int* target = c.target + static_cast<int64_t>(request) * (c.width + 1);
  const int end = offered(c, request, lane);
  int count = end;
  for (int start = 0; start < end && count == end; start += 32) {
    const bool differs = start + lane < end && drafts_of(c, request)[start + lane] != target[start + lane];
    const uint32_t places = __ballot_sync(kAll, differs);
    if (places != 0) count = start + __ffs(places) - 1;
  }
  store(c, request, count, target[count], lane, 32);
}

__global__ void __launch_bounds__(kScanThreads, 4) scan_kernel(const Call c) {
  __shared__ float2 of_warps[kScanWarps];
  start_dependents();
  wait_for_producer();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * kSlice + threadIdx.x;
  const int pair = blockIdx.y / 2, request = pair / c.width, place = pair % c.width;
  if (place >= offered(c, request, lane)) return;
  const float* logits = blockIdx.y % 2 == 0 ? target_row(c, request, place) : draft_row(c, request, place);
  float x[kEach], peak = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    x[i] = first + i * kScanThreads < c.vocabulary ? __ldcs(logits + first + i * kScanThreads) : -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; ++i) peak = fmaxf(peak, x[i]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, step));
  const float safe = peak == -INFINITY ? 0.0f : peak;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += __expf(x[i] - safe);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
  if (lane == 0) of_warps[warp] = {peak, sum};
  __syncthreads();
  if (threadIdx.x != 0) return;
  float2 all = of_warps[0];
#pragma unroll
  for (int i = 1; i < kScanWarps; ++i) {
    const float2 its = of_warps[i];
    const float higher = fmaxf(all.x, its.x), to = higher == -INFINITY ? 0.0f : higher;
    all = {higher, all.y * expf(all.x - to) + its.y * expf(its.x - to)};
  }
  c.stats[static_cast<int64_t>(blockIdx.y) * c.slices + blockIdx.x] = all;
}

// A row's largest logit and its sum of exponentials, from its slices in order; by a warp.
__device__ __forceinline__ float2 combine(const Call& c, int request, int place, int which, int lane) {
  const float2* stats = c.stats + ((static_cast<int64_t>(request) * c.width + place) * 2 + which) * c.slices;
  float peak = -INFINITY, total = 0.0f;
  for (int i = lane; i < c.slices; i += 32) peak = fmaxf(peak, stats[i].x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, step));
  const float safe = peak == -INFINITY ? 0.0f : peak;
  for (int i = lane; i < c.slices; i += 32) total += stats[i].y * expf(stats[i].x - safe);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kAll, total, step);
  return {peak, total};
}

__device__ __forceinline__ float share(float logit, const float2& of) { return __fdiv_rn(expf(logit - of.x), of.y); }

// Whether a draft passes its test; by a warp.
__device__ __forceinline__ bool stands(const Call& c, int request, int place, int lane) {
  const float2 p = combine(c, request, place, 0, lane), q = combine(c, request, place, 1, lane);
  const int token = min(drafts_of(c, request)[place], c.vocabulary - 1);
  const Noise noise(c.seeds[request], c.positions[request] + place, kAccept);
  const float u = uniform(part_of(noise.words(token / 4), token % 4));
  return u * share(draft_row(c, request, place)[token], q) < share(target_row(c, request, place)[token], p);
}

// The token of the largest noisy logarithm of what is left: the positive part of p - q, or p if `whole`; -1: nothing is.
__device__ __forceinline__ int draw_left(const Cluster& cluster, const Row& r, Race& race, const Noise& noise, const float2& p,
                                         const float2& q, const float* draft, bool whole) {
  const float shift = p.x + logf(p.y);  // a logit less that is the logarithm of p
  Best best;
  stream_row(r, [&](int chunk, const float4& x) {
    const int column = column_of(r, chunk);
    const uint4 words = noise.words(column / 4);
    const float all[4] = {x.x, x.y, x.z, x.w};
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
    const float hopeless = race.hopeless() - 1e-6f * fabsf(shift);
    uint32_t live = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) live |= static_cast<uint32_t>(!(all[i] - shift + gumbel_bound(each[i]) <= hopeless)) << i;
    while (live != 0) {
      const int i = __ffs(live) - 1;
      live &= live - 1;
      if (column + i >= r.vocabulary) continue;
      const float left = share(part_of(x, i), p) - (whole ? 0.0f : share(__ldg(draft + column + i), q));
      if (left > 0.0f) race.offer(__fadd_rn(logf(left), gumbel(part_of(words, i))), column + i, best);
    }
    __syncwarp();
  });
  race.keep(r, best);
  cluster_sync();
  return race.winner(cluster, r);
}

__global__ void __launch_bounds__(kThreads, 1) settle_kernel(const __grid_constant__ Call c) {
  __shared__ Race race;
  __shared__ int standing;
  const Cluster cluster = cooperative_groups::this_cluster();
  start_dependents();
  wait_for_producer();
  const int request = static_cast<int>(blockIdx.x) / c.rows.blocks, rank = static_cast<int>(blockIdx.x) % c.rows.blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int end = offered(c, request, lane);
  if (threadIdx.x == 0) standing = end, race.bar = 0;
  __syncthreads();
  for (int place = warp; place < end; place += kWarps)
    if (!stands(c, request, place, lane) && lane == 0) atomicMin(&standing, place);
  __syncthreads();
  const int count = standing;
  int token = c.target[static_cast<int64_t>(request) * (c.width + 1) + count];
  if (count < end) {
    const float2 p = combine(c, request, count, 0, lane), q = combine(c, request, count, 1, lane);
    const Noise noise(c.seeds[request], c.positions[request] + count, kResidual);
    Row r = c.rows.row(0, rank);
    r.logits = target_row(c, request, count);
    const float* draft = draft_row(c, request, count);
    token = -1;
#pragma unroll 1
    for (int whole = 0; whole < 2 && token < 0; ++whole) {
      if (whole) cluster_sync();  // all have read what the first draw left
      token = draw_left(cluster, r, race, noise, p, q, draft, whole);
    }
    token = max(token, 0);
  }
  if (rank == 0) store(c, request, count, token, threadIdx.x, kThreads);
  __syncwarp();
  if (count < end) cluster_sync();  // others read this block's numbers
}

int launch_rejection(Call c, void* ws, size_t ws_bytes, cudaStream_t stream, di_error* e) {
  c.slices = static_cast<int>(ceil_div(c.vocabulary, kSlice));
  const int64_t of_request = 2 * static_cast<int64_t>(c.width) * c.slices * sizeof(float2);
  const int64_t room = std::min<int64_t>(ws_bytes / of_request, kMostGridRows / (2 * c.width));
  if (room == 0)
    return refuse(e, DI_UNSUPPORTED, "verify_drafts: %d drafts of a request need %lld bytes of workspace", c.width,
                  static_cast<long long>(of_request));
  const int requests = c.requests;
  c.stats = static_cast<float2*>(ws);
  for (int first = 0; first < requests; first += static_cast<int>(room)) {
    Call part = c;
    part.requests = static_cast<int>(std::min<int64_t>(room, requests - first));
    const int64_t skipped = first;
    part.target += skipped * (c.width + 1), part.tokens += skipped * (c.width + 1), part.drafts += skipped * c.width;
    part.draft_counts += skipped, part.positions += skipped, part.seeds += skipped, part.accepted += skipped;
    part.target_logits += skipped * c.target_strides[0], part.draft_logits += skipped * c.draft_strides[0];
    launch_clusters(scan_kernel, dim3(c.slices, 2 * c.width * part.requests), kScanThreads, 0, stream, 1, true, part);
    launch_clusters(settle_kernel, dim3(part.requests * c.rows.blocks), kThreads, 0, stream, c.rows.blocks, true, part);
  }
  return finish(e, "verify_drafts");
}

}  // namespace
}  // namespace sampling
}  // namespace di

// target, drafts, draft_counts, target_logits?, draft_logits?, seeds, positions, rule, accepted, tokens
DI_EXPORT int di_verify_drafts(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes,
                               di_error* e) {
  using namespace di;
  using namespace di::sampling;
  if (n != 9 || p->n_i != 1)
    return refuse(e, DI_BAD_CALL, "verify_drafts: 9 tensors and a rule make a call, got %d and %d numbers", n, p->n_i);
  Call c = {};
  c.requests = static_cast<int>(t[1].shape[0]), c.width = static_cast<int>(t[1].shape[1]);
  if (c.requests == 0) return DI_OK;
  c.target = data<int>(t[0]), c.drafts = data<int>(t[1]), c.draft_counts = data<int>(t[2]);
  c.seeds = data<int64_t>(t[5]), c.positions = data<int>(t[6]), c.accepted = data<int>(t[7]), c.tokens = data<int>(t[8]);
  const auto on = static_cast<cudaStream_t>(stream);
  if (p->i[0] == DI_COUPLED || c.width == 0) {
    launch_early(coupled_kernel, dim3(static_cast<unsigned>(ceil_div(c.requests, kScanWarps))), kScanThreads, 0, on, c);
    return finish(e, "verify_drafts");
  }
  if (p->i[0] != DI_REJECTION || !present(t[3]) || !present(t[4]))
    return refuse(e, DI_BAD_CALL, "verify_drafts: the rejection rule needs target_logits and draft_logits");
  c.vocabulary = static_cast<int>(t[4].shape[2]);
  if (c.vocabulary == 0) return refuse(e, DI_BAD_CALL, "verify_drafts: a row has no logit to take");
  if (t[3].stride[2] != 1 || t[4].stride[2] != 1) return refuse(e, DI_UNSUPPORTED, "verify_drafts: rows of logits must be dense");
  c.target_logits = data<float>(t[3]), c.draft_logits = data<float>(t[4]);
  for (int i = 0; i < 2; ++i) c.target_strides[i] = t[3].stride[i], c.draft_strides[i] = t[4].stride[i];
  c.rows = share_rows(c.target_logits, t[3].stride[0] | t[3].stride[1], c.vocabulary, c.requests, INT32_MAX);
  return launch_rejection(c, ws, ws_bytes, on, e);
}
