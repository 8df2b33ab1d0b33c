// Attention over bfloat16 by tiles (AMX), for any number of queries. Included by tile.cpp alone.
//
// Keys and values are packed into panels of pairs as pairs.hpp has them, which are what tiles want:
// queries, and then weights, are multiplied with them. A score is defined as an output of
// `multiply_pairs` is: steps of 32 numbers of the head, of which even and odd ones make sums of
// their own. A sum of values takes steps of 32 positions from the start of the split; those that a
// query does not see have the weight 0, which changes no sum of finite values.
#pragma once

#include "amx_tiles.hpp"
#include "pairs.hpp"

namespace weft {
namespace {

#ifdef WEFT_PAIRS

// Rows of pairs times a panel of them, [steps * 16][panel_columns].
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
                     4 * p.panel_columns, p.steps, tile_bytes};
  float* sums[R];
  each<R>([&](auto r) {
    const int64_t start = rows.start(tile + r);
    steps.x[r] = reinterpret_cast<const char*>(p.x + start * p.x_pairs);
    sums[r] = p.sums + start * p.sum_columns + column;
  });
  clear_sums<Tiles, R, C>();
  add_steps<Tiles, Terms::pairs, R, C>(steps, [] {});
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

// `each_row_tiles` with the positions of a split that any of the queries sees; not where none does.
inline void each_rows(const Split& split, const RowTiles& rows, const auto& use) {
  each_row_tiles(rows, [&](auto R, int64_t tile) {
    const int64_t first = rows.start(tile), end = rows.start(tile + R - 1) + rows.rows;
    const Span seen = both(seen_by_any(split.tile, first, end - first), split.span);
    if (seen.first < seen.end) use(R, tile, seen);
  });
}

// `span`, counted from the offset `at` of a split and cut to `count` positions from there, in whole
// steps of so many.
inline Span whole_steps(const Split& split, Span span, int64_t at, int64_t count, int64_t step) {
  const int64_t start = split.start + at;
  const Span seen = both(span, {start, start + count});
  if (seen.first >= seen.end) return {0, 0};
  return {(seen.first - start) / step * step, padded(seen.end - start, step)};
}

// ---- many queries: they are the rows, and packed keys the columns ----

template <typename Tiles>
void score_by_tiles(const Split& split) {
  const PairScratch& scratch = split.scratch;
  const int64_t pairs = split.width / 2, count = split.tile.count;
  const RowTiles rows(count);
  const auto use = [&](int64_t head, int64_t at, const char* const* keys) {
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
  };
  each_piece(split, panel_keys, split.tile.key, use);
}

// ---- few queries: keys are the rows, as they lie in the cache, and queries the columns ----

constexpr int64_t most_columns = tile_columns;

// Rows are keys and their steps pairs of the head; a column is a query.
inline TileConfig keys_config(int64_t queries) {
  TileConfig config = config_of(tile_rows, tile_bytes);
  for (int tile = 0; tile < 8; ++tile) {
    if (tile != 4 && tile != 5) config.row_bytes[tile] = 4 * queries;
  }
  return config;
}

// The queries of each head as columns: [heads][width / 2][count].
inline void turn_queries(const Split& split) {
  const int64_t pairs = split.width / 2, count = split.tile.count;
  for (int64_t head = 0; head < split.tile.heads; ++head) {
    const uint32_t* from = split.scratch.queries + head * count * pairs;
    uint32_t* to = split.scratch.turned + head * count * pairs;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t p = 0; p < pairs; ++p) to[p * count + i] = from[i * pairs + p];
    }
  }
}

// Scores [keys][16] of some tiles to rows of scores.
inline void turn_scores(const float* from, int64_t keys, int64_t count, float* to) {
  ivec places;
  for (int i = 0; i < W; ++i) places[i] = i * tile_columns;
  for (int64_t key = 0; key < keys; key += W) {
    for (int64_t i = 0; i < count; ++i) {
      const float* first = from + key * tile_columns + i;
      store(to + i * split_keys + key, (vec)_mm512_i32gather_ps((__m512i)places, first, 4));
    }
  }
}

template <typename Tiles, int R>
void score_keys_of(const Split& split, const char* const* keys, int64_t stride,
                   const uint32_t* queries, float* scores) {
  const int64_t count = split.tile.count, steps = split.width / tile_pair_inputs;
  alignas(64) float sums[R * tile_rows * tile_columns];
  TileSteps<R> product{{}, stride, reinterpret_cast<const char*>(queries), 4 * count, steps,
                       tile_bytes};
  float* to[R];
  each<R>([&](auto r) {
    product.x[r] = keys[r];
    to[r] = sums + r * tile_rows * tile_columns;
  });
  clear_sums<Tiles, R, 1>();
  add_steps<Tiles, Terms::pairs, R, 1>(product, [&] { split.ahead.lines(R * tile_rows); });
  store_sums<Tiles, R, 1>(to, tile_columns);
  turn_scores(sums, R * tile_rows, count, scores);
}

// The keys of a head one after the other in `scratch.rows`.
inline void copy_keys(const Split& split, const Cache& cache, int64_t head, int64_t at) {
  const char* rows[panel_keys];
  find_rows(split.tile, cache, head, split.start + at, panel_keys, split.span,
            split.scratch.zeros, rows);
  copy_rows(split, cache.type, panel_keys, rows);
}

template <typename Tiles>
void score_few_by_tiles(const Split& split) {
  const Tile& tile = split.tile;
  const Cache& cache = tile.key;
  const PairScratch& scratch = split.scratch;
  const int64_t pairs = split.width / 2, count = tile.count;
  const bool in_place = lies_in_place(split, cache) && tile.block_size % tile_rows == 0;
  const int64_t stride = in_place ? cache.offset_bytes : 2 * split.width;
  each_offset(split, panel_keys, [&](int64_t at) {
    const Span seen = whole_steps(split, split.span, at, panel_keys, tile_rows);
    for (int64_t head = 0; head < tile.heads; ++head) {
      if (!in_place) copy_keys(split, cache, head, at);
      const char* keys[panel_keys / tile_rows];
      for (int64_t j = seen.first; j < seen.end; j += tile_rows) {
        const int64_t position = split.start + at + j;
        keys[j / tile_rows] = in_place ? row_of(tile, cache, head, position)
                                       : scratch.rows + j * stride;
      }
      const uint32_t* queries = scratch.turned + head * count * pairs;
      float* scores = scratch.scores + head * count * split_keys + at;
      int64_t j = seen.first;
      for (; j + 4 * tile_rows <= seen.end; j += 4 * tile_rows) {
        score_keys_of<Tiles, 4>(split, keys + j / tile_rows, stride, queries, scores + j);
      }
      for (; j < seen.end; j += tile_rows) {
        score_keys_of<Tiles, 1>(split, keys + j / tile_rows, stride, queries, scores + j);
      }
    }
  });
}

// ---- values, for any number of queries ----

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
  const bool few = tile.count <= most_columns;
  const TileConfig keys = few ? keys_config(tile.count) : TileConfig{};
  const TileConfig rows = config_of(RowTiles(tile.count).rows, tile_bytes);
  bool turned = false;
  if (!few) Tiles::configure(rows);
  const auto sum_up = [&](const Split& split) {
    if (few) {
      if (!turned) turn_queries(split);
      turned = true;
      Tiles::configure(keys);
      score_few_by_tiles<Tiles>(split);
      Tiles::configure(rows);
    } else {
      score_by_tiles<Tiles>(split);
    }
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
