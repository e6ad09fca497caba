// di_grouped_gemm: experts' projections with FP4 weights (hal/deepinfer_hal/ops/grouped_gemm.py).
#include "expand_rows.cuh"
#include "grouped_gemm_fp4.cuh"
#include "grouped_gemm_plain.cuh"

namespace di {
namespace {

enum Argument { kX, kXScale, kValues, kScales, kOffsets, kOut, kOutScale, kArguments };

using Tiny = GroupedForm<32, 16, 4, 3, 2, 1, Reading::kInHalves, 3>;
using Small = GroupedForm<32, 32, 4, 3, 3, 1, Reading::kInHalves>;
using Middle = GroupedForm<64, 64, 5, 3, 2, 2, Reading::kInHalves>;
using Large = GroupedForm<128, 128, 4, 4, 1, 1, Reading::kInHalves>;
// Where an expert's last tile has at most 64 tokens: slower by some percent, and half as long on that tile.
using LargeAndHalf = GroupedForm<128, 64, 4, 2, 2, 1, Reading::kInHalves>;
// Where a block has ten granules of each 16 or 32 tokens, one step of five warpgroups; where it has four, of two or four.
using TinyTen = GroupedForm<32, 16, 4, 5, 1, 1, Reading::kInHalves, 2>;
using SmallTen = GroupedForm<32, 32, 4, 5, 2, 1, Reading::kInHalves>;
using SmallFour = GroupedForm<32, 16, 8, 2, 2, 2, Reading::kAhead>;
using MiddleFour = GroupedForm<96, 64, 5, 4, 1, 2, Reading::kAtOnce>;

// BF16 rows as the product reads them.
struct Rows {
  const void* x;
  int64_t pitch_bytes;
  int depth;
  bool expanded;  // by the kernel before
};

template <typename Form, typename Out>
int launch(const Rows& rows, const GroupedShape& shape, cudaStream_t stream, di_error* e) {
  constexpr auto kernel = grouped_gemm_fp4<Form, Out>;
  constexpr int kBytes = Form::kSharedBytes;
  const int count = shape.last_row - shape.first_row;
  GroupedMaps maps;
  for (int i = 0; i < kWidths; ++i)
    if (!matrix_map(&maps.tokens[i], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rows.x, count, rows.depth, rows.pitch_bytes,
                    Form::box_rows(i), 64, CU_TENSOR_MAP_SWIZZLE_128B))
      return refuse(e, DI_FAILED, "the driver refused a tensor map of x [%d, %d]", count, rows.depth);
  if (allow_shared<kernel>(kBytes) != cudaSuccess) return refuse(e, DI_FAILED, "%d bytes of shared memory were refused", kBytes);
  // It may start while the rows are expanded, and waits for them before it reads them.
  if (rows.expanded) launch_early(kernel, multiprocessors(), Form::kThreads, kBytes, stream, maps, shape);
  else kernel<<<multiprocessors(), Form::kThreads, kBytes, stream>>>(maps, shape);
  return finish(e, "grouped_gemm_fp4");
}

// The tokens of the instruction follow the rows that an expert has on average; bits do not depend on them.
template <typename Out>
int launch_tile(const Rows& rows, const GroupedShape& shape, int64_t average, cudaStream_t stream, di_error* e) {
  const auto with = [&](auto form) { return launch<decltype(form), Out>(rows, shape, stream, e); };
  const int64_t share = ceil_div(static_cast<int64_t>(shape.experts) * shape.granules, multiprocessors());  // granules of a block
  if (share <= 4 && average <= 96) return average <= 32 ? with(SmallFour{}) : with(MiddleFour{});
  if (average <= 16) return share == 10 ? with(TinyTen{}) : with(Tiny{});
  if (average <= 32) return share == 10 ? with(SmallTen{}) : with(Small{});
  if (average <= 64) return with(Middle{});
  return average <= 512 && (average - 1) % 128 < 64 ? with(LargeAndHalf{}) : with(Large{});
}

// Codes are expanded into the workspace, as many rows at a time as fit; BF16 rows are read where they are.
int packed(const di_tensor* t, int rows, int depth, cudaStream_t stream, void* ws, size_t ws_bytes, di_error* e) {
  const di_tensor &x = t[kX], &scales = t[kXScale], &w = t[kValues], &out = t[kOut];
  const int experts = static_cast<int>(w.shape[0]), features = static_cast<int>(w.shape[1]);
  const int64_t average = ceil_div(rows, experts);
  const bool floats = out.dtype == DI_F32;
  GroupedShape shape{data<uint8_t>(w), data<int>(t[kOffsets]), out.data, out.stride[0], experts,
                     features / kGranuleRows, depth / kBlockK, 0, rows};
  const auto multiply = [&](const Rows& from) {
    return floats ? launch_tile<float>(from, shape, average, stream, e)
                  : launch_tile<__nv_bfloat16>(from, shape, average, stream, e);
  };
  if (x.dtype == DI_BF16) return multiply({x.data, x.stride[0] * 2, depth, false});
  const int64_t row_bytes = depth * 2, fitting = static_cast<int64_t>(ws_bytes) / row_bytes, numbered = (1 << 30) / (depth / 16);
  const int64_t most = fitting < numbered ? fitting : numbered;
  if (most < 1)
    return refuse(e, DI_FAILED, "a workspace of %zu bytes holds no row of %lld", ws_bytes, static_cast<long long>(row_bytes));
  for (int first = 0; first < rows; first = shape.last_row) {
    const int count = static_cast<int>(rows - first < most ? rows - first : most);
    const ExpandLaunch expand = expand_launch(count, depth, multiprocessors());
    launch_early(expand_rows_fp8, expand.blocks, expand.threads, 0, stream,
                 data<uint8_t>(x) + first * x.stride[0], x.stride[0], data<uint8_t>(scales) + first * scales.stride[0],
                 scales.stride[0], static_cast<__nv_bfloat16*>(ws), static_cast<int64_t>(depth), count, depth);
    shape.first_row = first, shape.last_row = first + count;
    const int status = multiply({ws, row_bytes, depth, true});
    if (status != DI_OK) return status;
  }
  return finish(e, "expand_rows_fp8");
}

// How a weight's bytes lie; -1 for what the card knows no name for.
int plain_format(const di_tensor& w, const di_tensor& scales, int depth) {
  if (w.layout == DI_LAYOUT_WGMMA_FP4) return kPlainFragments;
  if (w.dtype == DI_F32) return kPlainF32;
  if (w.dtype == DI_BF16) return kPlainBf16;
  if (w.dtype != DI_U8 || w.layout != DI_LAYOUT_STRIDED || !present(scales)) return -1;
  if (w.stride[1] * 2 == depth) return kPlainFp4Row;
  return scales.shape[1] == w.shape[1] ? kPlainFp8Row : kPlainFp8Block;
}

int plain(const di_tensor* t, int rows, int depth, cudaStream_t stream, di_error* e) {
  const di_tensor &x = t[kX], &w = t[kValues], &scales = t[kScales], &out = t[kOut];
  const int format = plain_format(w, scales, depth), features = static_cast<int>(w.shape[1]);
  if (format < 0) return refuse(e, DI_UNSUPPORTED, "a weight of dtype %d in layout %d", w.dtype, w.layout);
  const int64_t tiles = ceil_div(features, 32);
  if (tiles > kMostGridRows) return refuse(e, DI_UNSUPPORTED, "%d features of an expert; at most %d are served", features, 32 * kMostGridRows);
  if (out.dtype == DI_U8 && features % 32)
    return refuse(e, DI_BAD_CALL, "quantised rows of %d values; they must be a multiple of 32", features);
  PlainOperands p{};
  p.x = x.data, p.x_scale = data<uint8_t>(t[kXScale]), p.x_pitch = x.stride[0], p.x_scale_pitch = t[kXScale].stride[0];
  p.values = w.data, p.value_matrix = w.stride[0], p.value_pitch = w.stride[1];
  p.scales = data<uint8_t>(scales), p.scale_matrix = scales.stride[0], p.scale_pitch = scales.stride[1];
  p.offsets = data<int>(t[kOffsets]), p.out = out.data, p.out_pitch = out.stride[0];
  p.out_scale = data<uint8_t>(t[kOutScale]), p.out_scale_pitch = t[kOutScale].stride[0];
  p.rows = rows, p.experts = static_cast<int>(w.shape[0]), p.features = features, p.depth = depth;
  p.format = format, p.x_dtype = x.dtype, p.out_dtype = out.dtype;
  grouped_gemm_plain<<<dim3(rows, static_cast<unsigned>(tiles)), 256, 0, stream>>>(p);
  return finish(e, "grouped_gemm_plain");
}

// The matrix unit adds into its FP32 sums without rounding to nearest: an error that grows with K and not with its root. Rounded
// to BF16 it does not show; FP32 results of more terms than these would leave the card's tolerance.
constexpr int64_t kMostFloatDepth = 2304;

// What the fragments' kernel reads and writes; everything else is the plain one's.
bool is_fast(const di_tensor* t) {
  const di_tensor &x = t[kX], &out = t[kOut];
  const bool aligned = x.stride[0] * (x.dtype == DI_BF16 ? 2 : 1) % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  const bool paired = out.stride[0] % 2 == 0 && reinterpret_cast<uintptr_t>(out.data) % 8 == 0;
  const bool rounded = out.dtype == DI_BF16 || (out.dtype == DI_F32 && x.shape[1] <= kMostFloatDepth);
  const bool dtypes = (x.dtype == DI_U8 || x.dtype == DI_BF16) && rounded;
  return t[kValues].layout == DI_LAYOUT_WGMMA_FP4 && t[kValues].shape[0] <= kMostExperts && dtypes && aligned && paired;
}

}  // namespace
}  // namespace di

