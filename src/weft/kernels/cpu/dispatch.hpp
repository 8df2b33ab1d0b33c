// Which of the compiled copies of the inner loops runs.
#pragma once

#include <string_view>
#include <vector>

#include "delta.hpp"
#include "mixers.hpp"
#include "panel.hpp"
#include "quant.hpp"
#include "rate.hpp"
#include "scan.hpp"
#include "tile.hpp"

namespace weft {

// The copies that were compiled for one instruction set.
struct Isa {
  const char* name;
  const Kernels* attention;
  const PanelKernels* panel;
  const QuantKernels* quant;
  const RateKernels* rate;
  const ScanKernels* scan;
  const DeltaKernels* delta;
  const MixerKernels* mixers;
};

// Names of those that this machine can run, compiled or not, in the order of `runnable_isas`.
std::vector<std::string_view> machine_isas();
// Those that are compiled and that this machine can run, the one to choose unasked first, then by
// width. `amx` has the results of AVX-512 with bfloat16, `amxbf16` its own.
std::vector<const Isa*> runnable_isas();
// The widest, unless another was chosen.
const Isa& chosen_isa();
// False if there is none of that name, or the machine cannot run it.
bool choose_isa(std::string_view name);

}  // namespace weft
