// Which types an element-wise instruction takes on this chip, by the "data types" section of its page.
#include "walk.h"

namespace twin {
namespace {

constexpr uint32_t set(Type t) { return 1u << t; }
constexpr uint32_t k8 = set(I8) | set(U8), k16 = set(I16) | set(U16), k32 = set(I32) | set(U32),
                   k64 = set(I64) | set(U64);
constexpr uint32_t kInts = k8 | k16 | k32 | k64, kHalf = set(F16), kBf = set(BF16), kFloat = set(F32);

// The memory form; 8-bit and 64-bit types only by count.
uint32_t in_memory(Op op) {
  switch (op) {
    case op_Add:
    case op_Sub:
    case op_Max:
    case op_Min:
    case op_Copy: return kInts | kHalf | kBf | kFloat;
    case op_Mul: return k16 | k32 | k64 | kHalf | kBf | kFloat;
    case op_Div: return k16 | k32 | k64 | kHalf | kFloat;
    case op_And:
    case op_Or:
    case op_Xor:
    case op_Not:
    case op_ShiftLeft:
    case op_ShiftRight: return kInts;
    case op_MulAddDst: return kHalf | kFloat | k64;
    case op_Axpy: return kHalf | kFloat | kBf | k64;
    case op_Exp:
    case op_Ln:
    case op_Sqrt:
    case op_Rsqrt:
    case op_LeakyRelu: return kHalf | kFloat;
    case op_Reciprocal: return kHalf | kFloat | k64;
    case op_Abs:
    case op_Neg: return set(I8) | set(I16) | set(I32) | set(I64) | kHalf | kFloat;
    case op_Relu: return set(I32) | set(I64) | kHalf | kFloat;
    case op_Muls: return set(I16) | set(I32) | k64 | kHalf | kBf | kFloat;
    case op_Adds:
    case op_Maxs:
    case op_Mins: return k8 | set(I16) | set(I32) | k64 | kHalf | kBf | kFloat;
    default: return ~0u;
  }
}

uint32_t in_registers(Op op) {
  switch (op) {
    case op_RegAdd:
    case op_RegSub:
    case op_RegMax:
    case op_RegMin: return kInts | kHalf | kBf | kFloat;
    case op_RegMul:
    case op_RegMulAddDst: return k16 | k32 | k64 | kHalf | kBf | kFloat;
    case op_RegDiv:
    case op_RegMuls: return k16 | k32 | k64 | kHalf | kFloat;
    case op_RegAnd:
    case op_RegOr:
    case op_RegXor:
    case op_RegNot:
    case op_RegShiftLefts:
    case op_RegShiftRights: return kInts;
    case op_RegAxpy: return kHalf | kFloat | k64;
    case op_RegExp:
    case op_RegLn:
    case op_RegSqrt:
    case op_RegLeakyRelu: return kHalf | kFloat;
    case op_RegAbs:
    case op_RegNeg: return set(I8) | set(I16) | set(I32) | set(I64) | kHalf | kFloat;
    case op_RegRelu: return set(I32) | set(I64) | kHalf | kFloat;
    case op_RegAdds:
    case op_RegMaxs:
    case op_RegMins: return kInts | kHalf | kFloat;
    default: return ~0u;
  }
}

}  // namespace

void need_type(Op op, Type type, Form form, Where where) {
  const uint32_t types = form == Form::REGISTERS ? in_registers(op)
                         : form == Form::SLICED  ? in_memory(op) & ~(k8 | k64)
                                                 : in_memory(op);
  if (types >> type & 1) return;
  give_up("%s at %s:%d: the device has no such instruction for %s%s", kOpNames[op], where.file, where.line,
          kTypeNames[type],
          form == Form::SLICED && (in_memory(op) >> type & 1) ? " with a mask and repeats, only by count" : "");
}

}  // namespace twin
