// What the sampling ops share: rows of logits piece by piece, counts and masses in them, and Philox noise.
#pragma once

#include "di_rows.h"

namespace {

constexpr int32_t kTokens = 2048;          // ids of a piece
constexpr int32_t kMostIds = 1 << 19;      // of a vocabulary
constexpr float kLargest = 3.4028235e38f;  // finite; its negative stands for "not chosen"
constexpr uint32_t kMinusInfinity = 0xff800000u;

union FloatBits {
  int32_t bits;
  float value;
};
// Integers in the order of the floats that they stand for, so that a threshold can be found by halving.
__aicore__ inline int32_t KeyOf(float value) {
  FloatBits f;
  f.value = value;
  return f.bits >= 0 ? f.bits : f.bits ^ 0x7fffffff;
}
__aicore__ inline float ValueOf(int32_t key) {
  FloatBits f;
  f.bits = key >= 0 ? key : key ^ 0x7fffffff;
  return f.value;
}
__aicore__ inline float MinusInfinity() {
  FloatBits f;
  f.bits = (int32_t)kMinusInfinity;
  return f.value;
}

// One row of float32 logits, kTokens of them at a time, each divided by a temperature if one is given. Ids past the
// vocabulary read as -inf. Sums run over the pieces in order, each piece as one tree. The vector unit adds and keeps what
// pieces give, so that a pass waits for the scalar unit only at its end.
class LogitsRow {
 public:
  __aicore__ void Init(AscendC::TPipe& pipe, int32_t vocabulary) {
    dense_.Init(pipe, kTokens);
    pipe.InitBuffer(x_, kTokens * 4);
    pipe.InitBuffer(work_, kTokens * 4);
    pipe.InitBuffer(ones_, kTokens * 4);
    pipe.InitBuffer(index_, kTokens * 4);
    pipe.InitBuffer(mask_, 3 * kTokens / 8);
    pipe.InitBuffer(divisor_, kTokens * 4);
    pipe.InitBuffer(best_, (vocabulary + kTokens - 1) / kTokens * 32);
    pipe.InitBuffer(part_, 96);
    AscendC::Duplicate(ones_.Get<float>(), 1.0f, kTokens);
    AscendC::CreateVecIndex(index_.Get<float>(), 0.0f, kTokens);
  }
  __aicore__ void Use(__gm__ float* row, int32_t vocabulary, float temperature) {
    row_ = row, vocabulary_ = vocabulary, temperature_ = temperature, held_ = -1;
    if (temperature > 0.0f) AscendC::Duplicate(divisor_.Get<float>(), temperature, kTokens);
  }
  __aicore__ int32_t Vocabulary() const { return vocabulary_; }
  __aicore__ AscendC::LocalTensor<float> X() { return x_.Get<float>(); }
  __aicore__ AscendC::LocalTensor<float> Work() { return work_.Get<float>(); }
  __aicore__ AscendC::LocalTensor<uint8_t> Mask() { return mask_.Get<uint8_t>(); }

  // Brings the piece that begins at id `first` into X(); returns its lanes, a multiple of 256.
  __aicore__ uint32_t Load(int32_t first) {
    using namespace AscendC;
    const int32_t items = Min32(kTokens, vocabulary_ - first);
    const uint32_t lanes = AlignUp(items, 256);
    if (held_ == first) return lanes;
    held_ = first;
    LocalTensor<float> x = X();
    if (items < (int32_t)lanes) Duplicate(x.ReinterpretCast<int32_t>(), (int32_t)kMinusInfinity, lanes);
    dense_.Load(x, Global<float>(row_ + first), items);
    if (temperature_ > 0.0f) Div(x, x, divisor_.Get<float>(), lanes);
    return lanes;
  }

  // The highest logit and its lowest id. False if the row holds NaN or +inf, or nothing but -inf.
  __aicore__ bool Survey(float* top, int32_t* best) {
    using namespace AscendC;
    LocalTensor<float> mark = Work(), part = part_.Get<float>();
    Duplicate(part[8], 0.0f, 8);
    for (int32_t first = 0; first < vocabulary_; first += kTokens) {
      const uint32_t lanes = Load(first);
      Compares(Mask(), X(), kLargest, CMPMODE::LE, lanes);  // false for NaN
      Duplicate(mark, 0.0f, lanes);
      Select(mark, Mask(), mark, 1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, lanes);
      ReduceMax(part, mark, mark, lanes);
      Max(part[8], part[8], part, 1);
      NoteLargest(X(), first, lanes);
    }
    const bool bad = Value(8) > 0.0f;
    *best = -1;
    *top = Largest(MinusInfinity(), best);
    return !bad && *best >= 0;
  }

