// Quantised row formats on the vector unit: codes and scales from float32, and back. All on bits, as the formats are defined.
#pragma once

#include "di_rows.h"

namespace {

constexpr uint32_t kMostInRow = 4096;  // items of a row that encoders and decoders hold at once

__aicore__ inline uint32_t GroupOf(int32_t format) { return format == DI_FP4_16 ? 16 : 32; }
__aicore__ inline uint32_t CodeBytes(int32_t format, uint32_t width) {
  return format == DI_ROW_F32 ? width * 4 : format == DI_FP8_32 ? width : width / 2;
}
__aicore__ inline uint32_t ScaleBytes(int32_t format, uint32_t width) { return format == DI_ROW_F32 ? 0 : width / GroupOf(format); }

// Where row `slot` of a store lies: values, and scales.
struct RowPlace {
  __gm__ uint8_t *codes, *scales;
};
__aicore__ inline RowPlace PlaceOf(__gm__ uint8_t* cache, int64_t stride, int32_t slot, int32_t format, uint32_t width, int32_t block_rows) {
  const int32_t rows = Max32(block_rows, 1), row = slot % rows;
  const uint32_t codes = CodeBytes(format, width), scales = ScaleBytes(format, width);
  __gm__ uint8_t* block = cache + (int64_t)(slot / rows) * stride;
  if (format == DI_MXFP4_32) return {block + (int64_t)row * codes, block + (int64_t)rows * codes + (int64_t)row * scales};
  return {block + (int64_t)row * (codes + scales), block + (int64_t)row * (codes + scales) + codes};
}

// One lane block for each group's scalar: multiplies, divides or masks rows by a value that their groups share.
struct Groups {
  uint32_t items, count, blocks;  // items of a group, groups, blocks of eight lanes in a group
};
#define DI_PER_GROUP(Op, row, spread, lanes, g)                                                                      \
  for (uint32_t first = 0; first < (g).count; first += 128) {                                                        \
    const uint32_t some = (g).count - first < 128 ? (g).count - first : 128;                                         \
    Op((row)[first * (lanes)], (row)[first * (lanes)], (spread)[first * ((lanes) / (g).blocks)], (lanes), some,      \
       AscendC::BinaryRepeatParams(1, 1, 0, (g).blocks, (g).blocks, 1));                                             \
  }

class RowEncoder {
 public:
  __aicore__ inline void Init(AscendC::TPipe& pipe, int32_t format, uint32_t width) {
    format_ = format;
    if (format == DI_ROW_F32) {
      pipe.InitBuffer(codes_, 2, AlignUp(width, 64) * 4);
      return;
    }
    const uint32_t group = GroupOf(format), padded = AlignUp(width / group, 64);
    pipe.InitBuffer(work_, AlignUp(width, 64) * sizeof(float));
    for (int i = 0; i < 4; ++i) pipe.InitBuffer(small_[i], padded * sizeof(float));
    pipe.InitBuffer(spread_, padded * 32);
    pipe.InitBuffer(codes_, 2, AlignUp(width, 64));
    pipe.InitBuffer(bytes_, 2, padded);
  }

  // Writes a row of `width` floats, which are overwritten. `flag` is set if one of them is NaN or infinite.
  __aicore__ inline void Store(const AscendC::LocalTensor<float>& row, uint32_t width, __gm__ uint8_t* codes, __gm__ uint8_t* scales) {
    using namespace AscendC;
    if (format_ == DI_ROW_F32) {
      LocalTensor<float> copy = codes_.AllocTensor<float>();
      Muls(copy, row, 1.0f, width);
      codes_.EnQue(copy);
      copy = codes_.DeQue<float>();
      StoreRow(Global<float>(codes), copy, width);
      codes_.FreeTensor(copy);
      return;
    }
    const uint32_t group = GroupOf(format_);
    const Groups g{group, width / group, group / 8};
    ClearBadGroups(row, g, width);
    Scale(row, g, width);
    LocalTensor<uint8_t> small = codes_.AllocTensor<uint8_t>();
    if (format_ == DI_FP8_32) Cast(small.ReinterpretCast<fp8_e4m3fn_t>(), row, RoundMode::CAST_RINT, width);
    else PackFp4(small, row, width);
    codes_.EnQue(small);
    small = codes_.DeQue<uint8_t>();
    StoreRow(Global<uint8_t>(codes), small, CodeBytes(format_, width));
    codes_.FreeTensor(small);
    LocalTensor<uint8_t> bytes = bytes_.DeQue<uint8_t>();
    StoreRow(Global<uint8_t>(scales), bytes, g.count);
    bytes_.FreeTensor(bytes);
  }

