// The model of the chip: cores with in-order pipes, local memories with shadows, and the happens-before rules.
//
// A kernel runs eagerly: an instruction takes effect when it is called. Whether a real chip would give the same
// result is decided by clocks. Every pipe numbers its instructions; a pipe `knows` for each pipe of its group (one
// cube core and two vector cores) the number up to which its effects are visible. SetFlag and its like carry that
// knowledge over. Two accesses to the same 32 bytes, one of them a write, of which the later one does not know the
// earlier, are a race.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

#include "twin/trace.h"

namespace twin {

enum PipeId : uint8_t { kS = 0, kV, kM, kMte1, kMte2, kMte3, kFix, kPipes = 7, kAll = 15 };
enum CoreKind : uint8_t { kCube = 0, kVector0 = 1, kVector1 = 2 };
constexpr int kTids = 24;  // 3 cores of a group, 8 numbers each
constexpr uint32_t kClockBits = 27, kClockMask = (1u << kClockBits) - 1;

enum Op : uint16_t {
#define TWIN_OP(name, pipe, grade, page, note) op_##name,
#include "twin/instructions.def"
#undef TWIN_OP
  kOps
};
extern const char* const kOpNames[kOps];

// Where an instruction stands in the kernel's source; a default argument of every instruction fills it in.
struct Where {
  const char* file;
  int32_t line;
};
// As default arguments of a function: directly inside of a default argument's braces GCC gives the place of the
// declaration.
constexpr Where here(const char* file = __builtin_FILE(), int32_t line = __builtin_LINE()) { return {file, line}; }
#define TWIN_HERE ::twin::Where where = ::twin::here()

struct alignas(32) Clocks {
  uint32_t at[kTids];
  void join(const Clocks& other) {
    for (int i = 0; i < kTids; ++i) at[i] = at[i] > other.at[i] ? at[i] : other.at[i];
  }
};

// What a release carries: knowledge of the own group and, shared and immutable, of all groups.
struct Snapshot {
  Clocks known;
  const uint32_t* foreign;
  uint32_t source, clock;  // the releasing pipe and its instruction, for the trace
  Where where;             // of a flag between cores: what set it
};

// An instruction's number and place in 8 bytes, since every instruction leaves one: the name of its file lies so many
// bytes from kOpNames, in the same library.
struct Record {
  int32_t file;
  uint16_t line, op;

  static Record of(Where where, Op op) {
    const intptr_t away = (intptr_t)where.file - (intptr_t)kOpNames;
    return {(int32_t)away, (uint16_t)(where.line < 65535 ? where.line : 65535), op};
  }
  Where where() const { return {(const char*)((intptr_t)kOpNames + file), line}; }
};

struct Core;
struct Group;

struct Pipe {
  Clocks known;
  uint32_t now, tid,
      first;  // number of the last instruction; index among the group's clocks; `now` when the launch began
  uint8_t id;
  bool self_ordered;  // later instructions of this pipe see the effects of earlier ones without a barrier
  Core* core;
  const uint32_t* foreign;
  int32_t saved;  // index of the saved copy of `known` for global memory, -1 when stale
  std::vector<Record> history;

