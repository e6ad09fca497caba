// The copy engines: MTE2 into local memory, MTE3 out of it, and copies within a core.
#include "twin/copy.h"

#include "lanes.h"

namespace twin {
namespace {

void need_aligned(const Pipe& pipe, uint64_t offset, uint64_t to, const char* what) {
  if (offset % to == 0) return;
  const Where w = where_now(pipe);
  give_up("%s at %s:%d: %s starts at byte %llu, and must start at a multiple of %llu", op_now(pipe), w.file, w.line,
          what, (unsigned long long)offset, (unsigned long long)to);
}

void need_counts(const Pipe& pipe, const Bursts& b, bool padded) {
  const Where w = where_now(pipe);
  if (b.count < 0 || b.count > 4095)
    give_up("%s at %s:%d: blockCount is 0 to 4095, got %lld", op_now(pipe), w.file, w.line, (long long)b.count);
  if (b.bytes < 0 || (padded && b.bytes > 2097151))
    give_up("%s at %s:%d: blockLen is at most 2097151 bytes, got %lld", op_now(pipe), w.file, w.line,
            (long long)b.bytes);
}

uint64_t round_up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }

}  // namespace

uint64_t whole_blocks(uint64_t elements, uint64_t item_bytes, Where where) {
  const uint64_t bytes = elements * item_bytes;
  if (bytes % 32 != 0)
    give_up(
        "DataCopy at %s:%d moves whole 32-byte blocks; %llu elements of %llu bytes are none (DataCopyPad takes any "
        "length)",
        where.file, where.line, (unsigned long long)elements, (unsigned long long)item_bytes);
  return bytes;
}

void copy_in(Op op, View target, const uint8_t* source, Bursts b, Padding padding, bool padded, Where where) {
  Pipe& pipe = begin(kMte2, op, where);
  need_counts(pipe, b, padded);
  need_aligned(pipe, target.offset, 32, "the destination");
  if (padding.on && (padding.left_bytes > 32 || padding.right_bytes > 32))
    give_up("%s at %s:%d: padding is at most 32 bytes a side, got %u and %u", kOpNames[op], where.file, where.line,
            padding.left_bytes, padding.right_bytes);
  const uint32_t left = padding.on ? padding.left_bytes : 0, right = padding.on ? padding.right_bytes : 0;
  uint64_t at = target.offset;
  for (int64_t i = 0; i < b.count && b.bytes > 0; ++i) {
    const uint64_t named = left + (uint64_t)b.bytes + right, whole = round_up(named, 32);
    global_access(pipe, source, (uint64_t)b.bytes, kRead, "the source");
    uint8_t* to = store(pipe, *target.memory, at, whole, "the destination");
    for (uint64_t k = 0; k < left; k += padding.item_bytes) memcpy(to + k, &padding.value, padding.item_bytes);
    memcpy(to + left, source, (size_t)b.bytes);
    for (uint64_t k = 0; k < right; k += padding.item_bytes)
      memcpy(to + left + b.bytes + k, &padding.value, padding.item_bytes);
    if (whole != named) {  // the engine writes the rest of the block too, with nothing in particular
      memset(to + named, 0xcb, whole - named);
      target.memory->valid[(at + named) / 32] = (1u << (named % 32)) - 1;
    }
    source += b.bytes + b.source_gap;
    at += whole + (uint64_t)b.target_gap;
  }
  done(pipe, op, where, (uint32_t)(b.count * b.bytes), (uint64_t)b.count);
}

static void combine(uint8_t* target, const uint8_t* source, uint64_t bytes, uint8_t how, Type type) {
  const BinaryOp op = how == 1 ? kAdd : how == 2 ? kMax : kMin;
  lanes().binary[op][type](target, target, source, bytes / kTypeBytes[type]);
}

void copy_out(Op op, uint8_t* target, View source, Bursts b, bool padded, Type type, Where where) {
  Pipe& pipe = begin(kMte3, op, where);
  need_counts(pipe, b, padded);
  need_aligned(pipe, source.offset, 32, "the source");
  const Core& core = *current;
  if (core.atomic_op != 0 && core.atomic_type != type)
    give_up("%s at %s:%d: atomics are set for %s, the copy is of %s", kOpNames[op], where.file, where.line,
            kTypeNames[core.atomic_type], kTypeNames[type]);
  uint64_t at = source.offset;
  for (int64_t i = 0; i < b.count && b.bytes > 0; ++i) {
    const uint8_t* from = load(pipe, *source.memory, at, (uint64_t)b.bytes, "the source");
    global_access(pipe, target, (uint64_t)b.bytes, core.atomic_op != 0 ? kAtomic : kWrite, "the destination");
    if (core.atomic_op == 0) memcpy(target, from, (size_t)b.bytes);
    else combine(target, from, (uint64_t)b.bytes, core.atomic_op, type);
    target += b.bytes + b.target_gap;
    at += round_up((uint64_t)b.bytes, 32) + (uint64_t)b.source_gap;
  }
  done(pipe, op, where, (uint32_t)(b.count * b.bytes), (uint64_t)b.count);
}

void copy_inside(View target, View source, Bursts b, Where where) {
  const MemoryKind from = source.memory->kind, to = target.memory->kind;
  const bool to_bias = to == kBias, to_fixbuf = to == kFixbuf;
  if (!((from == kUb && (to == kUb || to == kL1)) || (from == kL1 && (to_bias || to_fixbuf))))
    give_up("DataCopy at %s:%d: there is no path from %s to %s", where.file, where.line, source.memory->name,
            target.memory->name);
  Pipe& pipe = begin(to == kUb ? kV : to == kL1 ? kMte3 : to_bias ? kMte1 : kFix, op_DataCopy, where);
  need_counts(pipe, b, false);
  need_aligned(pipe, source.offset, 32, "the source");
  need_aligned(pipe, target.offset, to_bias ? 64 : to_fixbuf ? 128 : 32, "the destination");
  for (int64_t i = 0; i < b.count && b.bytes > 0; ++i) {
    const uint8_t* from = load(pipe, *source.memory, source.offset, (uint64_t)b.bytes, "the source");
    memmove(store(pipe, *target.memory, target.offset, (uint64_t)b.bytes, "the destination"), from, (size_t)b.bytes);
    source.offset += (uint64_t)(b.bytes + b.source_gap);
    target.offset += (uint64_t)(b.bytes + b.target_gap);
  }
  done(pipe, op_DataCopy, where, (uint32_t)(b.count * b.bytes), (uint64_t)b.count);
}

}  // namespace twin
