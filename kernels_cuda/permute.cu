// permute: a stable counting sort of (token, choice) pairs by expert, and a copy of rows.
//
// Few pairs take one launch: a pair's block counts the pairs that sort before its own, which is its row, while the token's row is on
// its way, and copies. Up to kAlone pairs each of its warps looks at all of them, so that none waits for another; more are shared
// out. Further blocks count for the offsets. Many pairs take two launches: a block per expert counts what sorts before it and numbers
// its own pairs in order, then a block per token copies its row to all places of its choices. All give the same rows.
#include "di_fp8_groups.cuh"
#include "di_launch_small.cuh"

namespace di {
namespace {

constexpr int kThreads = 160, kWarps = kThreads / 32, kHeld = 2;
constexpr int kLook = 128, kAlone = 3 * kLook, kFewPairs = 4 * kWarps * kLook, kOrders = 4096, kMostExperts = 1 << 20;
constexpr int kOffsets = 4;  // that a warp counts
constexpr int kAtOnce = 4;  // pairs of a lane
constexpr int kPlacers = 1024;  // threads of a block that sorts many pairs: as many warps as a warp has lanes
constexpr uint32_t kAll = 0xFFFFFFFFu;

struct Permute {
  const uint8_t *x, *x_scale;
  const int *ids, *count;
  uint8_t *out, *out_scale;
  int *offsets, *source, *inverse;
  int64_t stride;  // bytes from row to row of x
  int tokens, k, experts, width, scales;  // width, scales: bytes of a row
  __device__ __forceinline__ int pairs() const { return valid_rows(count, tokens) * k; }
  // What a few pairs are sorted by; ids that are no expert come last.
  __device__ __forceinline__ uint32_t order(int id, int pair) const {
    return min(static_cast<uint32_t>(id), static_cast<uint32_t>(experts)) * kOrders + pair;
  }
};

// Pairs in the lanes of a warp, four of every kLook from `first` on; the first warp has one of the up to three that are left too.
template <int looks>
struct Pairs {
  uint32_t order[looks][4], left;
  // `others`: 32-bit words that are loaded meanwhile.
  template <typename... Others>
  __device__ __forceinline__ Pairs(const Permute& p, int all, int first, int lane, Others... others) {
    int4 id[looks];
    first += lane * 4;
#pragma unroll
    for (int i = 0; i < looks; ++i) {
      id[i] = {-1, -1, -1, -1};
      if (first + i * kLook + 3 < all) id[i] = *reinterpret_cast<const int4*>(p.ids + first + i * kLook);
    }
    const int last = (all & ~3) + lane, last_id = first < kLook && last < all ? p.ids[last] : -1;
    int pairs = p.count ? p.pairs() : all;
    pairs += zero_of(others...);  // all loads are on their way before the first is looked at
#pragma unroll
    for (int i = 0; i < looks; ++i) pairs += zero_of(id[i].x);
    left = p.order(last < pairs ? last_id : -1, last);
#pragma unroll
    for (int i = 0; i < looks; ++i) {
      const int pair = first + i * kLook;
      order[i][0] = p.order(pair < pairs ? id[i].x : -1, pair), order[i][1] = p.order(pair + 1 < pairs ? id[i].y : -1, pair + 1);
      order[i][2] = p.order(pair + 2 < pairs ? id[i].z : -1, pair + 2), order[i][3] = p.order(pair + 3 < pairs ? id[i].w : -1, pair + 3);
    }
  }
  __device__ __forceinline__ int before(uint32_t mine) const {
    int count = left < mine;
#pragma unroll
    for (int i = 0; i < looks; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) count += order[i][c] < mine;
    return __reduce_add_sync(kAll, count);
  }
};

// The sum of what the block's warps have at `room`, a warp beside the next, once all are there.
__device__ __forceinline__ int sum_of_warps(const int* room) {
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += room[warp];
  return sum;
}

__device__ __forceinline__ int word_of(uint4 held) { return static_cast<int>(held.x); }
__device__ __forceinline__ int word_of(uint8_t held) { return held; }

// The block counts for kWarps * kOffsets offsets: a warp for some of them, or, with shared pairs, its share for all of them.
template <int looks, bool shared>
__device__ __forceinline__ void make_offsets(const Permute& p, int all, int first, int warp, int lane) {
  const Pairs<looks> pairs(p, all, shared ? warp * looks * kLook : 0, lane);
  if constexpr (!shared) {
    first += warp * kOffsets;
#pragma unroll
    for (int i = 0; i < kOffsets; ++i) {
      const int before = pairs.before(p.order(first + i, 0));
      if (lane == 0 && first + i <= p.experts) p.offsets[first + i] = before;
    }
  } else {
    __shared__ int room[kWarps * kOffsets][kWarps];
#pragma unroll 4
    for (int i = 0; i < kWarps * kOffsets; ++i) {
      const int before = pairs.before(p.order(first + i, 0));
      if (lane == 0) room[i][warp] = before;
    }
    const int mine = min(static_cast<int>(threadIdx.x), kWarps * kOffsets - 1), before = sum_of_warps(room[mine]);
    if (threadIdx.x < kWarps * kOffsets && first + mine <= p.experts) p.offsets[first + mine] = before;
  }
}

// Block (j, t) has choice j of token t; those after the last token make offsets. `shared`: its warps share out the pairs.
template <int looks, bool shared, typename Word>
__global__ void __launch_bounds__(kThreads) few_kernel(const Permute p) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, token = blockIdx.y, k = gridDim.x, all = p.tokens * k;
  const int pair = token * k + blockIdx.x;
  start_dependents();
  if (token >= p.tokens) {
    wait_for_producer_with(all, p.ids, p.count);
    return make_offsets<looks, shared>(p, all, (pair - all) * kWarps * kOffsets, warp, lane);
  }
  const int words = p.width / static_cast<int>(sizeof(Word));
  const Word* from = settled(reinterpret_cast<const Word*>(p.x + token * p.stride) + thread);
  const uint8_t* scale_from = settled(p.x_scale + static_cast<int64_t>(token) * p.scales + thread);
  const int* id_from = settled(p.ids + pair);
  wait_for_producer_with(from, scale_from, id_from, words, all, p.scales);
  const int id = *id_from;
  Word held[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (thread + i * kThreads < words) held[i] = from[i * kThreads];
  const int scale = thread < p.scales ? *scale_from : 0;
  const Pairs<looks> pairs(p, all, shared ? warp * looks * kLook : 0, lane, id, scale, word_of(held[0]), word_of(held[1]));
  int row = pairs.before(p.order(id, pair));
  if constexpr (shared) {
    __shared__ int room[kWarps];
    if (lane == 0) room[warp] = row;
    row = sum_of_warps(room);
  }
  if (p.count && pair >= p.pairs()) return;
  const bool there = id >= 0 && id < p.experts;
  if (thread == 0) p.inverse[pair] = there ? row : -1;
  if (!there) return;
  if (thread == 0) p.source[row] = pair;
  Word* to = reinterpret_cast<Word*>(p.out + static_cast<int64_t>(row) * p.width) + thread;
  uint8_t* scale_to = p.out_scale + static_cast<int64_t>(row) * p.scales + thread;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (thread + i * kThreads < words) to[i * kThreads] = held[i];
  if (thread < p.scales) *scale_to = static_cast<uint8_t>(scale);
#pragma unroll 1
  for (int i = kHeld * kThreads; i + thread < words; i += kThreads) to[i] = from[i];
#pragma unroll 1
  for (int i = kThreads; i + thread < p.scales; i += kThreads) scale_to[i] = scale_from[i];
}

// The block of an expert; that of `experts` is for ids that name none, and for the end. A warp has a run of the pairs, which it counts
// and then, knowing what the warps before it have, goes through again.
__global__ void __launch_bounds__(kPlacers) place_kernel(const Permute p) {
  __shared__ int found_by[kPlacers / 32], earlier_by[kPlacers / 32];
  start_dependents();
  wait_for_producer();
  const int expert = blockIdx.x, pairs = p.pairs(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int run = (pairs + kPlacers - 1) / kPlacers * 32, first = min(pairs, warp * run), end = min(pairs, first + run);
  int earlier = 0, found = 0;
#pragma unroll 8
  for (int pair = first + lane; pair < end; pair += 32) {
    const int id = p.ids[pair];
    earlier += id >= 0 && id < expert, found += id == expert;
  }
  earlier = __reduce_add_sync(kAll, earlier), found = __reduce_add_sync(kAll, found);
  if (lane == 0) earlier_by[warp] = earlier, found_by[warp] = found;
  __syncthreads();
  const int start = __reduce_add_sync(kAll, earlier_by[lane]);  // as many warps as lanes
  int row = start + __reduce_add_sync(kAll, lane < warp ? found_by[lane] : 0);
  if (threadIdx.x == 0) p.offsets[expert] = start;
  for (int base = first; base < end; base += 32 * kAtOnce) {
    int ids[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) ids[i] = base + 32 * i + lane < end ? p.ids[base + 32 * i + lane] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int pair = base + 32 * i + lane;
      if (expert == p.experts) {
        if (pair < end && (ids[i] < 0 || ids[i] >= p.experts)) p.inverse[pair] = -1;
        continue;
      }
      const uint32_t mine = __ballot_sync(kAll, ids[i] == expert);
      const int place = row + __popc(mine & ((1u << lane) - 1));
      if (ids[i] == expert) p.source[place] = pair, p.inverse[pair] = place;
      row += __popc(mine);
    }
  }
}

// The block of a token reads its row once, and writes it for each of its choices.
template <typename Word>
__global__ void __launch_bounds__(kThreads) copy_kernel(const Permute p) {
  __shared__ int rows[kThreads];
  start_dependents();
  const int token = blockIdx.x, thread = threadIdx.x, words = p.width / static_cast<int>(sizeof(Word));
  wait_for_producer();
  if (token * p.k >= p.pairs()) return;
  const Word* from = reinterpret_cast<const Word*>(p.x + token * p.stride);
  for (int begin = 0; begin < p.k; begin += kThreads) {
    const int choices = min(kThreads, p.k - begin);
    Word held[kHeld];
    for (int part = thread; part - thread < max(words, p.scales); part += kHeld * kThreads) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (part + i * kThreads < words) held[i] = from[part + i * kThreads];
      uint8_t scale[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (part + i * kThreads < p.scales) scale[i] = p.x_scale[static_cast<int64_t>(token) * p.scales + part + i * kThreads];
      __syncthreads();
      if (thread < choices) rows[thread] = p.inverse[token * p.k + begin + thread];
      __syncthreads();
#pragma unroll 2
      for (int choice = 0; choice < choices; ++choice) {
        const int64_t row = rows[choice];
        if (row < 0) continue;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          if (part + i * kThreads < words) reinterpret_cast<Word*>(p.out + row * p.width)[part + i * kThreads] = held[i];
          if (part + i * kThreads < p.scales) p.out_scale[row * p.scales + part + i * kThreads] = scale[i];
        }
      }
    }
  }
}

template <int looks, bool shared, typename Word>
void launch_few(const Permute& p, cudaStream_t stream) {
  const int counting = static_cast<int>(ceil_div(p.experts + 1, kWarps * kOffsets * p.k));
  launch_early(few_kernel<looks, shared, Word>, dim3(p.k, p.tokens + counting), kThreads, 0, stream, p);
}

template <typename Word>
void launch(const Permute& p, cudaStream_t stream) {
  const int pairs = p.tokens * p.k;
  if (p.k > 0 && pairs <= kFewPairs && p.experts < kMostExperts && reinterpret_cast<uintptr_t>(p.ids) % 16 == 0) {
    if (pairs <= kLook) launch_few<1, false, Word>(p, stream);
    else if (pairs <= kAlone) launch_few<kAlone / kLook, false, Word>(p, stream);
    else if (pairs <= kFewPairs / 2) launch_few<2, true, Word>(p, stream);
    else launch_few<4, true, Word>(p, stream);
    return;
  }
  launch_early(place_kernel, dim3(p.experts + 1), kPlacers, 0, stream, p);
  if (pairs > 0) launch_early(copy_kernel<Word>, dim3(p.tokens), kThreads, 0, stream, p);
}

int bytes_of(int dtype) { return dtype == DI_U8 ? 1 : dtype == DI_BF16 ? 2 : 4; }

}  // namespace
}  // namespace di

