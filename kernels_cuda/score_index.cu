// score_index for MXFP4 queries and keys of 128 values and at most 32 heads: FP8 wgmma on the bare codes.
//
// e2m1 codes are e5m2 values, so one wgmma of K = 32 sums a group's 32 products exactly, and FP32 multiplies the sum by
// the key's scale of that group: dot = ((s0 c0 + s1 c1) + s2 c2) + s3 c3, fused. The query's four scales are folded into its
// e5m2 operand, which is exact while they lie within 2^10 of each other; other heads keep theirs apart. All is so scaled that
// the dot is below 1: a saturating sum is its relu.
// Nothing but a row's own query and keys enters, and every call takes this one path, so bits depend on nothing else.
// Heads: lane c of a quad adds heads 2c, 2c + 1, 2c + 8, ... in ascending order, then ((lane 0 + 1) + (lane 2 + 3)).
//
// A tile is 64 keys, the M of a wgmma, in registers; the 32 heads of one query row are its N, in shared memory. A block of
// threads keeps up to 16 rows of one request and lets the request's keys stream by: four warps copy tiles into a ring, and four
// warpgroups take them in turn. The work is cut into equal shares on the device by what `visible`
// says (di_index.cuh).
#include "di_launch.cuh"
#include "score_index_any.cuh"
#include "score_index_copies.cuh"
#include "score_index_sums.cuh"
#include "score_index_whole.cuh"

namespace di {
namespace {

// Tiles from the start of a visit to this warpgroup's first.
__device__ __forceinline__ uint32_t skipped(const Visit& visit) {
  return (threadIdx.x / 128 + kConsumers - visit.before % kConsumers) % kConsumers;
}

// This warpgroup's tiles of a visit, as its places in the ring, each times 8. A round is what lies before the ring's end.
struct Rounds {
  static constexpr int kStep = 8 * kConsumers, kRing = 8 * kStages;
  int at, end;
  uint32_t parity;

  __device__ __forceinline__ explicit Rounds(const Visit& visit) {
    const uint32_t index = visit.before + skipped(visit);
    const int tiles = visit.end - visit.first - static_cast<int>(skipped(visit));
    at = 8 * (index % kStages), parity = index / kStages & 1;
    end = at + (tiles + kConsumers - 1) / kConsumers * kStep;
  }
  __device__ __forceinline__ void next() { at = 8 * (threadIdx.x / 128), end -= kRing, parity ^= 1; }
};

// A run of one row: every tile once. What changes from tile to tile is `at` and `out` alone.
template <bool pool>
__device__ __forceinline__ void score_one_row(const IndexCall& c, const Visit& visit, Shared& s, const Lane& l) {
  const KeptWeights weights(StoredWeights(s, 0));
  const uint32_t against = s.plain[0] != 0 ? 0 : 1;
  const uint32_t two = load_shared4(shared_address(&s.two));
  Rounds rounds(visit);
  // Column `first + 8 at`, for at below `limit`: without candidates what is behind the last visible one is fill_columns'.
  const int first = (visit.first + static_cast<int>(skipped(visit))) * kIndexTile + l.place - 8 * rounds.at;
  const int columns = pool ? c.columns : min(c.columns, s.visible[0]), visible = s.visible[0];
  float* out = c.scores + visit.run.first * c.scores_stride + first + 8 * rounds.at;
  int limit = threadIdx.x % 4 < 2 ? (columns - first + 7) >> 3 : INT32_MIN / 2;
  for (; rounds.at < rounds.end; rounds.next(), limit -= Rounds::kRing) {
    int end = min(rounds.end, Rounds::kRing);
    asm volatile("" : "+r"(end));  // kept, not worked out again
    for (int at = rounds.at; at < end; at += Rounds::kStep, out += kConsumers * kIndexTile) {
      KeyTile tile;
      mbarrier_wait_at(l.full + at, rounds.parity);
      load_keys(at, l, tile);
      KeyScales scales[2] = {load_scales(at, l, 0), load_scales(at, l, 1)};
      const float own = own_factor(at, l);
      const bool plain = are_plain(scales, against | sign_of(own));
      bool seen = true;
      if (pool) {
        const int piece = s.first_row[at / 8][l.place >> c.piece_shift];
        seen = piece >= 0 && piece + (l.place & ((1 << c.piece_shift) - 1)) < visible;
      }
      if (__builtin_expect(!plain, 0)) {  // by this warp alone; the products below are of all four, whatever comes of them
        const float score = score_apart(at, s, 0);
        if (at < limit) *out = seen ? score : kNoScore;
        load_keys(at, l, tile);  // again: the call is to leave the common case its registers
        scales[0] = load_scales(at, l, 0), scales[1] = load_scales(at, l, 1);
        await_load(scales[0].codes), await_load(scales[1].codes);
      }
      expand_group(tile, 0, two), expand_group(tile, 1, two);
      const float score = score_row(tile, scales, at, l, weights, two, own);
      if (plain && at < limit) *out = seen ? score : kNoScore;
    }
  }
}

// Scores of several rows over an expanded tile.
struct RowScores {
  const Shared& s;
  float* out;
  int64_t stride;
  int key;
  bool there;

