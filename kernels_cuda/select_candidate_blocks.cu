// select_candidate_blocks: the row blocks with the highest scores (di_select.cuh), the block of the last visible row first.
#include "di_select.cuh"

namespace di {
namespace {

struct Blocks {
  static constexpr int kBatch = 1, kRows = 8;  // kRows: of a block that is fetched whole

  struct Raw {
    float4 scores[8];
  };

  static __device__ __forceinline__ int last_visible(const select::Call& c, int row) {
    const int seen = c.visible[row];
    return seen > 0 ? (seen - 1) / c.block : -1;
  }

  // Blocks before this one have all their rows, and the last visible row is not among them.
  static __device__ __forceinline__ int plain_columns(const select::Call& c, int row) {
    return c.vectors && c.block == kRows ? min(last_visible(c, row), c.score_columns / kRows) : 0;
  }

  // A lane's part of the 128 blocks from `first` on: four rows of each eighth of them, so that the lanes read side by side.
  static __device__ __forceinline__ Raw fetch(const select::Call& c, int row, int first, int lane) {
    Raw raw;
    const float* all = c.scores + row * c.scores_stride + static_cast<int64_t>(first) * kRows;
    const float4* from = reinterpret_cast<const float4*>(all) + lane;
#pragma unroll
    for (int i = 0; i < 8; ++i) raw.scores[i] = from[32 * i];
    return raw;
  }

  template <typename Four, typename One>
  static __device__ __forceinline__ void give(const Raw& raw, int four, int lane, Four, One take_one) {
    using select::ordered;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4& s = raw.scores[i];
      const uint32_t half = max(max(ordered(s.x), ordered(s.y)), max(ordered(s.z), ordered(s.w)));
      const uint32_t best = max(half, __shfl_xor_sync(select::kAll, half, 1));
      if (lane % 2 == i % 2) take_one(four + 4 * i + lane / 8, lane / 2 % 4, best);
    }
  }

  static __device__ __forceinline__ uint32_t key(const select::Call& c, int row, int block) {
    if (block >= c.columns) return 0;
    if (block == last_visible(c, row)) return select::ordered(INFINITY);
    const int first = block * c.block, end = min(min(first + c.block, c.score_columns), c.visible[row]);
    uint32_t best = 0;
    for (int column = first; column < end; ++column) best = max(best, select::ordered(c.scores[row * c.scores_stride + column]));
    return best;
  }

  static __device__ __forceinline__ int name(const select::Call&, int, int block) { return block; }
};

}  // namespace
}  // namespace di

// scores, visible, count, out; block.
DI_EXPORT int di_select_candidate_blocks(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  if (n != 4 || p->n_i != 1) return refuse(e, DI_BAD_CALL, "4 tensors and 1 integer are wanted, got %d and %d", n, p->n_i);
  const di_tensor &scores = t[0], &out = t[3];
  if (scores.shape[0] > 0 && scores.shape[1] > 0 && (scores.stride[1] != 1 || out.stride[1] != 1))
    return refuse(e, DI_UNSUPPORTED, "the last dimension of scores and out must be dense");
  select::Call c{};
  c.scores = data<const float>(scores), c.scores_stride = scores.stride[0];
  c.visible = data<const int32_t>(t[1]), c.count = data<const int32_t>(t[2]);
  c.out = data<int32_t>(out), c.out_stride = out.stride[0];
  c.block = static_cast<int>(p->i[0]);
  c.rows = static_cast<int>(scores.shape[0]), c.score_columns = static_cast<int>(scores.shape[1]);
  c.k = static_cast<int>(out.shape[1]);
  c.columns = static_cast<int>(ceil_div(scores.shape[1], c.block));
  return select::enqueue<Blocks>(c, static_cast<cudaStream_t>(stream), e, "select_candidate_blocks");
}
