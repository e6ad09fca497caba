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

// UB, in bytes. Copies from HBM take long: as many as there are buffers of raw codes are under way.
constexpr int32_t kRawBuffers = 4;
constexpr uint32_t kUbRaw = 0, kUbRawBytes = 16 * 1024, kUbFp8 = kRawBuffers * kUbRawBytes, kUbFp8Bytes = 32 * 1024;
constexpr uint32_t kUbWide = kUbFp8 + 2 * kUbFp8Bytes, kUbNarrow = kUbWide + 64 * 1024, kUbSpread = kUbNarrow + 32 * 1024;
constexpr uint32_t kUbSmall = kUbSpread + 16 * 1024, kUbScales = kUbSmall + 3 * 2048;
static_assert(kUbScales + 512 <= 248 * 1024, "UB has 248 KiB");

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

// FP4 to e4m3: chunks in kRawBuffers buffers, results in two.
class Fp4Expander {
 public:
  __aicore__ void Run(const Product& product, int32_t core, int32_t cores) {
    using namespace AscendC;
    p_ = product;
    TileCursor ahead(p_, core, cores, 1);
    TileCursor at(p_, core, cores, 1);
    for (int32_t i = 0; i < kRawBuffers; ++i) SetFlag<HardEvent::V_MTE2>(i);
    for (int32_t i = 0; i < 2; ++i) SetFlag<HardEvent::MTE3_V>(i);
    for (int32_t i = 0; i < kRawBuffers - 1 && ahead.More(); ++i, ahead.Next()) Load(ahead);
    for (; at.More(); at.Next()) {
      if (ahead.More()) Load(ahead), ahead.Next();
      Expand(at);
    }
    stages_.Finish();
    for (int32_t i = 0; i < kRawBuffers; ++i) WaitFlag<HardEvent::V_MTE2>(i);
    for (int32_t i = 0; i < 2; ++i) WaitFlag<HardEvent::MTE3_V>(i);
    PipeBarrier<PIPE_ALL>();
  }

 private:
  __aicore__ void Load(const TileCursor& t) {
    using namespace AscendC;
    const int32_t buffer = loaded_++ % kRawBuffers;
    const Share s = ShareOf(t);
    const uint32_t columns = AlignUp(t.columns, 16), all = AlignUp(p_.n, 16);
    const int64_t line = t.first / 32 + s.line;
    WaitFlag<HardEvent::V_MTE2>(buffer);
    DataCopy(Ub<uint8_t>(kUbRaw + buffer * kUbRawBytes, kUbRawBytes),
             Global<uint8_t>(p_.w + t.group * p_.w_group + (line * all + t.column) * 16),
             DataCopyParams(s.lines, columns / 2, (all - columns) / 2, 0));
    SetFlag<HardEvent::MTE2_V>(buffer);
  }
  __aicore__ void Expand(const TileCursor& t) {
    using namespace AscendC;
    const int32_t buffer = expanded_ % kRawBuffers, half = expanded_++ % 2;
    const Share s = ShareOf(t);
    const uint32_t columns = AlignUp(t.columns, 16);
    const LocalTensor<uint16_t> from = Ub<uint16_t>(kUbRaw + buffer * kUbRawBytes, kUbRawBytes);
    const LocalTensor<uint16_t> to = Ub<uint16_t>(kUbFp8 + half * kUbFp8Bytes, kUbFp8Bytes);
    WaitFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE3_V>(half);
    asc_vf_call<ExpandPairs>((__ubuf__ uint16_t*)to.GetPhyAddr(), (__ubuf__ uint16_t*)from.GetPhyAddr(),
                             (uint16_t)(s.lines * columns / 16));
    SetFlag<HardEvent::V_MTE2>(buffer);
    SetFlag<HardEvent::V_MTE3>(half);
    WaitFlag<HardEvent::V_MTE3>(half);
    stages_.Begin();
    const LocalTensor<uint16_t> l1(TPosition::B1, stages_.Address() + s.line * columns * 32, s.lines * columns * 16);
    DataCopy(l1, to, DataCopyParams(1, s.lines * columns, 0, 0));
    stages_.Commit();
    SetFlag<HardEvent::MTE3_V>(half);
  }

