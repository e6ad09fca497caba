// Knowledge and how it travels: releases, acquires, barriers, and flags between cores.
#include "machine_private.h"
#include "trace.h"

namespace twin {

uint32_t* Launch::new_foreign() {
  if (foreigns_used == foreigns.size()) foreigns.emplace_back(new uint32_t[foreign_words()]);
  uint32_t* words = foreigns[foreigns_used++].get();
  memset(words, 0, foreign_words() * sizeof *words);
  return words;
}

void Launch::reset(Stream& s, const char* n) {
  ++number;
  stream = &s;
  name = n;
  aborted = false;
  task = nullptr;
  foreigns_used = 0;
  accesses.clear();
  saved.clear();
  told.clear();
  rounds.clear();
  round_number = 0;
  flag_writes = 0;
  idle_cycles = 0;
}

void Launch::start_tasks(int count) {
  while ((int)tasks.size() > count) tasks.pop_back();
  for (Task& old : tasks) old.ready = nullptr, old.finished = false, old.polls = false, old.writes_seen = ~uint64_t(0);
  while ((int)tasks.size() < count) {
    tasks.emplace_back();
    Task& task = tasks.back();
    if (stacks.size() < tasks.size()) stacks.emplace_back();
    task.fiber = stacks[tasks.size() - 1];
    task.finished = false;
    task.ready = nullptr;
    task.polls = false;
    task.writes_seen = ~uint64_t(0);
    if (task.fiber.stack == nullptr) {
      prepare_fiber(task.fiber, nullptr, nullptr);
      stacks[tasks.size() - 1] = task.fiber;
    }
  }
}

const uint32_t* join_foreign(const uint32_t* a, const uint32_t* b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  Launch& launch = *running_launch;
  constexpr size_t n = Launch::foreign_words();
  bool a_covers = true, b_covers = true;
  for (size_t i = 0; i < n; ++i) {
    a_covers = a_covers && a[i] >= b[i];
    b_covers = b_covers && b[i] >= a[i];
  }
  if (a_covers) return a;
  if (b_covers) return b;
  uint32_t* both = launch.new_foreign();
  for (size_t i = 0; i < n; ++i) both[i] = a[i] > b[i] ? a[i] : b[i];
  return both;
}

Snapshot release(const Pipe& pipe) {
  Snapshot snapshot{pipe.known, pipe.foreign, (uint32_t)pipe.core->kind << 8 | pipe.id, pipe.now, {}};
  snapshot.known.at[pipe.tid] = pipe.now;
  return snapshot;
}

static void learn(Pipe& pipe, const Snapshot& from) {
  pipe.known.join(from.known);
  pipe.foreign = join_foreign(pipe.foreign, from.foreign);
  pipe.saved = -1;
}

void acquire(Pipe& pipe, const Snapshot& from, Where where) {
  if (pipe.id == kS) return acquire_by_core(*pipe.core, from, where);
  learn(pipe, from);
  if (tracing) trace_wait(pipe, from, where);
}

// The scalar unit issues everything, so what it has waited for lies behind every instruction that follows.
void acquire_by_core(Core& core, const Snapshot& from, Where where) {
  for (Pipe& pipe : core.pipe) learn(pipe, from);
  if (tracing) trace_wait(core.pipe[kS], from, where);
}

void barrier(Core& core, PipeId id) {
  if (id != kAll) {
    Pipe& pipe = core.pipe[id];
    pipe.known.at[pipe.tid] = pipe.now;
    pipe.saved = -1;
    return;
  }
  Snapshot all = release(core.pipe[0]);
  for (const Pipe& pipe : core.pipe) {
    all.known.join(pipe.known);
    all.known.at[pipe.tid] = pipe.now;
    all.foreign = join_foreign(all.foreign, pipe.foreign);
  }
  for (Pipe& pipe : core.pipe) learn(pipe, all), core.closed[pipe.id] = pipe.now;
}

// The page of static tensors has such kernels end with PipeBarrier<PIPE_ALL>; TPipe does the like for the others.
static void check_closed(const Core& core) {
  if (core.static_where.file == nullptr) return;
  for (const Pipe& pipe : core.pipe) {
    if (pipe.now == core.closed[pipe.id] || told_before(core.static_where, {"closed", -5})) continue;
    const Where last = where_now(pipe);
    complain("%s: the kernel of InitSocState at %s:%d does not end with PipeBarrier<PIPE_ALL>; %s at %s:%d follows the last one",
             place(core).c_str(), core.static_where.file, core.static_where.line, op_now(pipe), last.file, last.line);
  }
}

void finish_block(Core& core) {
  check_closed(core);
  if (core.atomic_op != 0 && !told_before(core.atomic_where, {"atomics", -3}))
    complain("%s: the kernel ends with atomics on, since %s:%d; SetAtomicNone turns them off", place(core).c_str(),
             core.atomic_where.file, core.atomic_where.line);
  for (int i = 0; i < 512; ++i) {
    Flag& flag = core.flags[i];
    if (!flag.set) continue;
    complain("%s: the flag set at %s:%d is never waited for; SetFlag and WaitFlag come in pairs", place(core).c_str(),
             flag.where.file, flag.where.line);
    flag.set = false;
  }
}

void finish_wave(Launch& launch) {
  for (Task& task : launch.tasks) {
    for (int id = 0; id < 32; ++id) {
      CrossFlag& flag = task.core->cross[id];
      if (!launch.aborted && !flag.ready.empty())
        complain("%s: %zu CrossCoreSetFlag of id %d were never waited for, the last one set at %s:%d", place(*task.core).c_str(),
                 flag.ready.size(), id, flag.ready.back().where.file, flag.ready.back().where.line);
      flag.ready.clear();
    }
    task.core->cross_sync.ready.clear();
  }
  for (size_t i = 0; i < launch.rounds.size(); ++i)
    if (!launch.rounds[i].empty()) {
      if (!launch.aborted)
        complain("%zu CrossCoreSetFlag of id %d wait for partners that never set theirs, the last one set at %s:%d",
                 launch.rounds[i].size(), (int)(i % 33), launch.rounds[i].back().where.file, launch.rounds[i].back().where.line);
      launch.rounds[i].clear();
    }
}

}  // namespace twin
