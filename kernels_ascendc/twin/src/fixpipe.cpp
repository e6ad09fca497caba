// Out of L0C: rounding, scaling and layout on the way to global memory, UB or L1.
#include "lanes.h"
#include "trace.h"
#include "twin/cube.h"

namespace twin {
namespace {

using AscendC::CO2Layout;

// The chip's own float has 10 bits of mantissa for scales (page Fixpipe, constraints).
float scale_of(uint64_t word) { return float_of((uint32_t)word & ~0x1fffu); }

bool is_vector(QuantMode_t q) {
  switch (q) {
    case VDEQF16:
    case VQF322B8_PRE:
    case VREQ8:
    case VQF322FP8_PRE:
    case VQF322F16_PRE:
    case VQF322BF16_PRE:
    case VQF322F32_PRE:
    case VQS322BF16_PRE: return true;
    default: return false;
  }
}

void check_types(const Pipe& pipe, Type from, Type to, QuantMode_t q) {
  bool good = false;
  switch (q) {
    case NoQuant: good = from == to && (from == F32 || from == I32); break;
    case F322F16:
    case QF322F16_PRE:
    case VQF322F16_PRE: good = from == F32 && to == F16; break;
    case F322BF16:
    case QF322BF16_PRE:
    case VQF322BF16_PRE: good = from == F32 && to == BF16; break;
    case QF322F32_PRE:
    case VQF322F32_PRE: good = from == F32 && to == F32; break;
    case QF322FP8_PRE:
    case VQF322FP8_PRE: good = from == F32 && to == E4M3; break;
    case QF322B8_PRE:
    case VQF322B8_PRE: good = from == F32 && (to == I8 || to == U8); break;
    case REQ8:
    case VREQ8: good = from == I32 && (to == I8 || to == U8); break;
    case DEQF16:
    case VDEQF16: good = from == I32 && to == F16; break;
    case QS322BF16_PRE:
    case VQS322BF16_PRE: good = from == I32 && to == BF16; break;
  }
  if (good) return;
  const Where w = where_now(pipe);
  give_up("Fixpipe at %s:%d: quantPre %d does not turn %s into %s", w.file, w.line, (int)q, kTypeNames[from],
          kTypeNames[to]);
}

// A row of up to 16 results in the target's type.
void convert(uint8_t* out, Type to, const uint8_t* in, Type from, int64_t n, const FixpipeCall& call,
             const float* scales) {
  if (call.quant == NoQuant) {
    memcpy(out, in, (size_t)n * 4);
    for (int64_t i = 0; i < n && call.relu; ++i)
      if (out[i * 4 + 3] & 0x80) memset(out + i * 4, 0, 4);
    return;
  }
  float x[16];
  if (from == F32) memcpy(x, in, (size_t)n * 4);
  else lanes().cast(x, F32, in, from, RoundMode::CAST_RINT, (size_t)n);
  for (int64_t i = 0; i < n; ++i) {
    if (call.quant != F322F16 && call.quant != F322BF16) x[i] = x[i] * scales[i];
    if (call.relu && !(x[i] > 0)) x[i] = 0;
  }
  if (to == F32) memcpy(out, x, (size_t)n * 4);
  else if (to == I8 || to == U8) {
    for (int64_t i = 0; i < n; ++i) {
      const double r = whole(x[i], RoundMode::CAST_RINT), low = to == I8 ? -128 : 0, high = to == I8 ? 127 : 255;
      out[i] = (uint8_t)(int)(r < low ? low : r > high ? high : r);
    }
  } else lanes().cast(out, to, x, F32, RoundMode::CAST_RINT, (size_t)n);
}

struct Target {
  uint8_t* global;
  View local;
};

// Gives the place for `bytes` at `offset` of the target.
uint8_t* place_for(Pipe& pipe, const Target& t, int64_t offset, uint64_t bytes) {
  if (t.global == nullptr)
    return store(pipe, *t.local.memory, t.local.offset + (uint64_t)offset, bytes, "the destination");
  global_access(pipe, t.global + offset, bytes, pipe.core->atomic_op != 0 ? kAtomic : kWrite, "the destination");
  return t.global + offset;
}

void put(Pipe& pipe, const Target& t, int64_t offset, const uint8_t* bytes, int64_t n, Type type) {
  const int size = kTypeBytes[type];
  uint8_t* to = place_for(pipe, t, offset, (uint64_t)(n * size));
  if (t.global == nullptr || pipe.core->atomic_op == 0) memcpy(to, bytes, (size_t)(n * size));
  else
    lanes().binary[pipe.core->atomic_op == 1   ? kAdd
                   : pipe.core->atomic_op == 2 ? kMax
                                               : kMin][type](to, to, bytes, (size_t)n);
}

void move(Pipe& pipe, const Target& target, Type to, View source, Type from, const FixpipeCall& call, int64_t m0,
          int64_t m1, int64_t n0, int64_t n1) {
  const int size = kTypeBytes[to];
  const int64_t c0 = call.layout == CO2Layout::NZ && call.split  ? 8
                     : call.layout == CO2Layout::NZ && size == 1 ? 32
                                                                 : 16;
  float scales[16];
  uint8_t row[64];
  for (int64_t matrix = 0; matrix < call.matrices; ++matrix)
    for (int64_t n = n0; n < n1; n += 16) {
      const int64_t columns = n1 - n < 16 ? n1 - n : 16,
                    band = n / 16 * call.source_stride + matrix * call.source_matrix;
      for (int64_t i = 0; i < columns; ++i) scales[i] = scale_of(call.scalar);
      if (is_vector(call.quant)) {
        const uint8_t* words = load(pipe, *call.scales->memory, call.scales->offset + (uint64_t)n * 8,
                                    (uint64_t)columns * 8, "the scales");
        for (int64_t i = 0; i < columns; ++i) {
          uint64_t word;
          memcpy(&word, words + i * 8, 8);
          scales[i] = scale_of(word);
        }
      }
      const uint8_t* lines = load(pipe, *source.memory, source.offset + (uint64_t)(band + m0) * 64,
                                  (uint64_t)(m1 - m0) * 64, "the source");
      for (int64_t m = m0; m < m1; ++m) {
        convert(row, to, lines + (m - m0) * 64, from, columns, call, scales);
        const int64_t r = m - m0, base = matrix * call.target_matrix;
        if (call.layout == CO2Layout::ROW_MAJOR) {
          put(pipe, target, (base + r * call.target_stride + n - n0) * size, row, columns, to);
        } else if (call.layout == CO2Layout::COLUMN_MAJOR) {
          for (int64_t i = 0; i < columns; ++i)
            put(pipe, target, (base + (n - n0 + i) * call.target_stride + r) * size, row + i * size, 1, to);
        } else {
          for (int64_t i = 0; i < columns; i += c0 < 16 ? c0 : 16) {
            const int64_t at = n - n0 + i, run = c0 < 16 ? c0 : columns;
            put(pipe, target, (at / c0 * call.target_stride + r * c0 + at % c0) * size, row + i * size, run, to);
          }
        }
      }
    }
}

Pipe& start(View source, Type from, Type to, const FixpipeCall& call, Where where) {
  Pipe& pipe = begin(kFix, op_Fixpipe, where);
  if (source.memory->kind != kL0c)
    give_up("Fixpipe at %s:%d: the source lies in %s, and must lie in L0C", where.file, where.line,
            source.memory->name);
  if (source.offset % 64 != 0)
    give_up("Fixpipe at %s:%d: the source starts at byte %llu, and must start at a multiple of 64", where.file,
            where.line, (unsigned long long)source.offset);
  check_types(pipe, from, to, call.quant);
  if (call.n > 4095)
    give_up("Fixpipe at %s:%d: nSize is at most 4095, got %lld", where.file, where.line, (long long)call.n);
  if (call.layout == CO2Layout::NZ && call.n % (call.split ? 8 : 16) != 0)
    give_up("Fixpipe at %s:%d: nSize is a multiple of %d here, got %lld", where.file, where.line, call.split ? 8 : 16,
            (long long)call.n);
  if (call.target_stride == 0) give_up("Fixpipe at %s:%d: dstStride must not be 0", where.file, where.line);
  if (call.split && (from != F32 || to != F32 || call.layout != CO2Layout::NZ))
    give_up("Fixpipe at %s:%d: isChannelSplit is for float in Nz form", where.file, where.line);
  if (is_vector(call.quant) && call.scales == nullptr)
    give_up("Fixpipe at %s:%d: this quantPre takes a tensor of scales", where.file, where.line);
  if (call.unit != 0 && pipe.core->unit_m_set) acquire(pipe, pipe.core->unit_m, where);
  return pipe;
}

void finish(Pipe& pipe, Type to, const FixpipeCall& call, Where where) {
  if (call.unit != 0) pipe.core->unit_fix = release(pipe), pipe.core->unit_fix_set = true;
  if (call.unit == 3) pipe.core->unit_m_set = false;
  if (tracing) note_sizes(call.m, call.n, call.matrices, to);
  done(pipe, op_Fixpipe, where, (uint32_t)(call.n * call.m * call.matrices * kTypeBytes[to]),
       (uint64_t)(call.n * call.m * call.matrices));
}

}  // namespace

void fixpipe_to_global(uint8_t* target, Type to, View source, Type from, const FixpipeCall& call, Where where) {
  Pipe& pipe = start(source, from, to, call, where);
  move(pipe, {target, {}}, to, source, from, call, 0, call.m, 0, call.n);
  finish(pipe, to, call, where);
}

void fixpipe_to_local(View target, Type to, View source, Type from, const FixpipeCall& call, Where where) {
  Pipe& pipe = start(source, from, to, call, where);
  if (target.memory->kind == kL1) {
    move(pipe, {nullptr, target}, to, source, from, call, 0, call.m, 0, call.n);
    return finish(pipe, to, call, where);
  }
  if (target.memory->kind != kUb)
    give_up("Fixpipe at %s:%d: there is no path from L0C to %s", where.file, where.line, target.memory->name);
  if (target.offset % 32 != 0)
    give_up("Fixpipe at %s:%d: the destination starts at byte %llu, and must start at a multiple of 32", where.file,
            where.line, (unsigned long long)target.offset);
  if (call.layout == CO2Layout::ROW_MAJOR && call.n * kTypeBytes[to] % 32 != 0)
    give_up("Fixpipe at %s:%d: rows into UB are whole 32-byte blocks, nSize is %lld", where.file, where.line,
            (long long)call.n);
  if (call.dual == 0 && call.sub_block > 1)
    give_up("Fixpipe at %s:%d: subBlockId is 0 or 1, got %d", where.file, where.line, call.sub_block);
  if ((call.dual == 1 && call.m % 2 != 0) || (call.dual == 2 && call.n % 32 != 0) || call.dual > 2)
    give_up("Fixpipe at %s:%d: a dual destination takes an even mSize or nSize in multiples of 32", where.file,
            where.line);
  Group& group = *pipe.core->group;
  const auto ub = [&](int i) { return Target{nullptr, {&group.core[1 + i].memory[kUb], target.offset}}; };
  if (call.dual == 0) move(pipe, ub(call.sub_block), to, source, from, call, 0, call.m, 0, call.n);
  for (int i = 0; i < 2 && call.dual == 1; ++i)
    move(pipe, ub(i), to, source, from, call, i * call.m / 2, (i + 1) * call.m / 2, 0, call.n);
  for (int i = 0; i < 2 && call.dual == 2; ++i)
    move(pipe, ub(i), to, source, from, call, 0, call.m, i * call.n / 2, (i + 1) * call.n / 2);
  finish(pipe, to, call, where);
}

}  // namespace twin
