// Host side of the kernel of sparse_attention and draft_attention.
#pragma once

#include "sparse_attention.cuh"
#include "sparse_attention_pair.cuh"

namespace di::attention {

// Whether every head begins at a multiple of 16 bytes.
inline bool rows_of_16(const di_tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[2] == 1 && t.stride[1] % 8 == 0 && t.stride[0] % 8 == 0;
}

// Quantised rows are kept as offsets of 16 bytes, in 32 bits.
constexpr int64_t kReach = 64LL << 30;
inline int64_t bytes_of(const di_tensor& store) { return store.shape[0] * store.stride[0]; }

// Queries or outputs as planes of one row's heads, in boxes of some heads by 64 values; heads that are not there read as zero
// and are not written.
inline bool query_map(CUtensorMap* map, const di_tensor& q, cuuint32_t heads = kHeads) {
  const cuuint64_t sizes[3] = {kWidth, static_cast<cuuint64_t>(q.shape[1]), static_cast<cuuint64_t>(q.shape[0])};
  const cuuint64_t pitches[2] = {static_cast<cuuint64_t>(2 * q.stride[1]), static_cast<cuuint64_t>(2 * q.stride[0])};
  const cuuint32_t box[3] = {64, heads, 1}, steps[3] = {1, 1, 1};
  const EncodeTiled encode = tensor_map_encoder();
  return encode != nullptr && encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, q.data, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <bool fp4, bool drafts>
int launch(const Arguments& a, const di_tensor& q, const di_tensor& out, cudaStream_t stream, di_error* e, const char* name) {
  CUtensorMap query;
  if (!query_map(&query, q)) return refuse(e, DI_FAILED, "the driver makes no map of the queries");
  constexpr auto in_pairs = pair::attend_rows_in_pairs<Bf16, fp4, drafts>;
  constexpr int pair_bytes = sizeof(pair::Shared);
  if (a.tokens <= resident_clusters<in_pairs>(2, pair::kThreads, pair_bytes) && allow_shared<in_pairs>(pair_bytes) == cudaSuccess) {
    CUtensorMap result;
    if (!query_map(&result, out, 16)) return refuse(e, DI_FAILED, "the driver makes no map of the outputs");
    launch_clusters(in_pairs, 2 * a.tokens, pair::kThreads, pair_bytes, stream, 2, true, a, query, result);
    return finish(e, name);
  }
  constexpr auto kernel = attend_rows<Bf16, fp4, drafts>;
  if (allow_shared<kernel>(sizeof(Shared)) != cudaSuccess) return refuse(e, DI_FAILED, "a block cannot have %zu bytes", sizeof(Shared));
  launch_early(kernel, min(a.tokens, multiprocessors()), kThreads, sizeof(Shared), stream, a, query);
  return finish(e, name);
}

}  // namespace di::attention
