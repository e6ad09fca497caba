// Into L1 in Nz form, from L1 into L0A and L0B, and the product.
#include "twin/cube.h"

#include <vector>

#include "lanes.h"
#include "trace.h"

namespace twin {
namespace {

void need_multiple(const Pipe& pipe, uint64_t offset, uint64_t to, const char* what) {
  if (offset % to == 0) return;
  const Where w = where_now(pipe);
  give_up("%s at %s:%d: %s starts at byte %llu, and must start at a multiple of %llu", op_now(pipe), w.file, w.line,
          what, (unsigned long long)offset, (unsigned long long)to);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int per_row(Type type) { return type == E2M1X2 ? 64 : 32 / kTypeBytes[type]; }  // elements of 32 bytes

}  // namespace

// Row n and 32-byte column chunk c of the source land at chunk c * c0_stride + n * row_stride; a short last chunk is
// filled with zeros.
void to_nz(View target, const uint8_t* source, View local_source, int item, const Matrices& m, Where where) {
  const bool local = source == nullptr;
  Pipe& pipe = begin(local ? kMte3 : kMte2, m.dn ? op_Dn2Nz : op_Nd2Nz, where);
  if (target.memory->kind != kL1)
    give_up("%s at %s:%d: the destination lies in %s; this path ends in L1", op_now(pipe), where.file, where.line,
            target.memory->name);
  need_multiple(pipe, target.offset, 32, "the destination");
  const int64_t per_chunk = 32 / item, chunks = ceil_div(m.columns, per_chunk);
  for (int64_t i = 0; i < m.count && m.rows > 0 && m.columns > 0; ++i) {
    const int64_t first = i * m.source_step;
    for (int64_t n = 0; n < (m.dn ? m.columns : m.rows); ++n) {  // runs that are contiguous in the source
      const int64_t at = first + n * (m.dn ? m.column_step : m.row_step), bytes = (m.dn ? m.rows : m.columns) * item;
      if (!local) global_access(pipe, source + at * item, (uint64_t)bytes, kRead, "the source");
      else load(pipe, *local_source.memory, local_source.offset + (uint64_t)(at * item), (uint64_t)bytes, "the source");
    }
    const uint8_t* from = (local ? local_source.memory->data + local_source.offset : source) + first * item;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t columns = m.columns - c * per_chunk < per_chunk ? m.columns - c * per_chunk : per_chunk;
      const uint64_t base = target.offset + (uint64_t)(i * m.target_step * item + c * m.c0_stride * 32);
      if (m.row_stride == 1) store(pipe, *target.memory, base, (uint64_t)m.rows * 32, "the destination");
      for (int64_t n = 0; n < m.rows; ++n) {
        const uint64_t row = base + (uint64_t)(n * m.row_stride * 32);
        if (m.row_stride != 1) store(pipe, *target.memory, row, 32, "the destination");
        uint8_t* to = target.memory->data + row;
        if (!m.dn) {
          memcpy(to, from + (n * m.row_step + c * per_chunk) * item, (size_t)(columns * item));
        } else {
          for (int64_t k = 0; k < columns; ++k)
            memcpy(to + k * item, from + (n + (c * per_chunk + k) * m.column_step) * item, (size_t)item);
        }
        memset(to + columns * item, 0, (size_t)(32 - columns * item));
      }
    }
  }
  if (tracing) note_sizes(m.rows, m.columns, m.count, item);
  done(pipe, m.dn ? op_Dn2Nz : op_Nd2Nz, where, (uint32_t)(m.count * m.rows * m.columns * item),
       (uint64_t)(m.count * m.rows));
}

namespace {

// Element (row, column) of the source becomes (column, row); K0 elements of the new rows make a 32-byte line.
void transpose(Pipe& pipe, View target, View source, Type type, const AscendC::LoadData2DParamsV2& p) {
  const int k0 = per_row(type);
  const int64_t rows = p.mStep * 16, columns = (int64_t)p.kStep * k0;
  for (int64_t k = 0; k < p.kStep; ++k)
    load(pipe, *source.memory,
         source.offset + (uint64_t)((p.kStartPosition + k) * p.srcStride + p.mStartPosition) * 512,
         (uint64_t)p.mStep * 512, "the source");
  for (int64_t k1 = 0; k1 < rows / k0; ++k1)
    store(pipe, *target.memory, target.offset + (uint64_t)(k1 * p.dstStride) * 512, (uint64_t)columns / 16 * 512,
          "the destination");
  const auto nibble = [](const uint8_t* line, int64_t i) { return (uint8_t)(line[i / 2] >> (i % 2 * 4) & 15); };
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t* from = source.memory->data + source.offset +
                            ((p.kStartPosition + c / k0) * p.srcStride + p.mStartPosition + r / 16) * 512 + r % 16 * 32;
      uint8_t* to = target.memory->data + target.offset + (r / k0 * p.dstStride + c / 16) * 512 + c % 16 * 32;
      if (type != E2M1X2) {
        const int size = kTypeBytes[type];
        memcpy(to + r % k0 * size, from + c % k0 * size, (size_t)size);
        continue;
      }
      uint8_t& pair = to[r % k0 / 2];
      const uint8_t value = nibble(from, c % k0);
      pair = r % 2 ? (uint8_t)((pair & 15) | value << 4) : (uint8_t)((pair & 0xf0) | value);
    }
}

}  // namespace