  // Items that compare so with `value`.
  template <AscendC::CMPMODE mode> __aicore__ float Count(float value) {
    Begin();
    for (int32_t first = 0; first < vocabulary_; first += kTokens) {
      const uint32_t lanes = Load(first);
      AscendC::Compares(Mask(), X(), value, mode, lanes);
      AddMask(lanes);
    }
    return Value(8);
  }
  // Items above `value`, and those equal to it with an id of at most `last`.
  __aicore__ float CountAhead(float value, int32_t last) {
    Begin();
    for (int32_t first = 0; first < vocabulary_; first += kTokens) {
      const uint32_t lanes = Load(first);
      MaskAhead(value, last - first, lanes);
      AddMask(lanes);
    }
    return Value(8);
  }
  // The sum of exp(item - top) over items above `value`.
  __aicore__ float Mass(float value, float top) {
    using namespace AscendC;
    LocalTensor<float> work = Work(), part = part_.Get<float>();
    Begin();
    for (int32_t first = 0; first < vocabulary_; first += kTokens) {
      const uint32_t lanes = Load(first);
      Adds(work, X(), -top, lanes);
      Exp(work, work, lanes);
      Compares(Mask(), X(), value, CMPMODE::GT, lanes);
      Select(work, Mask(), work, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, lanes);
      ReduceSum(part, work, work, lanes);
      Add(part[8], part[8], part, 1);
    }
    return Value(8);
  }

  // Mask() marks the lanes above `value`, and those equal to it whose index is at most `last`.
  __aicore__ void MaskAhead(float value, int32_t last, uint32_t lanes) {
    using namespace AscendC;
    LocalTensor<uint8_t> above = Mask(), level = Mask()[kTokens / 8], early = Mask()[kTokens / 4];
    Compares(above, X(), value, CMPMODE::GT, lanes);
    Compares(level, X(), value, CMPMODE::EQ, lanes);
    Compares(early, index_.Get<float>(), (float)Min32(last, kTokens), CMPMODE::LE, lanes);
    And(level.ReinterpretCast<uint16_t>(), level.ReinterpretCast<uint16_t>(), early.ReinterpretCast<uint16_t>(), lanes / 16);
    Or(above.ReinterpretCast<uint16_t>(), above.ReinterpretCast<uint16_t>(), level.ReinterpretCast<uint16_t>(), lanes / 16);
  }

  // The id of the `wanted`-th item that equals `value` (from 1), or the vocabulary's size if there are fewer.
  __aicore__ int32_t IdOfEqual(float value, float wanted) {
    using namespace AscendC;
    for (int32_t first = 0; first < vocabulary_; first += kTokens) {
      const uint32_t lanes = Load(first);
      Compares(Mask(), X(), value, CMPMODE::EQ, lanes);
      Begin();
      AddMask(lanes);
      const float here = Value(8);
      if (here < wanted) {
        wanted -= here;
        continue;
      }
      LocalTensor<uint32_t> words = Mask().ReinterpretCast<uint32_t>();  // older than the count that was just read
      int32_t id = -1;
      for (uint32_t i = 0; id < 0; ++i)
        for (uint32_t bit = 0, word = words.GetValue(i); id < 0 && bit < 32; ++bit)
          if ((word >> bit & 1) != 0 && (wanted -= 1.0f) <= 0.0f) id = first + i * 32 + bit;
      Sync<HardEvent::S_V>();
      return id;
    }
    return vocabulary_;
  }

  // exp and log of one value, by the vector unit.
  __aicore__ float ExpOf(float value) {
    AscendC::LocalTensor<float> part = part_.Get<float>();
    AscendC::Duplicate(part, value, 8);
    AscendC::Exp(part, part, 8);
    return Value(0);
  }
  __aicore__ float LogOf(float value) {
    AscendC::LocalTensor<float> part = part_.Get<float>();
    AscendC::Duplicate(part, value, 8);
    AscendC::Ln(part, part, 8);
    return Value(0);
  }
  // Keeps the largest of a piece's values and its lane; after all pieces, the largest above `floor`, and the lowest id that
  // has it.
  __aicore__ void NoteLargest(const AscendC::LocalTensor<float>& values, int32_t first, uint32_t lanes) {
    AscendC::ReduceMax(best_.Get<float>()[first / kTokens * 8], values, Work(), lanes, true);
  }
  __aicore__ float Largest(float floor, int32_t* id) {
    AscendC::LocalTensor<float> best = best_.Get<float>();
    Sync<AscendC::HardEvent::V_S>();
    for (int32_t first = 0; first < vocabulary_; first += kTokens) {
      const int32_t slot = first / kTokens * 8;
      const float value = best.GetValue(slot);
      if (value > floor) floor = value, *id = first + best.ReinterpretCast<int32_t>().GetValue(slot + 1);
    }
    Sync<AscendC::HardEvent::S_V>();
    return floor;
  }

