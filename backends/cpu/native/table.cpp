#include "kernels.h"

namespace di::DI_LEVEL {

extern const di_kernel kTable[] = {
#define DI_OP(name) name,
#include "ops.def"
#undef DI_OP
};

}  // namespace di::DI_LEVEL
