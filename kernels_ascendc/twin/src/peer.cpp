// Worlds of ranks: windows, their flag words, and what goes wrong between ranks.
#include "twin/peer.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

#include "machine_private.h"

namespace twin {
namespace {

constexpr uint64_t kGuardBytes = 1 << 16, kWorkspaceBytes = 64u << 20;
constexpr int kMostGroups = 36, kMostOfARank = 8;
constexpr int64_t kStepCycles = 10000000, kPatienceCycles = 60000000000;  // 10 ms, a minute

World* active = nullptr;  // whose launch runs

std::string text_of(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text_of(const char* format, ...) {
  char text[512];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  return text;
}

}  // namespace

World::World(int ranks, int cores, uint64_t window_bytes, int flag_kinds, uint64_t seed)
    : ranks_(ranks), kinds_(flag_kinds), window_bytes_(window_bytes), shared_{} {
  if (ranks < 1 || ranks > kMostGroups)
    throw std::invalid_argument(text_of("a world has 1 to %d ranks, got %d", kMostGroups, ranks));
  groups_ = cores == 0 ? std::min(kMostOfARank, kMostGroups / ranks) : cores;
  if (groups_ < 1 || groups_ * ranks > kMostGroups)
    throw std::invalid_argument(
        text_of("%d ranks of %d cube cores are more than the %d there are", ranks, cores, kMostGroups));
  if (flag_kinds < 1 || window_bytes % kFlagBytes != 0 || window_bytes < flag_bytes())
    throw std::invalid_argument(text_of("a window of %" PRIu64 " bytes cannot hold %d flags of %d ranks, 32 bytes each",
                                        window_bytes, flag_kinds, ranks));
  stride_ = (window_bytes + kGuardBytes + 4095) / 4096 * 4096;
  void* memory = mmap(nullptr, stride_ * (uint64_t)ranks, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<uint8_t*>(memory);
  shared_.soc = find_soc("Ascend950DT_9591");
  shared_.groups = groups_;
  shared_.seed = seed;
  shared_.ordered_atomics = true;
  queues_.resize((size_t)ranks);
  flags_.resize((size_t)(ranks * kinds_ * ranks));
  workspaces_.resize((size_t)ranks);
  for (int r = 0; r < ranks; ++r) seats_.push_back({this, r});
  for (int r = 0; r < ranks; ++r) {
    streams_.emplace_back(new Stream(shared_));
    streams_.back()->seat = &seats_[(size_t)r];
  }
}

World::~World() { munmap(base_, stride_ * (uint64_t)ranks_); }

void* World::workspace(int rank) {
  auto& workspace = workspaces_.at((size_t)rank);
  if (workspace == nullptr) workspace.reset(new uint8_t[kWorkspaceBytes]);
  return workspace.get();
}

void World::allow(int rank, const void* address, uint64_t bytes, const char* what) {
  allowed_.push_back({rank, address, bytes, what});
}

void enqueue(Stream& stream, const char* name, int cubes, int vectors, int64_t blocks, std::function<void()> body) {
  World& world = *stream.seat->world;
  world.queues_[(size_t)stream.seat->rank].push_back({name, cubes, vectors, blocks, std::move(body)});
}

std::string World::run() {
  shared_.report.clear();
  shared_.problems = 0;
  shared_.launch_ms = 0;
  size_t longest = 0;
  for (const auto& queue : queues_) longest = std::max(longest, queue.size());
  forget_regions();
  for (int r = 0; r < ranks_; ++r) {
    add_region(window(r), window_bytes_, "a window");
    if (workspaces_[(size_t)r] != nullptr) add_region(workspace(r), kWorkspaceBytes, "workspace", r);
  }
  for (const Allowed& one : allowed_) add_region(one.address, one.bytes, one.what, one.rank);
  active = this;
  for (size_t n = 0; n < longest && shared_.problems == 0; ++n) {
    std::vector<Part> parts;
    const char* name = nullptr;
    for (int r = 0; r < ranks_; ++r) {
      auto& queue = queues_[(size_t)r];
      Part part{[](void* body) { (*static_cast<std::function<void()>*>(body))(); }, nullptr, 0, 1, 0, r * groups_, groups_, r};
      if (n < queue.size()) {
        Enqueued& one = queue[n];
        name = name == nullptr ? one.name.c_str() : name;
        part.context = &one.body;
        part.cubes = one.cubes, part.vectors = one.vectors, part.blocks = one.blocks;
      }
      parts.push_back(part);
    }
    for (FlagWord& flag : flags_) flag.written = false;
    launch_parts(shared_, name, parts.data(), ranks_);
  }
  active = nullptr;
  for (auto& queue : queues_) queue.clear();
  kept_.clear();
  allowed_.clear();
  forget_regions();
  return shared_.report;
}

bool World::holds(uint64_t address) const {
  const uint64_t base = (uint64_t)(uintptr_t)base_;
  return address >= base && address < base + stride_ * (uint64_t)ranks_;
}

World::FlagWord& World::flag_at(uint64_t address) {
  return flags_[(uint64_t)rank_at(address) * (uint64_t)(kinds_ * ranks_) + offset_at(address) / kFlagBytes];
}

// A core that has seen nothing new since it last looked lets the others run before it looks again.
static void wait_a_turn(const void* flag) {
  Task& task = *running_launch->task;
  task.flag = flag;
  if (task.writes_seen == running_launch->flag_writes) {
    task.waits_at = where_now(current->pipe[kMte2]);
    task.polls = true;
    leave_fiber(task.fiber);
    task.polls = false;
  }
  task.writes_seen = running_launch->flag_writes;
}

bool window_access(Pipe& pipe, uint64_t address, uint64_t bytes, GlobalUse use) {
  if (active == nullptr || !active->holds(address)) return false;
  World& world = *active;
  const uint64_t offset = world.offset_at(address);
  const int owner = world.rank_at(address), rank = pipe.core->rank;
  const Where w = where_now(pipe);
  if (offset >= world.flag_bytes()) return false;
  const int kind = (int)(offset / kFlagBytes) / world.ranks_, sender = (int)(offset / kFlagBytes) % world.ranks_;
  if (offset % kFlagBytes + bytes > kFlagBytes)
    give_up("%s at %s:%d on %s takes bytes [%" PRIu64 ", %" PRIu64
            ") of the window of rank %d: its first %" PRIu64 " bytes are flags, which are moved one by one",
            op_now(pipe), w.file, w.line, place(*pipe.core).c_str(), offset, offset + bytes, owner, world.flag_bytes());
  if (use == kAtomic || pipe.id != (use == kRead ? kMte2 : kMte3))
    give_up("%s at %s:%d on %s: a flag in a window is read and written by DataCopy; other paths have caches or no order",
            op_now(pipe), w.file, w.line, place(*pipe.core).c_str());
  World::FlagWord& flag = world.flag_at(address);
  if (use == kRead) {
    wait_a_turn(reinterpret_cast<const void*>((uintptr_t)address));
    if (!flag.written) return true;
    Snapshot from = flag.released;
    if (flag.group != pipe.core->group->index)
      memcpy(from.known.at, from.foreign + (size_t)pipe.core->group->index * kTids, sizeof from.known.at);
    acquire(pipe, from, w);
    return true;
  }
  if (sender != rank)
    complain("%s at %s:%d on %s writes flag %d of rank %d in the window of rank %d; only rank %d may", op_now(pipe),
             w.file, w.line, place(*pipe.core).c_str(), kind, sender, owner, sender);
  // Not what the pipe has issued, but what it knows to be done: copies may overtake each other without a barrier.
  uint32_t* all = running_launch->new_foreign();
  memcpy(all, pipe.foreign, Launch::foreign_words() * sizeof *all);
  uint32_t* own = all + (size_t)pipe.core->group->index * kTids;
  for (int i = 0; i < kTids; ++i) own[i] = std::max(own[i], pipe.known.at[i]);
  flag = {true, {pipe.known, all, (uint32_t)pipe.core->kind << 8 | pipe.id, pipe.now, w}, w, pipe.core->group->index};
  ++running_launch->flag_writes;
  return true;
}

std::string window_bounds(uint64_t address, uint64_t bytes) {
  if (active == nullptr) return "";
  if (!active->holds(address)) return "; of other ranks' memory only windows may be touched";
  const uint64_t offset = active->offset_at(address);
  return text_of("; bytes [%" PRIu64 ", %" PRIu64 ") were meant in the window of rank %d, which has %" PRIu64, offset,
                 offset + bytes, active->rank_at(address), active->window_bytes_);
}

std::string polled(const Task& task) {
  if (active == nullptr || task.flag == nullptr) return task.waits_for;
  const uint64_t address = (uint64_t)(uintptr_t)task.flag;
  const World::FlagWord& flag = active->flag_at(address);
  const int word = (int)(active->offset_at(address) / kFlagBytes), sender = word % active->ranks_;
  bool takes_part = false, runs = false;
  for (const Task& other : running_launch->tasks)
    if (other.core->rank == sender) takes_part = true, runs = runs || !other.finished;
  std::string text = text_of("flag %d of rank %d in the window of rank %d, ", word / active->ranks_, sender,
                             active->rank_at(address));
  if (flag.written) text += text_of("which was last written at %s:%d", flag.where.file, flag.where.line);
  else text += text_of("which rank %d has not written", sender);
  return text + (!takes_part ? text_of("; rank %d was not launched", sender)
                 : runs      ? ""
                             : text_of("; rank %d has ended", sender));
}

bool let_time_pass(Launch& launch) {
  if (launch.idle_cycles >= kPatienceCycles) return false;
  for (const Task& task : launch.tasks)
    if (!task.finished && task.polls) {
      launch.idle_cycles += kStepCycles;
      return true;
    }
  return false;
}

void check_windows(Launch& launch) {
  if (launch.aborted || active == nullptr) return;
  std::vector<GlobalAccess> reads;
  std::vector<std::pair<uint64_t, uint64_t>> written;
  for (const GlobalAccess& access : launch.accesses) {
    if (!active->holds(access.address)) continue;
    if (access.use == kRead) reads.push_back(access);
    else written.push_back({access.address, access.address + access.bytes});
  }
  std::sort(written.begin(), written.end());
  size_t kept = 0;
  for (const auto& piece : written) {
    if (kept > 0 && piece.first <= written[kept - 1].second)
      written[kept - 1].second = std::max(written[kept - 1].second, piece.second);
    else written[kept++] = piece;
  }
  written.resize(kept);
  std::string last;
  for (const GlobalAccess& read : reads) {
    const auto after = std::upper_bound(written.begin(), written.end(), std::make_pair(read.address, ~uint64_t(0)));
    if (after != written.begin() && std::prev(after)->second >= read.address + read.bytes) continue;
    const std::string who = describe_access(read);
    if (who == last) continue;
    last = who;
    complain("%s reads %u bytes of the window of rank %d at %" PRIu64 " of which some were written by no rank in this launch",
             who.c_str(), read.bytes, active->rank_at(read.address), active->offset_at(read.address));
  }
}

int64_t system_cycle(Where where) {
  Pipe& pipe = begin(kS, op_GetSystemCycle, where);
  done(pipe, op_GetSystemCycle, where, 0, 1);
  return running_launch->idle_cycles;
}

}  // namespace twin
