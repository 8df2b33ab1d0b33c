// Attention over 16-bit brain floats by instructions that multiply pairs of them and add in
// float32: on machines that have them. Included by tile.cpp alone.
//
// A score is one float32 accumulator that runs over the head in pairs, ascending; a sum of values
// one that runs over positions in pairs, ascending. Weights are rounded to bfloat16 before they
// meet the values, which moves a result by less than its own rounding does.
#pragma once

#include "softmax.hpp"

namespace weft {
namespace {

#if defined(__AVX512BF16__)
#define WEFT_PAIRS
inline vec dot(vec sum, uvec a, uvec b) {
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
inline hvec narrow(vec x) { return (hvec)_mm512_cvtneps_pbh((__m512)x); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define WEFT_PAIRS
inline vec dot(vec sum, uvec a, uvec b) {
  return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
inline hvec narrow(vec x) { return (hvec)vcvt_bf16_f32((float32x4_t)x); }
#endif

#ifdef WEFT_PAIRS

inline uvec load_pairs(const void* p) { return *static_cast<const uvec_at*>(p); }
inline void store_pairs(uint32_t* p, uvec v) { *reinterpret_cast<uvec_at*>(p) = v; }
inline uvec splat_pair(uint32_t x) { return x - uvec{}; }

// ---- packing ----

// Starts rows that will be needed next on their way, a few lines at a time between other work, in
// the order in which they lie in memory. The loops below go over rows in columns, in which the
// hardware does not see the stream, and many prefetches at once would wait for each other.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const char* const* rows, int64_t count, int64_t bytes)
      : row_(rows), end_(rows + count), bytes_(bytes) {}

  void lines(int64_t count) {
    for (; count > 0 && row_ != end_; --count) {
      __builtin_prefetch(*row_ + at_);
      at_ += 64;
      if (at_ < bytes_) continue;
      at_ = 0;
      ++row_;
    }
  }

 private:
  const char* const* row_ = nullptr;
  const char* const* end_ = nullptr;
  int64_t bytes_ = 0, at_ = 0;
};

template <int step, bool upper, int... I>
inline uvec exchange(uvec a, uvec b, std::integer_sequence<int, I...>) {
  if constexpr (upper) {
    return __builtin_shufflevector(a, b, ((I & step) ? W + I : I + step)...);
  } else {
    return __builtin_shufflevector(a, b, ((I & step) ? W + I - step : I)...);
  }
}

template <int step>
inline void transpose(uvec* rows) {
  constexpr std::make_integer_sequence<int, W> lanes{};
  for (int i = 0; i < W; ++i) {
    if (i & step) continue;
    const uvec a = rows[i], b = rows[i + step];
    rows[i] = exchange<step, false>(a, b, lanes);
    rows[i + step] = exchange<step, true>(a, b, lanes);
  }
  if constexpr (step > 1) transpose<step / 2>(rows);
}

// W pairs of W keys, a vector for each pair.
inline void load_block(const char* const* rows, int64_t pair, uvec* block) {
  for (int i = 0; i < W; ++i) block[i] = load_pairs(rows[i] + 4 * pair);
  transpose<W / 2>(block);
}

// W keys to a column of [pairs][panel_keys].
void pack_keys(const char* const* rows, int64_t pairs, uint32_t* column) {
  for (int64_t p = 0; p < pairs; p += W) {
    uvec block[W];
    load_block(rows, p, block);
    for (int i = 0; i < W; ++i) store_pairs(column + (p + i) * panel_keys, block[i]);
  }
}

template <bool upper, int... I>
inline uvec interleave(uvec a, uvec b, std::integer_sequence<int, I...>) {
  typedef uint16_t halves __attribute__((vector_size(4 * W)));
  constexpr int base = upper ? W : 0;
  return (uvec)__builtin_shufflevector((halves)a, (halves)b,
                                       ((I & 1) ? 2 * W + base + I / 2 : base + I / 2)...);
}

// The values of two neighbouring positions as pairs: two vectors from column d.
inline void load_values(const char* const* rows, int64_t d, uvec* values) {
  constexpr std::make_integer_sequence<int, 2 * W> lanes{};
  const uvec a = load_pairs(rows[0] + 2 * d), b = load_pairs(rows[1] + 2 * d);
  values[0] = interleave<false>(a, b, lanes);
  values[1] = interleave<true>(a, b, lanes);
}

// To one row [width] of pairs.
void pack_values(const char* const* rows, int64_t width, uint32_t* to) {
  for (int64_t d = 0; d < width; d += 2 * W) {
    uvec values[2];
    load_values(rows, d, values);
    store_pairs(to + d, values[0]);
    store_pairs(to + d + W, values[1]);
  }
}

// ---- products ----

// Scores of Q queries and C vectors of keys.
template <int Q, int C>
inline void score_block(const uint32_t* queries, int64_t pairs, const uint32_t* panel,
                        float* scores) {
  vec sums[Q][C] = {};
  int64_t p = 0;
  do {
    uvec keys[C];
    for (int c = 0; c < C; ++c) keys[c] = load_pairs(panel + p * panel_keys + c * W);
    for (int i = 0; i < Q; ++i) {
      const uvec query = splat_pair(queries[i * pairs + p]);
      for (int c = 0; c < C; ++c) sums[i][c] = dot(sums[i][c], query, keys[c]);
    }
  } while (++p < pairs);
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) store(scores + i * split_keys + c * W, sums[i][c]);
  }
}

// Columns [from, to) of a panel, both multiples of W.
template <int Q>
void score_panel(const uint32_t* queries, int64_t pairs, const uint32_t* panel, int64_t from,
                 int64_t to, float* scores) {
  int64_t key = from;
  for (; key + 4 * W <= to; key += 4 * W) {
    score_block<Q, 4>(queries, pairs, panel + key, scores + key);
  }
  for (; key < to; key += W) score_block<Q, 1>(queries, pairs, panel + key, scores + key);
}

// Add the values of pairs [from, to) of a panel, weighted, to C vectors of the sums of Q queries.
template <int Q, int C>
inline void value_block(const uint32_t* weights, const uint32_t* panel, int64_t width,
                        int64_t from, int64_t to, float* into) {
  vec sums[Q][C];
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) sums[i][c] = load(into + i * width + c * W);
  }
  int64_t p = from;
  do {
    uvec values[C];
    for (int c = 0; c < C; ++c) values[c] = load_pairs(panel + p * width + c * W);
    for (int i = 0; i < Q; ++i) {
      const uvec weight = splat_pair(weights[i * (split_keys / 2) + p]);
      for (int c = 0; c < C; ++c) sums[i][c] = dot(sums[i][c], weight, values[c]);
    }
  } while (++p < to);
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) store(into + i * width + c * W, sums[i][c]);
  }
}

