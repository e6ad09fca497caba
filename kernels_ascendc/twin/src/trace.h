// The hooks of the recorder, called only while `tracing`.
#pragma once

#include "machine_private.h"

namespace twin {

void begin_trace(Stream& stream, const char* kernel);
void trace_wait(const Pipe& pipe, const Snapshot& from, Where where);
void trace_arrival(const Core& core, const Snapshot& arrived, uint64_t round, Where where);
void trace_vector_function(Pipe& pipe, Where where);
// What the next row is to carry: memories by kind (-1 leaves one as it is), sizes, the element type.
void note_memories(int from, int to);
void note_sizes(int64_t m, int64_t n, int64_t k, int type);
// A register is made from others, the last of which is there at `from`; null: a store, which makes none.
void note_chain(uint32_t* ready, Op op, uint32_t from);
void note_chain_barrier();  // later loads wait for everything before
void note_global(uint64_t offset, uint64_t bytes, size_t tensor, int use);

}  // namespace twin
