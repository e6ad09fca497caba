// Recording of traced launches. Sizes that only an instruction's own code knows reach its row through note_*.
#include "trace.h"

#include <string.h>

namespace twin {

bool tracing = false;

namespace {

struct Noted {
  uint16_t m = 0, n = 0, k = 0;
  uint8_t type = 0, from = 0, to = 0;
};
Noted noted;
size_t open_extent = 0;            // extents from here on belong to the next row
std::vector<TraceRow> registers;   // instructions of the vector function that is running, like ones counted
uint32_t chain_end = 0, chain_floor = 0;  // of the vector function that is running
std::vector<const char*> known_files;

Trace& trace() { return running_launch->stream->recorded; }

uint16_t number_of(const char* file) {
  for (size_t i = 0; i < known_files.size(); ++i)
    if (known_files[i] == file) return (uint16_t)i;
  known_files.push_back(file);
  trace().files.push_back(file);
  return (uint16_t)(known_files.size() - 1);
}

TraceRow row_of(const Pipe& pipe, Op op, Where where) {
  TraceRow row{};
  row.core = (uint16_t)(pipe.core->group->index * 3 + pipe.core->kind);
  row.pipe = pipe.id;
  row.op = op;
  row.launch = (uint16_t)(trace().kernels.size() - 1);
  row.file = number_of(where.file);
  row.line = (uint32_t)where.line;
  row.clock = pipe.now;
  row.count = 1;
  return row;
}

void push(TraceRow& row) {
  Trace& t = trace();
  row.first_extent = open_extent;
  row.extents = (uint32_t)(t.extents.size() - open_extent);
  open_extent = t.extents.size();
  t.rows.push_back(row);
}

void count_register_row(const TraceRow& row) {
  for (TraceRow& seen : registers)
    if (seen.op == row.op && seen.line == row.line && seen.file == row.file && seen.bytes == row.bytes) {
      ++seen.count;
      seen.work += row.work;
      return;
    }
  registers.push_back(row);
}

}  // namespace

void begin_trace(Stream& stream, const char* kernel) {
  tracing = stream.trace;
  if (!tracing) return;
  if (stream.recorded.kernels.empty()) known_files.clear();
  stream.recorded.kernels.push_back(kernel);
  open_extent = stream.recorded.extents.size();
  registers.clear();
  noted = {};
  chain_end = chain_floor = 0;
}

// Cycles until a register instruction's result can be used: the PTO ISA manual's for the A5 generation; conversions,
// comparisons and rearrangements, of which it says nothing, are taken like additions.
static uint32_t latency_of(Op op) {
  switch (op) {
    case op_LoadAlign:
    case op_LoadUnAlign:
    case op_StoreAlign:
    case op_StoreUnAlign: return 9;
    case op_RegMul:
    case op_RegMuls:
    case op_RegMulAddDst:
    case op_RegAxpy: return 8;
    case op_RegExp: return 16;
    case op_RegLn: return 18;
    case op_RegSqrt:
    case op_RegDiv: return 17;
    case op_RegReduce:
    case op_RegReduceDataBlock: return 19;
    case op_RegGather: return 27;
    default: return 7;
  }
}

void note_chain(uint32_t* ready, Op op, uint32_t from) {
  if (op == op_LoadAlign || op == op_LoadUnAlign || op == op_RegGather) from = from > chain_floor ? from : chain_floor;
  const uint32_t at = from + latency_of(op);
  if (ready != nullptr) *ready = at;
  if (at > chain_end) chain_end = at;
}
void note_chain_barrier() { chain_floor = chain_end; }

void trace_instruction(Pipe& pipe, Op op, Where where, uint32_t bytes, uint64_t work) {
  TraceRow row = row_of(pipe, op, where);
  row.bytes = bytes;
  row.work = work;
  row.from = noted.from, row.to = noted.to, row.type = noted.type;
  row.m = noted.m, row.n = noted.n, row.k = noted.k;
  noted = {};
  if (pipe.core->in_vector_function) count_register_row(row);
  else push(row);
}

void trace_wait(const Pipe& pipe, const Snapshot& from, Where where) {
  TraceRow row = row_of(pipe, op_Wait, where);
  if (from.source == kRoundSource) {
    row.op = op_Await;
    row.work = from.clock;
  } else {
    row.source_core = (uint16_t)(pipe.core->group->index * 3 + (int)(from.source >> 8));
    row.source_pipe = (uint16_t)(from.source & 255);
    row.source_clock = from.clock;
  }
  push(row);
}

void trace_arrival(const Core& core, const Snapshot& arrived, uint64_t round, Where where) {
  TraceRow row = row_of(core.pipe[arrived.source & 255], op_Arrive, where);
  row.clock = arrived.clock;
  row.work = round;
  push(row);
}

// The whole of a vector function at its end: a row for each kind of instruction, then one that closes it and bears the
// place of its first instruction.
void trace_vector_function(Pipe& pipe, Where where) {
  TraceRow row = row_of(pipe, op_VectorFunction, where);
  row.bytes = chain_end;
  chain_end = chain_floor = 0;
  for (TraceRow& inside : registers) inside.clock = pipe.now, push(inside);
  if (!registers.empty()) row.file = registers[0].file, row.line = registers[0].line;
  registers.clear();
  push(row);
}

void note_memories(int from, int to) {
  if (from >= 0) noted.from = (uint8_t)from;
  if (to >= 0) noted.to = (uint8_t)to;
}
void note_sizes(int64_t m, int64_t n, int64_t k, int type) {
  const auto small = [](int64_t x) { return (uint16_t)(x > 65535 ? 65535 : x); };
  noted.m = small(m), noted.n = small(n), noted.k = small(k);
  noted.type = (uint8_t)type;
}

void note_global(uint64_t offset, uint64_t bytes, size_t tensor, int use) {
  note_memories(use == 0 ? kGlobalMemory : -1, use == 0 ? -1 : kGlobalMemory);
  std::vector<TraceExtent>& extents = trace().extents;
  if (extents.size() > open_extent) {
    TraceExtent& last = extents.back();
    if (last.tensor == tensor && last.use == use && last.offset + last.bytes == offset &&
        last.bytes + bytes < 1u << 30) {
      last.bytes += (uint32_t)bytes;
      return;
    }
  }
  extents.push_back({offset, (uint32_t)bytes, (uint16_t)tensor, (uint16_t)use});
}

}  // namespace twin
