// Memory of the toy chip: two reservations of one size, `addresses` (never accessible) and `bytes` (what is behind them).
#include "runtime.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t kMemory = size_t(8) << 30;
constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

class Memory {
 public:
  Memory() {
    addresses_ = reserve(PROT_NONE);
    bytes_ = reserve(PROT_READ | PROT_WRITE);
    if (addresses_ && bytes_) free_.emplace(0, kMemory);
  }

  void* allocate(size_t bytes) {
    bytes = aligned(bytes ? bytes : 1);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
      auto [offset, room] = *gap;
      if (room < bytes) continue;
      free_.erase(gap);
      if (room > bytes) free_.emplace(offset + bytes, room - bytes);
      used_.emplace(offset, bytes);
      return addresses_ + offset;
    }
    return nullptr;
  }

  void release(void* device) {
    if (device == nullptr) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = used_.find(static_cast<char*>(device) - addresses_);
    if (block == used_.end()) return;
    auto [offset, room] = *block;
    used_.erase(block);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + room) {
      room += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += room;
        return;
      }
    }
    free_.emplace(offset, room);
  }

  bool holds(const void* device, size_t bytes) const {
    auto offset = reinterpret_cast<uintptr_t>(device) - reinterpret_cast<uintptr_t>(addresses_);
    return addresses_ && offset <= kMemory && bytes <= kMemory - offset;
  }

  char* view(const void* device) const { return bytes_ + (static_cast<const char*>(device) - addresses_); }

  size_t free_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t total = 0;
    for (auto& gap : free_) total += gap.second;
    return total;
  }

 private:
  static char* reserve(int rights) {
    void* found = mmap(nullptr, kMemory, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
  }

  char* addresses_ = nullptr;
  char* bytes_ = nullptr;
  std::mutex mutex_;
  std::map<size_t, size_t> free_, used_;  // offset -> bytes
};

Memory& memory() {
  static Memory* one = new Memory;  // never destroyed: tensors may outlive static objects
  return *one;
}

}  // namespace

extern "C" {

void* toychip_malloc(size_t bytes) { return memory().allocate(bytes); }
void toychip_free(void* device) { memory().release(device); }

int toychip_copy_to_device(void* device, const void* host, size_t bytes) {
  if (!memory().holds(device, bytes)) return -1;
  std::memcpy(memory().view(device), host, bytes);
  return 0;
}

int toychip_copy_to_host(void* host, const void* device, size_t bytes) {
  if (!memory().holds(device, bytes)) return -1;
  std::memcpy(host, memory().view(device), bytes);
  return 0;
}

void toychip_memory_info(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = memory().free_bytes();
  *total_bytes = kMemory;
}

int toychip_owns(const void* device) { return memory().holds(device, 1); }
void* toychip_view(const void* device) { return toychip_owns(device) ? memory().view(device) : nullptr; }
}
