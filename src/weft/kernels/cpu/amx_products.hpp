// Products by tiles (AMX): registers of 16 rows by 64 bytes, and an instruction that multiplies two
// of them and adds the products to a third.
//
// `Tiles` are the instructions: amx.cpp has the machine's, the tests have a model of them. All of
// it has internal linkage: see panel.cpp.
//
// A tile of weights is 16 steps of a packed panel by 16 columns, as they lie there. A tile of sums
// has some rows of activations. All row tiles of a call have the same number of rows, so that one
// configuration serves it: the last one shares rows with the one before, if need be.
#pragma once

#include "panel.hpp"
#include "quant_dot.hpp"
#include "quant_scale.hpp"

namespace weft {
namespace {

constexpr int64_t tile_rows = 16, tile_bytes = 64, tile_columns = 16;
constexpr int64_t step_bytes = 4 * panel_columns;  // four bytes or one pair a column

// What LDTILECFG reads.
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
inline TileConfig config_of(int64_t rows, int64_t x_bytes) {
  TileConfig config{};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = tile == 4 || tile == 5 ? x_bytes : tile_bytes;
    config.rows[tile] = tile < 6 ? rows : x_bytes / 4;
  }
  return config;
}

// Rows cut into tiles.
struct RowTiles {
  int64_t count, tiles, rows;

  explicit RowTiles(int64_t all)
      : count(all), tiles((all + tile_rows - 1) / tile_rows), rows((all + tiles - 1) / tiles) {}
  int64_t start(int64_t tile) const {
    return tile * rows < count - rows ? tile * rows : count - rows;
  }
};

// Steps of one row tile by all columns of a panel, or of two row tiles by half of the columns: as
// many as there are tiles for sums.
struct TileSteps {
  const char* x;
  const char* below;  // of the second row tile; none: there is one
  int64_t x_stride;
  const char* weights;  // at the first column
  int64_t steps;
  int64_t x_bytes;  // of a row in a step
  int64_t ahead;    // how far to prefetch weights, in bytes; 0: not
};

template <typename Tiles, bool pairs, int sum, int x, int weights>
inline void add_product() {
  if constexpr (pairs) {
    Tiles::template add_pairs<sum, x, weights>();
  } else {
    Tiles::template add_bytes<sum, x, weights>();
  }
}

inline void fetch_step(const TileSteps& s, const char* weights) {
  if (s.ahead == 0) return;
  const int64_t columns = s.below == nullptr ? step_bytes : step_bytes / 2;
  for (int64_t row = 0; row < s.x_bytes / 4; ++row) {
    for (int64_t i = 0; i < columns; i += 64) {
      __builtin_prefetch(weights + s.ahead + row * step_bytes + i, 0, 2);
    }
  }
}

template <typename Tiles, bool pairs>
inline void add_steps(const TileSteps& s) {
  const char *x = s.x, *below = s.below, *weights = s.weights;
  for (int64_t step = 0; step < s.steps; ++step) {
    Tiles::template load<4>(x, s.x_stride);
    Tiles::template load<6>(weights, step_bytes);
    add_product<Tiles, pairs, 0, 4, 6>();
    Tiles::template load<7>(weights + tile_bytes, step_bytes);
    add_product<Tiles, pairs, 1, 4, 7>();
    if (below != nullptr) {
      Tiles::template load<5>(below, s.x_stride);
      add_product<Tiles, pairs, 2, 5, 6>();
      add_product<Tiles, pairs, 3, 5, 7>();
      below += s.x_bytes;
    } else {
      Tiles::template load<6>(weights + 2 * tile_bytes, step_bytes);
      add_product<Tiles, pairs, 2, 4, 6>();
      Tiles::template load<7>(weights + 3 * tile_bytes, step_bytes);
      add_product<Tiles, pairs, 3, 4, 7>();
    }
    fetch_step(s, weights);
    x += s.x_bytes;
    weights += s.x_bytes / 4 * step_bytes;
  }
}

template <typename Tiles>
inline void clear_sums() {
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  Tiles::template zero<2>();
  Tiles::template zero<3>();
}

// The sums are float or int32_t: [rows][panel_columns], `below` for the second row tile.
template <typename Tiles, typename Sum>
inline void store_sums(Sum* sums, Sum* below) {
  constexpr int64_t stride = panel_columns * sizeof(Sum);
  Tiles::template store<0>(sums, stride);
  Tiles::template store<1>(sums + tile_columns, stride);
  if (below == nullptr) below = sums + 2 * tile_columns;
  Tiles::template store<2>(below, stride);
  Tiles::template store<3>(below + tile_columns, stride);
}

// ---- integers ----

// The longest steps into which a group can be cut evenly: they need no tile of another shape.
inline int64_t step_inputs(int64_t group) {
  int64_t quarters = tile_bytes / 4;
  while (group / 4 % quarters != 0) --quarters;
  return 4 * quarters;
}

// Four bits as bytes, four inputs of each column after the other. Prefetches what comes after.
inline void widen_block(const uint8_t* from, int64_t group, uint8_t* to) {
  for (int64_t step = 0; step < group / 8; ++step, from += step_bytes, to += 2 * step_bytes) {
    for (int64_t i = 0; i < step_bytes; i += 4 * W) {
      if (i % 64 == 0) __builtin_prefetch(from + group / 8 * step_bytes + i, 0, 2);
      const ivec w = load_bytes(from + i);
      *reinterpret_cast<ivec_at*>(to + i) = low_halves(w);
      *reinterpret_cast<ivec_at*>(to + step_bytes + i) = high_halves(w);
    }
  }
}

// Scales the integer sums of a group, [count][panel_columns], and adds them to so many rows. `at`
// is the place of the first of these, and of the group, among scales and sums.
inline void add_group(const QuantWeight& weight, const uint8_t* block, bool first,
                      const int32_t* dots, const QuantRows& rows, int64_t at, int64_t count,
                      float* out, int64_t out_stride) {
  const int64_t groups = weight.groups();
  for (int64_t column = 0; column < panel_columns; column += W) {
    const ivec zero = zeros_of(weight, block, column);
    const vec scale = scales_of(weight, block, column);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t i = at + r * groups;
      float* to = out + r * out_stride + column;
      const ivec sums = load_bytes(dots + r * panel_columns + column);
      const ivec part = sums - zero * rows.sums[i];
      store(to, (first ? vec{} : load(to)) + to_float(part) * (scale * rows.scales[i]));
    }
  }
}