void load_fractals(View target, View source, Type type, const AscendC::LoadData2DParamsV2& p, Where where) {
  Pipe& pipe = begin(kMte1, op_LoadData, where);
  if (source.memory->kind != kL1 || (target.memory->kind != kL0a && target.memory->kind != kL0b))
    give_up("LoadData at %s:%d: the path is from L1 to L0A or L0B, not from %s to %s", where.file, where.line,
            source.memory->name, target.memory->name);
  need_multiple(pipe, target.offset, 512, "the destination");
  need_multiple(pipe, source.offset, 32, "the source");
  if (p.mStep > 255 || p.kStep > 255)
    give_up("LoadData at %s:%d: mStep and kStep are at most 255, got %d and %d", where.file, where.line, p.mStep,
            p.kStep);
  if (p.ifTranspose) {
    const int m_unit = type == E2M1X2 ? 4 : kTypeBytes[type] == 1 ? 2 : 1, k_unit = kTypeBytes[type] == 4 ? 2 : 1;
    if (p.mStep % m_unit != 0 || p.kStep % k_unit != 0)
      give_up("LoadData at %s:%d: transposing %s takes mStep in multiples of %d and kStep of %d, got %d and %d",
              where.file, where.line, kTypeNames[type], m_unit, k_unit, p.mStep, p.kStep);
    transpose(pipe, target, source, type, p);
  } else {
    for (int64_t k = 0; k < p.kStep && p.mStep > 0; ++k)
      move_blocks(pipe, *source.memory,
                  source.offset + (uint64_t)((p.kStartPosition + k) * p.srcStride + p.mStartPosition) * 512,
                  *target.memory, target.offset + (uint64_t)(k * p.dstStride) * 512, (uint64_t)p.mStep * 512);
  }
  if (tracing) note_sizes(p.mStep, 0, p.kStep, type);
  done(pipe, op_LoadData, where, (uint32_t)p.mStep * p.kStep * 512, p.ifTranspose);
}

// Scales lie beside their matrix: at a sixteenth of its offset, in a memory of their own.
void load_scales(View values, View scales, const AscendC::LoadData2DMxParams& p, Where where) {
  Pipe& pipe = begin(kMte1, op_LoadDataMx, where);
  Memory& target = pipe.core->memory[values.memory->kind == kL0a ? kL0aMx : kL0bMx];
  need_multiple(pipe, scales.offset, 32, "the scales' source");
  for (int64_t x = 0; x < p.xStep && p.yStep > 0; ++x)
    move_blocks(pipe, *scales.memory,
                scales.offset + (uint64_t)((p.xStartPosition + x) * p.srcStride + p.yStartPosition) * 32, target,
                values.offset / 16 + (uint64_t)(x * p.dstStride) * 32, (uint64_t)p.yStep * 32);
  done(pipe, op_LoadDataMx, where, (uint32_t)p.xStep * p.yStep * 32, 0);
}

namespace {

struct Operand {
  View view;
  Type type;
  int64_t rows, k;  // rows of A, or columns of B
  const char* name;
};

// The rows and k of an operand must have been written; fractals' other rows may hold anything.
void need_written(Pipe& pipe, const Operand& o, bool flat) {
  const int k0 = per_row(o.type), bits = o.type == E2M1X2 ? 4 : kTypeBytes[o.type] * 8;
  const int64_t fractals = ceil_div(o.rows, 16), lines = ceil_div(o.k, k0);
  const uint64_t bytes = flat ? (uint64_t)ceil_div(o.k * bits / 8, 32) * 32 : (uint64_t)(lines * fractals) * 512;
  load_unchecked(pipe, *o.view.memory, o.view.offset, bytes, o.name);
  bool good = true;
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t left = (o.k - line * k0) * bits / 8;
    const uint32_t mask = left >= 32 ? ~0u : (1u << left) - 1;
    good = good && holds(*o.view.memory, o.view.offset / 32 + (uint64_t)(flat ? line : line * fractals * 16),
                         flat ? 1 : (uint64_t)o.rows, mask);
  }
  if (good) return;
  const Where w = where_now(pipe);
  complain("%s at %s:%d: %s holds values that nothing has written", op_now(pipe), w.file, w.line, o.name);
}