 private:
  __aicore__ void Begin() { AscendC::Duplicate(part_.Get<float>()[8], 0.0f, 8); }
  __aicore__ float Value(uint32_t at) {
    Sync<AscendC::HardEvent::V_S>();
    const float value = part_.Get<float>().GetValue(at);
    Sync<AscendC::HardEvent::S_V>();
    return value;
  }
  __aicore__ void AddMask(uint32_t lanes) {
    using namespace AscendC;
    LocalTensor<float> work = Work(), part = part_.Get<float>();
    Select(work, Mask(), ones_.Get<float>(), 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, lanes);
    ReduceSum(part, work, work, lanes);
    Add(part[8], part[8], part, 1);
  }

  __gm__ float* row_ = nullptr;
  int32_t vocabulary_ = 0, held_ = -1;
  float temperature_ = 0.0f;
  DenseRows<float, float> dense_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> x_, work_, ones_, index_, mask_, divisor_, best_, part_;
};

// Philox4x32-10 on the vector unit, 32-bit words in unsigned lanes, and Gumbel noise from it (design 3.7). Products are
// made from 16-bit halves, so that no lane ever overflows.
class PhiloxNoise {
 public:
  __aicore__ void Init(AscendC::TPipe& pipe) {
    for (int i = 0; i < kWords; ++i) pipe.InitBuffer(words_[i], kBlocks * 4);
    for (int i = 0; i < 4; ++i) pipe.InitBuffer(work_[i], kTokens * 4);
    pipe.InitBuffer(mask_, kTokens / 4);
    const uint32_t multipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
    for (int i = 0; i < 2; ++i) {
      AscendC::Duplicate(Word(kFactors + 2 * i), multipliers[i] & 0xffffu, kBlocks);
      AscendC::Duplicate(Word(kFactors + 2 * i + 1), multipliers[i] >> 16, kBlocks);
    }
    AscendC::Duplicate(Word(kHalf), 0xffffu, kBlocks);
  }

  // Noise of the ids first .. first + lanes - 1 (first a multiple of 4, lanes of 256).
  __aicore__ void Gumbel(const AscendC::LocalTensor<float>& to, uint64_t seed, uint32_t position, uint32_t purpose, int32_t first,
                         uint32_t lanes) {
    using namespace AscendC;
    const uint32_t n = lanes / 4;
    Blocks(seed, position, purpose, first / 4, n);
    LocalTensor<uint32_t> even = work_[0].Get<uint32_t>(), odd = work_[1].Get<uint32_t>(), all = work_[2].Get<uint32_t>();
    Interleave(even, even[n], Word(0), Word(2), n);
    Interleave(odd, odd[n], Word(1), Word(3), n);
    Interleave(all, all[2 * n], even, odd, 2 * n);
    FromWords(to, all, lanes);
  }

  // u of one id: ((word >> 8) + 0.5) * 2^-24, below 1.
  __aicore__ float Uniform(uint64_t seed, uint32_t position, uint32_t purpose, int32_t id) {
    Blocks(seed, position, purpose, id / 4, 64);
    Sync<AscendC::HardEvent::V_S>();
    const uint32_t top = Word(id % 4).GetValue(0) >> 8;
    Sync<AscendC::HardEvent::S_V>();
    const float u = ((float)(int32_t)top + 0.5f) * 5.9604644775390625e-8f;
    return u < 1.0f ? u : 1.0f - 5.9604644775390625e-8f;
  }

 private:
  static constexpr int kBlocks = kTokens / 4, kFactors = 8, kHalf = 12, kKey = 13, kTemporary = 14, kWords = 19;
  __aicore__ AscendC::LocalTensor<uint32_t> Word(int i) { return words_[i].Get<uint32_t>(); }

  // Words 0 to 3: the blocks whose third counter words are first .. first + n - 1.
  __aicore__ void Blocks(uint64_t seed, uint32_t position, uint32_t purpose, int32_t first, uint32_t n) {
    using namespace AscendC;
    Duplicate(Word(0), position, n);
    Duplicate(Word(1), purpose, n);
    CreateVecIndex(Word(2).ReinterpretCast<int32_t>(), first, n);
    Duplicate(Word(3), 0u, n);
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      Product(Word(0), Word(kFactors), Word(kFactors + 1), Word(4), Word(5), n);
      Product(Word(2), Word(kFactors + 2), Word(kFactors + 3), Word(6), Word(7), n);
      Duplicate(Word(kKey), key0, n);
      Xor(Word(0), Word(6), Word(1), n);
      Xor(Word(0), Word(0), Word(kKey), n);
      Duplicate(Word(kKey), key1, n);
      Xor(Word(2), Word(4), Word(3), n);
      Xor(Word(2), Word(2), Word(kKey), n);
      Copy(Word(1), Word(7), n);
      Copy(Word(3), Word(5), n);
      key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
  }

