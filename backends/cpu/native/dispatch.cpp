// The exported C symbols: each picks the best level that this processor can run.
#include "dispatch.h"

#include <string.h>

namespace di {

#define DI_LEVEL_TABLE(level)      \
  namespace level {                \
  extern const di_kernel kTable[]; \
  }
DI_LEVEL_TABLE(base)
#if defined(DI_HAVE_X86_LEVELS)
DI_LEVEL_TABLE(avx2)
DI_LEVEL_TABLE(avx512)
#endif

namespace {

enum Op {
#define DI_OP(name) op_##name,
#include "ops.def"
#undef DI_OP
  op_count
};

const char* const kNames[] = {
#define DI_OP(name) #name,
#include "ops.def"
#undef DI_OP
};

struct Level {
  const char* name;
  const di_kernel* table;
};

Level best_level(const char* at_most) {
#if defined(DI_HAVE_X86_LEVELS)
  __builtin_cpu_init();
  const bool any = at_most == nullptr;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (any || !strcmp(at_most, "avx512"))) return {"avx512", avx512::kTable};
  if (has_avx2 && (any || strcmp(at_most, "base"))) return {"avx2", avx2::kTable};
#endif
  (void)at_most;
  return {"base", base::kTable};
}

Level current = best_level(nullptr);

}  // namespace

const char* level() { return current.name; }
const char* set_level(const char* at_most) { return (current = best_level(at_most)).name; }

}  // namespace di

#define DI_OP(name)                                                                                          \
  extern "C" __attribute__((visibility("default"))) int di_##name(                                           \
      const di_tensor* t, int n, const di_params* p, void* stream, void* ws, size_t ws_bytes, di_error* e) { \
    return di::current.table[di::op_##name](t, n, p, stream, ws, ws_bytes, e);                               \
  }
#include "ops.def"
#undef DI_OP

namespace di {

static const di_kernel kExported[] = {
#define DI_OP(name) di_##name,
#include "ops.def"
#undef DI_OP
};

int kernel_count() { return op_count; }
const char* kernel_name(int i) { return kNames[i]; }
di_kernel kernel(int i) { return kExported[i]; }

}  // namespace di
