// Products by tiles (AMX).
#pragma once

#include "amx_tiles.hpp"
#include "panel.hpp"
#include "quant_dot.hpp"
#include "quant_scale.hpp"

namespace weft {
namespace {

constexpr int64_t step_bytes = 4 * panel_columns;  // four bytes or one pair a column

// ---- integers ----

// The longest steps into which a group can be cut evenly: they need no tile of another shape.
inline int64_t step_inputs(int64_t group) {
  int64_t quarters = tile_bytes / 4;
  while (group / 4 % quarters != 0) --quarters;
  return 4 * quarters;
}

// Codes as bytes, four inputs of each column after the other. Prefetches what comes after.
inline void widen_block(const QuantWeight& weight, const uint8_t* block, uint8_t* to) {
  const CodePlaces from = places_of(weight, block, 0);
  with_code(weight, [&]<Code code>() {
    constexpr int fours = static_cast<int>(code.step_inputs() / 4);
    const int64_t bytes = step_bytes * code.bits * fours / 8;  // that a step is read from
    for (int64_t step = 0; step < weight.group / code.step_inputs(); ++step) {
      const uint8_t* ahead = block + weight.block_bytes() + step * bytes;
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
#pragma GCC unroll 8
      for (int four = 0; four < fours; ++four, to += step_bytes) {
        for (int v = 0; v < step_bytes / (4 * W); ++v) {
          *reinterpret_cast<ivec_at*>(to + 4 * W * v) = bytes_of<code>(from, step, four, v);
        }
      }
    }
  });
}

// Scales the integer sums of a group, [count][panel_columns], and adds them to so many rows. `at`
// is the place of the first of these, and of the group, among scales and sums.
template <bool zeros, bool minimums>
void add_scaled(const QuantWeight& weight, const QuantBlocks& block, bool first,
                const int32_t* dots, const QuantRows& rows, int64_t at, int64_t count, float* out,
                int64_t out_stride) {
  const int64_t groups = weight.groups();
  const int32_t one_zero = weight.centre();  // of all columns, if they have none of their own
  for (int64_t column = 0; column < panel_columns; column += W) {
    ivec zero{};
    vec minimum{};
    if constexpr (zeros) zero = zeros_of(weight, block.block, column);
    if constexpr (minimums) minimum = minimums_of(weight, block, column);
    const vec scale = scales_of(weight, block, column);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t i = at + r * groups;
      float* to = out + r * out_stride + column;
      ivec part = load_bytes(dots + r * panel_columns + column);
      if constexpr (zeros) {
        part -= zero * rows.sums[i];
      } else {
        part -= one_zero * rows.sums[i];
      }
      vec more = to_float(part) * (scale * rows.scales[i]);
      if constexpr (minimums) {
        more = more - minimum * (rows.scales[i] * static_cast<float>(rows.sums[i]));
      }
      store(to, (first ? vec{} : load(to)) + more);
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
  QuantBlocks block(weight, panel);
  const bool widened = weight.bits != 8;
  const auto add = weight.zeros      ? add_scaled<true, false>
                   : weight.minimums ? add_scaled<false, true>
                                     : add_scaled<false, false>;
  Tiles::configure(config_of(split.rows, inputs));
  for (int64_t g = 0; g < groups; ++g, block.next()) {
    if (widened) widen_block(weight, block.block, bytes);
    const uint8_t* values = widened ? bytes : block.block + weight.values_at();
    const auto* w = reinterpret_cast<const char*>(values);
    const auto x_of = [&](int64_t row) {
      return reinterpret_cast<const char*>(rows.values + (first + row) * x_stride + g * group);
    };
    int64_t done = 0;
    each_row_tiles(split, [&]<int R>(std::integral_constant<int, R>, int64_t tile) {
      constexpr int C = 4 / R;
      const int64_t start = split.start(tile), last = split.start(tile + R - 1);
      for (int64_t column = 0; column < panel_columns; column += C * tile_columns) {
        TileSteps<R> s{{}, x_stride, w + 4 * column, step_bytes, group / inputs, inputs};
        int32_t* sums[R];
        each<R>([&](auto r) {
          s.x[r] = x_of(split.start(tile + r));
          sums[r] = dots + (split.start(tile + r) - start) * panel_columns + column;
        });
        Fetch fetch;
        if (tile == 0 && column == 0 && weight.bits == 8) {
          fetch = {w + weight.block_bytes(), weight.block_bytes() / (64 * s.steps)};
        }
        clear_sums<Tiles, R, C>();
        add_steps<Tiles, false, R, C>(s, fetch);
        store_sums<Tiles, R, C>(sums, panel_columns);
      }
      const int64_t end = last + split.rows;
      add(weight, block, g == 0, dots + (done - start) * panel_columns, rows,
          (first + done) * groups + g, end - done, out + done * out_stride, out_stride);
      done = end;
    });
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
class PairProduct {
 public:
  explicit PairProduct(const Product& product) : p_(product) {
    if (rest_ == 0) return;
    __builtin_memcpy(last_weights_, p_.panel + steps_ * step_tile_bytes,
                     (rest_ + 1) / 2 * step_bytes);
  }

  void multiply() {
    Tiles::configure(config_of(split_.rows, tile_bytes));
    if (p_.slice >= 0) {
      const int64_t column = p_.slice * tile_columns;
      int64_t tile = 0;
      for (; tile + 4 <= split_.tiles; tile += 4) multiply_tiles<4, 1>(tile, column);
      for (; tile + 2 <= split_.tiles; tile += 2) multiply_tiles<2, 1>(tile, column);
      if (tile < split_.tiles) multiply_tiles<1, 1>(tile, column);
    } else {
      each_row_tiles(split_, [this](auto R, int64_t tile) {
        for (int64_t column = 0; column < panel_columns; column += 4 / R * tile_columns) {
          multiply_tiles<R, 4 / R>(tile, column);
        }
      });
    }
    Tiles::release();
  }

 private:
  static constexpr int64_t step_inputs = tile_pair_inputs;
  static constexpr int64_t step_tile_bytes = tile_rows * step_bytes;
  static constexpr int64_t steps_ahead = 4;

  template <int R, int C>
  void multiply_tiles(int64_t tile, int64_t column) {
    TileSteps<R> s{{}, p_.x_stride, p_.panel + 4 * column, step_bytes, steps_, tile_bytes};
    TileSteps<R> last{{}, tile_bytes, last_weights_ + 4 * column, step_bytes, 1, tile_bytes};
    float* sums[R];
    each<R>([&](auto r) {
      const int64_t start = split_.start(tile + r);
      s.x[r] = p_.x + start * p_.x_stride;
      sums[r] = p_.sums + start * panel_columns + column;
      char* rows = last_x_ + r * tile_rows * tile_bytes;
      last.x[r] = rows;
      for (int64_t i = 0; rest_ > 0 && i < split_.rows; ++i) {
        const char* from = s.x[r] + i * p_.x_stride + steps_ * tile_bytes;
        __builtin_memcpy(rows + i * tile_bytes, from, 2 * rest_);
      }
    });
    const char* ahead = s.weights + steps_ahead * step_tile_bytes;
    Fetch own{ahead, step_tile_bytes / 64};
    if (p_.slice >= 0) own = {ahead, tile_rows, step_bytes};
    clear_sums<Tiles, R, C>();
    add_steps<Tiles, true, R, C>(s, tile == 0 && (C == 1 || column == 0) ? own : next_);
    if (rest_ > 0) add_steps<Tiles, true, R, C>(last, Fetch{});
    store_sums<Tiles, R, C>(sums, panel_columns);
  }

  // What comes next is asked for once the weights here have arrived: by all tiles but the first.
  Fetch next() const {
    const int64_t parts = (split_.tiles + 1) / 2 * 2 - 1 - split_.tiles % 2;
    if (parts <= 0 || p_.next == nullptr || steps_ == 0) return {};
    return {p_.next, (p_.next_bytes / (parts * steps_) + 63) / 64};
  }

  const Product& p_;
  const int64_t steps_ = p_.inputs / step_inputs, rest_ = p_.inputs % step_inputs;
  const RowTiles split_{p_.rows};
  Fetch next_ = next();
  alignas(64) char last_weights_[step_tile_bytes] = {};
  alignas(64) char last_x_[4 * tile_rows * tile_bytes] = {};
};

template <typename Tiles>
void multiply_pairs(const Product& p) {
  PairProduct<Tiles>(p).multiply();
}

// ---- rates ----

// Multiply-adds of tiles in registers, as `RateKernels` has them.
template <typename Tiles, bool pairs>
int64_t multiply_adds(int64_t rounds) {
  Tiles::configure(config_of(tile_rows, tile_bytes));
  clear_sums<Tiles, 2, 2>();
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
