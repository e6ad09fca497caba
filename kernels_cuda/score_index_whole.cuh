// score_index with candidates: which rows have every block that they see as a candidate, in order. Their columns are the keys
// themselves, so they are scored as rows without candidates are, sixteen over one expansion of a key; rows near a prompt's start
// are of that kind.
#pragma once

#include "di_index.cuh"
#include "di_launch.cuh"
#include "di_ptx.cuh"

namespace di {

constexpr int kWholeThreads = 128, kAtOnce = 8;  // kAtOnce: candidates of a lane on their way
constexpr int64_t kWorthParting = 1 << 22;  // columns of all rows from which two more launches are a small part

// A warp a row: its request goes to `whole` or to `chosen`, and -1, which leaves a row alone, to the other.
__global__ void __launch_bounds__(kWholeThreads)
    part_rows_kernel(const __grid_constant__ IndexCall c, int32_t* __restrict__ whole, int32_t* __restrict__ chosen) {
  start_dependents();
  wait_for_producer();
  const int row = static_cast<int>((blockIdx.x * kWholeThreads + threadIdx.x) / 32), lane = threadIdx.x % 32;
  if (row >= index_live_rows(c)) return;
  const int32_t *candidates = c.candidates + row * c.candidates_stride, request = c.row_to_req[row];
  const int blocks = c.columns / c.candidate_block, seen = c.visible[row];
  bool plain = true;
  for (int from = 0; plain && from < blocks; from += 32 * kAtOnce) {
    int chosen_here[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) chosen_here[i] = from + 32 * i + lane < blocks ? candidates[from + 32 * i + lane] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = from + 32 * i + lane, block = chosen_here[i];
      const bool holds = block >= 0 && static_cast<int64_t>(block) * c.candidate_block < seen;  // a visible key
      plain = plain && (place < blocks && place * c.candidate_block < seen ? block == place : !holds);
    }
    plain = __all_sync(0xFFFFFFFFu, plain);
  }
  if (lane == 0) whole[row] = plain ? request : -1, chosen[row] = plain ? -1 : request;
}

// Parts the rows of a call with candidates in two, to be scored one after the other; false, and nothing done, where that is not
// worth it or the workspace is too small.
inline bool part_rows(const IndexCall& c, IndexCall& whole, IndexCall& chosen, cudaStream_t stream, void* ws, size_t ws_bytes) {
  const size_t bytes = static_cast<size_t>(c.rows) * sizeof(int32_t);
  if (c.candidates == nullptr || static_cast<int64_t>(c.rows) * c.columns <= kWorthParting || ws_bytes < 2 * bytes) return false;
  int32_t *const of_whole = static_cast<int32_t*>(ws), *const of_chosen = of_whole + c.rows;
  launch_early(part_rows_kernel, dim3(static_cast<unsigned>(ceil_div(c.rows, kWholeThreads / 32))), kWholeThreads, 0, stream, c, of_whole,
               of_chosen);
  whole = chosen = c;
  whole.candidates = nullptr, whole.row_to_req = of_whole, chosen.row_to_req = of_chosen;
  return true;
}

}  // namespace di