// `QuantKernels::multiply` for any number of rows.
template <typename Tiles>
void multiply_integers(const QuantWeight& weight, int64_t panel, const QuantRows& rows,
                       int64_t first, int64_t count, float* out, int64_t out_stride) {
  const int64_t groups = weight.groups(), group = weight.group, x_stride = groups * group;
  const RowTiles split(count);
  const int64_t inputs = step_inputs(group);
  alignas(64) int32_t dots[2 * tile_rows * panel_columns];
  alignas(64) uint8_t bytes[longest_group * panel_columns];
  const uint8_t* block = weight.blocks + panel * weight.panel_bytes();
  Tiles::configure(config_of(split.rows, inputs));
  for (int64_t g = 0; g < groups; ++g, block += weight.block_bytes()) {
    const uint8_t* values = block + weight.values_at();
    if (weight.bits == 4) widen_block(values, group, bytes);
    const auto* w = reinterpret_cast<const char*>(weight.bits == 4 ? bytes : values);
    int64_t done = 0;
    for (int64_t tile = 0; tile < split.tiles; tile += 2) {
      const bool two = tile + 1 < split.tiles;
      const int64_t columns = two ? 2 * tile_columns : panel_columns;
      const auto x_of = [&](int64_t row) {
        return reinterpret_cast<const char*>(rows.values + (first + row) * x_stride + g * group);
      };
      const int64_t start = split.start(tile), next = two ? split.start(tile + 1) : start;
      TileSteps s{x_of(start), two ? x_of(next) : nullptr, x_stride, w, group / inputs, inputs,
                  tile == 0 && weight.bits == 8 ? weight.block_bytes() : 0};
      int32_t* below = two ? dots + (next - start) * panel_columns : nullptr;
      for (int64_t column = 0; column < panel_columns; column += columns) {
        s.weights = w + 4 * column;
        clear_sums<Tiles>();
        add_steps<Tiles, false>(s);
        store_sums<Tiles>(dots + column, two ? below + column : nullptr);
      }
      const int64_t end = next + split.rows;
      add_group(weight, block, g == 0, dots + (done - start) * panel_columns, rows,
                (first + done) * groups + g, end - done, out + done * out_stride, out_stride);
      done = end;
    }
  }
  Tiles::release();
  scale_columns(weight, panel, count, out, out_stride);
}

