// out[t, n] = sum over k of x[t, k] W[e][n, k] for rows t of expert e: FP4 weights, BF16 products, FP32 sums.
//
// The operands are swapped: the weights are the matrix instruction's A, 64 output features a warpgroup, in registers; the
// tokens are its N, 8 to 128 of them in shared memory. A code of e2m1 becomes BF16 by moving its bits: sign to 15, exponent to
// 8 and 7, mantissa to 6 is the value times 2^-126 (zero and the subnormal 0.5 included), and one BF16 product with
// 2^(scale - 127 + 126) makes it exact. A sum is taken in the order of K whatever the tile's tokens, so tiles follow the counts
// and bits do not.
//
// Weights lie as deepinfer_cuda/weights.py packs them: for each expert, granule of 64 rows and 128 of K one block of
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
constexpr int kConsumerWarps = 4 * kStepGranules;
constexpr int kGroupedThreads = 32 * (kConsumerWarps + 4);  // one warpgroup more, of which one thread copies
constexpr int kProducerRegisters = 32, kConsumerRegisters = 112;

struct GroupedMaps {
  CUtensorMap tokens[5];  // x as [rows, K] in boxes of 8 << i rows and 64 columns, 128-byte swizzle
};

// Shared memory of a kernel for tiles of at most `tile` tokens.
template <int tile, int stages>
struct GroupedShared {
  static constexpr int kTokenBytes = tile * kBlockK * 2;
  static constexpr int kStageBytes = kTokenBytes + kStepGranules * kGranuleBytes;
  static constexpr int kBytes = stages * kStageBytes + 1024;  // the tiles of tokens are aligned to 1024
  static_assert(kStageBytes % 1024 == 0);
};

// Two rows' four values of one k16 step from a word of codes.
__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t factor) {
  uint32_t value;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(value) : "r"(pair), "r"(factor));
  return value;
}
__device__ __forceinline__ void expand(uint32_t (&a)[4], uint32_t word, uint32_t upper, uint32_t lower) {
  constexpr uint32_t kPlaces = 0x81C081C0;
  a[0] = scaled(word & kPlaces, upper);
  a[1] = scaled(__funnelshift_r(word, word, 3) & kPlaces, lower);
  a[2] = scaled(__funnelshift_r(word, word, 6) & kPlaces, upper);
  // Bits 0, 1, 3, 4 of each half: one product puts 0 to 7, 1 to 8, 4 to 6 and 3 to 15 at once, and no two bits meet.
  a[3] = scaled((word & 0x001B001B) * (1u << 7 | 1u << 2 | 1u << 12) & kPlaces, lower);
}

// 2^(scale - 1) twice, from byte `index` of a word of stored scales.
template <int index>
__device__ __forceinline__ uint32_t factor(uint32_t word) {
  return __byte_perm(word, 0, 0x4440 | index) * 0x00800080u;
}

// Step j of the four k16 steps in 16 bytes of codes.
__device__ __forceinline__ void expand_step(uint32_t (&a)[4], uint4 codes, uint32_t scales, int j) {
  const uint32_t upper = j < 2 ? factor<0>(scales) : factor<2>(scales), lower = j < 2 ? factor<1>(scales) : factor<3>(scales);
  expand(a, j == 0 ? codes.x : j == 1 ? codes.y : j == 2 ? codes.z : codes.w, upper, lower);
}

// The stages and their barriers, by address in shared memory, and where in them a thread is.
struct Ring {
  uint32_t stages, full, empty;
  int slot = 0;
  uint32_t phase = 0;
  template <int count>
  __device__ __forceinline__ void advance() {
    if (++slot == count) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait_at(full + 8 * slot, phase); }
  __device__ __forceinline__ void release(int used) const { mbarrier_arrive_at(empty + 8 * used); }
};

// wgmma_descriptor128 from its lower word, so that a step along K is one 32-bit addition.
__device__ __forceinline__ uint64_t tokens_descriptor(uint32_t lower) {
  return static_cast<uint64_t>(1024 >> 4 | kSwizzle128 << 30) << 32 | lower;
}

