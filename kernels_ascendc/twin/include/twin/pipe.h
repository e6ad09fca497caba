// TPipe, TQue, TBuf and the flags inside a core.
#pragma once

#include "twin/tensor.h"

namespace AscendC {

enum class HardEvent : uint8_t {
  MTE2_V = twin::kMte2 * 8 + twin::kV,
  V_MTE2 = twin::kV * 8 + twin::kMte2,
  MTE3_V = twin::kMte3 * 8 + twin::kV,
  V_MTE3 = twin::kV * 8 + twin::kMte3,
  MTE2_MTE3 = twin::kMte2 * 8 + twin::kMte3,
  MTE3_MTE2 = twin::kMte3 * 8 + twin::kMte2,
  MTE2_S = twin::kMte2 * 8 + twin::kS,
  S_MTE2 = twin::kS * 8 + twin::kMte2,
  V_S = twin::kV * 8 + twin::kS,
  S_V = twin::kS * 8 + twin::kV,
  MTE3_S = twin::kMte3 * 8 + twin::kS,
  S_MTE3 = twin::kS * 8 + twin::kMte3,
  MTE2_MTE1 = twin::kMte2 * 8 + twin::kMte1,
  MTE1_MTE2 = twin::kMte1 * 8 + twin::kMte2,
  MTE1_M = twin::kMte1 * 8 + twin::kM,
  M_MTE1 = twin::kM * 8 + twin::kMte1,
  M_FIX = twin::kM * 8 + twin::kFix,
  FIX_M = twin::kFix * 8 + twin::kM,
  MTE2_M = twin::kMte2 * 8 + twin::kM,
  M_MTE2 = twin::kM * 8 + twin::kMte2,
  MTE1_FIX = twin::kMte1 * 8 + twin::kFix,
  FIX_MTE1 = twin::kFix * 8 + twin::kMte1,
  MTE2_FIX = twin::kMte2 * 8 + twin::kFix,
  FIX_MTE2 = twin::kFix * 8 + twin::kMte2,
  FIX_MTE3 = twin::kFix * 8 + twin::kMte3,
  MTE3_FIX = twin::kMte3 * 8 + twin::kFix,
  M_S = twin::kM * 8 + twin::kS,
  S_M = twin::kS * 8 + twin::kM,
  FIX_S = twin::kFix * 8 + twin::kS,
  S_FIX = twin::kS * 8 + twin::kFix,
  MTE1_S = twin::kMte1 * 8 + twin::kS,
  S_MTE1 = twin::kS * 8 + twin::kMte1,
  MTE3_MTE1 = twin::kMte3 * 8 + twin::kMte1,
  MTE1_MTE3 = twin::kMte1 * 8 + twin::kMte3,
  MAX
};

}  // namespace AscendC

namespace twin {

void set_flag(int event, int32_t id, Where where);
void wait_flag(int event, int32_t id, Where where);
void pipe_barrier(int pipe, Where where);
int32_t take_event_id(int event);
void give_event_id(int event, int32_t id);

// A queue's buffers and what each of them carries between producer and consumer.
struct Slot {
  uint32_t offset, bytes;
  enum State : uint8_t { kFree, kTaken, kQueued, kInUse } state;
  Snapshot released;
  bool has_release;
  Where where;  // what brought it into its state
};
struct QueueState {
  Memory* memory;
  Slot* slots;
  int count, depth, queued, head, tail;
  int order[64];
  Where where;  // InitBuffer
};
struct Producers {
  PipeId producer, consumer;
};

uint32_t reserve(AscendC::TPosition position, uint32_t bytes, Where where);
void init_queue(QueueState& queue, Slot* slots, AscendC::TPosition position, int count, int depth, uint32_t bytes,
                Where where);
int queue_alloc(QueueState& queue, PipeId producer, Where where);
void queue_enque(QueueState& queue, int slot, PipeId producer, Where where);
int queue_deque(QueueState& queue, PipeId consumer, Where where);
void queue_free(QueueState& queue, int slot, PipeId consumer, Where where);
void end_queue(QueueState& queue);

constexpr PipeId producer_of(AscendC::TPosition p) {
  using P = AscendC::TPosition;
  return p == P::VECOUT || p == P::VECCALC || p == P::LCM ? kV
         : p == P::A2 || p == P::B2 || p == P::C2         ? kMte1
         : p == P::CO1                                    ? kM
         : p == P::CO2                                    ? kFix
                                                          : kMte2;
}
constexpr PipeId consumer_of(AscendC::TPosition p) {
  using P = AscendC::TPosition;
  return p == P::VECIN || p == P::VECCALC || p == P::LCM ? kV
         : p == P::VECOUT || p == P::CO2                 ? kMte3
         : p == P::A2 || p == P::B2 || p == P::C2        ? kM
         : p == P::CO1 || p == P::C2PIPE2GM              ? kFix
                                                         : kMte1;
}

}  // namespace twin

