// Chooses the widest instruction set that this CPU can run, or the one a test asks for.

#include "dispatch.hpp"

#ifdef WEFT_X86
#include "amx.hpp"
#include "tile_permission.hpp"
#endif

#ifdef WEFT_ARM
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1 << 14)  // headers before Linux 5.6 lack it
#endif
#endif

#include <atomic>

namespace weft {

#define WEFT_DECLARE_ISA(isa)           \
  extern const Kernels kernels_##isa;   \
  extern const PanelKernels panel_kernels_##isa; \
  extern const QuantKernels quant_kernels_##isa; \
  extern const RateKernels rate_kernels_##isa;   \
  extern const ScanKernels scan_kernels_##isa;   \
  extern const DeltaKernels delta_kernels_##isa; \
  extern const MixerKernels mixer_kernels_##isa; \
  static const Isa isa_##isa = {#isa, &kernels_##isa, &panel_kernels_##isa, &quant_kernels_##isa, \
                                &rate_kernels_##isa, &scan_kernels_##isa, \
                                &delta_kernels_##isa, &mixer_kernels_##isa}

// A build may have one set only, beside the baseline: WEFT_ONLY (CMakeLists.txt).
#define WEFT_EXPANDED(macro, isa) macro(isa)
#define WEFT_ADDRESS(isa) &isa_##isa

WEFT_DECLARE_ISA(baseline);
#ifdef WEFT_ONLY
WEFT_EXPANDED(WEFT_DECLARE_ISA, WEFT_ONLY);
#elif defined(WEFT_X86)
WEFT_DECLARE_ISA(avx2);
WEFT_DECLARE_ISA(avxvnni);
WEFT_DECLARE_ISA(avx512);
WEFT_DECLARE_ISA(avx512vnni);
WEFT_DECLARE_ISA(avx512bf16);
#elif defined(WEFT_ARM)
WEFT_DECLARE_ISA(neonbf16);
#endif
#ifdef WEFT_TILES
extern const Kernels kernels_amxbf16;
#endif

namespace {

#ifdef WEFT_TILES

// AVX-512 with bfloat16, but for what tiles multiply.
struct TileIsa {
  PanelKernels panel = panel_kernels_avx512bf16;
  QuantKernels quant = quant_kernels_avx512bf16;
  RateKernels rate = rate_kernels_avx512bf16;
  Isa isa;

  TileIsa(const char* name, bool pairs)
      : isa{name, pairs ? &kernels_amxbf16 : &kernels_avx512bf16, &panel, &quant, &rate,
            &scan_kernels_avx512bf16, &delta_kernels_avx512bf16, &mixer_kernels_avx512bf16} {
    quant.multiply = tile_kernels.multiply_integers;
    for (const Format format : {Format::int8, Format::int4}) {
      rate.multiply_adds[static_cast<int>(format)] = tile_kernels.add_integers;
    }
    if (!pairs) return;
    panel.multiply[static_cast<int>(Format::bf16)] = tile_kernels.multiply_pairs;
    rate.multiply_adds[static_cast<int>(Format::bf16)] = tile_kernels.add_pairs;
  }
  TileIsa(const TileIsa&) = delete;
};

const Isa* isa_with_tiles(bool pairs) {
  static const TileIsa integers("amx", false), all("amxbf16", true);
  return pairs ? &all.isa : &integers.isa;
}

#endif

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{runnable_isas().front()};
  return isa;
}

}  // namespace

std::vector<std::string_view> machine_isas() {
  std::vector<std::string_view> names;
#ifdef WEFT_X86
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  // True only if the operating system keeps tiles (XCR0, bits 17 and 18). `amx` comes second:
  // whoever wants the bits of AVX-512 asks for it, and gives up most of the speed of prompts.
  if (bf16 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
      __builtin_cpu_supports("amx-bf16") && tiles_are_given()) {
    names = {"amxbf16", "amx"};
  }
  if (bf16) names.push_back("avx512bf16");
  if (vnni) names.push_back("avx512vnni");
  if (avx512) names.push_back("avx512");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avxvnni")) names.push_back("avxvnni");
  if (avx2) names.push_back("avx2");
#elif defined(WEFT_ARM)
  if (getauxval(AT_HWCAP2) & HWCAP2_BF16) names.push_back("neonbf16");
#endif
  names.push_back("baseline");
  return names;
}

std::vector<const Isa*> runnable_isas() {
  static const std::vector<const Isa*> built = {
#ifdef WEFT_TILES
      isa_with_tiles(true), isa_with_tiles(false),
#endif
#ifdef WEFT_ONLY
      WEFT_EXPANDED(WEFT_ADDRESS, WEFT_ONLY),
#elif defined(WEFT_X86)
      &isa_avx512bf16, &isa_avx512vnni, &isa_avx512, &isa_avxvnni, &isa_avx2,
#elif defined(WEFT_ARM)
      &isa_neonbf16,
#endif
      &isa_baseline,
  };
  std::vector<const Isa*> result;
  for (const std::string_view name : machine_isas()) {
    for (const Isa* isa : built) {
      if (name == isa->name) result.push_back(isa);
    }
  }
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
