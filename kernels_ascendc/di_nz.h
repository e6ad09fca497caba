// Stored or dense rows become lines of a cube operand: vector functions that decode a row and lay it out as Nz in one pass.
//
// A tile holds 32-byte chunks of its rows, chunk c of row r at block c * pitch + r. Every value of a quantised row is exact
// in BF16: at most four bits of code times four bits of scale.
#pragma once

#include "di_codec.h"

namespace {

constexpr int32_t kRowBf16 = 0;  // beside the formats of di_format: rows of dense BF16

constexpr AscendC::Reg::CastTrait kPart0{AscendC::Reg::RegLayout::ZERO, AscendC::Reg::SatMode::UNKNOWN,
                                         AscendC::Reg::MaskMergeMode::ZEROING, AscendC::RoundMode::CAST_NONE};
constexpr AscendC::Reg::CastTrait kPart1{AscendC::Reg::RegLayout::ONE, AscendC::Reg::SatMode::UNKNOWN,
                                         AscendC::Reg::MaskMergeMode::ZEROING, AscendC::RoundMode::CAST_NONE};
constexpr AscendC::Reg::CastTrait kPart2{AscendC::Reg::RegLayout::TWO, AscendC::Reg::SatMode::UNKNOWN,
                                         AscendC::Reg::MaskMergeMode::ZEROING, AscendC::RoundMode::CAST_NONE};
constexpr AscendC::Reg::CastTrait kPart3{AscendC::Reg::RegLayout::THREE, AscendC::Reg::SatMode::UNKNOWN,
                                         AscendC::Reg::MaskMergeMode::ZEROING, AscendC::RoundMode::CAST_NONE};
constexpr AscendC::Reg::CastTrait kRound0{AscendC::Reg::RegLayout::ZERO, AscendC::Reg::SatMode::NO_SAT,
                                          AscendC::Reg::MaskMergeMode::ZEROING, AscendC::RoundMode::CAST_RINT};

constexpr uint32_t kScaleLine = 32;  // BF16 scales kept of a row, one for 16 values
constexpr uint32_t kMostInLine = 16 * kScaleLine;

// Bytes of a row as it is fetched: codes, then scales; rows lie at the next multiple of 32.
__aicore__ inline uint32_t RowBytes(int32_t format, uint32_t width) {
  return format == kRowBf16 ? width * 2 : CodeBytes(format, width) + ScaleBytes(format, width);
}
__aicore__ inline uint32_t RowPitch(int32_t format, uint32_t width) { return AlignUp(RowBytes(format, width), 32); }

// Up to 128 values of a row into its chunks; T is BF16 or float.
template <class T>
__simd_callee__ inline void PutValues(__ubuf__ T* to, AscendC::Reg::RegTensor<bfloat16_t>& values, uint32_t pitch, uint32_t count) {
  using namespace AscendC;
  if constexpr (sizeof(T) == 2) {
    Reg::MaskReg some = Reg::UpdateMask<bfloat16_t>(count);
    Reg::StoreAlign<bfloat16_t, Reg::DataCopyMode::DATA_BLOCK_COPY>(to, values, pitch, some);
  } else {
    Reg::RegTensor<float> even, odd, low, high;
    Reg::MaskReg all = Reg::CreateMask<float>(), some = Reg::UpdateMask<float>(count), rest = Reg::UpdateMask<float>(count);
    Reg::Cast<float, bfloat16_t, kPart0>(even, values, all);
    Reg::Cast<float, bfloat16_t, kPart1>(odd, values, all);
    Reg::Interleave(low, high, even, odd);
    Reg::StoreAlign<float, Reg::DataCopyMode::DATA_BLOCK_COPY>(to, low, pitch, some);
    Reg::StoreAlign<float, Reg::DataCopyMode::DATA_BLOCK_COPY>(to + 64 * pitch, high, pitch, rest);
  }
}

// Codes of powers of two as BF16: the code is the exponent field, 0 is 2^-127 and 255 is NaN.
__simd_callee__ inline void PowerBits(AscendC::Reg::RegTensor<uint16_t>& bits, AscendC::Reg::RegTensor<uint8_t>& codes, AscendC::Reg::RegTensor<uint16_t>& tiny,
                                      AscendC::Reg::RegTensor<uint16_t>& bad, AscendC::Reg::MaskReg& all) {
  using namespace AscendC;
  Reg::MaskReg some;
  Reg::ShiftLefts(bits, (Reg::RegTensor<uint16_t>&)codes, (int16_t)7, all);
  Reg::Max(bits, bits, tiny, all);
  Reg::Compares<uint16_t, CMPMODE::EQ>(some, bits, (uint16_t)0x7f80, all);
  Reg::Select(bits, bad, bits, some);
}
// Scales of rows, each for 32 values.
__simd_vf__ inline void PowerScales(__ubuf__ uint16_t* to, __ubuf__ uint8_t* from, uint16_t rows, uint32_t width, uint32_t from_pitch) {
  using namespace AscendC;
  Reg::RegTensor<uint8_t> raw;
  Reg::RegTensor<uint16_t> bits, tiny, bad, twice, rest;
  Reg::MaskReg all = Reg::CreateMask<uint16_t>();
  Reg::Duplicate(tiny, 0x0040);
  Reg::Duplicate(bad, 0x7fc0);
  uint32_t count = width / 16;
  Reg::MaskReg some = Reg::UpdateMask<uint16_t>(count);
  for (uint16_t r = 0; r < rows; ++r) {
    Reg::LoadAlign<uint8_t, Reg::LoadDist::DIST_UNPACK_B8>(raw, from + r * from_pitch);
    PowerBits(bits, raw, tiny, bad, all);
    Reg::Interleave(twice, rest, bits, bits);
    Reg::StoreAlign(to + r * kScaleLine, twice, some);
  }
}
// `count` scales side by side: each is written twice, for 16 values.
__simd_vf__ inline void PackedScales(__ubuf__ uint16_t* to, __ubuf__ uint8_t* from, uint32_t count) {
  using namespace AscendC;
  Reg::RegTensor<uint8_t> raw;
  Reg::RegTensor<uint16_t> bits, tiny, bad, first, second;
  Reg::MaskReg all = Reg::CreateMask<uint16_t>();
  Reg::Duplicate(tiny, 0x0040);
  Reg::Duplicate(bad, 0x7fc0);
  uint32_t left = 2 * count;
  for (uint32_t i = 0; i < count; i += 128) {
    Reg::MaskReg some = Reg::UpdateMask<uint16_t>(left), others = Reg::UpdateMask<uint16_t>(left);
    Reg::LoadAlign<uint8_t, Reg::LoadDist::DIST_UNPACK_B8>(raw, from + i);
    PowerBits(bits, raw, tiny, bad, all);
    Reg::Interleave(first, second, bits, bits);
    Reg::StoreAlign(to + 2 * i, first, some);
    Reg::StoreAlign(to + 2 * i + 128, second, others);
  }
}

// e4m3 codes, each the scale of 16 values, as BF16.
__simd_vf__ inline void SmallScales(__ubuf__ bfloat16_t* to, __ubuf__ fp8_e4m3fn_t* from, uint16_t rows, uint32_t width, uint32_t from_pitch) {
  using namespace AscendC;
  Reg::RegTensor<fp8_e4m3fn_t> raw;
  Reg::RegTensor<float> wide;
  Reg::RegTensor<bfloat16_t> brief;
  uint32_t count = width / 16;
  Reg::MaskReg some = Reg::UpdateMask<float>(count);
  for (uint16_t r = 0; r < rows; ++r) {
    Reg::LoadAlign<fp8_e4m3fn_t, Reg::LoadDist::DIST_UNPACK4_B8>(raw, from + r * from_pitch);
    Reg::Cast<float, fp8_e4m3fn_t, kPart0>(wide, raw, some);
    Reg::Cast<bfloat16_t, float, kRound0>(brief, wide, some);
    Reg::StoreAlign<bfloat16_t, Reg::StoreDist::DIST_PACK_B32>(to + r * kScaleLine, brief, some);
  }
}

template <class T>
__simd_vf__ inline void PlaceFp4(__ubuf__ T* to, __ubuf__ fp4x2_e2m1_t* from, __ubuf__ bfloat16_t* scales, uint16_t rows, uint32_t width, uint32_t from_pitch,
                                      uint32_t scale_pitch, uint32_t pitch) {
  using namespace AscendC;
  Reg::RegTensor<fp4x2_e2m1_t> codes;
  Reg::RegTensor<bfloat16_t> values, scale;
  Reg::MaskReg all = Reg::CreateMask<bfloat16_t>();
  for (uint16_t r = 0; r < rows; ++r)
    for (uint32_t c = 0; c < width; c += 128) {
      Reg::LoadAlign<fp4x2_e2m1_t, Reg::LoadDist::DIST_UNPACK4_B8>(codes, from + r * from_pitch + c / 2);
      Reg::Cast<bfloat16_t, fp4x2_e2m1_t, kPart0>(values, codes, all);
      Reg::LoadAlign<bfloat16_t, Reg::LoadDist::DIST_E2B_B16>(scale, scales + r * scale_pitch + c / 16);
      Reg::Mul(values, values, scale, all);
      PutValues<T>(to + r * (32 / sizeof(T)) + c * pitch, values, pitch, width - c);
    }
}

// An e4m3 code as float has nothing in its lower half: two of them side by side make a pair of BF16.
template <class T>
__simd_vf__ inline void PlaceFp8(__ubuf__ T* to, __ubuf__ fp8_e4m3fn_t* from, __ubuf__ bfloat16_t* scales, uint16_t rows, uint32_t width, uint32_t from_pitch, uint32_t pitch) {
  using namespace AscendC;
  Reg::RegTensor<fp8_e4m3fn_t> codes;
  Reg::RegTensor<float> f0, f1, f2, f3;
  Reg::RegTensor<uint32_t> even, odd;
  Reg::RegTensor<bfloat16_t> low, high, scale;
  Reg::MaskReg all = Reg::CreateMask<bfloat16_t>();
  for (uint16_t r = 0; r < rows; ++r)
    for (uint32_t c = 0; c < width; c += 256) {
      Reg::LoadAlign(codes, from + r * from_pitch + c);
      Reg::Cast<float, fp8_e4m3fn_t, kPart0>(f0, codes, all);
      Reg::Cast<float, fp8_e4m3fn_t, kPart1>(f1, codes, all);
      Reg::Cast<float, fp8_e4m3fn_t, kPart2>(f2, codes, all);
      Reg::Cast<float, fp8_e4m3fn_t, kPart3>(f3, codes, all);
      Reg::ShiftRights(even, (Reg::RegTensor<uint32_t>&)f0, (int16_t)16, all);
      Reg::ShiftRights(odd, (Reg::RegTensor<uint32_t>&)f1, (int16_t)16, all);
      Reg::Or(even, even, (Reg::RegTensor<uint32_t>&)f2, all);
      Reg::Or(odd, odd, (Reg::RegTensor<uint32_t>&)f3, all);
      Reg::Interleave(low, high, (Reg::RegTensor<bfloat16_t>&)even, (Reg::RegTensor<bfloat16_t>&)odd);
      __ubuf__ T* place = to + r * (32 / sizeof(T)) + c * pitch;
      Reg::LoadAlign<bfloat16_t, Reg::LoadDist::DIST_E2B_B16>(scale, scales + r * kScaleLine + c / 16);
      Reg::Mul(low, low, scale, all);
      PutValues<T>(place, low, pitch, width - c);
      if (c + 128 < width) {
        Reg::LoadAlign<bfloat16_t, Reg::LoadDist::DIST_E2B_B16>(scale, scales + r * kScaleLine + c / 16 + 8);
        Reg::Mul(high, high, scale, all);
        PutValues<T>(place + 128 * pitch, high, pitch, width - c - 128);
      }
    }
}

template <class T>
__simd_vf__ inline void PlaceBf16(__ubuf__ T* to, __ubuf__ bfloat16_t* from, uint16_t rows, uint32_t width, uint32_t from_pitch, uint32_t pitch) {
  using namespace AscendC;
  Reg::RegTensor<bfloat16_t> values;
  for (uint16_t r = 0; r < rows; ++r)
    for (uint32_t c = 0; c < width; c += 128) {
      Reg::LoadAlign(values, from + r * from_pitch + c);
      PutValues<T>(to + r * (32 / sizeof(T)) + c * pitch, values, pitch, width - c);
    }
}

__simd_vf__ inline void PlaceFloat(__ubuf__ float* to, __ubuf__ float* from, uint16_t rows, uint32_t width, uint32_t from_pitch, uint32_t pitch) {
  using namespace AscendC;
  Reg::RegTensor<float> values;
  for (uint16_t r = 0; r < rows; ++r) {
    uint32_t left = width;
    for (uint32_t c = 0; c < width; c += 64) {
      Reg::MaskReg some = Reg::UpdateMask<float>(left);
      Reg::LoadAlign(values, from + r * from_pitch + c);
      Reg::StoreAlign<float, Reg::DataCopyMode::DATA_BLOCK_COPY>(to + r * 8 + c * pitch, values, pitch, some);
    }
  }
}

template <class T> __simd_vf__ inline void PlaceZeros(__ubuf__ T* to, uint16_t rows, uint32_t width, uint32_t pitch) {
  using namespace AscendC;
  Reg::RegTensor<bfloat16_t> zero;
  Reg::Duplicate(zero, 0.0f);
  for (uint16_t r = 0; r < rows; ++r)
    for (uint32_t c = 0; c < width; c += 128) PutValues<T>(to + r * (32 / sizeof(T)) + c * pitch, zero, pitch, width - c);
}

// Fetched rows of one format into a tile from its row `first` on. `scales` is room for kScaleLine values a row.
template <class T>
__aicore__ inline void PlaceRows(const AscendC::LocalTensor<T>& tile, int32_t first, int32_t rows, const AscendC::LocalTensor<uint8_t>& raw,
                                 const AscendC::LocalTensor<uint16_t>& scales, int32_t format, uint32_t width, uint32_t pitch) {
  if (rows <= 0) return;
  __ubuf__ T* to = (__ubuf__ T*)tile.GetPhyAddr() + first * (32 / sizeof(T));
  __ubuf__ uint8_t* from = (__ubuf__ uint8_t*)raw.GetPhyAddr();
  __ubuf__ uint16_t* scale = (__ubuf__ uint16_t*)scales.GetPhyAddr();
  const uint32_t line = RowPitch(format, width);
  const uint16_t n = (uint16_t)rows;
  if (format == kRowBf16) {
    asc_vf_call<PlaceBf16<T>>(to, (__ubuf__ bfloat16_t*)from, n, width, line / 2, pitch);
  } else if (format == DI_ROW_F32) {
    if constexpr (sizeof(T) == 4) asc_vf_call<PlaceFloat>(to, (__ubuf__ float*)from, n, width, line / 4, pitch);
  } else if (format == DI_FP4_16) {
    asc_vf_call<SmallScales>((__ubuf__ bfloat16_t*)scale, (__ubuf__ fp8_e4m3fn_t*)(from + width / 2), n, width, line);
    asc_vf_call<PlaceFp4<T>>(to, (__ubuf__ fp4x2_e2m1_t*)from, (__ubuf__ bfloat16_t*)scale, n, width, line, kScaleLine, pitch);
  } else {
    asc_vf_call<PowerScales>(scale, from + CodeBytes(format, width), n, width, line);
    if (format == DI_FP8_32) asc_vf_call<PlaceFp8<T>>(to, (__ubuf__ fp8_e4m3fn_t*)from, (__ubuf__ bfloat16_t*)scale, n, width, line, pitch);
    else asc_vf_call<PlaceFp4<T>>(to, (__ubuf__ fp4x2_e2m1_t*)from, (__ubuf__ bfloat16_t*)scale, n, width, line, kScaleLine, pitch);
  }
}
template <class T>
__aicore__ inline void PlaceZeroRows(const AscendC::LocalTensor<T>& tile, int32_t first, int32_t rows, uint32_t width, uint32_t pitch) {
  if (rows > 0) asc_vf_call<PlaceZeros<T>>((__ubuf__ T*)tile.GetPhyAddr() + first * (32 / sizeof(T)), (uint16_t)rows, width, pitch);
}

// `rows` stored rows, fetched one behind the other; `stride` and `scale_stride` are the bytes from one row's codes and scales
// to the next one's (only mxfp4 rows keep their scales apart).
__aicore__ inline void FetchRows(const AscendC::LocalTensor<uint8_t>& to, const RowPlace& from, int32_t rows, int64_t stride, int64_t scale_stride,
                                 int32_t format, uint32_t width) {
  using namespace AscendC;
  if (rows <= 0) return;
  const DataCopyPadExtParams<uint8_t> pad(false, 0, 0, 0);
  if (format != DI_MXFP4_32) {
    const uint32_t bytes = RowBytes(format, width);
    DataCopyPad(to, Global<uint8_t>(from.codes), DataCopyExtParams(rows, bytes, stride - bytes, 0, 0), pad);
    return;
  }
  const uint32_t codes = width / 2, scales = width / 32, pitch = RowPitch(format, width);
  DataCopyPad(to, Global<uint8_t>(from.codes), DataCopyExtParams(rows, codes, stride - codes, (pitch - codes) / 32, 0), pad);
  DataCopyPad(to[codes], Global<uint8_t>(from.scales), DataCopyExtParams(rows, scales, scale_stride - scales, (pitch - AlignUp(scales, 32)) / 32, 0), pad);
}

// Two stored rows: by one request if the second lies behind the first.
__aicore__ inline void FetchPair(const AscendC::LocalTensor<uint8_t>& to, const RowPlace& a, const RowPlace& b, int32_t format, uint32_t width) {
  const int64_t apart = b.codes - a.codes, scales = b.scales - a.scales, most = 1 << 30;
  if (apart >= RowBytes(format, width) && scales > 0 && apart < most && scales < most) return FetchRows(to, a, 2, apart, scales, format, width);
  FetchRows(to, a, 1, RowBytes(format, width), RowBytes(format, width), format, width);
  FetchRows(to[RowPitch(format, width)], b, 1, RowBytes(format, width), RowBytes(format, width), format, width);
}

// mxfp4 rows, codes and scales side by side of their own kind: `rows` of them from row `first` of the tile and of both on. Rows that
// follow each other in a cache block come so by two bursts. The width is a multiple of 128, `first` one of 8.
template <class T>
__aicore__ inline void PlacePacked(const AscendC::LocalTensor<T>& tile, int32_t first, int32_t rows, const AscendC::LocalTensor<uint8_t>& codes,
                                   const AscendC::LocalTensor<uint8_t>& scales, const AscendC::LocalTensor<uint16_t>& room, uint32_t width, uint32_t pitch) {
  const uint32_t groups = width / 32;
  __ubuf__ uint16_t* scale = (__ubuf__ uint16_t*)room.GetPhyAddr() + first * groups * 2;
  asc_vf_call<PackedScales>(scale, (__ubuf__ uint8_t*)scales.GetPhyAddr() + first * groups, (uint32_t)rows * groups);
  asc_vf_call<PlaceFp4<T>>((__ubuf__ T*)tile.GetPhyAddr() + first * (32 / sizeof(T)), (__ubuf__ fp4x2_e2m1_t*)codes.GetPhyAddr() + first * (width / 2),
                           (__ubuf__ bfloat16_t*)scale, (uint16_t)rows, width, width / 2, groups * 2, pitch);
}

}  // namespace
