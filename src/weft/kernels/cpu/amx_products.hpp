// Products by tiles (AMX).
#pragma once

#include "amx_nests.hpp"
#include "panel.hpp"

namespace weft {
namespace {

// ---- integers ----

// The longest steps into which a group can be cut evenly: they need no tile of another shape.
inline int64_t step_inputs(int64_t group) {
  int64_t quarters = tile_bytes / 4;
  while (group / 4 % quarters != 0) --quarters;
  return 4 * quarters;
}

// Codes less their centre as bytes, four inputs of each column after the other. Prefetches what comes
// after.
inline void widen_block(const QuantWeight& weight, const uint8_t* block, int centre, uint8_t* to) {
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
          const auto codes = (bytes_vec)bytes_of<code>(from, step, four, v);
          *reinterpret_cast<ivec_at*>(to + 4 * W * v) = (ivec)(codes - static_cast<uint8_t>(centre));
        }
      }
    }
  });
}

// What is computed of groups before their sums are scaled: so many at once, and of so many rows.
constexpr int64_t most_groups = 4;
constexpr int64_t group_sums = 4 * tile_rows * tile_columns;  // of one of them, in four tiles

// The groups of a pass: their scales and minimums, what the rows have of them, and their sums.
struct GroupPass {
  const QuantWeight& weight;
  const uint8_t* const* blocks;  // [groups]
  int64_t groups;
  bool first;                      // they are those that the sums begin with
  bool centred;                    // the codes are signed: what stands for 0 is 0
  const int32_t* dots;             // [groups][group_sums], by rows
  const float* scales;             // [rows][weight.groups()], from the first group on
  const int32_t* sums;             // likewise
  const float (*totals)[most_groups];  // scale times sum, [rows]
};