// Writes the tile: a thread has two neighbouring tokens of one feature; lanes l and l ^ 4 trade so that each has two
// neighbouring features of one token.
template <int tile, typename Out>
__device__ __forceinline__ void store_tile(const float (&d)[tile / 2], Out* out, int64_t pitch, int feature, int features, int tokens) {
  const int lane = threadIdx.x % 32, odd = lane / 4 & 1;
#pragma unroll
  for (int j = 0; j < tile / 8; ++j) {
    const int token = 8 * j + 2 * (lane % 4) + odd;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float mine = d[4 * j + 2 * half], next = d[4 * j + 2 * half + 1];
      const float kept = odd ? next : mine, other = __shfl_xor_sync(~0u, odd ? mine : next, 4);
      const int at = feature + 8 * half - odd;
      if (token < tokens && at < features) {
        const float first = odd ? other : kept, second = odd ? kept : other;
        if constexpr (sizeof(Out) == 2)
          *reinterpret_cast<__nv_bfloat162*>(out + token * pitch + at) = __floats2bfloat162_rn(first, second);
        else
          *reinterpret_cast<float2*>(out + token * pitch + at) = make_float2(first, second);
      }
    }
  }
}

// One step of a warpgroup: its granule by the step's tokens. The instruction always takes `tile` tokens; what lies in shared
// memory beyond the step's own is of other tokens or stale, and each token's sum is its own.
template <int tile, int stages, typename Out>
__device__ __forceinline__ void consume(const GroupedShape& shape, const GroupedStep& step, Ring& ring) {
  using Shared = GroupedShared<tile, stages>;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  if (group >= step.granules) {  // no granule for this warpgroup: it only lets the stages pass
    for (int k = 0; k < shape.k_blocks; ++k) {
      ring.wait_full();
      if (lane == 0) ring.release(ring.slot);
      ring.template advance<stages>();
    }
    return;
  }
  // Registers permitting, a stage's codes are read at once and two k16 steps go together.
  constexpr bool early = tile <= 64;
  constexpr int together = tile <= 64 ? 2 : 1;
  float d[tile / 2];
#pragma unroll
  for (int i = 0; i < tile / 2; ++i) d[i] = 0.f;
  uint32_t a[2][together][4];
  int before = -1;  // the slot whose tokens the instructions in flight may still read
  const uint32_t my_codes = ring.stages + Shared::kTokenBytes + group * kGranuleBytes + thread * 16;
  const uint32_t my_scales = ring.stages + Shared::kTokenBytes + group * kGranuleBytes + kCodeBytes + thread / 4 * 4;
  for (int k = 0; k < shape.k_blocks; ++k) {
    const uint32_t offset = ring.slot * Shared::kStageBytes;
    // The same in all lanes, and the compiler is to know it: the matrix instruction takes descriptors from uniform registers.
    const uint32_t tokens = __shfl_sync(~0u, (ring.stages + offset & 0x3FFFF) >> 4 | 1 << 16, 0);
    ring.wait_full();
    uint4 codes[2];
    uint32_t scales[2];
#pragma unroll
    for (int half = 0; half < 2 && early; ++half) {
      codes[half] = load_shared16(my_codes + offset + half * kCodeBytes / 2);
      scales[half] = load_shared4(my_scales + offset + half * 128);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (!early) {
        codes[half] = load_shared16(my_codes + offset + half * kCodeBytes / 2);
        scales[half] = load_shared4(my_scales + offset + half * 128);
      }
#pragma unroll
      for (int j = 0; j < 4; j += together) {
        uint32_t(&fragments)[together][4] = a[j / together % 2];
        wgmma_wait<1>();
        if (half == 0 && j == together && before >= 0 && lane == 0) ring.release(before);
#pragma unroll
        for (int i = 0; i < together; ++i) expand_step(fragments[i], codes[half], scales[half], j + i);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < together; ++i)
          Wgmma<tile>::bf16_rs(d, fragments[i], tokens_descriptor(tokens + half * tile * 8 + 2 * (j + i)), true);
        wgmma_commit();
      }
    }
    before = ring.slot;
    ring.template advance<stages>();
  }
  wgmma_wait<0>();
  wgmma_hold(d);
  if (lane == 0) ring.release(before);
  const int feature = (step.granule + group) * kGranuleRows + thread / 32 * 16 + lane / 4;
  store_tile<tile>(d, static_cast<Out*>(shape.out) + step.row * shape.out_pitch, shape.out_pitch, feature, shape.features, step.tokens);
}

