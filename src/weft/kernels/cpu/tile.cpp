// Compiled once per instruction set (CMakeLists.txt), with WEFT_ISA naming it. Nothing here may be
// an inline function or template of another header that the linker could share between the copies:
// code compiled for a newer machine would then run on an older one. So: no standard library beyond
// types, and everything but the exported table has internal linkage.
#include "tile.hpp"

#include "floats.hpp"
#include "pairs.hpp"
#if defined(__AMX_BF16__)
#include "amx_attention.hpp"
#include "machine_tiles.hpp"
#endif

namespace weft {
namespace {

#ifdef WEFT_PAIRS
constexpr int64_t lanes = 2 * W;
#else
constexpr int64_t lanes = W;
#endif

void attend(const Tile& tile, int64_t first_split, int64_t last_split, float* scratch,
            const Partial& sums) {
  const int64_t width = padded(tile.head_size, lanes);
#ifdef WEFT_PAIRS
  if (tile.type == DType::bf16 && in_pairs(tile.key.type) && in_pairs(tile.value.type)) {
#if defined(__AMX_BF16__)
    return attend_by_tiles<MachineTiles>(tile, first_split, last_split, scratch, sums, width);
#else
    return attend_pairs(tile, first_split, last_split, scratch, sums, width);
#endif
  }
#endif
  attend_floats(tile, first_split, last_split, scratch, sums, width);
}

void finish_tile(const Tile& tile, const Partial& sums) {
  finish(tile, sums, padded(tile.head_size, lanes));
}

}  // namespace

#define WEFT_STRING(x) #x
#define WEFT_NAME(x) WEFT_STRING(x)
#define WEFT_JOIN(a, b) a##b
#define WEFT_TABLE(isa) WEFT_JOIN(kernels_, isa)

extern const Kernels WEFT_TABLE(WEFT_ISA);
const Kernels WEFT_TABLE(WEFT_ISA) = {WEFT_NAME(WEFT_ISA), lanes,       attend, clear,
                                      merge,               finish_tile, convert, quantise};

}  // namespace weft
