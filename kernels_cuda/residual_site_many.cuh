// take_kernel of residual_site for many token rows: the same sums in the same order, made while the rows before are written and
// the next ones are read.
//
// A block keeps its columns of the projection and goes through every gridDim.y-th tile of 16 rows. The copy engine brings tiles
// into stages of shared memory; ten warps take them as take_kernel's do, two tiles at a time, so that the projection is read
// half as often, and leave new streams and collapsed rows where old streams and results lay; the copy engine writes those. One
// warp adds the sums that the others leave. In a tile's stage the 64 bytes of a row are swizzled, and a thread has such rows
// that no two of a half warp's meet in a bank.
#pragma once

#include "residual_site_rows.cuh"

namespace di {
namespace {

constexpr int kStages = 3, kTogether = 2, kManyThreads = kThreads + 3 * 32;
constexpr int kSwizzled = 32;                         // columns of a row that lie together
constexpr int kPartBytes = kRows * kSwizzled * 2;     // of those columns of a tile's rows
constexpr int kManyPitch = 24;  // floats from mix to mix of a warp's sums: pairs of rows go to different banks

// [columns of kSwizzled][stream][row][column] of streams, [columns of kSwizzled][row][column] of results.
struct Stage {
  uint8_t streams[kWidth / kSwizzled * kStreams * kPartBytes], y[kWidth / kSwizzled * kPartBytes];
};

struct Coefficients {
  float4 comb[kRows][kStreams], post[kRows], pre[kRows];
};

struct ManyRoom {
  Stage stages[kStages];
  uint8_t projection[kRoom];
  Coefficients coefficients[kStages];
  float sums[kTogether][kWarps][kSums][kManyPitch];
  uint64_t full[kStages], made[kStages], empty[kStages], left[kTogether], added[kTogether];  // of stages; of sums
};

// What the copy engine knows of streams, of results and of what is collapsed.
struct Maps {
  CUtensorMap streams, y, out;
};

// The tiles of 16 rows that a block goes through; a tile's stage and sums and the phases of their barriers.
struct Tiles {
  int first, last, step, stage = 0, sums = 0;
  uint32_t phase = 0, turn = 0;  // phase: of the stage; turn: of the sums
  __device__ __forceinline__ explicit Tiles(const Site& site)
      : first(site.first_row + blockIdx.y * kRows), last(valid_rows(site.count, site.end_row)), step(gridDim.y * kRows) {}
  __device__ __forceinline__ bool left() const { return first < last; }
  __device__ __forceinline__ bool whole() const { return first + kRows <= last; }
  __device__ __forceinline__ void next() {
    first += step;
    if (++sums == kTogether) sums = 0, turn ^= 1;
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// The row of a tile's eight that the lanes of quad `g` have: rows 0, 1, 4 and 5 go to different banks, and so do the others.
__device__ __forceinline__ int row_of_quad(int g) { return (g & 1) | (g & 2) << 1 | (g & 4) >> 1; }

// One thread: asks for tiles, as far ahead as there are stages. Columns and rows past the last are zeros.
template <bool kPost>
__device__ __forceinline__ void copy_tiles(ManyRoom& room, const Site& site, const Maps& maps, Tiles tiles) {
  constexpr uint32_t of_four = kStreams * sizeof(float);
  constexpr uint32_t boxes = sizeof(Stage::streams) + (kPost ? sizeof(Stage::y) : 0), of_row = kPost ? 6 * of_four : of_four;
  const int part = blockIdx.x * (kWidth / kSwizzled);
  const uint64_t once = evict_first_policy();
  for (; tiles.left(); tiles.next()) {
    Stage& stage = room.stages[tiles.stage];
    Coefficients& coefficients = room.coefficients[tiles.stage];
    uint64_t* full = &room.full[tiles.stage];
    const int rows = min(kRows, tiles.last - tiles.first);
    const int64_t at = static_cast<int64_t>(tiles.first) * kStreams;
    mbarrier_wait(&room.empty[tiles.stage], tiles.phase ^ 1);
    mbarrier_arrive_expect(full, boxes + rows * of_row);
    tensor_copy4_hint(stage.streams, &maps.streams, 0, tiles.first, 0, part, full, once);
    bulk_copy(coefficients.pre, site.pre_prev + at, rows * of_four, full);
    if constexpr (kPost) {
      tensor_copy3(stage.y, &maps.y, 0, tiles.first, part, full);
      bulk_copy(coefficients.post, site.post + at, rows * of_four, full);
      bulk_copy(coefficients.comb, site.comb + at * kStreams, rows * kStreams * of_four, full);
    }
  }
}

// One thread: writes what whole tiles became and gives their stages back.
template <bool kPost>
__device__ __forceinline__ void write_tiles(ManyRoom& room, const Maps& maps, Tiles tiles) {
  const int part = blockIdx.x * (kWidth / kSwizzled);
  const uint64_t once = evict_first_policy(), kept = evict_normal_policy();
  for (; tiles.left(); tiles.next()) {
    const Stage& stage = room.stages[tiles.stage];
    mbarrier_wait(&room.made[tiles.stage], tiles.phase);
    if (tiles.whole()) {
      if constexpr (kPost) tensor_store4(&maps.streams, stage.streams, 0, tiles.first, 0, part, once);
      tensor_store3(&maps.out, stage.y, 0, tiles.first, part, kept);
      tensor_stores_read();
    }
    mbarrier_arrive(&room.empty[tiles.stage]);
  }
  tensor_stores_done();
}

template <bool kPost>
__device__ __forceinline__ void read_staged(Read& read, const uint8_t* streams, const uint8_t* y,
                                            const Coefficients& coefficients, int row) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) read.streams[i] = *reinterpret_cast<const uint2*>(streams + i * kPartBytes);
  read.mix.pre = coefficients.pre[row];
  if constexpr (kPost) {
    read.result = *reinterpret_cast<const uint2*>(y);
    read.mix.post = coefficients.post[row];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) read.mix.comb[i] = coefficients.comb[row][i];
  }
}

// A warp's columns of a tile. `place`: of the thread's columns in a part; a tile that is not whole is written from here.
template <bool kPost>
__device__ __forceinline__ void take_tile(ManyRoom& room, const Tiles& tiles, const Place& at, int hidden, int part, int place,
                                          Kept& kept) {
  Stage& stage = room.stages[tiles.stage];
  mbarrier_wait(&room.full[tiles.stage], tiles.phase);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint8_t* const streams = stage.streams + part * kStreams * kPartBytes + place + half * (kPartBytes / 2);
    uint8_t* const y = stage.y + part * kPartBytes + place + half * (kPartBytes / 2);
    Read read;
    read_staged<kPost>(read, streams, y, room.coefficients[tiles.stage], row_of_quad(at.g) + 8 * half);
    const uint2 collapsed = make_row<kPost>(read, half, kept);
    if (tiles.whole()) {
#pragma unroll
      for (int i = 0; kPost && i < kStreams; ++i) *reinterpret_cast<uint2*>(streams + i * kPartBytes) = kept.made[half][i];
      *reinterpret_cast<uint2*>(y) = collapsed;
    } else if (at.row + 8 * half < tiles.last) {
      store_row<kPost>(at, half, hidden, kept, collapsed);
    }
  }
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&room.made[tiles.stage]);
}