// Scales the sums of `count` rows and C column tiles, and adds them to what was before, group by
// group. `from` is the row of `dots` that comes first.
template <int C, bool zeros, bool minimums, int groups>
void add_groups(const GroupPass& pass, int64_t from, int64_t count, int64_t column, float* out,
                int64_t out_stride) {
  constexpr int64_t width = C * tile_columns;
  const int64_t row_groups = pass.weight.groups();
  const int32_t centre = pass.centred ? 0 : pass.weight.centre();
  for (int64_t c = 0; c < width; c += W) {
    vec scale[groups], minimum[groups];
    ivec zero[groups];
    for (int g = 0; g < groups; ++g) {
      const uint8_t* at = pass.blocks[g];
      scale[g] = scales_of(pass.weight, at, column + c);
      if constexpr (minimums) minimum[g] = minimums_of(pass.weight, at, column + c);
      if constexpr (zeros) {
        zero[g] = pass.weight.zeros ? zeros_of(pass.weight, at, column + c) : centre - ivec{};
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      float* to = out + r * out_stride + c;
      const int32_t* dots = pass.dots + (from + r) * width + c;
      vec sum = pass.first ? vec{} : load(to);
#pragma GCC unroll 4
      for (int g = 0; g < groups; ++g) {
        ivec part = load_bytes(dots + g * group_sums);
        if constexpr (zeros) part -= zero[g] * pass.sums[r * row_groups + g];
        vec more = to_float(part) * (scale[g] * pass.scales[r * row_groups + g]);
        if constexpr (minimums) more = more - minimum[g] * pass.totals[r][g];
        sum = sum + more;
      }
      store(to, sum);
    }
  }
}

template <int C, bool zeros, bool minimums>
void add_pass(const GroupPass& pass, int64_t from, int64_t count, int64_t column, float* out,
              int64_t out_stride) {
  constexpr decltype(&add_groups<C, zeros, minimums, 1>) by_groups[most_groups] = {
      add_groups<C, zeros, minimums, 1>, add_groups<C, zeros, minimums, 2>,
      add_groups<C, zeros, minimums, 3>, add_groups<C, zeros, minimums, 4>};
  by_groups[pass.groups - 1](pass, from, count, column, out, out_stride);
}

template <int C>
void add_scaled(const GroupPass& pass, int64_t from, int64_t count, int64_t column, float* out,
                int64_t out_stride) {
  const bool shifted = pass.weight.zeros || (!pass.centred && pass.weight.centre() != 0);
  const auto add = pass.weight.minimums ? (shifted ? add_pass<C, true, true> : add_pass<C, false, true>)
                   : shifted            ? add_pass<C, true, false>
                                        : add_pass<C, false, false>;
  add(pass, from, count, column, out, out_stride);
}

// `QuantKernels::multiply` for any number of rows. Some groups are taken at a time, so that their
// codes, widened, and the sums of a few rows stay in the cache next to the core.
template <typename Tiles>
class IntegerProduct {
 public:
  IntegerProduct(const QuantWeight& weight, const QuantRows& rows, int64_t first, int64_t count,
                 float* out, int64_t out_stride)
      : weight_(weight), rows_(rows), first_(first), split_(count), out_(out), stride_(out_stride) {}

  void multiply(int64_t panel) {
    Tiles::configure(config_of(split_.rows, inputs_));
    QuantBlocks block(weight_, panel);
    const int64_t most = weight_.group * most_groups <= longest_group ? most_groups
                                                                      : longest_group / weight_.group;
    for (int64_t g = 0; g < groups_; g += most) {
      const int64_t count = groups_ - g < most ? groups_ - g : most;
      for (int64_t i = 0; i < count; ++i, block.next()) {
        blocks_[i] = block.block;
        if (!widened_) continue;
        uint8_t* bytes = bytes_ + i * weight_.group * panel_columns;
        widen_block(weight_, block.block, centred_ ? weight_.centre() : 0, bytes);
      }
      int64_t done = 0;
      each_row_tiles(split_, [&]<int R>(std::integral_constant<int, R>, int64_t tile) {
        done = multiply_tiles<R>(tile, g, count, done);
      });
    }
    Tiles::release();
    scale_columns(weight_, panel, split_.count, out_, stride_);
  }

 private:
  // R row tiles by the panel and some groups; rows before `done` have had theirs. Returns its end.
  template <int R>
  int64_t multiply_tiles(int64_t tile, int64_t g, int64_t count, int64_t done) {
    constexpr int C = 4 / R;
    const int64_t start = split_.start(tile), end = split_.start(tile + R - 1) + split_.rows;
    const int64_t at = (first_ + done) * groups_ + g;
    if (weight_.minimums) {
      for (int64_t r = 0; r < end - done; ++r) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t here = at + r * groups_ + i;
          totals_[r][i] = rows_.scales[here] * static_cast<float>(rows_.sums[here]);
        }
      }
    }
    const GroupPass pass{weight_, blocks_, count, g == 0, centred_, dots_,
                         rows_.scales + at, rows_.sums + at, totals_};
    for (int64_t column = 0; column < panel_columns; column += C * tile_columns) {
      for (int64_t i = 0; i < count; ++i) multiply_group<R>(tile, g + i, i, column);
      add_scaled<C>(pass, done - start, end - done, column, out_ + done * stride_ + column, stride_);
    }
    return end;
  }

  template <int R>
  void multiply_group(int64_t tile, int64_t g, int64_t i, int64_t column) {
    constexpr int C = 4 / R;
    const int64_t group = weight_.group, x_stride = groups_ * group;
    const uint8_t* values = widened_ ? bytes_ + i * group * panel_columns
                                     : blocks_[i] + weight_.values_at();
    const auto* w = reinterpret_cast<const char*>(values);
    TileSteps<R> s{{}, x_stride, w + 4 * column, step_bytes, group / inputs_, inputs_};
    int32_t* sums[R];
    each<R>([&](auto r) {
      const int64_t row = split_.start(tile + r);
      s.x[r] = reinterpret_cast<const char*>(rows_.values + (first_ + row) * x_stride + g * group);
      sums[r] = dots_ + i * group_sums + (row - split_.start(tile)) * C * tile_columns;
    });
    Fetch fetch;
    if (tile == 0 && column == 0 && !widened_) {
      fetch = {w + weight_.block_bytes(), weight_.block_bytes() / (64 * s.steps)};
    }
    clear_sums<Tiles, R, C>();
    if (centred_) {
      add_steps<Tiles, Terms::signed_bytes, R, C>(s, fetch);
    } else {
      add_steps<Tiles, Terms::bytes, R, C>(s, fetch);
    }
    store_sums<Tiles, R, C>(sums, C * tile_columns);
  }

  const QuantWeight& weight_;
  const QuantRows& rows_;
  const int64_t first_, groups_ = weight_.groups(), inputs_ = step_inputs(weight_.group);
  const RowTiles split_;
  float* out_;
  const int64_t stride_;
  const bool widened_ = weight_.bits != 8;
  const bool centred_ = widened_ && !weight_.zeros && weight_.centre() != 0;
  const uint8_t* blocks_[most_groups];
  alignas(64) int32_t dots_[most_groups * group_sums];
  alignas(64) uint8_t bytes_[longest_group * panel_columns];
  float totals_[pass_rows][most_groups];
};

template <typename Tiles>
void multiply_integers(const QuantWeight& weight, int64_t panel, const QuantRows& rows,
                       int64_t first, int64_t count, float* out, int64_t out_stride) {
  if (weight.nested) {
    NestProduct<Tiles>(weight, rows, first, count, out, out_stride).multiply(panel);
  } else {
    IntegerProduct<Tiles>(weight, rows, first, count, out, out_stride).multiply(panel);
  }
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
    add_steps<Tiles, Terms::pairs, R, C>(s, tile == 0 && (C == 1 || column == 0) ? own : next_);
    if (rest_ > 0) add_steps<Tiles, Terms::pairs, R, C>(last, Fetch{});
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
  constexpr Terms terms = pairs ? Terms::pairs : Terms::bytes;
  for (int64_t round = 0; round < rounds; ++round) {
    add_product<Tiles, terms, 0, 4, 6>();
    add_product<Tiles, terms, 1, 4, 7>();
    add_product<Tiles, terms, 2, 5, 6>();
    add_product<Tiles, terms, 3, 5, 7>();
  }
  Tiles::release();
  return rounds * 4 * 2 * tile_rows * tile_columns * (pairs ? tile_bytes / 2 : tile_bytes);
}

}  // namespace
}  // namespace weft
