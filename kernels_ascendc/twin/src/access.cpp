// What an access to memory must satisfy: bounds, order, and that what is read was written.
#include <inttypes.h>
#include <stdio.h>

#include <algorithm>

#include "machine_private.h"
#include "shadow.h"
#include "trace.h"
#include "walk.h"
#include "twin/types.h"

namespace twin {
namespace {

const char* const kPipeNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};

// Which reader array of a memory a pipe uses; -1: that pipe has no path from there.
int reader_slot(const Memory& memory, uint8_t pipe) {
  switch (memory.kind) {
    case kUb: return pipe == kV ? 0 : pipe == kMte3 ? 1 : pipe == kS ? 2 : -1;
    case kL1: return pipe == kMte1 ? 0 : pipe == kFix ? 1 : -1;
    case kL0c: return pipe == kM ? 0 : pipe == kFix ? 1 : -1;
    case kFixbuf: return pipe == kFix ? 0 : -1;
    default: return pipe == kM ? 0 : -1;
  }
}

const Record* record_of(const Group& group, uint32_t epoch) {
  const uint32_t tid = epoch >> kClockBits, clock = epoch & kClockMask;
  const Pipe& pipe = group.core[tid / 8].pipe[tid % 8];
  if (clock <= pipe.first || clock - pipe.first > pipe.history.size()) return nullptr;
  return &pipe.history[clock - pipe.first - 1];
}

std::string describe(const Group& group, uint32_t epoch) {
  const uint32_t tid = epoch >> kClockBits;
  const Record* record = record_of(group, epoch);
  char text[320];
  snprintf(text, sizeof text, "%s at %s:%d (pipe %s of %s)", record ? kOpNames[record->op] : "an instruction",
           record ? record->where().file : "?", record ? record->line : 0, kPipeNames[tid % 8],
           place(group.core[tid / 8]).c_str());
  return text;
}

Where site(const Group& group, uint32_t epoch) {
  const Record* record = record_of(group, epoch);
  return record ? record->where() : Where{"?", 0};
}

void report_race(const Pipe& pipe, const Memory& memory, uint32_t block, uint32_t earlier, const char* kinds) {
  const Group& group = *memory.group;
  if (told_before(site(group, earlier), where_now(pipe))) return;
  const uint32_t tid = earlier >> kClockBits;
  char advice[160];
  if (tid == pipe.tid) snprintf(advice, sizeof advice, "PipeBarrier<PIPE_%s> would order them", kPipeNames[pipe.id]);
  else if (tid / 8 == pipe.tid / 8)
    snprintf(advice, sizeof advice, "SetFlag/WaitFlag<%s_%s> would order them", kPipeNames[tid % 8],
             kPipeNames[pipe.id]);
  else snprintf(advice, sizeof advice, "CrossCoreSetFlag/CrossCoreWaitFlag would order them");
  complain("race (%s): %s and %s touch the same bytes of %s at %u unordered; %s", kinds,
           describe(group, earlier).c_str(), describe(*pipe.core->group, pipe.epoch()).c_str(), memory.name, block * 32,
           advice);
}

void check_bounds(const Pipe& pipe, const Memory& memory, uint64_t offset, uint64_t bytes, const char* what) {
  if (memory.data != nullptr && offset + bytes <= memory.bytes && offset <= memory.bytes) return;
  const Where w = where_now(pipe);
  if (memory.data == nullptr)
    give_up("%s at %s:%d: %s names a memory that %s does not have", op_now(pipe), w.file, w.line, what,
            place(*pipe.core).c_str());
  give_up("%s at %s:%d: %s reaches bytes [%" PRIu64 ", %" PRIu64 ") of %s, which has %u", op_now(pipe), w.file, w.line,
          what, offset, offset + bytes, memory.name, memory.bytes);
}

// An operand that begins in a buffer of the running launch ends in it.
void check_buffer(const Pipe& pipe, const Memory& memory, uint64_t offset, uint64_t bytes, const char* what) {
  const uint64_t first = memory.buffer[offset / 32], last = memory.buffer[(offset + bytes - 1) / 32];
  if (__builtin_expect(first == last || first >> 16 != running_launch->number, 1)) return;
  const Where w = where_now(pipe), from = memory.reserved[first & 0xffff];
  if (told_before(w, {what, -4})) return;
  complain("%s at %s:%d on %s: %s, %" PRIu64 " bytes from %" PRIu64 " of %s on, runs over the end of the buffer of InitBuffer at %s:%d",
           op_now(pipe), w.file, w.line, place(*pipe.core).c_str(), what, bytes, offset, memory.name, from.file, from.line);
}

Run run_of(const Pipe& pipe, Memory& memory, int slot) {
  return {memory.writer,       memory.valid, {memory.reader[0], memory.reader[1], memory.reader[2]},
          (int)memory.readers, slot,         pipe.known.at,
          memory.group->birth, pipe.epoch(), true};
}

bool fresh(const Memory& memory, uint32_t e) { return (e & kClockMask) > memory.group->birth[e >> kClockBits]; }

// A block that is not fully read, or that broke a rule: the slow way, with a report.
void read_block(Pipe& pipe, Memory& memory, uint32_t block, uint32_t bytes, int slot,
                const char* what) {  // bytes 0: order only
  const uint32_t writer = memory.writer[block];
  if (!pipe.knows(writer)) report_race(pipe, memory, block, writer, "write, then read");
  const uint32_t held = fresh(memory, writer) ? memory.valid[block] : 0;
  if ((held & bytes) != bytes && !told_before(where_now(pipe), {what, -1})) {
    const Where w = where_now(pipe);
    complain("%s at %s:%d reads bytes of %s at %u (%s) that nothing has written", op_now(pipe), w.file, w.line,
             memory.name, block * 32 + (uint32_t)__builtin_ctz(bytes & ~held), what);
  }
  memory.reader[slot][block] = pipe.epoch();
}

void write_block(Pipe& pipe, Memory& memory, uint32_t block, uint32_t bytes) {
  if (!pipe.knows(memory.writer[block])) report_race(pipe, memory, block, memory.writer[block], "write, then write");
  for (uint32_t k = 0; k < memory.readers; ++k)
    if (!pipe.knows(memory.reader[k][block]))
      report_race(pipe, memory, block, memory.reader[k][block], "read, then write");
  memory.valid[block] = fresh(memory, memory.writer[block]) ? memory.valid[block] | bytes : bytes;
  memory.writer[block] = pipe.epoch();
}

uint32_t byte_mask(uint64_t from, uint64_t to) {  // bits [from, to) of a block, to - from <= 32
  const uint64_t ones = ((uint64_t(1) << (to - from)) - 1) << from;
  return (uint32_t)ones;
}

template <class Block, class Blocks> void over_blocks(uint64_t offset, uint64_t bytes, Block block, Blocks blocks) {
  uint64_t at = offset;
  const uint64_t end = offset + bytes;
  if (at % 32 != 0 && at < end) {
    const uint64_t stop = std::min(end, (at / 32 + 1) * 32);
    block((uint32_t)(at / 32), byte_mask(at % 32, stop - at / 32 * 32));
    at = stop;
  }
  if (end - at >= 32) {
    blocks((uint32_t)(at / 32), (uint32_t)(end / 32));
    at = end / 32 * 32;
  }
  if (at < end) block((uint32_t)(at / 32), byte_mask(0, end - at));
}

}  // namespace

