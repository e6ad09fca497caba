// score_index: shared memory of the fast kernel, and a run's queries as e5m2 operands of wgmma.
#pragma once

#include "di_index.cuh"
#include "di_ptx.cuh"

namespace di {
namespace {

constexpr int kHeads = 32, kGroups = 4, kCodes = 64;  // kCodes: bytes of a key's codes
constexpr int kKeyShift = -14;     // a key's e2m1 codes are read as e5m2 values 2^kKeyShift times as large
constexpr int kLowestShift = -15;  // e5m2 holds e2m1 times 2^shift exactly from here on
// A head's largest scale becomes this power of two in group 0, and one kMostOver higher in the others; a key's scales are taken
// as much smaller there, so that those of a plain key are at most one.
constexpr int kFirstTop = -5, kMostOver = 7;
constexpr int kDotShift = kKeyShift + kFirstTop;    // the sum over groups is 2^kDotShift times as large
constexpr int kLeastPlain = 112, kMostPlain = 143;  // ue8m0 codes, of a head's largest scale and a key's first
static_assert(32 * 36 * (1 + 3 * (1 << kMostOver)) <= 1 << -kDotShift, "the sum over groups of a plain key is below 1");
constexpr int kConsumers = 4, kConsumerRegisters = 104, kProducerRegisters = 64;  // warpgroups that compute; one copies
constexpr int kProducers = 4;  // its warps
constexpr int kThreads = 128 * (kConsumers + 1), kStages = 16, kVisits = 4, kPieces = 8;
constexpr int kQueriesReady = 1, kCosted = 2, kPlanned = 3;  // named barriers: of the consumers, of all, of the copying warps
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8),
              "the block starts with that many registers; waiting for more would never end");
static_assert(kStages % kConsumers == 0, "a place in the ring has one consumer, or it would miss phases of its barriers");

// What the copying warp tells the consumers: a run's tiles to score, and its tiles that only get -inf. No rows: the end.
struct Visit {
  IndexRun run;
  int first, end, fill, fill_end;
  uint32_t before;  // tiles of the visits before
};

struct Shared {
  alignas(1024) uint8_t queries[kIndexWindow][kHeads * 128];  // e5m2 [head][K], 128-byte swizzle
  alignas(1024) uint8_t keys[kStages][kIndexTile * kCodes];   // e2m1, two keys in 128 bytes, 128-byte swizzle
  alignas(16) uint32_t scales[kStages][kIndexTile];           // four ue8m0 of a key
  int32_t first_row[kStages][kPieces];                        // of a tile's pieces; -1: no such rows
  float weights[kIndexWindow][kHeads];                        // times 2^(the head's largest scale)
  float apart[kIndexWindow][kGroups][kHeads];  // by which products are too small: 2^-kDotShift, and scales far from the largest
  int32_t visible[kIndexWindow], plain[kIndexWindow];
  int64_t starts[kIndexWindows + 1], share[2];                // of the work: prefix sums of the windows, this block's part
  uint32_t two;                                               // 2, by which keys are multiplied
  Visit visits[kVisits];
  uint64_t full[kStages], empty[kStages], visit_full[kVisits], visit_empty[kVisits];
};

// ---- scales and codes

