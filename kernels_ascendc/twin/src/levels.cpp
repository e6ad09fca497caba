// Picks the best instruction level at run time; every level gives the same bits.
#include "lanes.h"
#include "shadow.h"

namespace twin {

#define TWIN_DECLARE(level) \
  namespace level { \
  Lanes make_lanes(); \
  extern const ShadowKernels kShadow; \
  void multiply(float* c, const float* a, long line_rows, int k0, const float* b, int m, int k); \
  void transpose_panel(float* b, const float* columns, long line_rows, int k0, int k); \
  }
TWIN_DECLARE(base)
#if defined(TWIN_X86)
TWIN_DECLARE(avx2)
TWIN_DECLARE(avx512)
#endif

namespace {

struct Level {
  const char* name;
  Lanes lanes;
  const ShadowKernels* shadow;
};

#define TWIN_TAKE(level) take(#level, level::make_lanes(), level::kShadow, level::multiply, level::transpose_panel)
Level take(const char* name, Lanes lanes, const ShadowKernels& shadow, decltype(Lanes::multiply) multiply,
           decltype(Lanes::transpose_panel) transpose) {
  lanes.multiply = multiply;
  lanes.transpose_panel = transpose;
  return {name, lanes, &shadow};
}

Level best(const char* at_most) {
#if defined(TWIN_X86)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (at_most == nullptr || !strcmp(at_most, "avx512"))) return TWIN_TAKE(avx512);
  if (has_avx2 && (at_most == nullptr || strcmp(at_most, "base"))) return TWIN_TAKE(avx2);
#endif
  (void)at_most;
  return TWIN_TAKE(base);
}

Level& chosen() {
  static Level level = best(nullptr);
  return level;
}
Level& level = chosen();

}  // namespace

const Lanes& lanes() { return level.lanes; }
const ShadowKernels& shadow_kernels() { return *level.shadow; }
const char* lanes_level() { return level.name; }
const char* set_lanes_level(const char* at_most) { return (level = best(at_most)).name; }

}  // namespace twin