bool told_before(Where a, Where b) {
  const std::pair<uint64_t, uint64_t> key{(uint64_t)(uintptr_t)a.file * 131071 + (uint64_t)a.line,
                                          (uint64_t)(uintptr_t)b.file * 131071 + (uint64_t)(int64_t)b.line};
  auto& told = running_launch->told;
  if (std::find(told.begin(), told.end(), key) != told.end()) return true;
  told.push_back(key);
  return false;
}

bool told_before_here(Where where) { return told_before(where, {"here", -2}); }

namespace {

// The commonest access, 256 bytes of one vector instruction: eight blocks that one instruction wrote and that hold
// values. False when anything else must be looked at.
constexpr uint32_t kQuick = 8;
bool quick_read(const Pipe& pipe, const Memory& memory, uint32_t first, int slot) {
  const uint32_t *writer = memory.writer + first, *valid = memory.valid + first, w = writer[0];
  uint32_t differs = 0, holes = 0;
  for (uint32_t i = 0; i < kQuick; ++i) differs |= writer[i] ^ w, holes |= ~valid[i];
  if ((differs | holes) != 0 || !pipe.knows(w) || !fresh(memory, w)) return false;
  uint32_t* seen = memory.reader[slot] + first;
  const uint32_t epoch = pipe.epoch();
  for (uint32_t i = 0; i < kQuick; ++i) seen[i] = epoch;
  return true;
}

bool quick_write(const Pipe& pipe, const Memory& memory, uint32_t first) {
  uint32_t *writer = memory.writer + first, *valid = memory.valid + first;
  const uint32_t w = writer[0];
  uint32_t differs = 0;
  for (uint32_t i = 0; i < kQuick; ++i) differs |= writer[i] ^ w;
  bool good = pipe.knows(w);
  for (uint32_t k = 0; k < memory.readers; ++k) {
    const uint32_t *seen = memory.reader[k] + first, s = seen[0];
    for (uint32_t i = 0; i < kQuick; ++i) differs |= seen[i] ^ s;
    good = good && pipe.knows(s);
  }
  if (differs != 0 || !good) return false;
  const uint32_t epoch = pipe.epoch();
  for (uint32_t i = 0; i < kQuick; ++i) writer[i] = epoch, valid[i] = ~0u;
  return true;
}

bool is_quick(uint64_t offset, uint64_t bytes) { return offset % 32 == 0 && bytes == kQuick * 32; }

}  // namespace

