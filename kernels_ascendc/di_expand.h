// Weights on their way to the cube through its two vector cores: codes from global memory to UB, expanded there, to L1.
//
// FP4 becomes e4m3 for the FP8 MX product: a code's magnitude, shifted left by two, is the e4m3 code of the value times
// 2^-6, and the scales that prepare_weight stored count for that. Where x is not quantised, codes times scales become
// the dense type of x. Each vector core makes half of a chunk's lines, so both keep their copies in flight.
#pragma once

#include "di_codec.h"
#include "di_cube.h"

namespace {

enum class Codes { kFp8, kFp4, kBf16 };  // what global memory holds; BF16 rows are widened to float32

// fractals of 256 bytes -> fractals of 512 bytes; how the codes lie in a byte: deepinfer_ascend/weights.py, pack_pairs.
__simd_vf__ inline void ExpandPairs(__ubuf__ uint16_t* to, __ubuf__ uint16_t* from, uint16_t fractals) {
  using namespace AscendC;
  Reg::RegTensor<uint16_t> packed, first, second, high, in_place, low_bits, high_bit, four;
  Reg::MaskReg all = Reg::CreateMask<uint16_t>();
  Reg::Duplicate(in_place, 0x9c9c);
  Reg::Duplicate(low_bits, 0x2323);
  Reg::Duplicate(high_bit, 0x1010);
  Reg::Duplicate(four, 4);
  for (uint16_t i = 0; i < fractals; ++i) {
    Reg::LoadAlign(packed, from + i * 128);
    Reg::And(first, packed, in_place, all);
    Reg::StoreAlign(to + i * 256, first, all);
    Reg::And(second, packed, low_bits, all);
    Reg::ShiftRights(high, packed, (int16_t)2, all);
    Reg::And(high, high, high_bit, all);
    Reg::MulAddDst(high, second, four, all);
    Reg::StoreAlign(to + i * 256 + 128, high, all);
  }
}

// UB, in bytes: codes as they come and their scales, kRawBuffers of them since copies from HBM take long; two results, of
// e4m3 or of the dense types; and what the vector unit needs in between.
constexpr int32_t kRawBuffers = 4;
constexpr uint32_t kUbRaw = 0, kUbRawBytes = 16 * 1024, kUbScales = kRawBuffers * kUbRawBytes, kUbScaleBytes = 512;
constexpr uint32_t kUbOut = kUbScales + kRawBuffers * kUbScaleBytes, kUbOutBytes = 32 * 1024;
constexpr uint32_t kUbFp8 = kUbOut + 2 * kUbOutBytes, kUbWide = kUbFp8 + 16 * 1024, kUbSpread = kUbWide + 64 * 1024;
constexpr uint32_t kUbSmall = kUbSpread + 16 * 1024;
static_assert(kUbSmall + 3 * 2048 <= 248 * 1024, "UB has 248 KiB");

// What cube and vector cores agree on: a chunk goes to its stage in L1 once the cube has read the one before from there.
class StageWriter {
 public:
  __aicore__ void Begin() {
    if (written_ >= kStages) AscendC::CrossCoreWaitFlag<2, PIPE_MTE3>(kFlagFree);
  }
  __aicore__ uint32_t Address() { return kL1Weights + written_ % kStages * kStageBytes; }
  __aicore__ void Commit() {
    AscendC::CrossCoreSetFlag<2, PIPE_MTE3>(kFlagReady);
    ++written_;
  }
  __aicore__ void Finish() {
    for (int32_t i = 0; i < Min32(written_, kStages); ++i) AscendC::CrossCoreWaitFlag<2, PIPE_MTE3>(kFlagFree);
  }

