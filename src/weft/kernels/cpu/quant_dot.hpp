// Products of unsigned weights and signed activations of 8 bits, summed exactly, by what an
// instruction set has for them. All of it has internal linkage: see panel.cpp.
//
// A step is what a word holds for each column: four inputs with 8 bits, eight with 4; with 6 or 5
// bits sixteen or 32, of which a word holds the other bits. Its products are added in `terms`. Where
// `spread`, a row is taken from what `spread_row` made of it.
#pragma once

#include "quant.hpp"
#include "simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft {
namespace {

typedef uint16_t uwvec __attribute__((vector_size(4 * W)));
typedef ivec ivec_at __attribute__((aligned(4), may_alias));

inline ivec load_bytes(const void* p) { return *static_cast<const ivec_at*>(p); }
inline ivec low_halves(ivec w) { return w & 0x0f0f0f0f; }
inline ivec high_halves(ivec w) { return (ivec)((uvec)w >> 4) & 0x0f0f0f0f; }

// How weights are coded.
struct Code {
  int bits;
  bool by_table = false;

  constexpr int high_bits() const { return bits == 8 ? 0 : bits - 4; }
  constexpr int64_t step_inputs() const {
    return bits == 8 ? 4 : bits == 4 ? 8 : 32 / high_bits();
  }
};

// Where the weights of a group lie, from a column on.
struct CodePlaces {
  const uint8_t* low;
  const uint8_t* high;   // of 5 and 6 bits
  const uint8_t* table;  // sixteen numbers, of codes by a table
};
WEFT_INLINED CodePlaces places_of(const QuantWeight& weight, const uint8_t* block, int64_t column) {
  return {block + weight.values_at() + 4 * column, block + weight.high_at() + 4 * column,
          code_tables[static_cast<int>(weight.table)]};
}
inline ivec load_table(const uint8_t* numbers) {
#if defined(__AVX512F__)
  return (ivec)_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(numbers)));
#else
  ivec table;
  for (size_t i = 0; i < sizeof table; i += 16) {
    __builtin_memcpy(reinterpret_cast<char*>(&table) + i, numbers, 16);
  }
  return table;
#endif
}

// The numbers of sixteen that bytes choose.
inline ivec look_up(ivec table, ivec codes) {
#if defined(__AVX512BW__)
  return (ivec)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
  return (ivec)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif defined(__SSSE3__)
  return (ivec)_mm_shuffle_epi8((__m128i)table, (__m128i)codes);
#else
  uint8_t numbers[sizeof(ivec)], found[sizeof(ivec)];
  __builtin_memcpy(numbers, &table, sizeof numbers);
  __builtin_memcpy(found, &codes, sizeof found);
  for (uint8_t& code : found) code = numbers[code];
  __builtin_memcpy(&codes, found, sizeof found);
  return codes;
#endif
}

// Four inputs of each column, a byte each: the `four`th of a step, `v` vectors of columns on.
template <Code code>
inline ivec bytes_of(const CodePlaces& from, int64_t step, int four, int v) {
  constexpr int64_t line = 4 * quant_columns;
  constexpr int high = code.high_bits();
  if constexpr (code.bits == 8) return load_bytes(from.low + step * line + 4 * W * v);
  const int64_t lines = code.step_inputs() / 8;
  const ivec w = load_bytes(from.low + (step * lines + four / 2) * line + 4 * W * v);
  const ivec low = four % 2 == 0 ? low_halves(w) : high_halves(w);
  if constexpr (code.by_table) return look_up(load_table(from.table), low);
  if constexpr (high == 0) return low;
  const uvec rest = (uvec)load_bytes(from.high + step * line + 4 * W * v);
  constexpr int mask = high == 1 ? 0x10101010 : 0x30303030;
  const int shift = 4 - four * high;
  return low | (ivec)((shift >= 0 ? rest << shift : rest >> -shift) & (uint32_t)mask);
}
inline ivec splat_four(const void* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return four - ivec{};
}

constexpr int64_t longest_group = 256;

