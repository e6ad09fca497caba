#include "numeric.h"

#include <cmath>
#include <limits>

namespace toy {

namespace {

template <class T, class F>
T bits_as(F value) {
  T result;
  static_assert(sizeof result == sizeof value);
  std::memcpy(&result, &value, sizeof result);
  return result;
}

struct Tables {
  float e4m3[256], e2m1[16], e8m0[256];

  static float decode(int code, int mantissa_bits, int bias, int sign_bit) {
    int magnitude = code & ((1 << sign_bit) - 1), exponent = magnitude >> mantissa_bits;
    float fraction = float(magnitude & ((1 << mantissa_bits) - 1)) / float(1 << mantissa_bits);
    float value = exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
    return code >> sign_bit ? -value : value;
  }

  Tables() {
    for (int c = 0; c < 256; ++c) e4m3[c] = decode(c, 3, 7, 7);
    e4m3[0x7F] = e4m3[0xFF] = std::numeric_limits<float>::quiet_NaN();
    for (int c = 0; c < 16; ++c) e2m1[c] = decode(c, 1, 1, 3);
    for (int c = 0; c < 255; ++c) e8m0[c] = std::ldexp(1.0f, c - 127);
    e8m0[255] = std::numeric_limits<float>::quiet_NaN();
  }
};
const Tables kTables;

/// The code of a small float: saturating, nearest even, sign of zero kept. `value` is no NaN.
uint8_t encode(float value, int mantissa_bits, int exponent_bits, int min_exponent, float largest) {
  float magnitude = std::min(std::fabs(value), largest);
  int32_t smallest = (min_exponent + 127) << 23;
  int32_t binade_bits = std::max(bits_as<int32_t>(magnitude) & 0x7F800000, smallest);
  int32_t steps = int32_t(std::nearbyintf(magnitude / bits_as<float>(binade_bits) * float(1 << mantissa_bits)));
  int32_t field = (binade_bits >> 23) - (127 + min_exponent - 1);
  int32_t sign = std::signbit(value) ? 1 << (mantissa_bits + exponent_bits) : 0;
  return uint8_t((((field - 1) << mantissa_bits) + steps) | sign);
}
uint8_t encode_e4m3(float value) { return encode(value, 3, 4, -6, 448.0f); }
uint8_t encode_e2m1(float value) { return encode(value, 1, 2, 0, 6.0f); }

/// Smallest power of two that brings max(amax, floor) to at most `largest`, as a ue8m0 code.
int32_t ue8m0_scale(float amax, float floor, float largest) {
  int32_t bits = bits_as<int32_t>(std::max(amax, floor) / largest);
  return std::min(((bits >> 23) & 0xFF) + ((bits & 0x007FFFFF) != 0), 255);
}

/// One group's scale code; `scaled` gets the values to encode. A group with NaN or infinity gets a NaN scale and zeros.
uint8_t scale_group(const float* x, int n, int64_t format, float* scaled) {
  float amax = 0;
  bool finite = true;
  for (int i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    amax = std::max(amax, std::fabs(x[i]));
  }
  if (!finite) {
    std::fill(scaled, scaled + n, 0.0f);
    return format == DI_FP4_16 ? 0x7F : 0xFF;
  }
  if (format == DI_FP4_16) {
    uint8_t code = encode_e4m3(std::max(amax, 6.0f * std::ldexp(1.0f, -9)) / 6.0f);
    for (int i = 0; i < n; ++i) scaled[i] = x[i] / kTables.e4m3[code];
    return code;
  }
  bool fp8 = format == DI_FP8_32;
  int32_t code = ue8m0_scale(amax, fp8 ? 1e-4f : 6.0f * std::ldexp(1.0f, -126), fp8 ? 448.0f : 6.0f);
  float reciprocal = bits_as<float>(int32_t(std::max(254 - code, 0)) << 23);
  for (int i = 0; i < n; ++i) scaled[i] = x[i] * reciprocal;
  return uint8_t(code);
}

}  // namespace

float from_bf16(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }

uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  uint32_t bits = bits_as<uint32_t>(value);
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

int group_size(int64_t format) {
  if (format == DI_FP8_32 || format == DI_MXFP4_32) return 32;
  if (format == DI_FP4_16) return 16;
  if (format == DI_ROW_F32 || format == DI_ROW_BF16) return 1;
  throw BadCall("row format " + std::to_string(format) + " is unknown");
}

int64_t code_bytes(int64_t format, int64_t width) {
  if (width <= 0 || width % group_size(format)) throw BadCall("a row of " + std::to_string(width) + " values does not fit the format");
  return format == DI_ROW_F32 ? 4 * width : format == DI_ROW_BF16 ? 2 * width : format == DI_FP8_32 ? width : width / 2;
}

int64_t scale_bytes(int64_t format, int64_t width) { return group_size(format) == 1 ? 0 : width / group_size(format); }

void quantise(const float* values, int64_t width, int64_t format, uint8_t* codes, uint8_t* scales) {
  if (format == DI_ROW_F32) {
    std::memcpy(codes, values, size_t(4 * width));
    return;
  }
  if (format == DI_ROW_BF16) {
    for (int64_t i = 0; i < width; ++i) {
      const uint16_t bits = to_bf16(values[i]);
      std::memcpy(codes + 2 * i, &bits, 2);
    }
    return;
  }
  int group = group_size(format);
  float scaled[32];
  for (int64_t g = 0; g < width / group; ++g) {
    scales[g] = scale_group(values + g * group, group, format, scaled);
    for (int i = 0; i < group; ++i) {
      int64_t at = g * group + i;
      if (format == DI_FP8_32) {
        codes[at] = encode_e4m3(scaled[i]);
      } else if (i % 2 == 0) {
        codes[at / 2] = uint8_t(encode_e2m1(scaled[i]) | encode_e2m1(scaled[i + 1]) << 4);
      }
    }
  }
}

void dequantise(const uint8_t* codes, const uint8_t* scales, int64_t width, int64_t format, float* values) {
  if (format == DI_ROW_F32) {
    std::memcpy(values, codes, size_t(4 * width));
    return;
  }
  if (format == DI_ROW_BF16) {
    for (int64_t i = 0; i < width; ++i) {
      uint16_t bits;
      std::memcpy(&bits, codes + 2 * i, 2);
      values[i] = from_bf16(bits);
    }
    return;
  }
  int group = group_size(format);
  const float* scale_table = format == DI_FP4_16 ? kTables.e4m3 : kTables.e8m0;
  for (int64_t i = 0; i < width; ++i) {
    float value = format == DI_FP8_32 ? kTables.e4m3[codes[i]] : kTables.e2m1[codes[i / 2] >> (i % 2 * 4) & 15];
    values[i] = value * scale_table[scales[i / group]];
  }
}

void load(const Tensor& t, int64_t offset, int64_t width, float* values) {
  if (t.dtype == DI_F32) {
    std::memcpy(values, static_cast<const float*>(t.data) + offset, size_t(4 * width));
  } else if (t.dtype == DI_BF16) {
    auto* bits = static_cast<const uint16_t*>(t.data) + offset;
    for (int64_t i = 0; i < width; ++i) values[i] = from_bf16(bits[i]);
  } else {
    throw BadCall("a bf16 or f32 tensor is needed");
  }
}

void store(const Tensor& t, int64_t offset, int64_t width, const float* values) {
  if (t.dtype == DI_F32) {
    std::memcpy(static_cast<float*>(t.data) + offset, values, size_t(4 * width));
  } else if (t.dtype == DI_BF16) {
    auto* bits = static_cast<uint16_t*>(t.data) + offset;
    for (int64_t i = 0; i < width; ++i) bits[i] = to_bf16(values[i]);
  } else {
    throw BadCall("a bf16 or f32 output is needed");
  }
}

void load_row(const Tensor& x, const Tensor& scale, int64_t row, float* values) {
  if (x.dtype != DI_U8) return load(x, x.offset(row), x.width(), values);
  if (!scale.present()) throw BadCall("quantised rows need their scales");
  dequantise(x.at<uint8_t>(row), scale.at<uint8_t>(row), x.width(), DI_FP8_32, values);
}

void store_row(const Tensor& out, const Tensor& scale, int64_t row, const float* values) {
  if (out.dtype != DI_U8) return store(out, out.offset(row), out.width(), values);
  if (!scale.present()) throw BadCall("a quantised output needs room for its scales");
  quantise(values, out.width(), DI_FP8_32, out.at<uint8_t>(row), scale.at<uint8_t>(row));
}

void weight_row(const Weight& weight, int64_t e, int64_t n, float* values) {
  const Tensor &w = weight.values, &s = weight.scales;
  bool stacked = w.ndim == 3;
  int64_t rows = w.shape[w.ndim - 2], k = w.width();
  int64_t start = stacked ? w.offset(e, n) : w.offset(n);
  if (!s.present()) return load(w, start, k, values);
  bool blocks = s.shape[s.ndim - 2] != rows;
  int64_t scale_row = blocks ? n / 32 : n;
  const auto* scales = static_cast<const uint8_t*>(s.data) + (stacked ? s.offset(e, scale_row) : s.offset(scale_row));
  const auto* codes = static_cast<const uint8_t*>(w.data) + start;
  if (w.stride[w.ndim - 2] < k) return dequantise(codes, scales, k, DI_MXFP4_32, values);
  for (int64_t i = 0; i < k; ++i) values[i] = kTables.e4m3[codes[i]] * kTables.e8m0[scales[i / 32]];
}

float dot(const float* a, const float* b, int64_t n) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  for (int l = 0; i < n; ++i, ++l) lanes[l] += a[i] * b[i];
  for (int half = kLanes / 2; half; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

RowPlace place(const Tensor& cache, int64_t slot, int64_t format, int64_t width, int64_t block_rows) {
  int64_t rows = std::max<int64_t>(block_rows, 1), block = slot / rows, row = slot % rows;
  int64_t codes = code_bytes(format, width), scales = scale_bytes(format, width);
  if (block >= cache.shape[0] || cache.shape[1] < rows * (codes + scales)) throw BadCall("a row lies outside its cache");
  uint8_t* base = cache.at<uint8_t>(block);
  if (format == DI_MXFP4_32) return {base + row * codes, base + rows * codes + row * scales};
  return {base + row * (codes + scales), base + row * (codes + scales) + codes};
}

void read_row(const Tensor& cache, int64_t slot, int64_t format, int64_t width, int64_t block_rows, float* values) {
  RowPlace at = place(cache, slot, format, width, block_rows);
  dequantise(at.codes, at.scales, width, format, values);
}

void write_row(const Tensor& cache, int64_t slot, int64_t format, int64_t width, int64_t block_rows, const float* values) {
  RowPlace at = place(cache, slot, format, width, block_rows);
  quantise(values, width, format, at.codes, at.scales);
}

}  // namespace toy