template <int Q>
void value_panel(const uint32_t* weights, const uint32_t* panel, int64_t width, int64_t from,
                 int64_t to, float* into) {
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) {
    value_block<Q, 4>(weights, panel + d, width, from, to, into + d);
  }
  for (; d < width; d += W) value_block<Q, 1>(weights, panel + d, width, from, to, into + d);
}

// ---- the same from rows, for so few queries that a panel would not be used again ----

template <int Q>
void score_rows(const uint32_t* queries, int64_t pairs, const char* const* rows, Ahead& ahead,
                int64_t from, int64_t to, float* scores) {
  for (int64_t key = from; key < to; key += W) {
    vec sums[Q] = {};
    int64_t p = 0;
    do {
      uvec block[W];
      load_block(rows + key, p, block);
      ahead.lines(W);
#pragma GCC unroll 16
      for (int k = 0; k < W; ++k) {
        for (int i = 0; i < Q; ++i) {
          sums[i] = dot(sums[i], splat_pair(queries[i * pairs + p + k]), block[k]);
        }
      }
    } while ((p += W) < pairs);
    for (int i = 0; i < Q; ++i) store(scores + i * split_keys + key, sums[i]);
  }
}

// C times two vectors of the sums of Q queries.
template <int Q, int C>
inline void value_columns(const uint32_t* weights, const char* const* rows, Ahead& ahead,
                          int64_t width, int64_t from, int64_t to, int64_t d, float* into) {
  vec sums[Q][2 * C];
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < 2 * C; ++c) sums[i][c] = load(into + i * width + d + c * W);
  }
  int64_t p = from;
  do {
    uvec values[2 * C];
    for (int c = 0; c < C; ++c) load_values(rows + 2 * p, d + c * 2 * W, values + 2 * c);
    ahead.lines(2 * C);
    for (int i = 0; i < Q; ++i) {
      const uvec weight = splat_pair(weights[i * (split_keys / 2) + p]);
      for (int c = 0; c < 2 * C; ++c) sums[i][c] = dot(sums[i][c], weight, values[c]);
    }
  } while (++p < to);
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < 2 * C; ++c) store(into + i * width + d + c * W, sums[i][c]);
  }
}

