// A product's float32 result on its way to fp8_32 codes and scales: L0C to UB of both vector cores, quantised there.
//
// The cube core hands over strips of a panel, one to each vector core, in two buffers. All rows of a strip lie one after the
// other, so groups of 32 are worked on in a row, whatever the panel's width; that is 64 or 128 columns.
#pragma once

#include "di_cube.h"

namespace {

constexpr int32_t kStripRows = 64;
constexpr uint16_t kFlagResult = 2, kFlagTaken = 3;
constexpr AscendC::FixpipeConfig kResultToUb = {AscendC::CO2Layout::ROW_MAJOR, true};

// UB, in bytes. Registers are read whole, so a buffer is followed by room that nobody writes.
constexpr uint32_t kUbStripBytes = kStripRows * kPanelColumns * 4, kUbResult = 0, kUbResultPitch = kUbStripBytes + 256;
constexpr uint32_t kUbCodes = 2 * kUbResultPitch, kUbCodesPitch = kStripRows * kPanelColumns + 256;
constexpr uint32_t kUbScaleRows = kUbCodes + 2 * kUbCodesPitch, kUbScaleRowsPitch = kStripRows * 32;
constexpr uint32_t kUbGroups = kUbScaleRows + 2 * kUbScaleRowsPitch, kUbGroupPitch = kStripRows * kPanelColumns / 32 * 4 + 256;
static_assert(kUbGroups + 4 * kUbGroupPitch <= 248 * 1024, "UB has 248 KiB");

// Rows of the strips that a panel of a tile of `rows` rows is cut into; the vector cores take them by turns.
__aicore__ inline int32_t StripRows(int32_t rows) { return Min32(kStripRows, (rows + 1) / 2); }

// The largest magnitude of each group, as bits: they order as numbers, infinities and NaN above all finite ones.
__simd_vf__ inline void GroupMaxima(__ubuf__ uint32_t* maxima, __ubuf__ uint32_t* x, uint16_t groups) {
  using namespace AscendC;
  Reg::RegTensor<uint32_t> bits, magnitude, largest;
  Reg::MaskReg group = Reg::CreateMask<uint32_t, Reg::MaskPattern::VL32>();
  Reg::Duplicate(magnitude, 0x7fffffffu);
  for (uint16_t g = 0; g < groups; ++g) {
    Reg::LoadAlign(bits, x + g * 32);
    Reg::And(bits, bits, magnitude, group);
    Reg::Reduce<ReduceType::MAX>(largest, bits, group);
    Reg::StoreAlign<uint32_t, Reg::StoreDist::DIST_FIRST_ELEMENT_B32>(maxima + g, largest, group);
  }
}

// From the maxima: scale bytes, 1 / scale as bits of a float, and a mask of all ones; the last two are 0 for a group that is
// not finite, whose scale is 255.
__simd_vf__ inline void GroupScales(__ubuf__ uint8_t* scales, __ubuf__ uint32_t* inverses, __ubuf__ uint32_t* keep,
                                    __ubuf__ uint32_t* maxima, uint32_t groups) {
  using namespace AscendC;
  Reg::RegTensor<float> largest, format_largest;
  Reg::RegTensor<uint32_t> bits, code, none, ones, not_finite, top;
  Reg::Duplicate(format_largest, 448.0f);
  Reg::Duplicate(none, 0u);
  Reg::Duplicate(ones, 0xffffffffu);
  Reg::Duplicate(not_finite, 255u);
  Reg::Duplicate(top, 254u);
  const uint16_t registers = (groups + 63) / 64;
  uint32_t left = groups;
  for (uint16_t i = 0; i < registers; ++i) {
    Reg::MaskReg some = Reg::UpdateMask<uint32_t>(left), bad;
    Reg::LoadAlign(bits, maxima + i * 64);
    Reg::Compares<uint32_t, CMPMODE::GE>(bad, bits, 0x7f800000u, some);
    Reg::Maxs(largest, (Reg::RegTensor<float>&)bits, 1e-4f, some);
    Reg::Div(largest, largest, format_largest, some);
    Reg::Adds(code, (Reg::RegTensor<uint32_t>&)largest, 0x7fffffu, some);  // exponent + (mantissa != 0)
    Reg::ShiftRights(code, code, (int16_t)23, some);
    Reg::Sub(bits, top, code, some);
    Reg::ShiftLefts(bits, bits, (int16_t)23, some);
    Reg::Select(bits, none, bits, bad);
    Reg::StoreAlign(inverses + i * 64, bits, some);
    Reg::Select(bits, none, ones, bad);
    Reg::StoreAlign(keep + i * 64, bits, some);
    Reg::Select(code, not_finite, code, bad);
    Reg::StoreAlign<uint8_t, Reg::StoreDist::DIST_PACK4_B32>(scales + i * 64, (Reg::RegTensor<uint8_t>&)code, some);
  }
}

constexpr AscendC::Reg::CastTrait kToFp8 = {AscendC::Reg::RegLayout::ZERO, AscendC::Reg::SatMode::SAT,
                                            AscendC::Reg::MaskMergeMode::ZEROING, AscendC::RoundMode::CAST_RINT};

__simd_vf__ inline void GroupCodes(__ubuf__ uint8_t* codes, __ubuf__ uint32_t* x, __ubuf__ uint32_t* inverses,
                                   __ubuf__ uint32_t* keep, uint16_t groups) {
  using namespace AscendC;
  Reg::RegTensor<uint32_t> bits, inverse, kept;
  Reg::RegTensor<fp8_e4m3fn_t> code;
  Reg::MaskReg group = Reg::CreateMask<uint32_t, Reg::MaskPattern::VL32>();
  for (uint16_t g = 0; g < groups; ++g) {
    Reg::LoadAlign(bits, x + g * 32);
    Reg::LoadAlign<uint32_t, Reg::LoadDist::DIST_BRC_B32>(inverse, inverses + g);
    Reg::LoadAlign<uint32_t, Reg::LoadDist::DIST_BRC_B32>(kept, keep + g);
    Reg::And(bits, bits, kept, group);
    Reg::Mul((Reg::RegTensor<float>&)bits, (Reg::RegTensor<float>&)bits, (Reg::RegTensor<float>&)inverse, group);
    Reg::Cast<fp8_e4m3fn_t, float, kToFp8>(code, (Reg::RegTensor<float>&)bits, group);
    Reg::StoreAlign<uint8_t, Reg::StoreDist::DIST_PACK4_B32>(codes + g * 32, (Reg::RegTensor<uint8_t>&)code, group);
  }
}

// Scales of a row (T: two or four bytes) to the 32-byte line that a copy takes them from.
template <class T> __simd_vf__ inline void ScaleRows(__ubuf__ T* to, __ubuf__ T* scales, uint32_t rows) {
  using namespace AscendC;
  constexpr Reg::LoadDist kSpread = sizeof(T) == 4 ? Reg::LoadDist::DIST_E2B_B32 : Reg::LoadDist::DIST_E2B_B16;
  Reg::RegTensor<T> lines;
  uint32_t left = rows * (32 / sizeof(T));
  for (uint16_t i = 0; i < (rows + 7) / 8; ++i) {
    Reg::MaskReg some = Reg::UpdateMask<T>(left);
    Reg::LoadAlign<T, kSpread>(lines, scales + i * 8);
    Reg::StoreAlign(to + i * (256 / sizeof(T)), lines, some);
  }
}

// The vector cores' part: every tile's strips in the cube core's order.
class StripEncoder {
 public:
  __aicore__ void Run(const Product& product, int32_t core, int32_t cores) {
    using namespace AscendC;
    p_ = product;
    for (int32_t i = 0; i < 2; ++i) SetFlag<HardEvent::MTE3_V>(i);
    for (TileCursor t(p_, core, cores, 1); t.More(); t.Next()) {
      if (!t.Last()) continue;
      const int32_t strip = StripRows(t.rows);
      for (int32_t column = 0; column < t.columns; column += kPanelColumns)
        for (int32_t row = 0; row < t.rows; row += 2 * strip) {
          const int32_t mine = row + strip * (int32_t)GetSubBlockIdx();
          Strip(t, mine, Min32(strip, t.rows - mine), column, Min32(kPanelColumns, t.columns - column));
        }
    }
    for (int32_t i = 0; i < 2; ++i) WaitFlag<HardEvent::MTE3_V>(i);
    PipeBarrier<PIPE_ALL>();
  }

