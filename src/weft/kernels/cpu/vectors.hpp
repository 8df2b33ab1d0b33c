// What attention does with vectors: rows of numbers of 8 and 16 bits, sums over lanes.
//
// GCC/Clang vector extensions. Included by tile.cpp alone, which is compiled once per instruction
// set: everything here has internal linkage, so that the linker never shares a copy of it.
#pragma once

#include <utility>

#include "simd.hpp"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace weft {
namespace {

typedef int16_t svec __attribute__((vector_size(2 * W)));
typedef int8_t bvec __attribute__((vector_size(W)));
typedef bvec bvec_at __attribute__((aligned(1), may_alias));

constexpr float infinity = __builtin_inff();

inline vec max(vec a, vec b) { return pick(a > b, a, b); }  // a NaN in a is passed over
// The largest number of a vector, in any order. With a NaN it is that or the largest of some others.
inline float max_of(vec x) {
  float lanes[W];
  store(lanes, x);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
  }
  return lanes[0];
}

// ---- numbers of 16 bits ----

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t x) { return __builtin_bit_cast(float, x); }

inline float widen_bf16(uint16_t x) { return float_of(uint32_t{x} << 16); }

inline float widen_f16(uint16_t x) {
  const uint32_t magnitude = uint32_t{x} & 0x7fffu;
  const uint32_t scaled = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return float_of(scaled | special | (uint32_t{x} & 0x8000u) << 16);
}

inline uint16_t narrow_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

inline uint16_t narrow_f16(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u;
  const uint32_t bits = bits_of(x) & 0x7fffffffu;
  // Below 2^-14 the sum aligns the mantissa to the subnormal step, so the addition rounds it.
  const uint32_t subnormal = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (bits + 0xc8000fffu + (bits >> 13 & 1u)) >> 13;
  const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = bits < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>(sign | (bits >= 0x477ff000u ? special : finite));
}

template <DType type>
void widen_row(const char* from, float* to, int64_t count) {
  const auto* half = reinterpret_cast<const uint16_t*>(from);
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    store(to + i, widen(*reinterpret_cast<const hvec_at*>(half + i), type));
  }
  for (; i < count; ++i) to[i] = type == DType::bf16 ? widen_bf16(half[i]) : widen_f16(half[i]);
}

// The numbers of a scaled row, without the scale; bfloat16 holds them exactly. Those of type f8 are
// E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinities.
inline vec widen(bvec x, DType type) {
#if defined(__AVX512F__)
  const ivec code = (ivec)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)x);
#elif defined(__AVX2__)
  const ivec code = (ivec)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x));
#else  // in two steps: in one the compiler goes number by number
  const ivec code = __builtin_convertvector(__builtin_convertvector(x, svec), ivec);
#endif
  if (type == DType::i8) return __builtin_convertvector(code, vec);
  const uvec magnitude = (uvec)code & 0x7fu;
  const uvec scaled = (uvec)((vec)(magnitude << 20) * 0x1p120f);
  const uvec special = (uvec)(magnitude == 0x7fu) & 0x7fc00000u;
  return (vec)(scaled | special | ((uvec)code & 0x80u) << 24);
}

template <DType type>
void widen_codes(const char* from, float* to, int64_t count) {
  bvec last{};
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    store(to + i, widen(*reinterpret_cast<const bvec_at*>(from + i), type));
  }
  if (i == count) return;
  __builtin_memcpy(&last, from + i, count - i);
  const vec wide = widen(last, type);
  __builtin_memcpy(to + i, &wide, (count - i) * sizeof(float));
}

// `count` numbers as floats, then zeros up to `width`.
void read_row(const char* from, DType type, float* to, int64_t count, int64_t width) {
  if (type == DType::f32) {
    __builtin_memcpy(to, from, count * sizeof(float));
  } else if (type == DType::bf16) {
    widen_row<DType::bf16>(from, to, count);
  } else if (type == DType::f16) {
    widen_row<DType::f16>(from, to, count);
  } else if (type == DType::i8) {
    widen_codes<DType::i8>(from, to, count);
  } else {
    widen_codes<DType::f8>(from, to, count);
  }
  for (int64_t i = count; i < width; ++i) to[i] = 0.0f;
}

void write_row(const float* from, char* to, DType type, int64_t count) {
  auto* half = reinterpret_cast<uint16_t*>(to);
  if (type == DType::f32) {
    __builtin_memcpy(to, from, count * sizeof(float));
  } else if (type == DType::bf16) {
    for (int64_t i = 0; i < count; ++i) half[i] = narrow_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) half[i] = narrow_f16(from[i]);
  }
}

