// Building the chip, running a launch on it, and what ends a launch early.
#include "machine_private.h"
#include "trace.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace twin {

const char* const kOpNames[kOps] = {
#define TWIN_OP(name, pipe, grade, page, note) #name,
#include "twin/instructions.def"
#undef TWIN_OP
};

// Core counts and memory sizes: the vendor compiler's target table.
const Soc kSocs[] = {{"Ascend950DT_9591", 36, 72}, {"Ascend950PR_9599", 36, 72}, {"Ascend950DT_9581", 32, 64},
                     {"Ascend950PR_9589", 32, 64}, {"Ascend950DT_9571", 28, 56}, {"Ascend950PR_9579", 28, 56},
                     {"Ascend950DT_950x", 8, 16},  {"Ascend950PR_950z", 4, 8}};

const Soc* find_soc(const char* name) {
  for (const Soc& soc : kSocs)
    if (strcmp(soc.name, name) == 0) return &soc;
  return nullptr;
}

Core* current = nullptr;
Launch* running_launch = nullptr;

namespace {

std::vector<std::unique_ptr<Group>> groups;

void* zero_pages(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

struct MemorySize {
  MemoryKind kind;
  const char* name;
  uint32_t bytes, readers;
};
const MemorySize kCubeMemories[] = {{kL1, "L1", 512 * 1024, 3},    {kL0a, "L0A", 64 * 1024, 1},
                                    {kL0b, "L0B", 64 * 1024, 1},   {kL0c, "L0C", 256 * 1024, 2},
                                    {kBias, "BiasTable", 4096, 1}, {kFixbuf, "the Fixpipe buffer", 4096, 1},
                                    {kL0aMx, "L0A_MX", 4096, 1},   {kL0bMx, "L0B_MX", 4096, 1}};
const MemorySize kVectorMemories[] = {{kUb, "UB", 248 * 1024, 3}};

void build_memory(Core& core, const MemorySize& size) {
  const size_t blocks = size.bytes / 32;
  Memory& memory = core.memory[size.kind];
  memory = {size.name,  size.kind,    static_cast<uint8_t*>(zero_pages(size.bytes)),
            size.bytes, size.readers, nullptr,
            nullptr,    {},           core.group,
            nullptr,    {}};
  memory.writer = static_cast<uint32_t*>(zero_pages(blocks * 4 * 5));
  memory.valid = memory.writer + blocks;
  for (int i = 0; i < 3; ++i) memory.reader[i] = memory.writer + (2 + i) * blocks;
  memory.buffer = static_cast<uint64_t*>(zero_pages(blocks * 8));
}

void build_group(Group& group, int index) {
  group = {};
  group.index = index;
  for (int c = 0; c < 3; ++c) {
    Core& core = group.core[c];
    core.group = &group;
    core.kind = static_cast<CoreKind>(c);
    core.flags = static_cast<Flag*>(zero_pages(sizeof(Flag) * 512));
    for (int p = 0; p < kPipes; ++p) {
      Pipe& pipe = core.pipe[p];
      pipe.id = (uint8_t)p;
      pipe.tid = (uint32_t)(c * 8 + p);
      pipe.core = &core;
      pipe.self_ordered = p == kS || p == kV;
      pipe.saved = -1;
    }
    for (const MemorySize& size : kCubeMemories)
      core.memory[size.kind] = {size.name, size.kind, nullptr, size.bytes, 0, nullptr, nullptr, {}, &group, nullptr, {}};
    for (const MemorySize& size : kVectorMemories)
      core.memory[size.kind] = {size.name, size.kind, nullptr, size.bytes, 0, nullptr, nullptr, {}, &group, nullptr, {}};
    if (c == 0)
      for (const MemorySize& size : kCubeMemories) build_memory(core, size);
    else
      for (const MemorySize& size : kVectorMemories) build_memory(core, size);
  }
}

void restart_clocks(Group& group) {
  for (Core& core : group.core) {
    for (Pipe& pipe : core.pipe) pipe.now = 0;
    for (Memory& m : core.memory)
      if (m.data != nullptr) memset(m.writer, 0, m.bytes / 32 * 20);
  }
}

uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

}  // namespace

Group& group_at(int index) { return *groups[(size_t)index]; }

std::string place(const Core& core) {
  char text[64];
  int group = core.group->index;
  char rank[32] = "";
  if (running_launch != nullptr && running_launch->ranks > 0) {
    group -= running_launch->part_of(core.rank).first_group;
    snprintf(rank, sizeof rank, " of rank %d", core.rank);
  }
  if (core.kind == kCube) snprintf(text, sizeof text, "cube core %d%s", group, rank);
  else snprintf(text, sizeof text, "vector core %d%s", group * 2 + core.kind - 1, rank);
  return text;
}

static void add_report(const char* text, va_list rest) {
  char line[1024];
  vsnprintf(line, sizeof line, text, rest);
  Stream& stream = *running_launch->stream;
  ++stream.problems;
  if (stream.problems > 64) return;
  stream.report += running_launch->name;
  stream.report += ": ";
  stream.report += line;
  stream.report += '\n';
}

void complain(const char* text, ...) {
  va_list rest;
  va_start(rest, text);
  add_report(text, rest);
  va_end(rest);
}

void give_up(const char* text, ...) {
  va_list rest;
  va_start(rest, text);
  if (running_launch == nullptr) {
    char line[1024];
    vsnprintf(line, sizeof line, text, rest);
    va_end(rest);
    throw std::runtime_error(line);
  }
  add_report(text, rest);
  va_end(rest);
  running_launch->aborted = true;
  leave_fiber(running_launch->task->fiber);
  abort();  // an aborted launch enters no fiber again
}

void wait_until(bool (*ready)(void*), void* context, const char* what, Where where) {
  Task& task = *running_launch->task;
  if (ready(context)) return;
  task.ready = ready;
  task.ready_context = context;
  task.waits_for = what;
  task.waits_at = where;
  while (!ready(context)) leave_fiber(task.fiber);
  task.ready = nullptr;
}

static void report_deadlock(Launch& launch) {
  std::string text = "deadlock:";
  for (Task& task : launch.tasks) {
    if (task.finished) continue;
    char line[512];
    snprintf(line, sizeof line, " %s waits at %s:%d for %s;", place(*task.core).c_str(), task.waits_at.file,
             task.waits_at.line, task.polls ? polled(task).c_str() : task.waits_for.c_str());
    if (text.size() + strlen(line) < 900) text += line;
  }
  complain("%s", text.c_str());
  launch.aborted = true;
}

static void run_task(void* context) {
  Task& task = *static_cast<Task*>(context);
  task.part->body(task.part->context);
  task.finished = true;
}

static void run_wave(Launch& launch) {
  uint64_t random = launch.stream->seed * 0x9e3779b97f4a7c15ull + 0x1234567ull;
  size_t left = launch.tasks.size();
  while (left > 0 && !launch.aborted) {
    bool moved = false;
    const size_t n = launch.tasks.size(), start = next_random(random) % n, step = (next_random(random) & 1) ? 1 : n - 1;
    for (size_t k = 0, i = start; k < n && !launch.aborted; ++k, i = (i + step) % n) {
      Task& task = launch.tasks[i];
      if (task.finished || (task.ready != nullptr && !task.ready(task.ready_context))) continue;
      const uint64_t writes = launch.flag_writes;
      const bool idle = task.polls && task.writes_seen == writes;  // nothing is new since it last looked
      current = task.core;
      launch.task = &task;
      enter_fiber(task.fiber);
      moved = moved || !idle || !task.polls || launch.flag_writes != writes;
      if (task.finished) {
        --left;
        if (!launch.aborted) finish_block(*task.core);
      }
    }
    if (!moved && !launch.aborted && !let_time_pass(launch)) report_deadlock(launch);
  }
  current = nullptr;
}

static void start_core(Core& core, int block, int blocks, int sub_block, int ratio) {
  core.block = block;
  core.blocks = blocks;
  core.sub_block = sub_block;
  core.ratio = ratio;
  core.mask[0] = core.mask[1] = ~0ull;
  core.count_mode = false;
  core.atomic_op = 0;
  core.pipe_object = nullptr;
  core.static_where = {};
  for (const Pipe& pipe : core.pipe) core.closed[pipe.id] = pipe.now;
  core.unit_m_set = core.unit_fix_set = false;
  core.in_vector_function = false;
  memset(core.event_ids, 0, sizeof core.event_ids);
  memset(core.allocated, 0, sizeof core.allocated);
}

static void begin_wave(Launch& launch, int used) {
  uint32_t* all = launch.new_foreign();
  for (int g = 0; g < used; ++g) {
    Group& group = group_at(g);
    for (Core& core : group.core)
      for (Pipe& pipe : core.pipe) group.birth[pipe.tid] = pipe.now;
    memcpy(all + g * kTids, group.birth, sizeof group.birth);
  }
  for (int g = 0; g < used; ++g)
    for (Core& core : group_at(g).core)
      for (Pipe& pipe : core.pipe) {
        memcpy(pipe.known.at, group_at(g).birth, sizeof group_at(g).birth);
        pipe.foreign = all;
        pipe.saved = -1;
      }
}

static void clean_after_abort(Launch& launch) {
  for (Task& task : launch.tasks) {
    memset(static_cast<void*>(task.core->flags), 0, sizeof(Flag) * 512);
    task.finished = true;
  }
}

void launch(Stream& stream, const char* name, int cubes, int vectors, int64_t blocks, void (*body)(void*),
            void* context) {
  const Part whole{body, context, cubes, vectors, blocks, 0, stream.groups, -1};
  launch_parts(stream, name, &whole, 1);
}

namespace {

int blocks_at_once(const Part& part) { return part.groups * (part.cubes == 0 ? 2 : 1); }

// Makes the tasks of blocks [first, first + count) of a part; returns the next free one.
size_t start_blocks(Launch& launch, const Part& part, int64_t first, int count, size_t t) {
  for (int b = 0; b < count; ++b) {
    const int block = (int)first + b, vectors = part.vectors;
    Group& group = group_at(part.first_group + (part.cubes == 0 ? b / 2 : b));
    for (int c = part.cubes == 0 ? 1 + b % 2 : 0; c <= (part.cubes == 0 ? 1 + b % 2 : vectors); ++c) {
      Core& core = group.core[c];
      if (part.cubes == 0) start_core(core, block, (int)part.blocks, 0, 1);
      else
        start_core(core, c == 0 ? block : block * vectors + c - 1, (int)part.blocks, c == 0 ? 0 : c - 1,
                   vectors > 0 ? vectors : 1);
      core.rank = part.rank < 0 ? 0 : part.rank;
      launch.tasks[t].part = &part;
      launch.tasks[t++].core = &core;
    }
  }
  return t;
}

// Blocks [first, ...) of every part, as many as there are cores for. Returns false when none was left.
bool run_blocks(Launch& launch, int64_t first) {
  int tasks = 0, used = 0;
  const auto count = [&](const Part& part) {
    return (int)std::max<int64_t>(0, std::min<int64_t>(part.blocks - first, blocks_at_once(part)));
  };
  for (const Part& part : launch.parts) {
    const int n = count(part);
    tasks += n * (part.cubes == 0 ? 1 : 1 + part.vectors);
    if (n > 0) used = std::max(used, part.first_group + (part.cubes == 0 ? (n + 1) / 2 : n));
  }
  if (tasks == 0) return false;
  launch.start_tasks(tasks);
  size_t t = 0;
  for (const Part& part : launch.parts) t = start_blocks(launch, part, first, count(part), t);
  begin_wave(launch, used);
  for (Task& task : launch.tasks) prepare_fiber(task.fiber, run_task, &task);
  run_wave(launch);
  if (launch.aborted) clean_after_abort(launch);
  finish_wave(launch);
  return true;
}

void begin_groups(int count) {
  while ((int)groups.size() < count) {
    groups.emplace_back(new Group);
    build_group(*groups.back(), (int)groups.size() - 1);
  }
  for (int g = 0; g < count; ++g) {
    bool full = false;
    for (Core& core : group_at(g).core)
      for (Pipe& pipe : core.pipe) { full = full || pipe.now > kClockMask / 2; }
    if (full) restart_clocks(group_at(g));
    for (Core& core : group_at(g).core)
      for (Pipe& pipe : core.pipe) pipe.first = pipe.now, pipe.history.clear();
  }
}

}  // namespace

void launch_parts(Stream& stream, const char* name, const Part* parts, int count) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  timespec begun, ended;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  static Launch launch;
  launch.reset(stream, name);
  launch.parts.assign(parts, parts + count);
  launch.ranks = parts[0].rank < 0 ? 0 : count;
  running_launch = &launch;
  begin_trace(stream, name);
  int used = 0;
  int64_t at_once = 1 << 20;
  launch.all_at_once = true;
  for (Part& part : launch.parts) {
    if (part.blocks < 0 || part.blocks > (1 << 20))
      complain("%lld blocks cannot be launched", (long long)part.blocks), part.blocks = 0;
    launch.all_at_once = launch.all_at_once && part.blocks <= blocks_at_once(part);
    at_once = std::min<int64_t>(at_once, blocks_at_once(part));
    used = std::max(used, part.first_group + part.groups);
  }
  if (count > 1 && !launch.all_at_once) complain("a rank has more blocks than cores, so that ranks cannot run at once");
  else {
    begin_groups(used);
    for (int64_t first = 0; !launch.aborted && run_blocks(launch, first);) first += at_once;
    check_global_log(launch);
    if (launch.ranks > 0) check_windows(launch);
  }
  tracing = false;
  running_launch = nullptr;
  clock_gettime(CLOCK_MONOTONIC, &ended);
  stream.launch_ms = (double)(ended.tv_sec - begun.tv_sec) * 1e3 + (double)(ended.tv_nsec - begun.tv_nsec) * 1e-6;
}

Stream* stream_of(void* handle) {
  static Stream usual{&kSocs[0], kSocs[0].cubes, 1, false, true, {}, {}, 0, 0.0};
  return handle == nullptr ? &usual : static_cast<Stream*>(handle);
}

}  // namespace twin
