// sparse_attention: attention of each query row over its window rows and its selected compressed rows, with a sink.
#include "sparse_attention_expand.cuh"
#include "sparse_attention_flat.cuh"
#include "sparse_attention_launch.cuh"

namespace {

using namespace di;
using namespace di::attention;

enum { Q, WINDOW, BASE, ORIGIN, MODULO, COMPRESSED, TABLE, ROWS, REQUEST, POSITIONS, SINK, COUNT, OUT };
enum { WINDOW_FORMAT, COMPRESSED_FORMAT, BLOCK_ROWS, WINDOW_TOKENS };

int refusal(const di_tensor* t, const di_params* p, di_error* e) {
  const int64_t formats[2] = {p->i[WINDOW_FORMAT], p->i[COMPRESSED_FORMAT]};
  if (t[Q].dtype != DI_BF16 || t[OUT].dtype != DI_BF16) return refuse(e, DI_UNSUPPORTED, "only BF16 queries and outputs are served");
  if (t[Q].shape[2] != kWidth || t[Q].shape[1] > kHeads)
    return refuse(e, DI_UNSUPPORTED, "heads of %d values and at most %d of them are served", kWidth, kHeads);
  const int64_t chosen = present(t[ROWS]) ? t[ROWS].shape[1] : 0;
  const bool flat = formats[0] == DI_ROW_BF16 && (chosen == 0 || formats[1] == DI_ROW_BF16);
  const bool quantised = formats[0] == DI_FP8_32 && (chosen == 0 || formats[1] == DI_FP8_32 || formats[1] == DI_FP4_16);
  if (!flat && !quantised)
    return refuse(e, DI_UNSUPPORTED, "fp8_32 window rows with fp4_16 or fp8_32 compressed rows are served, and bf16 with bf16 rows");
  if (quantised && p->i[WINDOW_TOKENS] + chosen > kMostKeys) return refuse(e, DI_UNSUPPORTED, "at most %d keys a row are served", kMostKeys);
  if (!rows_of_16(t[Q]) || !rows_of_16(t[OUT])) return refuse(e, DI_UNSUPPORTED, "q and out need heads that begin at multiples of 16 bytes");
  if (t[WINDOW].stride[0] % 16 != 0 || reinterpret_cast<uintptr_t>(t[WINDOW].data) % 16 != 0)
    return refuse(e, DI_UNSUPPORTED, "window rows must begin at multiples of 16 bytes");
  if (chosen != 0 && (t[COMPRESSED].stride[0] % 16 != 0 || reinterpret_cast<uintptr_t>(t[COMPRESSED].data) % 16 != 0))
    return refuse(e, DI_UNSUPPORTED, "compressed blocks must begin at multiples of 16 bytes");
  if (quantised && (bytes_of(t[WINDOW]) > kReach || (chosen != 0 && bytes_of(t[COMPRESSED]) > kReach)))
    return refuse(e, DI_UNSUPPORTED, "quantised stores of at most %lld GiB are served", static_cast<long long>(kReach >> 30));
  return DI_OK;
}

int launch_flat(const Arguments& a, const di_tensor& q, const di_tensor& out, cudaStream_t stream, di_error* e) {
  constexpr auto kernel = flat::attend_flat_rows;
  constexpr int bytes = sizeof(flat::Shared);
  CUtensorMap query, result;
  if (!query_map(&query, q, kHeads) || !query_map(&result, out, 16)) return refuse(e, DI_FAILED, "the driver makes no map of queries and outputs");
  if (allow_shared<kernel>(bytes) != cudaSuccess) return refuse(e, DI_FAILED, "a block cannot have %d bytes", bytes);
  launch_early(kernel, min(4 * a.tokens, multiprocessors()), flat::kThreads, bytes, stream, a, query, result);
  return finish(e, "sparse_attention");
}

}  // namespace

DI_EXPORT int di_sparse_attention(const di_tensor* t, int n, const di_params* p, void* stream, void* workspace, size_t bytes, di_error* e) {
  if (n != 13 || p->n_i != 4 || p->n_d != 1) return refuse(e, DI_BAD_CALL, "sparse_attention takes 13 tensors, 4 integers and 1 real");
  if (t[Q].shape[0] == 0) return DI_OK;
  if (const int status = refusal(t, p, e)) return status;
  const bool selects = present(t[ROWS]) && t[ROWS].shape[1] > 0;
  Arguments a{};
  a.out = data<__nv_bfloat16>(t[OUT]);
  a.window = data<uint8_t>(t[WINDOW]), a.window_pitch = t[WINDOW].stride[0];
  a.window_base = data<int>(t[BASE]), a.window_origin = data<int>(t[ORIGIN]), a.window_modulo = data<int>(t[MODULO]);
  if (selects) {
    a.compressed = data<uint8_t>(t[COMPRESSED]), a.block_pitch = t[COMPRESSED].stride[0];
    a.block_table = data<int>(t[TABLE]), a.table_pitch = t[TABLE].stride[0];
    a.table_blocks = static_cast<int>(t[TABLE].shape[1]);
    a.rows = data<int>(t[ROWS]), a.rows_pitch = t[ROWS].stride[0], a.chosen = static_cast<int>(t[ROWS].shape[1]);
  }
  a.row_to_req = data<int>(t[REQUEST]), a.positions = data<int>(t[POSITIONS]), a.sink = data<float>(t[SINK]);
  a.count = present(t[COUNT]) ? data<int>(t[COUNT]) : nullptr;
  a.out_row = t[OUT].stride[0], a.out_head = t[OUT].stride[1];
  a.heads = static_cast<int>(t[Q].shape[1]), a.block_rows = static_cast<int>(p->i[BLOCK_ROWS]);
  a.window_tokens = static_cast<int>(p->i[WINDOW_TOKENS]), a.scale = static_cast<float>(p->d[0]);
  a.tokens = static_cast<int>(t[Q].shape[0]), a.requests = static_cast<int>(t[BASE].shape[0]), a.block = 1;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (p->i[WINDOW_FORMAT] == DI_ROW_BF16) return launch_flat(a, t[Q], t[OUT], on, e);
  const bool fp4 = selects && p->i[COMPRESSED_FORMAT] == DI_FP4_16;
  Expansion expansion{};
  if (plan_expansion(expansion, a, t[WINDOW].shape[0], selects ? t[COMPRESSED].shape[0] : 0, workspace, bytes)) {
    (fp4 ? launch_expansion<true> : launch_expansion<false>)(a, expansion, on);
    return launch_flat(a, t[Q], t[OUT], on, e);
  }
  return (fp4 ? launch<true, false> : launch<false, false>)(a, t[Q], t[OUT], on, e, "sparse_attention");
}
