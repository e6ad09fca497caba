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
  bool finished;
  bool (*ready)(void*);
  void* ready_context;
  std::string waits_for;
  Where waits_at;
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
  Stream* stream;
  const char* name;
  void (*body)(void*);
  void* context;
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

  static constexpr size_t foreign_words() { return 36 * kTids; }  // the largest chip
  uint32_t* new_foreign();
  void reset(Stream& s, const char* n, void (*b)(void*), void* c);
  void start_tasks(int count);
};

extern Launch* running_launch;
Group& group_at(int index);
void finish_block(Core& core);     // unpaired flags and the like
void finish_wave(Launch& launch);  // unpaired flags between cores
void check_global_log(Launch& launch);
const uint32_t* join_foreign(const uint32_t* a, const uint32_t* b);
bool told_before(Where a, Where b);

}  // namespace twin
