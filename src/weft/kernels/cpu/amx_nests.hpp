// Products by tiles (AMX) where scales are nested: a nest of 256 inputs is one sum of integers.
#pragma once

#include "amx_tiles.hpp"
#include "quant_dot.hpp"
#include "quant_scale.hpp"

namespace weft {
namespace {

constexpr int64_t step_bytes = 4 * quant_columns;  // four bytes or one pair a column
constexpr int64_t pass_rows = 2 * tile_rows;       // of activations that are multiplied at a time

typedef uint8_t bytes_vec __attribute__((vector_size(4 * W)));
typedef int16_t words_vec __attribute__((vector_size(4 * W)));

inline vec multiply_add(vec a, vec b, vec sum) {  // exact here, so that fusing changes no bit
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  return a * b + sum;
#endif
}

// A code less its centre, times its step, is below 2^14 and a multiple of 128 and a rest, of a signed
// byte each. Every byte of the nest is multiplied by both, and the sums of the multiples count 128
// times: eight products of tiles for 256 inputs, where groups apart take one each, and scaling behind
// each.
template <typename Tiles>
class NestProduct {
 public:
  NestProduct(const QuantWeight& weight, const QuantRows& rows, int64_t first, int64_t count,
              float* out, int64_t out_stride)
      : weight_(weight), rows_(rows), first_(first), split_(count), out_(out), stride_(out_stride) {}

  void multiply(int64_t panel) {
    Tiles::configure(config_of(split_.rows, tile_bytes));
    QuantBlocks block(weight_, panel);
    for (int64_t g = 0; g < groups_; g += together_) {
      const uint8_t* head = block.head;
      for (int64_t i = 0; i < together_; ++i, block.next()) read_group(block.block, i);
      int64_t done = 0;
      each_row_tiles(split_, [&]<int R>(std::integral_constant<int, R>, int64_t tile) {
        done = multiply_tiles<R>(tile, g, head, done);
      });
    }
    Tiles::release();
  }

 private:
  void read_group(const uint8_t* block, int64_t i) {
    const CodePlaces from = places_of(weight_, block, 0);
    const int64_t at = i * weight_.group * quant_columns;
    with_code(weight_, [&]<Code code>() {
      constexpr int fours = static_cast<int>(code.step_inputs() / 4);
      constexpr int64_t bytes = step_bytes * code.bits * fours / 8;  // that a step is read from
      uint8_t* high = high_ + at;
      uint8_t* low = low_ + at;
      for (int64_t step = 0; step < weight_.group / code.step_inputs(); ++step) {
        const uint8_t* ahead = block + weight_.block_bytes() + step * bytes;
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
#pragma GCC unroll 8
        for (int four = 0; four < fours; ++four, high += step_bytes, low += step_bytes) {
          for (int v = 0; v < step_bytes / (4 * W); ++v) {
            const ivec codes = bytes_of<code>(from, step, four, v);
            split(codes, widen_signed(block + v * W), high + 4 * W * v, low + 4 * W * v);
          }
        }
      }
    });
    if (!weight_.minimums) return;
    for (int64_t c = 0; c < quant_columns; c += W) {
      store(minimums_[i] + c, to_float(widen_signed(block + weight_.minimums_at() + c)));
    }
  }

  // Four codes of each column by the column's step.
  void split(ivec codes, ivec step, uint8_t* high, uint8_t* low) const {
    const auto bytes = (bytes_vec)codes - static_cast<uint8_t>(weight_.centre());
    const auto steps = (words_vec)((step & 0xffff) | step << 16);
    const words_vec even = ((words_vec)bytes << 8 >> 8) * steps, odd = ((words_vec)bytes >> 8) * steps;
    const words_vec even_high = (even + 64) >> 7, odd_high = (odd + 64) >> 7;
    const words_vec even_low = even - (even_high << 7), odd_low = odd - (odd_high << 7);
    *reinterpret_cast<ivec_at*>(high) = (ivec)((even_high & 0xff) | odd_high << 8);
    *reinterpret_cast<ivec_at*>(low) = (ivec)((even_low & 0xff) | odd_low << 8);
  }