 private:
  int32_t written_ = 0;
};

template <class T> __aicore__ inline AscendC::LocalTensor<T> Ub(uint32_t at, uint32_t bytes) {
  return AscendC::LocalTensor<T>(AscendC::TPosition::VECCALC, at, bytes / sizeof(T));
}

// Half of the lines of a chunk: `lines` of 32 items of K from line `line` of the chunk on.
struct Share {
  int32_t lines, line;
};
__aicore__ inline Share ShareOf(const TileCursor& t) {
  const int32_t half = (int32_t)AlignUp(t.items, 64) / 64;
  return {half, half * (int32_t)AscendC::GetSubBlockIdx()};
}

// The loop of a vector core: chunks are loaded ahead, expanded, and put into the stages of L1 in turn.
template <class Expander> __aicore__ inline void RunExpander(Expander& expander, const Product& p, int32_t core, int32_t cores) {
  using namespace AscendC;
  TileCursor ahead(p, core, cores, Expander::kItemBytes);
  TileCursor at(p, core, cores, Expander::kItemBytes);
  StageWriter stages;
  int32_t loaded = 0, expanded = 0;
  for (int32_t i = 0; i < kRawBuffers; ++i) SetFlag<HardEvent::V_MTE2>(i);
  for (int32_t i = 0; i < 2; ++i) SetFlag<HardEvent::MTE3_V>(i);
  for (; at.More(); at.Next(), ++expanded) {
    for (; ahead.More() && loaded < expanded + kRawBuffers; ahead.Next(), ++loaded) {
      WaitFlag<HardEvent::V_MTE2>(loaded % kRawBuffers);
      expander.Load(ahead, loaded % kRawBuffers);
      SetFlag<HardEvent::MTE2_V>(loaded % kRawBuffers);
    }
    const int32_t buffer = expanded % kRawBuffers, half = expanded % 2;
    WaitFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE3_V>(half);
    expander.Expand(at, buffer, half);
    SetFlag<HardEvent::V_MTE2>(buffer);
    SetFlag<HardEvent::V_MTE3>(half);
    WaitFlag<HardEvent::V_MTE3>(half);
    stages.Begin();
    expander.Store(at, half, stages.Address());
    stages.Commit();
    SetFlag<HardEvent::MTE3_V>(half);
  }
  stages.Finish();
  for (int32_t i = 0; i < kRawBuffers; ++i) WaitFlag<HardEvent::V_MTE2>(i);
  for (int32_t i = 0; i < 2; ++i) WaitFlag<HardEvent::MTE3_V>(i);
  PipeBarrier<PIPE_ALL>();
}

// FP4 to e4m3.
class Fp4Expander {
 public:
  static constexpr int32_t kItemBytes = 1;

  __aicore__ void Run(const Product& product, int32_t core, int32_t cores) {
    p_ = product;
    RunExpander(*this, p_, core, cores);
  }
  __aicore__ void Load(const TileCursor& t, int32_t buffer) {
    using namespace AscendC;
    const Share s = ShareOf(t);
    const uint32_t columns = AlignUp(t.columns, 16), all = AlignUp(p_.n, 16);
    const int64_t line = t.first / 32 + s.line;
    DataCopy(Ub<uint8_t>(kUbRaw + buffer * kUbRawBytes, kUbRawBytes),
             Global<uint8_t>(p_.w + t.group * p_.w_group + (line * all + t.column) * 16),
             DataCopyParams(s.lines, columns / 2, (all - columns) / 2, 0));
  }
  __aicore__ void Expand(const TileCursor& t, int32_t buffer, int32_t half) {
    const uint32_t fractals = ShareOf(t).lines * AlignUp(t.columns, 16) / 16;
    asc_vf_call<ExpandPairs>((__ubuf__ uint16_t*)Ub<uint16_t>(kUbOut + half * kUbOutBytes, kUbOutBytes).GetPhyAddr(),
                             (__ubuf__ uint16_t*)Ub<uint16_t>(kUbRaw + buffer * kUbRawBytes, kUbRawBytes).GetPhyAddr(),
                             (uint16_t)fractals);
  }
  __aicore__ void Store(const TileCursor& t, int32_t half, uint32_t stage) {
    using namespace AscendC;
    const Share s = ShareOf(t);
    const uint32_t columns = AlignUp(t.columns, 16);
    const LocalTensor<uint16_t> l1(TPosition::B1, stage + s.line * columns * 32, s.lines * columns * 16);
    DataCopy(l1, Ub<uint16_t>(kUbOut + half * kUbOutBytes, kUbOutBytes), DataCopyParams(1, s.lines * columns, 0, 0));
  }

