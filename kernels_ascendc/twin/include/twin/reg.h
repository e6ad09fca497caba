// Vector functions: registers of 256 bytes, masks, and what moves between them and UB. Called by
// asc_vf_call<f>(args...).
#pragma once

#include <type_traits>

#include "twin/mutation.h"
#include "twin/reduce.h"
#include "twin/select.h"

namespace twin {

// Bytes of a register and, a bit for each, whether they hold a value; loads read past the valid data, stores may not
// use it.
struct alignas(64) Register {
  uint8_t bytes[256];
  uint64_t valid[4] = {0, 0, 0, 0};
  uint32_t ready = 0;  // in traces: cycles from the function's begin until all it was made from is there
};
// One bit for each byte; an element is active by the bit of its lowest byte.
struct Mask {
  uint64_t bits[4] = {0, 0, 0, 0};
};

enum class Load : uint8_t { NORM, BRC, US, DS, UNPACK, UNPACK4, BLK, E2B };
enum class Store : uint8_t { NORM, FIRST, PACK, PACK4 };

// What an unaligned store holds back until its 32-byte block is whole, or until the end.
struct StreamOut {
  uint8_t bytes[32];
  int held = 0;
  const uint8_t* next = nullptr;  // where the stream goes on
  ~StreamOut();
};
struct StreamIn {
  const void* next = nullptr;
};

void enter_vector_function(Where where);
void leave_vector_function(Where where);
void reg_load(Register& d, const void* address, Load how, int unit, Where where);
void reg_load_pairs(Register& d0, Register& d1, const void* address, int unit, Where where);
void reg_load_unaligned(Register& d, StreamIn& in, const void* address, uint64_t step, Where where);
void reg_store(void* address, const Register& s, Store how, int unit, const Mask& mask, Where where);
void reg_store_blocks(void* address, const Register& s, uint32_t stride, int unit, const Mask& mask, Where where);
void reg_store_pairs(void* address, const Register& s0, const Register& s1, int unit, Where where);
void reg_store_stream(StreamOut& out, void* address, const Register& s, int bytes, Where where);
void reg_end_stream(StreamOut& out, const void* address, Where where);
void reg_load_mask(Mask& d, const void* address, Where where);
void reg_gather(Register& d, Type type, const void* base, Type source, const Register& index, const Mask& mask,
                Where where);

void reg_binary(Op op, int lane_op, Type type, Register& d, const Register& a, const Register& b, const Mask& mask,
                bool merge, Where where);
void reg_unary(Op op, int lane_op, Type type, Register& d, const Register& a, const Mask& mask, bool merge,
               Where where);
void reg_scalar(Op op, int lane_op, Type type, Register& d, const Register& a, const void* scalar, const Mask& mask,
                bool merge, Where where);
void reg_fill(Type type, Register& d, const void* scalar, const Mask& mask, bool merge, Where where);
void reg_arange(Type type, Register& d, const void* first, bool down, Where where);
void reg_compare(Type type, AscendC::CMPMODE mode, Mask& d, const Register& a, const Register* b, const void* scalar,
                 const Mask& mask, Where where);
void reg_select(Type type, Register& d, const Register& a, const Register& b, const Mask& mask, Where where);
void reg_reduce(bool by_block, ReduceType how, Type type, Register& d, const Register& a, const Mask& mask,
                Where where);
void reg_interleave(bool back, int unit, Register& d0, Register& d1, const Register& a, const Register& b, Where where);
void reg_squeeze(int unit, Register& d, const Register& a, const Mask& mask, Where where);
void reg_cast(Type to, Register& d, Type from, const Register& a, int layout, bool saturate, AscendC::RoundMode mode,
              const Mask& mask, Where where);
void reg_barrier(bool store_to_load, Where where);
Mask mask_of(int pattern, int unit);
Mask mask_of_count(uint32_t count, int unit);
namespace mutation {
inline Mask mask_at(Where where, const Mask& mask, const Mask& full) {
  if (__builtin_expect(!active, 1)) return mask;
  note_mask(mask.bits, where);
  return change_at(kMask, where, 0, memcmp(&mask, &full, sizeof mask) != 0) == kDrop ? full : mask;
}
}  // namespace mutation

}  // namespace twin

