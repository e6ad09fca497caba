// take_kernel of residual_site for many token rows: the same sums in the same order, made while the rows before are written and
// the next ones are read.
//
// A block keeps its columns of the projection, half of them in registers, and goes through every gridDim.y-th tile of 16 rows.
// The copy engine brings tiles into stages of shared memory; ten warps take them as take_kernel's do, and leave new streams and
// collapsed rows where old streams and results lay; the copy engine writes those. One warp adds the sums that the others leave.
#pragma once

#include "residual_site_rows.cuh"

namespace di {
namespace {

constexpr int kStages = 4, kManyThreads = kThreads + 3 * 32;
constexpr int kHeld = 2;        // streams whose parts of the projection are in registers; those of three would spill
constexpr int kLeft = 1;        // the barrier at which warps leave a tile's sums for the one that adds them
constexpr int kManyPitch = 24;  // floats from mix to mix of a warp's sums: pairs of rows go to different banks

struct Stage {
  __nv_bfloat16 streams[kStreams][kRows][kWidth], y[kRows][kWidth];
};

struct Coefficients {
  float4 comb[kRows][kStreams], post[kRows], pre[kRows];
};

struct ManyRoom {
  Stage stages[kStages];
  uint8_t projection[(kStreams - kHeld) * kStreamRoom];
  Coefficients coefficients[kStages];
  float sums[kWarps][kSums][kManyPitch];
  // empty: the tile has been written, and each thread has read its coefficients; added: the sums have been read
  uint64_t full[kStages], made[kStages], empty[kStages], added;
};

// What the copy engine knows of streams, of results and of what is collapsed.
struct Maps {
  CUtensorMap streams, y, out;
};

// The tiles of 16 rows that a block goes through; a tile's stage and the phases of its barriers.
struct Tiles {
  int first, last, step, stage = 0;
  uint32_t phase = 0, turn = 0;  // phase: of the stage; turn: of the sums
  __device__ __forceinline__ explicit Tiles(const Site& site)
      : first(site.first_row + blockIdx.y * kRows), last(valid_rows(site.count, site.end_row)), step(gridDim.y * kRows) {}
  __device__ __forceinline__ bool left() const { return first < last; }
  __device__ __forceinline__ bool whole() const { return first + kRows <= last; }
  __device__ __forceinline__ void next() {
    first += step, turn ^= 1;
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// One thread: asks for tiles, as far ahead as there are stages. Columns and rows past the last are zeros.
template <bool kPost>
__device__ __forceinline__ void copy_tiles(ManyRoom& room, const Site& site, const Maps& maps, Tiles tiles) {
  constexpr uint32_t of_four = kStreams * sizeof(float);
  constexpr uint32_t boxes = sizeof(Stage::streams) + (kPost ? sizeof(Stage::y) : 0), of_row = kPost ? 6 * of_four : of_four;
  const int column = blockIdx.x * kWidth;
  for (; tiles.left(); tiles.next()) {
    Stage& stage = room.stages[tiles.stage];
    Coefficients& coefficients = room.coefficients[tiles.stage];
    uint64_t* full = &room.full[tiles.stage];
    const int rows = min(kRows, tiles.last - tiles.first);
    const int64_t at = static_cast<int64_t>(tiles.first) * kStreams;
    mbarrier_wait(&room.empty[tiles.stage], tiles.phase ^ 1);
    mbarrier_arrive_expect(full, boxes + rows * of_row);
    tensor_copy3(stage.streams, &maps.streams, column, tiles.first, 0, full);  // by no policy: evict_first takes longer
    bulk_copy(coefficients.pre, site.pre_prev + at, rows * of_four, full);
    if constexpr (kPost) {
      tensor_copy3(stage.y, &maps.y, column, tiles.first, 0, full);
      bulk_copy(coefficients.post, site.post + at, rows * of_four, full);
      bulk_copy(coefficients.comb, site.comb + at * kStreams, rows * kStreams * of_four, full);
    }
  }
}

// One thread: writes what whole tiles became and gives their stages back.
template <bool kPost>
__device__ __forceinline__ void write_tiles(ManyRoom& room, const Maps& maps, Tiles tiles) {
  const int column = blockIdx.x * kWidth;
  const uint64_t once = evict_first_policy(), kept = evict_normal_policy();
  for (; tiles.left(); tiles.next()) {
    const Stage& stage = room.stages[tiles.stage];
    mbarrier_wait(&room.made[tiles.stage], tiles.phase);
    if (tiles.whole()) {
      if constexpr (kPost) tensor_store3(&maps.streams, stage.streams, column, tiles.first, 0, once);
      tensor_store3(&maps.out, stage.y, column, tiles.first, 0, kept);
      tensor_stores_read();
    }
    mbarrier_arrive(&room.empty[tiles.stage]);
  }
  tensor_stores_done();
}

template <bool kPost>
__device__ __forceinline__ void read_staged(Read& read, const Stage& stage, const Coefficients& coefficients, int row,
                                            int column) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) read.streams[i] = load_four(&stage.streams[i][row][column]);
  read.mix.pre = coefficients.pre[row];
  if constexpr (kPost) {
    read.result = load_four(&stage.y[row][column]);
    read.mix.post = coefficients.post[row];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) read.mix.comb[i] = coefficients.comb[row][i];
  }
}

// A warp's columns of a tile. `column`: of the thread, from the block's first on; a tile that is not whole is written from here.
template <bool kPost>
__device__ __forceinline__ void take_tile(ManyRoom& room, const Tiles& tiles, const Place& at, int hidden, int column,
                                          Kept& kept) {
  Stage& stage = room.stages[tiles.stage];
  mbarrier_wait(&room.full[tiles.stage], tiles.phase);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.g + 8 * half;
    Read read;
    read_staged<kPost>(read, stage, room.coefficients[tiles.stage], row, column);
    const uint2 collapsed = make_row<kPost>(read, half, kept);
    if (tiles.whole()) {
#pragma unroll
      for (int i = 0; kPost && i < kStreams; ++i) store_four(&stage.streams[i][row][column], kept.made[half][i]);
      store_four(&stage.y[row][column], collapsed);
    } else if (tiles.first + row < tiles.last) {
      store_row<kPost>(at, half, hidden, kept, collapsed);
    }
  }
  fence_proxy_async();
  mbarrier_arrive(&room.empty[tiles.stage]);
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&room.made[tiles.stage]);
}

