// Empty kernels for every instruction set that dispatch.cpp names: those that a program is linked
// with replace them.
#pragma once

#include "dispatch.hpp"

namespace weft {

#define WEFT_WEAK extern const __attribute__((weak))
#define WEFT_EMPTY(isa)                          \
  WEFT_WEAK Kernels kernels_##isa{};             \
  WEFT_WEAK PanelKernels panel_kernels_##isa{};  \
  WEFT_WEAK QuantKernels quant_kernels_##isa{};  \
  WEFT_WEAK RateKernels rate_kernels_##isa{};    \
  WEFT_WEAK ScanKernels scan_kernels_##isa{};    \
  WEFT_WEAK DeltaKernels delta_kernels_##isa{};  \
  WEFT_WEAK MixerKernels mixer_kernels_##isa {}
WEFT_EMPTY(baseline);
WEFT_EMPTY(avx2);
WEFT_EMPTY(avxvnni);
WEFT_EMPTY(avx512);
WEFT_EMPTY(avx512vnni);
WEFT_EMPTY(avx512bf16);
WEFT_WEAK Kernels kernels_amxbf16{};  // the rest of it is avx512bf16 or tiles

}  // namespace weft
