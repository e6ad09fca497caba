// draft_attention: the query rows of a draft block over the request's window rows and the block's own rows, with a sink.
//
// It is the kernel of sparse_attention with another list: a query row's keys are the window rows up to its request's anchor, then
// all rows of its block.
#include "sparse_attention_launch.cuh"

namespace {

using namespace di;
using namespace di::attention;

enum { Q, WINDOW, BASE, ORIGIN, MODULO, ANCHOR, DRAFT_KV, SINK, COUNT, OUT };
enum { FORMAT, BLOCK, WINDOW_TOKENS };

int refusal(const di_tensor* t, const di_params* p, di_error* e) {
  if (t[Q].dtype != DI_BF16 || t[OUT].dtype != DI_BF16) return refuse(e, DI_UNSUPPORTED, "only BF16 queries and outputs are served");
  if (t[Q].shape[2] != kWidth || t[Q].shape[1] > kHeads)
    return refuse(e, DI_UNSUPPORTED, "heads of %d values and at most %d of them are served", kWidth, kHeads);
  if (p->i[FORMAT] != DI_FP8_32) return refuse(e, DI_UNSUPPORTED, "fp8_32 rows are served");
  if (p->i[WINDOW_TOKENS] + p->i[BLOCK] > kMostKeys) return refuse(e, DI_UNSUPPORTED, "at most %d keys a row are served", kMostKeys);
  if (!rows_of_16(t[Q]) || !rows_of_16(t[OUT])) return refuse(e, DI_UNSUPPORTED, "q and out need heads that begin at multiples of 16 bytes");
  for (const int rows : {WINDOW, DRAFT_KV}) {
    if (t[rows].stride[0] % 16 != 0 || reinterpret_cast<uintptr_t>(t[rows].data) % 16 != 0)
      return refuse(e, DI_UNSUPPORTED, "window and draft rows must begin at multiples of 16 bytes");
    if (bytes_of(t[rows]) > kReach)
      return refuse(e, DI_UNSUPPORTED, "window and draft rows of at most %lld GiB are served", static_cast<long long>(kReach >> 30));
  }
  return DI_OK;
}

}  // namespace

DI_EXPORT int di_draft_attention(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  if (n != 10 || p->n_i != 3 || p->n_d != 1) return refuse(e, DI_BAD_CALL, "draft_attention takes 10 tensors, 3 integers and 1 real");
  if (t[Q].shape[0] == 0) return DI_OK;
  if (const int status = refusal(t, p, e)) return status;
  Arguments a{};
  a.out = data<__nv_bfloat16>(t[OUT]);
  a.window = data<uint8_t>(t[WINDOW]), a.window_pitch = t[WINDOW].stride[0];
  a.window_base = data<int>(t[BASE]), a.window_origin = data<int>(t[ORIGIN]), a.window_modulo = data<int>(t[MODULO]);
  a.compressed = data<uint8_t>(t[DRAFT_KV]), a.block_pitch = t[DRAFT_KV].stride[0];
  a.requests = static_cast<int>(t[BASE].shape[0]);
  a.block = a.chosen = static_cast<int>(p->i[BLOCK]);
  a.positions = data<int>(t[ANCHOR]), a.sink = data<float>(t[SINK]);
  a.count = present(t[COUNT]) ? data<int>(t[COUNT]) : nullptr;
  a.out_row = t[OUT].stride[0], a.out_head = t[OUT].stride[1];
  a.heads = static_cast<int>(t[Q].shape[1]), a.tokens = static_cast<int>(t[Q].shape[0]);
  a.window_tokens = static_cast<int>(p->i[WINDOW_TOKENS]), a.scale = static_cast<float>(p->d[0]);
  return launch<false, true>(a, t[Q], t[OUT], static_cast<cudaStream_t>(stream), e, "draft_attention");
}
