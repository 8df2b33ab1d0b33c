// Refuses malformed calls before anything is computed.
#pragma once

#include "attention.hpp"

namespace weft {

// Throws std::invalid_argument, naming the tensor and its shape, if the call is malformed or an
// index would reach outside a tensor.
void check(const Attention& call);

}  // namespace weft
