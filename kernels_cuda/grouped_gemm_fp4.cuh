// out[t, n] = sum over k of x[t, k] W[e][n, k] for rows t of expert e: FP4 weights, BF16 products, FP32 sums.
//
// The operands are swapped: the weights are the matrix instruction's A, 64 output features a warpgroup, in registers; the
// tokens are its N, 8 to 128 of them in shared memory. A code of e2m1 becomes BF16 by moving its bits: sign to 15, exponent to
// 8 and 7, mantissa to 6 is the value times 2^-126 (zero and the subnormal 0.5 included), and one BF16 product with
// 2^(scale - 127 + 126) makes it exact. A sum is taken in the order of K whatever the tile's tokens, so tiles follow the counts
// and bits do not.
//
// Weights lie as deepinfer_cuda/weights.py packs them: for each expert, 128 of K and granule of 64 rows one block of
//   2 x 128 x 16 bytes of codes: thread t of a warpgroup reads 16 bytes for each 64 of K, a word for each 16
//   2 x 32 x 4 bytes of scales + 126: a word for the two rows of a thread and the two groups of 32 in 64 of K
#pragma once

#include "di_launch.cuh"
#include "di_ptx.cuh"
#include "di_wgmma.cuh"
#include "grouped_schedule.cuh"

namespace di {

constexpr int kBlockK = 128;
constexpr int kCodeBytes = kGranuleRows * kBlockK / 2;
constexpr int kGranuleBytes = kCodeBytes + kGranuleRows * kBlockK / 32;
struct GroupedMaps {
  CUtensorMap tokens[kWidths];  // x as [rows, K] in boxes of 8 << i rows, a tile's at most, and 64 columns, 128-byte swizzle
};

// When a warpgroup reads a stage's codes: the second half where it is expanded, all at once, or a stage ahead, which suits two
// warpgroups, where few warps are there to work while one waits.
enum class Reading { kInHalves, kAtOnce, kAhead };

// A form of the kernel: the most tokens of a tile, those that a small tile's instruction takes, stages of shared memory,
// warpgroups, granules of each in a step, k16 steps that go to the matrix unit together, when a stage's codes are read, and
// granules of each in a step of a small tile. Bits do not depend on it.
template <int tile, int narrow, int stages, int groups, int each, int together, Reading reading, int narrow_each = each>
struct GroupedForm {
  static constexpr int kTile = tile, kNarrow = narrow, kStages = stages, kGroups = groups;
  static constexpr int kEach = each, kNarrowEach = narrow_each, kGranules = groups * narrow_each, kTogether = together;
  static constexpr Reading kReading = reading;
  static constexpr int kTokenBytes = tile * kBlockK * 2;
  static constexpr int kStageBytes = (kTokenBytes + kGranules * kGranuleBytes + 1023) / 1024 * 1024;  // for the tiles' swizzle
  static constexpr int kFull = stages * kStageBytes, kEmpty = kFull + 8 * stages;  // where the barriers are, behind the stages
  static constexpr int kSharedBytes = kEmpty + 8 * stages + 1024;
  static constexpr int kWarps = 4 * groups, kThreads = 128 * (groups + 1);  // one warpgroup more, of which two threads copy
  static constexpr int kEntryRegisters = (65536 - 4096) / kThreads / 8 * 8;  // leaves those of a block that expands rows
  static constexpr int kRegisters = kEntryRegisters * (groups + 1);
  static constexpr int kProducerRegisters = groups == 5 ? 40 : 48;
  static constexpr int kConsumerRegisters = (kRegisters - kProducerRegisters) / groups / 8 * 8;
  // Rows that are copied for a tile of a width.
  __host__ __device__ static constexpr int box_rows(int width) { return 8 << width < tile ? 8 << width : tile; }
};

// Both halves times one half of `factors`: the low one for a thread's upper row, the high one for its lower row.
__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t factors, bool lower) {
  const __nv_bfloat162 both = *reinterpret_cast<const __nv_bfloat162*>(&factors);
  const __nv_bfloat162 factor = lower ? __high2bfloat162(both) : __low2bfloat162(both);
  const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), factor);
  return *reinterpret_cast<const uint32_t*>(&value);
}

// A word of codes as the fragment of one k16 step. Shifts to the left are products, which the unit of products takes, as it does
// the BF16 ones; that of the scales is a shift, so that this unit and the one of logic have equally much to do.
__device__ __forceinline__ void expand(uint32_t (&a)[4], uint32_t word, uint32_t factors) {
  constexpr uint32_t kPlaces = 0x81C081C0;
  a[0] = scaled(word & kPlaces, factors, false);
  a[1] = scaled(word * 8 & kPlaces, factors, true);
  a[2] = scaled(word * 64 & kPlaces, factors, false);
  // What is left are bits 0, 1, 3, 4 of each half: one product puts 0 to 7, 1 to 8, 4 to 6 and 3 to 15, and no two bits meet.
  a[3] = scaled((word >> 10 & 0x001B001B) * (1u << 7 | 1u << 2 | 1u << 12) & kPlaces, factors, true);
}

