// The device's number formats as bytes, and their exact conversions to and from float.
//
// Rounding follows the pages "precision_conversion" and "Cast"; overflow saturates, NaN stays NaN where the format
// has one.
#pragma once

#include <stdint.h>
#include <string.h>

namespace AscendC {
enum class RoundMode { CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD, CAST_HYBRID };
}

namespace twin {

using AscendC::RoundMode;

static inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// Whether the kept part goes up by one unit: `cut` holds the bits thrown away, `half_bit` the weight of their first.
static inline bool rounds_up(RoundMode mode, bool negative, uint32_t kept, uint64_t cut, uint64_t half_bit) {
  switch (mode) {
    case RoundMode::CAST_FLOOR: return negative && cut != 0;
    case RoundMode::CAST_CEIL: return !negative && cut != 0;
    case RoundMode::CAST_ROUND: return cut >= half_bit && cut != 0;
    case RoundMode::CAST_TRUNC: return false;
    case RoundMode::CAST_ODD: return cut != 0 && (kept & 1) == 0;
    default: return cut > half_bit || (cut == half_bit && cut != 0 && (kept & 1));
  }
}

// A float in a small format of `exponent_bits` and `mantissa_bits` (bias 2^(e-1)-1), as the magnitude's bits,
// subnormals included. `largest` is the biggest finite code; anything above saturates to it.
static inline uint32_t to_small(float x, int exponent_bits, int mantissa_bits, uint32_t largest, RoundMode mode) {
  const uint32_t u = bits_of(x) & 0x7fffffffu;
  const bool negative = bits_of(x) >> 31;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  int exponent = (int)(u >> 23) - 127;
  uint32_t mantissa = u & 0x7fffffu;
  if (u == 0) return 0;
  if (u < 0x800000u) exponent = -126;
  else mantissa |= 0x800000u;
  int drop = 23 - mantissa_bits;
  int code_exponent = exponent + bias;
  if (code_exponent < 1) {
    drop += 1 - code_exponent;
    code_exponent = 1;
  }
  if (drop > 40) drop = 40;
  const uint64_t wide = mantissa;
  uint32_t kept = (uint32_t)(wide >> drop);
  const uint64_t cut = wide & ((uint64_t(1) << drop) - 1), half_bit = uint64_t(1) << (drop - 1);
  if (rounds_up(mode, negative, kept, cut, half_bit)) ++kept;
  const uint64_t code = kept + ((uint64_t)(code_exponent - 1) << mantissa_bits);
  return code > largest ? largest : (uint32_t)code;
}

static inline float from_small(uint32_t code, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1), exponent = code >> mantissa_bits;
  if (exponent == 0) {
    const float unit = float_of((uint32_t)(127 + 1 - bias - mantissa_bits) << 23);
    return (float)mantissa * unit;
  }
  return float_of(((exponent - bias + 127) << 23) | (mantissa << (23 - mantissa_bits)));
}

static inline uint16_t to_bf16(float x, RoundMode mode = RoundMode::CAST_RINT) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
  if ((u & 0x7fffffffu) == 0x7f800000u) return (uint16_t)(u >> 16);
  uint32_t kept = u >> 16;
  if (rounds_up(mode, u >> 31, kept, u & 0xffffu, 0x8000u)) ++kept;
  return (uint16_t)kept;
}
static inline float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

static inline uint16_t to_half(float x, RoundMode mode = RoundMode::CAST_RINT) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (magnitude == 0x7f800000u) return (uint16_t)(sign | 0x7bffu);  // saturating mode is the default
  return (uint16_t)(sign | to_small(x, 5, 10, 0x7bffu, mode));
}
static inline float from_half(uint16_t h) {
  const uint32_t code = h & 0x7fffu;
  const float x = code >= 0x7c00u ? float_of(0x7f800000u | ((code & 0x3ffu) << 13)) : from_small(code, 5, 10);
  return float_of(bits_of(x) | ((uint32_t)(h & 0x8000u) << 16));
}

static inline uint8_t to_e4m3(float x, RoundMode mode = RoundMode::CAST_RINT) {
  const uint32_t u = bits_of(x), sign = (u >> 24) & 0x80u;
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
  if ((u & 0x7fffffffu) == 0x7f800000u) return (uint8_t)(sign | 0x7eu);
  return (uint8_t)(sign | to_small(x, 4, 3, 0x7eu, mode));
}
static inline float from_e4m3(uint8_t c) {
  const float x = (c & 0x7fu) == 0x7fu ? float_of(0x7fc00000u) : from_small(c & 0x7fu, 4, 3);
  return float_of(bits_of(x) | ((uint32_t)(c & 0x80u) << 24));
}
static inline uint8_t to_e5m2(float x, RoundMode mode = RoundMode::CAST_RINT) {
  const uint32_t u = bits_of(x), sign = (u >> 24) & 0x80u;
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
  if ((u & 0x7fffffffu) == 0x7f800000u) return (uint8_t)(sign | 0x7bu);
  return (uint8_t)(sign | to_small(x, 5, 2, 0x7bu, mode));
}
static inline float from_e5m2(uint8_t c) {
  const uint32_t code = c & 0x7fu;
  const float x = code >= 0x7cu ? float_of(code == 0x7cu ? 0x7f800000u : 0x7fc00000u) : from_small(code, 5, 2);
  return float_of(bits_of(x) | ((uint32_t)(c & 0x80u) << 24));
}
static inline uint8_t to_e2m1(float x, RoundMode mode = RoundMode::CAST_RINT) {
  const uint32_t u = bits_of(x), sign = (u >> 28) & 8u;
  if ((u & 0x7fffffffu) >= 0x7f800000u) return (uint8_t)(sign | 7u);
  return (uint8_t)(sign | to_small(x, 2, 1, 7u, mode));
}
static inline float from_e2m1(uint8_t c) {
  static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return values[c & 15];
}
static inline float from_e8m0(uint8_t c) {
  return c == 255 ? float_of(0x7fc00000u) : c == 0 ? float_of(0x00400000u) : float_of((uint32_t)c << 23);
}

