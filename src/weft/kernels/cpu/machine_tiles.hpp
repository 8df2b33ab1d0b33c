// The instructions of AMX, as amx_tiles.hpp wants them.
#pragma once

#include "amx_tiles.hpp"

namespace weft {
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
  static void add_signed_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(x), "i"(weights));
  }
  template <int sum, int x, int weights>
  static void add_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(x), "i"(weights));
  }
};

}  // namespace
}  // namespace weft
