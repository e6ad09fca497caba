// Replaying a trace through in-order pipes: when every instruction would start and end, given what each costs.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "twin/trace.h"

namespace twin {

// Cycles of one row, made from the cost table: how long it keeps its pipe, how much later its effects are visible, and
// how long the scalar unit needs to issue it.
struct RowCost {
  double busy, latency, issue;
};

// What cores share, in bytes a cycle and cycles. Bytes come from HBM when no instruction of the trace has touched their
// line before, and from L2 else.
struct SharedMemory {
  double hbm_bytes, l2_bytes, hbm_latency, l2_latency, write_latency;
  uint32_t line, in_flight;  // bytes of a line; copies that one pipe of one core keeps under way
};

struct RowTimes {
  double start, end;
  double critical;  // cycles of the longest chain that passed here
};

struct Replayed {
  std::vector<RowTimes> rows;
  std::vector<double> launch_cycles;  // from the first issue to the last effect
  std::vector<double> active;         // by launch, core and pipe: cycles in which it had work under way
  std::vector<double> scalar_critical, bandwidth_critical;  // by launch: cycles of the longest chain spent issuing, and
                                                            // waiting for shared bandwidth
  double hbm_bytes = 0, l2_bytes = 0;
  size_t cores = 0;
};

// Rows are sorted by launch, then core, then issue order. Throws std::runtime_error for a trace that cannot finish.
Replayed replay(const TraceRow* rows, size_t count, const TraceExtent* extents, size_t extent_count,
                const RowCost* costs, const SharedMemory& memory);

}  // namespace twin
