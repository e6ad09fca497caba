#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace di {
namespace {

constexpr double kWorthSharingNs = 12000;               // waking a spinning worker costs about 1 us
constexpr auto kSpin = std::chrono::microseconds(100);  // longer than the host takes between two ops of a step

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A job is open while workers may enter it. A worker counts itself in `inside` before it looks at `open`, and the
// caller closes the job and then waits for `inside` to become zero: so nobody reads a job's fields while they change,
// and a worker that wakes late costs the caller nothing.
class Pool {
 public:
  void resize(int threads) {
    std::lock_guard<std::mutex> one(callers_);
    stop();
    wanted_ = threads < 1 ? 1 : threads;
  }

  int threads() const { return wanted_; }

  void run(int64_t tasks, void (*body)(void*, int64_t), void* context) {
    if (!callers_.try_lock()) {
      for (int64_t i = 0; i < tasks; ++i) body(context, i);
      return;
    }
    std::lock_guard<std::mutex> one(callers_, std::adopt_lock);
    if (workers_.empty()) start();
    body_ = body, context_ = context, tasks_ = tasks;
    next_.store(0);
    open_.store(true);
    generation_.fetch_add(1);
    if (sleeping_.load() > 0) {
      std::lock_guard<std::mutex> guard(mutex_);
      wake_.notify_all();
    }
    work();
    open_.store(false);
    for (int spins = 0; inside_.load() > 0; ++spins) {
      if (spins < 2000)
        pause();
      else
        sched_yield();
    }
  }

  // A child process has none of its parent's threads.
  void forget() {
    new (&callers_) std::mutex;
    new (&mutex_) std::mutex;
    new (&wake_) std::condition_variable;
    for (auto& worker : workers_) new (&worker) std::thread;
    workers_.clear();
    inside_ = 0, sleeping_ = 0, open_ = false;
  }

  ~Pool() { stop(); }

 private:
  void start() {
    stopping_ = false;
    for (int i = 1; i < wanted_; ++i) workers_.emplace_back([this] { loop(); });
  }

  void stop() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      stopping_ = true;
      generation_.fetch_add(1);
      wake_.notify_all();
    }
    for (auto& worker : workers_) worker.join();
    workers_.clear();
  }

  void work() {
    for (int64_t i; (i = next_.fetch_add(1)) < tasks_;) body_(context_, i);
  }

  void loop() {
    uint64_t seen = 0;
    while (true) {
      await(seen);
      seen = generation_.load();
      if (stopping_) return;
      inside_.fetch_add(1);
      if (open_.load()) work();
      inside_.fetch_sub(1);
    }
  }

  void await(uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (generation_.load() == seen) {
      for (int i = 0; i < 64 && generation_.load(std::memory_order_relaxed) == seen; ++i) pause();
      if (std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> guard(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(guard, [&] { return generation_.load() != seen; });
      sleeping_.fetch_sub(1);
      return;
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> generation_{1};
  std::atomic<int64_t> next_{0};
  std::atomic<int> inside_{0}, sleeping_{0};
  std::atomic<bool> open_{false}, stopping_{false};
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  int wanted_ = 1;
};

Pool& pool() {
  static Pool* one = [] {
    auto* made = new Pool;  // lives until the process ends: a worker may outlast static destructors
    pthread_atfork(nullptr, nullptr, [] { pool().forget(); });
    return made;
  }();
  return *one;
}

struct Arena {
  struct Chunk {
    char* base;
    size_t size;
  };
  std::vector<Chunk> chunks;
  size_t chunk = 0, used = 0;
  ~Arena() {
    for (auto& c : chunks) free(c.base);
  }

  void* take(size_t n) {
    n = (n + 127) & ~size_t{63};
    while (chunk < chunks.size() && used + n > chunks[chunk].size) ++chunk, used = 0;
    if (chunk == chunks.size()) {
      size_t size = n > (size_t{1} << 20) ? n : size_t{1} << 20;
      void* base = nullptr;
      if (posix_memalign(&base, 64, size) != 0) throw std::bad_alloc();
      chunks.push_back({static_cast<char*>(base), size});
      used = 0;
    }
    void* p = chunks[chunk].base + used;
    used += n;
    return p;
  }
};

thread_local Arena arena;

}  // namespace

void set_num_threads(int n) { pool().resize(n); }
int num_threads() { return pool().threads(); }

void parallel_for(int64_t tasks, double cost_ns, void (*body)(void*, int64_t), void* context) {
  if (tasks < 2 || cost_ns < kWorthSharingNs || pool().threads() < 2) {
    for (int64_t i = 0; i < tasks; ++i) body(context, i);
    return;
  }
  pool().run(tasks, body, context);
}

Scratch::Scratch() : chunk_(arena.chunk), used_(arena.used) {}
Scratch::~Scratch() { arena.chunk = chunk_, arena.used = used_; }
void* Scratch::bytes(int64_t n) { return arena.take(static_cast<size_t>(n)); }

}  // namespace di
