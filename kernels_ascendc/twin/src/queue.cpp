// Flags, event ids, buffers and queues inside a core.
#include <stdio.h>

#include "machine_private.h"
#include "twin/mutation.h"
#include "twin/pipe.h"

namespace twin {
namespace {

const char* const kPipeNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "?"};

void event_name(int event, char* text, size_t size) {
  snprintf(text, size, "%s_%s", kPipeNames[event / 8], kPipeNames[event % 8]);
}

Flag& flag_of(int event, int32_t id, const char* op, Where where) {
  if (id < 0 || id > 7) give_up("%s at %s:%d: event ids are 0 to 7, got %d", op, where.file, where.line, id);
  return current->flags[event * 8 + id];
}

}  // namespace

void set_flag(int event, int32_t id, Where where) {
  const mutation::Change change = mutation::at(mutation::kSetFlag, where, event, id);
  if (change == mutation::kDrop) return;
  id += mutation::shift(change);
  Flag& flag = flag_of(event, id, "SetFlag", where);
  Pipe& source = begin((PipeId)(event / 8), op_SetFlag, where);
  if (flag.set) {
    char name[16];
    event_name(event, name, sizeof name);
    complain("SetFlag<%s>(%d) at %s:%d on %s: the flag is set already, at %s:%d, and nothing has waited for it", name,
             id, where.file, where.line, place(*current).c_str(), flag.where.file, flag.where.line);
  }
  flag.set = true;
  flag.where = where;
  flag.released = change == mutation::kForget ? Snapshot{} : release(source);
  done(source, op_SetFlag, where, 0, 0);
}

void wait_flag(int event, int32_t id, Where where) {
  const mutation::Change change = mutation::at(mutation::kWaitFlag, where, event, id);
  if (change == mutation::kDrop) return;
  id += mutation::shift(change);
  Flag& flag = flag_of(event, id, "WaitFlag", where);
  Pipe& pipe = begin((PipeId)(event % 8), op_WaitFlag, where);
  if (!flag.set) {
    char name[16];
    event_name(event, name, sizeof name);
    give_up("deadlock: WaitFlag<%s>(%d) at %s:%d on %s waits for a flag that no SetFlag before it has set", name, id,
            where.file, where.line, place(*current).c_str());
  }
  flag.set = false;
  mutation::partners(flag.where, where, event);
  acquire(pipe, flag.released, where);
}

void pipe_barrier(int pipe, Where where) {
  if (mutation::at(mutation::kPipeBarrier, where, pipe) == mutation::kDrop) return;
  if (pipe == kS) give_up("PipeBarrier<PIPE_S> at %s:%d: the scalar pipe has no barrier", where.file, where.line);
  Pipe& at = begin(pipe == kAll ? kS : (PipeId)pipe, op_PipeBarrier, where);
  barrier(*current, (PipeId)pipe);
  done(at, op_PipeBarrier, where, 0, (uint64_t)pipe);
}

int32_t take_event_id(int event) {
  uint8_t& used = current->event_ids[event];
  for (int id = 0; id < 8; ++id)
    if (!(used & (1 << id))) {
      used |= (uint8_t)(1 << id);
      return id;
    }
  give_up("all 8 event ids of one kind are taken on %s; ReleaseEventID gives them back", place(*current).c_str());
}
void give_event_id(int event, int32_t id) { current->event_ids[event] &= (uint8_t)~(1 << id); }

uint32_t reserve(AscendC::TPosition position, uint32_t bytes, Where where) {
  Memory& memory = memory_at(*current, position);
  uint32_t& taken = current->allocated[memory.kind];
  const uint32_t rounded = (bytes + 31) / 32 * 32, offset = taken;
  if ((uint64_t)taken + rounded > memory.bytes)
    give_up("InitBuffer at %s:%d: %s has %u bytes, %u are taken and %u more asked for", where.file, where.line,
            memory.name, memory.bytes, taken, rounded);
  taken += rounded;
  if (offset == 0) memory.reserved.clear();
  for (uint32_t block = offset / 32; block < taken / 32; ++block)
    memory.buffer[block] = running_launch->number << 16 | memory.reserved.size();
  memory.reserved.push_back(where);
  return offset;
}

void init_queue(QueueState& queue, Slot* slots, AscendC::TPosition position, int count, int depth, uint32_t bytes,
                Where where) {
  count += mutation::shift(mutation::at(mutation::kInitBuffer, where, 0, count));
  const int wanted = depth > 0 ? depth : 1;  // of depth 0 are queues whose tensors stay in place
  if (count != wanted && !(wanted == 1 && count == 2))
    give_up("InitBuffer at %s:%d: %d buffers for a queue of depth %d; a queue has as many as its depth, or depth 1 and two of them", where.file,
            where.line, count, depth);
  queue = {&memory_at(*current, position), slots, count, depth, 0, 0, 0, {}, where};
  for (int i = 0; i < count; ++i) {
    slots[i].offset = reserve(position, bytes, where);
    slots[i].bytes = (bytes + 31) / 32 * 32;
    slots[i].state = Slot::kFree;
    slots[i].has_release = false;
  }
}

