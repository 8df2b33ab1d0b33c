// Products of bfloat16 pairs in register blocks, and the packing of rows that they need.
//
// Included by pairs.hpp alone.
#pragma once

#include "ahead.hpp"
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

#if defined(__AVX512F__)
inline uvec low_words(uvec a, uvec b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
inline uvec high_words(uvec a, uvec b) {
  return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
inline uvec low_halves(uvec a, uvec b) {
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
inline uvec high_halves(uvec a, uvec b) {
  return __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
// Four pairs of row i in the first quarter, then of rows 4 + i, 8 + i and 12 + i: put there by the
// loads, since shuffles are dear.
inline uvec quarters(const char* const* rows, int i, int64_t pair) {
  const auto four = [&](int row) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row + i] + 4 * pair));
  };
  __m512i all = _mm512_zextsi128_si512(four(0));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, four(4));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, four(8));
  return (uvec)_mm512_mask_broadcast_i32x4(all, 0xf000, four(12));
}
#else
inline uvec low_words(uvec a, uvec b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline uvec high_words(uvec a, uvec b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
inline uvec low_halves(uvec a, uvec b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
inline uvec high_halves(uvec a, uvec b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }
inline uvec quarters(const char* const* rows, int i, int64_t pair) {
  return load_pairs(rows[i] + 4 * pair);
}
#endif

constexpr int fours = 4;  // pairs that are transposed at a time

// Four pairs of W keys, a vector for each pair.
inline void load_fours(const char* const* rows, int64_t pair, uvec* block) {
  const uvec first = quarters(rows, 0, pair), second = quarters(rows, 1, pair);
  const uvec third = quarters(rows, 2, pair), fourth = quarters(rows, 3, pair);
  const uvec a = low_words(first, second), b = high_words(first, second);
  const uvec c = low_words(third, fourth), d = high_words(third, fourth);
  block[0] = low_halves(a, c);
  block[1] = high_halves(a, c);
  block[2] = low_halves(b, d);
  block[3] = high_halves(b, d);
}

// W keys to a column of [pairs][panel_keys].
void pack_keys(const char* const* rows, int64_t pairs, uint32_t* column) {
  for (int64_t p = 0; p < pairs; p += fours) {
    uvec block[fours];
    load_fours(rows, p, block);
    for (int i = 0; i < fours; ++i) store_pairs(column + (p + i) * panel_keys, block[i]);
  }
}

#if defined(__AVX512BF16__)
// What each magnitude of a float of 8 bits (E4M3) is as bfloat16.
struct Magnitudes {
  alignas(64) uint16_t of[128];
};
constexpr Magnitudes magnitudes = [] {
  Magnitudes all{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> 3, mantissa = code & 7;
    if (code == 0x7f) {
      all.of[code] = 0x7fc0;
    } else if (exponent > 0) {
      all.of[code] = static_cast<uint16_t>((exponent + 120) << 7 | mantissa << 4);
    } else if (mantissa > 0) {  // subnormal: shift until the leading one falls away
      exponent = 121;
      for (; mantissa < 8; mantissa *= 2) --exponent;
      all.of[code] = static_cast<uint16_t>(exponent << 7 | (mantissa & 7) << 4);
    }
  }
  return all;
}();

// 2 * W codes of 8 bits as bfloat16.
template <DType type>
inline void store_codes(const char* from, uint16_t* to) {
  if constexpr (type == DType::i8) {
    const auto widened = [&](int64_t at) {
      const auto codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
      constexpr __mmask16 every = 0xffff;  // without a mask the compiler warns
      return _mm512_maskz_cvtepi32_ps(every, _mm512_maskz_cvtepi8_epi32(every, codes));
    };
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(widened(W), widened(0)));
  } else {
    const auto bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m512i codes = _mm512_cvtepu8_epi16(bytes);
    const auto quarter = [](int i) { return _mm512_load_si512(magnitudes.of + 32 * i); };
    const __m512i small = _mm512_permutex2var_epi16(quarter(0), codes, quarter(1));
    const __m512i large = _mm512_permutex2var_epi16(quarter(2), codes, quarter(3));
    const __mmask32 is_large = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(codes, 7), 15);
    _mm512_storeu_si512(
        to, _mm512_or_si512(sign, _mm512_mask_blend_epi16(is_large, small, large)));
  }
}
#endif

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

// Scores of Q queries and C vectors of keys.
template <int Q, int C>
inline void score_keys(const uint32_t* queries, int64_t pairs, const char* const* rows,
                       Ahead& ahead, float* scores) {
  vec sums[Q][C] = {};
  int64_t p = 0;
  do {
    uvec keys[C][fours];
    for (int c = 0; c < C; ++c) load_fours(rows + c * W, p, keys[c]);
    ahead.lines(C * W * fours / 16);
    for (int k = 0; k < fours; ++k) {
      for (int i = 0; i < Q; ++i) {
        const uvec query = splat_pair(queries[i * pairs + p + k]);
        for (int c = 0; c < C; ++c) sums[i][c] = dot(sums[i][c], query, keys[c][k]);
      }
    }
  } while ((p += fours) < pairs);
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) store(scores + i * split_keys + c * W, sums[i][c]);
  }
}

template <int Q>
void score_rows(const uint32_t* queries, int64_t pairs, const char* const* rows, Ahead& ahead,
                int64_t from, int64_t to, float* scores) {
  int64_t key = from;
  for (; key + 2 * W <= to; key += 2 * W) {
    score_keys<Q, 2>(queries, pairs, rows + key, ahead, scores + key);
  }
  if (key < to) score_keys<Q, 1>(queries, pairs, rows + key, ahead, scores + key);
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
  if (C > 2 && d + 4 * W <= width) {
    value_columns<Q, 2>(weights, rows, ahead, width, from, to, d, into);
    d += 4 * W;
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
