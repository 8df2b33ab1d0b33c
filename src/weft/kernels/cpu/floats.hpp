// Attention in float32 arithmetic, whatever the cache holds. Included by tile.cpp alone.
#pragma once

#include "float_blocks.hpp"
#include "softmax.hpp"

namespace weft {
namespace {

struct Scratch {
  float* queries;  // [tile_queries][width]
  float* scores;   // [tile_queries][split_keys]
  float* rows;     // [group_keys][width]
  float* zeros;    // [width]
  float* scales;   // [split_keys]
  Partial split;
};

Scratch divide(float* memory, int64_t width) {
  float* scores = memory + tile_queries * width;
  float* rows = scores + tile_queries * split_keys;
  float* zeros = rows + group_keys * width;
  float* scales = zeros + width;
  for (int64_t i = 0; i < width; ++i) zeros[i] = 0.0f;
  const Partial split = partial_at(scales + split_keys, tile_queries, width);
  return {memory, scores, rows, zeros, scales, split};
}

// Rows of the keys (or values) at positions start .. start + group_keys. Those that are read as they
// are stay in the cache's type, others become floats times the `scales` that they have, if any.
void read_group(const Tile& tile, const Cache& cache, int64_t head, int64_t start, Span span,
                int64_t width, const Scratch& scratch, const float* scales, bool in_place,
                Ahead& ahead, const char** rows) {
  const auto* zeros = reinterpret_cast<const char*>(scratch.zeros);
  find_rows(tile, cache, head, start, group_keys, span, zeros, rows);
  if (in_place) return;
  for (int64_t j = 0; j < group_keys; ++j) {
    if (rows[j] == zeros) continue;
    ahead.lines((tile.head_size * size_of(cache.type) + 63) / 64);
    float* row = scratch.rows + j * width;
    read_row(rows[j], cache.type, row, tile.head_size, width);
    rows[j] = reinterpret_cast<const char*>(row);
    if (scales == nullptr) continue;
    for (int64_t d = 0; d < width; d += W) store(row + d, load(row + d) * scales[j]);
  }
}

// Of one split: its first position, and the positions that the tile sees.
struct FloatSplit {
  const Tile& tile;
  const Scratch& scratch;
  int64_t width, start;
  Span span;
  Ahead& ahead;
  // Rows that need neither padding nor scales are read as they are: float32 by all tiles, bfloat16
  // by those with so few queries that widening a row once for all of them is no gain.
  bool in_place(DType type) const {
    if (width != tile.head_size) return false;
    return type == DType::f32 || (type == DType::bf16 && tile.count <= 2 * block_queries);
  }
};

// Calls use(type, in place, head, offset in the split, rows) for groups of keys, or values: heads outside.
template <typename Use>
inline void each_group(const FloatSplit& s, const Cache& cache, const Use& use) {
  const bool in_place = s.in_place(cache.type), scaled = is_scaled(cache.type);
  const char* rows[group_keys];
  for (int64_t head = 0; head < s.tile.heads; ++head) {
    if (scaled) find_scales(s.tile, cache, head, s.start, s.span, s.scratch.scales);
    for (int64_t at = s.span.first / group_keys * group_keys; at < s.span.end; at += group_keys) {
      const float* scales = scaled ? s.scratch.scales + (at - s.start) : nullptr;
      read_group(s.tile, cache, head, at, s.span, s.width, s.scratch, scales, in_place, s.ahead,
                 rows);
      use(in_place ? cache.type : DType::f32, in_place, head, at - s.start, rows);
    }
  }
}

// `use(queries of a block, first query)` for the queries of a head, in blocks as even as they can be.
template <typename Use>
inline void each_block(int64_t count, const Use& use) {
  int64_t blocks = (count + block_queries - 1) / block_queries;
  for (int64_t i = 0; blocks > 0; --blocks) {
    const int64_t queries = (count - i + blocks - 1) / blocks;
    use(queries, i);
    i += queries;
  }
}

template <DType type>
void score_group(const FloatSplit& s, bool in_place, int64_t head, int64_t at,
                 const char* const* rows) {
  const int64_t first = head * s.tile.count;
  const float* queries = s.scratch.queries + first * s.width;
  float* scores = s.scratch.scores + first * split_keys + at;
  each_block(s.tile.count, [&](int64_t count, int64_t i) {
    score_floats_of<type>[count - 1](queries + i * s.width, s.width, rows,
                                  in_place && i == 0 ? &s.ahead : nullptr,
                                  scores + i * split_keys);
  });
}

template <DType type>
void value_group(const FloatSplit& s, bool in_place, int64_t head, int64_t at,
                 const char* const* rows) {
  const int64_t first = head * s.tile.count;
  const float* weights = s.scratch.scores + first * split_keys + at;
  float* sums = s.scratch.split.values + first * s.width;
  each_block(s.tile.count, [&](int64_t count, int64_t i) {
    value_floats_of<type>[count - 1](weights + i * split_keys, rows, s.width,
                                  in_place && i == 0 ? &s.ahead : nullptr, sums + i * s.width);
  });
}

// One split's sums, for its positions in `span`.
void attend_split(const FloatSplit& s) {
  const Tile& tile = s.tile;
  const int64_t begin = s.span.first / group_keys * group_keys - s.start;
  const int64_t end = padded(s.span.end - s.start, group_keys);
  each_group(s, tile.key, [&](DType type, auto... group) {
    if (type == DType::bf16) return score_group<DType::bf16>(s, group...);
    score_group<DType::f32>(s, group...);
  });
  for (int64_t i = 0; i < tile.heads * tile.count; ++i) {
    const Span seen = seen_by(tile, i % tile.count);
    float* scores = s.scratch.scores + i * split_keys;
    weigh(tile, scores, {seen.first - s.start, seen.end - s.start}, begin, end, nullptr,
          s.scratch.split.largest + i, s.scratch.split.total + i,
          [&](int64_t j, vec weight) { store(scores + j, weight); });
  }
  __builtin_memset(s.scratch.split.values, 0,
                   tile.heads * tile.count * s.width * sizeof(float));
  each_group(s, tile.value, [&](DType type, auto... group) {
    if (type == DType::bf16) return value_group<DType::bf16>(s, group...);
    value_group<DType::f32>(s, group...);
  });
}

void attend_floats(const Tile& tile, int64_t first_split, int64_t last_split, float* memory,
                   const Partial& sums, int64_t width) {
  const Scratch scratch = divide(memory, width);
  const int64_t vectors = tile.heads * tile.count;
  const Span all = seen_by_any(tile, 0, tile.count);
  Ahead ahead(tile, {split_keys, split_keys}, all, first_split, last_split);
  clear(sums, vectors, width);
  for (int64_t i = 0; i < vectors; ++i) {
    read_row(tile.queries[i].q, tile.type, scratch.queries + i * width, tile.head_size, width);
  }
  for (int64_t split = first_split; split < last_split; ++split) {
    const int64_t start = split * split_keys;
    const Span span = both(all, {start, start + split_keys});
    if (span.first >= span.end) continue;
    attend_split({tile, scratch, width, start, span, ahead});
    merge(sums, scratch.split, vectors, width);
  }
}

}  // namespace
}  // namespace weft