// A warp's sums of a tile, rows in the order of their quads, pairs of them at once.
__device__ __forceinline__ void leave_tile(ManyRoom& room, const Tiles& tiles, int warp, const Place& at,
                                           const float (&d)[2][2][4], const Kept& kept) {
  mbarrier_wait(&room.added[tiles.sums], tiles.turn ^ 1);
  float(&sums)[kSums][kManyPitch] = room.sums[tiles.sums][warp];
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
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&room.left[tiles.sums]);
}

template <bool kPost>
__device__ __forceinline__ void take_tiles(ManyRoom& room, const Site& site, Tiles tiles, Place at, int warp) {
  const Projection projection(room.projection, threadIdx.x);
  const int part = warp / 2, plain = row_of_quad(at.g) * kSwizzled * 2 + warp % 2 * (kColumns * 2) + at.pair * 8;
  const int place = plain ^ (plain >> 3 & 0x30);  // as the copy engine swizzles 64 bytes
  while (tiles.left()) {
    Tiles second = tiles;
    second.next();
    Place below = at;
    below.advance(tiles.step, site.hidden);
    Kept kept[kTogether];
    take_tile<kPost>(room, tiles, at, site.hidden, part, place, kept[0]);
    if (second.left()) take_tile<kPost>(room, second, below, site.hidden, part, place, kept[1]);
    float d[kTogether][2][2][4] = {};
    project_tiles(projection, kept, d);
    leave_tile(room, tiles, warp, at, d[0], kept[0]);
    if (second.left()) leave_tile(room, second, warp, below, d[1], kept[1]);
    tiles = second, at = below;
    tiles.next(), at.advance(tiles.step, site.hidden);
  }
}

