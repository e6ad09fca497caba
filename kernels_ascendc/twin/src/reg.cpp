// Vector functions: what moves between UB and registers, and the rules between stores and loads of one function.
#include "twin/reg.h"

#include "lanes.h"
#include "reg_private.h"
#include "trace.h"

namespace twin {

void enter_vector_function(Where where) {
  Core& core = *current;
  if (core.kind == kCube)
    give_up("asc_vf_call at %s:%d on %s: only vector cores run vector functions", where.file, where.line,
            place(core).c_str());
  if (core.in_vector_function) give_up("asc_vf_call at %s:%d inside a vector function", where.file, where.line);
  core.in_vector_function = true;
  core.stores_seen = core.pipe[kV].now;
}
void leave_vector_function(Where where) {
  if (tracing) trace_vector_function(current->pipe[kV], where);
  current->in_vector_function = false;
}

// Loads see the function's own stores only behind LocalMemBar<VEC_STORE, VEC_LOAD>; the page asks for it.
void reg_barrier(bool store_to_load, Where where) {
  if (mutation::at(mutation::kLocalMemBar, where) == mutation::kDrop) return;
  Pipe& pipe = begin(kV, op_LocalMemBar, where);
  if (store_to_load) current->stores_seen = pipe.now;
  if (tracing) note_chain_barrier();
  done(pipe, op_LocalMemBar, where, 0, 0);
}

namespace {

Pipe& start(Op op, Where where) {
  if (!current->in_vector_function)
    give_up("%s at %s:%d: register instructions belong in a function that asc_vf_call calls", kOpNames[op], where.file,
            where.line);
  return begin(kV, op, where);
}

uint64_t offset_in_ub(const void* address, int alignment, const Pipe& pipe) {
  Memory& ub = memory_of_pointer(*current, address);
  const uint64_t offset = (uint64_t)(static_cast<const uint8_t*>(address) - ub.data);
  if (offset % (uint64_t)alignment != 0) {
    const Where w = where_now(pipe);
    give_up("%s at %s:%d: byte %llu of UB, and must be a multiple of %d", op_now(pipe), w.file, w.line,
            (unsigned long long)offset, alignment);
  }
  return offset;
}

// `bytes` from UB with a bit for each of whether it was written.
struct Loaded {
  const uint8_t* data;
  uint64_t valid[8];  // of up to 512 bytes
};
Loaded fetch(Pipe& pipe, const void* address, uint64_t bytes, int alignment) {
  const uint64_t offset = offset_in_ub(address, alignment, pipe);
  Memory& ub = current->memory[kUb];
  const uint32_t all = pipe.known.at[pipe.tid];
  pipe.known.at[pipe.tid] = current->stores_seen;
  Loaded got;
  got.data = load_unchecked(pipe, ub, offset, bytes, "the source");
  pipe.known.at[pipe.tid] = all;
  if (offset % 32 == 0 && bytes % 32 == 0) {
    valid_bytes(ub, offset / 32, bytes / 32, reinterpret_cast<uint32_t*>(got.valid));
    return got;
  }
  memset(got.valid, 0, sizeof got.valid);
  for (uint64_t i = 0; i < bytes; ++i) {
    const uint64_t at = offset + i;
    if (holds(ub, at / 32, 1, 1u << (at % 32))) got.valid[i / 64] |= uint64_t(1) << (i % 64);
  }
  return got;
}
// 256 bytes that all hold values, or null.
const uint8_t* fetch_quick(Pipe& pipe, const void* address) {
  const uint64_t offset = offset_in_ub(address, 32, pipe);
  const uint32_t all = pipe.known.at[pipe.tid];
  pipe.known.at[pipe.tid] = current->stores_seen;
  const uint8_t* data = load_quick(pipe, current->memory[kUb], offset);
  pipe.known.at[pipe.tid] = all;
  return data;
}
bool valid_at(const Loaded& l, int from, int n) {
  for (; n >= 64 && from % 64 == 0; from += 64, n -= 64)
    if (l.valid[from / 64] != ~0ull) return false;
  for (int i = from; i < from + n; ++i)
    if (!(l.valid[i / 64] >> (i % 64) & 1)) return false;
  return true;
}
void set_item(Register& d, int at, int n, const uint8_t* value, bool good) {
  memcpy(d.bytes + at, value, (size_t)n);
  for (int i = at; i < at + n; ++i)
    good ? d.valid[i / 64] |= uint64_t(1) << (i % 64) : d.valid[i / 64] &= ~(uint64_t(1) << (i % 64));
}

void complain_unwritten(const Pipe& pipe) {
  const Where w = where_now(pipe);
  complain("%s at %s:%d stores or uses register lanes that hold nothing written", op_now(pipe), w.file, w.line);
}

}  // namespace

void reg_load(Register& d, const void* address, Load how, int unit, Where where) {
  Pipe& pipe = start(op_LoadAlign, where);
  if (tracing) note_chain(&d.ready, op_LoadAlign, 0);
  const int lanes_of_unit = 256 / unit;
  if (how == Load::NORM) {
    if (const uint8_t* data = fetch_quick(pipe, address)) {
      memcpy(d.bytes, data, 256);
      memset(d.valid, 0xff, sizeof d.valid);
      return done(pipe, op_LoadAlign, where, 256, (uint64_t)lanes_of_unit);
    }
    const Loaded l = fetch(pipe, address, 256, 32);
    memcpy(d.bytes, l.data, 256);
    memcpy(d.valid, l.valid, sizeof d.valid);
    return done(pipe, op_LoadAlign, where, 256, (uint64_t)lanes_of_unit);
  }
  // Lane i takes item i / repeat * step of what is read; UNPACK's lanes between are zero.
  const int bytes = how == Load::BRC       ? unit
                    : how == Load::US      ? 128
                    : how == Load::DS      ? 512
                    : how == Load::UNPACK  ? 128
                    : how == Load::UNPACK4 ? 64
                    : how == Load::BLK     ? 32
                                           : 8 * unit;
  const Loaded l = fetch(pipe, address, (uint64_t)bytes, how == Load::BRC ? unit : how == Load::E2B ? 8 * unit : 32);
  const auto source = [&](int i) {
    switch (how) {
      case Load::BRC: return 0;
      case Load::US: return i / 2;
      case Load::DS: return i * 2;
      case Load::UNPACK: return i % 2 ? -1 : i / 2;
      case Load::UNPACK4: return i % 4 ? -1 : i / 4;
      case Load::BLK: return i * unit % 32 / unit;
      default: return i * unit / 32;
    }
  };
  memset(d.bytes, 0, 256);
  memset(d.valid, 0xff, sizeof d.valid);
  const auto move = [&](auto item) {
    for (int i = 0; i < lanes_of_unit; ++i)
      if (const int from = source(i); from >= 0) memcpy(d.bytes + i * (int)sizeof item, l.data + from * (int)sizeof item, sizeof item);
  };
  if (unit == 1) move(uint8_t());
  else if (unit == 2) move(uint16_t());
  else if (unit == 4) move(uint32_t());
  else move(uint64_t());
  if (!valid_at(l, 0, bytes))
    for (int i = 0; i < lanes_of_unit; ++i)
      if (const int from = source(i); from >= 0) set_item(d, i * unit, unit, l.data + from * unit, valid_at(l, from * unit, unit));
  done(pipe, op_LoadAlign, where, 256, (uint64_t)lanes_of_unit);
}

void reg_load_pairs(Register& d0, Register& d1, const void* address, int unit, Where where) {
  Pipe& pipe = start(op_LoadAlign, where);
  if (tracing) note_chain(&d0.ready, op_LoadAlign, 0), d1.ready = d0.ready;
  const Loaded l = fetch(pipe, address, 512, 32);
  for (int i = 0; i < 256 / unit; ++i) {
    set_item(d0, i * unit, unit, l.data + 2 * i * unit, valid_at(l, 2 * i * unit, unit));
    set_item(d1, i * unit, unit, l.data + (2 * i + 1) * unit, valid_at(l, (2 * i + 1) * unit, unit));
  }
  done(pipe, op_LoadAlign, where, 512, 512 / (uint64_t)unit);
}

void reg_load_unaligned(Register& d, StreamIn& in, const void* address, uint64_t step, Where where) {
  Pipe& pipe = start(op_LoadUnAlign, where);
  if (tracing) note_chain(&d.ready, op_LoadUnAlign, 0);
  if (in.next != address)
    complain("LoadUnAlign at %s:%d starts where neither LoadUnAlignPre nor the load before it left off", where.file,
             where.line);
  in.next = step == 0 ? nullptr : static_cast<const uint8_t*>(address) + step;
  const Loaded l = fetch(pipe, address, 256, 1);
  memcpy(d.bytes, l.data, 256);
  memcpy(d.valid, l.valid, sizeof d.valid);
  done(pipe, op_LoadUnAlign, where, 256, 256);
}

void reg_load_mask(Mask& d, const void* address, Where where) {
  Pipe& pipe = start(op_LoadAlign, where);
  const Loaded l = fetch(pipe, address, 32, 32);
  if (!valid_at(l, 0, 32)) complain_unwritten(pipe);
  memcpy(d.bits, l.data, 32);
  done(pipe, op_LoadAlign, where, 32, 1);
}

namespace {

// Writes `bytes` from `data`, those whose bit in `active` is set.
void put_bytes(Pipe& pipe, const void* address, const uint8_t* data, const uint64_t* active, int bytes, int alignment) {
  const uint64_t offset = offset_in_ub(address, alignment, pipe);
  Memory& ub = current->memory[kUb];
  bool all = true;
  for (int i = 0; i < bytes / 64 && all; ++i) all = active[i] == ~0ull;
  for (int i = bytes / 64 * 64; i < bytes && all; ++i) all = active[i / 64] >> (i % 64) & 1;
  if (all) {
    memcpy(store(pipe, ub, offset, (uint64_t)bytes, "the destination"), data, (size_t)bytes);
    return;
  }
  for (uint64_t at = offset / 32 * 32; at < offset + (uint64_t)bytes; at += 32) {
    uint32_t mask = 0;
    for (int i = 0; i < 32; ++i) {
      const int64_t k = (int64_t)(at + (uint64_t)i) - (int64_t)offset;
      if (k >= 0 && k < bytes && (active[k / 64] >> (k % 64) & 1)) mask |= 1u << i;
    }
    if (mask == 0) continue;
    uint8_t* to = store_some(pipe, ub, at, mask, "the destination");
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) to[i] = data[(int64_t)(at + (uint64_t)i) - (int64_t)offset];
  }
}

}  // namespace