 private:
  template <class T> __aicore__ static __ubuf__ T* At(uint32_t address) {
    return (__ubuf__ T*)AscendC::LocalTensor<T>(AscendC::TPosition::VECCALC, address, 32).GetPhyAddr();
  }

  // The second core has no rows where a panel's strips are odd in number; it takes part in the flags all the same.
  __aicore__ void Strip(const TileCursor& t, int32_t row, int32_t rows, int32_t column, int32_t columns) {
    using namespace AscendC;
    const int32_t half = strips_++ % 2, groups = rows * columns / 32;
    __ubuf__ uint32_t* x = At<uint32_t>(kUbResult + half * kUbResultPitch);
    __ubuf__ uint32_t *maxima = At<uint32_t>(kUbGroups), *inverses = At<uint32_t>(kUbGroups + kUbGroupPitch);
    __ubuf__ uint32_t *keep = At<uint32_t>(kUbGroups + 2 * kUbGroupPitch), *room = At<uint32_t>(kUbGroups + 3 * kUbGroupPitch);
    CrossCoreWaitFlag<2, PIPE_V>(kFlagResult);
    WaitFlag<HardEvent::MTE3_V>(half);
    if (rows > 0) {
      asc_vf_call<GroupMaxima>(maxima, x, (uint16_t)groups);
      asc_vf_call<GroupScales>((__ubuf__ uint8_t*)room, inverses, keep, maxima, (uint32_t)groups);
      asc_vf_call<GroupCodes>(At<uint8_t>(kUbCodes + half * kUbCodesPitch), x, inverses, keep, (uint16_t)groups);
      const uint32_t lines = kUbScaleRows + half * kUbScaleRowsPitch;
      if (columns == kPanelColumns) asc_vf_call<ScaleRows<uint32_t>>(At<uint32_t>(lines), room, (uint32_t)rows);
      else asc_vf_call<ScaleRows<uint16_t>>(At<uint16_t>(lines), (__ubuf__ uint16_t*)room, (uint32_t)rows);
    }
    CrossCoreSetFlag<2, PIPE_V>(kFlagTaken);
    SetFlag<HardEvent::V_MTE3>(half);
    WaitFlag<HardEvent::V_MTE3>(half);
    if (rows > 0) Write(t, half, row, rows, column, columns);
    SetFlag<HardEvent::MTE3_V>(half);
  }
  __aicore__ void Write(const TileCursor& t, int32_t half, int32_t row, int32_t rows, int32_t column, int32_t columns) {
    using namespace AscendC;
    const int64_t first = t.group * p_.out_group + t.column + column;
    const LocalTensor<uint8_t> codes(TPosition::VECOUT, kUbCodes + half * kUbCodesPitch, rows * columns);
    DataCopyPad(Global<uint8_t>(p_.out + (t.row + row) * p_.out_stride + first), codes,
                DataCopyExtParams(rows, columns, 0, p_.out_stride - columns, 0));
    const LocalTensor<uint8_t> scales(TPosition::VECOUT, kUbScaleRows + half * kUbScaleRowsPitch, rows * 32);
    DataCopyPad(Global<uint8_t>(p_.out_scales + (t.row + row) * p_.out_scale_stride + first / 32), scales,
                DataCopyExtParams(rows, columns / 32, 0, p_.out_scale_stride - columns / 32, 0));
  }