template <int Q>
void value_rows(const uint32_t* weights, const char* const* rows, Ahead& ahead, int64_t width,
                int64_t from, int64_t to, float* into) {
  constexpr int C = Q <= 3 ? 4 : 2;
  int64_t d = 0;
  for (; d + 2 * C * W <= width; d += 2 * C * W) {
    value_columns<Q, C>(weights, rows, ahead, width, from, to, d, into);
  }
  for (; d < width; d += 2 * W) {
    value_columns<Q, 1>(weights, rows, ahead, width, from, to, d, into);
  }
}

constexpr int64_t max_group = 6;  // queries that share a register block

// A function for each number of queries in a register block.
#define WEFT_EACH(name) {name<1>, name<2>, name<3>, name<4>, name<5>, name<6>}
constexpr decltype(&score_panel<1>) score_panels[] = WEFT_EACH(score_panel);
constexpr decltype(&value_panel<1>) value_panels[] = WEFT_EACH(value_panel);
constexpr decltype(&score_rows<1>) scores_of_rows[] = WEFT_EACH(score_rows);
constexpr decltype(&value_rows<1>) values_of_rows[] = WEFT_EACH(value_rows);
#undef WEFT_EACH

// ---- one split ----

struct PairScratch {
  uint32_t* queries;  // [tile_queries][width / 2]
  float* scores;      // [tile_queries][split_keys]
  uint32_t* weights;  // [tile_queries][split_keys / 2]
  uint32_t* panel;    // [width / 2][panel_keys] keys, or [panel_keys / 2][width] values
  char* rows;         // [panel_keys][width] converted
  char* zeros;        // [width]
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
  scratch.panel = reinterpret_cast<uint32_t*>(take(panel_keys * width / 2));
  scratch.rows = reinterpret_cast<char*>(take(panel_keys * width / 2));
  scratch.zeros = reinterpret_cast<char*>(take(width / 2));
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
  Group groups[(tile_queries + max_group - 1) / max_group];
  int64_t group_count = 0;

  // Of `count` positions from offset `at`, those that a group sees, in whole vectors, from there.
  Span within(const Group& group, int64_t at, int64_t count) const {
    const Span seen = both(group.span, {start + at, start + at + count});
    return {(seen.first - start - at) / W * W, padded(seen.end - start - at, W)};
  }
};

// Rows that end inside a vector are copied and padded.
void pad_rows(const Split& split, int64_t count, const char** rows) {
  const int64_t bytes = 2 * split.tile.head_size;
  for (int64_t j = 0; j < count; ++j) {
    if (rows[j] == split.scratch.zeros) continue;
    char* copy = split.scratch.rows + j * 2 * split.width;
    __builtin_memcpy(copy, rows[j], bytes);
    __builtin_memset(copy + bytes, 0, 2 * split.width - bytes);
    rows[j] = copy;
  }
}