static Slot& slot_of(QueueState& queue, int slot, const char* op, Where where) {
  if (queue.slots == nullptr)
    give_up("%s at %s:%d: the queue has no buffers; InitBuffer comes first", op, where.file, where.line);
  if (slot < 0 || slot >= queue.count)
    give_up("%s at %s:%d: the tensor was not given out by this queue", op, where.file, where.line);
  return queue.slots[slot];
}

// Buffers go round in turn, as the alternation of a double buffer does.
int queue_alloc(QueueState& queue, PipeId producer, Where where) {
  Slot& slot = slot_of(queue, queue.head % (queue.count > 0 ? queue.count : 1), "AllocTensor", where);
  const int index = queue.head % queue.count;
  if (slot.state != Slot::kFree)
    give_up(
        "deadlock: AllocTensor at %s:%d on %s waits for one of %d buffers, and all are in use, the next one since %s:%d; "
        "FreeTensor gives them back",
        where.file, where.line, place(*current).c_str(), queue.count, slot.where.file, slot.where.line);
  Pipe& pipe = begin(producer, op_AllocTensor, where);
  if (slot.has_release) mutation::partners(slot.where, where), acquire(pipe, slot.released, where);
  slot.state = Slot::kTaken;
  slot.where = where;
  if (!slot.has_release) poison(*queue.memory, slot.offset, slot.bytes);
  queue.head = (queue.head + 1) % queue.count;
  return index;
}

void queue_enque(QueueState& queue, int index, PipeId producer, Where where) {
  if (mutation::at(mutation::kEnQue, where, producer) == mutation::kDrop) return;
  Slot& slot = slot_of(queue, index, "EnQue", where);
  if (slot.state != Slot::kTaken)
    give_up("EnQue at %s:%d: the tensor is not one that AllocTensor gave out and that is still held", where.file,
            where.line);
  if (queue.depth > 0 && queue.queued >= queue.depth && queue.queued >= queue.count)
    give_up("EnQue at %s:%d: %d tensors are in the queue, its depth is %d", where.file, where.line, queue.queued,
            queue.depth);
  Pipe& pipe = begin(producer, op_EnQue, where);
  slot.released = release(pipe);
  done(pipe, op_EnQue, where, 0, 0);
  slot.state = Slot::kQueued;
  slot.where = where;
  queue.order[(queue.tail + queue.queued++) % 64] = index;
}

int queue_deque(QueueState& queue, PipeId consumer, Where where) {
  slot_of(queue, 0, "DeQue", where);
  if (mutation::at(mutation::kDeQue, where, consumer) == mutation::kDrop) return queue.queued == 0 ? 0 : queue.order[queue.tail];
  if (queue.queued == 0)
    give_up("deadlock: DeQue at %s:%d on %s waits for a tensor, and none is in the queue", where.file, where.line,
            place(*current).c_str());
  const int index = queue.order[queue.tail];
  queue.tail = (queue.tail + 1) % 64;
  --queue.queued;
  Slot& slot = queue.slots[index];
  slot.state = Slot::kInUse;
  mutation::partners(slot.where, where);
  slot.where = where;
  acquire(begin(consumer, op_DeQue, where), slot.released, where);
  return index;
}

void queue_free(QueueState& queue, int index, PipeId consumer, Where where) {
  if (mutation::at(mutation::kFreeTensor, where, consumer) == mutation::kDrop) return;
  Slot& slot = slot_of(queue, index, "FreeTensor", where);
  if (slot.state == Slot::kFree || slot.state == Slot::kQueued)
    give_up("FreeTensor at %s:%d: the tensor is not held", where.file, where.line);
  Pipe& pipe = begin(consumer, op_FreeTensor, where);
  slot.released = release(pipe);
  done(pipe, op_FreeTensor, where, 0, 0);
  slot.has_release = true;
  slot.state = Slot::kFree;
  poison(*queue.memory, slot.offset, slot.bytes);  // what is read from here on is not the tensor any more
  mutation::partners(slot.where, where);
  slot.where = where;
}

// EnQue and FreeTensor set flags of the chip that only DeQue and the next AllocTensor take back.
void end_queue(QueueState& queue) {
  for (int i = 0; i < queue.count; ++i) {
    const Slot& slot = queue.slots[i];
    if (slot.state == Slot::kFree || told_before(slot.where, queue.where)) continue;
    complain("%s: the queue of InitBuffer at %s:%d ends with a tensor that %s at %s:%d", place(*current).c_str(), queue.where.file,
             queue.where.line, slot.state == Slot::kQueued ? "no DeQue took after EnQue" : "no FreeTensor gave back after it was taken",
             slot.where.file, slot.where.line);
  }
}

}  // namespace twin