// Step j of the four k16 steps in 16 bytes of codes. Of the scales, two bytes are the two rows' of 32 of K; shifted by 7 they are
// the BF16 numbers 2^(scale - 1).
__device__ __forceinline__ void expand_step(uint32_t (&a)[4], uint4 codes, uint32_t scales, int j) {
  const uint32_t factors = __funnelshift_l(0u, __byte_perm(scales, 0, j < 2 ? 0x4140 : 0x4342), 7);
  expand(a, j == 0 ? codes.x : j == 1 ? codes.y : j == 2 ? codes.z : codes.w, factors);
}

// A value that is not computed again at each use.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The stages and their barriers, by address in shared memory, and where in them a thread is.
template <typename Form>
struct Ring {
  uint32_t stages;
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == Form::kStages) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait_at(stages + Form::kFull + 8 * slot, phase); }
  __device__ __forceinline__ void wait_empty() const { mbarrier_wait_at(stages + Form::kEmpty + 8 * slot, phase ^ 1); }
  // Of a warp: the slot may be filled again.
  __device__ __forceinline__ void release(int used) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive_at(stages + Form::kEmpty + 8 * used);
  }
};

// wgmma_descriptor128 from its lower word, so that a step along K is one 32-bit addition.
__device__ __forceinline__ uint64_t tokens_descriptor(uint32_t lower) {
  return static_cast<uint64_t>(1024 >> 4 | kSwizzle128 << 30) << 32 | lower;
}

// Writes the tile from `out` on, the place of the thread's upper feature of the first token: a thread has two neighbouring tokens
// of one feature; lanes l and l ^ 4 trade so that each has two neighbouring features of one token.
template <int tile, typename Out>
__device__ __forceinline__ void store_tile(const float (&d)[tile / 2], Out* out, int64_t pitch, int tokens) {
  const int lane = kept(threadIdx.x) % 32, odd = lane / 4 & 1, first = 2 * (lane % 4) + odd;  // only now: registers are few
  Out* to = out + first * pitch - odd;
#pragma unroll
  for (int j = 0; j < tile / 8; ++j) {
    float mine[2], other[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float one = d[4 * j + 2 * half], next = d[4 * j + 2 * half + 1];
      mine[half] = odd ? next : one, other[half] = __shfl_xor_sync(~0u, odd ? one : next, 4);
    }
    if (8 * j + first < tokens) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = odd ? other[half] : mine[half], high = odd ? mine[half] : other[half];
        if constexpr (sizeof(Out) == 2) *reinterpret_cast<__nv_bfloat162*>(to + 8 * half) = __floats2bfloat162_rn(low, high);
        else *reinterpret_cast<float2*>(to + 8 * half) = make_float2(low, high);
      }
    }
    to += 8 * pitch;
  }
}

// A thread's codes and scales of half a stage, 64 of K.
struct HalfCodes {
  uint4 codes;
  uint32_t scales;
  __device__ __forceinline__ void load(uint32_t my_codes, uint32_t my_scales, int half) {
    codes = load_shared16(my_codes + half * (kCodeBytes / 2));
    scales = load_shared4(my_scales + half * 128);
  }
};

// No granule for this warpgroup: it only lets the step's stages pass.
template <typename Form>
__device__ __forceinline__ void let_pass(const GroupedShape& shape, Ring<Form>& ring) {
  for (int k = 0; k < shape.k_blocks; ++k) {
    ring.wait_full();
    ring.release(ring.slot);
    ring.advance();
  }
}