// The even bytes of a group as words, then, after the space of a longest group, the odd ones. A group
// is a multiple of 16 bytes, as a row of them is.
inline void spread_row(const int8_t* x, int64_t group, int8_t* to) {
  typedef int16_t words __attribute__((vector_size(16)));
  for (int64_t k = 0; k < group; k += 16) {
    words bytes;
    __builtin_memcpy(&bytes, x + k, sizeof bytes);
    const words even = (words)(bytes << 8) >> 8, odd = bytes >> 8;
    __builtin_memcpy(to + k, &even, sizeof even);
    __builtin_memcpy(to + longest_group + k, &odd, sizeof odd);
  }
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// One instruction multiplies four bytes of each lane and adds them.
template <Code code>
struct Dot {
  using Weights = ivec;
  using Input = ivec;
  static constexpr int terms = code.step_inputs() / 4;
  static constexpr bool spread = false;
  static Weights weights(const CodePlaces& from, int64_t step, int term, int v) {
    return bytes_of<code>(from, step, term, v);
  }
  static Input input(const int8_t* x, int64_t step, int term) {
    return splat_four(x + 4 * (terms * step + term));
  }
  static ivec add(ivec sums, Weights w, Input x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#else
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#endif
  }
};

#elif defined(__x86_64__)

// Sums of pairs of 16-bit products in each lane.
inline ivec pairs_of_words(ivec a, ivec b) {
#if defined(__AVX512BW__)
  return (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (ivec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

// Even and odd bytes become words, since a pair of byte products may not fit into 16 bits.
template <Code code>
struct Dot {
  using Weights = ivec;
  using Input = ivec;
  static constexpr int terms = code.step_inputs() / 2;
  static constexpr bool spread = true;
  static Weights weights(const CodePlaces& from, int64_t step, int term, int v) {
    const ivec w = bytes_of<code>(from, step, term / 2, v);
    return term % 2 == 0 ? w & 0x00ff00ff : (ivec)((uwvec)w >> 8);
  }
  static Input input(const int8_t* x, int64_t step, int term) {
    return splat_four(x + term % 2 * longest_group + 4 * (terms / 2 * step + term / 2));
  }
  static ivec add(ivec sums, Weights w, Input x) { return sums + pairs_of_words(w, x); }
};

#if defined(__AVX2__)
#if defined(__AVX512BW__)
inline ivec pairs_of_bytes(ivec a, ivec b) {
  return (ivec)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
}
inline ivec add_words(ivec a, ivec b) { return (ivec)_mm512_add_epi16((__m512i)a, (__m512i)b); }
#else
inline ivec pairs_of_bytes(ivec a, ivec b) {
  return (ivec)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
inline ivec add_words(ivec a, ivec b) { return (ivec)_mm256_add_epi16((__m256i)a, (__m256i)b); }
#endif

// With 4 to 6 bits, four byte products are at most 4 * 63 * 127 and fit into 16 bits.
template <Code code>
  requires(code.bits <= 6 && !code.by_table)
struct Dot<code> {
  struct Weights {
    ivec low, high;
  };
  using Input = Weights;
  static constexpr int terms = code.step_inputs() / 8;
  static constexpr bool spread = false;
  static Weights weights(const CodePlaces& from, int64_t step, int term, int v) {
    return {bytes_of<code>(from, step, 2 * term, v), bytes_of<code>(from, step, 2 * term + 1, v)};
  }
  static Input input(const int8_t* x, int64_t step, int term) {
    const int8_t* eight = x + 8 * (terms * step + term);
    return {splat_four(eight), splat_four(eight + 4)};
  }
  static ivec add(ivec sums, Weights w, Input x) {
    const ivec words = add_words(pairs_of_bytes(w.low, x.low), pairs_of_bytes(w.high, x.high));
    return sums + pairs_of_words(words, ivec{} + 0x00010001);
  }
};
#endif

#else

template <Code code>
struct Dot {
  using Weights = ivec;
  struct Input {
    int32_t x[4];
  };
  static constexpr int terms = code.step_inputs() / 4;
  static constexpr bool spread = false;
  static Weights weights(const CodePlaces& from, int64_t step, int term, int v) {
    return bytes_of<code>(from, step, term, v);
  }
  static Input input(const int8_t* x, int64_t step, int term) {
    const int8_t* four = x + 4 * (terms * step + term);
    return {{four[0], four[1], four[2], four[3]}};
  }
  static ivec add(ivec sums, Weights w, const Input& in) {
    return sums + (w & 255) * in.x[0] + (ivec)((uvec)w >> 8 & 255) * in.x[1] +
           (ivec)((uvec)w >> 16 & 255) * in.x[2] + (ivec)((uvec)w >> 24) * in.x[3];
  }
};

#endif

// Calls use.operator()<code>() with the code of a weight.
template <typename Use>
inline void with_code(const QuantWeight& weight, const Use& use) {
  if (weight.table != CodeTable::none) return use.template operator()<Code{4, true}>();
  if (weight.bits == 8) return use.template operator()<Code{8}>();
  if (weight.bits == 6) return use.template operator()<Code{6}>();
  if (weight.bits == 5) return use.template operator()<Code{5}>();
  use.template operator()<Code{4}>();
}

}  // namespace
}  // namespace weft
