// What attention in any arithmetic shares: rows of a paged head, softmax, and merging of splits.
// Included by tile.cpp alone.
#pragma once

#include "tile.hpp"
#include "vectors.hpp"

namespace weft {
namespace {

// Where the row of a head at a position lies.
inline const char* row_of(const Tile& tile, const Cache& cache, int64_t head, int64_t position) {
  const int64_t block = position / tile.block_size, offset = position % tile.block_size;
  return cache.data + tile.table[block] * cache.block_bytes + head * cache.head_bytes +
         offset * cache.offset_bytes;
}

// Where the rows of a head at positions start .. start + count lie; `nothing` where no query of the
// tile looks, since anything may stand there.
void find_rows(const Tile& tile, const Cache& cache, int64_t head, int64_t start, int64_t count,
               Span span, const char* nothing, const char** rows) {
  const Span seen = both(span, {start, start + count});
  for (int64_t i = start; i < seen.first; ++i) *rows++ = nothing;
  int64_t position = seen.first < seen.end ? seen.first : start;
  while (position < seen.end) {
    const char* row = row_of(tile, cache, head, position);
    const int64_t end = (position / tile.block_size + 1) * tile.block_size;
    for (; position < end && position < seen.end; ++position, row += cache.offset_bytes) {
      *rows++ = row;
    }
  }
  for (; position < start + count; ++position) *rows++ = nothing;
}

// The scales of a head's rows at the positions of the split that starts at `start`; 0 where no query
// of the tile looks.
void find_scales(const Tile& tile, const Cache& cache, int64_t head, int64_t start, Span span,
                 float* scales) {
  for (int64_t i = 0; i < split_keys; ++i) scales[i] = 0.0f;
  for (int64_t position = span.first; position < span.end;) {
    const int64_t block = position / tile.block_size, offset = position % tile.block_size;
    const char* from = cache.data + tile.table[block] * cache.block_bytes +
                       head * cache.head_bytes + cache.scales_bytes + 4 * offset;
    int64_t count = tile.block_size - offset;
    if (count > span.end - position) count = span.end - position;
    __builtin_memcpy(scales + (position - start), from, 4 * count);
    position += count;
  }
}

void clear(const Partial& sums, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) sums.largest[i] = -infinity;
  __builtin_memset(sums.total, 0, count * sizeof(float));
  __builtin_memset(sums.values, 0, count * width * sizeof(float));
}

inline float exp_one(float x) { return exp_negative(splat(x))[0]; }

void merge(const Partial& into, const Partial& from, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    if (from.total[i] == 0.0f) continue;  // saw no key
    const bool larger = from.largest[i] > into.largest[i];
    const float largest = larger ? from.largest[i] : into.largest[i];
    const float old_scale = exp_one(into.largest[i] - largest);
    const float new_scale = exp_one(from.largest[i] - largest);
    into.largest[i] = largest;
    into.total[i] = into.total[i] * old_scale + from.total[i] * new_scale;
    float* sums = into.values + i * width;
    const float* add = from.values + i * width;
    for (int64_t d = 0; d < width; d += W) {
      store(sums + d, load(sums + d) * old_scale + load(add + d) * new_scale);
    }
  }
}

// Merges a score without a value into the sums of query vector i.
inline void add_sink(const Partial& sums, int64_t i, float sink, int64_t width) {
  const float largest = sink > sums.largest[i] ? sink : sums.largest[i];
  const float fade = exp_one(sums.largest[i] - largest);
  sums.total[i] = sums.total[i] * fade + exp_one(sink - largest);
  float* values = sums.values + i * width;
  for (int64_t d = 0; d < width; d += W) store(values + d, load(values + d) * fade);
}

// Each query is finished once, after all of its splits, so that its sink counts once.
void finish(const Tile& tile, const Partial& sums, int64_t width) {
  for (int64_t i = 0; i < tile.heads * tile.count; ++i) {
    float* values = sums.values + i * width;
    const float sink = tile.queries[i].sink;
    if (sink != -infinity) add_sink(sums, i, sink, width);
    for (int64_t d = 0; d < width; d += W) store(values + d, load(values + d) / sums.total[i]);
    write_row(values, tile.queries[i].out, tile.type, tile.head_size);
  }
}

// Turn the raw dot products of one query into weights exp(score - largest). Outside what the query
// sees the weight is 0. `scores` and `span` count from the start of the split; only the vectors
// that [begin, end) touches are read and written. Calls put(j, weights) for each of them.
template <typename Put>
inline void weigh(const Tile& tile, float* scores, Span span, int64_t begin, int64_t end,
                  const float* key_scales, float* largest, float* total, const Put& put) {
  begin = begin / W * W;
  ivec lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  const auto first = static_cast<int32_t>(span.first), last = static_cast<int32_t>(span.end - 1);
  // Without more than the scale to apply, that is done on the way to the exponent.
  const bool plain = key_scales == nullptr && tile.softcap == 0.0f && tile.scale > 0.0f;
  const float factor = plain ? tile.scale : 1.0f;
  vec top = splat(-infinity);
  for (int64_t j = begin; j < end; j += W) {
    vec score = load(scores + j);
    const bool whole = j >= first && j + W - 1 <= last;
    if (!plain) {
      score *= tile.scale;
      if (key_scales != nullptr) score *= load(key_scales + j);
      if (tile.softcap != 0.0f) score = tile.softcap * tanh_of(score / tile.softcap);
    }
    if (!whole) {
      const ivec at = lane + static_cast<int32_t>(j);
      score = pick((at >= first) & (at <= last), score, splat(-infinity));
    }
    if (!plain || !whole) store(scores + j, score);
    top = max(score, top);
  }
  const float most = max_of(top);
  // With no finite score every weight is exp(-inf) = 0, and a NaN stays one.
  const float to_power = factor * 0x1.715476p+0f;  // log2(e)
  const float base = most == -infinity ? 0.0f : most * to_power;
  vec sums{};
  for (int64_t j = begin; j < end; j += W) {
    const vec weight = exp2_negative(load(scores + j) * to_power - base);
    put(j, weight);
    sums += weight;
  }
  *largest = most * factor;
  *total = sum(sums);
}

}  // namespace
}  // namespace weft