const uint8_t* load_quick(Pipe& pipe, Memory& memory, uint64_t offset) {
  const int slot = reader_slot(memory, pipe.id);
  if (slot < 0 || memory.data == nullptr || offset + kQuick * 32 > memory.bytes || offset % 32 != 0) return nullptr;
  return quick_read(pipe, memory, (uint32_t)(offset / 32), slot) ? memory.data + offset : nullptr;
}

const uint8_t* load(Pipe& pipe, Memory& memory, uint64_t offset, uint64_t bytes, const char* what) {
  if (__builtin_expect(tracing, 0)) note_memories(memory.kind, -1);
  check_bounds(pipe, memory, offset, bytes, what);
  const int slot = reader_slot(memory, pipe.id);
  if (slot < 0) {
    const Where w = where_now(pipe);
    give_up("%s at %s:%d: pipe %s cannot read %s", op_now(pipe), w.file, w.line, kPipeNames[pipe.id], memory.name);
  }
  if (bytes != 0) check_buffer(pipe, memory, offset, bytes, what);
  if (is_quick(offset, bytes) && quick_read(pipe, memory, (uint32_t)(offset / 32), slot)) return memory.data + offset;
  over_blocks(
      offset, bytes, [&](uint32_t block, uint32_t mask) { read_block(pipe, memory, block, mask, slot, what); },
      [&](uint32_t first, uint32_t last) {
        const Run run = run_of(pipe, memory, slot);
        while ((first = shadow_kernels().read(run, first, last)) < last)
          read_block(pipe, memory, first++, ~0u, slot, what);
      });
  return memory.data + offset;
}

uint8_t* store(Pipe& pipe, Memory& memory, uint64_t offset, uint64_t bytes, const char* what) {
  if (__builtin_expect(tracing, 0)) note_memories(-1, memory.kind);
  check_bounds(pipe, memory, offset, bytes, what);
  if (bytes != 0) check_buffer(pipe, memory, offset, bytes, what);
  if (is_quick(offset, bytes) && quick_write(pipe, memory, (uint32_t)(offset / 32))) return memory.data + offset;
  over_blocks(
      offset, bytes, [&](uint32_t block, uint32_t mask) { write_block(pipe, memory, block, mask); },
      [&](uint32_t first, uint32_t last) {
        const Run run = run_of(pipe, memory, 0);
        while ((first = shadow_kernels().write(run, first, last)) < last) write_block(pipe, memory, first++, ~0u);
      });
  return memory.data + offset;
}

uint8_t* store_some(Pipe& pipe, Memory& memory, uint64_t offset, uint32_t bytes_of_block, const char* what) {
  check_bounds(pipe, memory, offset, 32, what);
  if (bytes_of_block != 0) write_block(pipe, memory, (uint32_t)(offset / 32), bytes_of_block);
  return memory.data + offset;
}

const uint8_t* load_some(Pipe& pipe, Memory& memory, uint64_t offset, uint32_t bytes_of_block, const char* what) {
  check_bounds(pipe, memory, offset, 32, what);
  const int slot = reader_slot(memory, pipe.id);
  if (bytes_of_block != 0) read_block(pipe, memory, (uint32_t)(offset / 32), bytes_of_block, slot < 0 ? 0 : slot, what);
  return memory.data + offset;
}

