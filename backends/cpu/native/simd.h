// Sixteen float32 lanes on every target.
//
// A kernel source is compiled once per instruction level (DI_LEVEL names the namespace), and all levels must give the
// same bits. So there is one logical width, fused multiply-add is always written as fma(), contraction is off, and a
// sum over lanes has one order. Nothing here may have external linkage shared between levels: no std:: templates.
//
// clang-format off: one operation a line.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define DI_INLINE static inline __attribute__((always_inline))

namespace di::DI_LEVEL {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kRowTile = 8, kPanelTile = 2;  // registers of the GEMM tile: 16 accumulators of 32
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kWidth = 8;
constexpr int kRowTile = 6, kPanelTile = 1;
#else
constexpr int kWidth = 4;
constexpr int kRowTile = 4, kPanelTile = 1;
#endif
constexpr int kParts = 16 / kWidth;

typedef float nf __attribute__((vector_size(4 * kWidth)));
typedef int32_t ni __attribute__((vector_size(4 * kWidth)));
typedef uint32_t nu __attribute__((vector_size(4 * kWidth)));

struct vf { nf r[kParts]; };  // 16 float32
struct vi { ni r[kParts]; };  // 16 int32

#define DI_EACH for (int q = 0; q < kParts; ++q)

DI_INLINE nf native_fma(nf a, nf b, nf c) {
#if defined(__AVX512F__)
  return (nf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (nf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (nf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  nf d;
  for (int i = 0; i < kWidth; ++i) d[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return d;
#endif
}

DI_INLINE vf splat(float x) {
  vf v;
#if defined(__AVX512F__)
  v.r[0] = (nf)_mm512_set1_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
  DI_EACH v.r[q] = (nf)_mm256_set1_ps(x);
#else
  DI_EACH v.r[q] = nf{x, x, x, x};
#endif
  return v;
}

DI_INLINE vi splat_i(int32_t x) { vi v; DI_EACH v.r[q] = x - (ni){}; return v; }
DI_INLINE vf load(const float* p) { vf v; memcpy(&v, p, 64); return v; }
DI_INLINE vi load_i(const int32_t* p) { vi v; memcpy(&v, p, 64); return v; }
DI_INLINE void store(float* p, vf v) { memcpy(p, &v, 64); }
DI_INLINE void store_i(int32_t* p, vi v) { memcpy(p, &v, 64); }
DI_INLINE vf fma(vf a, vf b, vf c) { DI_EACH c.r[q] = native_fma(a.r[q], b.r[q], c.r[q]); return c; }

#define DI_BINARY(V, OP) DI_INLINE V operator OP(V a, V b) { DI_EACH a.r[q] = a.r[q] OP b.r[q]; return a; }
DI_BINARY(vf, +) DI_BINARY(vf, -) DI_BINARY(vf, *) DI_BINARY(vf, /)
DI_BINARY(vi, +) DI_BINARY(vi, -) DI_BINARY(vi, &) DI_BINARY(vi, |) DI_BINARY(vi, ^)
#undef DI_BINARY

template <int N> DI_INLINE vi shift_left(vi a) { DI_EACH a.r[q] = a.r[q] << N; return a; }
template <int N> DI_INLINE vi shift_right(vi a) { DI_EACH a.r[q] = (ni)((nu)a.r[q] >> N); return a; }  // logical
DI_INLINE vi bits_of(vf a) { vi b; memcpy(&b, &a, 64); return b; }
DI_INLINE vf float_of(vi a) { vf b; memcpy(&b, &a, 64); return b; }
DI_INLINE vf to_float(vi a) { vf b; DI_EACH b.r[q] = __builtin_convertvector(a.r[q], nf); return b; }

// Lane-wise a < b ? x : y and friends. A comparison with NaN is false.
DI_INLINE vf less_select(vf a, vf b, vf x, vf y) { DI_EACH x.r[q] = a.r[q] < b.r[q] ? x.r[q] : y.r[q]; return x; }
DI_INLINE vi less_select(vi a, vi b, vi x, vi y) { DI_EACH x.r[q] = a.r[q] < b.r[q] ? x.r[q] : y.r[q]; return x; }
DI_INLINE vf less_select(vi a, vi b, vf x, vf y) { DI_EACH x.r[q] = a.r[q] < b.r[q] ? x.r[q] : y.r[q]; return x; }
DI_INLINE vi equal_select(vi a, vi b, vi x, vi y) { DI_EACH x.r[q] = a.r[q] == b.r[q] ? x.r[q] : y.r[q]; return x; }
DI_INLINE vf max(vf a, vf b) { return less_select(a, b, b, a); }
DI_INLINE vf min(vf a, vf b) { return less_select(b, a, b, a); }
DI_INLINE vi max(vi a, vi b) { return less_select(a, b, b, a); }

// Sum of the lanes: i with i + 8, then + 4, + 2, + 1, whatever the native width.
DI_INLINE float sum(vf v) {
  float x[16];
#if defined(__AVX512F__)
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)v.r[0]), _mm512_extractf32x8_ps((__m512)v.r[0], 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#elif defined(__AVX2__) && defined(__FMA__)
  __m256 a = (__m256)(v.r[0] + v.r[kParts - 1]);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#else
  nf b = (v.r[0] + v.r[2]) + (v.r[1] + v.r[3]);
#endif
  memcpy(x, &b, 16);
  return (x[0] + x[2]) + (x[1] + x[3]);
}

DI_INLINE int32_t max_lane(vi v) {
  int32_t x[16], best = INT32_MIN;
  store_i(x, v);
  for (int i = 0; i < 16; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

DI_INLINE float max_lane(vf v) {
  float x[16];
  store(x, v);
  float best = x[0];
  for (int i = 1; i < 16; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// 16 unsigned bytes or halves as int32 lanes.
DI_INLINE vi widen_u8(const uint8_t* p) {
  vi v;
#if defined(__AVX512F__)
  __m128i b;
  memcpy(&b, p, 16);
  v.r[0] = (ni)_mm512_cvtepu8_epi32(b);
#elif defined(__AVX2__) && defined(__FMA__)
  DI_EACH { int64_t b; memcpy(&b, p + 8 * q, 8); v.r[q] = (ni)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(b)); }
#else
  DI_EACH for (int i = 0; i < kWidth; ++i) v.r[q][i] = p[q * kWidth + i];
#endif
  return v;
}

DI_INLINE vi widen_u16(const uint16_t* p) {
  typedef uint16_t half __attribute__((vector_size(2 * kWidth)));
  vi v;
  DI_EACH { half h; memcpy(&h, p + q * kWidth, sizeof h); v.r[q] = (ni)__builtin_convertvector(h, nu); }
  return v;
}

DI_INLINE void narrow_u16(uint16_t* p, vi v) {
  typedef uint16_t half __attribute__((vector_size(2 * kWidth)));
  DI_EACH { half h = __builtin_convertvector((nu)v.r[q], half); memcpy(p + q * kWidth, &h, sizeof h); }
}

DI_INLINE void narrow_u8(uint8_t* p, vi v) {
#if defined(__AVX512F__)
  __m128i b = _mm512_cvtepi32_epi8((__m512i)v.r[0]);
  memcpy(p, &b, 16);
#else
  int32_t x[16];
  store_i(x, v);
  for (int i = 0; i < 16; ++i) p[i] = (uint8_t)x[i];
#endif
}

// 8 bytes as 16 nibbles, the low one of each byte first.
DI_INLINE vi widen_nibbles(const uint8_t* p) {
  uint32_t lo, hi;
  memcpy(&lo, p, 4);
  memcpy(&hi, p + 4, 4);
  int32_t x[16];
  static const int32_t amount[8] = {0, 4, 8, 12, 16, 20, 24, 28};
#if defined(__AVX512F__)
  __m512i both = _mm512_inserti64x4(_mm512_set1_epi32((int)lo), _mm256_set1_epi32((int)hi), 1);
  __m512i by = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)amount));
  vi v;
  v.r[0] = (ni)_mm512_and_si512(_mm512_srlv_epi32(both, by), _mm512_set1_epi32(15));
  (void)x;
  return v;
#else
  for (int i = 0; i < 8; ++i) {
    x[i] = (int32_t)(lo >> amount[i]) & 15;
    x[8 + i] = (int32_t)(hi >> amount[i]) & 15;
  }
  return load_i(x);
#endif
}

}  // namespace di::DI_LEVEL
