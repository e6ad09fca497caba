// Quantised groups on bits: the twin of deepinfer_hal.formats, sixteen values at a time.
#pragma once

#include "deepinfer/hal.h"
#include "numeric.h"

namespace di::DI_LEVEL {

constexpr int32_t kInfBits = 0x7F800000;

DI_INLINE int format_group(int format) { return format == DI_FP4_16 ? 16 : 32; }

// Rows between memory (bf16 or float32) and float32 working rows; `x` has room for a multiple of 16.
DI_INLINE void read_row(const void* row, int dtype, int64_t width, float* x) {
  if (dtype == DI_F32) {
    memcpy(x, row, (size_t)width * 4);
    return;
  }
  const uint16_t* h = static_cast<const uint16_t*>(row);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(x + i, load_bf16(h + i));
  for (; i < width; ++i) x[i] = bf16_value(h[i]);
}
DI_INLINE void write_row(void* row, int dtype, int64_t width, const float* x) {
  if (dtype == DI_F32) {
    memcpy(row, x, (size_t)width * 4);
    return;
  }
  uint16_t* h = static_cast<uint16_t*>(row);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store_bf16(h + i, load(x + i));
  for (; i < width; ++i) h[i] = to_bf16(x[i]);
}

// Formats that keep a row's values as they are, and the type of these.
DI_INLINE bool is_dense_format(int format) { return format == DI_ROW_F32 || format == DI_ROW_BF16; }
DI_INLINE int dense_type(int format) { return format == DI_ROW_F32 ? DI_F32 : DI_BF16; }

// Bytes of the values and of the scales of one row of `width`; -1 for a format or width that cannot be.
DI_INLINE int64_t format_value_bytes(int format, int64_t width) {
  if (is_dense_format(format)) return (format == DI_ROW_F32 ? 4 : 2) * width;
  if (format < DI_FP8_32 || format > DI_MXFP4_32 || width <= 0 || width % format_group(format)) return -1;
  return format == DI_FP8_32 ? width : width / 2;
}
DI_INLINE int64_t format_scale_bytes(int format, int64_t width) {
  return is_dense_format(format) ? 0 : width / format_group(format);
}

DI_INLINE float e8m0_value(uint8_t code) {
  uint32_t bits = code == 255 ? 0x7FC00000u : code == 0 ? 0x00400000u : (uint32_t)code << 23;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

DI_INLINE vf decode_e4m3(const uint8_t* p) {
  vi code = widen_u8(p);
  vi magnitude = code & splat_i(0x7F);
  vf normal = float_of(shift_left<20>(magnitude) + splat_i(120 << 23));
  vf subnormal = to_float(magnitude) * splat(0.001953125f);
  vf value = less_select(magnitude, splat_i(8), subnormal, normal);
  value = float_of(bits_of(value) | shift_left<24>(code & splat_i(0x80)));
  return less_select(splat_i(0x7E), magnitude, float_of(splat_i(0x7FC00000)), value);
}

DI_INLINE float decode_e4m3(uint8_t code) {
  int magnitude = code & 0x7F;
  if (magnitude == 0x7F) return __builtin_nanf("");
  uint32_t bits = ((uint32_t)magnitude << 20) + (120u << 23);
  float x;
  memcpy(&x, &bits, 4);
  if (magnitude < 8) x = (float)magnitude * 0.001953125f;
  return code & 0x80 ? -x : x;
}

DI_INLINE vf decode_e2m1(const uint8_t* p) {
  vi code = widen_nibbles(p);
  vi magnitude = code & splat_i(7);
  vf normal = float_of(shift_left<22>(magnitude) + splat_i(126 << 23));
  vf value = less_select(magnitude, splat_i(2), to_float(magnitude) * splat(0.5f), normal);
  return float_of(bits_of(value) | shift_left<28>(code & splat_i(8)));
}

// Codes of finite |x| (saturating): nearest even, sign of zero kept.
DI_INLINE vi encode_e4m3(vf x) {
  vi sign = shift_right<24>(bits_of(x)) & splat_i(0x80);
  vf magnitude = min(float_of(bits_of(x) & splat_i(0x7FFFFFFF)), splat(448.0f));
  vi bits = bits_of(magnitude);
  vi normal = shift_right<20>(bits + splat_i(0x7FFFF) + (shift_right<20>(bits) & splat_i(1))) - splat_i(120 << 3);
  vi subnormal = bits_of(magnitude + splat(16384.0f)) - bits_of(splat(16384.0f));
  return less_select(bits, splat_i(121 << 23), subnormal, normal) | sign;
}

DI_INLINE int encode_e4m3(float x) {
  int32_t lanes[16];
  store_i(lanes, encode_e4m3(splat(x)));
  return lanes[0];
}

DI_INLINE vi encode_e2m1(vf x) {
  vi sign = shift_right<28>(bits_of(x)) & splat_i(8);
  vf magnitude = min(float_of(bits_of(x) & splat_i(0x7FFFFFFF)), splat(6.0f));
  vi bits = bits_of(magnitude);
  vi normal = shift_right<22>(bits + splat_i(0x1FFFFF) + (shift_right<22>(bits) & splat_i(1))) - splat_i(126 << 1);
  vi subnormal = bits_of(magnitude + splat(4194304.0f)) - bits_of(splat(4194304.0f));
  return less_select(bits, splat_i(127 << 23), subnormal, normal) | sign;
}

DI_INLINE void store_nibbles(uint8_t* p, vi codes) {
  int32_t x[16];
  store_i(x, codes);
  for (int i = 0; i < 8; ++i) p[i] = (uint8_t)(x[2 * i] | (x[2 * i + 1] << 4));
}

DI_INLINE int ue8m0_code(float amax, float floor, float largest) {
  float v = (amax < floor ? floor : amax) / largest;
  uint32_t bits;
  memcpy(&bits, &v, 4);
  int code = (int)((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0);
  return code > 255 ? 255 : code;
}

// One group of float32 values (32, or 16 for fp4_16) to codes and its scale. Returns true if a value was not finite:
// then the scale is NaN and every code zero.
DI_INLINE bool quantise_group(const float* x, int format, uint8_t* codes, uint8_t* scale) {
  const bool narrow = format == DI_FP4_16;
  vf a = load(x), b = narrow ? a : load(x + 16);
  vi top = max(bits_of(a) & splat_i(0x7FFFFFFF), bits_of(b) & splat_i(0x7FFFFFFF));
  int32_t amax_bits = max_lane(top);
  if (amax_bits >= kInfBits) {
    *scale = narrow ? 0x7F : 0xFF;
    memset(codes, 0, format == DI_FP8_32 ? 32 : narrow ? 8 : 16);
    return true;
  }
  float amax;
  memcpy(&amax, &amax_bits, 4);
  if (narrow) {
    float least = 6.0f * 0.001953125f;
    int code = encode_e4m3((amax < least ? least : amax) / 6.0f);
    *scale = (uint8_t)code;
    store_nibbles(codes, encode_e2m1(a / splat(decode_e4m3((uint8_t)code))));
    return false;
  }
  int code = format == DI_FP8_32 ? ue8m0_code(amax, 1e-4f, 448.0f) : ue8m0_code(amax, 7.052966104933725e-38f, 6.0f);
  uint32_t inverse_bits = (uint32_t)(254 - code) << 23;
  float inverse;
  memcpy(&inverse, &inverse_bits, 4);
  *scale = (uint8_t)code;
  a = a * splat(inverse), b = b * splat(inverse);
  if (format == DI_FP8_32) {
    narrow_u8(codes, encode_e4m3(a)), narrow_u8(codes + 16, encode_e4m3(b));
  } else {
    store_nibbles(codes, encode_e2m1(a)), store_nibbles(codes + 8, encode_e2m1(b));
  }
  return false;
}

// One row; `codes` and `scales` as in the format's token-interleaved form, or the values as they are. True: not finite.
DI_INLINE bool quantise_row(const float* x, int64_t width, int format, uint8_t* codes, uint8_t* scales) {
  if (is_dense_format(format)) {
    write_row(codes, dense_type(format), width, x);
    vi top = splat_i(0);
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) top = max(top, bits_of(load(x + i)) & splat_i(0x7FFFFFFF));
    bool bad = max_lane(top) >= kInfBits;
    for (; i < width; ++i) bad |= !(x[i] - x[i] == 0.0f);
    return bad;
  }
  const int group = format_group(format), step = format == DI_FP8_32 ? 32 : group / 2;
  bool bad = false;
  for (int64_t g = 0; g < width / group; ++g)
    bad |= quantise_group(x + g * group, format, codes + g * step, scales + g);
  return bad;
}

DI_INLINE void dequantise_row(const uint8_t* codes, const uint8_t* scales, int64_t width, int format, float* x) {
  if (is_dense_format(format)) {
    read_row(codes, dense_type(format), width, x);
  } else if (format == DI_FP8_32) {
    for (int64_t g = 0; g < width / 32; ++g) {
      vf s = splat(e8m0_value(scales[g]));
      store(x + 32 * g, decode_e4m3(codes + 32 * g) * s);
      store(x + 32 * g + 16, decode_e4m3(codes + 32 * g + 16) * s);
    }
  } else if (format == DI_FP4_16) {
    for (int64_t g = 0; g < width / 16; ++g)
      store(x + 16 * g, decode_e2m1(codes + 8 * g) * splat(decode_e4m3(scales[g])));
  } else {
    for (int64_t g = 0; g < width / 32; ++g) {
      vf s = splat(e8m0_value(scales[g]));
      store(x + 32 * g, decode_e2m1(codes + 16 * g) * s);
      store(x + 32 * g + 16, decode_e2m1(codes + 16 * g + 8) * s);
    }
  }
}

}  // namespace di::DI_LEVEL
