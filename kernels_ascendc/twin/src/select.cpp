// Compare, Select, Gather, GatherMask and CreateVecIndex.
#include "twin/select.h"

#include <vector>

#include "lanes.h"
#include "walk.h"

namespace twin {
namespace {

constexpr CompareOp kModes[] = {kLt, kGt, kEq, kLe, kGe, kNe};

[[noreturn]] void refuse_type(Op op, Type type, Where where) {
  give_up("%s at %s:%d: the device has no such instruction for %s", kOpNames[op], where.file, where.line,
          kTypeNames[type]);
}

void fill(std::vector<uint8_t>& out, Type type, const void* scalar, size_t n) {
  out.resize(n * kTypeBytes[type]);
  lanes().scalar[kDuplicate][type](out.data(), out.data(), scalar, n);
}

}  // namespace

void run_compare(Op op, Type type, AscendC::CMPMODE mode, View d, View a, View b, const void* scalar, const Walk& walk,
                 Where where) {
  const CompareLanes f = lanes().compare[kModes[(int)mode]][type];
  if (f == nullptr) refuse_type(op, type, where);
  Pipe& pipe = begin(kV, op, where);
  need_vector_operand(pipe, d, "the destination");
  need_vector_operand(pipe, a, "the first source");
  if (scalar == nullptr) need_vector_operand(pipe, b, "the second source");
  const int per_repeat = 256 / kTypeBytes[type];
  std::vector<uint8_t> second, results;
  if (walk.count >= 0) {
    if (walk.count * kTypeBytes[type] % 256 != 0)
      give_up("%s at %s:%d: count fills whole repeats of 256 bytes; %lld elements of %d bytes do not", kOpNames[op],
              where.file, where.line, (long long)walk.count, kTypeBytes[type]);
    const size_t n = (size_t)walk.count;
    const uint8_t* x = load(pipe, *a.memory, a.offset, lane_bytes(type, walk.count), "the first source");
    const uint8_t* y;
    if (scalar != nullptr) fill(second, type, scalar, n), y = second.data();
    else y = load(pipe, *b.memory, b.offset, lane_bytes(type, walk.count), "the second source");
    results.resize(n);
    f(results.data(), x, y, n);
    uint8_t* bits = store(pipe, *d.memory, d.offset, n / 8, "the destination");
    for (size_t i = 0; i < n / 8; ++i) {
      uint8_t byte = 0;
      for (int k = 0; k < 8; ++k) byte |= (uint8_t)(results[i * 8 + k] << k);
      bits[i] = byte;
    }
    return done(pipe, op, where, (uint32_t)n, n);
  }
  for (int r = 0; r < walk.repeats; ++r) {  // lanes that the mask leaves out give 0
    uint8_t x[256] = {}, y[256] = {}, out[128] = {};
    gather_repeat(pipe, a, type, walk, 1, r, x, "the first source");
    if (scalar != nullptr) lanes().scalar[kDuplicate][type](y, y, scalar, (size_t)per_repeat);
    else gather_repeat(pipe, b, type, walk, 2, r, y, "the second source");
    f(out, x, y, (size_t)per_repeat);
    uint8_t* bits =
        store(pipe, *d.memory, d.offset + (uint64_t)(r * per_repeat / 8), (uint64_t)per_repeat / 8, "the destination");
    for (int i = 0; i < per_repeat / 8; ++i) {
      uint8_t byte = 0;
      for (int k = 0; k < 8; ++k)
        byte |= (uint8_t)((out[i * 8 + k] & (walk.mask[(i * 8 + k) / 64] >> ((i * 8 + k) % 64) & 1)) << k);
      bits[i] = byte;
    }
  }
  done(pipe, op, where, (uint32_t)walk.repeats * 256, (uint64_t)(walk.repeats * per_repeat));
}

static void pick(uint8_t* out, const uint8_t* a, const uint8_t* b, const uint8_t* bits, int64_t first_bit, int64_t n,
                 int size) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bit = first_bit + i;
    memcpy(out + i * size, (bits[bit / 8] >> (bit % 8) & 1 ? a : b) + i * size, (size_t)size);
  }
}