// One step of a warpgroup: `count` granules by the step's tokens. The instruction takes `tile` tokens; what lies in shared memory
// beyond the step's own is of other tokens or stale, and each token's sum is its own. `step` is in shared memory.
template <typename Form, int tile, int count, typename Out>
__device__ __forceinline__ void consume(const GroupedShape& shape, const GroupedStep& step, Ring<Form>& ring) {
  constexpr int together = tile > 64 ? 1 : Form::kTogether;  // sums of many tokens leave few registers
  constexpr int apart = Form::kGroups * kGranuleBytes;
  constexpr bool ahead = Form::kReading == Reading::kAhead;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  float d[count][tile / 2];
#pragma unroll
  for (int g = 0; g < count; ++g)
#pragma unroll
    for (int i = 0; i < tile / 2; ++i) d[g][i] = 0.f;
  uint32_t a[2][together][count][4];
  int before = -1;  // the slot whose tokens the instructions in flight may still read
  const uint32_t my_codes = kept(ring.stages + Form::kTokenBytes + group * kGranuleBytes + thread * 16);
  const uint32_t my_scales = kept(ring.stages + Form::kTokenBytes + group * kGranuleBytes + kCodeBytes + thread / 4 * 4);
  HalfCodes held[count][2];
  const auto load = [&](int half) {
    const uint32_t offset = ring.slot * Form::kStageBytes;
#pragma unroll
    for (int g = 0; g < count; ++g) held[g][half].load(my_codes + offset + g * apart, my_scales + offset + g * apart, half);
  };
  const auto enter_stage = [&] {
    ring.wait_full();
    load(0);
  };
  if constexpr (ahead) enter_stage(), load(1);
  for (int k = 0; k < shape.k_blocks; ++k) {
    const int used = ring.slot;
    // The same in all lanes, and the compiler is to know it: the matrix instruction takes descriptors from uniform registers.
    const uint32_t tokens = __shfl_sync(~0u, (ring.stages + used * Form::kStageBytes & 0x3FFFF) >> 4 | 1 << 16, 0);
    if constexpr (!ahead) enter_stage();
    if constexpr (Form::kReading == Reading::kAtOnce) load(1);
#pragma unroll
    for (int j = 0; j < 8; j += together) {
      if (Form::kReading == Reading::kInHalves && j == 4) load(1);
      uint32_t(&fragments)[together][count][4] = a[j / together % 2];
      wgmma_wait<1>();
      if (j == together && before >= 0) ring.release(before);
#pragma unroll
      for (int i = 0; i < together; ++i)
#pragma unroll
        for (int g = 0; g < count; ++g)
          expand_step(fragments[i][g], held[g][(j + i) / 4].codes, held[g][(j + i) / 4].scales, (j + i) % 4);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < together; ++i)
#pragma unroll
        for (int g = 0; g < count; ++g) {
          const uint64_t columns = tokens_descriptor(tokens + (j + i) / 4 * Form::kTile * 8 + (j + i) % 4 * 2);
          Wgmma<tile>::bf16_rs(d[g], fragments[i][g], columns, true);
        }
      wgmma_commit();
      // Codes that are expanded make room for those of the next stage, which is the next step's or the end's after the last one.
      if (ahead && j + together == 4) ring.advance(), enter_stage();
      if (ahead && j + together == 8) load(1);
    }
    before = used;
    if constexpr (!ahead) ring.advance();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int g = 0; g < count; ++g) wgmma_hold(d[g]);
  const int row = step.row, granule = step.granule, tokens = step.tokens;
  ring.release(before);  // from here on the place of `step` may be another's
  Out* out = static_cast<Out*>(shape.out) + row * shape.out_pitch;
#pragma unroll
  for (int g = 0; g < count; ++g) {
    const int feature = (granule + group + g * Form::kGroups) * kGranuleRows + thread / 32 * 16 + thread % 32 / 4;
    store_tile<tile>(d[g], out + feature, shape.out_pitch, tokens);
  }
}

// Warpgroup w has the granules w, w + kGroups, ... of a step.
template <typename Form, int tile, typename Out>
__device__ __forceinline__ void consume(const GroupedShape& shape, const GroupedStep& step, Ring<Form>& ring) {
  const int group = threadIdx.x / 128;
  constexpr int each = tile == Form::kNarrow ? Form::kNarrowEach : Form::kEach;
  const int mine = (step.granules - group + Form::kGroups - 1) / Form::kGroups;
  if (mine <= 0) return let_pass<Form>(shape, ring);
  if constexpr (each >= 3) {
    if (mine == 3) return consume<Form, tile, 3, Out>(shape, step, ring);
  }
  if constexpr (each >= 2) {
    if (mine == 2) return consume<Form, tile, 2, Out>(shape, step, ring);
  }
  consume<Form, tile, 1, Out>(shape, step, ring);
}

template <typename Form>
using Walk = GroupedWalk<Form::kTile, Form::kGroups * Form::kEach, Form::kEach == 1 ? 1 : Form::kGroups, Form::kNarrow,
                         Form::kGranules>;

