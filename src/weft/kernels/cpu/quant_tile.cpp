// The inner loops of products with quantised weights. Compiled once per instruction set, by the
// rules of tile.cpp.
#include "quant.hpp"
#include "simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft {
namespace {

typedef uint8_t bvec __attribute__((vector_size(W)));
typedef ivec ivec_at __attribute__((aligned(4), may_alias));
typedef bvec bvec_at __attribute__((aligned(1), may_alias));

inline ivec load_bytes(const uint8_t* p) { return *reinterpret_cast<const ivec_at*>(p); }
inline vec to_float(ivec v) { return __builtin_convertvector(v, vec); }

// sums + the product of four unsigned bytes of w and four signed bytes of x in each lane, exactly.
inline ivec dot(ivec sums, ivec w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#else
  const int32_t x0 = static_cast<int8_t>(x), x1 = static_cast<int8_t>(x >> 8);
  const int32_t x2 = static_cast<int8_t>(x >> 16), x3 = x >> 24;
#if defined(__x86_64__)
  // Sums of pairs of 16-bit products: those of the even bytes, and those of the odd ones.
  const int32_t low = (x0 & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(x2) << 16);
  const int32_t high = (x1 & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(x3) << 16);
  const ivec w_low = w & 0x00ff00ff, w_high = (ivec)((uvec)w >> 8) & 0x00ff00ff;
#if defined(__AVX512BW__)
  return sums + (ivec)_mm512_madd_epi16((__m512i)w_low, _mm512_set1_epi32(low)) +
         (ivec)_mm512_madd_epi16((__m512i)w_high, _mm512_set1_epi32(high));
#elif defined(__AVX2__)
  return sums + (ivec)_mm256_madd_epi16((__m256i)w_low, _mm256_set1_epi32(low)) +
         (ivec)_mm256_madd_epi16((__m256i)w_high, _mm256_set1_epi32(high));
#else
  return sums + (ivec)_mm_madd_epi16((__m128i)w_low, _mm_set1_epi32(low)) +
         (ivec)_mm_madd_epi16((__m128i)w_high, _mm_set1_epi32(high));
#endif
#else
  return sums + (w & 255) * x0 + (ivec)((uvec)w >> 8 & 255) * x1 +
         (ivec)((uvec)w >> 16 & 255) * x2 + (ivec)((uvec)w >> 24) * x3;
#endif
#endif
}

inline vec load_scales(const uint8_t* block, DType type, int64_t column) {
  if (type == DType::f32) return load(reinterpret_cast<const float*>(block) + column);
  const auto* half = reinterpret_cast<const uint16_t*>(block) + column;
  return widen(*reinterpret_cast<const hvec_at*>(half), type);
}

constexpr int V = 4;  // vectors of columns at a time

// R rows times V vectors of columns of one panel, from `column` on.
template <int R, int bits>
void multiply_tile(const QuantWeight& weight, const uint8_t* block, int64_t column,
                   const QuantRows& rows, int64_t first, float* out, int64_t out_stride) {
  const int64_t groups = weight.groups(), row_bytes = groups * weight.group;
  const int64_t block_bytes = weight.block_bytes();
  const int64_t zeros_at = weight.zeros_at(), values_at = weight.values_at() + 4 * column;
  const int8_t* x = rows.values + first * row_bytes;
  const float* x_scales = rows.scales + first * groups;
  const int32_t* x_sums = rows.sums + first * groups;
  vec sums[R][V] = {};
  for (int64_t g = 0; g < groups; ++g, block += block_bytes, x += weight.group) {
    ivec part[R][V];
    for (int v = 0; v < V; ++v) {
      ivec zero = ivec{} + (1 << (bits - 1));
      if (weight.zeros) {
        const uint8_t* from = block + zeros_at + column + v * W;
        zero = __builtin_convertvector(*reinterpret_cast<const bvec_at*>(from), ivec);
      }
      for (int r = 0; r < R; ++r) part[r][v] = zero * -x_sums[r * groups + g];
    }
    const uint8_t* from = block + values_at;
    for (int64_t k = 0; k < weight.group; k += 32 / bits, from += 4 * quant_columns) {
      for (int v = 0; v < V; ++v) {
        const ivec w = load_bytes(from + 4 * W * v);
        for (int r = 0; r < R; ++r) {
          int32_t four[8 / bits];
          __builtin_memcpy(four, x + r * row_bytes + k, sizeof four);
          if constexpr (bits == 8) {
            part[r][v] = dot(part[r][v], w, four[0]);
          } else {
            part[r][v] = dot(part[r][v], w & 0x0f0f0f0f, four[0]);
            part[r][v] = dot(part[r][v], (ivec)((uvec)w >> 4) & 0x0f0f0f0f, four[1]);
          }
        }
      }
    }
    for (int v = 0; v < V; ++v) {
      const bool own = weight.column_scales == nullptr;
      const vec scale = own ? load_scales(block, weight.scale_type, column + v * W) : vec{} + 1.0f;
      for (int r = 0; r < R; ++r) {
        sums[r][v] += to_float(part[r][v]) * (scale * x_scales[r * groups + g]);
      }
    }
  }
  for (int v = 0; v < V; ++v) {
    for (int r = 0; r < R; ++r) store(out + r * out_stride + v * W, sums[r][v]);
  }
}

template <int R>
void multiply_rows(const QuantWeight& weight, int64_t panel, const QuantRows& rows, int64_t first,
                   float* out, int64_t out_stride) {
  const uint8_t* block = weight.blocks + panel * weight.panel_bytes();
  for (int64_t column = 0; column < quant_columns; column += V * W) {
    if (weight.bits == 8) {
      multiply_tile<R, 8>(weight, block, column, rows, first, out + column, out_stride);
    } else {
      multiply_tile<R, 4>(weight, block, column, rows, first, out + column, out_stride);
    }
  }
  if (weight.column_scales == nullptr) return;
  const float* scales = weight.column_scales + panel * quant_columns;
  for (int r = 0; r < R; ++r) {
    float* row = out + r * out_stride;
    for (int64_t c = 0; c < quant_columns; c += W) store(row + c, load(row + c) * load(scales + c));
  }
}

#if defined(__AVX512F__)
constexpr int64_t most_rows = 6;  // 24 sums of the 32 registers
#else
constexpr int64_t most_rows = 2;
#endif

void multiply(const QuantWeight& weight, int64_t panel, const QuantRows& rows, int64_t first,
              int64_t count, float* out, int64_t out_stride) {
  while (count > 0) {
    const int64_t n = count < most_rows ? count : most_rows;
    switch (n) {
      case 1: multiply_rows<1>(weight, panel, rows, first, out, out_stride); break;
      case 2: multiply_rows<2>(weight, panel, rows, first, out, out_stride); break;
#if defined(__AVX512F__)
      case 3: multiply_rows<3>(weight, panel, rows, first, out, out_stride); break;
      case 4: multiply_rows<4>(weight, panel, rows, first, out, out_stride); break;
      case 5: multiply_rows<5>(weight, panel, rows, first, out, out_stride); break;
      case 6: multiply_rows<6>(weight, panel, rows, first, out, out_stride); break;
#endif
    }
    first += n, count -= n, out += n * out_stride;
  }
}

// Rounds to the nearest integer, halves to even: adding 1.5 * 2^23 leaves no bits for fractions.
inline ivec nearest(vec x) { return (ivec)(x + 0x1.8p23f) - 0x4b400000; }

void round_group(const float* x, int64_t group, int8_t* values, float* scale, int32_t* total) {
  uvec largest{};
  for (int64_t k = 0; k < group; k += W) {
    const uvec magnitude = (uvec)load(x + k) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;  // ordered as the floats are; NaN on top
  }
  uint32_t top = 0;
  for (int i = 0; i < W; ++i) top = largest[i] > top ? largest[i] : top;
  const float most = __builtin_bit_cast(float, top);
  if (top >= 0x7f800000u || most < 0x1p-100f) {  // not finite, or nothing
    *scale = top >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
    *total = 0;
    __builtin_memset(values, 0, group);
    return;
  }
  *scale = most / 127.0f;
  const float inverse = 127.0f / most;
  ivec sums{};
  for (int64_t k = 0; k < group; k += W) {
    const ivec rounded = nearest(load(x + k) * inverse);
    sums += rounded;
    const bvec bytes = __builtin_convertvector((uvec)rounded, bvec);
    __builtin_memcpy(values + k, &bytes, W);
  }
  int32_t sum = 0;
  for (int i = 0; i < W; ++i) sum += sums[i];
  *total = sum;
}

void round_row(const QuantWeight& weight, const char* x, DType type, int64_t row,
               const QuantRows& rows) {
  const int64_t groups = weight.groups(), group = weight.group;
  constexpr int64_t longest = 256;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = row * groups + g, left = weight.depth - g * group;
    const int64_t count = left < group ? left : group;
    alignas(64) float numbers[longest];
    const char* from = x + g * group * size_of(type);
    if (type == DType::f32) {
      __builtin_memcpy(numbers, from, count * 4);
    } else {
      for (int64_t k = 0; k < count; ++k) {
        uint16_t half;
        __builtin_memcpy(&half, from + 2 * k, 2);
        numbers[k] = __builtin_bit_cast(float, uint32_t{half} << 16);
      }
    }
    for (int64_t k = count; k < group; ++k) numbers[k] = 0.0f;
    round_group(numbers, group, rows.values + at * group, rows.scales + at, rows.sums + at);
  }
}