void reg_store(void* address, const Register& s, Store how, int unit, const Mask& mask, Where where) {
  Pipe& pipe = start(op_StoreAlign, where);
  if (tracing) note_chain(nullptr, op_StoreAlign, s.ready);
  mutation::mask_use(mask.bits, where);
  const ByteMask active = spread(mask, unit);
  if (how == Store::FIRST) {
    const uint64_t one[4] = {(uint64_t(1) << unit) - 1, 0, 0, 0};
    if ((s.valid[0] & one[0]) != one[0]) complain_unwritten(pipe);
    put_bytes(pipe, address, s.bytes, one, unit, unit);
    return done(pipe, op_StoreAlign, where, (uint32_t)unit, 1);
  }
  if (how == Store::NORM) {
    bool good = true;
    for (int i = 0; i < 4; ++i) good = good && (s.valid[i] & active.bits[i]) == active.bits[i];
    if (!good) complain_unwritten(pipe);
    put_bytes(pipe, address, s.bytes, active.bits, 256, 32);
    return done(pipe, op_StoreAlign, where, 256, 256 / (uint64_t)unit);
  }
  const int keep = how == Store::PACK ? unit / 2 : unit / 4;  // the low bytes of each element
  uint8_t data[256];
  uint64_t wanted[4] = {};
  bool good = true;
  for (int i = 0; i < 256 / unit; ++i)
    for (int k = 0; k < keep; ++k) {
      const int from = i * unit + k, to = i * keep + k;
      data[to] = s.bytes[from];
      if (!(active.bits[from / 64] >> (from % 64) & 1)) continue;
      wanted[to / 64] |= uint64_t(1) << (to % 64);
      good = good && (s.valid[from / 64] >> (from % 64) & 1);
    }
  if (!good) complain_unwritten(pipe);
  put_bytes(pipe, address, data, wanted, 256 / unit * keep, 32);
  done(pipe, op_StoreAlign, where, (uint32_t)(256 / unit * keep), 256 / (uint64_t)unit);
}

