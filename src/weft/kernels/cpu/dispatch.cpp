// Chooses the widest instruction set that this CPU can run, or the one a test asks for.

#include "dispatch.hpp"

#ifdef WEFT_ARM
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <atomic>

namespace weft {

#define WEFT_DECLARE_ISA(isa)           \
  extern const Kernels kernels_##isa;   \
  extern const PanelKernels panel_kernels_##isa; \
  extern const QuantKernels quant_kernels_##isa; \
  extern const ScanKernels scan_kernels_##isa;   \
  static const Isa isa_##isa = {#isa, &kernels_##isa, &panel_kernels_##isa, &quant_kernels_##isa, \
                                &scan_kernels_##isa}

WEFT_DECLARE_ISA(baseline);
#ifdef WEFT_X86
WEFT_DECLARE_ISA(avx2);
WEFT_DECLARE_ISA(avx512);
WEFT_DECLARE_ISA(avx512vnni);
WEFT_DECLARE_ISA(avx512bf16);
#elif defined(WEFT_ARM)
WEFT_DECLARE_ISA(neonbf16);
#endif

namespace {

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{runnable_isas().front()};
  return isa;
}

}  // namespace

std::vector<const Isa*> runnable_isas() {
  std::vector<const Isa*> result;
#ifdef WEFT_X86
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) result.push_back(&isa_avx512bf16);
  if (vnni) result.push_back(&isa_avx512vnni);
  if (avx512) result.push_back(&isa_avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    result.push_back(&isa_avx2);
  }
#elif defined(WEFT_ARM)
  if (getauxval(AT_HWCAP2) & HWCAP2_BF16) result.push_back(&isa_neonbf16);
#endif
  result.push_back(&isa_baseline);
  return result;
}

const Isa& chosen_isa() { return *chosen().load(); }

bool choose_isa(std::string_view name) {
  for (const Isa* isa : runnable_isas()) {
    if (name != isa->name) continue;
    chosen().store(isa);
    return true;
  }
  return false;
}

}  // namespace weft
