// What the sampling ops share: rows of logits piece by piece, counts and masses in them.
#pragma once

#include "di_philox.h"

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

// Host side.
inline int TooManyIds(const char* op, int64_t vocabulary, di_error* e) {
  snprintf(e->message, sizeof e->message, "%s takes vocabularies of at most %d ids, got %lld", op, kMostIds, (long long)vocabulary);
  return DI_UNSUPPORTED;
}

}  // namespace