  // R row tiles by the panel and a nest; rows before `done` have had theirs. Returns its end.
  template <int R>
  int64_t multiply_tiles(int64_t tile, int64_t g, const uint8_t* head, int64_t done) {
    constexpr int C = 4 / R;
    const int64_t start = split_.start(tile), end = split_.start(tile + R - 1) + split_.rows;
    const int64_t at = (first_ + done) * groups_ + g;
    for (int64_t r = 0; weight_.minimums && r < end - done; ++r) {
      for (int64_t i = 0; i < together_; ++i) {
        totals_[r][i] = static_cast<float>(rows_.sums[at + r * groups_ + i]);
      }
    }
    for (int64_t column = 0; column < quant_columns; column += C * tile_columns) {
      multiply_bytes<R>(tile, g, high_ + 4 * column, high_sums_);
      multiply_bytes<R>(tile, g, low_ + 4 * column, low_sums_);
      const auto add = weight_.minimums ? &NestProduct::add<C, true> : &NestProduct::add<C, false>;
      (this->*add)(head, g == 0, column, done - start, end - done, rows_.scales + at,
                   out_ + done * stride_ + column);
    }
    return end;
  }

  template <int R>
  void multiply_bytes(int64_t tile, int64_t g, const uint8_t* weights, int32_t* to) {
    constexpr int C = 4 / R;
    const int64_t x_stride = groups_ * weight_.group;
    TileSteps<R> s{{}, x_stride, reinterpret_cast<const char*>(weights), step_bytes,
                   quant_nest / tile_bytes, tile_bytes};
    int32_t* sums[R];
    each<R>([&](auto r) {
      const int64_t row = split_.start(tile + r);
      const int8_t* x = rows_.values + (first_ + row) * x_stride + g * weight_.group;
      s.x[r] = reinterpret_cast<const char*>(x);
      sums[r] = to + (row - split_.start(tile)) * C * tile_columns;
    });
    clear_sums<Tiles, R, C>();
    add_steps<Tiles, Terms::signed_bytes, R, C>(s, [] {});
    store_sums<Tiles, R, C>(sums, C * tile_columns);
  }

  // Scales the sums of `count` rows, of which the first is row `from` of those, and C column tiles.
  template <int C, bool minimums>
  void add(const uint8_t* head, bool first, int64_t column, int64_t from, int64_t count,
           const float* row_scales, float* out) const {
    for (int64_t c = 0; c < C * tile_columns; c += W) {
      const NestScales<minimums> scales(head, column + c);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = (from + r) * C * tile_columns + c;
        const ivec sum = (load_bytes(high_sums_ + at) << 7) + load_bytes(low_sums_ + at);
        vec minimum{};
        for (int64_t i = 0; minimums && i < together_; ++i) {
          minimum = multiply_add(load(minimums_[i] + column + c), splat(totals_[r][i]), minimum);
        }
        float* to = out + r * stride_ + c;
        store(to, (first ? vec{} : load(to)) + scales.of(sum, minimum, row_scales[r * groups_]));
      }
    }
  }

  const QuantWeight& weight_;
  const QuantRows& rows_;
  const int64_t first_, groups_ = weight_.groups(), together_ = weight_.nest_groups();
  const RowTiles split_;
  float* out_;
  const int64_t stride_;
  alignas(64) uint8_t high_[quant_nest * quant_columns], low_[quant_nest * quant_columns];
  alignas(64) int32_t high_sums_[4 * tile_rows * tile_columns];
  alignas(64) int32_t low_sums_[4 * tile_rows * tile_columns];
  alignas(64) float minimums_[quant_nest / 16][quant_columns];
  float totals_[pass_rows][quant_nest / 16];
};

}  // namespace
}  // namespace weft
