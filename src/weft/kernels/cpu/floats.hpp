// Attention in float32 arithmetic, whatever the cache holds. Included by tile.cpp alone.
#pragma once

#include "softmax.hpp"

namespace weft {
namespace {

constexpr int64_t group_keys = 16;  // read and widened at a time

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

// Float rows of the keys (or values) at positions start .. start + group_keys, and the `scales` that
// they have, if any.
void read_group(const Tile& tile, const Cache& cache, int64_t head, int64_t start, Span span,
                int64_t width, const Scratch& scratch, const float* scales, const float** rows) {
  const char* found[group_keys];
  const auto* zeros = reinterpret_cast<const char*>(scratch.zeros);
  find_rows(tile, cache, head, start, group_keys, span, zeros, found);
  const bool in_place = cache.type == DType::f32 && width == tile.head_size;
  for (int64_t j = 0; j < group_keys; ++j) {
    rows[j] = reinterpret_cast<const float*>(found[j]);
    if (found[j] == zeros || in_place) continue;
    float* row = scratch.rows + j * width;
    read_row(found[j], cache.type, row, tile.head_size, width);
    rows[j] = row;
    if (scales == nullptr) continue;
    for (int64_t d = 0; d < width; d += W) store(row + d, load(row + d) * scales[j]);
  }
}

// Dot products of Q queries with the keys of a group. Each is summed in the same order for any Q.
template <int Q>
void dot_group(const float* queries, int64_t width, const float* const* keys, float* scores) {
  for (int64_t j = 0; j < group_keys; j += 4) {
    vec sums[Q][4] = {};
    for (int64_t d = 0; d < width; d += W) {
      for (int k = 0; k < 4; ++k) {
        const vec key = load(keys[j + k] + d);
        for (int i = 0; i < Q; ++i) sums[i][k] += load(queries + i * width + d) * key;
      }
    }
    for (int i = 0; i < Q; ++i) sum_four(sums[i], scores + i * split_keys + j);
  }
}

// Add C vectors' width of the values of a group, weighted, to the sums of Q queries.
template <int Q, int C>
void add_values(const float* weights, const float* const* values, int64_t d, int64_t width,
                float* into) {
  vec sums[Q][C];
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) sums[i][c] = load(into + i * width + d + c * W);
  }
  for (int64_t j = 0; j < group_keys; ++j) {
    for (int c = 0; c < C; ++c) {
      const vec value = load(values[j] + d + c * W);
      for (int i = 0; i < Q; ++i) sums[i][c] += weights[i * split_keys + j] * value;
    }
  }
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) store(into + i * width + d + c * W, sums[i][c]);
  }
}

template <int Q>
void add_group(const float* weights, const float* const* values, int64_t width, float* into) {
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) add_values<Q, 4>(weights, values, d, width, into);
  for (; d < width; d += W) add_values<Q, 1>(weights, values, d, width, into);
}

// One split's sums of one head, for its positions in `span`. `start` is the split's first position,
// `scratch.queries` and `sums` are those of the head.
void attend_split(const Tile& tile, int64_t head, int64_t start, Span span, int64_t width,
                  const Scratch& scratch, const Partial& sums) {
  const int64_t count = tile.count;
  const int64_t begin = span.first / group_keys * group_keys;
  const float* rows[group_keys];
  const auto read = [&](const Cache& cache, int64_t at) {
    const float* scales = is_scaled(cache.type) ? scratch.scales + (at - start) : nullptr;
    read_group(tile, cache, head, at, span, width, scratch, scales, rows);
  };
  if (is_scaled(tile.key.type)) find_scales(tile, tile.key, head, start, span, scratch.scales);
  for (int64_t at = begin; at < span.end; at += group_keys) {
    read(tile.key, at);
    float* scores = scratch.scores + (at - start);
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      dot_group<2>(scratch.queries + i * width, width, rows, scores + i * split_keys);
    }
    if (i < count) dot_group<1>(scratch.queries + i * width, width, rows, scores + i * split_keys);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Span seen = seen_by(tile, i);
    float* scores = scratch.scores + i * split_keys;
    weigh(tile, scores, {seen.first - start, seen.end - start}, begin - start,
          padded(span.end - start, group_keys), nullptr, sums.largest + i, sums.total + i,
          [&](int64_t j, vec weight) { store(scores + j, weight); });
  }
  __builtin_memset(sums.values, 0, count * width * sizeof(float));
  if (is_scaled(tile.value.type)) find_scales(tile, tile.value, head, start, span, scratch.scales);
  for (int64_t at = begin; at < span.end; at += group_keys) {
    read(tile.value, at);
    const float* weights = scratch.scores + (at - start);
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      add_group<2>(weights + i * split_keys, rows, width, sums.values + i * width);
    }
    if (i < count) add_group<1>(weights + i * split_keys, rows, width, sums.values + i * width);
  }
}

void attend_floats(const Tile& tile, int64_t first_split, int64_t last_split, float* memory,
                   const Partial& sums, int64_t width) {
  const Scratch scratch = divide(memory, width);
  const int64_t vectors = tile.heads * tile.count;
  const Span all = seen_by_any(tile, 0, tile.count);
  clear(sums, vectors, width);
  for (int64_t i = 0; i < vectors; ++i) {
    read_row(tile.queries[i].q, tile.type, scratch.queries + i * width, tile.head_size, width);
  }
  for (int64_t split = first_split; split < last_split; ++split) {
    const int64_t start = split * split_keys;
    const Span span = both(all, {start, start + split_keys});
    if (span.first >= span.end) continue;
    for (int64_t head = 0; head < tile.heads; ++head) {
      const int64_t first = head * tile.count;
      Scratch own = scratch;
      own.queries += first * width;
      attend_split(tile, head, start, span, width, own, rows_of(scratch.split, first, width));
    }
    merge(sums, scratch.split, vectors, width);
  }
}

}  // namespace
}  // namespace weft
