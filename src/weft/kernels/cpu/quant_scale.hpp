// Scales and zeros of packed integers, in vectors. All of it has internal linkage: see panel.cpp.
#pragma once

#include "quant.hpp"
#include "simd.hpp"

namespace weft {
namespace {

typedef uint8_t bvec __attribute__((vector_size(W)));
typedef bvec bvec_at __attribute__((aligned(1), may_alias));

inline vec to_float(ivec v) { return __builtin_convertvector(v, vec); }

WEFT_INLINED vec load_scales(const uint8_t* block, DType type, int64_t column) {
  if (type == DType::f32) return load(reinterpret_cast<const float*>(block) + column);
  const auto* half = reinterpret_cast<const uint16_t*>(block) + column;
  return widen(*reinterpret_cast<const hvec_at*>(half), type);
}

// Bytes as integers; compilers would convert them one by one.
inline ivec widen_unsigned(const uint8_t* from) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(*reinterpret_cast<const bvec_at*>(from), ivec);
#endif
}
inline ivec widen_signed(const uint8_t* from) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return (widen_unsigned(from) ^ 128) - 128;
#endif
}

// Of the columns from `column` on. Where a whole column has one scale, a group's is 1.
WEFT_INLINED vec scales_of(const QuantWeight& weight, const uint8_t* block, int64_t column) {
  if (weight.column_scales != nullptr) return vec{} + 1.0f;
  return load_scales(block, weight.scale_type, column);
}
WEFT_INLINED vec minimums_of(const QuantWeight& weight, const uint8_t* block, int64_t column) {
  return load_scales(block + weight.minimums_at(), weight.scale_type, column);
}

// What the columns of a nest are multiplied by, from `column` on.
template <bool minimums>
struct NestScales {
  vec scale, minimum;

  NestScales(const uint8_t* head, int64_t column) : scale(load_scales(head, DType::f16, column)) {
    if constexpr (minimums) {
      minimum = load_scales(head + 2 * quant_columns, DType::f16, column);
    }
  }
  // The sum of products with codes and steps, and that with the steps of minimums, of a row.
  vec of(ivec sum, vec minimum_sum, float row_scale) const {
    const vec factor = splat(row_scale);
    const vec more = to_float(sum) * (scale * factor);
    if constexpr (!minimums) return more;
    return more - minimum_sum * (minimum * factor);
  }
};
inline ivec zeros_of(const QuantWeight& weight, const uint8_t* block, int64_t column) {
  if (!weight.zeros) return ivec{} + weight.centre();
  return widen_unsigned(block + weight.zeros_at() + column);
}

// Where whole columns have scales, these are what a product ends with.
inline void scale_columns(const QuantWeight& weight, int64_t panel, int64_t count, float* out,
                          int64_t out_stride, int64_t begin = 0, int64_t end = quant_columns) {
  if (weight.column_scales == nullptr) return;
  const float* scales = weight.column_scales + panel * quant_columns;
  for (int64_t r = 0; r < count; ++r) {
    float* row = out + r * out_stride;
    for (int64_t c = begin; c < end; c += W) store(row + c, load(row + c) * load(scales + c));
  }
}

}  // namespace
}  // namespace weft