void run_select(Type type, AscendC::SELMODE mode, View d, View mask, View a, View b, const void* scalar,
                const Walk& walk, Where where) {
  Pipe& pipe = begin(kV, op_Select, where);
  need_vector_operand(pipe, d, "the destination");
  need_vector_operand(pipe, mask, "the selection mask");
  need_vector_operand(pipe, a, "the first source");
  if ((scalar != nullptr) != (mode == AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE))
    give_up("Select at %s:%d: VSEL_TENSOR_SCALAR_MODE takes a scalar, the other modes a tensor", where.file,
            where.line);
  const int size = kTypeBytes[type], per_repeat = 256 / size;
  const bool same_bits = mode == AscendC::SELMODE::VSEL_CMPMASK_SPR;
  const int64_t repeats = walk.count >= 0 ? (walk.count + per_repeat - 1) / per_repeat : walk.repeats;
  const int64_t bits_used = same_bits ? per_repeat : walk.count >= 0 ? walk.count : repeats * per_repeat;
  const uint8_t* bits = load(pipe, *mask.memory, mask.offset, (uint64_t)(bits_used + 7) / 8, "the selection mask");
  std::vector<uint8_t> second;
  if (walk.count >= 0) {
    const uint64_t bytes = lane_bytes(type, walk.count);
    const uint8_t* x = load(pipe, *a.memory, a.offset, bytes, "the first source");
    const uint8_t* y;
    if (scalar != nullptr) fill(second, type, scalar, (size_t)walk.count), y = second.data();
    else y = load(pipe, *b.memory, b.offset, bytes, "the second source");
    need_no_partial_overlap(pipe, d, bytes, a, bytes, "the first source");
    uint8_t* out = store(pipe, *d.memory, d.offset, bytes, "the destination");
    for (int64_t r = 0; r < repeats; ++r) {
      const int64_t first = r * per_repeat, n = walk.count - first < per_repeat ? walk.count - first : per_repeat;
      pick(out + first * size, x + first * size, y + first * size, bits, same_bits ? 0 : first, n, size);
    }
    return done(pipe, op_Select, where, (uint32_t)bytes, (uint64_t)walk.count);
  }
  if (scalar != nullptr) fill(second, type, scalar, (size_t)per_repeat);
  for (int r = 0; r < repeats; ++r) {
    uint8_t x[256] = {}, y[256] = {}, out[256];
    gather_repeat(pipe, a, type, walk, 1, r, x, "the first source");
    if (scalar != nullptr) memcpy(y, second.data(), 256);
    else gather_repeat(pipe, b, type, walk, 2, r, y, "the second source");
    pick(out, x, y, bits, same_bits ? 0 : (int64_t)r * per_repeat, per_repeat, size);
    scatter_repeat(pipe, d, type, walk, r, out);
  }
  done(pipe, op_Select, where, (uint32_t)repeats * 256, (uint64_t)(repeats * per_repeat));
}

void run_gather(Type type, View d, View source, View offsets, uint32_t base, int64_t count, Where where) {
  Pipe& pipe = begin(kV, op_Gather, where);
  need_vector_operand(pipe, d, "the destination");
  need_vector_operand(pipe, source, "the source");
  need_vector_operand(pipe, offsets, "the offsets");
  if (d.offset == source.offset)
    give_up("Gather at %s:%d: source and destination must be different memory", where.file, where.line);
  const int size = kTypeBytes[type];
  const uint8_t* table = load(pipe, *offsets.memory, offsets.offset, (uint64_t)count * 4, "the offsets");
  std::vector<uint32_t> at((size_t)count);
  memcpy(at.data(), table, (size_t)count * 4);
  uint8_t* out = store(pipe, *d.memory, d.offset, (uint64_t)(count * size), "the destination");
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t from = (uint64_t)base + at[(size_t)i];
    if (from % (uint64_t)size != 0)
      give_up("Gather at %s:%d: offset %llu of element %lld is no multiple of %d", where.file, where.line,
              (unsigned long long)from, (long long)i, size);
    memcpy(out + i * size, load(pipe, *source.memory, source.offset + from, (uint64_t)size, "the source"),
           (size_t)size);
  }
  done(pipe, op_Gather, where, (uint32_t)(count * size), (uint64_t)count);
}