// ---- pairs of bfloat16 ----

// `PanelKernels::multiply` of bfloat16. An output is defined otherwise than with AVX-512: inputs are
// taken 32 at a time, with zeros after the last, and of these the products of even inputs make one
// float32 sum from zero on, in ascending order and fused, those of odd inputs another; the sum of
// both is added to what was before. (TDPBF16PS by Intel's manual, volume 2. VDPBF16PS adds the odd
// product of a pair to what was before, fused, then the even one.) Subnormals are zeros in both, and
// both round to nearest even, whatever MXCSR says. All rows, also one alone, have this definition,
// so that a row has the same bits in any company.
template <typename Tiles>
void multiply_pairs(const Product& p) {
  constexpr int64_t step_inputs = tile_bytes / 2, prefetch_bytes = 2 * tile_rows * step_bytes;
  const int64_t steps = p.inputs / step_inputs, rest = p.inputs % step_inputs;
  const RowTiles split(p.rows);
  alignas(64) char last_weights[tile_rows * step_bytes] = {};
  alignas(64) char last_x[2 * tile_rows * tile_bytes] = {};
  if (rest > 0) {
    __builtin_memcpy(last_weights, p.panel + steps * tile_rows * step_bytes,
                     (rest + 1) / 2 * step_bytes);
  }
  Tiles::configure(config_of(split.rows, tile_bytes));
  for (int64_t tile = 0; tile < split.tiles; tile += 2) {
    const bool two = tile + 1 < split.tiles;
    const int64_t columns = two ? 2 * tile_columns : panel_columns;
    const int64_t start = split.start(tile), next = two ? split.start(tile + 1) : start;
    const char *x = p.x + start * p.x_stride, *below = p.x + next * p.x_stride;
    char* last_below = last_x + tile_rows * tile_bytes;
    for (int64_t r = 0; rest > 0 && r < split.rows; ++r) {
      const int64_t done = steps * tile_bytes;
      __builtin_memcpy(last_x + r * tile_bytes, x + r * p.x_stride + done, 2 * rest);
      __builtin_memcpy(last_below + r * tile_bytes, below + r * p.x_stride + done, 2 * rest);
    }
    for (int64_t column = 0; column < panel_columns; column += columns) {
      clear_sums<Tiles>();
      add_steps<Tiles, true>({x, two ? below : nullptr, p.x_stride, p.panel + 4 * column, steps,
                              tile_bytes, tile == 0 ? prefetch_bytes : 0});
      if (rest > 0) {
        add_steps<Tiles, true>({last_x, two ? last_below : nullptr, tile_bytes,
                                last_weights + 4 * column, 1, tile_bytes, 0});
      }
      float* sums = p.sums + start * panel_columns + column;
      store_sums<Tiles>(sums, two ? sums + (next - start) * panel_columns : nullptr);
    }
  }
  Tiles::release();
}

// ---- rates ----

// Multiply-adds of tiles in registers, as `RateKernels` has them.
template <typename Tiles, bool pairs>
int64_t multiply_adds(int64_t rounds) {
  Tiles::configure(config_of(tile_rows, tile_bytes));
  clear_sums<Tiles>();
  Tiles::template zero<4>();
  Tiles::template zero<5>();
  Tiles::template zero<6>();
  Tiles::template zero<7>();
  for (int64_t round = 0; round < rounds; ++round) {
    add_product<Tiles, pairs, 0, 4, 6>();
    add_product<Tiles, pairs, 1, 4, 7>();
    add_product<Tiles, pairs, 2, 5, 6>();
    add_product<Tiles, pairs, 3, 5, 7>();
  }
  Tiles::release();
  return rounds * 4 * 2 * tile_rows * tile_columns * (pairs ? tile_bytes / 2 : tile_bytes);
}

}  // namespace
}  // namespace weft
