// The cube's path: format conversions on the way into L1, LoadData into L0A and L0B, Mmad, and Fixpipe out of L0C.
//
// Layouts of this chip: L1 and L0A Nz, L0B Zn, L0C Nz. A fractal is 512 bytes, 16 rows of 32 bytes (16 x 16 floats in
// L0C). Zn of B [K, N] is byte for byte Nz of its transpose [N, K]: weights W [N, K] need no transposition.
#pragma once

#include <type_traits>

#include "twin/copy.h"

namespace AscendC {

struct Nd2NzParams {
  uint16_t ndNum = 0, nValue = 0;
  uint32_t dValue = 0;
  uint64_t srcNdMatrixStride = 0, srcDValue = 0;
  uint16_t dstNzC0Stride = 0, dstNzNStride = 0;
  uint32_t dstNzMatrixStride = 0;
  Nd2NzParams() = default;
  Nd2NzParams(uint16_t nd, uint16_t n, uint32_t d, uint64_t matrix, uint64_t row, uint16_t c0, uint16_t n_stride,
              uint32_t out)
      : ndNum(nd),
        nValue(n),
        dValue(d),
        srcNdMatrixStride(matrix),
        srcDValue(row),
        dstNzC0Stride(c0),
        dstNzNStride(n_stride),
        dstNzMatrixStride(out) {}
};
struct Dn2NzParams {
  uint16_t dnNum = 0, nValue = 0;
  uint32_t dValue = 0;
  uint64_t srcDnMatrixStride = 0, srcDValue = 0;
  uint16_t dstNzC0Stride = 0, dstNzNStride = 0;
  uint32_t dstNzMatrixStride = 0;
  Dn2NzParams() = default;
  Dn2NzParams(uint16_t dn, uint16_t n, uint32_t d, uint64_t matrix, uint64_t row, uint16_t c0, uint16_t n_stride,
              uint32_t out)
      : dnNum(dn),
        nValue(n),
        dValue(d),
        srcDnMatrixStride(matrix),
        srcDValue(row),
        dstNzC0Stride(c0),
        dstNzNStride(n_stride),
        dstNzMatrixStride(out) {}
};
struct LoadData2DParamsV2 {
  uint32_t mStartPosition = 0, kStartPosition = 0;
  uint16_t mStep = 0, kStep = 0;
  int32_t srcStride = 0;
  uint16_t dstStride = 0;
  bool ifTranspose = false;
  uint8_t sid = 0;
};
struct LoadData2DMxParams {
  uint16_t xStartPosition = 0, yStartPosition = 0;
  uint8_t xStep = 0, yStep = 0;
  uint16_t srcStride = 0, dstStride = 0;
};
struct MmadParams {
  uint16_t m = 0, n = 0, k = 0;
  uint8_t unitFlag = 0;
  bool cmatrixInitVal = true, cmatrixSource = false, disableGemv = false, kDirectionAlign = false;
  MmadParams() = default;
  MmadParams(uint16_t m_in, uint16_t n_in, uint16_t k_in, uint8_t unit, bool source, bool init)
      : m(m_in), n(n_in), k(k_in), unitFlag(unit), cmatrixInitVal(init), cmatrixSource(source) {}
};

enum class CO2Layout : uint8_t { NZ = 0, ROW_MAJOR, COLUMN_MAJOR };
struct FixpipeConfig {
  CO2Layout format;
  bool isToUB = false;
};
inline constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ, false};
inline constexpr FixpipeConfig CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR, false};
inline constexpr FixpipeConfig CFG_COLUMN_MAJOR = {CO2Layout::COLUMN_MAJOR, false};

struct Nz2NdParams {
  uint16_t ndNum = 1, srcNdStride = 0;
  uint32_t dstNdStride = 0;
};
struct Nz2DnParams {
  uint16_t dnNum = 1, srcNzMatrixStride = 0;
  uint32_t dstDnMatrixStride = 0;
  uint16_t srcNzC0Stride = 0;
};
template <CO2Layout format> struct TransformParams {
  using PARAMS = uint8_t;
};
template <> struct TransformParams<CO2Layout::ROW_MAJOR> {
  using PARAMS = Nz2NdParams;
};
template <> struct TransformParams<CO2Layout::COLUMN_MAJOR> {
  using PARAMS = Nz2DnParams;
};

}  // namespace AscendC

