// top_logprobs for up to 256 best tokens, in two launches that read a row once, but for what holds the best.
//
// scan_kernel: a block has up to 16 384 columns of a row in registers: their largest logit, the sum of exponentials relative to
//   it, how many come before the chosen token, and each thread's own largest logit.
// pick_kernel: a block has a row. The k-th largest of the threads' maxima is no larger than the k-th largest logit, so the best
//   lie with the few threads that reach it. Their columns are read again, and what reaches it is put in order by counting.
//   Where too many reach that bound or fewer than k can be picked, those above it are found and its equals are taken from the
//   left; if those are too many as well, the k-th logit is found exactly, by its bits.
//
// The columns of a thread and the order of every sum depend on the vocabulary alone.
#include <algorithm>

#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {
namespace {

constexpr int kThreads = 256, kEach = 64, kSlice = kThreads * kEach, kPickers = 512, kMostBest = 256, kMostFound = 2048;
constexpr uint32_t kAll = 0xFFFFFFFFu;

struct Call {
  const float* logits;
  const int* chosen;
  float *chosen_logprob, *values;
  int *chosen_rank, *ids;
  int64_t stride;
  int vocabulary, slices, k;
  float4* stats;     // workspace: [row][slice] largest, sum, columns before, whether the row is broken
  uint32_t* maxima;  // workspace: [row][slice][kThreads]
};

// Ordered as logits are, both zeros as one; 0 for -inf and NaN.
__device__ __forceinline__ uint32_t ordered(float logit) {
  if (!(logit > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A sum over the block's threads, in one order; every thread gets it. `room` has a place for each warp.
template <int threads, typename T>
__device__ __forceinline__ T block_sum(T value, T* room) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  __syncthreads();  // what was there is read
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = room[0];
#pragma unroll
  for (int warp = 1; warp < threads / 32; ++warp) sum += room[warp];
  return sum;
}

__global__ void __launch_bounds__(kThreads) scan_kernel(const Call c) {
  __shared__ float of_warps[kThreads / 32];
  __shared__ int counts[kThreads / 32];
  start_dependents();
  wait_for_producer();
  const int slice = blockIdx.x, first = slice * kSlice + threadIdx.x;
  const int64_t row = blockIdx.y;
  const float* logits = c.logits + row * c.stride;
  const int token = c.chosen[row];
  const float own = logits[max(token, 0)];
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int column = first + i * kThreads;
    x[i] = column < c.vocabulary ? logits[column] : -INFINITY;
  }
  float largest = -INFINITY;
  bool broken = false;
  int before = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    broken |= !(x[i] < INFINITY);
    largest = fmaxf(largest, x[i]);
    before += x[i] > own || (x[i] == own && first + i * kThreads < token);
  }
  c.maxima[(row * c.slices + slice) * kThreads + threadIdx.x] = ordered(largest);
  float peak = largest;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = peak;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) peak = fmaxf(peak, of_warps[warp]);
  const float safe = peak == -INFINITY ? 0.0f : peak;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += __expf(x[i] - safe);
  sum = block_sum<kThreads>(sum, of_warps);
  before = block_sum<kThreads>(before, counts);
  broken = __syncthreads_or(broken);
  if (threadIdx.x == 0) c.stats[row * c.slices + slice] = {peak, sum, __int_as_float(before), broken ? 1.0f : 0.0f};
}

struct Row {
  const float* logits;
  float peak, log_total;
  int before;
  bool usable;
};

// What the slices of a row add up to, in their order; each warp does it for itself, a lane a slice.
__device__ __forceinline__ Row combine(const Call& c, int64_t row, int lane) {
  Row of = {c.logits + row * c.stride, -INFINITY, 0.0f, 0, true};
  const float4* stats = c.stats + row * c.slices;
#pragma unroll 1
  for (int start = 0; start < c.slices; start += 32)
    of.peak = fmaxf(of.peak, start + lane < c.slices ? stats[start + lane].x : -INFINITY);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) of.peak = fmaxf(of.peak, __shfl_xor_sync(kAll, of.peak, step));
  const float safe = of.peak == -INFINITY ? 0.0f : of.peak;
  float total = 0.0f;
#pragma unroll 1
  for (int start = 0; start < c.slices; start += 32) {
    const float4 mine = start + lane < c.slices ? stats[start + lane] : make_float4(-INFINITY, 0.0f, 0.0f, 0.0f);
    const float scaled = mine.y * expf(mine.x - safe);
    for (int i = 0; i < min(32, c.slices - start); ++i) total += __shfl_sync(kAll, scaled, i);
    of.before += __reduce_add_sync(kAll, __float_as_int(mine.z));
    of.usable = of.usable && !__any_sync(kAll, mine.w != 0.0f);
  }
  of.usable = of.usable && of.peak > -INFINITY;
  of.log_total = logf(total);
  return of;
}