void widen(float* out, const uint8_t* bytes, Type type, int64_t n) {
  if (type == F32) memcpy(out, bytes, (size_t)n * 4);
  else lanes().cast(out, F32, bytes, type, RoundMode::CAST_NONE, (size_t)n);
}

// scale (row r, group g of 32 along k): fractals of 16 x 2 bytes, those of one 16-row band side by side.
float scale_at(const uint8_t* scales, int64_t groups, int64_t r, int64_t g) {
  return from_e8m0(scales[(r / 16 * (groups / 2) + g / 2) * 32 + r % 16 * 2 + g % 2]);
}

// An operand's lines as floats, in its own layout; lines that nothing multiplies with may hold anything.
struct Lines {
  const float* data;
  int64_t line_rows;
  int k0;
};
Lines lines_of(std::vector<float>& room, Pipe& pipe, const Operand& o, bool flat, bool mx) {
  const int k0 = per_row(o.type);
  const int64_t rows = flat ? 1 : ceil_div(o.rows, 16) * 16, lines = ceil_div(o.k, k0);
  room.resize((size_t)(rows * lines * k0));
  widen(room.data(), o.view.memory->data + o.view.offset, o.type, rows * lines * k0);
  if (mx) {
    Memory& memory = pipe.core->memory[o.view.memory->kind == kL0a ? kL0aMx : kL0bMx];
    const int64_t groups = o.k / 32;
    const uint8_t* scales =
        load(pipe, memory, o.view.offset / 16, (uint64_t)(rows / 16 * (groups / 2)) * 32, "the scales");
    for (int64_t r = 0; r < o.rows; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const float s = scale_at(scales, groups, r, g);
        float* group = room.data() + (g * 32 / k0 * rows + r) * k0 + g * 32 % k0;
        for (int i = 0; i < 32; ++i) group[i] *= s;
      }
  }
  return {room.data(), rows, k0};
}

void check_types(Op op, Type c, Type a, Type b, Where where) {
  const auto fp8 = [](Type t) { return t == E4M3 || t == E5M2; };
  const bool mx = op == op_MmadMx;
  const bool good = mx ? c == F32 && ((fp8(a) && fp8(b)) || (a == E2M1X2 && b == E2M1X2))
                       : (c == I32 && a == I8 && b == I8) ||
                             (c == F32 && ((a == b && (a == F16 || a == BF16 || a == F32)) || (fp8(a) && fp8(b))));
  if (good) return;
  give_up("%s at %s:%d: %s times %s into %s is not among the products of this chip%s", kOpNames[op], where.file,
          where.line, kTypeNames[a], kTypeNames[b], kTypeNames[c], mx ? " (both operands FP8, or both FP4)" : "");
}

void multiply_ints(int32_t* c, const uint8_t* a, const uint8_t* b, int64_t m, int64_t n, int64_t k, int64_t c_rows) {
  const int64_t a_rows = ceil_div(m, 16) * 16, b_rows = ceil_div(n, 16) * 16;
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < m; ++i) {
      int32_t sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum += (int32_t)(int8_t)a[(l / 32 * a_rows + i) * 32 + l % 32] *
               (int32_t)(int8_t)b[(l / 32 * b_rows + j) * 32 + l % 32];
      c[(j / 16 * c_rows + i) * 16 + j % 16] += sum;
    }
}

}  // namespace

