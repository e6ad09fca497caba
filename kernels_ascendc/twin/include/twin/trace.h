// What a traced launch records: every instruction with its sizes and its place, what waits for what, and which global
// memory it touches. Off unless the stream asks for it; then each hook is one test of `tracing`.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

namespace twin {

constexpr uint8_t kGlobalMemory = 15;          // beside the MemoryKinds, in TraceRow::from and to
// Snapshot::source of a round of several cores, whose number is then in its clock.
constexpr uint32_t kRoundSource = 0xffffffff;

// An instruction; or a wait: op_Wait for one pipe (`source_core`, `source_pipe`) up to `source_clock`, op_Await for all
// pipes whose op_Arrive rows carry the same round in `work`. Register instructions of one vector function that look
// alike are one row with their number in `count`.
struct TraceRow {
  uint16_t core, pipe, op, launch, source_core, source_pipe, file, m, n, k;
  uint8_t from, to, type, spare;
  uint32_t clock, source_clock, line, bytes, count, extents;
  uint64_t work, first_extent;
};

// A run of bytes of global memory that an instruction reads or writes, from the start of the call's tensor on.
struct TraceExtent {
  uint64_t offset;
  uint32_t bytes;
  uint16_t tensor, use;
};

struct Trace {
  std::vector<TraceRow> rows;
  std::vector<TraceExtent> extents;
  std::vector<std::string> kernels;  // those whose launches the rows number
  std::vector<std::string> files;    // those that the rows number
};

extern bool tracing;

}  // namespace twin