void convert(char* to, DType to_type, const char* from, DType from_type, int64_t count) {
  constexpr int64_t piece = 256;
  float row[piece];
  for (int64_t done = 0; done < count; done += piece) {
    const int64_t n = count - done < piece ? count - done : piece;
    read_row(from + done * size_of(from_type), from_type, row, n, n);
    write_row(row, to + done * size_of(to_type), to_type, n);
  }
}

// Not by adding a large number: that would be fused with the product that x is.
inline int8_t narrow_i8(float x) { return static_cast<int8_t>(__builtin_rintf(x)); }

inline int8_t narrow_f8(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80u;
  const uint32_t bits = bits_of(x) & 0x7fffffffu;
  // Below 2^-6 the sum aligns the mantissa to the subnormal step, so the addition rounds it.
  const uint32_t subnormal = bits_of(float_of(bits) + 0x1p14f) - bits_of(0x1p14f);
  const uint32_t normal = (bits + 0xc407ffffu + (bits >> 20 & 1u)) >> 20;
  return static_cast<int8_t>(sign | (bits < 0x3c800000u ? subnormal : normal));
}

// Codes are numbers / scale, the largest being 127 or 448. A row of numbers below 2^-100 becomes
// zeros, one that holds an infinity or a NaN gets the scale NaN.
void quantise(char* to, float* scale, DType to_type, const char* from, DType from_type,
              int64_t count) {
  constexpr int64_t piece = 256;
  float row[piece], largest = 0.0f, odd = 0.0f;
  for (int64_t done = 0; done < count; done += piece) {
    const int64_t n = count - done < piece ? count - done : piece;
    read_row(from + done * size_of(from_type), from_type, row, n, n);
    for (int64_t i = 0; i < n; ++i) {
      const float magnitude = __builtin_fabsf(row[i]);
      largest = magnitude > largest ? magnitude : largest;
      odd += row[i] * 0.0f;
    }
  }
  const bool zero = !(largest >= 0x1p-100f);
  const float most = to_type == DType::i8 ? 127.0f : 448.0f;
  const float step = odd != 0.0f || odd != odd ? __builtin_nanf("") : zero ? 0.0f : largest / most;
  const float factor = zero || step != step ? 0.0f : most / largest;
  for (int64_t done = 0; done < count; done += piece) {
    const int64_t n = count - done < piece ? count - done : piece;
    read_row(from + done * size_of(from_type), from_type, row, n, n);
    for (int64_t i = 0; i < n; ++i) {
      const float x = factor == 0.0f ? 0.0f : row[i] * factor;
      to[done + i] = to_type == DType::i8 ? narrow_i8(x) : narrow_f8(x);
    }
  }
  __builtin_memcpy(scale, &step, sizeof step);
}

// ---- sums over lanes ----

template <int... I>
inline vec shuffle(vec a, vec b, std::integer_sequence<int, I...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, ivec{I...});
#endif
}

// The sum of the halves of each run of lanes: of a's runs in their lower halves, of b's in the upper.
template <int run, int... I>
inline vec fold(vec a, vec b, std::integer_sequence<int, I...>) {
  constexpr int half = run / 2;
  constexpr std::integer_sequence<int, (I % run < half ? I + half : W + I - half)...> others{};
#if defined(__AVX__) && !defined(__AVX512F__)  // where GCC takes a shuffle, which is dearer
  const vec in_place = (vec)_mm256_blend_ps((__m256)a, (__m256)b, ((I % run < half ? 0 : 1 << I) + ...));
#else
  const vec in_place = shuffle(
      a, b, std::integer_sequence<int, (I % run < half ? I : W + I)...>{});
#endif
  return in_place + shuffle(a, b, others);
}

// Vectors of sums in runs of lanes become one: each run is added up in the same tree (halves,
// quarters, ...) until `count` of them share its lanes. v[i] comes to the lanes at bit-reversed i.
template <int run, int count>
inline vec gather(const vec* v) {
  if constexpr (count == 1) {
    return v[0];
  } else {
    vec halves[count / 2];
    for (int i = 0; i < count / 2; ++i) {
      halves[i] = fold<run>(v[i], v[i + count / 2], std::make_integer_sequence<int, W>{});
    }
    return gather<run / 2, count / 2>(halves);
  }
}

inline float sum(vec v) {
  vec all[W];
  for (vec& one : all) one = v;
  return gather<W, W>(all)[0];
}

}  // namespace
}  // namespace weft