  uint32_t epoch() const { return tid << kClockBits | now; }
  bool knows(uint32_t e) const { return (e & kClockMask) <= known.at[e >> kClockBits] || e == epoch(); }
};

enum MemoryKind : uint8_t { kUb, kL1, kL0a, kL0b, kL0c, kBias, kFixbuf, kL0aMx, kL0bMx, kMemories };

// A local memory with its shadow, one entry for each 32 bytes: who wrote last, which bytes hold a value of this launch,
// and who read last, by reader. Entries of earlier launches are recognised by their clocks, never cleared.
struct Memory {
  const char* name;
  MemoryKind kind;
  uint8_t* data;  // null: another core's, which this one can name but not touch
  uint32_t bytes, readers;
  uint32_t* writer;
  uint32_t* valid;
  uint32_t* reader[3];
  Group* group;
  uint64_t* buffer;             // which buffer of which launch each 32 bytes were last given to, by InitBuffer
  std::vector<Where> reserved;  // the InitBuffers of the running kernel, by number
};

struct Flag {
  bool set;
  Where where;
  Snapshot released;
};

struct CrossFlag {
  std::vector<Snapshot> ready;  // one joined snapshot for each completed round
};

struct Core {
  Group* group;
  CoreKind kind;
  int block, blocks, sub_block, ratio;  // what GetBlockIdx and the like say
  int rank;                             // of a world of several; 0 otherwise
  Pipe pipe[kPipes];
  Memory memory[kMemories];  // those the core has hold data
  Flag* flags;               // [source pipe][destination pipe][id]
  uint8_t event_ids[64];     // bits in use, by source * 8 + destination
  CrossFlag cross[32], cross_sync;
  uint64_t mask[2];
  bool count_mode;
  uint8_t atomic_op, atomic_type;
  Where atomic_where;  // what turned atomics on
  Where static_where;  // InitSocState: the kernel places its tensors itself
  uint32_t closed[kPipes];  // the last instruction of each pipe before the last PipeBarrier<PIPE_ALL>
  bool in_vector_function;
  uint32_t stores_seen;       // stores up to this number are visible to the vector function's loads
  Snapshot unit_m, unit_fix;  // what unitFlag carries between Mmad and Fixpipe
  bool unit_m_set, unit_fix_set;
  void* pipe_object;       // the TPipe alive on this core
  uint32_t allocated[16];  // bytes given out by TPipe, by memory
};

struct Group {
  int index;
  Core core[3];
  uint32_t birth[kTids];  // clocks when the current wave of blocks began
};

extern Core* current;

struct Soc {
  const char* name;
  int cubes, vectors;
};

struct Stream {
  const Soc* soc;
  int groups;
  uint64_t seed;
  bool trace;
  bool ordered_atomics;  // float atomics whose order is left to chance are errors
  Trace recorded;
  std::string report;  // everything the last launches complained of; empty when they were fine
  int problems;
  double launch_ms;
  struct Seat* seat = nullptr;  // a rank's place in a world (twin/peer.h): launches then wait for those of the others
};

Stream* stream_of(void* handle);
const Soc* find_soc(const char* name);

// ---- problems -----------------------------------------------------------------------------------------------------

__attribute__((format(printf, 1, 2))) void complain(const char* text, ...);              // and go on
[[noreturn]] __attribute__((format(printf, 1, 2))) void give_up(const char* text, ...);  // and end the launch
std::string place(const Core& core);

// ---- instructions -------------------------------------------------------------------------------------------------

void trace_instruction(Pipe& pipe, Op op, Where where, uint32_t bytes, uint64_t work);
inline Pipe& begin(PipeId id, Op op, Where where) {
  Pipe& pipe = current->pipe[id];
  ++pipe.now;
  if (pipe.self_ordered) pipe.known.at[pipe.tid] = pipe.now;
  pipe.history.push_back(Record::of(where, op));
  return pipe;
}
inline void done(Pipe& pipe, Op op, Where where, uint32_t bytes, uint64_t work) {
  if (__builtin_expect(tracing, 0)) trace_instruction(pipe, op, where, bytes, work);
}
inline Where where_now(const Pipe& pipe) { return pipe.history.back().where(); }
inline const char* op_now(const Pipe& pipe) { return kOpNames[pipe.history.back().op]; }

Snapshot release(const Pipe& pipe);
void acquire(Pipe& pipe, const Snapshot& from, Where where);
void acquire_by_core(Core& core, const Snapshot& from, Where where);  // by everything issued from now on
void barrier(Core& core, PipeId id);                                  // kAll for every pipe

// Accesses: check bounds, shadows and order, and give the address. `what` names the operand in messages.
const uint8_t* load(Pipe& pipe, Memory& memory, uint64_t offset, uint64_t bytes, const char* what);
// 256 bytes that one instruction wrote in full and that the pipe may read; null when anything else must be looked at.
const uint8_t* load_quick(Pipe& pipe, Memory& memory, uint64_t offset);
uint8_t* store(Pipe& pipe, Memory& memory, uint64_t offset, uint64_t bytes, const char* what);
// Only the bytes whose bits are set in `bytes_of_block`, inside the 32-byte block at `offset`.
uint8_t* store_some(Pipe& pipe, Memory& memory, uint64_t offset, uint32_t bytes_of_block, const char* what);
// Whole blocks from one memory to another; bytes that were never written stay so, and only reading them is an error.
void move_blocks(Pipe& pipe, Memory& from, uint64_t source, Memory& to, uint64_t target, uint64_t bytes);
// Checks order only; `holds` then says whether the bytes of a block were written.
const uint8_t* load_unchecked(Pipe& pipe, Memory& memory, uint64_t offset, uint64_t bytes, const char* what);
bool holds(const Memory& memory, uint64_t first_block, uint64_t blocks, uint32_t bytes_of_block);
void valid_bytes(const Memory& memory, uint64_t first_block, uint64_t blocks,
                 uint32_t* words);  // a bit for each byte written
// Forgets what is held in [offset, offset + bytes): reading it before the next write is an error.
void poison(Memory& memory, uint64_t offset, uint64_t bytes);

enum GlobalUse : uint8_t { kRead = 0, kWrite = 1, kAtomic = 2 };
void global_access(Pipe& pipe, const void* address, uint64_t bytes, GlobalUse use, const char* what);

// The memory that kernels of this call may touch: the call's tensors and workspace.
void forget_regions();
void add_region(const void* address, uint64_t bytes, const char* what, int rank = -1);  // -1: of every rank

// ---- running ------------------------------------------------------------------------------------------------------

void wait_until(bool (*ready)(void*), void* context, const char* what, Where where);

// What one rank adds to a launch: a kernel on the cube cores [first_group, first_group + groups) with their vector cores.
struct Part {
  void (*body)(void*);
  void* context;
  int cubes, vectors;  // cores of a block: 0, 1 | 1, 0 | 1, 2
  int64_t blocks;
  int first_group, groups, rank;
};
void launch(Stream& stream, const char* name, int cubes, int vectors, int64_t blocks, void (*body)(void*),
            void* context);
void launch_parts(Stream& stream, const char* name, const Part* parts, int count);  // several run at the same time

// The UB that a pointer from GetPhyAddr lies in.
inline Memory& memory_of_pointer(Core& core, const void* address) {
  const auto* byte = static_cast<const uint8_t*>(address);
  Memory& ub = core.memory[kUb];
  if (ub.data == nullptr || byte < ub.data || byte >= ub.data + ub.bytes)
    give_up("%p is no address in the UB of %s", address, place(core).c_str());
  return ub;
}

}  // namespace twin