enum QuantMode_t : uint8_t {
  NoQuant = 0,
  F322F16,
  F322BF16,
  DEQF16,
  VDEQF16,
  QF322B8_PRE,
  VQF322B8_PRE,
  REQ8,
  VREQ8,
  QF322FP8_PRE,
  VQF322FP8_PRE,
  QF322F16_PRE,
  VQF322F16_PRE,
  QF322BF16_PRE,
  VQF322BF16_PRE,
  QF322F32_PRE,
  VQF322F32_PRE,
  QS322BF16_PRE,
  VQS322BF16_PRE
};

namespace AscendC {

template <CO2Layout format = CO2Layout::ROW_MAJOR> struct FixpipeParamsArch3510 {
  uint16_t nSize = 0, mSize = 0, srcStride = 0;
  uint32_t dstStride = 0;
  QuantMode_t quantPre = QuantMode_t::NoQuant;
  uint64_t deqScalar = 0;
  bool reluEn = false;
  uint8_t unitFlag = 0;
  typename TransformParams<format>::PARAMS params = {};
  union {
    uint8_t dualDstCtl = 0, dualDstCtrl;
  };  // the header and the page spell it differently
  uint8_t subBlockId = 0;
  bool isChannelSplit = false;
};
template <CO2Layout format = CO2Layout::ROW_MAJOR> using FixpipeParamsC310 = FixpipeParamsArch3510<format>;

}  // namespace AscendC

namespace twin {

struct Matrices {  // Nd2Nz or Dn2Nz: `column_step` and `row_step` in elements of the source
  int64_t count, rows, columns, row_step, column_step, source_step, c0_stride, row_stride, target_step;
  bool dn;
};
void to_nz(View target, const uint8_t* source, View local_source, int item_bytes, const Matrices& m, Where where);
void load_fractals(View target, View source, Type type, const AscendC::LoadData2DParamsV2& p, Where where);
void load_scales(View target_values, View scales, const AscendC::LoadData2DMxParams& p, Where where);
void product(Op op, View c, Type c_type, View a, Type a_type, View b, Type b_type, const View* bias,
             const AscendC::MmadParams& p, Where where);

struct FixpipeCall {
  AscendC::CO2Layout layout;
  int64_t n, m, source_stride, target_stride, matrices, source_matrix, target_matrix;
  QuantMode_t quant;
  uint64_t scalar;
  const View* scales;
  bool relu, split;
  uint8_t unit, dual, sub_block;
};
void fixpipe_to_global(uint8_t* target, Type to, View source, Type from, const FixpipeCall& call, Where where);
void fixpipe_to_local(View target, Type to, View source, Type from, const FixpipeCall& call, Where where);

template <AscendC::CO2Layout format>
FixpipeCall fixpipe_call(const AscendC::FixpipeParamsArch3510<format>& p, const View* scales) {
  FixpipeCall call{
      format, p.nSize,  p.mSize,          p.srcStride, p.dstStride,  1,           0, 0, p.quantPre, p.deqScalar,
      scales, p.reluEn, p.isChannelSplit, p.unitFlag,  p.dualDstCtl, p.subBlockId};
  if constexpr (format == AscendC::CO2Layout::ROW_MAJOR)
    call.matrices = p.params.ndNum, call.source_matrix = p.params.srcNdStride,
    call.target_matrix = p.params.dstNdStride;
  if constexpr (format == AscendC::CO2Layout::COLUMN_MAJOR)
    call.matrices = p.params.dnNum, call.source_matrix = p.params.srcNzMatrixStride,
    call.target_matrix = p.params.dstDnMatrixStride;
  return call;
}

template <class T> Matrices matrices_of(const AscendC::Nd2NzParams& p) {
  return {p.ndNum,
          p.nValue,
          p.dValue,
          (int64_t)p.srcDValue,
          1,
          (int64_t)p.srcNdMatrixStride,
          p.dstNzC0Stride,
          p.dstNzNStride,
          p.dstNzMatrixStride,
          false};
}
template <class T> Matrices matrices_of(const AscendC::Dn2NzParams& p) {
  return {p.dnNum,
          p.nValue,
          p.dValue,
          1,
          (int64_t)p.srcDValue,
          (int64_t)p.srcDnMatrixStride,
          p.dstNzC0Stride,
          p.dstNzNStride,
          p.dstNzMatrixStride,
          true};
}

}  // namespace twin

namespace AscendC {

template <class T, bool enableSmallC0 = false>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& p, TWIN_HERE) {
  static_assert(!enableSmallC0, "the small C0 mode is not modelled");
  twin::to_nz(dst.view(), src.bytes(), {}, sizeof(T), twin::matrices_of<T>(p), where);
}
template <class T, bool enableSmallC0 = false>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Dn2NzParams& p, TWIN_HERE) {
  static_assert(!enableSmallC0, "the small C0 mode is not modelled");
  twin::to_nz(dst.view(), src.bytes(), {}, sizeof(T), twin::matrices_of<T>(p), where);
}
template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const Nd2NzParams& p, TWIN_HERE) {
  twin::to_nz(dst.view(), nullptr, src.view(), sizeof(T), twin::matrices_of<T>(p), where);
}

