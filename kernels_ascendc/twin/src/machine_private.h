// Shared by the sources of the machine: a launch in progress.
#pragma once

#include <string.h>

#include <deque>
#include <memory>
#include <utility>

#include "fiber.h"
#include "twin/machine.h"

namespace twin {

struct Task {
  Fiber fiber;
  Core* core;
  const Part* part;
  bool finished;
  bool (*ready)(void*);
  void* ready_context;
  std::string waits_for;
  Where waits_at;
  bool polls;             // it looked at a flag of a peer, and looks again when others had their turn
  uint64_t writes_seen;   // flag words written by peers when it last looked
  const void* flag;       // the flag word it read last
};

// One access to global memory; checked against the others when the launch has ended.
struct GlobalAccess {
  uint64_t address;
  uint32_t bytes, clock;
  int32_t saved;
  uint16_t group;
  uint8_t tid, use;
  uint8_t atomic_type;
};

struct SavedClocks {
  Clocks known;
  const uint32_t* foreign;
};

struct Launch {
  uint64_t number;  // of all launches of this process
  Stream* stream;
  const char* name;
  std::vector<Part> parts;
  int ranks;  // 0: no ranks, one kernel on one chip
  bool aborted;
  Task* task;
  std::deque<Task> tasks;
  std::vector<Fiber> stacks;  // kept from launch to launch
  std::vector<std::unique_ptr<uint32_t[]>> foreigns;
  size_t foreigns_used;
  std::vector<GlobalAccess> accesses;
  std::vector<SavedClocks> saved;
  std::vector<std::pair<uint64_t, uint64_t>> told;  // pairs of sites already reported
  std::vector<std::deque<Snapshot>> rounds;         // arrivals of mode 0, by kind, id and core
  uint64_t round_number;
  bool all_at_once;  // no block has to wait for another one's core
  uint64_t flag_writes;  // into windows of ranks
  int64_t idle_cycles;   // time that passed while every core waited

  static constexpr size_t foreign_words() { return 36 * kTids; }  // the largest chip
  uint32_t* new_foreign();
  void reset(Stream& s, const char* n);
  void start_tasks(int count);
  const Part& part_of(int rank) const { return parts[(size_t)rank]; }
};

extern Launch* running_launch;
Group& group_at(int index);
void finish_block(Core& core);     // unpaired flags and the like
void finish_wave(Launch& launch);  // unpaired flags between cores
void check_global_log(Launch& launch);
const uint32_t* join_foreign(const uint32_t* a, const uint32_t* b);
bool told_before(Where a, Where b);
std::string describe_access(const GlobalAccess& access);

// Windows of ranks (peer.cpp). `window_access`: whether this was a flag word, which orders and is not logged.
bool window_access(Pipe& pipe, uint64_t address, uint64_t bytes, GlobalUse use);
std::string window_bounds(uint64_t address, uint64_t bytes);  // what a window has to say of an access that no region holds
std::string polled(const Task& task);
bool let_time_pass(Launch& launch);
void check_windows(Launch& launch);

}  // namespace twin