const uint8_t* load_unchecked(Pipe& pipe, Memory& memory, uint64_t offset, uint64_t bytes, const char* what) {
  if (__builtin_expect(tracing, 0)) note_memories(memory.kind, -1);
  check_bounds(pipe, memory, offset, bytes, what);
  const int slot = reader_slot(memory, pipe.id);
  if (slot < 0) return load(pipe, memory, offset, bytes, what);
  Run run = run_of(pipe, memory, slot);
  run.need_valid = false;
  const uint32_t last = (uint32_t)((offset + bytes + 31) / 32);
  for (uint32_t first = (uint32_t)(offset / 32); (first = shadow_kernels().read(run, first, last)) < last;)
    read_block(pipe, memory, first++, 0, slot, what);
  return memory.data + offset;
}

bool holds(const Memory& memory, uint64_t first_block, uint64_t blocks, uint32_t bytes_of_block) {
  bool all = true;
  for (uint64_t b = first_block; b < first_block + blocks; ++b)
    all = all && (memory.valid[b] & bytes_of_block) == bytes_of_block && fresh(memory, memory.writer[b]);
  return all;
}

void valid_bytes(const Memory& memory, uint64_t first_block, uint64_t blocks, uint32_t* words) {
  for (uint64_t i = 0; i < blocks; ++i)
    words[i] = fresh(memory, memory.writer[first_block + i]) ? memory.valid[first_block + i] : 0;
}

void move_blocks(Pipe& pipe, Memory& from, uint64_t source, Memory& to, uint64_t target, uint64_t bytes) {
  const uint8_t* data = load_unchecked(pipe, from, source, bytes, "the source");
  memcpy(store(pipe, to, target, bytes, "the destination"), data, bytes);
  const uint32_t *writer = from.writer + source / 32, *valid = from.valid + source / 32, w = writer[0];
  uint32_t differs = 0, holes = 0;
  for (uint64_t b = 0; b < bytes / 32; ++b) differs |= writer[b] ^ w, holes |= ~valid[b];
  if ((differs | holes) == 0 && fresh(from, w)) return;  // all written, as store has noted
  for (uint64_t b = 0; b < bytes / 32; ++b)
    to.valid[target / 32 + b] = fresh(from, from.writer[source / 32 + b]) ? from.valid[source / 32 + b] : 0;
}

void poison(Memory& memory, uint64_t offset, uint64_t bytes) {
  if (memory.data == nullptr) return;
  for (uint64_t block = offset / 32; block < (offset + bytes) / 32; ++block) memory.valid[block] = 0;
}

// ---- global memory ------------------------------------------------------------------------------------------------

namespace {
struct Region {
  uint64_t first, last;
  const char* what;
  int rank;
};
std::vector<Region> regions;
size_t last_region = 0;
}  // namespace

void forget_regions() {
  regions.clear();
  last_region = 0;
}
void add_region(const void* address, uint64_t bytes, const char* what, int rank) {
  if (bytes != 0) regions.push_back({(uint64_t)(uintptr_t)address, (uint64_t)(uintptr_t)address + bytes, what, rank});
}

void global_access(Pipe& pipe, const void* address, uint64_t bytes, GlobalUse use, const char* what) {
  if (bytes == 0) return;
  const uint64_t at = (uint64_t)(uintptr_t)address;
  const int rank = pipe.core->rank;
  const auto holds = [&](const Region& r) {
    return at >= r.first && at + bytes <= r.last && (r.rank < 0 || r.rank == rank);
  };
  if (!regions.empty() && !holds(regions[last_region])) {
    size_t i = 0;
    while (i < regions.size() && !holds(regions[i])) ++i;
    if (i == regions.size()) {
      const Where w = where_now(pipe);
      give_up("%s at %s:%d on %s: %s takes %" PRIu64
              " bytes of global memory at %p, outside of every tensor of the call%s",
              op_now(pipe), w.file, w.line, place(*pipe.core).c_str(), what, bytes, address,
              window_bounds(at, bytes).c_str());
    }
    last_region = i;
  }
  if (__builtin_expect(tracing, 0))
    note_global(regions.empty() ? at : at - regions[last_region].first, bytes, last_region, use);
  Launch& launch = *running_launch;
  if (launch.ranks > 0 && window_access(pipe, at, bytes, use)) return;
  if (pipe.saved < 0) {
    pipe.saved = (int32_t)launch.saved.size();
    launch.saved.push_back({pipe.known, pipe.foreign});
  }
  if (!launch.accesses.empty()) {
    GlobalAccess& last = launch.accesses.back();
    if (last.clock == pipe.now && last.tid == pipe.tid && last.group == pipe.core->group->index && last.use == use &&
        last.address + last.bytes == at && last.bytes + bytes < 1u << 30) {
      last.bytes += (uint32_t)bytes;
      return;
    }
  }
  launch.accesses.push_back({at, (uint32_t)bytes, pipe.now, pipe.saved, (uint16_t)pipe.core->group->index,
                             (uint8_t)pipe.tid, use, pipe.core->atomic_type});
}