__device__ __forceinline__ float relu(float x) {  // NaN stays NaN
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float ue8m0(uint32_t code) {
  return __uint_as_float(code == 255 ? 0x7FC00000u : code == 0 ? 0x00400000u : code << 23);
}

// e5m2 code of the e2m1 magnitude `code` (0 to 7) times 2^shift.
__device__ __forceinline__ uint32_t e5m2_of(int code, int shift) {
  if (code == 0) return 0;
  const int exponent = max(code >> 1, code == 1 ? 0 : 1) - 1 + shift + 15, fraction = code > 1 && (code & 1) ? 2 : 0;
  return exponent >= 1 ? exponent << 2 | fraction : (4 + fraction) >> (1 - exponent);
}

// Four codes, the low nibbles of w's bytes, through a table of eight magnitudes.
__device__ __forceinline__ uint32_t look_up(uint32_t w, uint32_t table_low, uint32_t table_high) {
  const uint32_t magnitude = w & 0x07070707u, pairs = magnitude | magnitude >> 4;
  return __byte_perm(table_low, table_high, __byte_perm(pairs, 0, 0x4420)) | (w & 0x08080808u) << 4;
}

// ---- the queries of a run, by all consumers

__device__ __forceinline__ void load_group(const IndexCall& c, const IndexRun& run, Shared& s, int item) {
  const int r = item / (kHeads * kGroups), head = item / kGroups % kHeads, group = item % kGroups;
  const bool inside = head < c.heads;
  const int64_t row = run.first + r;
  uint4 codes = make_uint4(0, 0, 0, 0);
  uint32_t scale = 127;
  float weight = 0.0f;
  if (inside) {
    codes = *reinterpret_cast<const uint4*>(c.q + row * c.q_stride + head * c.q_head_stride + 16 * group);
    scale = c.q_scale[row * c.q_scale_stride + head * c.q_scale_head_stride + group];
    weight = index_weight(c, row, head);
  }
  const bool used = ((codes.x | codes.y | codes.z | codes.w) & 0x77777777u) != 0;
  int largest = used ? static_cast<int>(scale) : 0, nan = scale == 255;
#pragma unroll
  for (int other = 1; other <= 2; other *= 2) {
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, other));
    nan |= __shfl_xor_sync(0xFFFFFFFFu, nan, other);
  }
  if (largest == 0) largest = 127;  // nothing but zeros
  const int top = group == 0 ? kFirstTop : kFirstTop + kMostOver;
  int shift = used ? static_cast<int>(scale) - largest + top : top;
  float apart = ldexpf(1.0f, -kKeyShift - top);
  if (shift < kLowestShift) {
    apart = ldexpf(1.0f, shift - 2 * top - kKeyShift);
    shift = top;
    s.plain[r] = 0;
  }
  const bool moderate = weight == 0.0f || (fabsf(weight) > 0x1p-40f && fabsf(weight) < 0x1p40f);
  if (largest < kLeastPlain || largest > kMostPlain || !moderate) s.plain[r] = 0;
  s.apart[r][group][head] = apart;
  if (group == 0) s.weights[r][head] = nan ? NAN : ldexpf(weight, largest - 127);
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int code = 0; code < 4; ++code) {
    low |= e5m2_of(code, shift) << (8 * code);
    high |= e5m2_of(code + 4, shift) << (8 * code);
  }
  uint8_t* at = s.queries[r] + head * 128;
  const auto half = [&](int by) {
    return make_uint4(look_up(codes.x >> by, low, high), look_up(codes.y >> by, low, high), look_up(codes.z >> by, low, high),
                      look_up(codes.w >> by, low, high));
  };
  *reinterpret_cast<uint4*>(at + ((2 * group) ^ (head & 7)) * 16) = half(0);
  *reinterpret_cast<uint4*>(at + ((2 * group + 1) ^ (head & 7)) * 16) = half(4);
}

__device__ __forceinline__ void load_queries(const IndexCall& c, const IndexRun& run, Shared& s) {
  const int thread = threadIdx.x;
  named_barrier_sync(kQueriesReady, 128 * kConsumers);  // nobody reads the queries of the run before
  if (thread < kIndexWindow) {
    s.plain[thread] = 1;
    s.visible[thread] = thread < run.rows ? c.visible[run.first + thread] : 0;
  }
  named_barrier_sync(kQueriesReady, 128 * kConsumers);
  for (int item = thread; item < run.rows * kHeads * kGroups; item += 128 * kConsumers) load_group(c, run, s, item);
  fence_proxy_async();
  named_barrier_sync(kQueriesReady, 128 * kConsumers);
}

}  // namespace
}  // namespace di