// Copies the stages of the block's steps: its one producing thread.
template <int tile, int stages>
struct Producer {
  using Shared = GroupedShared<tile, stages>;
  const GroupedMaps& maps;
  const GroupedShape& shape;
  uint8_t* room;
  uint64_t* full;

  __device__ __forceinline__ void copy_weights(const GroupedStep& step, int k, int slot, uint64_t policy) const {
    const int pitch = shape.k_blocks * kGranuleBytes;
    const uint8_t* from = shape.weights + (static_cast<int64_t>(step.expert) * shape.granules + step.granule) * pitch + k * kGranuleBytes;
    uint8_t* to = room + slot * Shared::kStageBytes + Shared::kTokenBytes;
    mbarrier_arrive_expect(full + slot, step.granules * kGranuleBytes + (8 << step.width) * kBlockK * 2);
    for (int g = 0; g < step.granules; ++g) bulk_copy_hint(to + g * kGranuleBytes, from + static_cast<int64_t>(g) * pitch, kGranuleBytes, full + slot, policy);
  }

  __device__ __forceinline__ void copy_tokens(const GroupedStep& step, int k, int slot) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      tensor_copy(room + slot * Shared::kStageBytes + half * tile * 128, &maps.tokens[step.width], k * kBlockK + half * 64,
                  step.row - shape.first_row, full + slot);
  }

  // The slot of a step's first stage also says which step it is; a step without granules ends the block. The first weights are
  // on their way before the kernel that expands the tokens has ended.
  __device__ __forceinline__ void run(const GroupedPlan& plan, GroupedStep* steps, Ring& ring) const {
    const uint64_t once = evict_first_policy();
    GroupedWalk<tile> walk;
    GroupedStep step;
    bool first = true;
    while (walk.next(plan, shape.experts, shape.granules, step)) {
      const int early = first ? min(stages, shape.k_blocks) : 0;
      if (first) {
        steps[0] = step;
        for (int k = 0; k < early; ++k) copy_weights(step, k, k, once);
        wait_for_predecessor();
        first = false;
      }
      for (int k = 0; k < shape.k_blocks; ++k) {
        if (k >= early) {
          mbarrier_wait_at(ring.empty + 8 * ring.slot, ring.phase ^ 1);
          if (k == 0) steps[ring.slot] = step;
          copy_weights(step, k, ring.slot, once);
        }
        copy_tokens(step, k, ring.slot);
        ring.template advance<stages>();
      }
    }
    wait_for_predecessor();  // a block without steps does not end before it either
    mbarrier_wait_at(ring.empty + 8 * ring.slot, ring.phase ^ 1);
    steps[ring.slot].granules = 0;
    mbarrier_arrive(full + ring.slot);
  }
};

template <int tile, int stages, typename Out>
__global__ void __launch_bounds__(kGroupedThreads, 1) grouped_gemm_fp4(const __grid_constant__ GroupedMaps maps, const GroupedShape shape) {
  extern __shared__ uint8_t unaligned_room[];
  __shared__ GroupedPlan plan;
  __shared__ GroupedStep steps[stages];
  __shared__ uint64_t full[stages], empty[stages];
  uint8_t* room = unaligned_room + (1024 - shared_address(unaligned_room) % 1024) % 1024;
  Ring ring{shared_address(room), shared_address(full), shared_address(empty)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], kConsumerWarps);
    fence_mbarrier_init();
  }
  make_plan<tile>(plan, shape);
  if (threadIdx.x >= 32 * kConsumerWarps) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x == 32 * kConsumerWarps) Producer<tile, stages>{maps, shape, room, full}.run(plan, steps, ring);
  } else {
    registers_up<kConsumerRegisters>();
    for (;;) {
      ring.wait_full();
      const GroupedStep step = steps[ring.slot];
      if (step.granules == 0) break;
      consume<tile, stages, Out>(shape, step, ring);
    }
  }
}

}  // namespace di
