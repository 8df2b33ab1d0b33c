// How many operations a second the arithmetic of an instruction set allows, whatever memory does.
// rate.cpp is compiled once per instruction set; dispatch.hpp picks the one that runs.
#pragma once

#include <cstdint>

namespace weft {

struct RateKernels {
  // Multiply-adds of float32, bfloat16, int8 and int4 weights as products do them (the order of
  // `Format`), in registers alone. Returns the number of multiplications and additions.
  int64_t (*multiply_adds[4])(int64_t rounds);
};

}  // namespace weft