// The nearest whole number by a rounding mode, exactly.
static inline double whole(double x, RoundMode mode) {
  const double down = __builtin_floor(x), rest = x - down;
  switch (mode) {
    case RoundMode::CAST_FLOOR: return down;
    case RoundMode::CAST_CEIL: return __builtin_ceil(x);
    case RoundMode::CAST_TRUNC: return __builtin_trunc(x);
    case RoundMode::CAST_ROUND: return __builtin_round(x);
    default:
      if (rest < 0.5) return down;
      if (rest > 0.5) return down + 1;
      return __builtin_fmod(down, 2.0) == 0.0 ? down : down + 1;
  }
}

}  // namespace twin

// The device's scalar types. Arithmetic on them goes through float, as scalar code on the device does.
#define TWIN_SMALL_FLOAT(name, storage, to, from) \
  struct name { \
    storage bits; \
    name() = default; \
    name(float x) : bits(twin::to(x)) {} \
    name(double x) : bits(twin::to((float)x)) {} \
    name(int x) : bits(twin::to((float)x)) {} \
    operator float() const { return twin::from(bits); } \
  };
TWIN_SMALL_FLOAT(half, uint16_t, to_half, from_half)
TWIN_SMALL_FLOAT(bfloat16_t, uint16_t, to_bf16, from_bf16)
TWIN_SMALL_FLOAT(fp8_e4m3fn_t, uint8_t, to_e4m3, from_e4m3)
TWIN_SMALL_FLOAT(fp8_e5m2_t, uint8_t, to_e5m2, from_e5m2)
#undef TWIN_SMALL_FLOAT
struct fp8_e8m0_t {
  uint8_t bits;
};
namespace AscendC {
// What LoadData with scales leaves in L0A and L0B, by the page "Load2DMX".
struct mx_fp8_e4m3_t {
  uint8_t bits;
};
struct mx_fp8_e5m2_t {
  uint8_t bits;
};
}  // namespace AscendC
struct fp4x2_e2m1_t {  // two values: the lower nibble is the earlier element
  uint8_t bits;
};

namespace twin {

// Lane types. The order is that of the tables in lanes.h.
enum Type : uint8_t { F32, F16, BF16, I32, U32, I16, U16, I8, U8, I64, U64, E4M3, E5M2, E2M1X2, E8M0, TYPES };

template <class T> struct TypeOf;
#define TWIN_TYPE(name, code) \
  template <> struct TypeOf<name> { \
    static constexpr Type value = code; \
  };
TWIN_TYPE(float, F32)
TWIN_TYPE(half, F16)
TWIN_TYPE(bfloat16_t, BF16)
TWIN_TYPE(int32_t, I32)
TWIN_TYPE(uint32_t, U32)
TWIN_TYPE(int16_t, I16)
TWIN_TYPE(uint16_t, U16)
TWIN_TYPE(int8_t, I8)
TWIN_TYPE(uint8_t, U8)
TWIN_TYPE(int64_t, I64)
TWIN_TYPE(uint64_t, U64)
TWIN_TYPE(fp8_e4m3fn_t, E4M3)
TWIN_TYPE(fp8_e5m2_t, E5M2)
TWIN_TYPE(fp4x2_e2m1_t, E2M1X2)
TWIN_TYPE(fp8_e8m0_t, E8M0)
TWIN_TYPE(AscendC::mx_fp8_e4m3_t, E4M3)
TWIN_TYPE(AscendC::mx_fp8_e5m2_t, E5M2)
#undef TWIN_TYPE
template <class T> constexpr Type type_of = TypeOf<T>::value;

inline constexpr const char* kTypeNames[TYPES] = {
    "float",   "half",    "bfloat16_t", "int32_t",      "uint32_t",   "int16_t",      "uint16_t",  "int8_t",
    "uint8_t", "int64_t", "uint64_t",   "fp8_e4m3fn_t", "fp8_e5m2_t", "fp4x2_e2m1_t", "fp8_e8m0_t"};
inline constexpr uint8_t kTypeBytes[TYPES] = {4, 2, 2, 4, 4, 2, 2, 1, 1, 8, 8, 1, 1, 1, 1};

}  // namespace twin