  // Upper and lower words of x * (low + 2^16 high).
  __aicore__ void Product(const AscendC::LocalTensor<uint32_t>& x, const AscendC::LocalTensor<uint32_t>& low,
                          const AscendC::LocalTensor<uint32_t>& high, const AscendC::LocalTensor<uint32_t>& upper,
                          const AscendC::LocalTensor<uint32_t>& lower, uint32_t n) {
    using namespace AscendC;
    LocalTensor<uint32_t> a = Word(kTemporary), b = Word(kTemporary + 1), inner = Word(kTemporary + 2), outer = Word(kTemporary + 3),
                          part = Word(kTemporary + 4), half = Word(kHalf);
    And(a, x, half, n);
    ShiftRight(b, x, 16u, n);
    Mul(upper, b, high, n);
    Mul(lower, a, low, n);
    Mul(inner, a, high, n);
    Mul(outer, b, low, n);
    ShiftRight(a, inner, 16u, n);
    Add(upper, upper, a, n);
    ShiftRight(a, outer, 16u, n);
    Add(upper, upper, a, n);
    And(inner, inner, half, n);
    And(outer, outer, half, n);
    ShiftRight(part, lower, 16u, n);
    Add(part, part, inner, n);
    Add(part, part, outer, n);
    ShiftRight(a, part, 16u, n);
    Add(upper, upper, a, n);
    ShiftLeft(part, part, 16u, n);
    And(lower, lower, half, n);
    Or(lower, lower, part, n);
  }

  // -log(-log(u)). Above one half 1 - u is exact where u is not, so log(u) is log1p of its negative there.
  __aicore__ void FromWords(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<uint32_t>& words, uint32_t lanes) {
    using namespace AscendC;
    LocalTensor<float> low = work_[0].Get<float>(), rest = work_[1].Get<float>(), high = work_[2].Get<float>(), minus = work_[3].Get<float>();
    LocalTensor<int32_t> top = work_[0].Get<int32_t>(), near = work_[1].Get<int32_t>();
    LocalTensor<uint8_t> mask = mask_.Get<uint8_t>();
    ShiftRight(top.ReinterpretCast<uint32_t>(), words, 8u, lanes);
    Muls(near, top, -1, lanes);
    Adds(near, near, 0xffffff, lanes);
    Min(near, near, top, lanes);
    Cast(to, near, RoundMode::CAST_RINT, lanes);
    Cast(high, top, RoundMode::CAST_RINT, lanes);
    Adds(to, to, 0.5f, lanes);
    Muls(to, to, 5.9604644775390625e-8f, lanes);
    Compares(mask, high, 8388608.0f, CMPMODE::GE, lanes);
    Ln(low, to, lanes);
    Muls(minus, to, -1.0f, lanes);
    Adds(rest, minus, 1.0f, lanes);  // r = 1 - d, rounded; log(1 - d) = log(r) d / (1 - r)
    Ln(high, rest, lanes);
    Mul(high, high, to, lanes);
    Muls(rest, rest, -1.0f, lanes);
    Adds(rest, rest, 1.0f, lanes);
    Div(high, high, rest, lanes);
    Compares(mask[kTokens / 8], rest, 0.0f, CMPMODE::EQ, lanes);  // r is 1 for the smallest d alone: the log is -d
    Select(high, mask[kTokens / 8], minus, high, SELMODE::VSEL_TENSOR_TENSOR_MODE, lanes);
    Select(low, mask, high, low, SELMODE::VSEL_TENSOR_TENSOR_MODE, lanes);
    Muls(low, low, -1.0f, lanes);
    Ln(to, low, lanes);
    Muls(to, to, -1.0f, lanes);
  }

  AscendC::TBuf<AscendC::TPosition::VECCALC> words_[kWords], work_[4], mask_;
};

// Host side.
inline int TooManyIds(const char* op, int64_t vocabulary, di_error* e) {
  snprintf(e->message, sizeof e->message, "%s takes vocabularies of at most %d ids, got %lld", op, kMostIds, (long long)vocabulary);
  return DI_UNSUPPORTED;
}

}  // namespace