void run_gather_mask(Type type, View d, View source, View pattern, int fixed, bool counted, uint32_t lanes_wanted,
                     const AscendC::GatherMaskParams& p, uint64_t* kept, Where where) {
  Pipe& pipe = begin(kV, op_GatherMask, where);
  need_vector_operand(pipe, d, "the destination");
  need_vector_operand(pipe, source, "the source");
  if (pattern.memory != nullptr) need_vector_operand(pipe, pattern, "the pattern");
  else if (fixed < 1 || fixed > 7)
    give_up("GatherMask at %s:%d: fixed patterns are 1 to 7, got %d", where.file, where.line, fixed);
  const int size = kTypeBytes[type], per_repeat = 256 / size;
  const int64_t n = counted ? (int64_t)lanes_wanted : per_repeat;
  static const uint8_t kFixed[8] = {0, 0x55, 0xaa, 0x11, 0x22, 0x44, 0x88, 0xff};
  std::vector<uint8_t> out;
  for (int r = 0; r < p.repeatTimes; ++r) {
    const uint64_t base = source.offset + (uint64_t)r * p.src0RepeatStride * 32;
    const uint8_t* bits = pattern.memory == nullptr
                              ? nullptr
                              : load(pipe, *pattern.memory, pattern.offset + (uint64_t)r * p.src1RepeatStride * 32,
                                     (uint64_t)(n + 7) / 8, "the pattern");
    for (int64_t i = 0; i < n; ++i) {
      if (!(bits != nullptr ? bits[i / 8] >> (i % 8) & 1 : kFixed[fixed] >> (i % 8) & 1)) continue;
      const int64_t block = i * size / 32;
      const uint8_t* from =
          load(pipe, *source.memory, base + (uint64_t)block * p.src0BlockStride * 32 + (uint64_t)(i * size % 32),
               (uint64_t)size, "the source");
      out.insert(out.end(), from, from + size);
    }
  }
  if (!out.empty()) memcpy(store(pipe, *d.memory, d.offset, out.size(), "the destination"), out.data(), out.size());
  *kept = out.size() / (size_t)size;
  done(pipe, op_GatherMask, where, (uint32_t)(p.repeatTimes * n * size), (uint64_t)(p.repeatTimes * n));
}

void run_index(Type type, View d, const void* first, int64_t count, Where where) {
  if (type != I8 && type != I16 && type != F16 && type != I32 && type != F32 && type != I64)
    refuse_type(op_CreateVecIndex, type, where);
  Pipe& pipe = begin(kV, op_CreateVecIndex, where);
  need_vector_operand(pipe, d, "the destination");
  const int size = kTypeBytes[type];
  uint8_t* out = store(pipe, *d.memory, d.offset, (uint64_t)(count * size), "the destination");
  std::vector<int64_t> steps((size_t)count);
  for (int64_t i = 0; i < count; ++i) steps[(size_t)i] = i;
  std::vector<uint8_t> begin_value, step((size_t)(count * size));
  fill(begin_value, type, first, (size_t)count);
  if (type == I64) memcpy(step.data(), steps.data(), step.size());
  else lanes().cast(step.data(), type, steps.data(), I64, RoundMode::CAST_RINT, (size_t)count);
  lanes().binary[kAdd][type](out, begin_value.data(), step.data(), (size_t)count);
  done(pipe, op_CreateVecIndex, where, (uint32_t)(count * size), (uint64_t)count);
}

}  // namespace twin