// One thread: the weights of the block's steps, and in `steps` what each step is, one after the other in as many places as there
// are stages; a step without tokens ends the block. It need not wait for the kernel that expands the tokens.
template <typename Form>
__device__ __forceinline__ void copy_weights(const GroupedShape& shape, const GroupedPlan& plan, uint8_t* room,
                                             GroupedStep* steps, Ring<Form> ring) {
  const uint64_t once = evict_first_policy();
  uint64_t* const full = reinterpret_cast<uint64_t*>(room + Form::kFull);
  Walk<Form> walk;
  GroupedStep step;
  int turn = 0;
  while (walk.next(plan, shape.experts, shape.granules, step)) {
    const int pitch = shape.granules * kGranuleBytes, bytes = step.granules * kGranuleBytes;
    const uint8_t* expert = shape.weights + static_cast<int64_t>(step.expert) * shape.k_blocks * pitch;
    const uint8_t* from = expert + step.granule * kGranuleBytes;
    for (int k = 0; k < shape.k_blocks; ++k, from += pitch) {
      ring.wait_empty();
      if (k == 0) steps[turn] = step, turn = turn + 1 == Form::kStages ? 0 : turn + 1;
      mbarrier_arrive_expect(full + ring.slot, bytes);
      bulk_copy_hint(room + ring.slot * Form::kStageBytes + Form::kTokenBytes, from, bytes, full + ring.slot, once);
      ring.advance();
    }
  }
  ring.wait_empty();
  steps[turn].tokens = 0;
  mbarrier_arrive(full + ring.slot);
}

// One thread: the tokens, which another kernel may still be expanding when it begins. A block without steps waits for it too.
template <typename Form>
__device__ __forceinline__ void copy_tokens(const GroupedMaps& maps, const GroupedShape& shape, const GroupedPlan& plan,
                                            uint8_t* room, Ring<Form> ring) {
  Walk<Form> walk;
  GroupedStep step;
  uint64_t* const full = reinterpret_cast<uint64_t*>(room + Form::kFull);
  bool more = walk.next(plan, shape.experts, shape.granules, step);
  wait_for_producer();
  for (; more; more = walk.next(plan, shape.experts, shape.granules, step)) {
    const CUtensorMap* map = &maps.tokens[step.width];
    const int row = step.row - shape.first_row, bytes = Form::box_rows(step.width) * kBlockK * 2;
    for (int k = 0; k < shape.k_blocks; ++k) {
      ring.wait_empty();
      uint8_t* to = room + ring.slot * Form::kStageBytes;
      mbarrier_arrive_expect(full + ring.slot, bytes);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        tensor_copy(to + half * Form::kTile * 128, map, k * kBlockK + half * 64, row, full + ring.slot);
      ring.advance();
    }
  }
  ring.wait_empty();
  mbarrier_arrive(full + ring.slot);
}

template <typename Form, typename Out>
__global__ void __maxnreg__(Form::kEntryRegisters)
    grouped_gemm_fp4(const __grid_constant__ GroupedMaps maps, const GroupedShape shape) {
  extern __shared__ uint8_t unaligned_room[];
  __shared__ GroupedPlan plan;
  __shared__ GroupedStep steps[Form::kStages];
  uint8_t* room = unaligned_room + (1024 - shared_address(unaligned_room) % 1024) % 1024;
  Ring<Form> ring{kept(shared_address(room))};
  if (threadIdx.x == 0) {
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(room + Form::kFull);
    for (int i = 0; i < Form::kStages; ++i) {
      mbarrier_init(barriers + i, 2);
      mbarrier_init(barriers + Form::kStages + i, Form::kWarps);
    }
    fence_mbarrier_init();
    start_dependents();
  }
  if (threadIdx.x >= 32 * Form::kWarps && threadIdx.x < 32 * Form::kWarps + kWidths) {
    prefetch_tensor_map(&maps.tokens[threadIdx.x - 32 * Form::kWarps]);
  }
  make_plan<Form::kTile, Form::kNarrow>(plan, shape);
  if (threadIdx.x >= 32 * Form::kWarps) {
    registers_down<Form::kProducerRegisters>();
    if (threadIdx.x == 32 * Form::kWarps) copy_weights<Form>(shape, plan, room, steps, ring);
    if (threadIdx.x == 32 * Form::kWarps + 32) copy_tokens<Form>(maps, shape, plan, room, ring);
  } else {
    registers_up<Form::kConsumerRegisters>();
    for (int turn = 0;; turn = turn + 1 == Form::kStages ? 0 : turn + 1) {
      ring.wait_full();
      const GroupedStep& step = steps[turn];
      if (step.tokens == 0) break;
      if (Form::kNarrow < Form::kTile && step.tokens <= Form::kNarrow) consume<Form, Form::kNarrow, Out>(shape, step, ring);
      else consume<Form, Form::kTile, Out>(shape, step, ring);
    }
  }
}

}  // namespace di