namespace AscendC {

template <HardEvent event> inline void SetFlag(int32_t id, TWIN_HERE) { twin::set_flag((int)event, id, where); }
template <HardEvent event> inline void WaitFlag(int32_t id, TWIN_HERE) { twin::wait_flag((int)event, id, where); }
template <pipe_t pipe> inline void PipeBarrier(TWIN_HERE) { twin::pipe_barrier((int)pipe, where); }

// A queue from one position to another; TQue is the usual case of one position. Depth bounds the tensors enqueued at
// once.
template <TPosition source, TPosition destination, int32_t depth, int32_t mask = 0> class TQueBind {
 public:
  ~TQueBind() { twin::end_queue(state_); }
  template <class T> LocalTensor<T> AllocTensor(TWIN_HERE) {
    return tensor<T>(twin::queue_alloc(state_, kProducer, where));
  }
  template <class T> void AllocTensor(LocalTensor<T>& into, TWIN_HERE) {
    into = tensor<T>(twin::queue_alloc(state_, kProducer, where));
  }
  template <class T> bool EnQue(const LocalTensor<T>& t, TWIN_HERE) {
    twin::queue_enque(state_, t.slot(), kProducer, where);
    return true;
  }
  template <class T> LocalTensor<T> DeQue(TWIN_HERE) { return tensor<T>(twin::queue_deque(state_, kConsumer, where)); }
  template <class T> void DeQue(LocalTensor<T>& into, TWIN_HERE) {
    into = tensor<T>(twin::queue_deque(state_, kConsumer, where));
  }
  template <class T> void FreeTensor(const LocalTensor<T>& t, TWIN_HERE) {
    twin::queue_free(state_, t.slot(), kConsumer, where);
  }
  bool HasTensorInQue() const { return state_.queued > 0; }
  int32_t GetTensorCountInQue() const { return state_.queued; }

  static constexpr twin::PipeId kProducer = twin::producer_of(source), kConsumer = twin::consumer_of(destination);
  static constexpr TPosition kPosition = source;
  twin::QueueState state_{};
  twin::Slot slots_[16];

 private:
  template <class T> LocalTensor<T> tensor(int slot) {
    const twin::Slot& s = state_.slots[slot];
    return LocalTensor<T>(state_.memory, s.offset, s.bytes / (uint32_t)sizeof(T) * twin::kPerItem<T>, source, slot);
  }
};
template <TPosition position, int32_t depth, int32_t mask = 0> using TQue = TQueBind<position, position, depth, mask>;

template <TPosition position = TPosition::LCM> class TBuf {
 public:
  template <class T> LocalTensor<T> Get() {
    return LocalTensor<T>(memory_, offset_, bytes_ / (uint32_t)sizeof(T) * twin::kPerItem<T>, position);
  }
  template <class T> LocalTensor<T> Get(uint32_t elements) {
    return LocalTensor<T>(memory_, offset_, elements, position);
  }
  template <class T> LocalTensor<T> GetWithOffset(uint32_t elements, uint32_t offset_bytes) {
    return LocalTensor<T>(memory_, offset_ + offset_bytes, elements, position);
  }
  static constexpr TPosition kPosition = position;
  twin::Memory* memory_ = nullptr;
  uint32_t offset_ = 0, bytes_ = 0;
};

class TPipe {
 public:
  TPipe() { twin::current->pipe_object = this; }
  template <TPosition source, TPosition destination, int32_t depth, int32_t mask>
  bool InitBuffer(TQueBind<source, destination, depth, mask>& queue, uint8_t count, uint32_t bytes, TWIN_HERE) {
    if (count > 16)
      twin::give_up("InitBuffer at %s:%d: at most 16 buffers a queue are modelled, got %d", where.file, where.line,
                    count);
    twin::init_queue(queue.state_, queue.slots_, source, count, depth, bytes, where);
    return true;
  }
  template <TPosition position> bool InitBuffer(TBuf<position>& buffer, uint32_t bytes, TWIN_HERE) {
    buffer.memory_ = &twin::memory_at(*twin::current, position);
    buffer.offset_ = twin::reserve(position, bytes, where);
    buffer.bytes_ = (bytes + 31) / 32 * 32;
    return true;
  }
  template <HardEvent event> TEventID AllocEventID() { return twin::take_event_id((int)event); }
  template <HardEvent event> void ReleaseEventID(TEventID id) { twin::give_event_id((int)event, id); }
  template <HardEvent event> TEventID FetchEventID() { return FetchEventID(event); }
  TEventID FetchEventID(HardEvent event) {
    const TEventID id = twin::take_event_id((int)event);
    twin::give_event_id((int)event, id);
    return id;
  }
  void Reset() { memset(twin::current->allocated, 0, sizeof twin::current->allocated); }
  void Destroy() {}
};
inline TPipe* GetTPipePtr() { return static_cast<TPipe*>(twin::current->pipe_object); }

// Tensors at fixed places, for kernels that manage flags themselves; not to be mixed with TPipe.
template <Hardware hardware> class LocalMemAllocator {
 public:
  template <class T, uint32_t elements> LocalTensor<T> Alloc(TWIN_HERE) { return Alloc<T>(elements, where); }
  template <class T> LocalTensor<T> Alloc(uint32_t elements, TWIN_HERE) { return at<T>(kPosition, elements, where); }
  template <TPosition position, class T, uint32_t elements> LocalTensor<T> Alloc(TWIN_HERE) {
    return at<T>(position, elements, where);
  }
  template <TPosition position, class T> LocalTensor<T> Alloc(uint32_t elements, TWIN_HERE) {
    return at<T>(position, elements, where);
  }
  uint32_t GetCurAddr() const { return next_; }

 private:
  template <class T> LocalTensor<T> at(TPosition position, uint32_t elements, twin::Where where) {
    const uint32_t bytes = (uint32_t)((uint64_t)elements * sizeof(T) / twin::kPerItem<T> + 31) / 32 * 32,
                   address = next_;
    next_ += bytes;
    twin::Memory& memory = twin::memory_at(*twin::current, position);
    if (next_ > memory.bytes)
      twin::give_up("Alloc at %s:%d: %s has %u bytes, %u are taken and %u more asked for", where.file, where.line,
                    memory.name, memory.bytes, address, bytes);
    return LocalTensor<T>(&memory, address, elements, position);
  }
  static constexpr TPosition kPosition = hardware == Hardware::UB     ? TPosition::VECCALC
                                         : hardware == Hardware::L1   ? TPosition::A1
                                         : hardware == Hardware::L0A  ? TPosition::A2
                                         : hardware == Hardware::L0B  ? TPosition::B2
                                         : hardware == Hardware::L0C  ? TPosition::CO1
                                         : hardware == Hardware::BIAS ? TPosition::C2
                                                                      : TPosition::C2PIPE2GM;
  uint32_t next_ = 0;
};
inline void InitSocState(TWIN_HERE) { twin::current->static_where = where; }

}  // namespace AscendC