  // Whether the last stored row had a NaN or an infinity (int32 1 or 0 for each of `groups` groups).
  __aicore__ inline AscendC::LocalTensor<int32_t> BadGroups() { return small_[2].Get<int32_t>(); }

 private:
  // x * 0 is NaN exactly for what is not finite, and so is the group's sum. Such a group becomes zeros.
  __aicore__ inline void ClearBadGroups(const AscendC::LocalTensor<float>& row, const Groups& g, uint32_t width) {
    using namespace AscendC;
    LocalTensor<float> work = work_.Get<float>();
    LocalTensor<int32_t> bad = small_[2].Get<int32_t>(), keep = small_[3].Get<int32_t>();
    const uint32_t padded = AlignUp(g.count, 8);
    Muls(work, row, 0.0f, width);
    Duplicate(bad, 0, padded);
    for (uint32_t first = 0; first < g.count; first += 128)
      WholeReduceSum(bad[first].ReinterpretCast<float>(), work[first * g.items], g.items, Min32(128, g.count - first), 1, 1, g.blocks);
    Abs(bad.ReinterpretCast<float>(), bad.ReinterpretCast<float>(), padded);
    ShiftRight(bad, bad, 22, padded);
    Mins(bad, bad, 1, padded);
    Adds(keep, bad, -1, padded);  // all ones, or zero
    LocalTensor<int32_t> spread = spread_.Get<int32_t>();
    Brcb(spread, keep, padded / 8, BrcbRepeatParams(1, 8));
    LocalTensor<uint16_t> bits = row.ReinterpretCast<uint16_t>(), mask = spread.ReinterpretCast<uint16_t>();
    DI_PER_GROUP(And, bits, mask, g.items * 2, g)
  }

