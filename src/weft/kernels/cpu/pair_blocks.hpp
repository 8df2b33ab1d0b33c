// Products of bfloat16 pairs in register blocks, and the packing of rows that they need.
//
// Included by pairs.hpp alone.
#pragma once

#include "tile.hpp"
#include "vectors.hpp"

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

#endif

}  // namespace
}  // namespace weft