// One warp: a lane adds four sums of four rows each over the warps, in their order.
__device__ __forceinline__ void add_tiles(ManyRoom& room, const Site& site, Tiles tiles, int warps) {
  constexpr int kFours = kSums * kRows / 4, kTurns = (kFours + 31) / 32;
  const int lane = threadIdx.x % 32, blocks = gridDim.x;
  for (; tiles.left(); tiles.next()) {
    mbarrier_wait(&room.left[tiles.sums], tiles.turn);
    float4 sum[kTurns] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int four = min(lane + 32 * turn, kFours - 1);
        if (w >= warps) continue;
        const float4 of_warp = *reinterpret_cast<const float4*>(&room.sums[tiles.sums][w][four / 4][four % 4 * 4]);
        sum[turn].x += of_warp.x, sum[turn].y += of_warp.y, sum[turn].z += of_warp.z, sum[turn].w += of_warp.w;
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&room.added[tiles.sums]);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int four = lane + 32 * turn, mix = four / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int quad = four % 4 * 4 + i, row = (quad & 8) + row_of_quad(quad & 7);
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
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i)
      mbarrier_init(&room.full[i], 1), mbarrier_init(&room.made[i], warps), mbarrier_init(&room.empty[i], 1);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) mbarrier_init(&room.left[i], warps), mbarrier_init(&room.added[i], 1);
    fence_mbarrier_init();
  }
  if (warp < warps) {  // weights: no kernel before writes them
    float4 fn[kStreams][3];
    load_projection(fn, site, lane / 4, column);
    put_projection(Projection(room.projection, threadIdx.x), fn);
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
    take_tiles<kPost>(room, site, tiles, Place(site, tiles.first + row_of_quad(lane / 4), column, lane), warp);
  }
}

// A map of [planes][hidden / kSwizzled][rows] pieces of kSwizzled columns, in boxes of a block's columns of 16 rows.
inline bool make_map(CUtensorMap* map, const void* address, int64_t rows, int64_t hidden, int planes) {
  const EncodeTiled encode = tensor_map_encoder();
  const cuuint64_t piece = kSwizzled * sizeof(__nv_bfloat16), plane = hidden * sizeof(__nv_bfloat16), parts = hidden / kSwizzled;
  cuuint64_t sizes[4] = {kSwizzled, static_cast<cuuint64_t>(rows), parts}, pitches[3] = {planes * plane, piece};
  cuuint32_t box[4] = {kSwizzled, kRows, kWidth / kSwizzled};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  if (planes > 1) {
    sizes[2] = planes, sizes[3] = parts, pitches[1] = plane, pitches[2] = piece;
    box[2] = planes, box[3] = kWidth / kSwizzled;
  }
  return encode != nullptr && encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, planes > 1 ? 4 : 3, const_cast<void*>(address), sizes,
                                     pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
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
