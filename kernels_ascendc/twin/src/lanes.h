// Arithmetic on contiguous lanes, compiled for several instruction levels with the same bits on each.
#pragma once

#include "twin/types.h"

namespace twin {

enum BinaryOp : uint8_t { kAdd, kSub, kMul, kDiv, kMax, kMin, kAnd, kOr, kXor, kMulAddDst, kDivFull, kBinaryOps };
// Division and the elementary functions take and give zero for subnormal values; the Full ones keep those, and the
// Fast ones do too but end at 2^126.
enum UnaryOp : uint8_t {
  kExp,
  kLn,
  kAbs,
  kReciprocal,
  kSqrt,
  kRsqrt,
  kRelu,
  kNeg,
  kNot,
  kCopy,
  kExpFull,
  kLnFull,
  kReciprocalFull,
  kSqrtFull,
  kRsqrtFull,
  kSqrtFast,
  kRsqrtFast,
  kUnaryOps
};
enum ScalarOp : uint8_t {
  kAdds,
  kMuls,
  kMaxs,
  kMins,
  kShiftLeft,
  kShiftRight,
  kLeakyRelu,
  kAxpy,
  kDuplicate,
  kScalarOps
};
enum CompareOp : uint8_t { kLt, kGt, kEq, kLe, kGe, kNe, kCompareOps };

using BinaryLanes = void (*)(void* d, const void* a, const void* b, size_t n);
using UnaryLanes = void (*)(void* d, const void* a, size_t n);
using ScalarLanes = void (*)(void* d, const void* a, const void* scalar, size_t n);
using CompareLanes = void (*)(uint8_t* bytes, const void* a, const void* b,
                              size_t n);  // one byte, 0 or 1, for each lane

struct Lanes {
  BinaryLanes binary[kBinaryOps][TYPES];  // null: the device has no such instruction
  UnaryLanes unary[kUnaryOps][TYPES];
  ScalarLanes scalar[kScalarOps][TYPES];
  CompareLanes compare[kCompareOps][TYPES];
  void (*cast)(void* d, Type to, const void* a, Type from, RoundMode mode, size_t n);
  void (*multiply)(float* c, const float* a, long line_rows, int k0, const float* b, int m, int k);  // see mmad.cpp
  void (*transpose_panel)(float* b, const float* columns, long line_rows, int k0, int k);
};
const Lanes& lanes();
const char* lanes_level();
const char* set_lanes_level(const char* at_most);  // "base", "avx2" or "avx512"; nullptr = the best there is

}  // namespace twin