DI_EXPORT int di_grouped_gemm(const di_tensor* t, int n, const di_params*, void* stream, void* ws, size_t ws_bytes, di_error* e) {
  using namespace di;
  if (n != kArguments) return refuse(e, DI_BAD_CALL, "takes %d tensors, got %d", kArguments, n);
  const di_tensor &x = t[kX], &w = t[kValues], &out = t[kOut];
  const int64_t rows = x.shape[0], depth = x.shape[1];
  const bool fits = w.ndim == 3 && w.shape[2] == depth && out.shape[0] == rows && out.shape[1] == w.shape[1];
  if (!fits || t[kOffsets].shape[0] != w.shape[0] + 1)
    return refuse(e, DI_BAD_CALL, "x [%lld, %lld], weight, offsets and out do not fit", static_cast<long long>(rows),
                  static_cast<long long>(depth));
  if (x.dtype == DI_U8 && !present(t[kXScale])) return refuse(e, DI_BAD_CALL, "x is u8, so x_scale must be given");
  if (out.dtype == DI_U8 && !present(t[kOutScale])) return refuse(e, DI_BAD_CALL, "out is u8, so out_scale must be given");
  if (rows > INT32_MAX) return refuse(e, DI_UNSUPPORTED, "%lld rows; at most 2^31 - 1 are served", static_cast<long long>(rows));
  if (rows == 0 || w.shape[0] == 0 || w.shape[1] == 0) return DI_OK;
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  if (is_fast(t)) return packed(t, static_cast<int>(rows), static_cast<int>(depth), queue, ws, ws_bytes, e);
  return plain(t, static_cast<int>(rows), static_cast<int>(depth), queue, e);
}
