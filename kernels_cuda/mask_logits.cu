// mask_logits: a block has a row and 8192 ids, whose counts in the row's history lie in its shared memory.
//
// A count is twice an id's occurrences in the output, plus one if it is in the prompt: integers, so atomic additions in any order
// make the same. Who counts an id first puts it on a list, from which the penalties are applied; its order decides nothing. Then
// biases and the allowed-token mask follow, each for the block's ids alone.
#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {
namespace {

constexpr int kThreads = 512, kIds = 8192, kBatch = 8;
constexpr int kManyRows = 32;  // whose logits go faster by ban_fours; of fewer, to read takes longer than to write parts of sectors

// What a block counts: by id, and which ids have a count.
struct Counts {
  uint32_t of[kIds];
  uint16_t list[kIds];
  int listed;
};

struct Mask {
  const int *history, *slots, *prompt_len, *length;
  const float *repetition, *presence, *frequency;
  const int *bias_offsets, *bias_ids;
  const float* bias_values;
  const uint32_t* allowed;
  float* logits;
  int64_t history_stride, allowed_stride, stride;
  int rows, vocabulary, entries;
};

// The block's ids: `first` .. first + size - 1 of row s.
struct Part {
  int s, first, size;
};

__device__ __forceinline__ void count_history(const Mask& m, const Part& at, int slot, Counts& counts) {
  const int* ids = m.history + slot * m.history_stride;
  const int end = m.length[at.s], prompt = m.prompt_len[at.s];
  for (int i = threadIdx.x; i < at.size; i += kThreads) counts.of[i] = 0;
  if (threadIdx.x == 0) counts.listed = 0;
  __syncthreads();
  for (int start = threadIdx.x; start < end; start += kBatch * kThreads) {
    int place[kBatch];  // all are on their way before the first is counted
#pragma unroll
    for (int i = 0; i < kBatch; ++i) place[i] = start + i * kThreads < end ? __ldg(ids + start + i * kThreads) - at.first : -1;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (place[i] < 0 || place[i] >= at.size) continue;
      uint32_t* count = &counts.of[place[i]];
      const uint32_t before = start + i * kThreads < prompt ? atomicOr(count, 1u) : atomicAdd(count, 2u);
      if (before == 0) counts.list[atomicAdd(&counts.listed, 1)] = static_cast<uint16_t>(place[i]);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void penalise(const Mask& m, const Part& at, const Counts& counts, float* logits) {
  const float factor = m.repetition[at.s], once = m.presence[at.s], each = m.frequency[at.s];
  for (int i = threadIdx.x; i < counts.listed; i += kThreads) {
    const int place = counts.list[i];
    const uint32_t count = counts.of[place];
    float x = logits[place];
    x = x > 0.0f ? __fdiv_rn(x, factor) : x * factor;
    x = __fsub_rn(x, __fmul_rn(each, static_cast<float>(count >> 1)));
    logits[place] = __fsub_rn(x, count > 1 ? once : 0.0f);
  }
}

// The first entry of an id adds the values of all that name it, in their order.
__device__ __forceinline__ void add_biases(const Mask& m, const Part& at, int begin, int end, float* logits) {
  for (int entry = begin + threadIdx.x; entry < end; entry += kThreads) {
    const int id = m.bias_ids[entry], place = id - at.first;
    if (id < 0 || place < 0 || place >= at.size) continue;
    bool earlier = false;
    for (int other = begin; other < entry && !earlier; ++other) earlier = m.bias_ids[other] == id;
    if (earlier) continue;
    float x = logits[place];
    for (int other = entry; other < end; ++other)
      if (m.bias_ids[other] == id) x = __fadd_rn(x, m.bias_values[other]);
    logits[place] = x;
  }
}

// Which of four ids are banned, as bits.
__device__ __forceinline__ uint32_t banned_of(const uint32_t* words, int place) {
  return ~(__ldg(words + place / 32) >> place % 32) & 15u;
}

// A thread has four ids at a time, and writes single ones where not all four are banned.
__device__ __forceinline__ void ban(const Part& at, const uint32_t* words, float* logits) {
  const bool fours = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
#pragma unroll 4
  for (int i = threadIdx.x * 4; i < at.size; i += 4 * kThreads) {
    const uint32_t banned = banned_of(words, i);
    if (banned == 15u && fours && i + 4 <= at.size) {
      *reinterpret_cast<float4*>(logits + i) = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if ((banned >> j & 1) && i + j < at.size) logits[i + j] = -INFINITY;
  }
}

// The same of kIds ids that begin at a multiple of 16 bytes. Fours of which some are banned are read and written, so that sectors of
// memory leave whole. Bits are moved, so that a NaN keeps its own.
__device__ __forceinline__ void ban_fours(const uint32_t* words, float* logits) {
  constexpr uint32_t kBanned = 0xFF800000u;  // -infinity
  constexpr int kFours = kIds / (4 * kThreads);
  uint32_t banned[kFours];
  uint4 kept[kFours];  // all are on their way before the first is stored
#pragma unroll
  for (int i = 0; i < kFours; ++i) banned[i] = banned_of(words, (threadIdx.x + i * kThreads) * 4);
  uint4* to = reinterpret_cast<uint4*>(logits) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kFours; ++i)
    if (banned[i] != 0u && banned[i] != 15u) kept[i] = to[i * kThreads];
#pragma unroll
  for (int i = 0; i < kFours; ++i)
    if (banned[i] != 0u)
      to[i * kThreads] = make_uint4(banned[i] & 1u ? kBanned : kept[i].x, banned[i] & 2u ? kBanned : kept[i].y,
                                    banned[i] & 4u ? kBanned : kept[i].z, banned[i] & 8u ? kBanned : kept[i].w);
}

__global__ void __launch_bounds__(kThreads) mask_kernel(const Mask m) {
  extern __shared__ uint32_t room[];
  Counts& counts = *reinterpret_cast<Counts*>(room);
  start_dependents();
  wait_for_producer();
  const Part at = {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y) * kIds,
                   min(kIds, m.vocabulary - static_cast<int>(blockIdx.y) * kIds)};
  float* logits = m.logits + at.s * m.stride + at.first;
  const int slot = m.slots[at.s];
  const bool penalised = slot >= 0 && (m.repetition[at.s] != 1.0f || m.presence[at.s] != 0.0f || m.frequency[at.s] != 0.0f);
  const int begin = min(m.bias_offsets[at.s], m.entries), end = min(m.bias_offsets[at.s + 1], m.entries);
  if (penalised) {
    count_history(m, at, slot, counts);
    penalise(m, at, counts, logits);
    __syncthreads();
  }
  if (begin < end) {
    add_biases(m, at, begin, end, logits);
    __syncthreads();
  }
  if (m.allowed == nullptr) return;
  const uint32_t* words = m.allowed + at.s * m.allowed_stride + at.first / 32;
  if (m.rows >= kManyRows && at.size == kIds && reinterpret_cast<uintptr_t>(logits) % 16 == 0) ban_fours(words, logits);
  else ban(at, words, logits);
}

}  // namespace
}  // namespace di