// Calls use(head, at, rows, ahead) for `step` positions at a time, `at` being their offset in the
// split: positions outside, heads inside, so that blocks are read from front to back. `ahead` are
// the rows of the next piece; after the last one that is the first of the cache `after`.
template <typename Use>
inline void each_piece(const Split& split, int64_t step, const Cache& cache, const Cache* after,
                       const Use& use) {
  const Tile& tile = split.tile;
  const char* buffers[2][panel_keys];
  const char **rows = buffers[0], **ahead = buffers[1];
  const auto find = [&](const Cache& from, int64_t head, int64_t at, const char** to) {
    find_rows(tile, from, head, split.start + at, step, split.span, split.scratch.zeros, to);
  };
  const int64_t first = (split.span.first - split.start) / step * step;
  const int64_t end = split.span.end - split.start;
  find(cache, 0, first, rows);
  for (int64_t at = first; at < end; at += step) {
    for (int64_t head = 0; head < tile.heads; ++head) {
      const bool last_head = head + 1 == tile.heads, last = last_head && at + step >= end;
      if (!last) find(cache, last_head ? 0 : head + 1, last_head ? at + step : at, ahead);
      if (last && after != nullptr) find(*after, 0, first, ahead);
      Ahead next;
      if (!last || after != nullptr) next = {ahead, step, 2 * tile.head_size};
      if (split.width != tile.head_size) pad_rows(split, step, rows);
      use(head, at, rows, next);
      const char** used = rows;
      rows = ahead;
      ahead = used;
    }
  }
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
    const auto use = [&](int64_t head, int64_t at, const char* const* rows, Ahead& ahead) {
      const Span seen = split.within(split.groups[0], at, step);
      const int64_t first = head * count;
      scores_of_rows[count - 1](scratch.queries + first * pairs, pairs, rows, ahead, seen.first,
                                seen.end, scratch.scores + first * split_keys + at);
    };
    return each_piece(split, step, split.tile.key, &split.tile.value, use);
  }
  const auto use = [&](int64_t head, int64_t at, const char* const* rows, Ahead& ahead) {
    for (int64_t j = 0; j < panel_keys; j += W) {
      ahead.lines(pairs);
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
  each_piece(split, panel_keys, split.tile.key, &split.tile.value, use);
}

void weigh_split(const Split& split) {
  const PairScratch& scratch = split.scratch;
  const int64_t count = split.tile.count;
  for (int64_t g = 0; g < split.tile.heads * split.group_count; ++g) {
    const Group& group = split.groups[g % split.group_count];
    const int64_t begin = group.span.first - split.start, end = group.span.end - split.start;
    for (int64_t i = group.first; i < group.first + group.count; ++i) {
      const Span seen = seen_by(split.tile, i);
      const int64_t vector = g / split.group_count * count + i;
      auto* weights = reinterpret_cast<uint16_t*>(scratch.weights + vector * (split_keys / 2));
      weigh(split.tile, scratch.scores + vector * split_keys,
            {seen.first - split.start, seen.end - split.start}, begin, end, nullptr,
            scratch.split.largest + vector, scratch.split.total + vector,
            [&](int64_t j, vec weight) {
              *reinterpret_cast<hvec_at*>(weights + j) = narrow(weight);
            });
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
    const auto use = [&](int64_t head, int64_t at, const char* const* rows, Ahead& ahead) {
      const Span seen = split.within(split.groups[0], at, step);
      const int64_t first = head * count;
      values_of_rows[count - 1](scratch.weights + first * stride + at / 2, rows, ahead, width,
                                seen.first / 2, seen.end / 2, sums + first * width);
    };
    return each_piece(split, step, split.tile.value, nullptr, use);
  }
  const auto use = [&](int64_t head, int64_t at, const char* const* rows, Ahead& ahead) {
    for (int64_t j = 0; j < panel_keys; j += 2) {
      ahead.lines(width / W);
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
  each_piece(split, panel_keys, split.tile.value, nullptr, use);
}

void attend_pairs(const Tile& tile, int64_t first_split, int64_t last_split, float* memory,
                  const Partial& sums, int64_t width) {
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
    for (int64_t i = 0; i < vectors; ++i) scratch.split.total[i] = 0.0f;
    Split split{tile, scratch, width, start, span, {}};
    for (int64_t i = 0; i < tile.count; i += max_group) {
      const int64_t count = tile.count - i < max_group ? tile.count - i : max_group;
      const Span seen = both(seen_by_any(tile, i, count), span);
      if (seen.first < seen.end) split.groups[split.group_count++] = {i, count, seen};
    }
    score_split(split);
    weigh_split(split);
    value_split(split);
    merge(sums, scratch.split, vectors, width);
  }
}

#endif

}  // namespace
}  // namespace weft