void reg_store_blocks(void* address, const Register& s, uint32_t stride, int unit, const Mask& mask, Where where) {
  Pipe& pipe = start(op_StoreAlign, where);
  if (tracing) note_chain(nullptr, op_StoreAlign, s.ready);
  mutation::mask_use(mask.bits, where);
  const ByteMask active = spread(mask, unit);
  bool good = true;
  for (int i = 0; i < 4; ++i) good = good && (s.valid[i] & active.bits[i]) == active.bits[i];
  if (!good) complain_unwritten(pipe);
  for (int block = 0; block < 8; ++block) {
    const uint64_t wanted[1] = {active.bits[block / 2] >> (block % 2 * 32) & 0xffffffffu};
    if (wanted[0] == 0) continue;
    put_bytes(pipe, static_cast<uint8_t*>(address) + (size_t)block * stride * 32, s.bytes + block * 32, wanted, 32, 32);
  }
  done(pipe, op_StoreAlign, where, 256, 256 / (uint64_t)unit);
}

void reg_store_pairs(void* address, const Register& s0, const Register& s1, int unit, Where where) {
  Pipe& pipe = start(op_StoreAlign, where);
  if (tracing) note_chain(nullptr, op_StoreAlign, s0.ready > s1.ready ? s0.ready : s1.ready);
  uint8_t data[512];
  uint64_t wanted[8];
  memset(wanted, 0xff, sizeof wanted);
  for (int i = 0; i < 256 / unit; ++i) {
    memcpy(data + 2 * i * unit, s0.bytes + i * unit, (size_t)unit);
    memcpy(data + (2 * i + 1) * unit, s1.bytes + i * unit, (size_t)unit);
  }
  for (int i = 0; i < 4; ++i)
    if ((s0.valid[i] & s1.valid[i]) != ~0ull) {
      complain_unwritten(pipe);
      break;
    }
  put_bytes(pipe, address, data, wanted, 512, 32);
  done(pipe, op_StoreAlign, where, 512, 512 / (uint64_t)unit);
}