DI_EXPORT int di_mask_logits(const di_tensor* t, int n, const di_params*, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  if (n != 12) return refuse(e, DI_BAD_CALL, "mask_logits: 12 tensors make a call, got %d", n);
  if (t[11].shape[0] > 0 && (t[11].stride[1] != 1 || t[0].stride[1] != 1 || (present(t[10]) && t[10].stride[1] != 1)))
    return refuse(e, DI_UNSUPPORTED, "mask_logits: rows of logits, history and mask must be dense");
  Mask m = {};
  m.history = data<int>(t[0]), m.history_stride = t[0].stride[0];
  m.slots = data<int>(t[1]), m.prompt_len = data<int>(t[2]), m.length = data<int>(t[3]);
  m.repetition = data<float>(t[4]), m.presence = data<float>(t[5]), m.frequency = data<float>(t[6]);
  m.bias_offsets = data<int>(t[7]), m.bias_ids = data<int>(t[8]), m.bias_values = data<float>(t[9]);
  m.entries = static_cast<int>(t[8].shape[0]);
  if (present(t[10])) m.allowed = data<uint32_t>(t[10]), m.allowed_stride = t[10].stride[0];
  m.logits = data<float>(t[11]), m.stride = t[11].stride[0];
  m.rows = static_cast<int>(t[11].shape[0]), m.vocabulary = static_cast<int>(t[11].shape[1]);
  if (m.rows == 0 || m.vocabulary == 0) return DI_OK;
  constexpr int bytes = sizeof(Counts);
  if (allow_shared<mask_kernel>(bytes) != cudaSuccess) return refuse(e, DI_FAILED, "a block cannot have %d bytes", bytes);
  const dim3 grid(m.rows, static_cast<unsigned>(ceil_div(m.vocabulary, kIds)));
  launch_early(mask_kernel, grid, kThreads, bytes, static_cast<cudaStream_t>(stream), m);
  return finish(e, "mask_logits");
}