// Whole numbers of the block's threads added up; every thread gets the sum. The rooms of calls that follow each other differ.
__device__ __forceinline__ int count_all(int mine, int* room) {
  mine = __reduce_add_sync(kAll, mine);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = mine;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kPickers / 32; i += 4) {
    const int4 four = *reinterpret_cast<const int4*>(room + i);
    sum += four.x + four.y + four.z + four.w;
  }
  return sum;
}

// A value that at least `wanted` of what `count` counts reach, or 0: the highest such, or the first that at most `most` reach.
// count(v) is how many a thread has that reach v, none of them above `highest`. many: whether more than `most` reach it.
template <typename Count>
__device__ __forceinline__ uint32_t reached(int wanted, int most, uint32_t highest, int (*rooms)[kPickers / 32], Count count,
                                            bool& many) {
  uint32_t low = 0, high = highest;
  many = true;
#pragma unroll 1
  for (int turn = 0; low < high; turn ^= 1) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const int reach = count_all(count(middle), rooms[turn]);
    if (reach < wanted) {
      high = middle - 1;
    } else {
      low = middle;
      many = reach > most;
      if (!many) break;
    }
  }
  return low;
}

struct Found {
  uint32_t key[kMostFound];
  int column[kMostFound], segment[kMostFound];
  __align__(16) int sums[2][kPickers / 32];
  int segments, count;
};

__device__ __forceinline__ void add(Found& f, uint32_t key, int column) {
  const int place = atomicAdd(&f.count, 1);
  if (place < kMostFound) f.key[place] = key, f.column[place] = column;
}

__device__ __forceinline__ void store_pick(const Call& c, const Row& of, int64_t row, int place, int column) {
  c.ids[row * c.k + place] = column;
  c.values[row * c.k + place] = of.logits[column] - of.peak - of.log_total;
}

// Puts what was found in its order; what comes after the k-th is left out.
__device__ __forceinline__ void store_found(const Call& c, const Row& of, int64_t row, const Found& f) {
  for (int i = threadIdx.x; i < f.count; i += kPickers) {
    int rank = 0;
    for (int j = 0; j < f.count; ++j) rank += f.key[j] > f.key[i] || (f.key[j] == f.key[i] && f.column[j] < f.column[i]);
    if (rank < c.k) store_pick(c, of, row, rank, f.column[i]);
  }
}

// The places from `place` to the k-th are those of the first columns whose key is `level`.
__device__ __forceinline__ void store_ties(const Call& c, const Row& of, int64_t row, uint32_t level, int place, Found& f) {
  constexpr int kLoads = 16, kPart = 32 * kLoads, kTile = kPart * (kPickers / 32);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int start = 0, turn = 0; start < c.vocabulary && place < c.k; start += kTile, turn ^= 1) {
    const int first = start + warp * kPart + lane;
    uint32_t there[kLoads];
    int mine = 0, before = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first + 32 * i;
      there[i] = __ballot_sync(kAll, column < c.vocabulary && ordered(of.logits[column]) == level);
      mine += __popc(there[i]);
    }
    if (lane == 0) f.sums[turn][warp] = mine;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int other = 0; other < kPickers / 32; ++other) {
      before += other < warp ? f.sums[turn][other] : 0;
      all += f.sums[turn][other];
    }
    int at = place + before;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int own = at + __popc(there[i] & ((1u << lane) - 1));
      if ((there[i] >> lane & 1) && own < c.k) store_pick(c, of, row, own, first + 32 * i);
      at += __popc(there[i]);
    }
    place += all;
  }
}

// The exact way, for any row: all above the k-th value, then its equals from the left.
__device__ __forceinline__ void pick_exactly(const Call& c, const Row& of, int64_t row, Found& f) {
  const auto sweep = [&](auto each) {
    for (int column = threadIdx.x; column < c.vocabulary; column += kPickers) each(column, ordered(of.logits[column]));
  };
  __syncthreads();
  bool many;
  const uint32_t kth = reached(c.k, c.k, kAll, f.sums, [&](uint32_t value) {
    int count = 0;
    sweep([&](int, uint32_t key) { count += key >= value; });
    return count;
  }, many);
  if (threadIdx.x == 0) f.count = 0;
  __syncthreads();
  sweep([&](int column, uint32_t key) {
    if (key > kth) add(f, key, column);
  });
  __syncthreads();
  store_found(c, of, row, f);
  store_ties(c, of, row, kth, f.count, f);
}

// Finds the columns whose keys reach `least`, from the threads that have one; each(use) calls use(thread, largest key) for the
// threads of the row. False if there are too many.
template <typename Each>
__device__ __forceinline__ bool gather(const Call& c, const Row& of, uint32_t least, Found& f, Each each) {
  __syncthreads();
  if (threadIdx.x == 0) f.count = f.segments = 0;
  __syncthreads();
  each([&](int thread, uint32_t key) {
    if (key < least) return;
    const int place = atomicAdd(&f.segments, 1);
    if (place < kMostFound) f.segment[place] = thread;
  });
  __syncthreads();
  if (f.segments > kMostFound) return false;
#pragma unroll 4
  for (int i = threadIdx.x; i < f.segments * kEach; i += kPickers) {
    const int segment = f.segment[i / kEach];
    const int column = segment / kThreads * kSlice + segment % kThreads + i % kEach * kThreads;
    const uint32_t key = column < c.vocabulary ? ordered(of.logits[column]) : 0;
    if (key >= least) add(f, key, column);
  }
  __syncthreads();
  return f.count <= kMostFound;
}

