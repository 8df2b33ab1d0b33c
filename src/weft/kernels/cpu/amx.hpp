// What a machine with AMX multiplies by tiles. The rest of its kernels are those of AVX-512 with
// bfloat16; dispatch.cpp puts the sets together.
#pragma once

#include "panel.hpp"
#include "quant.hpp"
#include "rate.hpp"

namespace weft {

// For tables of the same names. The calling thread has tiles only while one of these runs.
struct TileKernels {
  decltype(QuantKernels::multiply) multiply_integers;  // the bits of every other set
  void (*multiply_pairs)(const Product&);              // others: see amx_products.hpp
  int64_t (*add_integers)(int64_t rounds);
  int64_t (*add_pairs)(int64_t rounds);
};

extern const TileKernels tile_kernels;

}  // namespace weft
