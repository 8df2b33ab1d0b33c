// Vectors as wide as the registers of one instruction set, numbers of 16 bits, exp and tanh: for
// sources that are compiled once per instruction set. All of it has internal linkage: see panel.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "tensor.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Of small functions in the loops over groups of weights: GCC leaves calls of those with many callers
// there. With AVX2 a row of 4 bits gains a seventh, of 5 bits more; sets with AVX-512 were not measured.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define WEFT_INLINED inline __attribute__((always_inline))
#else
#define WEFT_INLINED inline
#endif

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
typedef vec vec_at __attribute__((aligned(4), may_alias));
typedef uvec uvec_at __attribute__((aligned(2), may_alias));
typedef hvec hvec_at __attribute__((aligned(2), may_alias));

inline vec load(const float* p) { return *reinterpret_cast<const vec_at*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<vec_at*>(p) = v; }
inline vec splat(float x) { return x - vec{}; }
inline vec pick(ivec condition, vec yes, vec no) {
  return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}

// Makes the compiler forget how a register got its value: it repeats no result, and loads none again.
template <typename Vector>
inline void forget(Vector& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(v));
#else
  asm volatile("" : "+m"(v));
#endif
}

// One instruction, which the compiler does not find by itself.
inline uvec widen_words(hvec x) {
#if defined(__AVX512F__)
  return (uvec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);  // without a mask it warns
#elif defined(__AVX2__)
  return (uvec)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, uvec);
#endif
}

// Of float16, exponent and mantissa are shifted into place and the bias is corrected; infinity and
// NaN keep the largest exponent. Subnormals are integers times a power of two: shifted, they would be
// subnormals of float32, which a machine multiplies a hundred times as slowly.
WEFT_INLINED vec widen(hvec x, DType type) {
  const uvec wide = widen_words(x);
  if (type == DType::bf16) return (vec)(wide << 16);
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps((__m256i)x);
#else
  const uvec magnitude = wide & 0x7fffu;
  const uvec normal = (magnitude << 13) + (112u << 23);
  const uvec small = (uvec)(__builtin_convertvector((ivec)magnitude, vec) * 0x1p-24f);
  const uvec is_small = (uvec)(magnitude < 0x400u);
  const uvec special = (uvec)(magnitude >= 0x7c00u) & 0x7f800000u;
  return (vec)((small & is_small) | (normal & ~is_small) | special | (wide & 0x8000u) << 16);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// One shuffle of both halves of a register that the numbers are loaded into twice. Its order stays in
// memory: where loops need all registers GCC would keep it in one and a sum out of them.
alignas(32) constexpr int8_t upper_bytes[] = {
    -1, -1, 0, 1, -1, -1, 2,  3,  -1, -1, 4,  5,  -1, -1, 6,  7,
    -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15};
inline vec widen_bf16(hvec x) {
  vec wide;
  asm("vpshufb %2, %1, %0"
      : "=x"(wide)
      : "x"(_mm256_broadcastsi128_si256((__m128i)x)), "m"(*(const vec*)upper_bytes));
  return wide;
}
#else
inline vec widen_bf16(hvec x) { return (vec)(widen_words(x) << 16); }
#endif

#if defined(__AVX512BF16__)
// The instruction rounds as below, but takes numbers under the smallest normal one for 0.
inline hvec narrow_bf16(vec x) { return (hvec)_mm512_cvtneps_pbh((__m512)x); }
#else
inline hvec narrow_bf16(vec x) {
  const uvec bits = (uvec)x;
  const uvec rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const uvec nan = (uvec)(x != x);
  return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), hvec);
}
#endif

// W numbers of a row, or fewer at its end; what is missing is 0.
template <DType type>
inline vec read(const char* from, int64_t count = W) {
  if constexpr (type == DType::f32) {
    if (count >= W) return load(reinterpret_cast<const float*>(from));
    vec x{};
    __builtin_memcpy(&x, from, count * 4);
    return x;
  } else {
    if (count >= W) return widen_bf16(*reinterpret_cast<const hvec_at*>(from));
    hvec x{};
    __builtin_memcpy(&x, from, count * 2);
    return widen_bf16(x);
  }
}

template <DType type>
inline void write(char* to, vec x, int64_t count = W) {
  if constexpr (type == DType::f32) {
    if (count >= W) return store(reinterpret_cast<float*>(to), x);
    __builtin_memcpy(to, &x, count * 4);
  } else {
    const hvec narrow = narrow_bf16(x);
    if (count >= W) {
      *reinterpret_cast<hvec_at*>(to) = narrow;
    } else {
      __builtin_memcpy(to, &narrow, count * 2);
    }
  }
}

// What is left of a number once it has been stored in this type.
template <DType type>
inline vec rounded(vec x) {
  if constexpr (type == DType::f32) return x;
  return widen_bf16(narrow_bf16(x));
}

inline float sum_of(vec x) {
  float lanes[W];
  store(lanes, x);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// exp(x) for x <= 0, to about 1 unit in the last place (the polynomial is that of Cephes' expf).
// Below the smallest normal result it is 0; NaN stays NaN.
inline vec exp_negative(vec x) {
  const vec bias = splat(0x1.8p23f);  // adding it rounds to an integer in the low mantissa bits
  const vec shifted = x * 0x1.715476p+0f + bias;
  const vec n = shifted - bias;
  const vec r = (x - n * 0x1.63p-1f) - n * -0x1.bd0106p-13f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const vec result = (p * (r * r) + r) + 1.0f;
  const vec power = (vec)(((ivec)shifted << 23) + 0x3f800000);
  return pick(x < -87.0f, vec{}, result * power);
}

// 2^x for x that is at most a rounding error above 0, to about 1 unit in the last place (a minimax
// polynomial of degree 5 on [-1/2, 1/2]). Results below the smallest normal number are 0 or
// subnormal; NaN stays NaN.
inline vec exp2_negative(vec x) {
#if defined(__AVX512F__)
  x = x < -200.0f ? splat(-200.0f) : x;
  const vec n = (vec)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const vec bias = splat(0x1.8p23f);
  const vec shifted = x + bias, n = shifted - bias;
#endif
  const vec r = x - n;
  vec p = r * 1.3276471782e-03f + 9.6755413328e-03f;
  p = p * r + 5.5507132741e-02f;
  p = p * r + 2.4022119724e-01f;
  p = p * r + 6.9314696706e-01f;
  p = p * r + 1.0000000717e+00f;
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  const vec power = (vec)(((ivec)shifted << 23) + 0x3f800000);
  return x < -126.0f ? vec{} : p * power;
#endif
}

// 1 / (1 + exp(-x))
inline vec sigmoid(vec x) {
  const vec e = exp_negative((vec)((ivec)x | (int32_t)0x80000000));  // of -|x|
  return pick(x < 0.0f, e, splat(1.0f)) / (1.0f + e);
}

// tanh(x); an odd polynomial near zero (Cephes' tanhf), where 1 - 2 / (exp(2x) + 1) would cancel.
inline vec tanh_of(vec x) {
  const vec magnitude = (vec)((ivec)x & 0x7fffffff);
  const vec e = exp_negative(magnitude * -2.0f);
  const vec far = (1.0f - e) / (1.0f + e);
  const vec square = x * x;
  vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const vec near = p * square * magnitude + magnitude;
  const vec result = pick(magnitude < 0.625f, near, far);
  return (vec)((ivec)result | ((ivec)x & (int32_t)0x80000000));
}

}  // namespace
}  // namespace weft
