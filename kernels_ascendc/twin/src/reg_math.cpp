// Arithmetic on registers. It touches no memory, so it takes part in no races; lanes carry along whether they hold
// values.
#include <limits>

#include "lanes.h"
#include "reg_private.h"
#include "trace.h"
#include "walk.h"

namespace twin {
namespace {

// Checks where the instruction stands and records it; d is made from a, b and, when it reads what it held, itself.
void trace(Op op, Where where, Type type, Register* d = nullptr, const Register* a = nullptr,
           const Register* b = nullptr, bool reads_target = false) {
  if (!current->in_vector_function)
    give_up("%s at %s:%d: register instructions belong in a function that asc_vf_call calls", kOpNames[op], where.file,
            where.line);
  if (__builtin_expect(tracing, 0)) {
    uint32_t from = reads_target ? d->ready : 0;
    for (const Register* source : {a, b})
      if (source != nullptr && source->ready > from) from = source->ready;
    note_chain(d == nullptr ? nullptr : &d->ready, op, from);
  }
  done(current->pipe[kV], op, where, 256, 256 / (uint64_t)kTypeBytes[type]);
}

[[noreturn]] void refuse_type(Op op, Type type, Where where) {
  give_up("%s at %s:%d: the device has no such instruction for %s", kOpNames[op], where.file, where.line,
          kTypeNames[type]);
}

// Takes the active lanes of `result`; the others become zero, or stay when merging. With all active the result may lie
// in the register already.
void commit(Register& d, const uint8_t* result, const uint64_t* valid, const ByteMask& active, bool merge) {
  if (is_full(active)) {
    if (result != d.bytes) memcpy(d.bytes, result, 256);
    memmove(d.valid, valid, sizeof d.valid);
    return;
  }
  for (int i = 0; i < 256; ++i) {
    if (active.bits[i / 64] >> (i % 64) & 1) d.bytes[i] = result[i];
    else if (!merge) d.bytes[i] = 0;
  }
  for (int i = 0; i < 4; ++i)
    d.valid[i] = (valid[i] & active.bits[i]) | (merge ? d.valid[i] & ~active.bits[i] : ~active.bits[i]);
}

void commit_all(Register& d, const uint8_t* result) {
  memcpy(d.bytes, result, 256);
  memset(d.valid, 0xff, sizeof d.valid);
}

}  // namespace

// The lowest bit of every element, of a size of 1, 2, 4 or 8 bytes.
static uint64_t lowest_bits(int unit) {
  return unit == 1   ? ~0ull
         : unit == 2 ? 0x5555555555555555ull
         : unit == 4 ? 0x1111111111111111ull
                     : 0x0101010101010101ull;
}

Mask mask_of_count(uint32_t count, int unit) {
  Mask mask;
  const uint64_t lowest = lowest_bits(unit), bits = (uint64_t)count * (uint64_t)unit;
  for (uint64_t i = 0; i < 4 && bits > i * 64; ++i)
    mask.bits[i] = bits - i * 64 >= 64 ? lowest : lowest & ((uint64_t(1) << (bits - i * 64)) - 1);
  return mask;
}

Mask mask_of(int pattern, int unit) {
  const int n = 256 / unit;
  static const int kCounts[] = {0, 1, 2, 3, 4, 8, 16, 32, 64, 128};
  if (pattern <= 9) return mask_of_count((uint32_t)(pattern == 0 ? n : kCounts[pattern]), unit);
  if (pattern == 12 || pattern == 13) return mask_of_count((uint32_t)(pattern == 12 ? n / 2 : n / 4), unit);
  Mask mask;
  const int step = pattern == 10 ? 3 : pattern == 11 ? 4 : n + 1;
  for (int i = 0; i < n && step <= n; i += step) mask.bits[i * unit / 64] |= uint64_t(1) << (i * unit % 64);
  return mask;
}

void reg_binary(Op op, int lane_op, Type type, Register& d, const Register& a, const Register& b, const Mask& mask,
                bool merge, Where where) {
  need_type(op, type, Form::REGISTERS, where);
  const BinaryLanes f = lanes().binary[lane_op][type];
  if (f == nullptr) refuse_type(op, type, where);
  trace(op, where, type, &d, &a, &b, merge || lane_op == kMulAddDst);
  const ByteMask active = spread(mask, kTypeBytes[type]);
  alignas(64) uint8_t room[256];
  uint8_t* out = is_full(active) ? d.bytes : room;
  uint64_t valid[4];
  for (int i = 0; i < 4; ++i) valid[i] = a.valid[i] & b.valid[i];
  if (lane_op == kMulAddDst) {
    if (out == room) memcpy(room, d.bytes, 256);
    for (int i = 0; i < 4; ++i) valid[i] &= d.valid[i];
  }
  f(out, a.bytes, b.bytes, 256 / kTypeBytes[type]);
  commit(d, out, valid, active, merge);
}

void reg_unary(Op op, int lane_op, Type type, Register& d, const Register& a, const Mask& mask, bool merge,
               Where where) {
  need_type(op, type, Form::REGISTERS, where);
  const UnaryLanes f = lanes().unary[lane_op][type];
  if (f == nullptr) refuse_type(op, type, where);
  trace(op, where, type, &d, &a, nullptr, merge);
  const ByteMask active = spread(mask, kTypeBytes[type]);
  alignas(64) uint8_t room[256];
  uint8_t* out = is_full(active) ? d.bytes : room;
  f(out, a.bytes, 256 / kTypeBytes[type]);
  commit(d, out, a.valid, active, merge);
}

void reg_scalar(Op op, int lane_op, Type type, Register& d, const Register& a, const void* scalar, const Mask& mask,
                bool merge, Where where) {
  need_type(op, type, Form::REGISTERS, where);
  const ScalarLanes f = lanes().scalar[lane_op][type];
  if (f == nullptr) refuse_type(op, type, where);
  trace(op, where, type, &d, &a, nullptr, merge || lane_op == kAxpy);
  const ByteMask active = spread(mask, kTypeBytes[type]);
  alignas(64) uint8_t room[256];
  uint8_t* out = is_full(active) ? d.bytes : room;
  uint64_t valid[4];
  memcpy(valid, a.valid, sizeof valid);
  if (lane_op == kAxpy) {
    if (out == room) memcpy(room, d.bytes, 256);
    for (int i = 0; i < 4; ++i) valid[i] &= d.valid[i];
  }
  f(out, a.bytes, scalar, 256 / kTypeBytes[type]);
  commit(d, out, valid, active, merge);
}

void reg_fill(Type type, Register& d, const void* scalar, const Mask& mask, bool merge, Where where) {
  trace(op_RegDuplicate, where, type, &d, nullptr, nullptr, merge);
  alignas(64) uint8_t out[256];
  const uint64_t valid[4] = {~0ull, ~0ull, ~0ull, ~0ull};
  for (int i = 0; i < 256; i += kTypeBytes[type]) memcpy(out + i, scalar, kTypeBytes[type]);
  commit(d, out, valid, spread(mask, kTypeBytes[type]), merge);
}

void reg_arange(Type type, Register& d, const void* first, bool down, Where where) {
  trace(op_RegArange, where, type, &d);
  const int n = 256 / kTypeBytes[type];
  int64_t steps[256];
  alignas(64) uint8_t start[256], step[256], out[256];
  for (int i = 0; i < n; ++i) steps[i] = down ? n - 1 - i : i;
  if (type == I64) memcpy(step, steps, 256);
  else lanes().cast(step, type, steps, I64, RoundMode::CAST_RINT, (size_t)n);
  for (int i = 0; i < 256; i += kTypeBytes[type]) memcpy(start + i, first, kTypeBytes[type]);
  if (lanes().binary[kAdd][type] == nullptr) refuse_type(op_RegArange, type, where);
  lanes().binary[kAdd][type](out, start, step, (size_t)n);
  commit_all(d, out);
}

void reg_compare(Type type, AscendC::CMPMODE mode, Mask& d, const Register& a, const Register* b, const void* scalar,
                 const Mask& mask, Where where) {
  constexpr CompareOp kModes[] = {kLt, kGt, kEq, kLe, kGe, kNe};
  const CompareLanes f = lanes().compare[kModes[(int)mode]][type];
  if (f == nullptr) refuse_type(op_RegCompare, type, where);
  trace(op_RegCompare, where, type, nullptr, &a, b);
  const int size = kTypeBytes[type];
  alignas(64) uint8_t other[256], result[256];
  if (b == nullptr)
    for (int i = 0; i < 256; i += size) memcpy(other + i, scalar, (size_t)size);
  f(result, a.bytes, b == nullptr ? other : b->bytes, (size_t)(256 / size));
  Mask out;
  for (int i = 0; i < 256 / size; ++i)
    if (result[i] && (mask.bits[i * size / 64] >> (i * size % 64) & 1))
      out.bits[i * size / 64] |= uint64_t(1) << (i * size % 64);
  d = out;
}

void reg_select(Type type, Register& d, const Register& a, const Register& b, const Mask& mask, Where where) {
  Register out;
  trace(op_RegSelect, where, type, &out, &a, &b);
  const ByteMask first = spread(mask, kTypeBytes[type]);
  for (int i = 0; i < 256; ++i) out.bytes[i] = first.bits[i / 64] >> (i % 64) & 1 ? a.bytes[i] : b.bytes[i];
  for (int i = 0; i < 4; ++i) out.valid[i] = (a.valid[i] & first.bits[i]) | (b.valid[i] & ~first.bits[i]);
  d = out;
}

namespace {

double lowest(Type t) {
  switch (t) {
    case I16: return -32768;
    case U16:
    case U32: return 0;
    case I32: return -2147483648.0;
    default: return -std::numeric_limits<double>::infinity();
  }
}
double highest(Type t) {
  return t == I16   ? 32767
         : t == U16 ? 65535
         : t == I32 ? 2147483647.0
         : t == U32 ? 4294967295.0
                    : std::numeric_limits<double>::infinity();
}

double lane(const uint8_t* p, Type type, int i) {
  float f;
  int32_t n;
  switch (type) {
    case F32: memcpy(&f, p + i * 4, 4); return f;
    case F16: {
      uint16_t h;
      memcpy(&h, p + i * 2, 2);
      return from_half(h);
    }
    case I32: memcpy(&n, p + i * 4, 4); return n;
    case U32: {
      uint32_t u;
      memcpy(&u, p + i * 4, 4);
      return u;
    }
    case I16: {
      int16_t s;
      memcpy(&s, p + i * 2, 2);
      return s;
    }
    default: {
      uint16_t u;
      memcpy(&u, p + i * 2, 2);
      return u;
    }
  }
}
void put_lane(uint8_t* p, Type type, int i, double x) {
  switch (type) {
    case F32: {
      const float f = (float)x;
      memcpy(p + i * 4, &f, 4);
      return;
    }
    case F16: {
      const uint16_t h = to_half((float)x);
      memcpy(p + i * 2, &h, 2);
      return;
    }
    case I32:
    case U32: {
      const uint32_t u = (uint32_t)(int64_t)x;
      memcpy(p + i * 4, &u, 4);
      return;
    }
    default: {
      const uint16_t u = (uint16_t)(int64_t)x;
      memcpy(p + i * 2, &u, 2);
      return;
    }
  }
}

// The result over lanes [first, first + n): a sum as a tree of neighbours, or an extreme and where it stands.
double reduce_lanes(ReduceType how, Type type, const uint8_t* bytes, const ByteMask& active, int first, int n,
                    int* index) {
  const int size = kTypeBytes[type];
  const auto on = [&](int i) { return active.bits[i * size / 64] >> (i * size % 64) & 1; };
  *index = 0;
  if (how == ReduceType::SUM) {
    if (type == I32 || type == U32) {
      int64_t sum = 0;
      for (int i = first; i < first + n; ++i) sum += on(i) ? (int64_t)lane(bytes, type, i) : 0;
      return (double)sum;
    }
    float x[128] = {};
    for (int i = 0; i < n; ++i) x[i] = on(first + i) ? (float)lane(bytes, type, first + i) : 0.0f;
    for (int w = n; w > 1; w /= 2)
      for (int i = 0; i < w / 2; ++i)
        x[i] = type == F16 ? from_half(to_half(x[2 * i] + x[2 * i + 1])) : x[2 * i] + x[2 * i + 1];
    return x[0];
  }
  double best = how == ReduceType::MAX ? lowest(type) : highest(type);
  bool any = false;
  for (int i = first; i < first + n; ++i) {
    if (!on(i)) continue;
    const double v = lane(bytes, type, i);
    if (v != v) return *index = i, v;
    if (!any || (how == ReduceType::MAX ? v > best : v < best)) best = v, *index = i, any = true;
  }
  return best;
}

}  // namespace

void reg_reduce(bool by_block, ReduceType how, Type type, Register& d, const Register& a, const Mask& mask,
                Where where) {
  const Op op = by_block ? op_RegReduceDataBlock : op_RegReduce;
  if (!(type == F32 || type == F16 || type == I32 || type == U32 ||
        (how != ReduceType::SUM && (type == I16 || type == U16))))
    refuse_type(op, type, where);
  trace(op, where, type, &d, &a);
  const int size = kTypeBytes[type], n = 256 / size;
  const ByteMask active = spread(mask, size);
  alignas(64) uint8_t out[256] = {};
  bool good = true;
  for (int i = 0; i < 4; ++i) good = good && (a.valid[i] & active.bits[i]) == active.bits[i];
  int index;
  if (by_block) {
    for (int b = 0; b < 8; ++b)
      put_lane(out, type, b, reduce_lanes(how, type, a.bytes, active, b * n / 8, n / 8, &index));
  } else {
    put_lane(out, type, 0, reduce_lanes(how, type, a.bytes, active, 0, n, &index));
    if (how != ReduceType::SUM) memcpy(out + size, &index, (size_t)size);
  }
  commit_all(d, out);
  if (!good) memset(d.valid, 0, sizeof d.valid);
}

namespace {

bool all_valid(const Register& r) { return (r.valid[0] & r.valid[1] & r.valid[2] & r.valid[3]) == ~0ull; }

template <class T> void interleave(bool back, uint8_t* out, const uint8_t* in) {
  constexpr int n = 256 / sizeof(T);
  T from[2 * n], to[2 * n];
  memcpy(from, in, 512);
  if (back)
    for (int i = 0; i < n; ++i) to[i] = from[2 * i], to[n + i] = from[2 * i + 1];
  else
    for (int i = 0; i < n; ++i) to[2 * i] = from[i], to[2 * i + 1] = from[n + i];
  memcpy(out, to, 512);
}
void interleave(bool back, int unit, uint8_t* out, const uint8_t* in) {
  if (unit == 1) interleave<uint8_t>(back, out, in);
  else if (unit == 2) interleave<uint16_t>(back, out, in);
  else interleave<uint32_t>(back, out, in);
}

}  // namespace

void reg_interleave(bool back, int unit, Register& d0, Register& d1, const Register& a, const Register& b,
                    Where where) {
  trace(op_RegInterleave, where, unit == 1 ? U8 : unit == 2 ? U16 : U32, &d0, &a, &b);
  d1.ready = d0.ready;
  uint8_t in[512], out[512];
  memcpy(in, a.bytes, 256), memcpy(in + 256, b.bytes, 256);
  interleave(back, unit, out, in);
  uint64_t valid[8];
  memset(valid, 0xff, sizeof valid);
  if (!all_valid(a) || !all_valid(b)) {
    uint8_t bits[512];
    for (int i = 0; i < 512; ++i) bits[i] = (i < 256 ? a : b).valid[i % 256 / 64] >> (i % 64) & 1;
    interleave(back, unit, bits, bits);
    memset(valid, 0, sizeof valid);
    for (int i = 0; i < 512; ++i) valid[i / 64] |= (uint64_t)bits[i] << (i % 64);
  }
  memcpy(d0.bytes, out, 256), memcpy(d1.bytes, out + 256, 256);
  memcpy(d0.valid, valid, 32), memcpy(d1.valid, valid + 4, 32);
}

void reg_squeeze(int unit, Register& d, const Register& a, const Mask& mask, Where where) {
  Register out;
  trace(op_RegSqueeze, where, unit == 1 ? U8 : unit == 2 ? U16 : U32, &out, &a);
  memset(out.bytes, 0, 256);
  memset(out.valid, 0xff, sizeof out.valid);
  int next = 0;
  for (int i = 0; i < 256; i += unit) {
    if (!(mask.bits[i / 64] >> (i % 64) & 1)) continue;
    memcpy(out.bytes + next, a.bytes + i, (size_t)unit);
    if (!(a.valid[i / 64] >> (i % 64) & 1))
      for (int k = 0; k < unit; ++k) out.valid[(next + k) / 64] &= ~(uint64_t(1) << ((next + k) % 64));
    next += unit;
  }
  d = out;
}

namespace {

template <class T> void move_items(uint8_t* to, int to_step, const uint8_t* from, int from_step, int n) {
  for (int i = 0; i < n; ++i) memcpy(to + i * to_step, from + i * from_step, sizeof(T));
}
// n items of `size` bytes, a step apart on both sides.
void move_items(uint8_t* to, int to_step, const uint8_t* from, int from_step, int size, int n) {
  if (to_step == size && from_step == size) memcpy(to, from, (size_t)(size * n));
  else if (size == 1) move_items<uint8_t>(to, to_step, from, from_step, n);
  else if (size == 2) move_items<uint16_t>(to, to_step, from, from_step, n);
  else if (size == 4) move_items<uint32_t>(to, to_step, from, from_step, n);
  else move_items<uint64_t>(to, to_step, from, from_step, n);
}

}  // namespace

// The wider type has 256 bytes of elements; the narrower one sits in every second or fourth place, `layout` says which.
void reg_cast(Type to, Register& d, Type from, const Register& a, int layout, bool saturate, AscendC::RoundMode mode,
              const Mask& mask, Where where) {
  Register result;
  trace(op_RegCast, where, to, &result, &a);
  const bool pairs = to == E2M1X2 || from == E2M1X2;
  const int to_size = kTypeBytes[to], from_size = kTypeBytes[from],
            wide = pairs                 ? 4
                   : to_size > from_size ? to_size
                                         : from_size;
  const int ratio = wide / (to_size < from_size ? to_size : from_size);
  if (to_size == from_size && !pairs) layout = 0;
  if (layout < 0 || layout >= ratio)
    give_up("RegCast at %s:%d: %s to %s takes a layout below %d, got %d", where.file, where.line, kTypeNames[from],
            kTypeNames[to], ratio, layout);
  const ByteMask active = spread(mask, wide);
  const bool full = is_full(active);
  alignas(64) uint8_t out[256] = {}, in[256], made[256];
  memset(result.valid, 0xff, sizeof result.valid);
  const int items = 256 / wide, narrow = pairs ? 1 : wide / ratio;
  const int from_step = from_size * (pairs ? (from == E2M1X2 ? 1 : 2) : 1),
            to_step = to_size * (pairs ? (to == E2M1X2 ? 1 : 2) : 1);
  move_items(in, from_step, a.bytes + (from_step == wide ? 0 : layout * narrow), wide, from_step, items);
  lanes().cast(made, to, in, from, mode, (size_t)(pairs ? items * 2 : items));
  move_items(out + (to_step == wide ? 0 : layout * narrow), wide, made, to_step, to_step, items);
  const bool edges = !pairs && (from == F32 || from == F16 || from == BF16) && (to == F16 || to == E4M3 || to == E5M2);
  for (int i = 0; i < items && (!full || edges || !all_valid(a)); ++i) {
    if (!(active.bits[i * wide / 64] >> (i * wide % 64) & 1)) {
      memset(out + i * wide, 0, (size_t)wide);
      continue;
    }
    const int read_at = from_step == wide ? i * wide : i * wide + layout * narrow,
              write_at = to_step == wide ? i * wide : i * wide + layout * narrow;
    if (edges) {
      float x;
      if (from == F32) memcpy(&x, a.bytes + read_at, 4);
      else lanes().cast(&x, F32, a.bytes + read_at, from, RoundMode::CAST_NONE, 1);
      const float largest = to == F16 ? 65504.0f : to == E4M3 ? 448.0f : 57344.0f;
      if (x != x && saturate) memset(out + write_at, 0, (size_t)to_size);
      if (!saturate && (x > largest || x < -largest)) {
        const bool negative = x < 0;
        if (to == F16) out[write_at] = 0, out[write_at + 1] = negative ? 0xfc : 0x7c;
        else if (to == E4M3) out[write_at] = negative ? 0xff : 0x7f;
        else out[write_at] = negative ? 0xfc : 0x7c;
      }
    }
    for (int k = 0; k < from_step; ++k)
      if (!(a.valid[(read_at + k) / 64] >> ((read_at + k) % 64) & 1))
        for (int j = 0; j < to_step; ++j) result.valid[(write_at + j) / 64] &= ~(uint64_t(1) << ((write_at + j) % 64));
  }
  memcpy(result.bytes, out, 256);
  d = result;
}

}  // namespace twin