  // The scales' codes into the queue of bytes; the row divided by the scales.
  __aicore__ inline void Scale(const AscendC::LocalTensor<float>& row, const Groups& g, uint32_t width) {
    using namespace AscendC;
    LocalTensor<float> work = work_.Get<float>(), amax = small_[0].Get<float>(), other = small_[1].Get<float>();
    LocalTensor<int32_t> bad = small_[2].Get<int32_t>(), code = small_[0].Get<int32_t>(), mark = small_[3].Get<int32_t>();
    const uint32_t padded = AlignUp(g.count, 8);
    const bool wide = format_ == DI_FP8_32;
    Abs(work, row, width);
    Duplicate(amax, 1.0f, padded);
    for (uint32_t first = 0; first < g.count; first += 128)
      WholeReduceMax(amax[first], work[first * g.items], g.items, Min32(128, g.count - first), 1, 1, g.blocks, ReduceOrder::ORDER_ONLY_VALUE);
    const float floor = wide ? 1e-4f : format_ == DI_FP4_16 ? 6.0f / 512 : 6.0f * 1.17549435e-38f;
    Maxs(amax, amax, floor, padded);
    Duplicate(other, wide ? 448.0f : 6.0f, padded);
    Div(amax, amax, other, padded);
    LocalTensor<uint8_t> bytes = bytes_.AllocTensor<uint8_t>();
    LocalTensor<float> spread = spread_.Get<float>();
    Muls(mark, bad, format_ == DI_FP4_16 ? 127 : 255, padded);
    if (format_ == DI_FP4_16) {
      LocalTensor<fp8_e4m3fn_t> e4m3 = bytes.ReinterpretCast<fp8_e4m3fn_t>();
      Cast(e4m3, amax, RoundMode::CAST_RINT, padded);
      Cast(other, e4m3, RoundMode::CAST_NONE, padded);
      Brcb(spread, other, padded / 8, BrcbRepeatParams(1, 8));
      DI_PER_GROUP(Div, row, spread, g.items, g)
      LocalTensor<uint32_t> whole = code.ReinterpretCast<uint32_t>();
      Cast(whole, bytes, RoundMode::CAST_NONE, padded);
      Max(code, code, mark, padded);
    } else {
      Adds(code, code, 0x7fffff, padded);  // exponent + (mantissa != 0)
      ShiftRight(code, code, 23, padded);
      LocalTensor<int32_t> inverse = small_[1].Get<int32_t>();
      Muls(inverse, code, -1, padded);
      Adds(inverse, inverse, 254, padded);
      ShiftLeft(inverse, inverse, 23, padded);
      Brcb(spread, other, padded / 8, BrcbRepeatParams(1, 8));
      DI_PER_GROUP(Mul, row, spread, g.items, g)
      Max(code, code, mark, padded);
    }
    Cast(bytes, code, RoundMode::CAST_NONE, padded);
    bytes_.EnQue(bytes);
  }

  // Through BF16, whose last bit keeps whether anything was cut: then the rounding to e2m1 is right at every tie.
  __aicore__ inline void PackFp4(const AscendC::LocalTensor<uint8_t>& to, const AscendC::LocalTensor<float>& row, uint32_t width) {
    using namespace AscendC;
    LocalTensor<int32_t> bits = row.ReinterpretCast<int32_t>(), cut = work_.Get<int32_t>();
    ShiftLeft(cut.ReinterpretCast<uint32_t>(), bits.ReinterpretCast<uint32_t>(), 16u, width);
    ShiftRight(cut.ReinterpretCast<uint32_t>(), cut.ReinterpretCast<uint32_t>(), 16u, width);
    Mins(cut, cut, 1, width);
    ShiftLeft(cut, cut, 16, width);
    Or(bits.ReinterpretCast<uint16_t>(), bits.ReinterpretCast<uint16_t>(), cut.ReinterpretCast<uint16_t>(), width * 2);
    LocalTensor<bfloat16_t> brief = work_.Get<bfloat16_t>();
    Cast(brief, row, RoundMode::CAST_TRUNC, width);
    Cast(to.ReinterpretCast<fp4x2_e2m1_t>(), brief, RoundMode::CAST_RINT, width);
  }

  int32_t format_ = 0;
  AscendC::TBuf<AscendC::TPosition::VECCALC> work_, spread_, small_[4];
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> codes_, bytes_;
};

// scale = 2^(code - 127) of `count` e8m0 bytes; `code` and `edge` are room for as many int32. The code is the exponent
// field; 0 is the subnormal 2^-127 and 255 is NaN, both with bit 22 set.
__aicore__ inline void E8m0Values(const AscendC::LocalTensor<float>& scale, const AscendC::LocalTensor<int32_t>& code,
                                  const AscendC::LocalTensor<int32_t>& edge, const AscendC::LocalTensor<uint8_t>& bytes,
                                  uint32_t count) {
  using namespace AscendC;
  const LocalTensor<int32_t> bits = scale.ReinterpretCast<int32_t>();
  Cast(code.ReinterpretCast<uint32_t>(), bytes, RoundMode::CAST_NONE, count);
  Mins(edge, code, 1, count);
  Muls(edge, edge, -1, count);
  Adds(edge, edge, 1, count);
  ShiftLeft(bits, code, 23, count);
  Maxs(code, code, 254, count);
  Adds(code, code, -254, count);
  Add(edge, edge, code, count);
  ShiftLeft(edge, edge, 22, count);
  Add(bits, bits, edge, count);
}

class RowDecoder {
 public:
  __aicore__ inline void Init(AscendC::TPipe& pipe, int32_t format, uint32_t width) {
    format_ = format;
    pipe.InitBuffer(codes_, 2, AlignUp(CodeBytes(format, width), 64));
    if (format == DI_ROW_F32) return;
    const uint32_t padded = AlignUp(width / GroupOf(format), 64);
    pipe.InitBuffer(bytes_, 2, padded);
    pipe.InitBuffer(work_, AlignUp(width, 64) * 2);
    for (int i = 0; i < 3; ++i) pipe.InitBuffer(small_[i], padded * sizeof(float));
    pipe.InitBuffer(spread_, padded * 32);
  }

