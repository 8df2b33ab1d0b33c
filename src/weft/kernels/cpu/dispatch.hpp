// Which of the compiled copies of tile.cpp runs.
#pragma once

#include <string_view>
#include <vector>

#include "tile.hpp"

namespace weft {

// Those that this machine can run, widest first.
std::vector<const Kernels*> runnable_kernels();
// The widest, unless another was chosen.
const Kernels& chosen_kernels();
// False if there is none of that name, or the machine cannot run it.
bool choose_kernels(std::string_view isa);

}  // namespace weft
