// Philox4x32-10 in vector registers, and Gumbel noise from it (design 3.7). Products are made from 16-bit halves, so that no
// lane ever overflows; 64 blocks of four words are made at once.
#pragma once

#include "di_rows.h"

namespace {

constexpr AscendC::Reg::CastTrait kToFloat{AscendC::Reg::RegLayout::ZERO, AscendC::Reg::SatMode::UNKNOWN, AscendC::Reg::MaskMergeMode::ZEROING,
                                           AscendC::RoundMode::CAST_RINT};
using Words = AscendC::Reg::RegTensor<uint32_t>;

// Upper and lower words of x * (low + 2^16 high); `half` holds 0xffff.
__simd_callee__ inline void WideProduct(Words& upper, Words& lower, Words& x, Words& low, Words& high, Words& half, AscendC::Reg::MaskReg& all) {
  using namespace AscendC;
  constexpr int16_t bits = 16;
  Words a, b, inner, outer;
  Reg::And(a, x, half, all);
  Reg::ShiftRights(b, x, bits, all);
  Reg::Mul(upper, b, high, all);
  Reg::Mul(lower, a, low, all);
  Reg::Mul(inner, a, high, all);
  Reg::Mul(outer, b, low, all);
  Reg::ShiftRights(a, inner, bits, all);
  Reg::Add(upper, upper, a, all);
  Reg::ShiftRights(a, outer, bits, all);
  Reg::Add(upper, upper, a, all);
  Reg::And(inner, inner, half, all);
  Reg::And(outer, outer, half, all);
  Reg::ShiftRights(a, lower, bits, all);
  Reg::Add(a, a, inner, all);
  Reg::Add(a, a, outer, all);
  Reg::ShiftRights(b, a, bits, all);
  Reg::Add(upper, upper, b, all);
  Reg::ShiftLefts(a, a, bits, all);
  Reg::And(lower, lower, half, all);
  Reg::Or(lower, lower, a, all);
}

// The blocks whose third counter words are first .. first + 63, as 256 words in the order of the ids that they belong to.
__simd_callee__ inline void PhiloxBlocks(Words& w0, Words& w1, Words& w2, Words& w3, uint32_t key0, uint32_t key1, uint32_t position, uint32_t purpose,
                                   int32_t first, AscendC::Reg::MaskReg& all) {
  using namespace AscendC;
  Words low0, high0, low1, high1, half, key, upper0, lower0, upper1, lower1;
  Reg::RegTensor<int32_t> index;
  Reg::Duplicate(low0, 0x1f53u);  // 0xD2511F53 and 0xCD9E8D57 in halves
  Reg::Duplicate(high0, 0xd251u);
  Reg::Duplicate(low1, 0x8d57u);
  Reg::Duplicate(high1, 0xcd9eu);
  Reg::Duplicate(half, 0xffffu);
  Reg::Duplicate(w0, position);
  Reg::Duplicate(w1, purpose);
  Reg::Duplicate(w3, 0u);
  Reg::Arange(index, first);
  Reg::Or(w2, (Words&)index, w3, all);
  for (uint16_t round = 0; round < 10; ++round) {
    WideProduct(upper0, lower0, w0, low0, high0, half, all);
    WideProduct(upper1, lower1, w2, low1, high1, half, all);
    Reg::Duplicate(key, key0);
    Reg::Xor(w0, upper1, w1, all);
    Reg::Xor(w0, w0, key, all);
    Reg::Duplicate(key, key1);
    Reg::Xor(w2, upper0, w3, all);
    Reg::Xor(w2, w2, key, all);
    Reg::Or(w1, lower1, lower1, all);
    Reg::Or(w3, lower0, lower0, all);
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  Reg::Interleave(lower0, upper0, w0, w2);
  Reg::Interleave(lower1, upper1, w1, w3);
  Reg::Interleave(w0, w1, lower0, lower1);
  Reg::Interleave(w2, w3, upper0, upper1);
}

// -log(-log(u)) of 64 words. Above one half 1 - u is exact where u is not, so log(u) is log1p of its negative there.
__simd_callee__ inline void StoreNoise(__ubuf__ float* to, Words& word, AscendC::Reg::MaskReg& all) {
  using namespace AscendC;
  Reg::RegTensor<int32_t> top, near;
  Reg::RegTensor<float> value, low, high, rest, minus;
  Reg::MaskReg upper, one;
  Reg::ShiftRights((Words&)top, word, (int16_t)8, all);
  Reg::Muls(near, top, -1, all);
  Reg::Adds(near, near, 0xffffff, all);
  Reg::Min(near, near, top, all);
  Reg::Cast<float, int32_t, kToFloat>(value, near, all);
  Reg::Cast<float, int32_t, kToFloat>(high, top, all);
  Reg::Compares<float, CMPMODE::GE>(upper, high, 8388608.0f, all);
  Reg::Adds(value, value, 0.5f, all);
  Reg::Muls(value, value, 5.9604644775390625e-8f, all);
  Reg::Ln(low, value, all);
  Reg::Muls(minus, value, -1.0f, all);
  Reg::Adds(rest, minus, 1.0f, all);  // r = 1 - d, rounded; log(1 - d) = log(r) d / (1 - r)
  Reg::Ln(high, rest, all);
  Reg::Mul(high, high, value, all);
  Reg::Muls(rest, rest, -1.0f, all);
  Reg::Adds(rest, rest, 1.0f, all);
  Reg::Div(high, high, rest, all);
  Reg::Compares<float, CMPMODE::EQ>(one, rest, 0.0f, all);  // r is 1 for the smallest d alone: the log is -d
  Reg::Select(high, minus, high, one);
  Reg::Select(low, high, low, upper);
  Reg::Muls(low, low, -1.0f, all);
  Reg::Ln(value, low, all);
  Reg::Muls(value, value, -1.0f, all);
  Reg::StoreAlign(to, value, all);
}

__simd_vf__ inline void GumbelNoise(__ubuf__ float* to, uint32_t key0, uint32_t key1, uint32_t position, uint32_t purpose, int32_t first, uint16_t count) {
  using namespace AscendC;
  Words w0, w1, w2, w3;
  Reg::MaskReg all = Reg::CreateMask<float>();
  for (uint16_t i = 0; i < count; ++i) {
    PhiloxBlocks(w0, w1, w2, w3, key0, key1, position, purpose, first + i * 64, all);
    StoreNoise(to + i * 256, w0, all);
    StoreNoise(to + i * 256 + 64, w1, all);
    StoreNoise(to + i * 256 + 128, w2, all);
    StoreNoise(to + i * 256 + 192, w3, all);
  }
}
__simd_vf__ inline void FirstWords(__ubuf__ uint32_t* to, uint32_t key0, uint32_t key1, uint32_t position, uint32_t purpose, int32_t first) {
  using namespace AscendC;
  Words w0, w1, w2, w3;
  Reg::MaskReg all = Reg::CreateMask<uint32_t>();
  PhiloxBlocks(w0, w1, w2, w3, key0, key1, position, purpose, first, all);
  Reg::StoreAlign(to, w0, all);
}

class PhiloxNoise {
 public:
  __aicore__ void Init(AscendC::TPipe& pipe) { pipe.InitBuffer(words_, 256); }

  // Noise of the ids first .. first + lanes - 1 (first a multiple of 4, lanes of 256).
  __aicore__ void Gumbel(const AscendC::LocalTensor<float>& to, uint64_t seed, uint32_t position, uint32_t purpose, int32_t first, uint32_t lanes) {
    asc_vf_call<GumbelNoise>((__ubuf__ float*)to.GetPhyAddr(), (uint32_t)seed, (uint32_t)(seed >> 32), position, purpose, (int32_t)(first / 4),
                                      (uint16_t)(lanes / 256));
  }

  // u of one id: ((word >> 8) + 0.5) * 2^-24, below 1.
  __aicore__ float Uniform(uint64_t seed, uint32_t position, uint32_t purpose, int32_t id) {
    AscendC::LocalTensor<uint32_t> words = words_.Get<uint32_t>();
    asc_vf_call<FirstWords>((__ubuf__ uint32_t*)words.GetPhyAddr(), (uint32_t)seed, (uint32_t)(seed >> 32), position, purpose, (int32_t)(id / 4));
    Sync<AscendC::HardEvent::V_S>();
    const uint32_t top = words.GetValue(id % 4) >> 8;
    Sync<AscendC::HardEvent::S_V>();
    const float u = ((float)(int32_t)top + 0.5f) * 5.9604644775390625e-8f;
    return u < 1.0f ? u : 1.0f - 5.9604644775390625e-8f;
  }

 private:
  AscendC::TBuf<AscendC::TPosition::VECCALC> words_;
};

}  // namespace
