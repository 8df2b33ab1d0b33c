// Attention over 16-bit brain floats by instructions that multiply pairs of them and add in
// float32: on machines that have them. Included by tile.cpp alone.
//
// A score is one float32 accumulator that runs over the head in pairs, ascending; a sum of values
// one that runs over positions in pairs, ascending. Weights are rounded to bfloat16 before they
// meet the values, which moves a result by less than its own rounding does.
#pragma once

#include "pair_blocks.hpp"
#include "softmax.hpp"

namespace weft {
namespace {

#ifdef WEFT_PAIRS

// ---- one split ----

struct PairScratch {
  uint32_t* queries;  // [tile_queries][width / 2]
  uint32_t* turned;   // the same for tiles, which may want queries as columns
  float* scores;      // [tile_queries][split_keys]
  uint32_t* weights;  // [tile_queries][split_keys / 2]
  uint32_t* panel;    // [width / 2][panel_keys] keys, or [split_keys / 2][width] values
  char* rows;         // [panel_keys][width] converted
  char* zeros;        // [width]
  float* scales;      // [2][split_keys], of keys and of values
  Partial split;
};

PairScratch divide_pairs(float* memory, int64_t width) {
  PairScratch scratch;
  float* next = memory;
  const auto take = [&](int64_t floats) {
    float* taken = next;
    next += floats;
    return taken;
  };
  scratch.scores = take(tile_queries * split_keys);
  scratch.weights = reinterpret_cast<uint32_t*>(take(tile_queries * split_keys / 2));
  scratch.queries = reinterpret_cast<uint32_t*>(take(tile_queries * width / 2));
  scratch.turned = reinterpret_cast<uint32_t*>(take(tile_queries * width / 2));
  scratch.panel = reinterpret_cast<uint32_t*>(take(split_keys * width / 2));
  scratch.rows = reinterpret_cast<char*>(take(panel_keys * width / 2));
  scratch.zeros = reinterpret_cast<char*>(take(width / 2));
  scratch.scales = take(2 * split_keys);
  scratch.split = partial_at(take(partial_floats(tile_queries, width)), tile_queries, width);
  __builtin_memset(scratch.zeros, 0, 2 * width);
  return scratch;
}

// Query vectors that share a register block, and the positions of the split that any of them sees.
struct Group {
  int64_t first, count;
  Span span;
};

struct Split {
  const Tile& tile;
  const PairScratch& scratch;
  int64_t width, start;
  Span span;  // positions of the split that the tile sees
  Ahead& ahead;
  Group groups[(tile_queries + max_group - 1) / max_group];
  int64_t group_count = 0;