  // `row` takes the `width` values of a stored row.
  __aicore__ inline void Load(const AscendC::LocalTensor<float>& row, uint32_t width, __gm__ uint8_t* codes, __gm__ uint8_t* scales) {
    using namespace AscendC;
    LocalTensor<uint8_t> raw = codes_.AllocTensor<uint8_t>();
    LoadRow(raw, Global<uint8_t>(codes), CodeBytes(format_, width));
    codes_.EnQue(raw);
    if (format_ == DI_ROW_F32) {
      raw = codes_.DeQue<uint8_t>();
      Muls(row, raw.ReinterpretCast<float>(), 1.0f, width);
      codes_.FreeTensor(raw);
      return;
    }
    const uint32_t group = GroupOf(format_);
    const Groups g{group, width / group, group / 8};
    LocalTensor<uint8_t> bytes = bytes_.AllocTensor<uint8_t>();
    LoadRow(bytes, Global<uint8_t>(scales), g.count);
    bytes_.EnQue(bytes);
    raw = codes_.DeQue<uint8_t>();
    if (format_ == DI_FP8_32) {
      Cast(row, raw.ReinterpretCast<fp8_e4m3fn_t>(), RoundMode::CAST_NONE, width);
    } else {
      LocalTensor<bfloat16_t> brief = work_.Get<bfloat16_t>();
      Cast(brief, raw.ReinterpretCast<fp4x2_e2m1_t>(), RoundMode::CAST_NONE, width);
      Cast(row, brief, RoundMode::CAST_NONE, width);
    }
    codes_.FreeTensor(raw);
    bytes = bytes_.DeQue<uint8_t>();
    const LocalTensor<float> scale = ScaleValues(bytes, g.count);
    bytes_.FreeTensor(bytes);
    LocalTensor<float> spread = spread_.Get<float>();
    Brcb(spread, scale, AlignUp(g.count, 8) / 8, BrcbRepeatParams(1, 8));
    DI_PER_GROUP(Mul, row, spread, g.items, g)
  }

 private:
  __aicore__ inline AscendC::LocalTensor<float> ScaleValues(const AscendC::LocalTensor<uint8_t>& bytes, uint32_t count) {
    using namespace AscendC;
    LocalTensor<float> scale = small_[0].Get<float>();
    LocalTensor<int32_t> code = small_[1].Get<int32_t>(), edge = small_[2].Get<int32_t>();
    const uint32_t padded = AlignUp(count, 8);
    Duplicate(scale, 0.0f, padded);
    if (format_ == DI_FP4_16) {
      Cast(scale, bytes.ReinterpretCast<fp8_e4m3fn_t>(), RoundMode::CAST_NONE, count);
      return scale;
    }
    E8m0Values(scale, code, edge, bytes, count);
    return scale;
  }

  int32_t format_ = 0;
  AscendC::TBuf<AscendC::TPosition::VECCALC> work_, spread_, small_[3];
  AscendC::TQue<AscendC::TPosition::VECIN, 2> codes_, bytes_;
};

}  // namespace