namespace AscendC {
inline constexpr uint32_t GetVecLen() { return 256; }
inline constexpr uint32_t CeilDivision(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

namespace Reg {

struct DefaultType {};
enum class PostLiteral { POST_MODE_NORMAL = 0, POST_MODE_UPDATE };
enum class DataCopyMode { DATA_BLOCK_COPY };
enum class MaskMergeMode { UNKNOWN = 0, ZEROING, MERGING };
enum class RegLayout { UNKNOWN = -1, ZERO = 0, ONE, TWO, THREE };
enum class IndexOrder { INCREASE_ORDER, DECREASE_ORDER };
enum class HighLowPart { LOWEST, HIGHEST };
enum class SatMode { UNKNOWN = 0, NO_SAT, SAT };
enum class MaskPattern { ALL, VL1, VL2, VL3, VL4, VL8, VL16, VL32, VL64, VL128, M3, M4, H, Q, ALLF = 15 };
enum class MemType { VEC_STORE, VEC_LOAD, SCALAR_STORE, SCALAR_LOAD, VEC_ALL, SCALAR_ALL };
enum class LoadDist {
  DIST_NORM,
  DIST_BRC_B8,
  DIST_BRC_B16,
  DIST_BRC_B32,
  DIST_US_B8,
  DIST_US_B16,
  DIST_DS_B8,
  DIST_DS_B16,
  DIST_UNPACK_B8,
  DIST_UNPACK_B16,
  DIST_UNPACK_B32,
  DIST_UNPACK4_B8,
  DIST_BLK,
  DIST_E2B_B16,
  DIST_E2B_B32,
  DIST_DINTLV_B8,
  DIST_DINTLV_B16,
  DIST_DINTLV_B32
};
enum class StoreDist {
  DIST_NORM,
  DIST_NORM_B8,
  DIST_NORM_B16,
  DIST_NORM_B32,
  DIST_FIRST_ELEMENT_B8,
  DIST_FIRST_ELEMENT_B16,
  DIST_FIRST_ELEMENT_B32,
  DIST_PACK_B16,
  DIST_PACK_B32,
  DIST_PACK_B64,
  DIST_PACK4_B32,
  DIST_INTLV_B8,
  DIST_INTLV_B16,
  DIST_INTLV_B32
};
using AscendC::ReduceType;
struct CastTrait {
  RegLayout layoutMode = RegLayout::UNKNOWN;
  SatMode satMode = SatMode::UNKNOWN;
  MaskMergeMode mrgMode = MaskMergeMode::UNKNOWN;
  RoundMode roundMode = RoundMode::CAST_NONE;
};
inline constexpr CastTrait castTrait{};

template <class T> struct RegTensor : twin::Register {
  using ActualT = T;
};
struct MaskReg : twin::Mask {};
struct AddrReg {
  uint32_t elements;
};
using UnalignRegForLoad = twin::StreamIn;
using UnalignRegForStore = twin::StreamOut;
struct DivSpecificMode {
  MaskMergeMode mrgMode = MaskMergeMode::ZEROING;
  bool precisionMode = false;
  DivAlgo algo = DivAlgo::INTRINSIC;
};
struct ExpSpecificMode {
  MaskMergeMode mrgMode = MaskMergeMode::ZEROING;
  ExpAlgo algo = ExpAlgo::INTRINSIC;
};
struct LnSpecificMode {
  MaskMergeMode mrgMode = MaskMergeMode::ZEROING;
  LnAlgo algo = LnAlgo::INTRINSIC;
};
struct SqrtSpecificMode {
  MaskMergeMode mrgMode = MaskMergeMode::ZEROING;
  bool precisionMode = false;
  SqrtAlgo algo = SqrtAlgo::INTRINSIC;
};

template <class T, MaskPattern pattern = MaskPattern::ALL> inline MaskReg CreateMask(TWIN_HERE) {
  return {twin::mutation::mask_at(where, twin::mask_of((int)pattern, sizeof(T)), twin::mask_of(0, sizeof(T)))};
}
template <class T> inline MaskReg UpdateMask(uint32_t& count, TWIN_HERE) {
  const MaskReg mask{twin::mutation::mask_at(where, twin::mask_of_count(count, sizeof(T)), twin::mask_of(0, sizeof(T)))};
  count = count < 256 / sizeof(T) ? 0 : count - 256 / (uint32_t)sizeof(T);
  return mask;
}
template <class T> inline AddrReg CreateAddrReg(uint16_t i0, uint32_t s0) { return {i0 * s0}; }
template <class T> inline AddrReg CreateAddrReg(uint16_t i0, uint32_t s0, uint16_t i1, uint32_t s1) {
  return {i0 * s0 + i1 * s1};
}
template <MemType src, MemType dst> inline void LocalMemBar(TWIN_HERE) {
  twin::reg_barrier((src == MemType::VEC_STORE && dst == MemType::VEC_LOAD) || src == MemType::VEC_ALL, where);
}

namespace detail {
constexpr twin::Load load_of(LoadDist d) {
  using L = LoadDist;
  return d == L::DIST_NORM         ? twin::Load::NORM
         : d <= L::DIST_BRC_B32    ? twin::Load::BRC
         : d <= L::DIST_US_B16     ? twin::Load::US
         : d <= L::DIST_DS_B16     ? twin::Load::DS
         : d <= L::DIST_UNPACK_B32 ? twin::Load::UNPACK
         : d == L::DIST_UNPACK4_B8 ? twin::Load::UNPACK4
         : d == L::DIST_BLK        ? twin::Load::BLK
                                   : twin::Load::E2B;
}
constexpr int load_unit(LoadDist d, int size) {
  using L = LoadDist;
  switch (d) {
    case L::DIST_BRC_B8:
    case L::DIST_US_B8:
    case L::DIST_DS_B8:
    case L::DIST_UNPACK_B8:
    case L::DIST_UNPACK4_B8:
    case L::DIST_DINTLV_B8: return 1;
    case L::DIST_BRC_B16:
    case L::DIST_US_B16:
    case L::DIST_DS_B16:
    case L::DIST_UNPACK_B16:
    case L::DIST_E2B_B16:
    case L::DIST_DINTLV_B16: return 2;
    case L::DIST_BRC_B32:
    case L::DIST_UNPACK_B32:
    case L::DIST_E2B_B32:
    case L::DIST_DINTLV_B32: return 4;
    default: return size;
  }
}
constexpr twin::Store store_of(StoreDist d) {
  using S = StoreDist;
  return d <= S::DIST_NORM_B32            ? twin::Store::NORM
         : d <= S::DIST_FIRST_ELEMENT_B32 ? twin::Store::FIRST
         : d <= S::DIST_PACK_B64          ? twin::Store::PACK
                                          : twin::Store::PACK4;
}
constexpr int store_unit(StoreDist d, int size) {
  using S = StoreDist;
  switch (d) {
    case S::DIST_NORM_B8:
    case S::DIST_FIRST_ELEMENT_B8:
    case S::DIST_INTLV_B8: return 1;
    case S::DIST_NORM_B16:
    case S::DIST_FIRST_ELEMENT_B16:
    case S::DIST_PACK_B16:
    case S::DIST_INTLV_B16: return 2;
    case S::DIST_NORM_B32:
    case S::DIST_FIRST_ELEMENT_B32:
    case S::DIST_PACK_B32:
    case S::DIST_PACK4_B32:
    case S::DIST_INTLV_B32: return 4;
    case S::DIST_PACK_B64: return 8;
    default: return size;
  }
}
template <class T, class R> constexpr twin::Type type =
    twin::type_of<std::conditional_t<std::is_same_v<T, DefaultType>, typename R::ActualT, T>>;
}  // namespace detail

template <class T = DefaultType, LoadDist dist = LoadDist::DIST_NORM, class U, class P>
inline void LoadAlign(U& dst, P* src, TWIN_HERE) {
  if constexpr (std::is_same_v<U, MaskReg>) twin::reg_load_mask(dst, src, where);
  else twin::reg_load(dst, src, detail::load_of(dist), detail::load_unit(dist, sizeof(P)), where);
}
template <class T, PostLiteral post, LoadDist dist = LoadDist::DIST_NORM, class U, class P>
inline void LoadAlign(U& dst, P*& src, int32_t stride, TWIN_HERE) {
  P* from = post == PostLiteral::POST_MODE_NORMAL ? src + stride : src;
  twin::reg_load(dst, from, detail::load_of(dist), detail::load_unit(dist, sizeof(P)), where);
  if constexpr (post == PostLiteral::POST_MODE_UPDATE) src += stride;
}
template <class T = DefaultType, LoadDist dist = LoadDist::DIST_NORM, class U, class P>
inline void LoadAlign(U& dst, P* src, AddrReg offset, TWIN_HERE) {
  twin::reg_load(dst, src + offset.elements, detail::load_of(dist), detail::load_unit(dist, sizeof(P)), where);
}
template <class T, LoadDist dist, class U, class P>
inline void LoadAlign(RegTensor<U>& dst0, RegTensor<U>& dst1, P* src, TWIN_HERE) {
  twin::reg_load_pairs(dst0, dst1, src, detail::load_unit(dist, sizeof(P)), where);
}
template <class P> inline void LoadUnAlignPre(UnalignRegForLoad& ureg, P* src) { ureg.next = src; }
template <class T = DefaultType, class U, class P>
inline void LoadUnAlign(U& dst, UnalignRegForLoad& ureg, P* src, TWIN_HERE) {
  twin::reg_load_unaligned(dst, ureg, src, 0, where);
}
template <class T = DefaultType, PostLiteral post = PostLiteral::POST_MODE_UPDATE, class U, class P>
inline void LoadUnAlign(U& dst, UnalignRegForLoad& ureg, P*& src, uint32_t stride, TWIN_HERE) {
  twin::reg_load_unaligned(dst, ureg, src, stride * sizeof(P), where);
  src += stride;
}

template <class T = DefaultType, StoreDist dist = StoreDist::DIST_NORM, class U, class P>
inline void StoreAlign(P* dst, const RegTensor<U>& src, const MaskReg& mask, TWIN_HERE) {
  twin::reg_store(dst, src, detail::store_of(dist), detail::store_unit(dist, sizeof(U)), mask, where);
}
template <class T, PostLiteral post, StoreDist dist = StoreDist::DIST_NORM, class U, class P>
inline void StoreAlign(P*& dst, const RegTensor<U>& src, int32_t stride, const MaskReg& mask, TWIN_HERE) {
  twin::reg_store(post == PostLiteral::POST_MODE_NORMAL ? dst + stride : dst, src, detail::store_of(dist),
                  detail::store_unit(dist, sizeof(U)), mask, where);
  if constexpr (post == PostLiteral::POST_MODE_UPDATE) dst += stride;
}
template <class T = DefaultType, StoreDist dist = StoreDist::DIST_NORM, class U, class P>
inline void StoreAlign(P* dst, const RegTensor<U>& src, AddrReg offset, const MaskReg& mask, TWIN_HERE) {
  twin::reg_store(dst + offset.elements, src, detail::store_of(dist), detail::store_unit(dist, sizeof(U)), mask, where);
}
template <class T, StoreDist dist, class U, class P>
inline void StoreAlign(P* dst, const RegTensor<U>& src0, const RegTensor<U>& src1, const MaskReg&, TWIN_HERE) {
  twin::reg_store_pairs(dst, src0, src1, detail::store_unit(dist, sizeof(U)), where);
}
// Blocks of 32 bytes, `stride` blocks from one start to the next; a block without an active element is left out.
template <class T, DataCopyMode mode, class U, class P>
inline void StoreAlign(P* dst, const RegTensor<U>& src, uint32_t stride, const MaskReg& mask, TWIN_HERE) {
  twin::reg_store_blocks(dst, src, stride, sizeof(U), mask, where);
}
template <class T, DataCopyMode mode, PostLiteral post, class U, class P> inline void StoreAlign(
    P*& dst, const RegTensor<U>& src, uint32_t stride, uint32_t repeatStride, const MaskReg& mask, TWIN_HERE) {
  P* moved = reinterpret_cast<P*>(reinterpret_cast<uint8_t*>(dst) + (size_t)repeatStride * 32);
  twin::reg_store_blocks(post == PostLiteral::POST_MODE_NORMAL ? moved : dst, src, stride, sizeof(U), mask, where);
  if constexpr (post == PostLiteral::POST_MODE_UPDATE) dst = moved;
}
template <class T = DefaultType, PostLiteral post = PostLiteral::POST_MODE_UPDATE, class U, class P>
inline void StoreUnAlign(P*& dst, const RegTensor<U>& src, UnalignRegForStore& ureg, uint32_t elements, TWIN_HERE) {
  twin::reg_store_stream(ureg, dst, src, (int)(elements * sizeof(P)), where);
  dst += elements;
}
template <class P> inline void StoreUnAlignPost(P*& dst, UnalignRegForStore& ureg, int32_t step, TWIN_HERE) {
  twin::reg_end_stream(ureg, dst, where);
  dst += step;
}

template <class T0 = DefaultType, class T1, class T2 = DefaultType, class U, class I>
inline void Gather(RegTensor<U>& dst, T1* base, const RegTensor<I>& index, const MaskReg& mask, TWIN_HERE) {
  twin::reg_gather(dst, twin::type_of<U>, base, twin::type_of<T1>, index, mask, where);
}

// Few instructions can merge; the others' pages say "not supported at present".
#define TWIN_REG_BINARY(Name, op, code, merges) \
  template <class T = DefaultType, MaskMergeMode mode = MaskMergeMode::ZEROING, class U> \
  inline std::enable_if_t<std::is_base_of_v<twin::Register, U>> Name(U& dst, const U& src0, const U& src1, \
                                                                     const MaskReg& mask, TWIN_HERE) { \
    static_assert(merges || mode != MaskMergeMode::MERGING, "the chip's " #Name " does not merge"); \
    twin::reg_binary(twin::op_##op, code, detail::type<T, U>, dst, src0, src1, mask, mode == MaskMergeMode::MERGING, \
                     where); \
  }
TWIN_REG_BINARY(Add, RegAdd, 0, false)
TWIN_REG_BINARY(Sub, RegSub, 1, false)
TWIN_REG_BINARY(Mul, RegMul, 2, false)
TWIN_REG_BINARY(Max, RegMax, 4, true)
TWIN_REG_BINARY(Min, RegMin, 5, true)
TWIN_REG_BINARY(And, RegAnd, 6, false)
TWIN_REG_BINARY(Or, RegOr, 7, false)
TWIN_REG_BINARY(Xor, RegXor, 8, false)
TWIN_REG_BINARY(MulAddDst, RegMulAddDst, 9, false)
#undef TWIN_REG_BINARY
#define TWIN_REG_UNARY(Name, op, code) \
  template <class T = DefaultType, MaskMergeMode mode = MaskMergeMode::ZEROING, class U> \
  inline std::enable_if_t<std::is_base_of_v<twin::Register, U>> Name(U& dst, const U& src, const MaskReg& mask, \
                                                                     TWIN_HERE) { \
    static_assert(mode != MaskMergeMode::MERGING, "the chip's " #Name " does not merge"); \
    twin::reg_unary(twin::op_##op, code, detail::type<T, U>, dst, src, mask, false, where); \
  }
TWIN_REG_UNARY(Abs, RegAbs, 2)
TWIN_REG_UNARY(Relu, RegRelu, 6)
TWIN_REG_UNARY(Neg, RegNeg, 7)
TWIN_REG_UNARY(Not, RegNot, 8)
#undef TWIN_REG_UNARY

namespace detail {
// `mode` of the functions below is a MaskMergeMode or the address of a structure with a precision.
template <class Algo, auto mode> constexpr Algo algo_of() {
  if constexpr (std::is_same_v<decltype(mode), MaskMergeMode>) {
    static_assert(mode != MaskMergeMode::MERGING, "the chip's instruction does not merge");
    return Algo::INTRINSIC;
  } else {
    static_assert(mode->mrgMode != MaskMergeMode::MERGING, "the chip's instruction does not merge");
    return mode->algo;
  }
}
template <auto mode> constexpr bool is_precise() {
  if constexpr (std::is_same_v<decltype(mode), MaskMergeMode>) return false;
  else return mode->precisionMode;
}
}  // namespace detail
template <class T = DefaultType, auto mode = MaskMergeMode::ZEROING, class U>
inline void Div(U& dst, const U& src0, const U& src1, const MaskReg& mask, TWIN_HERE) {
  twin::reg_binary(twin::op_RegDiv, twin::lanes_of(detail::algo_of<DivAlgo, mode>()), detail::type<T, U>, dst, src0,
                   src1, mask, false, where);
}
template <class T = DefaultType, auto mode = MaskMergeMode::ZEROING, class U>
inline void Exp(U& dst, const U& src, const MaskReg& mask, TWIN_HERE) {
  twin::reg_unary(twin::op_RegExp, twin::lanes_of(detail::algo_of<ExpAlgo, mode>()), detail::type<T, U>, dst, src, mask,
                  false, where);
}
template <class T = DefaultType, auto mode = MaskMergeMode::ZEROING, class U>
inline void Ln(U& dst, const U& src, const MaskReg& mask, TWIN_HERE) {
  twin::reg_unary(twin::op_RegLn, twin::lanes_of(detail::algo_of<LnAlgo, mode>()), detail::type<T, U>, dst, src, mask,
                  false, where);
}
template <class T = DefaultType, auto mode = MaskMergeMode::ZEROING, class U>
inline void Sqrt(U& dst, const U& src, const MaskReg& mask, TWIN_HERE) {
  constexpr SqrtAlgo algo = detail::is_precise<mode>() ? SqrtAlgo::FAST_INVERSE : detail::algo_of<SqrtAlgo, mode>();
  twin::reg_unary(twin::op_RegSqrt, twin::lanes_of(algo), detail::type<T, U>, dst, src, mask, false, where);
}

#define TWIN_REG_SCALAR(Name, op, code) \
  template <class T = DefaultType, class S, MaskMergeMode mode = MaskMergeMode::ZEROING, class U> \
  inline void Name(U& dst, const U& src, S value, const MaskReg& mask, TWIN_HERE) { \
    static_assert(mode != MaskMergeMode::MERGING, "the chip's " #Name " does not merge"); \
    using V = std::conditional_t<std::is_same_v<T, DefaultType>, typename U::ActualT, T>; \
    const V scalar = V(value); \
    twin::reg_scalar(twin::op_##op, code, detail::type<T, U>, dst, src, &scalar, mask, false, where); \
  }
TWIN_REG_SCALAR(Adds, RegAdds, 0)
TWIN_REG_SCALAR(Muls, RegMuls, 1)
TWIN_REG_SCALAR(Maxs, RegMaxs, 2)
TWIN_REG_SCALAR(Mins, RegMins, 3)
TWIN_REG_SCALAR(ShiftLefts, RegShiftLefts, 4)
TWIN_REG_SCALAR(ShiftRights, RegShiftRights, 5)
TWIN_REG_SCALAR(LeakyRelu, RegLeakyRelu, 6)
TWIN_REG_SCALAR(Axpy, RegAxpy, 7)
#undef TWIN_REG_SCALAR

template <class T = DefaultType, class S, class U> inline void Duplicate(RegTensor<U>& dst, S value, TWIN_HERE) {
  const U scalar = U(value);
  twin::reg_fill(twin::type_of<U>, dst, &scalar, twin::mask_of(0, 1), false, where);
}
template <class T = DefaultType, MaskMergeMode mode = MaskMergeMode::ZEROING, class S, class U>
inline void Duplicate(RegTensor<U>& dst, const S& value, const MaskReg& mask, TWIN_HERE) {
  if constexpr (std::is_base_of_v<twin::Register, S>)
    twin::reg_fill(twin::type_of<U>, dst, value.bytes, mask, mode == MaskMergeMode::MERGING, where);
  else {
    const U scalar = U(value);
    twin::reg_fill(twin::type_of<U>, dst, &scalar, mask, mode == MaskMergeMode::MERGING, where);
  }
}
template <class T = DefaultType, IndexOrder order = IndexOrder::INCREASE_ORDER, class S, class U>
inline void Arange(RegTensor<U>& dst, S first, TWIN_HERE) {
  const U start = U(first);
  twin::reg_arange(twin::type_of<U>, dst, &start, order == IndexOrder::DECREASE_ORDER, where);
}
template <class T = DefaultType, CMPMODE mode = CMPMODE::EQ, class U>
inline void Compare(MaskReg& dst, const RegTensor<U>& a, const RegTensor<U>& b, const MaskReg& mask, TWIN_HERE) {
  twin::reg_compare(twin::type_of<U>, mode, dst, a, &b, nullptr, mask, where);
}
template <class T = DefaultType, CMPMODE mode = CMPMODE::EQ, class S, class U>
inline void Compares(MaskReg& dst, const RegTensor<U>& a, S value, const MaskReg& mask, TWIN_HERE) {
  const U scalar = U(value);
  twin::reg_compare(twin::type_of<U>, mode, dst, a, nullptr, &scalar, mask, where);
}
template <class T = DefaultType, class U>
inline void Select(RegTensor<U>& dst, const RegTensor<U>& a, const RegTensor<U>& b, const MaskReg& mask, TWIN_HERE) {
  twin::reg_select(twin::type_of<U>, dst, a, b, mask, where);
}
template <ReduceType how = ReduceType::SUM, class T = DefaultType, class U = DefaultType,
          MaskMergeMode mode = MaskMergeMode::ZEROING, class R>
inline void Reduce(RegTensor<R>& dst, const RegTensor<R>& src, const MaskReg& mask, TWIN_HERE) {
  twin::reg_reduce(false, how, twin::type_of<R>, dst, src, mask, where);
}
template <ReduceType how = ReduceType::SUM, class T = DefaultType, MaskMergeMode mode = MaskMergeMode::ZEROING, class R>
inline void ReduceDataBlock(RegTensor<R>& dst, const RegTensor<R>& src, const MaskReg& mask, TWIN_HERE) {
  twin::reg_reduce(true, how, twin::type_of<R>, dst, src, mask, where);
}
template <class T = DefaultType, class U>
inline void Interleave(U& dst0, U& dst1, const U& src0, const U& src1, TWIN_HERE) {
  twin::reg_interleave(false, sizeof(typename U::ActualT), dst0, dst1, src0, src1, where);
}
template <class T = DefaultType, class U>
inline void DeInterleave(U& dst0, U& dst1, const U& src0, const U& src1, TWIN_HERE) {
  twin::reg_interleave(true, sizeof(typename U::ActualT), dst0, dst1, src0, src1, where);
}
template <class T = DefaultType, class U>
inline void Squeeze(RegTensor<U>& dst, const RegTensor<U>& src, const MaskReg& mask, TWIN_HERE) {
  twin::reg_squeeze(sizeof(U), dst, src, mask, where);
}
template <class T = DefaultType, class U = DefaultType, const CastTrait& trait = castTrait, class S, class V>
inline void Cast(RegTensor<S>& dst, const RegTensor<V>& src, const MaskReg& mask, TWIN_HERE) {
  twin::reg_cast(twin::type_of<S>, dst, twin::type_of<V>, src, (int)trait.layoutMode, trait.satMode != SatMode::NO_SAT,
                 trait.roundMode, mask, where);
}

#define TWIN_MASK_OP(Name, expression) \
  inline void Name(MaskReg& dst, const MaskReg& a, const MaskReg& b, const MaskReg& mask) { \
    for (int i = 0; i < 4; ++i) dst.bits[i] = (expression) & mask.bits[i]; \
  }
TWIN_MASK_OP(And, a.bits[i] & b.bits[i])
TWIN_MASK_OP(Or, a.bits[i] | b.bits[i])
TWIN_MASK_OP(Xor, a.bits[i] ^ b.bits[i])
#undef TWIN_MASK_OP
inline void Not(MaskReg& dst, const MaskReg& a, const MaskReg& mask) {
  for (int i = 0; i < 4; ++i) dst.bits[i] = ~a.bits[i] & mask.bits[i];
}

}  // namespace Reg
namespace MicroAPI = Reg;
}  // namespace AscendC

template <auto function, class... Args> inline void asc_vf_call(Args... args) {
  const twin::Where where{__builtin_FILE(), __builtin_LINE()};
  twin::enter_vector_function(where);
  function(args...);
  twin::leave_vector_function(where);
}
