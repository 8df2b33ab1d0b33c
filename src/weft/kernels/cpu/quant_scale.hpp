// Scales and zeros of packed integers, in vectors. All of it has internal linkage: see panel.cpp.
#pragma once

#include "quant.hpp"
#include "simd.hpp"

namespace weft {
namespace {

typedef uint8_t bvec __attribute__((vector_size(W)));
typedef bvec bvec_at __attribute__((aligned(1), may_alias));

inline vec to_float(ivec v) { return __builtin_convertvector(v, vec); }

inline vec load_scales(const uint8_t* block, DType type, int64_t column) {
  if (type == DType::f32) return load(reinterpret_cast<const float*>(block) + column);
  const auto* half = reinterpret_cast<const uint16_t*>(block) + column;
  return widen(*reinterpret_cast<const hvec_at*>(half), type);
}

// Of the columns from `column` on. Where a whole column has one scale, a group's is 1.
inline vec scales_of(const QuantWeight& weight, const uint8_t* block, int64_t column) {
  if (weight.column_scales != nullptr) return vec{} + 1.0f;
  return load_scales(block, weight.scale_type, column);
}
inline ivec zeros_of(const QuantWeight& weight, const uint8_t* block, int64_t column) {
  if (!weight.zeros) return ivec{} + (1 << (weight.bits - 1));
  const uint8_t* from = block + weight.zeros_at() + column;
  return __builtin_convertvector(*reinterpret_cast<const bvec_at*>(from), ivec);
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