  __device__ __forceinline__ void put(float score, int r) {
    if (there) *out = key < s.visible[r] ? score : kNoScore;
    out += stride;
  }
};

// Products are under way at all times: a row's sums are made while the next row's first groups are multiplied, the last row's
// once too often. Gives the tile's place `at` back.
__device__ __forceinline__ void score_plain_rows(RowScores to, const KeyTile& tile, const KeyScales (&scales)[2], const Shared& s,
                                                 uint32_t at, const Lane& l, int rows) {
  Sums a, b, d;
  const int last = rows - 1;
  start_group(a, tile, l, 0, 0);
  start_group(b, tile, l, 0, 1);
  give_back(at, l);
  for (int r = 0;; r += 2) {
    to.put(score_row_of_many(a, b, d, tile, scales, s, l, r, min(r + 1, last)), r);
    if (r == last) {
      wait_group<0>(d), wait_group<0>(b);
      return;
    }
    to.put(score_row_of_many(d, b, a, tile, scales, s, l, r + 1, min(r + 2, last)), r + 1);
    if (r + 1 == last) {
      wait_group<0>(a), wait_group<0>(b);
      return;
    }
  }
}

// Several rows: a tile is expanded once for all of them.
__device__ __forceinline__ void score_rows(const IndexCall& c, const Visit& visit, Shared& s, const Lane& l) {
  const int rows = visit.run.rows;
  const uint32_t two = load_shared4(shared_address(&s.two));
  uint32_t against = 0;
  for (int r = 0; r < rows; ++r) against |= s.plain[r] != 0 ? 0 : 1;
  Rounds rounds(visit);
  int key = (visit.first + static_cast<int>(skipped(visit))) * kIndexTile + l.place;
  for (; rounds.at < rounds.end; rounds.next()) {
    const int end = min(rounds.end, Rounds::kRing);
    for (int at = rounds.at; at < end; at += Rounds::kStep, key += kConsumers * kIndexTile) {
      KeyTile tile;
      mbarrier_wait_at(l.full + at, rounds.parity);
      load_keys(at, l, tile);
      KeyScales scales[2] = {load_scales(at, l, 0), load_scales(at, l, 1)};
      const bool plain = are_plain(scales, against);
      float* const out = c.scores + visit.run.first * c.scores_stride + key;
      RowScores to{s, out, c.scores_stride, key, threadIdx.x % 4 < 2 && key < c.columns};
      if (__builtin_expect(!plain, 0)) {
        RowScores each = to;
#pragma unroll 1
        for (int r = 0; r < rows; ++r) each.put(score_apart(at, s, r), r);
        load_keys(at, l, tile);
        scales[0] = load_scales(at, l, 0), scales[1] = load_scales(at, l, 1);
        await_load(scales[0].codes), await_load(scales[1].codes);
      }
      to.there = to.there && plain;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) expand_group(tile, g, two);
      score_plain_rows(to, tile, scales, s, at, l, rows);
    }
  }
}

// -inf for columns from `first` to `end` of all rows of a run.
__device__ __forceinline__ void fill_columns(const IndexCall& c, const IndexRun& run, int first, int end) {
  for (int r = 0; r < run.rows; ++r) {
    float* out = c.scores + (run.first + r) * c.scores_stride;
    for (int column = first + threadIdx.x; column < min(end, c.columns); column += 128 * kConsumers) out[column] = kNoScore;
  }
}

// What the windows cost, every kThreads / 32th from `window` on.
__device__ __forceinline__ void cost_windows(const IndexCall& c, Shared& s, int window, int windows, int live) {
  for (; window < windows; window += kThreads / 32) {
    const int64_t cost = index_window_cost(c, window, live);
    if (threadIdx.x % 32 == 0) s.starts[window + 1] = cost;
  }
}

// Prefix sums of what the windows cost and this block's share, by the warps that copy; they cost the first windows themselves, so
// that few rows wait for nobody.
__device__ __forceinline__ void plan(const IndexCall& c, Shared& s, int windows, int live) {
  const int warp = threadIdx.x / 32 % kProducers, lane = threadIdx.x % 32;
  cost_windows(c, s, warp, windows, live);
  named_barrier_sync(kCosted, kThreads);
  if (warp == 0) {
    int64_t before = 0;
    for (int base = 0; base < windows; base += 32) {
      int64_t sum = base + lane < windows ? s.starts[base + lane + 1] : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
      }
      if (base + lane < windows) s.starts[base + lane + 1] = before + sum;
      before += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (lane == 0) s.starts[0] = 0;
    if (lane < 2) s.share[lane] = __umul64hi(before * (blockIdx.x + lane), c.share);
  }
  named_barrier_sync(kPlanned, 32 * kProducers);
}

__device__ __forceinline__ void tell(const IndexCall& c, const Visit& visit, Shared& s, int number) {
  const int slot = number % kVisits;
  mbarrier_wait(&s.visit_empty[slot], (number / kVisits & 1) ^ 1);
  if (threadIdx.x % 32 == 0) {
    s.visits[slot] = visit;
    mbarrier_arrive(&s.visit_full[slot]);
  }
  __syncwarp();
  const int head = threadIdx.x % 32, weight_bytes = c.weights_bf16 ? 2 : 4;
  const int rows = head < c.heads ? visit.run.rows : 0;  // their queries are under way when the consumers come to them
#pragma unroll 1
  for (int row = visit.run.first; row < visit.run.first + rows; ++row) {
    prefetch_line(c.q + row * c.q_stride + head * c.q_head_stride);
    prefetch_line(c.q_scale + row * c.q_scale_stride + head * c.q_scale_head_stride);
    const int64_t weight = row * c.weights_stride + head * c.weights_head_stride;
    prefetch_line(static_cast<const uint8_t*>(c.weights) + weight * weight_bytes);
  }
}

template <bool pool>
__device__ __forceinline__ void produce(const IndexCall& c, const CUtensorMap* map, Shared& s, int windows, int live) {
  const bool tells = threadIdx.x / 32 % kProducers == 0;
  uint32_t index = 0;
  int number = 0;
  index_share(c, s.starts, windows, live, s.share, [&](const IndexRun& run, int first, int end, int fill, int fill_end) {
    if (tells) tell(c, {run, first, end, fill, fill_end, index}, s, number++);
    copy_tiles<pool>(c, map, run, s, first, end, index);
  });
  if (tells) tell(c, {}, s, number);
}

template <bool pool>
__device__ __forceinline__ void consume(const IndexCall& c, Shared& s) {
  const Lane l = lane_of_thread(s);
  for (int number = 0;; ++number) {
    const int slot = number % kVisits;
    mbarrier_wait(&s.visit_full[slot], number / kVisits & 1);
    const Visit& visit = s.visits[slot];
    if (visit.run.rows == 0) return;
    if (visit.first < visit.end) load_queries(c, visit.run, s);
    if (visit.fill < visit.fill_end) fill_columns(c, visit.run, visit.fill * kIndexTile, visit.fill_end * kIndexTile);
    if (pool || visit.run.rows == 1) {
      if (!pool) fill_columns(c, visit.run, max(visit.first * kIndexTile, visit.run.seen), visit.end * kIndexTile);
      score_one_row<pool>(c, visit, s, l);
    } else {
      score_rows(c, visit, s, l);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.visit_empty[slot]);
  }
}

template <bool pool>
__global__ void __launch_bounds__(kThreads, 1)
    score_index_kernel(const __grid_constant__ IndexCall c, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) s.two = 2;
  if (threadIdx.x % 32 == 0) {
    for (int stage = warp; stage < kStages; stage += kThreads / 32) {
      mbarrier_init(&s.full[stage], pool ? 33 : 1);
      mbarrier_init(&s.empty[stage], 4);
    }
    if (warp < kVisits) {
      mbarrier_init(&s.visit_full[warp], 1);
      mbarrier_init(&s.visit_empty[warp], 4 * kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  start_dependents();
  wait_for_producer();
  const int live = index_live_rows(c), here = max(0, min(live - c.first_row, kIndexWindows * kIndexWindow));
  const int windows = (here + kIndexWindow - 1) / kIndexWindow;
  if (warp / 4 == kConsumers) {
    registers_down<kProducerRegisters>();
    plan(c, s, windows, live);
    produce<pool>(c, &map, s, windows, live);
  } else {
    registers_up<kConsumerRegisters>();
    cost_windows(c, s, kProducers + warp, windows, live);
    named_barrier_arrive(kCosted, kThreads);
    consume<pool>(c, s);
  }
}

// The cache's codes as lines of 128 bytes (two keys): [blocks, block_rows / 2, 128], in boxes of a piece.
bool codes_map(CUtensorMap* map, const di_tensor& cache, int block_rows, int piece_rows) {
  const cuuint64_t sizes[3] = {128, static_cast<cuuint64_t>(block_rows / 2), static_cast<cuuint64_t>(cache.shape[0])};
  const cuuint64_t pitches[2] = {128, static_cast<cuuint64_t>(cache.stride[0])};
  const cuuint32_t box[3] = {128, static_cast<cuuint32_t>(piece_rows / 2), 1}, steps[3] = {1, 1, 1};
  const EncodeTiled encode = tensor_map_encoder();
  return encode != nullptr && encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, cache.data, sizes, pitches, box, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Rows of a piece, all in one block and one candidate block; 0 where the fast kernel cannot copy them.
int piece_rows_of(const IndexCall& c) {
  for (int rows = kIndexTile; rows >= kIndexTile / kPieces; rows /= 2) {
    if (c.block_rows % rows == 0 && (c.candidates == nullptr || c.candidate_block % rows == 0)) return rows;
  }
  return 0;
}

bool aligned(const void* address, int64_t stride, int64_t other, int bytes) {
  return (reinterpret_cast<uintptr_t>(address) | stride | other) % bytes == 0;
}

bool is_fast(const IndexAny& a) {
  const IndexCall& c = a.call;
  return a.query_dtype == DI_U8 && a.key_format == DI_MXFP4_32 && a.width == 128 && c.heads <= kHeads && piece_rows_of(c) != 0 &&
         c.cache != nullptr && aligned(c.q, c.q_stride, c.q_head_stride, 16) && aligned(c.cache, c.block_stride, 0, 16);
}

int score_index_fast(IndexCall c, const di_tensor& cache, cudaStream_t stream, di_error* e) {
  const int piece_rows = piece_rows_of(c), bytes = sizeof(Shared);
  c.piece_shift = __builtin_ctz(c.candidates != nullptr ? kIndexTile / kPieces : piece_rows);
  CUtensorMap map;
  if (!codes_map(&map, cache, c.block_rows, piece_rows)) return refuse(e, DI_FAILED, "the driver refuses a map of the cache");
  const bool pool = c.candidates != nullptr;
  if ((pool ? allow_shared<score_index_kernel<true>>(bytes) : allow_shared<score_index_kernel<false>>(bytes)) != cudaSuccess)
    return finish(e, "score_index");
  c.share = UINT64_MAX / multiprocessors() + 1;
  const auto kernel = pool ? score_index_kernel<true> : score_index_kernel<false>;
  for (c.first_row = 0; c.first_row < c.rows; c.first_row += kIndexWindows * kIndexWindow) {
    launch_early(kernel, multiprocessors(), kThreads, bytes, stream, c, map);
  }
  return finish(e, "score_index");
}

// Rows with candidates: those whose candidates are all that they see, and then the others.
int score_index_pool(const IndexCall& c, const di_tensor& cache, cudaStream_t stream, void* ws, size_t ws_bytes, di_error* e) {
  IndexCall whole, chosen;
  if (!part_rows(c, whole, chosen, stream, ws, ws_bytes)) return score_index_fast(c, cache, stream, e);
  const int status = score_index_fast(whole, cache, stream, e);
  return status == DI_OK ? score_index_fast(chosen, cache, stream, e) : status;
}

}  // namespace
}  // namespace di

// q, q_scale, weights, cache, block_table, row_to_req, visible, candidates, count, scores; candidate_block, format, block_rows.
DI_EXPORT int di_score_index(const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes, di_error* e) {
  using namespace di;
  if (n != 10 || p->n_i != 3) return refuse(e, DI_BAD_CALL, "10 tensors and 3 integers are wanted, got %d and %d", n, p->n_i);
  const di_tensor &q = t[0], &q_scale = t[1], &weights = t[2], &cache = t[3], &table = t[4], &candidates = t[7], &scores = t[9];
  IndexAny a{};
  IndexCall& c = a.call;
  c.rows = static_cast<int>(q.shape[0]);
  c.columns = static_cast<int>(scores.shape[1]);
  c.heads = static_cast<int>(q.shape[1]);
  if (c.rows == 0 || c.columns == 0) return DI_OK;
  if (q.stride[2] != 1 || scores.stride[1] != 1 || cache.stride[1] != 1 || (present(q_scale) && q_scale.stride[2] != 1))
    return refuse(e, DI_UNSUPPORTED, "the last dimension of q, q_scale, cache and scores must be dense");
  a.query_dtype = q.dtype;
  a.key_format = static_cast<int>(p->i[1]);
  a.width = static_cast<int>(q.shape[2]) * (q.dtype == DI_U8 ? 2 : 1);
  c.q = data<const uint8_t>(q), c.q_stride = q.stride[0], c.q_head_stride = q.stride[1];
  c.q_scale = data<const uint8_t>(q_scale), c.q_scale_stride = q_scale.stride[0], c.q_scale_head_stride = q_scale.stride[1];
  c.weights = weights.data, c.weights_bf16 = weights.dtype == DI_BF16;
  c.weights_stride = weights.stride[0], c.weights_head_stride = weights.stride[1];
  c.cache = data<const uint8_t>(cache), c.block_stride = cache.stride[0];
  c.block_rows = static_cast<int>(p->i[2] > 1 ? p->i[2] : 1), c.candidate_block = static_cast<int>(p->i[0]);
  c.block_table = data<const int32_t>(table), c.table_stride = table.stride[0];
  c.row_to_req = data<const int32_t>(t[5]), c.visible = data<const int32_t>(t[6]);
  c.candidates = data<const int32_t>(candidates), c.candidates_stride = candidates.stride[0];
  c.count = data<const int32_t>(t[8]);
  c.scores = data<float>(scores), c.scores_stride = scores.stride[0];
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return is_fast(a) ? score_index_pool(c, cache, on, ws, ws_bytes, e) : score_index_any(a, on, e);
}