void reg_store_stream(StreamOut& out, void* address, const Register& s, int bytes, Where where) {
  Pipe& pipe = start(op_StoreUnAlign, where);
  if (tracing) note_chain(nullptr, op_StoreUnAlign, s.ready);
  uint8_t data[32 + 256];
  bool good = bytes <= 256;
  for (int i = 0; i < bytes && i < 256; ++i) good = good && (s.valid[i / 64] >> (i % 64) & 1);
  if (!good) complain_unwritten(pipe), bytes = bytes > 256 ? 256 : bytes;
  if (out.held > 0 && out.next != address)
    complain("StoreUnAlign at %s:%d does not go on where the store before it ended", where.file, where.line);
  memcpy(data, out.bytes, (size_t)out.held);
  memcpy(data + out.held, s.bytes, (size_t)bytes);
  const uint8_t* begin_at = static_cast<const uint8_t*>(address) - out.held;
  const uint64_t offset = offset_in_ub(begin_at, 1, pipe);
  const int total = out.held + bytes, whole = (int)((offset + (uint64_t)total) / 32 * 32) - (int)offset;
  out.next = static_cast<const uint8_t*>(address) + bytes;
  if (whole > 0) {
    uint64_t wanted[5] = {~0ull, ~0ull, ~0ull, ~0ull, ~0ull};
    put_bytes(pipe, begin_at, data, wanted, whole, 1);
  }
  const int kept = whole > 0 ? whole : 0;
  out.held = total - kept;
  memcpy(out.bytes, data + kept, (size_t)out.held);
  done(pipe, op_StoreUnAlign, where, (uint32_t)bytes, (uint64_t)bytes);
}

void reg_end_stream(StreamOut& out, const void* address, Where where) {
  Pipe& pipe = start(op_StoreUnAlign, where);
  if (out.held > 0) {
    if (out.next != address)
      complain("StoreUnAlignPost at %s:%d does not go on where the last store ended", where.file, where.line);
    const uint64_t wanted[1] = {~0ull};
    put_bytes(pipe, out.next - out.held, out.bytes, wanted, out.held, 1);
  }
  out.held = 0;
  done(pipe, op_StoreUnAlign, where, 32, 32);
}

StreamOut::~StreamOut() {
  if (held > 0) complain("an unaligned store keeps %d bytes back; StoreUnAlignPost is missing", held);
}

void reg_gather(Register& d, Type type, const void* base, Type source, const Register& index, const Mask& mask,
                Where where) {
  Pipe& pipe = start(op_RegGather, where);
  if (tracing) note_chain(&d.ready, op_RegGather, index.ready);
  const int size = kTypeBytes[type], from_size = kTypeBytes[source];
  const uint64_t offset = offset_in_ub(base, 32, pipe);
  Memory& ub = current->memory[kUb];
  Register out;
  memset(out.bytes, 0, 256);
  for (int i = 0; i < 4; ++i) out.valid[i] = ~0ull;
  const uint32_t all = pipe.known.at[pipe.tid];
  pipe.known.at[pipe.tid] = current->stores_seen;
  for (int i = 0; i < 256 / size; ++i) {
    const int at = i * size;
    if (!(mask.bits[at / 64] >> (at % 64) & 1)) continue;
    uint64_t k = 0;
    memcpy(&k, index.bytes + at, size == 8 ? 4 : (size_t)size);
    if (!(index.valid[at / 64] >> (at % 64) & 1)) complain_unwritten(pipe);
    memcpy(out.bytes + at, load(pipe, ub, offset + k * (uint64_t)from_size, (uint64_t)from_size, "the source"),
           (size_t)from_size);
  }
  pipe.known.at[pipe.tid] = all;
  d = out;
  done(pipe, op_RegGather, where, 256, 256 / (uint64_t)size);
}

}  // namespace twin