__global__ void __launch_bounds__(kPickers) pick_kernel(const Call c) {
  __shared__ Found f;
  start_dependents();
  wait_for_producer();
  const int64_t row = blockIdx.x;
  const uint32_t* maxima = c.maxima + row * c.slices * kThreads;
  const int threads = c.slices * kThreads, lane = threadIdx.x % 32;
  constexpr int kMine = 8;  // the first of the threads' maxima that a thread compares
  uint32_t mine[kMine], highest = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) mine[i] = i * kPickers + threadIdx.x < threads ? maxima[i * kPickers + threadIdx.x] : 0;
  const int token = c.chosen[row];
  const Row of = combine(c, row, lane);
  if (threadIdx.x == 0) {
    const float nan = __uint_as_float(0x7FC00000u);
    c.chosen_logprob[row] = of.usable && token >= 0 ? of.logits[token] - of.peak - of.log_total : nan;
    c.chosen_rank[row] = token < 0 ? 0 : of.usable ? of.before + 1 : 1;
  }
  if (!of.usable) {  // no logarithm of such a row is a number
    for (int i = threadIdx.x; i < c.k; i += kPickers) c.ids[row * c.k + i] = i, c.values[row * c.k + i] = -INFINITY;
    return;
  }
  if (c.k == 0) return;
  highest = ordered(of.peak);
  const auto each = [&](auto use) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) use(i * kPickers + threadIdx.x, mine[i]);
    for (int i = kMine * kPickers + threadIdx.x; i < threads; i += kPickers) use(i, maxima[i]);
  };
  bool many;
  const uint32_t bound = reached(c.k, 2 * c.k + 32, highest, f.sums, [&](uint32_t value) {
    int count = 0;
    each([&](int, uint32_t key) { count += key >= value; });
    return count;
  }, many);
  if (!many && gather(c, of, bound, f, each)) return store_found(c, of, row, f);
  // Too many reach the bound, or it is 0, so that -inf may be among the k. What exceeds it comes first, and those may be few.
  if (gather(c, of, bound + 1, f, each)) {
    store_found(c, of, row, f);
    return store_ties(c, of, row, bound, f.count, f);
  }
  pick_exactly(c, of, row, f);
}

}  // namespace
}  // namespace di

DI_EXPORT int di_top_logprobs(const di_tensor* t, int n, const di_params*, void* stream, void* ws, size_t ws_bytes, di_error* e) {
  using namespace di;
  if (n != 6) return refuse(e, DI_BAD_CALL, "top_logprobs: 6 tensors make a call, got %d", n);
  if (t[0].shape[0] > 0 && t[0].stride[1] != 1) return refuse(e, DI_UNSUPPORTED, "top_logprobs: rows must be dense");
  Call c = {};
  c.logits = data<float>(t[0]), c.stride = t[0].stride[0], c.chosen = data<int>(t[1]);
  c.chosen_logprob = data<float>(t[2]), c.chosen_rank = data<int>(t[3]);
  c.ids = data<int>(t[4]), c.values = data<float>(t[5]);
  c.vocabulary = static_cast<int>(t[0].shape[1]), c.k = static_cast<int>(t[4].shape[1]);
  c.slices = static_cast<int>(ceil_div(c.vocabulary, kSlice));
  if (c.k > kMostBest) return refuse(e, DI_UNSUPPORTED, "top_logprobs: up to %d best tokens, got %d", kMostBest, c.k);
  const int64_t rows = t[0].shape[0];
  const int64_t of_row = c.slices * static_cast<int64_t>(sizeof(float4) + kThreads * sizeof(uint32_t));
  const int64_t room = std::min<int64_t>(ws_bytes / std::max<int64_t>(of_row, 1), kMostGridRows);
  if (rows > 0 && room == 0)
    return refuse(e, DI_BAD_CALL, "top_logprobs: a row needs %lld bytes of workspace", static_cast<long long>(of_row));
  const auto on = static_cast<cudaStream_t>(stream);
  for (int64_t first = 0; first < rows; first += room) {
    const int some = static_cast<int>(std::min(room, rows - first));
    Call part = c;
    part.logits += first * c.stride, part.chosen += first, part.chosen_logprob += first, part.chosen_rank += first;
    part.ids += first * c.k, part.values += first * c.k;
    part.stats = static_cast<float4*>(ws);
    part.maxima = reinterpret_cast<uint32_t*>(part.stats + static_cast<int64_t>(some) * c.slices);
    launch_early(scan_kernel, dim3(c.slices, some), kThreads, 0, on, part);
    launch_early(pick_kernel, dim3(some), kPickers, 0, on, part);
  }
  return finish(e, "top_logprobs");
}
