// The library's threads and its scratch memory. Not compiled per level: nothing here touches numbers.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace di {

// Threads that work on a call, the caller included. Results never depend on it.
void set_num_threads(int n);
int num_threads();

// Runs body(context, task) for every task in [0, tasks). `cost_ns` is a guess of the whole work: little work stays on
// the calling thread. Calls from inside a task, or while another thread is in here, run on the caller alone.
void parallel_for(int64_t tasks, double cost_ns, void (*body)(void*, int64_t), void* context);

// Memory of the calling thread that lives until the Scratch does. Blocks are 64-byte aligned and have 64 spare bytes.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* bytes(int64_t n);
  float* floats(int64_t n) { return static_cast<float*>(bytes(n * 4)); }
  int32_t* ints(int64_t n) { return static_cast<int32_t*>(bytes(n * 4)); }

 private:
  size_t chunk_, used_;
};

}  // namespace di
