// The vector unit's element-wise instructions over local memory.
#include "twin/vector.h"

#include <vector>

#include "lanes.h"
#include "walk.h"

namespace twin {
namespace {

Walk with_mask(const uint64_t* mask, bool by_bit, bool set_mask, int repeats, Type widest, Where where) {
  Walk walk{-1, {0, 0}, repeats, {1, 1, 1}, {8, 8, 8}};
  const int lanes_per_repeat = 256 / kTypeBytes[widest];
  if (!set_mask) {
    const Core& core = *current;
    if (core.count_mode) return contiguous((int64_t)core.mask[0]);
    walk.mask[0] = core.mask[0], walk.mask[1] = core.mask[1];
  } else if (by_bit) {
    walk.mask[0] = mask[0];
    walk.mask[1] = lanes_per_repeat > 64 ? mask[1] : 0;
  } else {
    if (mask[0] > (uint64_t)lanes_per_repeat)
      give_up("%s:%d: a repeat has %d lanes of this type, the mask names %llu", where.file, where.line,
              lanes_per_repeat, (unsigned long long)mask[0]);
    walk.mask[0] = mask[0] >= 64 ? ~0ull : (1ull << mask[0]) - 1;
    walk.mask[1] = mask[0] >= 128 ? ~0ull : mask[0] > 64 ? (1ull << (mask[0] - 64)) - 1 : 0;
  }
  if (lanes_per_repeat < 64) walk.mask[0] &= (1ull << lanes_per_repeat) - 1;
  if (lanes_per_repeat <= 64) walk.mask[1] = 0;
  return walk;
}

bool full(const Walk& walk, Type widest) {
  const int n = 256 / kTypeBytes[widest];
  const uint64_t low = n >= 64 ? ~0ull : (1ull << n) - 1, high = n > 64 ? ~0ull : 0;
  return walk.mask[0] == low && walk.mask[1] == high && n <= 128;
}

// A sliced walk over whole neighbouring repeats is a contiguous one.
Walk simplify(const Walk& walk, Type widest, const Type* types, int operands) {
  if (walk.count >= 0 || !full(walk, widest)) return walk;
  for (int k = 0; k < operands; ++k)
    if (walk.block_stride[k] != 1 ||
        (walk.repeats > 1 && walk.repeat_stride[k] != 8 * kTypeBytes[types[k]] / kTypeBytes[widest]))
      return walk;
  return contiguous((int64_t)walk.repeats * (256 / kTypeBytes[widest]));
}

[[noreturn]] void refuse_type(Op op, Type type, Where where) {
  give_up("%s at %s:%d: the device has no such instruction for %s", kOpNames[op], where.file, where.line,
          kTypeNames[type]);
}

}  // namespace

Walk sliced(const uint64_t* mask, bool by_bit, bool set_mask, int repeats, const AscendC::UnaryRepeatParams& p,
            Type widest, Where where) {
  Walk walk = with_mask(mask, by_bit, set_mask, repeats, widest, where);
  walk.block_stride[0] = p.dstBlkStride, walk.block_stride[1] = walk.block_stride[2] = p.srcBlkStride;
  walk.repeat_stride[0] = p.dstRepStride, walk.repeat_stride[1] = walk.repeat_stride[2] = p.srcRepStride;
  return walk;
}
Walk sliced(const uint64_t* mask, bool by_bit, bool set_mask, int repeats, const AscendC::BinaryRepeatParams& p,
            Type widest, Where where) {
  Walk walk = with_mask(mask, by_bit, set_mask, repeats, widest, where);
  walk.block_stride[0] = p.dstBlkStride, walk.block_stride[1] = p.src0BlkStride, walk.block_stride[2] = p.src1BlkStride;
  walk.repeat_stride[0] = p.dstRepStride, walk.repeat_stride[1] = p.src0RepStride,
  walk.repeat_stride[2] = p.src1RepStride;
  return walk;
}

void need_vector_operand(const Pipe& pipe, const View& v, const char* what) {
  const Where w = where_now(pipe);
  if (v.memory->kind != kUb)
    give_up("%s at %s:%d: %s lies in %s; vector instructions work on UB", op_now(pipe), w.file, w.line, what,
            v.memory->name);
  if (v.offset % 32 != 0)
    give_up("%s at %s:%d: %s starts at byte %llu of UB, and must start at a multiple of 32", op_now(pipe), w.file,
            w.line, what, (unsigned long long)v.offset);
}

void need_no_partial_overlap(const Pipe& pipe, const View& d, uint64_t d_bytes, const View& a, uint64_t a_bytes,
                             const char* what) {
  if (d.offset == a.offset || d.memory != a.memory || d.offset + d_bytes <= a.offset || a.offset + a_bytes <= d.offset)
    return;
  const Where w = where_now(pipe);
  if (told_before_here(w)) return;
  complain("%s at %s:%d: the destination [%llu, %llu) overlaps %s [%llu, %llu) without starting at the same address",
           op_now(pipe), w.file, w.line, (unsigned long long)d.offset, (unsigned long long)(d.offset + d_bytes), what,
           (unsigned long long)a.offset, (unsigned long long)(a.offset + a_bytes));
}

uint64_t lane_bytes(Type type, int64_t lanes) {
  return type == E2M1X2 ? ((uint64_t)lanes + 1) / 2 : (uint64_t)lanes * kTypeBytes[type];
}

// Bytes of a repeat whose lanes are all active, or 0.
static uint64_t whole_bytes(const Walk& walk, int size) {
  if (walk.mask[0] != ~0ull || (walk.mask[1] != 0 && walk.mask[1] != ~0ull)) return 0;
  const int bytes = (walk.mask[1] == 0 ? 64 : 128) * size;
  return bytes < 256 ? (uint64_t)bytes : 256;
}

void gather_repeat(Pipe& pipe, const View& v, Type type, const Walk& walk, int operand, int repeat, uint8_t* into,
                   const char* what) {
  const int size = kTypeBytes[type], per_block = 32 / size;
  const uint64_t base = v.offset + (uint64_t)repeat * walk.repeat_stride[operand] * 32, whole = whole_bytes(walk, size);
  if (whole > 0 && walk.block_stride[operand] == 1) {
    memcpy(into, load(pipe, *v.memory, base, whole, what), whole);
    return;
  }
  if (whole > 0 && walk.block_stride[operand] == 0) {
    const uint8_t* block = load(pipe, *v.memory, base, 32, what);
    for (uint64_t at = 0; at < whole; at += 32) memcpy(into + at, block, 32);
    return;
  }
  for (int lane = 0, block = 0; lane < 128 && block < 8; lane += per_block, ++block) {
    const uint32_t bytes = active_bytes(walk, lane, per_block, size);
    if (bytes == 0) continue;
    memcpy(into + block * 32,
           load_some(pipe, *v.memory, base + (uint64_t)block * walk.block_stride[operand] * 32, bytes, what), 32);
  }
}

void scatter_repeat(Pipe& pipe, const View& v, Type type, const Walk& walk, int repeat, const uint8_t* from) {
  const int size = kTypeBytes[type], per_block = 32 / size;
  const uint64_t base = v.offset + (uint64_t)repeat * walk.repeat_stride[0] * 32, whole = whole_bytes(walk, size);
  if (whole > 0 && walk.block_stride[0] == 1) {
    memcpy(store(pipe, *v.memory, base, whole, "the destination"), from, whole);
    return;
  }
  for (int lane = 0, block = 0; lane < 128 && block < 8; lane += per_block, ++block) {
    const uint32_t bytes = active_bytes(walk, lane, per_block, size);
    if (bytes == 0) continue;
    uint8_t* to =
        store_some(pipe, *v.memory, base + (uint64_t)block * walk.block_stride[0] * 32, bytes, "the destination");
    for (int i = 0; i < 32; ++i)
      if (bytes >> i & 1) to[i] = from[block * 32 + i];
  }
}

uint32_t active_bytes(const Walk& walk, int first_lane, int lanes, int size) {
  uint32_t bytes = 0;
  for (int i = 0; i < lanes && first_lane + i < 128; ++i) {
    const int lane = first_lane + i;
    if (walk.mask[lane / 64] >> (lane % 64) & 1) bytes |= (size == 4 ? 15u : (1u << size) - 1) << (i * size);
  }
  return bytes;
}

// The lanes of a source's repeat: where they lie, or gathered into `room` when they are no run of bytes or the results
// at `target` would overwrite a part of them.
static const uint8_t* row_of(Pipe& pipe, const View& v, Type type, int lanes, const Walk& walk, int operand, int repeat,
                             uint64_t target, uint8_t* room, const char* what) {
  const uint64_t bytes = (uint64_t)lanes * kTypeBytes[type],
                 at = v.offset + (uint64_t)repeat * walk.repeat_stride[operand] * 32;
  const bool whole = whole_bytes(walk, kTypeBytes[type]) == bytes;
  if (whole && walk.block_stride[operand] == 1 && (at == target || at + 256 <= target || target + 256 <= at))
    return load(pipe, *v.memory, at, bytes, what);
  if (!whole) memset(room, 0, 256);
  gather_repeat(pipe, v, type, walk, operand, repeat, room, what);
  return room;
}

// One destination and up to two sources, `compute` on contiguous lanes. `reads_target`: the old destination is an
// input too.
template <class Compute> static void run(Op op, const Type* types, View d, const View* sources, int count,
                                         bool reads_target, const Walk& asked, Where where, Compute compute) {
  Pipe& pipe = begin(kV, op, where);
  static const char* const kNames[] = {"the first source", "the second source"};
  need_vector_operand(pipe, d, "the destination");
  for (int k = 0; k < count; ++k) need_vector_operand(pipe, sources[k], kNames[k]);
  if ((asked.count == 0 || (asked.count < 0 && asked.repeats == 0)) && !told_before_here(where))
    complain(
        "%s at %s:%d: nothing to do; on this chip a count or repeat of 0 is not promised to leave everything alone",
        kOpNames[op], where.file, where.line);
  Type widest = types[0];
  for (int k = 1; k <= count; ++k)
    if (kTypeBytes[types[k]] > kTypeBytes[widest]) widest = types[k];
  const Walk walk = simplify(asked, widest, types, count + 1);
  if (walk.count >= 0) {
    const void* inputs[2] = {nullptr, nullptr};
    const uint64_t out_bytes = lane_bytes(types[0], walk.count);
    for (int k = 0; k < count; ++k) {
      const uint64_t bytes = lane_bytes(types[k + 1], walk.count);
      inputs[k] = load(pipe, *sources[k].memory, sources[k].offset, bytes, kNames[k]);
      need_no_partial_overlap(pipe, d, out_bytes, sources[k], bytes, kNames[k]);
    }
    if (reads_target) load(pipe, *d.memory, d.offset, out_bytes, "the destination");
    compute(store(pipe, *d.memory, d.offset, out_bytes, "the destination"), inputs[0], inputs[1], (size_t)walk.count);
    done(pipe, op, where, (uint32_t)out_bytes, (uint64_t)walk.count);
    return;
  }
  const int lanes_per_repeat = 256 / kTypeBytes[widest];
  if (kTypeBytes[widest] == 1 || types[0] == E2M1X2 || (count > 0 && types[1] == E2M1X2))
    give_up("%s at %s:%d: the sliced form of this type is not modelled", kOpNames[op], where.file, where.line);
  const uint64_t whole = (uint64_t)lanes_per_repeat * kTypeBytes[types[0]];
  // Whether a repeat's results are one run of bytes.
  const bool in_place = walk.block_stride[0] == 1 && whole_bytes(walk, kTypeBytes[types[0]]) == whole;
  for (int r = 0; r < walk.repeats; ++r) {
    alignas(64) uint8_t in[2][256], out[256];
    const uint8_t* from[2] = {nullptr, nullptr};
    const uint64_t to = d.offset + (uint64_t)r * walk.repeat_stride[0] * 32;
    for (int k = 0; k < count; ++k)
      from[k] = row_of(pipe, sources[k], types[k + 1], lanes_per_repeat, walk, k + 1, r, to, in[k], kNames[k]);
    if (in_place) {
      if (reads_target) load(pipe, *d.memory, to, whole, "the destination");
      compute(store(pipe, *d.memory, to, whole, "the destination"), from[0], from[1], (size_t)lanes_per_repeat);
      continue;
    }
    memset(out, 0, sizeof out);
    if (reads_target) gather_repeat(pipe, d, types[0], walk, 0, r, out, "the destination");
    compute(out, from[0], from[1], (size_t)lanes_per_repeat);
    scatter_repeat(pipe, d, types[0], walk, r, out);
  }
  done(pipe, op, where, (uint32_t)walk.repeats * 256, (uint64_t)walk.repeats * (uint64_t)lanes_per_repeat);
}

void run_binary(Op op, int lane_op, Type type, View d, View a, View b, const Walk& walk, Where where) {
  const BinaryLanes f = lanes().binary[lane_op][type];
  need_type(op, type, walk.count >= 0 ? Form::COUNT : Form::SLICED, where);
  if (f == nullptr) refuse_type(op, type, where);
  const Type types[] = {type, type, type};
  const View sources[] = {a, b};
  run(op, types, d, sources, 2, lane_op == kMulAddDst, walk, where,
      [f](void* o, const void* x, const void* y, size_t n) { f(o, x, y, n); });
}

void run_unary(Op op, int lane_op, Type type, View d, View a, const Walk& walk, Where where) {
  const UnaryLanes f = lanes().unary[lane_op][type];
  need_type(op, type, walk.count >= 0 ? Form::COUNT : Form::SLICED, where);
  if (f == nullptr) refuse_type(op, type, where);
  const Type types[] = {type, type};
  run(op, types, d, &a, 1, false, walk, where, [f](void* o, const void* x, const void*, size_t n) { f(o, x, n); });
}

void run_scalar(Op op, int lane_op, Type type, View d, View a, const void* scalar, const Walk& walk, Where where) {
  const ScalarLanes f = lanes().scalar[lane_op][type];
  need_type(op, type, walk.count >= 0 ? Form::COUNT : Form::SLICED, where);
  if (f == nullptr) refuse_type(op, type, where);
  const Type types[] = {type, type};
  run(op, types, d, &a, 1, lane_op == kAxpy, walk, where,
      [f, scalar](void* o, const void* x, const void*, size_t n) { f(o, x, scalar, n); });
}

void run_duplicate(Type type, View d, const void* scalar, const Walk& walk, Where where) {
  const ScalarLanes f = lanes().scalar[kDuplicate][type];
  if (f == nullptr) refuse_type(op_Duplicate, type, where);
  run(op_Duplicate, &type, d, nullptr, 0, false, walk, where,
      [f, scalar](void* o, const void*, const void*, size_t n) { f(o, o, scalar, n); });
}

void run_interleave(bool back, Type type, View d0, View d1, View a, View b, int64_t count, Where where) {
  Pipe& pipe = begin(kV, op_Interleave, where);
  const View operands[] = {d0, d1, a, b};
  for (const View& v : operands) need_vector_operand(pipe, v, "an operand");
  const size_t size = kTypeBytes[type], n = (size_t)count, bytes = n * size;
  std::vector<uint8_t> in(2 * bytes), out(2 * bytes);
  memcpy(in.data(), load(pipe, *a.memory, a.offset, bytes, "the first source"), bytes);
  memcpy(in.data() + bytes, load(pipe, *b.memory, b.offset, bytes, "the second source"), bytes);
  for (size_t i = 0; i < 2 * n; ++i) {
    const size_t apart = i % 2 * n + i / 2;
    memcpy(out.data() + (back ? apart : i) * size, in.data() + (back ? i : apart) * size, size);
  }
  memcpy(store(pipe, *d0.memory, d0.offset, bytes, "the first destination"), out.data(), bytes);
  memcpy(store(pipe, *d1.memory, d1.offset, bytes, "the second destination"), out.data() + bytes, bytes);
  done(pipe, op_Interleave, where, (uint32_t)(2 * bytes), 2 * n);
}

// Pairs and rounding modes of the table for this chip on the page "Cast"; modes as a bit set, bit 0 = CAST_NONE.
static uint32_t cast_modes(Type from, Type to) {
  constexpr uint32_t none = 1, rint = 2, five = 2 | 4 | 8 | 16 | 32, odd = 64;
  const auto pair = [](Type a, Type b) { return (int)a * TYPES + (int)b; };
  const int key = pair(from, to);
  static const struct {
    Type from, to;
    uint32_t modes;
  } kTable[] = {{I8, I16, none},      {I8, F16, none},
                {I8, I32, none},      {U8, U16, none},
                {U8, F16, none},      {U8, U32, none},
                {E2M1X2, BF16, none}, {E5M2, F32, none},
                {E4M3, F32, none},    {I16, U8, none},
                {I16, F16, five},     {I16, I32, none},
                {I16, U32, none},     {I16, F32, none},
                {U16, U8, none},      {U16, U32, none},
                {F16, I8, five},      {F16, U8, five},
                {F16, I16, five},     {F16, BF16, five},
                {F16, I32, five},     {F16, F32, none},
                {BF16, E2M1X2, five}, {BF16, F16, five},
                {BF16, I32, five},    {BF16, F32, none},
                {I32, U8, none},      {I32, I16, none},
                {I32, U16, none},     {I32, F32, five},
                {I32, I64, none},     {U32, U8, none},
                {U32, I16, none},     {U32, U16, none},
                {F32, E5M2, rint},    {F32, E4M3, rint},
                {F32, I16, five},     {F32, F16, five | odd | none},
                {F32, BF16, five},    {F32, I32, five},
                {F32, F32, five},     {F32, I64, five},
                {I64, I32, none},     {I64, F32, five}};
  for (const auto& row : kTable)
    if (pair(row.from, row.to) == key) return row.modes;
  return 0;
}

void run_cast(Type to, View d, Type from, View a, AscendC::RoundMode mode, const Walk& walk, Where where) {
  const uint32_t modes = cast_modes(from, to);
  if (!(modes >> (int)mode & 1))
    give_up("Cast at %s:%d: %s to %s %s", where.file, where.line, kTypeNames[from], kTypeNames[to],
            modes == 0 ? "is not among the conversions of this chip" : "does not take this rounding mode on this chip");
  if ((to == E2M1X2 || from == E2M1X2) && walk.count % 2 != 0)
    give_up("Cast at %s:%d: 4-bit values come in pairs, the count is odd", where.file, where.line);
  const Type types[] = {to, from};
  run(op_Cast, types, d, &a, 1, false, walk, where,
      [=](void* o, const void* x, const void*, size_t n) { lanes().cast(o, to, x, from, mode, n); });
}

}  // namespace twin
