// Products of unsigned weights and signed activations of 8 bits, summed exactly, by what an
// instruction set has for them. All of it has internal linkage: see panel.cpp.
//
// A step is four bytes of weights for each column: four inputs, or eight with 4 bits. Its products
// are added in `terms`. Where `spread`, a row is taken from what `spread_row` made of it.
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
// The weights of a step: with 4 bits those of one half, a byte each.
template <int bits>
inline ivec bytes_of(const uint8_t* p, int half) {
  const ivec w = load_bytes(p);
  if constexpr (bits == 8) return w;
  return half == 0 ? low_halves(w) : high_halves(w);
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
template <int bits>
struct Dot {
  using Weights = ivec;
  using Input = ivec;
  static constexpr int terms = 8 / bits;
  static constexpr bool spread = false;
  static Weights weights(const uint8_t* p, int term) { return bytes_of<bits>(p, term); }
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
template <int bits>
struct Dot {
  using Weights = ivec;
  using Input = ivec;
  static constexpr int terms = 16 / bits;
  static constexpr bool spread = true;
  static Weights weights(const uint8_t* p, int term) {
    const ivec w = bytes_of<bits>(p, term / 2);
    return term % 2 == 0 ? w & 0x00ff00ff : (ivec)((uwvec)w >> 8);
  }
  static Input input(const int8_t* x, int64_t step, int term) {
    return splat_four(x + term % 2 * longest_group + 4 * (8 / bits * step + term / 2));
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

// With 4 bits, four byte products are at most 4 * 15 * 127 and fit into 16 bits.
template <>
struct Dot<4> {
  struct Weights {
    ivec low, high;
  };
  using Input = Weights;
  static constexpr int terms = 1;
  static constexpr bool spread = false;
  static Weights weights(const uint8_t* p, int) {
    return {bytes_of<4>(p, 0), bytes_of<4>(p, 1)};
  }
  static Input input(const int8_t* x, int64_t step, int) {
    return {splat_four(x + 8 * step), splat_four(x + 8 * step + 4)};
  }
  static ivec add(ivec sums, Weights w, Input x) {
    const ivec words = add_words(pairs_of_bytes(w.low, x.low), pairs_of_bytes(w.high, x.high));
    return sums + pairs_of_words(words, ivec{} + 0x00010001);
  }
};
#endif

#else

template <int bits>
struct Dot {
  using Weights = ivec;
  struct Input {
    int32_t x[4];
  };
  static constexpr int terms = 8 / bits;
  static constexpr bool spread = false;
  static Weights weights(const uint8_t* p, int term) { return bytes_of<bits>(p, term); }
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

}  // namespace
}  // namespace weft
