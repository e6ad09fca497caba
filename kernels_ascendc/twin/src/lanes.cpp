#include "lanes.h"

#include <limits>
#include <type_traits>

#include "elementary.h"

namespace twin {
namespace TWIN_LEVEL {
namespace {

template <class T> constexpr bool kIsSmall = std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>;
template <class T> constexpr bool kIsFloat = std::is_same_v<T, float> || kIsSmall<T>;
template <class T> using Work = std::conditional_t<kIsFloat<T>, float, T>;  // what a lane is computed in

template <class T> inline Work<T> get(const T* p, size_t i) {
  if constexpr (std::is_same_v<T, bfloat16_t>) return from_bf16(p[i].bits);
  else if constexpr (std::is_same_v<T, half>) return from_half(p[i].bits);
  else return p[i];
}
template <class T> inline void put(T* p, size_t i, Work<T> x) {
  if constexpr (std::is_same_v<T, bfloat16_t>) p[i].bits = to_bf16(x);
  else if constexpr (std::is_same_v<T, half>) p[i].bits = to_half(x);
  else p[i] = x;
}

template <class T> using Unsigned = std::make_unsigned_t<
    std::conditional_t<kIsSmall<T>, uint16_t, std::conditional_t<std::is_same_v<T, float>, uint32_t, T>>>;

template <class T> constexpr float kLeastNormal = std::is_same_v<T, half> ? 6.103515625e-05f : 1.17549435e-38f;
template <class T> inline float flush(float x) {
  const float size = __builtin_fabsf(x);
  return size < kLeastNormal<T> ? x * 0.0f : x;
}

// For types narrower than float: cut to what a float holds, again to odd.
template <class T> inline void put_fused(T* p, size_t i, double x) {
  uint64_t u;
  memcpy(&u, &x, 8);
  const uint64_t low = u & 0x1fffffffu;
  u = u - low + (low != 0 && x == x ? 0x20000000u & ~u : 0);
  memcpy(&x, &u, 8);
  put(p, i, (float)x);
}

template <BinaryOp op, class W> inline W apply2(W a, W b) {
  if constexpr (std::is_same_v<W, float>) {
    if constexpr (op == kAdd) return a + b;
    else if constexpr (op == kSub) return a - b;
    else if constexpr (op == kMul) return a * b;
    else if constexpr (op == kDiv || op == kDivFull) return a / b;
    else if constexpr (op == kMax)
      return a > b ? a : a == b ? float_of(bits_of(a) & bits_of(b)) : b == b ? (a == a ? b : a) : b;
    else
      return a < b    ? a
             : a == b ? float_of(bits_of(a) | bits_of(b))
             : b == b ? (a == a ? b : a)
                      : b;  // -0 lies below +0
  } else {                  // integers wrap around
    using U = std::make_unsigned_t<W>;
    if constexpr (op == kAdd) return (W)((U)a + (U)b);
    else if constexpr (op == kSub) return (W)((U)a - (U)b);
    else if constexpr (op == kMul) return (W)((U)a * (uint64_t)(U)b);
    else if constexpr (op == kDiv) return b == 0 ? W(-1) : (W)(a / b);
    else if constexpr (op == kMax) return a > b ? a : b;
    else return a < b ? a : b;
  }
}

template <BinaryOp op, class T> void binary(void* d, const void* a, const void* b, size_t n) {
  auto* out = static_cast<T*>(d);
  const auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  if constexpr (op == kAnd || op == kOr || op == kXor) {
    using U = Unsigned<T>;
    auto* o = static_cast<U*>(d);
    const auto *p = static_cast<const U*>(a), *q = static_cast<const U*>(b);
    for (size_t i = 0; i < n; ++i) o[i] = (U)(op == kAnd ? p[i] & q[i] : op == kOr ? p[i] | q[i] : p[i] ^ q[i]);
  } else if constexpr (op == kMulAddDst) {
    for (size_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<T, float>) out[i] = fused_of(x[i], y[i], out[i]);
      else if constexpr (kIsFloat<T>) put_fused(out, i, fused(get(x, i), get(y, i), get(out, i)));
      else out[i] = apply2<kAdd>(apply2<kMul>(x[i], y[i]), out[i]);
    }
  } else if constexpr (op == kDiv && kIsFloat<T>) {
    for (size_t i = 0; i < n; ++i) put(out, i, flush<T>(flush<T>(get(x, i)) / flush<T>(get(y, i))));
  } else {
    for (size_t i = 0; i < n; ++i) put(out, i, apply2<op>(get(x, i), get(y, i)));
  }
}

template <UnaryOp op, class T> void unary(void* d, const void* a, size_t n) {
  auto* out = static_cast<T*>(d);
  const auto* x = static_cast<const T*>(a);
  if constexpr (op == kNot) {
    using U = Unsigned<T>;
    for (size_t i = 0; i < n; ++i) static_cast<U*>(d)[i] = (U) ~static_cast<const U*>(a)[i];
  } else if constexpr (op == kCopy) {
    memmove(d, a, n * sizeof(T));
  } else {
    for (size_t i = 0; i < n; ++i) {
      const auto v = get(x, i);
      using W = Work<T>;
      W r;
      if constexpr (op == kAbs) r = kIsFloat<T> ? (W)__builtin_fabsf((float)v) : (W)(v < 0 ? -v : v);
      else if constexpr (op == kRelu) r = v > 0 ? v : kIsFloat<T> && v != v ? v : W(0);
      else if constexpr (op == kNeg) r = (W)-v;
      else if constexpr (op == kExp && std::is_same_v<T, half>) r = flush<T>(exp_normal_of(v));
      else if constexpr (op == kExp) r = exp_normal_of(v);
      else if constexpr (op == kLn) r = log_of(flush<T>(v));
      else if constexpr (op == kReciprocal) r = flush<T>(1.0f / flush<T>(v));
      else if constexpr (op == kSqrt) r = __builtin_sqrtf(flush<T>(v));
      else if constexpr (op == kRsqrt) r = 1.0f / __builtin_sqrtf(flush<T>(v));
      else if constexpr (op == kExpFull) r = exp_of(v);
      else if constexpr (op == kLnFull) r = log_of(v);
      else if constexpr (op == kReciprocalFull) r = 1.0f / v;
      else if constexpr (op == kSqrtFull) r = __builtin_sqrtf(v);
      else if constexpr (op == kSqrtFast) r = v > 0x1p126f ? 0.0f : __builtin_sqrtf(v);
      else if constexpr (op == kRsqrtFast)
        r = v > 0x1p126f ? std::numeric_limits<float>::infinity() : 1.0f / __builtin_sqrtf(v);
      else r = 1.0f / __builtin_sqrtf(v);
      put(out, i, r);
    }
  }
}

template <ScalarOp op, class T> void scalar(void* d, const void* a, const void* s, size_t n) {
  auto* out = static_cast<T*>(d);
  const auto* x = static_cast<const T*>(a);
  const auto k = get(static_cast<const T*>(s), 0);
  using W = Work<T>;
  [[maybe_unused]] const bool wide = (uint64_t)k >= 8 * sizeof(T);
  for (size_t i = 0; i < n; ++i) {
    if constexpr (op == kAdds) put(out, i, apply2<kAdd>(get(x, i), k));
    else if constexpr (op == kMuls) put(out, i, apply2<kMul>(get(x, i), k));
    else if constexpr (op == kMaxs) put(out, i, apply2<kMax>(get(x, i), k));
    else if constexpr (op == kMins) put(out, i, apply2<kMin>(get(x, i), k));
    else if constexpr (op == kAxpy && std::is_same_v<T, float>) out[i] = fused_of(x[i], k, out[i]);
    else if constexpr (op == kAxpy) put_fused(out, i, fused(get(x, i), k, get(out, i)));
    else if constexpr (op == kLeakyRelu) put(out, i, get(x, i) >= 0 ? get(x, i) : (W)(get(x, i) * k));
    else if constexpr (op == kDuplicate) out[i] = *static_cast<const T*>(s);
    else if constexpr (op == kShiftLeft) {  // a signed type's highest bit stays
      const auto sign = T(-1) < T(0) ? (Unsigned<T>)((Unsigned<T>)1 << (8 * sizeof(T) - 1)) : (Unsigned<T>)0;
      const auto bits = (Unsigned<T>)x[i];
      out[i] = wide ? T(0) : (T)((Unsigned<T>)((Unsigned<T>)(bits << k) & (Unsigned<T>)~sign) | (Unsigned<T>)(bits & sign));
    } else
      out[i] = (T)(x[i] >> (wide ? (T)(8 * sizeof(T) - 1) : k)) &
               (T)(wide && T(-1) > T(0) ? 0 : -1);  // arithmetic for signed types
  }
}

template <CompareOp op, class T> void compare(uint8_t* bytes, const void* a, const void* b, size_t n) {
  const auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  for (size_t i = 0; i < n; ++i) {
    const auto p = get(x, i), q = get(y, i);
    bytes[i] = op == kLt   ? p < q
               : op == kGt ? p > q
               : op == kEq ? p == q
               : op == kLe ? p <= q
               : op == kGe ? p >= q
                           : p != q;
  }
}

// ---- conversions --------------------------------------------------------------------------------------------------

template <class T> inline T saturate(double x) {
  constexpr double low = (double)std::numeric_limits<T>::min(), high = (double)std::numeric_limits<T>::max();
  return x != x ? T(0) : x <= low ? std::numeric_limits<T>::min() : x >= high ? std::numeric_limits<T>::max() : (T)x;
}
template <class T> inline T saturate_int(int64_t x) {
  if (x < (int64_t)std::numeric_limits<T>::min()) return std::numeric_limits<T>::min();
  if ((uint64_t)(x < 0 ? 0 : x) > (uint64_t)std::numeric_limits<T>::max()) return std::numeric_limits<T>::max();
  return (T)x;
}

inline float int_to_float(int64_t x, RoundMode mode) {
  const bool negative = x < 0;
  const uint64_t u = negative ? 0 - (uint64_t)x : (uint64_t)x;
  if (u < (1u << 24)) return (float)x;
  const int drop = 63 - __builtin_clzll(u) - 23;
  uint64_t kept = u >> drop;
  if (rounds_up(mode, negative, (uint32_t)kept, u & ((uint64_t(1) << drop) - 1), uint64_t(1) << (drop - 1))) ++kept;
  const float scaled = (float)kept * float_of((uint32_t)(127 + drop) << 23);
  return negative ? -scaled : scaled;
}

struct Wide {
  float f;
  int64_t i;
};
template <Type from> inline Wide read(const void* a, size_t i) {
  if constexpr (from == F32) return {static_cast<const float*>(a)[i], 0};
  else if constexpr (from == F16) return {from_half(static_cast<const uint16_t*>(a)[i]), 0};
  else if constexpr (from == BF16) return {from_bf16(static_cast<const uint16_t*>(a)[i]), 0};
  else if constexpr (from == E4M3) return {from_e4m3(static_cast<const uint8_t*>(a)[i]), 0};
  else if constexpr (from == E5M2) return {from_e5m2(static_cast<const uint8_t*>(a)[i]), 0};
  else if constexpr (from == E8M0) return {from_e8m0(static_cast<const uint8_t*>(a)[i]), 0};
  else if constexpr (from == E2M1X2)
    return {from_e2m1((uint8_t)(static_cast<const uint8_t*>(a)[i / 2] >> (i % 2 * 4))), 0};
  else if constexpr (from == I32) return {0, static_cast<const int32_t*>(a)[i]};
  else if constexpr (from == U32) return {0, static_cast<const uint32_t*>(a)[i]};
  else if constexpr (from == I16) return {0, static_cast<const int16_t*>(a)[i]};
  else if constexpr (from == U16) return {0, static_cast<const uint16_t*>(a)[i]};
  else if constexpr (from == I8) return {0, static_cast<const int8_t*>(a)[i]};
  else if constexpr (from == U8) return {0, static_cast<const uint8_t*>(a)[i]};
  else return {0, static_cast<const int64_t*>(a)[i]};
}
constexpr bool is_float(Type t) { return t == F32 || t == F16 || t == BF16 || t >= E4M3; }

struct SmallTable {  // every code of an 8-bit format
  float value[256];
  explicit SmallTable(float (*f)(uint8_t)) {
    for (int i = 0; i < 256; ++i) value[i] = f((uint8_t)i);
  }
};

template <Type to, Type from> void convert(void* d, const void* a, RoundMode mode, size_t n) {
  if constexpr (from == BF16 && to == F32) {
    for (size_t i = 0; i < n; ++i) static_cast<uint32_t*>(d)[i] = (uint32_t)static_cast<const uint16_t*>(a)[i] << 16;
    return;
  }
  if constexpr (from == E4M3 && to == F32) {
    static const SmallTable table(from_e4m3);
    for (size_t i = 0; i < n; ++i) static_cast<float*>(d)[i] = table.value[static_cast<const uint8_t*>(a)[i]];
    return;
  }
  if constexpr (from == F32 && to == BF16) {
    if (mode == RoundMode::CAST_RINT || mode == RoundMode::CAST_NONE) {
      for (size_t i = 0; i < n; ++i) {
        const uint32_t u = static_cast<const uint32_t*>(a)[i];
        const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16, nan = (u >> 16) | 0x40;
        static_cast<uint16_t*>(d)[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
      }
      return;
    }
  }
  for (size_t i = 0; i < n; ++i) {
    const Wide x = read<from>(a, i);
    float f = x.f;
    if constexpr (!is_float(from) && is_float(to)) f = to == F32 ? int_to_float(x.i, mode) : (float)x.i;
    if constexpr (to == F32)
      static_cast<float*>(d)[i] =
          from == F32 && f == f && __builtin_fabsf(f) < 8388608.0f ? __builtin_copysignf((float)whole(f, mode), f) : f;
    else if constexpr (to == F16) static_cast<uint16_t*>(d)[i] = to_half(f, mode);
    else if constexpr (to == BF16) static_cast<uint16_t*>(d)[i] = to_bf16(f, mode);
    else if constexpr (to == E4M3) static_cast<uint8_t*>(d)[i] = to_e4m3(f, mode);
    else if constexpr (to == E5M2) static_cast<uint8_t*>(d)[i] = to_e5m2(f, mode);
    else if constexpr (to == E2M1X2) {
      uint8_t& pair = static_cast<uint8_t*>(d)[i / 2];
      pair = i % 2 ? (uint8_t)((pair & 15) | to_e2m1(f, mode) << 4) : to_e2m1(f, mode);
    } else {
      using T = std::conditional_t<
          to == I32, int32_t,
          std::conditional_t<
              to == U32, uint32_t,
              std::conditional_t<
                  to == I16, int16_t,
                  std::conditional_t<
                      to == U16, uint16_t,
                      std::conditional_t<to == I8, int8_t, std::conditional_t<to == U8, uint8_t, int64_t>>>>>>;
      if constexpr (is_float(from)) static_cast<T*>(d)[i] = saturate<T>(whole(f, mode));
      else static_cast<T*>(d)[i] = saturate_int<T>(x.i);
    }
  }
}

template <Type to> void convert_from(void* d, const void* a, Type from, RoundMode mode, size_t n) {
#define TWIN_FROM(type) \
  case type: return convert<to, type>(d, a, mode, n);
  switch (from) {
    TWIN_FROM(F32)
    TWIN_FROM(F16)
    TWIN_FROM(BF16)
    TWIN_FROM(I32)
    TWIN_FROM(U32)
    TWIN_FROM(I16)
    TWIN_FROM(U16)
    TWIN_FROM(I8)
    TWIN_FROM(U8)
    TWIN_FROM(I64)
    TWIN_FROM(E4M3)
    TWIN_FROM(E5M2)
    TWIN_FROM(E2M1X2)
    TWIN_FROM(E8M0)
    default: return;
  }
#undef TWIN_FROM
}
void cast(void* d, Type to, const void* a, Type from, RoundMode mode, size_t n) {
#define TWIN_TO(type) \
  case type: return convert_from<type>(d, a, from, mode, n);
  switch (to) {
    TWIN_TO(F32)
    TWIN_TO(F16)
    TWIN_TO(BF16)
    TWIN_TO(I32)
    TWIN_TO(U32)
    TWIN_TO(I16)
    TWIN_TO(U16)
    TWIN_TO(I8)
    TWIN_TO(U8)
    TWIN_TO(I64)
    TWIN_TO(E4M3)
    TWIN_TO(E5M2)
    TWIN_TO(E2M1X2)
    default: return;
  }
#undef TWIN_TO
}

// ---- the table ----------------------------------------------------------------------------------------------------

template <class T> void fill_type(Lanes& t) {
  constexpr Type c = type_of<T>;
  auto& b = t.binary;
  b[kAnd][c] = binary<kAnd, T>, b[kOr][c] = binary<kOr, T>, b[kXor][c] = binary<kXor, T>;
  t.unary[kNot][c] = unary<kNot, T>, t.unary[kCopy][c] = unary<kCopy, T>,
  t.scalar[kDuplicate][c] = scalar<kDuplicate, T>;
  b[kAdd][c] = binary<kAdd, T>, b[kSub][c] = binary<kSub, T>, b[kMul][c] = binary<kMul, T>,
  b[kMax][c] = binary<kMax, T>, b[kMin][c] = binary<kMin, T>;
  t.unary[kAbs][c] = unary<kAbs, T>, t.unary[kRelu][c] = unary<kRelu, T>, t.unary[kNeg][c] = unary<kNeg, T>;
  auto& s = t.scalar;
  s[kAdds][c] = scalar<kAdds, T>, s[kMuls][c] = scalar<kMuls, T>, s[kMaxs][c] = scalar<kMaxs, T>,
  s[kMins][c] = scalar<kMins, T>;
  auto& k = t.compare;
  k[kLt][c] = compare<kLt, T>, k[kGt][c] = compare<kGt, T>, k[kEq][c] = compare<kEq, T>;
  k[kLe][c] = compare<kLe, T>, k[kGe][c] = compare<kGe, T>, k[kNe][c] = compare<kNe, T>;
  if constexpr (kIsFloat<T>) {
    b[kDiv][c] = binary<kDiv, T>, b[kDivFull][c] = binary<kDivFull, T>, b[kMulAddDst][c] = binary<kMulAddDst, T>;
    auto& u = t.unary;
    u[kExp][c] = unary<kExp, T>, u[kLn][c] = unary<kLn, T>, u[kReciprocal][c] = unary<kReciprocal, T>,
    u[kSqrt][c] = unary<kSqrt, T>;
    u[kRsqrt][c] = unary<kRsqrt, T>, u[kExpFull][c] = unary<kExpFull, T>, u[kLnFull][c] = unary<kLnFull, T>;
    u[kReciprocalFull][c] = unary<kReciprocalFull, T>, u[kSqrtFull][c] = unary<kSqrtFull, T>,
    u[kRsqrtFull][c] = unary<kRsqrtFull, T>;
    u[kSqrtFast][c] = unary<kSqrtFast, T>, u[kRsqrtFast][c] = unary<kRsqrtFast, T>;
    s[kLeakyRelu][c] = scalar<kLeakyRelu, T>, s[kAxpy][c] = scalar<kAxpy, T>;
  } else {
    s[kShiftLeft][c] = scalar<kShiftLeft, T>, s[kShiftRight][c] = scalar<kShiftRight, T>;
    b[kDiv][c] = binary<kDiv, T>, b[kMulAddDst][c] = binary<kMulAddDst, T>;
  }
}

Lanes build() {
  Lanes t{};
  fill_type<float>(t), fill_type<half>(t), fill_type<bfloat16_t>(t), fill_type<int32_t>(t), fill_type<uint32_t>(t),
      fill_type<int16_t>(t);
  fill_type<uint16_t>(t), fill_type<int8_t>(t), fill_type<uint8_t>(t), fill_type<int64_t>(t), fill_type<uint64_t>(t);
  t.cast = cast;
  return t;
}

}  // namespace

Lanes make_lanes() { return build(); }

}  // namespace TWIN_LEVEL
}  // namespace twin