 private:
  Product p_;
};

// Codes times scales, or BF16 rows, to lines of T (BF16 or float32): the path of x that is not quantised. Chunks are of
// kChunkBytes, so a core's share has one pair of scales a row.
template <class T, Codes kCodes> class DenseExpander {
 public:
  static constexpr int32_t kItemBytes = sizeof(T);

  __aicore__ void Run(const Product& product, int32_t core, int32_t cores) {
    p_ = product;
    RunExpander(*this, p_, core, cores);
  }
  __aicore__ void Load(const TileCursor& t, int32_t buffer) {
    if constexpr (kCodes == Codes::kBf16) LoadRows(t, buffer);
    else LoadCodes(t, buffer);
  }
  // To [line][column][32] items of T.
  __aicore__ void Expand(const TileCursor& t, int32_t buffer, int32_t half) {
    using namespace AscendC;
    const Share s = ShareOf(t);
    const uint32_t columns = AlignUp(t.columns, 16), items = s.lines * columns * 32;
    const LocalTensor<T> out = Ub<T>(kUbOut + half * kUbOutBytes, kUbOutBytes);
    if constexpr (kCodes == Codes::kBf16) {
      Cast(out, Raw<bfloat16_t>(buffer), RoundMode::CAST_NONE, items);
    } else {
      LocalTensor<uint8_t> codes = Raw<uint8_t>(buffer);
      if constexpr (kCodes == Codes::kFp4) {
        const LocalTensor<uint8_t> e4m3 = Ub<uint8_t>(kUbFp8, 16 * 1024);
        asc_vf_call<ExpandPairs>((__ubuf__ uint16_t*)e4m3.GetPhyAddr(), (__ubuf__ uint16_t*)codes.GetPhyAddr(),
                                 (uint16_t)(items / 512));
        codes = e4m3;
      }
      const LocalTensor<float> wide = Ub<float>(kUbWide, 64 * 1024);
      Cast(wide, codes.template ReinterpretCast<fp8_e4m3fn_t>(), RoundMode::CAST_NONE, items);
      ScaleLines(wide, t, s, buffer);
      if constexpr (sizeof(T) == 2) Cast(out, wide, RoundMode::CAST_RINT, items);
      else Muls(out, wide, 1.0f, items);
    }
  }
  // [column][32] items to Nz.
  __aicore__ void Store(const TileCursor& t, int32_t half, uint32_t stage) {
    using namespace AscendC;
    const Share s = ShareOf(t);
    const uint32_t columns = AlignUp(t.columns, 16);
    const LocalTensor<T> from = Ub<T>(kUbOut + half * kUbOutBytes, kUbOutBytes);
    const LocalTensor<T> l1(TPosition::B1, stage, kStageBytes / sizeof(T));
    for (int32_t line = 0; line < s.lines; ++line)
      DataCopy(l1[(s.line + line) * columns * 32], from[line * columns * 32], Nd2NzParams(1, columns, 32, 0, 32, columns, 1, 0));
  }

 private:
  template <class I> __aicore__ AscendC::LocalTensor<I> Raw(int32_t buffer) { return Ub<I>(kUbRaw + buffer * kUbRawBytes, kUbRawBytes); }
  __aicore__ AscendC::LocalTensor<uint8_t> Scales(int32_t buffer) { return Ub<uint8_t>(kUbScales + buffer * kUbScaleBytes, kUbScaleBytes); }

  __aicore__ void LoadCodes(const TileCursor& t, int32_t buffer) {
    using namespace AscendC;
    constexpr uint32_t kColumnBytes = kCodes == Codes::kFp4 ? 16 : 32;
    const Share s = ShareOf(t);
    const uint32_t columns = AlignUp(t.columns, 16), all = AlignUp(p_.n, 16), pairs = AlignUp(p_.k, 64) / 64;
    const int32_t line = t.first / 32 + s.line;
    DataCopy(Raw<uint8_t>(buffer),
             Global<uint8_t>(p_.w + t.group * p_.w_group + ((int64_t)line * all + t.column) * kColumnBytes),
             DataCopyParams(s.lines, columns * kColumnBytes / 32, (all - columns) * kColumnBytes / 32, 0));
    DataCopy(Scales(buffer),
             Global<uint8_t>(p_.w_scales + t.group * p_.w_scale_group + ((int64_t)t.column / 16 * pairs + line / 2) * 32),
             DataCopyParams(columns / 16, 1, pairs - 1, 0));
  }
  // Rows of BF16 as [line][column][32]; what lies beyond K becomes zero.
  __aicore__ void LoadRows(const TileCursor& t, int32_t buffer) {
    using namespace AscendC;
    const Share s = ShareOf(t);
    const uint32_t columns = AlignUp(t.columns, 16);
    const LocalTensor<bfloat16_t> raw = Raw<bfloat16_t>(buffer);
    const int32_t first = t.first + s.line * 32, items = Min32(s.lines * 32, p_.k - first);
    if (items < s.lines * 32 || (uint32_t)t.columns < columns) {
      Duplicate(raw.template ReinterpretCast<uint16_t>(), (uint16_t)0, s.lines * columns * 32);
      SetFlag<HardEvent::V_MTE2>(kRawBuffers);
      WaitFlag<HardEvent::V_MTE2>(kRawBuffers);
    }
    for (int32_t line = 0; line * 32 < items; ++line) {
      const int32_t some = Min32(32, items - line * 32);
      __gm__ bfloat16_t* w = (__gm__ bfloat16_t*)(p_.w + t.group * p_.w_group) + t.column * p_.w_stride + first + line * 32;
      DataCopyPad(raw[line * columns * 32], Global<bfloat16_t>(w),
                  DataCopyExtParams(t.columns, some * 2, (p_.w_stride - some) * 2, some <= 16 ? 1 : 0, 0),
                  DataCopyPadExtParams<bfloat16_t>(some % 16 != 0, 0, AlignUp(some, 16) - some, bfloat16_t(0)));
    }
  }

  // Scales lie as [column / 16][16][2]; each becomes a block of eight floats that its 32 items share. A share of one line uses
  // one of each pair, a share of two lines begins at a pair.
  __aicore__ void ScaleLines(const AscendC::LocalTensor<float>& wide, const TileCursor& t, const Share& s, int32_t buffer) {
    using namespace AscendC;
    const uint32_t columns = AlignUp(t.columns, 16);
    const int32_t first = s.lines == 1 ? (t.first / 32 + s.line) % 2 : 0;
    const LocalTensor<float> scale = Ub<float>(kUbSmall, 2048), spread = Ub<float>(kUbSpread, 16 * 1024);
    E8m0Values(scale, Ub<int32_t>(kUbSmall + 2048, 2048), Ub<int32_t>(kUbSmall + 4096, 2048), Scales(buffer), columns * 2);
    Brcb(spread, scale, columns / 4, BrcbRepeatParams(1, 8));
    for (int32_t line = 0; line < s.lines; ++line)
      for (uint32_t band = 0; band < columns / 16; ++band) {
        const LocalTensor<float> rows = wide[(line * columns + band * 16) * 32];
        Mul(rows, rows, spread[(band * 32 + first + line) * 8], 32, 16, BinaryRepeatParams(1, 1, 0, 4, 4, 2));
      }
  }

  Product p_;
};

}  // namespace
