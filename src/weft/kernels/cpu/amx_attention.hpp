// Attention over bfloat16 by tiles (AMX), for any number of queries. Included by tile.cpp alone.
//
// Keys and values are packed into panels of pairs as pairs.hpp has them, which are what tiles want:
// queries, and then weights, are multiplied with them. A score is defined as an output of
// `multiply_pairs` is: steps of 32 numbers of the head, of which even and odd ones make sums of
// their own. A sum of values takes steps of 32 positions from the start of the split; those that a
// query does not see have the weight 0, which changes no sum.
#pragma once

#include "amx_tiles.hpp"
#include "pairs.hpp"

namespace weft {
namespace {

#ifdef WEFT_PAIRS

// Rows of pairs times a panel of them, [steps * 16][weight_stride / 4].
struct PairTiles {
  const uint32_t* x;
  int64_t x_pairs;  // of a row
  const uint32_t* panel;
  int64_t panel_columns;
  int64_t steps;
  float* sums;
  int64_t sum_columns;
};

template <typename Tiles, int R, int C>
void multiply_tiles(const PairTiles& p, const RowTiles& rows, int64_t tile, int64_t column) {
  TileSteps<R> steps{{}, 4 * p.x_pairs, reinterpret_cast<const char*>(p.panel + column),
                     4 * p.panel_columns, p.steps, tile_bytes, {}};
  float* sums[R];
  each<R>([&](auto r) {
    const int64_t start = rows.start(tile + r);
    steps.x[r] = reinterpret_cast<const char*>(p.x + start * p.x_pairs);
    sums[r] = p.sums + start * p.sum_columns + column;
  });
  clear_sums<Tiles, R, C>();
  add_steps<Tiles, true, R, C>(steps);
  store_sums<Tiles, R, C>(sums, p.sum_columns);
}

// Columns [from, to) of R row tiles, both multiples of a tile's.
template <typename Tiles, int R>
void multiply_columns(const PairTiles& p, const RowTiles& rows, int64_t tile, int64_t from,
                      int64_t to) {
  constexpr int C = 4 / R;
  int64_t column = from;
  for (; column + C * tile_columns <= to; column += C * tile_columns) {
    multiply_tiles<Tiles, R, C>(p, rows, tile, column);
  }
  for (; column < to; column += tile_columns) multiply_tiles<Tiles, R, 1>(p, rows, tile, column);
}

// Calls use(R, tile, span) for two row tiles at a time, or the last one: for the positions of a
// split that any of their queries sees.
inline void each_rows(const Split& split, const RowTiles& rows, const auto& use) {
  int64_t tile = 0;
  const auto call = [&](auto count) {
    const int64_t first = rows.start(tile), end = rows.start(tile + count - 1) + rows.rows;
    const Span seen = both(seen_by_any(split.tile, first, end - first), split.span);
    if (seen.first < seen.end) use(count, tile, seen);
    tile += count;
  };
  while (tile + 2 <= rows.tiles) call(std::integral_constant<int, 2>{});
  if (tile < rows.tiles) call(std::integral_constant<int, 1>{});
}

// `span`, counted from the offset `at` of a split and cut to `count` positions from there, in whole
// steps of so many.
inline Span whole_steps(const Split& split, Span span, int64_t at, int64_t count, int64_t step) {
  const int64_t start = split.start + at;
  const Span seen = both(span, {start, start + count});
  if (seen.first >= seen.end) return {0, 0};
  return {(seen.first - start) / step * step, padded(seen.end - start, step)};
}

template <typename Tiles>
void score_by_tiles(const Split& split) {
  const PairScratch& scratch = split.scratch;
  const int64_t pairs = split.width / 2, count = split.tile.count;
  const RowTiles rows(count);
  each_piece(split, panel_keys, split.tile.key, [&](int64_t head, int64_t at, const char* const* keys) {
    const Span packed = whole_steps(split, split.span, at, panel_keys, W);
    for (int64_t j = packed.first; j < packed.end; j += W) {
      split.ahead.lines(pairs);
      pack_keys(keys + j, pairs, scratch.panel + j);
    }
    const PairTiles product{scratch.queries + head * count * pairs, pairs,
                            scratch.panel, panel_keys,
                            split.width / tile_pair_inputs,
                            scratch.scores + head * count * split_keys + at, split_keys};
    each_rows(split, rows, [&](auto R, int64_t tile, Span span) {
      const Span seen = whole_steps(split, span, at, panel_keys, tile_columns);
      multiply_columns<Tiles, R>(product, rows, tile, seen.first, seen.end);
    });
  });
}

template <typename Tiles>
void value_by_tiles(const Split& split) {
  const Tile& tile = split.tile;
  const PairScratch& scratch = split.scratch;
  const int64_t width = split.width, count = tile.count;
  constexpr int64_t step = tile_pair_inputs, weight_pairs = split_keys / 2;
  const RowTiles rows(count);
  for (int64_t head = 0; head < tile.heads; ++head) {
    each_offset(split, panel_keys, [&](int64_t at) {
      with_rows(split, panel_keys, tile.value, head, at, [&](const char* const* values) {
        const Span packed = whole_steps(split, split.span, at, panel_keys, step);
        for (int64_t j = packed.first; j < packed.end; j += 2) {
          split.ahead.lines(width / W);
          pack_values(values + j, width, scratch.panel + (at + j) / 2 * width);
        }
      });
    });
    each_rows(split, rows, [&](auto R, int64_t first, Span span) {
      const Span seen = whole_steps(split, span, 0, split_keys, step);
      const PairTiles product{scratch.weights + head * count * weight_pairs + seen.first / 2,
                              weight_pairs,
                              scratch.panel + seen.first / 2 * width, width,
                              (seen.end - seen.first) / step,
                              scratch.split.values + head * count * width, width};
      multiply_columns<Tiles, R>(product, rows, first, 0, width);
    });
  }
}

template <typename Tiles>
void attend_by_tiles(const Tile& tile, int64_t first_split, int64_t last_split, float* memory,
                     const Partial& sums, int64_t width) {
  const Span all = seen_by_any(tile, 0, tile.count);
  Ahead ahead(tile, {panel_keys, split_keys}, all, first_split, last_split);
  Tiles::configure(config_of(RowTiles(tile.count).rows, tile_bytes));
  const auto sum_up = [&](const Split& split) {
    score_by_tiles<Tiles>(split);
    const Span range = whole_steps(split, split.span, 0, split_keys, tile_pair_inputs);
    weigh_split(split, [&](int64_t) { return range; });
    value_by_tiles<Tiles>(split);
  };
  each_split(tile, first_split, last_split, memory, sums, width, ahead, sum_up);
  Tiles::release();
}

#endif

}  // namespace
}  // namespace weft