DI_EXPORT int di_permute(const di_tensor* t, int n, const di_params* params, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  if (n != 9 || params->n_i != 1) return refuse(e, DI_BAD_CALL, "permute takes 9 tensors and a number of experts, got %d tensors", n);
  if (t[0].shape[0] > 0 && t[0].stride[1] != 1) return refuse(e, DI_UNSUPPORTED, "permute: rows must be dense");
  for (int i : {1, 2, 4, 5, 8})
    if (!rows_follow(t[i])) return refuse(e, DI_UNSUPPORTED, "permute: all rows but those of x must follow one another");
  const int bytes = bytes_of(t[0].dtype);
  Permute p = {};
  p.x = data<uint8_t>(t[0]), p.x_scale = present(t[1]) ? data<uint8_t>(t[1]) : nullptr;
  p.ids = data<int>(t[2]), p.count = present(t[3]) ? data<int>(t[3]) : nullptr;
  p.out = data<uint8_t>(t[4]), p.out_scale = present(t[5]) ? data<uint8_t>(t[5]) : nullptr;
  p.offsets = data<int>(t[6]), p.source = data<int>(t[7]), p.inverse = data<int>(t[8]);
  p.tokens = static_cast<int>(t[2].shape[0]), p.k = static_cast<int>(t[2].shape[1]), p.experts = static_cast<int>(params->i[0]);
  p.width = static_cast<int>(t[0].shape[1]) * bytes, p.stride = t[0].stride[0] * bytes;
  p.scales = present(t[5]) ? static_cast<int>(t[5].shape[1]) : 0;
  const auto on = static_cast<cudaStream_t>(stream);
  const auto whole = [&](int64_t word) {
    return p.width % word == 0 && p.stride % word == 0 && (reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.out)) % word == 0;
  };
  if (whole(16)) launch<uint4>(p, on);
  else launch<uint8_t>(p, on);
  return finish(e, "permute");
}
