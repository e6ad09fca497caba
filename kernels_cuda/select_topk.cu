// select_topk: the k best-scored rows of each query row (di_select.cuh).
#include "di_select.cuh"

namespace di {
namespace {

struct Columns {
  static constexpr int kBatch = 8;

  struct Raw {
    float4 scores;
    int candidate;
  };

  static __device__ __forceinline__ int candidate(const select::Call& c, int row, int column) {
    return c.candidates[row * c.candidates_stride + column / c.block];
  }

  // Columns before this one can be fetched four at a time.
  static __device__ __forceinline__ int plain_columns(const select::Call& c, int) {
    return c.vectors && (c.candidates == nullptr || c.block % 4 == 0) ? c.columns : 0;
  }

  // A lane's part of the 128 columns from `first` on.
  static __device__ __forceinline__ Raw fetch(const select::Call& c, int row, int first, int lane) {
    const int column = first + 4 * lane;
    const float4* from = reinterpret_cast<const float4*>(c.scores + row * c.scores_stride + column);
    return {*from, c.candidates == nullptr ? 0 : candidate(c, row, column)};
  }

  template <typename Four, typename One>
  static __device__ __forceinline__ void give(const Raw& raw, int four, int lane, Four take_four, One) {
    using select::ordered;
    const float4& s = raw.scores;
    take_four(four + lane,
              raw.candidate < 0 ? make_uint4(0, 0, 0, 0) : make_uint4(ordered(s.x), ordered(s.y), ordered(s.z), ordered(s.w)));
  }

  static __device__ __forceinline__ uint32_t key(const select::Call& c, int row, int column) {
    if (column >= c.columns || (c.candidates != nullptr && candidate(c, row, column) < 0)) return 0;
    return select::ordered(c.scores[row * c.scores_stride + column]);
  }

  static __device__ __forceinline__ int name(const select::Call& c, int row, int column) {
    return c.candidates == nullptr ? column : candidate(c, row, column) * c.block + column % c.block;
  }
};

}  // namespace
}  // namespace di

// scores, candidates, count, rows; candidate_block.
DI_EXPORT int di_select_topk(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  using namespace di;
  if (n != 4 || p->n_i != 1) return refuse(e, DI_BAD_CALL, "4 tensors and 1 integer are wanted, got %d and %d", n, p->n_i);
  const di_tensor &scores = t[0], &candidates = t[1], &rows = t[3];
  if (scores.shape[0] > 0 && scores.shape[1] > 0 && (scores.stride[1] != 1 || rows.stride[1] != 1))
    return refuse(e, DI_UNSUPPORTED, "the last dimension of scores and rows must be dense");
  select::Call c{};
  c.scores = data<const float>(scores), c.scores_stride = scores.stride[0];
  c.candidates = data<const int32_t>(candidates), c.candidates_stride = candidates.stride[0], c.block = static_cast<int>(p->i[0]);
  c.count = data<const int32_t>(t[2]);
  c.out = data<int32_t>(rows), c.out_stride = rows.stride[0];
  c.rows = static_cast<int>(scores.shape[0]), c.columns = static_cast<int>(scores.shape[1]);
  c.k = static_cast<int>(rows.shape[1]);
  return select::enqueue<Columns>(c, static_cast<cudaStream_t>(stream), e, "select_topk");
}