  Product p_;
  StageWriter stages_;
  int32_t loaded_ = 0, expanded_ = 0;
};

// Codes times scales, or BF16 rows, to lines of T (BF16 or float32): the path of x that is not quantised. Chunks are of
// kChunkBytes, so a core's share has one pair of scales a row.
template <class T, Codes kCodes> class DenseExpander {
 public:
  __aicore__ void Run(const Product& product, int32_t core, int32_t cores) {
    using namespace AscendC;
    p_ = product;
    TileCursor at(p_, core, cores, sizeof(T));
    SetFlag<HardEvent::V_MTE2>(0), SetFlag<HardEvent::MTE3_V>(0);
    for (; at.More(); at.Next()) {
      const Share s = ShareOf(at);
      const uint32_t columns = AlignUp(at.columns, 16);
      WaitFlag<HardEvent::V_MTE2>(0);
      if constexpr (kCodes == Codes::kBf16) LoadRows(at, s, columns);
      else LoadCodes(at, s, columns);
      SetFlag<HardEvent::MTE2_V>(0);
      WaitFlag<HardEvent::MTE2_V>(0);
      WaitFlag<HardEvent::MTE3_V>(0);
      Expand(s, columns);
      SetFlag<HardEvent::V_MTE2>(0);
      SetFlag<HardEvent::V_MTE3>(0);
      WaitFlag<HardEvent::V_MTE3>(0);
      Store(s, columns);
      SetFlag<HardEvent::MTE3_V>(0);
    }
    stages_.Finish();
    WaitFlag<HardEvent::V_MTE2>(0), WaitFlag<HardEvent::MTE3_V>(0);
    PipeBarrier<PIPE_ALL>();
  }

 private:
  __aicore__ void LoadCodes(const TileCursor& t, const Share& s, uint32_t columns) {
    using namespace AscendC;
    constexpr uint32_t kColumnBytes = kCodes == Codes::kFp4 ? 16 : 32;
    const uint32_t all = AlignUp(p_.n, 16), pairs = AlignUp(p_.k, 64) / 64;
    const int32_t line = t.first / 32 + s.line;
    DataCopy(Ub<uint8_t>(kUbRaw, 2 * kUbRawBytes),
             Global<uint8_t>(p_.w + t.group * p_.w_group + ((int64_t)line * all + t.column) * kColumnBytes),
             DataCopyParams(s.lines, columns * kColumnBytes / 32, (all - columns) * kColumnBytes / 32, 0));
    pair_line_ = line % 2;  // with one line, which of a pair of scales is its own; two lines begin at a pair
    DataCopy(Ub<uint8_t>(kUbScales, 512),
             Global<uint8_t>(p_.w_scales + t.group * p_.w_scale_group + ((int64_t)t.column / 16 * pairs + line / 2) * 32),
             DataCopyParams(columns / 16, 1, pairs - 1, 0));
  }
  // Rows of BF16 as [line][column][32]; what lies beyond K becomes zero.
  __aicore__ void LoadRows(const TileCursor& t, const Share& s, uint32_t columns) {
    using namespace AscendC;
    const LocalTensor<bfloat16_t> raw = Ub<bfloat16_t>(kUbRaw, 2 * kUbRawBytes);
    const int32_t first = t.first + s.line * 32, items = Min32(s.lines * 32, p_.k - first);
    if (items < s.lines * 32 || (uint32_t)t.columns < columns) {
      Duplicate(raw.template ReinterpretCast<uint16_t>(), (uint16_t)0, s.lines * columns * 32);
      Sync<HardEvent::V_MTE2>();
    }
    for (int32_t line = 0; line * 32 < items; ++line) {
      const int32_t some = Min32(32, items - line * 32);
      __gm__ bfloat16_t* w = (__gm__ bfloat16_t*)(p_.w + t.group * p_.w_group) + t.column * p_.w_stride + first + line * 32;
      DataCopyPad(raw[line * columns * 32], Global<bfloat16_t>(w),
                  DataCopyExtParams(t.columns, some * 2, (p_.w_stride - some) * 2, some <= 16 ? 1 : 0, 0),
                  DataCopyPadExtParams<bfloat16_t>(some % 16 != 0, 0, AlignUp(some, 16) - some, bfloat16_t(0)));
    }
  }

  // To [line][column][32] items of T.
  __aicore__ void Expand(const Share& s, uint32_t columns) {
    using namespace AscendC;
    const uint32_t items = s.lines * columns * 32;
    const LocalTensor<float> wide = Ub<float>(kUbWide, 64 * 1024);
    if constexpr (kCodes == Codes::kBf16) {
      Cast(wide, Ub<bfloat16_t>(kUbRaw, 2 * kUbRawBytes), RoundMode::CAST_NONE, items);
      return;
    }
    LocalTensor<uint8_t> codes = Ub<uint8_t>(kUbRaw, 2 * kUbRawBytes);
    if constexpr (kCodes == Codes::kFp4) {
      const LocalTensor<uint8_t> e4m3 = Ub<uint8_t>(kUbFp8, kUbFp8Bytes);
      asc_vf_call<ExpandPairs>((__ubuf__ uint16_t*)e4m3.GetPhyAddr(), (__ubuf__ uint16_t*)codes.GetPhyAddr(),
                               (uint16_t)(items / 512));
      codes = e4m3;
    }
    Cast(wide, codes.template ReinterpretCast<fp8_e4m3fn_t>(), RoundMode::CAST_NONE, items);
    ScaleLines(wide, s, columns);
    if constexpr (sizeof(T) == 2) Cast(Ub<T>(kUbNarrow, 32 * 1024), wide, RoundMode::CAST_RINT, items);
  }
  // Scales lie as [column / 16][16][2]; each becomes a block of eight floats that its 32 items share.
  __aicore__ void ScaleLines(const AscendC::LocalTensor<float>& wide, const Share& s, uint32_t columns) {
    using namespace AscendC;
    const LocalTensor<float> scale = Ub<float>(kUbSmall, 2048), spread = Ub<float>(kUbSpread, 16 * 1024);
    E8m0Values(scale, Ub<int32_t>(kUbSmall + 2048, 2048), Ub<int32_t>(kUbSmall + 4096, 2048), Ub<uint8_t>(kUbScales, 512), columns * 2);
    Brcb(spread, scale, columns / 4, BrcbRepeatParams(1, 8));
    for (int32_t line = 0; line < s.lines; ++line)
      for (uint32_t band = 0; band < columns / 16; ++band) {
        const LocalTensor<float> rows = wide[(line * columns + band * 16) * 32];
        const uint32_t which = s.lines == 1 ? pair_line_ : line;
        Mul(rows, rows, spread[(band * 32 + which) * 8], 32, 16, BinaryRepeatParams(1, 1, 0, 4, 4, 2));
      }
  }

  // [column][32] items to Nz.
  __aicore__ void Store(const Share& s, uint32_t columns) {
    using namespace AscendC;
    const LocalTensor<T> from = Ub<T>(sizeof(T) == 2 ? kUbNarrow : kUbWide, 32 * 1024);
    const LocalTensor<T> l1(TPosition::B1, stages_.Address(), kStageBytes / sizeof(T));
    stages_.Begin();
    for (int32_t line = 0; line < s.lines; ++line)
      DataCopy(l1[(s.line + line) * columns * 32], from[line * columns * 32], Nd2NzParams(1, columns, 32, 0, 32, columns, 1, 0));
    stages_.Commit();
  }

  Product p_;
  StageWriter stages_;
  uint32_t pair_line_ = 0;
};

}  // namespace