void product(Op op, View c, Type c_type, View a, Type a_type, View b, Type b_type, const View* bias,
             const AscendC::MmadParams& p, Where where) {
  check_types(op, c_type, a_type, b_type, where);
  Pipe& pipe = begin(kM, op, where);
  const bool mx = op == op_MmadMx;
  const int64_t m = p.m, n = p.n, k = p.k;
  if (a.memory->kind != kL0a || b.memory->kind != kL0b || c.memory->kind != kL0c)
    give_up("%s at %s:%d: operands lie in %s, %s and %s; they belong in L0A, L0B and L0C", kOpNames[op], where.file,
            where.line, a.memory->name, b.memory->name, c.memory->name);
  if (m > 4095 || n > 4095 || k > 4095)
    give_up("%s at %s:%d: m, n and k are at most 4095, got %d, %d, %d", kOpNames[op], where.file, where.line, p.m, p.n,
            p.k);
  if (mx && k % 64 != 0) give_up("MmadMx at %s:%d: k is a multiple of 64, got %d", where.file, where.line, p.k);
  if (!p.cmatrixInitVal && p.cmatrixSource && bias == nullptr)
    give_up("%s at %s:%d: cmatrixSource is not modelled; the form with a bias does the same", kOpNames[op], where.file,
            where.line);
  const bool flat = m == 1 && !p.disableGemv;
  if (mx && flat)
    give_up("MmadMx at %s:%d: the page does not say how one row is read; set disableGemv or take m = 16", where.file,
            where.line);
  need_multiple(pipe, c.offset, 1024, "the result");
  need_multiple(pipe, a.offset, mx && a_type != E2M1X2 ? 1024 : 512, "the left matrix");
  need_multiple(pipe, b.offset, mx && a_type != E2M1X2 ? 1024 : 512, "the right matrix");
  if (m == 0 || n == 0 || k == 0) return;
  // Large enough products wait for each other by themselves (page Mmad, "synchronisation").
  if ((m / 16) * (n / 16) >= 10) pipe.known.at[pipe.tid] = pipe.now - 1;
  if (p.unitFlag != 0 && pipe.core->unit_fix_set)
    acquire(pipe, pipe.core->unit_fix, where), pipe.core->unit_fix_set = false;

  const Operand left{a, a_type, m, k, "the left matrix"}, right{b, b_type, n, k, "the right matrix"};
  need_written(pipe, left, flat);
  need_written(pipe, right, false);
  const int64_t c_rows = ceil_div(m, 16) * 16, bands = ceil_div(n, 16);
  const uint8_t* bias_data =
      bias == nullptr ? nullptr : load(pipe, *bias->memory, bias->offset, (uint64_t)n * 4, "the bias");
  for (int64_t j = 0; j < bands; ++j) {
    const uint64_t at = c.offset + (uint64_t)(j * c_rows) * 64, bytes = (uint64_t)m * 64;
    if (bias == nullptr && !p.cmatrixInitVal) load(pipe, *c.memory, at, bytes, "the result's old value");
    uint8_t* rows = store(pipe, *c.memory, at, bytes, "the result");
    if (bias == nullptr && p.cmatrixInitVal) memset(rows, 0, bytes);
    for (int64_t i = 0; i < m && bias != nullptr; ++i) {
      const int64_t columns = n - j * 16 < 16 ? n - j * 16 : 16;
      memset(rows + i * 64, 0, 64);
      memcpy(rows + i * 64, bias_data + j * 64, (size_t)columns * 4);
    }
  }
  uint8_t* result = c.memory->data + c.offset;
  if (c_type == I32) {
    multiply_ints(reinterpret_cast<int32_t*>(result), a.memory->data + a.offset, b.memory->data + b.offset, m, n, k,
                  c_rows);
  } else {
    static std::vector<float> left_room, right_room, panel;
    const Lines x = lines_of(left_room, pipe, left, flat, mx), y = lines_of(right_room, pipe, right, false, mx);
    panel.resize((size_t)k * 16);
    for (int64_t j = 0; j < bands; ++j) {
      lanes().transpose_panel(panel.data(), y.data + j * 16 * y.k0, (long)y.line_rows, y.k0, (int)k);
      const int64_t columns = n - j * 16 < 16 ? n - j * 16 : 16;
      for (int64_t l = 0; l < k && columns < 16; ++l)
        memset(panel.data() + l * 16 + columns, 0, (size_t)(16 - columns) * 4);
      lanes().multiply(reinterpret_cast<float*>(result) + j * c_rows * 16, x.data, (long)x.line_rows, x.k0,
                       panel.data(), (int)m, (int)k);
    }
  }
  if (p.unitFlag == 3) pipe.core->unit_m = release(pipe), pipe.core->unit_m_set = true;
  if (tracing) note_sizes(m, n, k, a_type);
  done(pipe, op, where, (uint32_t)((m + n) * k), (uint64_t)(ceil_div(m, 16) * bands * 256 * k));
}

}  // namespace twin