// A warp's sums of a tile, pairs of rows at once.
__device__ __forceinline__ void leave_tile(ManyRoom& room, const Tiles& tiles, int warp, int warps, const Place& at,
                                           const float (&d)[2][2][4], const Kept& kept) {
  mbarrier_wait(&room.added, tiles.turn ^ 1);
  float(&sums)[kSums][kManyPitch] = room.sums[warp];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + at.pair * 2;
    const float* const low = d[0][half];
    const float* const high = d[1][half];
    *reinterpret_cast<float2*>(&sums[at.g][row]) = {low[0], low[1]};
    *reinterpret_cast<float2*>(&sums[at.g + 8][row]) = {low[2], low[3]};
    *reinterpret_cast<float2*>(&sums[at.g + 16][row]) = {high[0] + high[2], high[1] + high[3]};
    const float of_streams = sum_of_four_lanes(kept.squares[half]), of_row = sum_of_four_lanes(kept.norm[half]);
    if (at.pair == 0) sums[kSquares][at.g + 8 * half] = of_streams, sums[kNorm][at.g + 8 * half] = of_row;
  }
  named_barrier_arrive(kLeft, 32 * (warps + 1));
}

template <bool kPost>
__device__ __forceinline__ void take_tiles(ManyRoom& room, const Site& site, Tiles tiles, Place at, int warp, int warps,
                                           const Parts (&held)[kHeld]) {
  const Projection projection(room.projection, threadIdx.x, kStreams - kHeld);
  for (; tiles.left(); tiles.next(), at.advance(tiles.step, site.hidden)) {
    Kept kept;
    take_tile<kPost>(room, tiles, at, site.hidden, warp * kColumns + at.pair * 4, kept);
    float d[2][2][4] = {};
    const auto operand = [&](int stream, int i) {
      return stream < kHeld ? held[stream].operand(i) : projection.operand(stream - kHeld, i);
    };
    project(operand, kept.made, d);
    leave_tile(room, tiles, warp, warps, at, d, kept);
  }
}

