// Which of the compiled copies of the inner loops runs.
#pragma once

#include <string_view>
#include <vector>

#include "panel.hpp"
#include "quant.hpp"
#include "scan.hpp"
#include "tile.hpp"

namespace weft {

// The copies that were compiled for one instruction set.
struct Isa {
  const char* name;
  const Kernels* attention;
  const PanelKernels* panel;
  const QuantKernels* quant;
  const ScanKernels* scan;
};

// Those that this machine can run, widest first.
std::vector<const Isa*> runnable_isas();
// The widest, unless another was chosen.
const Isa& chosen_isa();
// False if there is none of that name, or the machine cannot run it.
bool choose_isa(std::string_view name);

}  // namespace weft