  Product p_;
  int32_t strips_ = 0;
};

// The cube core's part, behind the last product of a panel.
class StripSender {
 public:
  static constexpr bool kSends = true;
  __aicore__ void Send(const AscendC::LocalTensor<float>& panel, int32_t rows, int32_t columns) {
    using namespace AscendC;
    const int32_t strip = StripRows(rows);
    for (int32_t row = 0; row < rows; row += 2 * strip) {
      const int32_t half = sent_ % 2;
      if (sent_++ >= 2) CrossCoreWaitFlag<2, PIPE_FIX>(kFlagTaken);
      for (int32_t side = 0; side < 2 && row + side * strip < rows; ++side) {
        FixpipeParamsArch3510<CO2Layout::ROW_MAJOR> p;
        p.nSize = p.dstStride = columns, p.mSize = Min32(strip, rows - row - side * strip), p.srcStride = AlignUp(rows, 16);
        p.subBlockId = side;
        const LocalTensor<float> to(TPosition::VECIN, kUbResult + half * kUbResultPitch, kStripRows * kPanelColumns);
        Fixpipe<float, float, kResultToUb>(to, panel[(row + side * strip) * 16], p);
      }
      CrossCoreSetFlag<2, PIPE_FIX>(kFlagResult);
    }
  }
  __aicore__ void Finish() {
    for (int32_t i = 0; i < Min32(sent_, 2); ++i) AscendC::CrossCoreWaitFlag<2, PIPE_FIX>(kFlagTaken);
  }

 private:
  int32_t sent_ = 0;
};

}  // namespace