template <class T>
inline void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParamsV2& p, TWIN_HERE) {
  twin::load_fractals(dst.view(), src.view(), twin::type_of<T>, p, where);
}
template <class T, class U> inline void LoadData(const LocalTensor<U>& dst, const LocalTensor<T>& src,
                                                 const LocalTensor<fp8_e8m0_t>& srcMx, const LoadData2DParamsV2& p,
                                                 const LoadData2DMxParams& mx, TWIN_HERE) {
  static_assert(twin::type_of<T> == twin::type_of<U>, "the values' types must agree");
  static_assert(twin::type_of<T> == twin::E2M1X2 || !std::is_same_v<T, U>,
                "fp8 destinations are mx_fp8_e4m3_t or mx_fp8_e5m2_t");
  twin::load_fractals(dst.view(), src.view(), twin::type_of<T>, p, where);
  twin::load_scales(dst.view(), srcMx.view(), mx, where);
}

template <class T, class U, class S> inline void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm,
                                                      const LocalTensor<S>& filter, const MmadParams& p, TWIN_HERE) {
  twin::product(twin::op_Mmad, dst.view(), twin::type_of<T>, fm.view(), twin::type_of<U>, filter.view(),
                twin::type_of<S>, nullptr, p, where);
}
template <class T, class U, class S, class B> inline void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm,
                                                               const LocalTensor<S>& filter, const LocalTensor<B>& bias,
                                                               const MmadParams& p, TWIN_HERE) {
  static_assert(sizeof(B) == 4, "the bias has the type of the result");
  const twin::View b = bias.view();
  twin::product(twin::op_Mmad, dst.view(), twin::type_of<T>, fm.view(), twin::type_of<U>, filter.view(),
                twin::type_of<S>, &b, p, where);
}
template <class T, class U, class S> inline void MmadMx(const LocalTensor<T>& dst, const LocalTensor<U>& fm,
                                                        const LocalTensor<S>& filter, const MmadParams& p, TWIN_HERE) {
  twin::product(twin::op_MmadMx, dst.view(), twin::type_of<T>, fm.view(), twin::type_of<U>, filter.view(),
                twin::type_of<S>, nullptr, p, where);
}
template <class T, class U, class S, class B>
inline void MmadMx(const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter,
                   const LocalTensor<B>& bias, const MmadParams& p, TWIN_HERE) {
  const twin::View b = bias.view();
  twin::product(twin::op_MmadMx, dst.view(), twin::type_of<T>, fm.view(), twin::type_of<U>, filter.view(),
                twin::type_of<S>, &b, p, where);
}

template <class T, class U, const FixpipeConfig& config = CFG_ROW_MAJOR>
inline void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src,
                    const FixpipeParamsArch3510<config.format>& p, TWIN_HERE) {
  twin::fixpipe_to_global(dst.bytes(), twin::type_of<T>, src.view(), twin::type_of<U>, twin::fixpipe_call(p, nullptr),
                          where);
}
template <class T, class U, const FixpipeConfig& config = CFG_ROW_MAJOR>
inline void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const LocalTensor<uint64_t>& scales,
                    const FixpipeParamsArch3510<config.format>& p, TWIN_HERE) {
  const twin::View s = scales.view();
  twin::fixpipe_to_global(dst.bytes(), twin::type_of<T>, src.view(), twin::type_of<U>, twin::fixpipe_call(p, &s),
                          where);
}
template <class T, class U, const FixpipeConfig& config = CFG_ROW_MAJOR>
inline void Fixpipe(const LocalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsArch3510<config.format>& p,
                    TWIN_HERE) {
  twin::fixpipe_to_local(dst.view(), twin::type_of<T>, src.view(), twin::type_of<U>, twin::fixpipe_call(p, nullptr),
                         where);
}
template <class T, class U, const FixpipeConfig& config = CFG_ROW_MAJOR>
inline void Fixpipe(const LocalTensor<T>& dst, const LocalTensor<U>& src, const LocalTensor<uint64_t>& scales,
                    const FixpipeParamsArch3510<config.format>& p, TWIN_HERE) {
  const twin::View s = scales.view();
  twin::fixpipe_to_local(dst.view(), twin::type_of<T>, src.view(), twin::type_of<U>, twin::fixpipe_call(p, &s), where);
}

}  // namespace AscendC
