// di_linear and di_grouped_linear: fp8_32 activations times FP8 weights of 32 x 32 blocks, or BF16 times BF16 (linear_tile.cuh says
// how; few rows of codes linear_few.cuh, up to 256 where that is faster; BF16 weights of few features linear_narrow.cuh). The
// workspace holds activation codes as BF16, 2 K bytes a row, where linear_few.cuh does not take them, BF16 rows that the copy engine
// cannot read, and the sums of slices of K; what does not fit goes in parts.
#include <algorithm>

#include "di_launch.cuh"
#include "linear_call.cuh"
#include "linear_combine.cuh"
#include "linear_dense_rows.cuh"
#include "linear_few_launch.cuh"
#include "linear_narrow_launch.cuh"
#include "linear_rows.cuh"
#include "linear_tile.cuh"

namespace di::linear {
namespace {

using Rows128 = Config<128, kOne, 6, 6>;
using Rows160 = Config<160, kOne, 6, 4>;
using Rows256 = Config<256, kOne, 4, 4>;
using InTurn128 = Config<128, kInTurn, 6, 6>;
using InTurn160 = Config<160, kInTurn, 6, 4>;
using Ahead256 = Config<256, kAside, 4, 4, kAhead>;
using Apart128 = Config<128, kApart, 6, 8>;
using Apart256 = Config<256, kApart, 4, 6>;
using Joined128 = Config<128, kJoined, 6, 8>;
using Joined256 = Config<256, kJoined, 4, 6>;

using DenseInTurn64 = Config<64, kInTurn, 8, 8, kDense>;
using DenseInTurn96 = Config<96, kInTurn, 6, 6, kDense>;
using DenseInTurn128 = Config<128, kInTurn, 6, 6, kDense>;
using DenseInTurn160 = Config<160, kInTurn, 4, 4, kDense>;
using DenseApart64 = Config<64, kApart, 8, 8, kDense>;
using DenseApart256 = Config<256, kApart, 4, 4, kDense>;

constexpr int kBlocks = 132;  // an H200's multiprocessors: a constant, so that the slices of K are the same everywhere

constexpr int kDenseSum = 1024;  // K of a dense slice at most, where kMostSlices allows: the matrix unit cuts sums towards zero

// Parts of K that are summed apart: as many as let few rows keep all multiprocessors busy, and no fewer than `least`. By n, k
// and groups alone.
int slices_of(const Problem& p, int64_t least) {
  const int64_t tiles = static_cast<int64_t>(p.groups) * p.feature_tiles(), wanted = kBlocks / tiles > least ? kBlocks / tiles : least;
  const int64_t most = p.chunks() / 2 < kMostSlices ? p.chunks() / 2 : kMostSlices;
  return static_cast<int>(wanted < most ? (wanted < 1 ? 1 : wanted) : (most < 1 ? 1 : most));
}

dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

int64_t expanded_bytes(const Problem& p, int tile_rows) { return ceil_div(p.rows, tile_rows) * tile_rows * p.groups * p.chunks() * 256; }
int64_t partial_bytes(const Problem& p, int tile_rows) {
  return ceil_div(p.rows, tile_rows) * tile_rows * p.groups * p.feature_tiles() * p.slices * kTilePitch * 4;
}

// Whether the slices of a tile of C::T rows meet in the shared memory of a cluster: all clusters must be resident at once, and
// many slices of a large tile go faster through the workspace.
template <typename C>
bool joins(const Problem& p) {
  const int64_t tiles = p.groups * p.feature_tiles() * ceil_div(p.rows, C::T);
  return p.slices <= 2 && tiles <= resident_clusters<linear_kernel<C>>(p.slices, C::kThreads, C::kShared);
}

// The kernels over the rows p has; p.expanded and p.partial have room for them.
template <typename C>
int launch(Problem p, const CUtensorMap& map, const CUtensorMap& row_map, cudaStream_t stream, di_error* e) {
  p.row_tiles = static_cast<int>(ceil_div(p.rows, C::T));
  const int64_t tiles = static_cast<int64_t>(p.row_tiles) * p.groups, units = tiles * p.feature_tiles(), most = multiprocessors();
  const int64_t blocks = C::kSplit ? units * p.slices : units < most ? units : most;
  const int cluster = C::kSlices == kJoined ? p.slices : 1;
  if (allow_shared<linear_kernel<C>>(C::kShared) != cudaSuccess) return finish(e, "linear: shared memory");
  if constexpr (C::kDense) {
    launch_clusters(linear_kernel<C>, grid_of(blocks), C::kThreads, C::kShared, stream, cluster, false, map, row_map, p);
  } else {
    const int64_t parts = tiles * p.chunks() * (C::T / expanded_rows(C::T));
    if (!C::kAhead || p.first == 0) expand_rows<C::T><<<static_cast<unsigned>(parts), kExpanders, 0, stream>>>(p);
    launch_clusters(linear_kernel<C>, grid_of(blocks), C::kThreads, C::kShared, stream, cluster, true, map, row_map, p);
  }
  if constexpr (C::kSlices == kApart)
    launch_early(combine_slices<C::T>, grid_of(units * (C::T / kCombineRows)), kCombineThreads, 0, stream, p);
  return finish(e, "linear");
}

// Expanded rows that stay in the L2 cache while they are multiplied.
constexpr int64_t kCachedBytes = 48 << 20;

int output_bytes(const Problem& p) { return p.output == kFp8 ? 1 : p.output == kF32 ? 4 : 2; }

// Rows `first` and on of a call, at most `part`.
Problem part_of(const Problem& p, int64_t first, int64_t part) {
  Problem q = p;
  q.first = static_cast<int>(first), q.rows = static_cast<int>(p.rows - first < part ? p.rows - first : part);
  q.x += first * p.x_stride, q.x_scale += first * p.x_scale_stride;
  q.out = static_cast<uint8_t*>(p.out) + first * p.out_stride * output_bytes(p);
  if (p.output == kFp8) q.out_scale += first * p.out_scale_stride;
  return q;
}

int64_t tile_bytes(const Problem& p, int tile_rows) { return static_cast<int64_t>(p.groups) * p.chunks() * tile_rows * 256; }

// Goes through the rows in as many parts as the room for expanded rows asks for, all about equal.
template <typename C>
int start(const Problem& p, const CUtensorMap& map, int64_t room, cudaStream_t stream, di_error* e) {
  const int64_t tiles = ceil_div(p.rows, C::T), most = room < kCachedBytes ? room : kCachedBytes, fit = most / tile_bytes(p, C::T);
  if (fit < 1)
    return refuse(e, DI_UNSUPPORTED, "linear: %d rows need %lld bytes of workspace, got %lld", C::T,
                  static_cast<long long>(tile_bytes(p, C::T)), static_cast<long long>(most));
  const int64_t part = ceil_div(tiles, ceil_div(tiles, fit)) * C::T;
  for (int64_t first = 0; first < p.rows; first += part) {
    const int status = launch<C>(part_of(p, first, part), map, map, stream, e);
    if (status != DI_OK) return status;
  }
  return DI_OK;
}

// Rounds of blocks that row tiles take at once, and in parts of `part` tiles.
template <typename C>
int64_t rounds_of(const Problem& p, int64_t row_tiles) {
  return ceil_div(row_tiles * p.groups * p.feature_tiles(), multiprocessors());
}
template <typename C>
int64_t rounds_in_parts(const Problem& p, int64_t part) {
  const int64_t tiles = ceil_div(p.rows, C::T);
  return tiles / part * rounds_of<C>(p, part) + rounds_of<C>(p, tiles % part);
}

// Row tiles of a part, at most `fit`: the fewest with which the parts together take the least rounds of blocks.
template <typename C>
int64_t even_part(const Problem& p, int64_t fit) {
  const int64_t tiles = ceil_div(p.rows, C::T);
  int64_t best = 1;
  for (int64_t part = 2; part <= fit && part <= tiles; ++part)
    if (rounds_in_parts<C>(p, part) < rounds_in_parts<C>(p, best)) best = part;
  return best;
}

// Row tiles that a part may have where there is room for two parts and for the sums that are put aside.
template <typename C>
int64_t ahead_tiles(const Problem& p, int64_t room) {
  const int64_t left = room - static_cast<int64_t>(multiprocessors()) * C::T * kTileFeatures * 4;
  return left < 0 ? 0 : left / (2 * tile_bytes(p, C::T));
}

// Row tiles of a part where parts are expanded ahead: two rounds of blocks or so, one where there are not two such parts. A part
// ends with multiprocessors that wait, and nothing hides the expansion of the first. 0 where there is no room.
template <typename C>
int64_t ahead_part(const Problem& p, int64_t room) {
  const int64_t fit = ahead_tiles<C>(p, room), even = even_part<C>(p, fit);
  return fit < 1 ? 0 : 2 * even <= fit && 4 * even <= ceil_div(p.rows, C::T) ? 2 * even : even;
}

// Goes through the rows in parts, of which the next is expanded while one is multiplied.
template <typename C>
int start_ahead(Problem p, const CUtensorMap& map, int64_t room, cudaStream_t stream, di_error* e) {
  const int64_t tiles = ahead_part<C>(p, room), part = tiles * C::T, bytes = tiles * tile_bytes(p, C::T);
  uint8_t* const rooms[2] = {p.expanded, p.expanded + bytes};
  p.partial = reinterpret_cast<float*>(p.expanded + 2 * bytes);
  int here = 0;
  for (int64_t first = 0; first < p.rows; first += part, here = 1 - here) {
    Problem q = part_of(p, first, part);
    q.expanded = rooms[here], q.next_expanded = rooms[1 - here];
    if (first + part < p.rows) q.next_rows = part_of(p, first + part, part).rows;
    q.next_row_tiles = static_cast<int>(ceil_div(q.next_rows, C::T));
    const int status = launch<C>(q, map, map, stream, e);
    if (status != DI_OK) return status;
  }
  return DI_OK;
}

template <typename C>
int start_apart(Problem p, const CUtensorMap& map, cudaStream_t stream, di_error* e) {
  p.partial = reinterpret_cast<float*>(p.expanded + expanded_bytes(p, C::T));
  return launch<C>(p, map, map, stream, e);
}

// What tiles of C cost: multiplications of the block that does most, and what sums that leave their blocks take, in as many.
template <typename C>
int64_t cost(const Problem& p) {
  const int64_t tiles = ceil_div(p.rows, C::T) * p.feature_tiles() * p.groups, slices = C::kSplit ? p.slices : 1;
  const int64_t sums = C::kSplit && !C::kDense ? static_cast<int64_t>(p.rows) * p.groups * p.n * p.slices : 0;
  return ceil_div(tiles * slices, multiprocessors()) * (C::kCost * static_cast<int64_t>(p.k) / slices) + sums * 5;
}

// Whether it pays to expand rows ahead, where other tiles cost `otherwise`: there are two parts and more, and they take hardly more
// rounds than all rows at once. Of up to four rounds the first part's expansion is a tenth. Two slices: each more is another time
// that sums go to the workspace and back.
template <typename C>
bool goes_ahead(const Problem& p, int64_t room, int64_t otherwise) {
  const int64_t part = ahead_part<C>(p, room), tiles = ceil_div(p.rows, C::T), rounds = rounds_of<C>(p, tiles);
  if (p.slices != 2 || part < 1 || tiles < 2 * part || rounds_in_parts<C>(p, part) > rounds + rounds / 8) return false;
  return cost<C>(p) / 10 * (rounds <= 4 ? 11 : 10) < otherwise;
}

// Whether tiles of 128 rows are faster than those of 160. They must keep five sixths of the multiprocessors busy, since they bring
// more bytes.
bool turns_by_128(const Problem& p) {
  const int64_t tiles = ceil_div(p.rows, 128) * p.feature_tiles() * p.groups;
  return tiles * 6 >= ceil_div(tiles, multiprocessors()) * multiprocessors() * 5 && cost<InTurn128>(p) < cost<InTurn160>(p);
}

int choose_slices(const Problem& p, const CUtensorMap& map, int64_t room, cudaStream_t stream, di_error* e) {
  const auto fits = [&](int rows) { return expanded_bytes(p, rows) + partial_bytes(p, rows) <= room; };
  if (p.rows <= 128 && fits(128))
    return joins<Joined128>(p) ? launch<Joined128>(p, map, map, stream, e) : start_apart<Apart128>(p, map, stream, e);
  const bool by_128 = turns_by_128(p);
  const int64_t in_turn = by_128 ? cost<InTurn128>(p) : cost<InTurn160>(p), apart = fits(256) ? cost<Apart256>(p) : INT64_MAX;
  if (p.rows > 256 && goes_ahead<Ahead256>(p, room, std::min(apart, in_turn))) return start_ahead<Ahead256>(p, map, room, stream, e);
  if (fits(256) && (p.rows <= 256 || apart < in_turn))
    return joins<Joined256>(p) ? launch<Joined256>(p, map, map, stream, e) : start_apart<Apart256>(p, map, stream, e);
  return by_128 ? start<InTurn128>(p, map, room, stream, e) : start<InTurn160>(p, map, room, stream, e);
}

// Which tiles serve these rows; the bits are the same with all.
int choose(const Problem& p, const CUtensorMap& map, int64_t room, cudaStream_t stream, di_error* e) {
  int status = DI_OK;
  if (p.rows <= 16 && choose_few<16>(p, map, room, stream, e, &status)) return status;
  if (p.rows > 16 && p.rows <= 32 && choose_few<32>(p, map, room, stream, e, &status)) return status;
  if (p.rows > 32 && p.rows <= 64 && choose_few<64>(p, map, room, stream, e, &status)) return status;
  if (p.rows > 64 && p.rows <= 128 && choose_few<128>(p, map, room, stream, e, &status)) return status;
  if (p.rows > 128 && p.rows <= 192 && choose_few<192>(p, map, room, stream, e, &status)) return status;
  if (p.rows > 192 && p.rows <= 256 && choose_few<256>(p, map, room, stream, e, &status)) return status;
  if (p.slices > 1) return choose_slices(p, map, room, stream, e);
  if (p.rows <= 128) return start<Rows128>(p, map, room, stream, e);
  return cost<Rows160>(p) < cost<Rows256>(p) ? start<Rows160>(p, map, room, stream, e) : start<Rows256>(p, map, room, stream, e);
}

template <typename C>
int start_dense(Problem p, const di_tensor& x, const CUtensorMap& map, cudaStream_t stream, di_error* e) {
  CUtensorMap row_map;
  if (!matrix_map(&row_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x.data, p.rows, static_cast<int64_t>(p.groups) * p.k, row_stride(x) * 2,
                  dense_rows<C>(p), kDenseChunk, CU_TENSOR_MAP_SWIZZLE_128B))
    return refuse(e, DI_FAILED, "linear: the driver refuses a map of the rows [%d, %d]", p.rows, p.groups * p.k);
  p.partial = reinterpret_cast<float*>(p.expanded);
  return launch<C>(p, map, row_map, stream, e);
}

// w: the address of the weight, which the copy engine can read, as it can `x`.
int choose_dense(const Problem& p, const di_tensor& x, const void* w, int64_t room, cudaStream_t stream, di_error* e) {
  int status = DI_OK;
  if (choose_narrow(p, x.data, row_stride(x), w, stream, e, &status)) return status;
  CUtensorMap map;
  if (!matrix_map(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, w, static_cast<int64_t>(p.groups) * p.n, p.k, p.k * 2, kTileFeatures,
                  kDenseChunk, CU_TENSOR_MAP_SWIZZLE_128B))
    return refuse(e, DI_FAILED, "linear: the driver refuses a map of the weight [%d, %d]", p.groups * p.n, p.k);
  const bool apart = p.slices > 1 && static_cast<int64_t>(p.feature_tiles()) * p.groups * p.slices <= kBlocks;
  if (apart && p.rows <= 64 && partial_bytes(p, 64) <= room) return start_dense<DenseApart64>(p, x, map, stream, e);
  if (apart && (p.rows <= 256 || cost<DenseApart256>(p) < cost<DenseInTurn160>(p)) && partial_bytes(p, 256) <= room)
    return start_dense<DenseApart256>(p, x, map, stream, e);
  if (p.rows <= 64) return start_dense<DenseInTurn64>(p, x, map, stream, e);
  const int64_t narrow = cost<DenseInTurn96>(p), middle = cost<DenseInTurn128>(p), wide = cost<DenseInTurn160>(p);
  if (narrow < middle && narrow < wide) return start_dense<DenseInTurn96>(p, x, map, stream, e);
  if (middle < wide) return start_dense<DenseInTurn128>(p, x, map, stream, e);
  return start_dense<DenseInTurn160>(p, x, map, stream, e);
}

// Goes through rows that the copy engine cannot read in parts that are copied to the workspace; half of it is left for sums.
int choose_gathered(const Problem& p, const di_tensor& x, const void* w, int64_t room, cudaStream_t stream, di_error* e) {
  const int64_t row_bytes = static_cast<int64_t>(p.groups) * p.k * 2, part = room / 2 / row_bytes;
  if (part < 1)
    return refuse(e, DI_UNSUPPORTED, "linear: a row needs %lld bytes of workspace, got %lld", static_cast<long long>(row_bytes),
                  static_cast<long long>(room / 2));
  for (int64_t first = 0; first < p.rows; first += part) {
    Problem q = part_of(p, first, part);
    const di_tensor rows = gather(q, data<__nv_bfloat16>(x) + first * row_stride(x), row_stride(x), stream);
    const int64_t taken = round_up(q.rows * row_bytes, 256);
    q.expanded += taken;
    if (const int status = choose_dense(q, rows, w, room - taken, stream, e); status != DI_OK) return status;
  }
  return DI_OK;
}

// p without what depends on the operands' format.
int run_dense(Problem p, const char* op, const di_tensor& x, const di_tensor& w, int64_t room, cudaStream_t stream, di_error* e) {
  if (p.output == kFp8) return refuse(e, DI_UNSUPPORTED, "%s quantises no result of BF16 weights", op);
  p.chunk = kDenseChunk, p.slices = slices_of(p, ceil_div(p.k, kDenseSum));
  // The weight and its sizes alone decide how a row is summed, so that its bits are the same wherever it lies.
  const bool tiled = p.k > 0 && p.k % 8 == 0 && reinterpret_cast<uintptr_t>(w.data) % 16 == 0;
  if (!tiled || (p.groups > 1 && p.k % kDenseChunk != 0)) {
    const int64_t columns = ceil_div(static_cast<int64_t>(p.groups) * p.n, 8), rows = std::min<int64_t>(p.rows, kMostGridRows);
    const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(rows));
    plain_dense<<<grid, 256, 0, stream>>>(p, data<__nv_bfloat16>(x), row_stride(x), data<__nv_bfloat16>(w));
    return finish(e, op);
  }
  if (!lies_well(x, static_cast<int64_t>(p.groups) * p.k)) return choose_gathered(p, x, w.data, room, stream, e);
  return choose_dense(p, x, w.data, room, stream, e);
}

int run(const char* op, const di_tensor* t, int groups, int n, int k, cudaStream_t stream, void* ws, size_t ws_bytes, di_error* e) {
  const di_tensor &x = t[kX], &x_scale = t[kXScale], &w = t[kWeight], &w_scale = t[kWeightScale], &count = t[kCount], &out = t[kOut];
  const di_tensor& out_scale = t[kOutScale];
  const bool dense = x.dtype == DI_BF16 && w.dtype == DI_BF16;
  const bool codes = x.dtype == DI_U8 && w.dtype == DI_U8 && present(x_scale) && present(w_scale);
  if ((!dense && !codes) || w.layout != DI_LAYOUT_STRIDED)
    return refuse(e, DI_UNSUPPORTED, "%s takes fp8_32 codes and FP8 weights of 32 x 32 blocks, or BF16 for both", op);
  if (codes && (k % 32 != 0 || k < 32)) return refuse(e, DI_UNSUPPORTED, "%s needs K in multiples of 32, got %d", op, k);
  if (out.dtype != DI_BF16 && out.dtype != DI_F32 && out.dtype != DI_U8)
    return refuse(e, DI_UNSUPPORTED, "%s writes bf16, f32 or fp8_32, not dtype %d", op, out.dtype);
  if (out.dtype == DI_U8 && (n % 32 != 0 || !present(out_scale)))
    return refuse(e, DI_BAD_CALL, "%s needs N in multiples of 32 and out_scale for fp8_32 results, got N %d", op, n);
  if (const int status = check_call(op, t, codes, groups, n, k, e); status != DI_OK) return status;
  const int64_t rows = x.shape[0];
  if (rows == 0 || n == 0) return DI_OK;
  if (codes && reinterpret_cast<uintptr_t>(w.data) % 16 != 0)
    return refuse(e, DI_UNSUPPORTED, "%s needs weights at a multiple of 16 bytes", op);

  Problem p = {};
  p.count = present(count) ? data<int32_t>(count) : nullptr;
  p.out = out.data, p.out_stride = row_stride(out);
  p.output = out.dtype == DI_U8 ? kFp8 : out.dtype == DI_F32 ? kF32 : kBf16;
  if (p.output == kFp8) p.out_scale = data<uint8_t>(out_scale), p.out_scale_stride = row_stride(out_scale);
  p.rows = static_cast<int>(rows), p.n = n, p.k = k, p.groups = groups;
  const int64_t size = output_bytes(p);
  p.out_aligned = reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.out_stride * size % 16 == 0 && (groups == 1 || n * size % 16 == 0);
  p.expanded = static_cast<uint8_t*>(ws);
  const int64_t room = static_cast<int64_t>(ws_bytes);
  if (dense) return run_dense(p, op, x, w, room, stream, e);

  p.x = data<uint8_t>(x), p.x_stride = row_stride(x);
  p.x_scale = data<uint8_t>(x_scale), p.x_scale_stride = row_stride(x_scale);
  p.w_scale = data<uint8_t>(w_scale);
  p.chunk = kChunk, p.slices = slices_of(p, 1);
  p.x_aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride % 16 == 0;
  CUtensorMap map;
  if (!matrix_map(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, w.data, static_cast<int64_t>(groups) * n, k, k, kTileFeatures, kChunk,
                  CU_TENSOR_MAP_SWIZZLE_128B))
    return refuse(e, DI_FAILED, "%s: the driver refuses a map of the weight [%d, %d]", op, groups * n, k);
  return choose(p, map, room, stream, e);
}

}  // namespace
}  // namespace di::linear

DI_EXPORT int di_linear(const di_tensor* t, int n, const di_params*, void* stream, void* ws, size_t ws_bytes, di_error* e) {
  if (n != di::linear::kArguments) return di::refuse(e, DI_BAD_CALL, "linear takes 7 tensors, got %d", n);
  return di::linear::run("linear", t, 1, static_cast<int>(t[2].shape[0]), static_cast<int>(t[2].shape[1]),
                         static_cast<cudaStream_t>(stream), ws, ws_bytes, e);
}

DI_EXPORT int di_grouped_linear(const di_tensor* t, int n, const di_params*, void* stream, void* ws, size_t ws_bytes, di_error* e) {
  if (n != di::linear::kArguments) return di::refuse(e, DI_BAD_CALL, "grouped_linear takes 7 tensors, got %d", n);
  return di::linear::run("grouped_linear", t, static_cast<int>(t[2].shape[0]), static_cast<int>(t[2].shape[1]),
                         static_cast<int>(t[2].shape[2]), static_cast<cudaStream_t>(stream), ws, ws_bytes, e);
}
