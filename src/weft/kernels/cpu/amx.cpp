// Products by the tiles of AMX. Compiled by the rules of tile.cpp.
#include "amx.hpp"

#include "amx_products.hpp"

namespace weft {

extern const QuantKernels quant_kernels_avx512bf16;

namespace {

// The compilers' own functions say neither what memory a load reads nor that of a configuration
// (GCC 12), so that writing it may be put off beyond them.
struct MachineTiles {
  static void configure(const TileConfig& config) {
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  // Threads that sleep or are switched have no tiles to be kept.
  static void release() { asm volatile("tilerelease" : : : "memory"); }
  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
  }
  // Signed bytes of activations times unsigned ones of weights.
  template <int sum, int x, int weights>
  static void add_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(x), "i"(weights));
  }
  template <int sum, int x, int weights>
  static void add_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(x), "i"(weights));
  }
};

// VNNI has one pass over the weights for six rows, at the pace of memory, and needs half a cycle
// for 64 products: 64 cycles a row for 128 inputs of a panel. Tiles need 128 cycles for up to 16
// rows, and bring the sums back through memory; so they pay from the second pass on.
constexpr int64_t least_rows = 7;

void multiply_some(const QuantWeight& weight, int64_t panel, const QuantRows& rows, int64_t first,
                   int64_t count, float* out, int64_t out_stride) {
  const auto multiply = count < least_rows ? quant_kernels_avx512bf16.multiply
                                           : multiply_integers<MachineTiles>;
  multiply(weight, panel, rows, first, count, out, out_stride);
}

}  // namespace

const TileKernels tile_kernels = {multiply_some, multiply_pairs<MachineTiles>,
                                  multiply_adds<MachineTiles, false>,
                                  multiply_adds<MachineTiles, true>};

}  // namespace weft