// ---- weights ----

// Sums of a few lanes each, which are alike however wide a vector is.
constexpr int lanes = 16;

float sum_of(const vec* v) {
  float all[lanes], sum = 0.0f;
  __builtin_memcpy(all, v, sizeof all);
  for (int i = 0; i < lanes; ++i) sum += all[i];
  return sum;
}

inline ivec clamp(ivec q, int32_t low, int32_t high) {
  q = q < low ? ivec{} + low : q;
  return q > high ? ivec{} + high : q;
}

// The squared error of `count` numbers (a multiple of 16) rounded to multiples of a scale.
float error_of(const float* x, int64_t count, float scale, int32_t low, int32_t high) {
  const float inverse = 1.0f / scale;
  vec sums[lanes / W] = {};
  for (int64_t k = 0; k < count; k += lanes) {
    for (int i = 0; i < lanes / W; ++i) {
      const vec v = load(x + k + i * W);
      const vec off = v - to_float(clamp(nearest(v * inverse), low, high)) * scale;
      sums[i] += off * off;
    }
  }
  return sum_of(sums);
}

inline float as_bf16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return __builtin_bit_cast(float, (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

void extremes(const float* x, int64_t count, float* least, float* most) {
  *least = *most = 0.0f;
  for (int64_t k = 0; k < count; ++k) {
    *least = x[k] < *least ? x[k] : *least;
    *most = x[k] > *most ? x[k] : *most;
  }
}

// With 8 bits the largest number is 127 steps. With 4 it is -8 steps, whatever its sign, or more
// than that if cutting it off makes the squared error of the group smaller.
float scale_of(const float* x, int64_t count, int bits) {
  float least, most;
  extremes(x, count, &least, &most);
  const float largest = most >= -least ? most : least;
  if (bits == 8) return (largest < 0.0f ? -largest : largest) / 127.0f;
  constexpr int candidates = 16;
  float best = 0.0f, smallest = 0.0f;
  for (int i = 0; i < candidates; ++i) {
    const float scale = as_bf16(largest * (1.0f - 0.025f * static_cast<float>(i)) / -8.0f);
    if (scale == 0.0f) break;
    const float error = error_of(x, count, scale, -8, 7);
    if (i > 0 && !(error < smallest)) continue;
    best = scale;
    smallest = error;
  }
  return best;
}

void round_weights(const float* x, int64_t depth, int64_t group, int bits, uint8_t* values,
                   float* scales) {
  const int32_t zero = 1 << (bits - 1);
  const int32_t low = bits == 8 ? -127 : -8, high = bits == 8 ? 127 : 7;
  for (int64_t start = 0; start < depth; start += group) {
    const int64_t count = depth - start < group ? depth - start : group;
    const float scale = scale_of(x + start, count, bits);
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    scales[start / group] = scale;
    for (int64_t k = 0; k < count; k += W) {
      const ivec q = clamp(nearest(load(x + start + k) * inverse), low, high) + zero;
      const bvec bytes = __builtin_convertvector((uvec)q, bvec);
      __builtin_memcpy(values + start + k, &bytes, W);
    }
  }
}

}  // namespace

#define WEFT_JOIN(a, b) a##b
#define WEFT_TABLE(isa) WEFT_JOIN(quant_kernels_, isa)

extern const QuantKernels WEFT_TABLE(WEFT_ISA);
const QuantKernels WEFT_TABLE(WEFT_ISA) = {round_row, multiply, round_weights};

}  // namespace weft