// One warp: a lane adds four sums of four rows each over the warps, in their order.
__device__ __forceinline__ void add_tiles(ManyRoom& room, const Site& site, Tiles tiles, int warps) {
  constexpr int kFours = kSums * kRows / 4, kTurns = (kFours + 31) / 32;
  const int lane = threadIdx.x % 32, blocks = gridDim.x;
  for (; tiles.left(); tiles.next()) {
    named_barrier_sync(kLeft, 32 * (warps + 1));
    float4 sum[kTurns] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int four = min(lane + 32 * turn, kFours - 1);
        if (w >= warps) continue;
        const float4 of_warp = *reinterpret_cast<const float4*>(&room.sums[w][four / 4][four % 4 * 4]);
        sum[turn].x += of_warp.x, sum[turn].y += of_warp.y, sum[turn].z += of_warp.z, sum[turn].w += of_warp.w;
      }
    }
    mbarrier_arrive(&room.added);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int four = lane + 32 * turn, mix = four / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = four % 4 * 4 + i;
        const int64_t place = static_cast<int64_t>(tiles.first - site.first_row + row) * blocks + blockIdx.x;
        float* const to = mix < kNorm ? site.sums + place * (kMixes + 1) + mix : site.norms + place;
        if (four < kFours && tiles.first + row < tiles.last) *to = part(sum[turn], i);
      }
    }
  }
}

template <bool kPost>
__global__ void __launch_bounds__(kManyThreads, 1) take_many_kernel(const Site site, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t raw[];
  ManyRoom& room = *reinterpret_cast<ManyRoom*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * kWidth + warp * kColumns + lane % 4 * 4;
  const int warps = min(kWarps, static_cast<int>(site.hidden - blockIdx.x * kWidth + kColumns - 1) / kColumns);
  start_dependents();
  Parts held[kHeld];
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i)
      mbarrier_init(&room.full[i], 1), mbarrier_init(&room.made[i], warps), mbarrier_init(&room.empty[i], 1 + 32 * warps);
    mbarrier_init(&room.added, 32);
    fence_mbarrier_init();
  }
  if (warp < warps) {  // weights: no kernel before writes them
    float4 fn[kStreams][3];
    load_projection(fn, site, lane / 4, column);
    const Projection projection(room.projection, threadIdx.x, kStreams - kHeld);
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      const Parts of = cut(fn[stream]);
      if (stream < kHeld) held[stream] = of;
      else projection.put(stream - kHeld, of);
    }
  }
  __syncthreads();
  wait_for_producer();
  const Tiles tiles(site);
  if (warp == kWarps) {
    if (lane == 0) copy_tiles<kPost>(room, site, maps, tiles);
  } else if (warp == kWarps + 1) {
    if (lane == 0) write_tiles<kPost>(room, maps, tiles);
  } else if (warp == kWarps + 2) {
    add_tiles(room, site, tiles, warps);
  } else if (warp < warps) {
    take_tiles<kPost>(room, site, tiles, Place(site, tiles.first + lane / 4, column, lane), warp, warps, held);
  }
}

// A map of [planes][rows][hidden], rows as many planes apart, in boxes of a block's columns of 16 rows of all planes.
inline bool make_map(CUtensorMap* map, const void* address, int64_t rows, int64_t hidden, uint32_t planes) {
  const EncodeTiled encode = tensor_map_encoder();
  const cuuint64_t plane = hidden * sizeof(__nv_bfloat16), pitches[2] = {planes * plane, plane};
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(hidden), static_cast<cuuint64_t>(rows), planes};
  const cuuint32_t box[3] = {kWidth, kRows, planes}, steps[3] = {1, 1, 1};
  return encode != nullptr &&
         encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(address), sizes, pitches, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The maps of a call; false where the copy engine cannot serve it, as where an address is no multiple of 16.
inline bool make_maps(Maps* maps, const Site& site) {
  const uintptr_t coefficients = reinterpret_cast<uintptr_t>(site.pre_prev) | reinterpret_cast<uintptr_t>(site.post) |
                                 reinterpret_cast<uintptr_t>(site.comb);
  return coefficients % 16 == 0 && make_map(&maps->streams, site.streams, site.rows, site.hidden, kStreams) &&
         make_map(&maps->out, site.out, site.rows, site.hidden, 1) &&
         (site.y == nullptr || make_map(&maps->y, site.y, site.rows, site.hidden, 1));
}

}  // namespace
}  // namespace di
