// Products by the tiles of AMX. Compiled by the rules of tile.cpp.
#include "amx.hpp"

#include "amx_products.hpp"
#include "machine_tiles.hpp"

namespace weft {

extern const QuantKernels quant_kernels_avx512bf16;

namespace {

// VNNI needs half a cycle for 64 products: 64 cycles a row for 128 inputs of a panel. Tiles need 128
// cycles for up to 16 rows, and bring the sums back through memory. One row goes at the pace of
// memory either way; four take 0.75 of VNNI's time by tiles.
constexpr int64_t least_rows = 2;
// Of nested scales, codes are multiplied by their steps first, which pays from some rows on.
constexpr int64_t least_nest_rows = 10;

void multiply_some(const QuantWeight& weight, int64_t panel, const QuantRows& rows, int64_t first,
                   int64_t count, float* out, int64_t out_stride) {
  const int64_t least = weight.nested ? least_nest_rows : least_rows;
  const auto multiply = count < least ? quant_kernels_avx512bf16.multiply
                                           : multiply_integers<MachineTiles>;
  multiply(weight, panel, rows, first, count, out, out_stride);
}

}  // namespace

const TileKernels tile_kernels = {multiply_some, multiply_pairs<MachineTiles>,
                                  multiply_adds<MachineTiles, false>,
                                  multiply_adds<MachineTiles, true>};

}  // namespace weft