  // Of `count` positions from offset `at`, those that a group sees, in whole vectors, from there.
  Span within(const Group& group, int64_t at, int64_t count) const {
    const Span seen = both(group.span, {start + at, start + at + count});
    return {(seen.first - start - at) / W * W, padded(seen.end - start - at, W)};
  }
};

inline bool in_pairs(DType type) { return type == DType::bf16 || is_scaled(type); }

// Codes of 8 bits as bfloat16, which holds them exactly.
template <DType type>
inline void pair_row(const char* from, char* to, int64_t count) {
  auto* half = reinterpret_cast<uint16_t*>(to);
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 2 * W <= count; i += 2 * W) store_codes<type>(from + i, half + i);
#endif
  for (; i < count; i += W) {
    const vec wide = widen(*reinterpret_cast<const bvec_at*>(from + i), type);
    *reinterpret_cast<hvec_at*>(half + i) = narrow(wide);
  }
}

// Rows that end inside a vector or are not bfloat16 are copied, converted and padded.
void copy_rows(const Split& split, DType type, int64_t count, const char** rows) {
  const int64_t size = split.tile.head_size, whole = size / W * W;
  for (int64_t j = 0; j < count; ++j) {
    if (rows[j] == split.scratch.zeros) continue;
    char* copy = split.scratch.rows + j * 2 * split.width;
    if (type == DType::bf16) {
      __builtin_memcpy(copy, rows[j], 2 * size);
    } else {
      const auto convert = type == DType::i8 ? pair_row<DType::i8> : pair_row<DType::f8>;
      convert(rows[j], copy, whole);
      if (whole < size) {
        char rest[W] = {};
        __builtin_memcpy(rest, rows[j] + whole, size - whole);
        convert(rest, copy + 2 * whole, W);
      }
    }
    __builtin_memset(copy + 2 * size, 0, 2 * (split.width - size));
    rows[j] = copy;
  }
}

// Whether rows of a cache can be read where they lie.
inline bool lies_in_place(const Split& split, const Cache& cache) {
  return cache.type == DType::bf16 && split.width == split.tile.head_size;
}

// Calls use(rows) for the rows of a head at `step` positions from offset `at` of the split.
template <typename Use>
inline void with_rows(const Split& split, int64_t step, const Cache& cache, int64_t head,
                      int64_t at, const Use& use) {
  const Tile& tile = split.tile;
  const char* rows[panel_keys];
  find_rows(tile, cache, head, split.start + at, step, split.span, split.scratch.zeros, rows);
  if (!lies_in_place(split, cache)) copy_rows(split, cache.type, step, rows);
  use(rows);
}

// Calls use(at) for each `step` positions of a split of which the tile sees some.
template <typename Use>
inline void each_offset(const Split& split, int64_t step, const Use& use) {
  const int64_t first = (split.span.first - split.start) / step * step;
  for (int64_t at = first; at < split.span.end - split.start; at += step) use(at);
}

// Calls use(head, at, rows) for `step` positions at a time, `at` being their offset in the split:
// positions outside, heads inside, so that blocks are read from front to back.
template <typename Use>
inline void each_piece(const Split& split, int64_t step, const Cache& cache, const Use& use) {
  each_offset(split, step, [&](int64_t at) {
    for (int64_t head = 0; head < split.tile.heads; ++head) {
      with_rows(split, step, cache, head, at,
                [&](const char* const* rows) { use(head, at, rows); });
    }
  });
}

// With so few queries a panel would not be used again, and rows are read one block at a time.
inline bool is_small(const Tile& tile) { return tile.count <= max_group; }
inline int64_t small_step(const Tile& tile) {
  int64_t step = W;
  while (step < tile.block_size && step < panel_keys) step *= 2;
  return step;
}

void score_split(const Split& split) {
  const PairScratch& scratch = split.scratch;
  const int64_t pairs = split.width / 2, count = split.tile.count;
  if (is_small(split.tile)) {
    const int64_t step = small_step(split.tile);
    const auto use = [&](int64_t head, int64_t at, const char* const* rows) {
      const Span seen = split.within(split.groups[0], at, step);
      const int64_t first = head * count;
      scores_of_rows[count - 1](scratch.queries + first * pairs, pairs, rows, split.ahead,
                                seen.first, seen.end, scratch.scores + first * split_keys + at);
    };
    return each_piece(split, step, split.tile.key, use);
  }
  const auto use = [&](int64_t head, int64_t at, const char* const* rows) {
    for (int64_t j = 0; j < panel_keys; j += W) {
      split.ahead.lines(pairs);
      pack_keys(rows + j, pairs, scratch.panel + j);
    }
    for (int64_t g = 0; g < split.group_count; ++g) {
      const Group& group = split.groups[g];
      const Span seen = split.within(group, at, panel_keys);
      if (seen.first >= seen.end) continue;
      const int64_t first = head * count + group.first;
      score_panels[group.count - 1](scratch.queries + first * pairs, pairs, scratch.panel,
                                    seen.first, seen.end,
                                    scratch.scores + first * split_keys + at);
    }
  };
  each_piece(split, panel_keys, split.tile.key, use);
}

// Weights of the offsets range_of(i) of the split for query vector i of each head.
template <typename Range>
inline void weigh_split(const Split& split, const Range& range_of) {
  const Tile& tile = split.tile;
  const PairScratch& scratch = split.scratch;
  const bool scaled_keys = is_scaled(tile.key.type), scaled_values = is_scaled(tile.value.type);
  float *key_scales = scratch.scales, *value_scales = scratch.scales + split_keys;
  for (int64_t head = 0; head < tile.heads; ++head) {
    if (scaled_keys) find_scales(tile, tile.key, head, split.start, split.span, key_scales);
    if (scaled_values) find_scales(tile, tile.value, head, split.start, split.span, value_scales);
    for (int64_t i = 0; i < tile.count; ++i) {
      const Span range = range_of(i), own = seen_by(tile, i);
      const int64_t vector = head * tile.count + i;
      auto* weights = reinterpret_cast<uint16_t*>(scratch.weights + vector * (split_keys / 2));
      const auto put = [&](int64_t j, vec weight) {
        // The scale of what a query does not see may be NaN.
        if (scaled_values) weight = pick(weight == 0.0f, weight, weight * load(value_scales + j));
        *reinterpret_cast<hvec_at*>(weights + j) = narrow(weight);
      };
      weigh(tile, scratch.scores + vector * split_keys,
            {own.first - split.start, own.end - split.start}, range.first, range.end,
            scaled_keys ? key_scales : nullptr,
            scratch.split.largest + vector, scratch.split.total + vector, put);
    }
  }
}

void value_split(const Split& split) {
  const PairScratch& scratch = split.scratch;
  const int64_t width = split.width, count = split.tile.count;
  constexpr int64_t stride = split_keys / 2;
  float* sums = scratch.split.values;
  __builtin_memset(sums, 0, split.tile.heads * count * width * sizeof(float));
  if (is_small(split.tile)) {
    const int64_t step = small_step(split.tile);
    const auto use = [&](int64_t head, int64_t at, const char* const* rows) {
      const Span seen = split.within(split.groups[0], at, step);
      const int64_t first = head * count;
      values_of_rows[count - 1](scratch.weights + first * stride + at / 2, rows, split.ahead, width,
                                seen.first / 2, seen.end / 2, sums + first * width);
    };
    return each_piece(split, step, split.tile.value, use);
  }
  const auto use = [&](int64_t head, int64_t at, const char* const* rows) {
    for (int64_t j = 0; j < panel_keys; j += 2) {
      split.ahead.lines(width / W);
      pack_values(rows + j, width, scratch.panel + j / 2 * width);
    }
    for (int64_t g = 0; g < split.group_count; ++g) {
      const Group& group = split.groups[g];
      const Span seen = split.within(group, at, panel_keys);
      if (seen.first >= seen.end) continue;
      const int64_t first = head * count + group.first;
      value_panels[group.count - 1](scratch.weights + first * stride + at / 2, scratch.panel,
                                    width, seen.first / 2, seen.end / 2, sums + first * width);
    }
  };
  each_piece(split, panel_keys, split.tile.value, use);
}

// Sums over splits, each of which sum_up(split) leaves in `scratch.split`.
template <typename SumUp>
inline void each_split(const Tile& tile, int64_t first_split, int64_t last_split, float* memory,
                       const Partial& sums, int64_t width, Ahead& ahead, const SumUp& sum_up) {
  const PairScratch scratch = divide_pairs(memory, width);
  const int64_t vectors = tile.heads * tile.count;
  const Span all = seen_by_any(tile, 0, tile.count);
  clear(sums, vectors, width);
  for (int64_t i = 0; i < vectors; ++i) {
    auto* query = reinterpret_cast<char*>(scratch.queries + i * width / 2);
    __builtin_memcpy(query, tile.queries[i].q, 2 * tile.head_size);
    __builtin_memset(query + 2 * tile.head_size, 0, 2 * (width - tile.head_size));
  }
  for (int64_t number = first_split; number < last_split; ++number) {
    const int64_t start = number * split_keys;
    const Span span = both(all, {start, start + split_keys});
    if (span.first >= span.end) continue;
    Split split{tile, scratch, width, start, span, ahead, {}};
    sum_up(split);
    merge(sums, scratch.split, vectors, width);
  }
}

[[maybe_unused]] void attend_pairs(const Tile& tile, int64_t first_split, int64_t last_split,
                                   float* memory, const Partial& sums, int64_t width) {
  const int64_t step = is_small(tile) ? small_step(tile) : panel_keys;
  const Span all = seen_by_any(tile, 0, tile.count);
  Ahead ahead(tile, {step, step}, all, first_split, last_split);
  const auto sum_up = [&](Split& split) {
    for (int64_t i = 0; i < tile.count; i += max_group) {
      const int64_t count = tile.count - i < max_group ? tile.count - i : max_group;
      const Span seen = both(seen_by_any(tile, i, count), split.span);
      split.groups[split.group_count++] = {i, count, seen};
    }
    score_split(split);
    weigh_split(split, [&](int64_t i) {
      const Span& seen = split.groups[i / max_group].span;
      return Span{seen.first - split.start, seen.end - split.start};
    });
    value_split(split);
  };
  each_split(tile, first_split, last_split, memory, sums, width, ahead, sum_up);
}

#endif

}  // namespace
}  // namespace weft