namespace {

uint32_t known_of(const GlobalAccess& later, const GlobalAccess& earlier) {
  const SavedClocks& saved = running_launch->saved[(size_t)later.saved];
  return earlier.group == later.group ? saved.known.at[earlier.tid]
                                      : saved.foreign[(size_t)earlier.group * kTids + earlier.tid];
}

bool ordered(const GlobalAccess& a, const GlobalAccess& b) {
  if (a.group == b.group && a.tid == b.tid) {
    if (a.clock == b.clock || group_at(a.group).core[a.tid / 8].pipe[a.tid % 8].self_ordered) return true;
    return a.clock < b.clock ? known_of(b, a) >= a.clock : known_of(a, b) >= b.clock;
  }
  return known_of(b, a) >= a.clock || known_of(a, b) >= b.clock;
}

void check_pair(const GlobalAccess& a, const GlobalAccess& b) {
  if (ordered(a, b)) return;
  const Group &ga = group_at(a.group), &gb = group_at(b.group);
  const uint32_t ea = (uint32_t)a.tid << kClockBits | a.clock, eb = (uint32_t)b.tid << kClockBits | b.clock;
  const bool atomics = a.use == kAtomic && b.use == kAtomic;
  if (atomics && (a.atomic_type > BF16 || !running_launch->stream->ordered_atomics)) return;
  if (told_before(site(ga, ea), site(gb, eb))) return;
  if (atomics) {
    complain(
        "%s and %s add floats atomically to the same global memory in an order left to chance, so their sum has no "
        "fixed bits",
        describe(ga, ea).c_str(), describe(gb, eb).c_str());
    return;
  }
  static const char* const kUses[] = {"reads", "writes", "adds atomically"};
  complain("race in global memory: %s %s, and %s %s, %" PRIu64 " bytes in common, unordered", describe(ga, ea).c_str(),
           kUses[a.use], describe(gb, eb).c_str(), kUses[b.use],
           std::min(a.address + a.bytes, b.address + b.bytes) - std::max(a.address, b.address));
}

}  // namespace

std::string describe_access(const GlobalAccess& access) {
  return describe(group_at(access.group), (uint32_t)access.tid << kClockBits | access.clock);
}

void check_global_log(Launch& launch) {
  auto& log = launch.accesses;
  if (std::none_of(log.begin(), log.end(), [](const GlobalAccess& a) { return a.use != kRead; })) return;
  std::stable_sort(log.begin(), log.end(),
                   [](const GlobalAccess& a, const GlobalAccess& b) { return a.address < b.address; });
  std::vector<const GlobalAccess*> reads, writes;  // those that may still overlap what follows
  size_t clean_reads_at = 64;
  const auto drop = [](std::vector<const GlobalAccess*>& open, uint64_t address) {
    size_t kept = 0;
    for (const GlobalAccess* a : open)
      if (a->address + a->bytes > address) open[kept++] = a;
    open.resize(kept);
  };
  for (const GlobalAccess& access : log) {
    drop(writes, access.address);
    for (const GlobalAccess* other : writes) check_pair(*other, access);
    if (access.use == kRead) {
      if (reads.size() >= clean_reads_at) {
        drop(reads, access.address);
        clean_reads_at = std::max<size_t>(64, reads.size() * 2);
      }
      reads.push_back(&access);
      continue;
    }
    drop(reads, access.address);
    for (const GlobalAccess* other : reads) check_pair(*other, access);
    writes.push_back(&access);
  }
}

}  // namespace twin
