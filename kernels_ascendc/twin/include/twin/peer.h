// Ranks: several chips whose kernels run at the same time and reach into each other's windows of global memory.
//
// A window begins with flag words, one block of 32 bytes each; word `kind * ranks + sender` is written by rank `sender`
// alone. Writing one (DataCopy out of UB) releases what its pipe knows to be done; reading one (DataCopy into UB) acquires
// that. What lies behind the flags is data: plain global memory that holds nothing when a launch begins. Everything else
// that a rank has is its own.
#pragma once

#include <functional>
#include <memory>

#include "twin/machine.h"

namespace twin {

class World;

struct Seat {
  World* world;
  int rank;
};

constexpr int kFlagBytes = 32;

// Launches of one rank's stream wait here until `World::run` starts them together with those of the other ranks.
void enqueue(Stream& stream, const char* name, int cubes, int vectors, int64_t blocks, std::function<void()> body);

class World {
 public:
  // `cores` cube cores a rank, 0 for as many as the model of a chip has to share, at most 8.
  World(int ranks, int cores, uint64_t window_bytes, int flag_kinds, uint64_t seed);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int ranks() const { return ranks_; }
  uint64_t window_bytes() const { return window_bytes_; }
  uint64_t flag_bytes() const { return (uint64_t)kinds_ * (uint64_t)ranks_ * kFlagBytes; }
  Stream& stream(int rank) { return *streams_.at((size_t)rank); }
  uint8_t* window(int rank) const { return base_ + (uint64_t)rank * stride_; }
  void* workspace(int rank);
  // Memory that the launches of a rank may touch, beside the windows.
  void allow(int rank, const void* address, uint64_t bytes, const char* what);
  void keep(std::shared_ptr<void> alive) { kept_.push_back(std::move(alive)); }  // until they have run
  // Runs what was enqueued, the ranks' n-th launches at the same time; a rank without one takes no part in it. Gives what
  // was wrong, or an empty text.
  std::string run();

 private:
  friend void enqueue(Stream&, const char*, int, int, int64_t, std::function<void()>);
  friend bool window_access(Pipe&, uint64_t, uint64_t, GlobalUse);
  friend std::string window_bounds(uint64_t, uint64_t);
  friend std::string polled(const struct Task&);
  friend void check_windows(struct Launch&);

  struct Enqueued {
    std::string name;
    int cubes, vectors;
    int64_t blocks;
    std::function<void()> body;
  };
  struct FlagWord {
    bool written;  // in this launch
    Snapshot released;
    Where where;
    int group;
  };
  bool holds(uint64_t address) const;
  int rank_at(uint64_t address) const { return (int)((address - (uint64_t)(uintptr_t)base_) / stride_); }
  uint64_t offset_at(uint64_t address) const { return (address - (uint64_t)(uintptr_t)base_) % stride_; }
  FlagWord& flag_at(uint64_t address);

  int ranks_, groups_, kinds_;
  uint64_t window_bytes_, stride_;
  uint8_t* base_;
  Stream shared_;  // the launches' own: seed and report
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Seat> seats_;
  std::vector<std::vector<Enqueued>> queues_;
  std::vector<FlagWord> flags_;
  std::vector<std::unique_ptr<uint8_t[]>> workspaces_;
  struct Allowed {
    int rank;
    const void* address;
    uint64_t bytes;
    const char* what;
  };
  std::vector<Allowed> allowed_;
  std::vector<std::shared_ptr<void>> kept_;
};

int64_t system_cycle(Where where);

}  // namespace twin

namespace AscendC {

// Cycles of a clock of 1 GHz. In the model time stands still, but while every core waits it passes in steps of 10 ms.
inline int64_t GetSystemCycle(TWIN_HERE) { return twin::system_cycle(where); }

}  // namespace AscendC
