// The inner loops of products with quantised weights. Compiled once per instruction set, by the
// rules of tile.cpp.
#include "quant_dot.hpp"
#include "quant_scale.hpp"

namespace weft {
namespace {

// The lowest bytes; compilers would take them out one by one.
inline bvec narrow_bytes(ivec x) {
#if defined(__AVX512F__)
  return (bvec)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  const __m128i first = _mm_cvtsi32_si128(0x0c080400);
  const __m256i fours = _mm256_shuffle_epi8((__m256i)x, _mm256_broadcastd_epi32(first));
  const __m128i all = _mm_unpacklo_epi32(_mm256_castsi256_si128(fours),
                                         _mm256_extracti128_si256(fours, 1));
  bvec bytes;
  __builtin_memcpy(&bytes, &all, sizeof bytes);
  return bytes;
#else
  return __builtin_convertvector((uvec)x, bvec);
#endif
}

// Most rows of a tile, and its columns in vectors: what the registers hold.
constexpr int tile_rows = 6;
template <int rows>
constexpr int tile_vectors = W == 16 ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : 2;
constexpr int slice_vectors = quant_slice / W;

// One group of inputs of a panel, or all of a nest, and a tile of rows.
struct GroupTile {
  const QuantWeight& weight;
  const uint8_t* head;   // of the nest
  const uint8_t* block;  // of the first group
  bool first;       // group or nest of the panel: the sums begin with it
  bool fetches;     // what comes after the block
  const int8_t* x;  // as `Dot` takes it
  int64_t x_stride;
  const float* scales;   // of the rows, [rows][groups]
  const int32_t* sums;   // of their values, likewise
  float* out;
  int64_t out_stride;
  int64_t slice;         // of the columns; -1: all of them
};

// What the sums of a group begin with: the rows' sums, times the zeros.
template <int rows, int vectors>
inline void begin_sums(const GroupTile& t, int64_t column, int64_t groups,
                       ivec (&part)[rows][vectors]) {
  if (!t.weight.zeros) {
    const int centre = t.weight.centre();
    for (int r = 0; r < rows; ++r) {
      const ivec begin = ivec{} - t.sums[r * groups] * centre;
      for (int v = 0; v < vectors; ++v) part[r][v] = begin;
    }
    return;
  }
  for (int v = 0; v < vectors; ++v) {
    const ivec zero = zeros_of(t.weight, t.block, column + v * W);
    for (int r = 0; r < rows; ++r) part[r][v] = zero * -t.sums[r * groups];
  }
}

// The sums of a group, scaled, to those of the groups before.
template <int rows, int vectors, bool own_scales, bool minimums>
inline void add_sums(const GroupTile& t, int64_t column, int64_t groups,
                     const ivec (&part)[rows][vectors]) {
  vec scale[vectors], minimum[vectors];
  for (int v = 0; v < vectors; ++v) {
    if constexpr (own_scales) scale[v] = scales_of(t.weight, t.block, column + v * W);
    if constexpr (minimums) minimum[v] = minimums_of(t.weight, t.block, column + v * W);
  }
  float* to = t.out + column;
  const int64_t stride = t.out_stride;
  const float* scales = t.scales;
  const bool first = t.first;
  for (int r = 0; r < rows; ++r, to += stride, scales += groups) {
    const vec factor = splat(*scales);
    const vec total = splat(*scales * static_cast<float>(t.sums[r * groups]));
    for (int v = 0; v < vectors; ++v) {
      const vec sum = first ? vec{} : load(to + v * W);
      vec more = to_float(part[r][v]) * (own_scales ? scale[v] * factor : factor);
      if constexpr (minimums) more = more - minimum[v] * total;
      store(to + v * W, sum + more);
    }
  }
}

// The sums of a group, times the steps of its scales, to those of the nest; and the row's times the
// steps of its minimums, which are integers below 2^24 and so exact.
template <int rows, int vectors, bool minimums>
inline void add_to_nest(const GroupTile& t, int64_t column, int64_t groups,
                        const ivec (&part)[rows][vectors], ivec (&sums)[rows][vectors],
                        vec (&lows)[rows][vectors]) {
  for (int v = 0; v < vectors; ++v) {
    const ivec step = widen_signed(t.block + column + v * W);
    for (int r = 0; r < rows; ++r) sums[r][v] += part[r][v] * step;
    if constexpr (minimums) {
      const uint8_t* steps = t.block + t.weight.minimums_at() + column + v * W;
      const vec minimum = to_float(widen_signed(steps));
      for (int r = 0; r < rows; ++r) {
        lows[r][v] += minimum * splat(static_cast<float>(t.sums[r * groups]));
      }
    }
  }
}

// The sums of a nest, scaled, to those of the nests before.
template <int rows, int vectors, bool minimums>
inline void add_nest(const GroupTile& t, int64_t column, int64_t groups,
                     const ivec (&sums)[rows][vectors], const vec (&lows)[rows][vectors]) {
  for (int v = 0; v < vectors; ++v) {
    const NestScales<minimums> scales(t.head, column + v * W);
    for (int r = 0; r < rows; ++r) {
      float* to = t.out + r * t.out_stride + column + v * W;
      const vec more = scales.of(sums[r][v], lows[r][v], t.scales[r * groups]);
      store(to, (t.first ? vec{} : load(to)) + more);
    }
  }
}

// The products of a group.
template <int rows, Code code, bool slice, int vectors>
inline void add_products(const GroupTile& t, int64_t column, ivec (&part)[rows][vectors]) {
  using D = Dot<code>;
  constexpr int64_t line_bytes = vectors * 4 * W;
  // What a step reads: whole lines of all columns.
  constexpr int64_t step_lines = code.bits == 8 ? 1 : code.step_inputs() / 8 + (code.bits != 4);
  constexpr int64_t step_bytes = step_lines * 4 * quant_columns;
  const int64_t steps = t.weight.group / code.step_inputs();
  const CodePlaces from = places_of(t.weight, t.block, column);
  // Several passes over the columns of a block fetch the next one in order; a single pass leaves that
  // to the machine, and a slice fetches its own lines.
  constexpr bool whole = line_bytes == 4 * quant_columns;
  // But one row, which runs at the memory's pace, is faster with help from afar: by 5% with 8 bits,
  // and with AVX2 by a sixth with fewer; with AVX-512 these are 15% slower.
  constexpr bool lone = whole && rows == 1 && (code.bits == 8 || W < 16);
  constexpr int64_t lone_bytes = 4 << 10;
  const uint8_t* ahead = slice ? from.low + t.weight.block_bytes()
                               : t.block + t.weight.block_bytes() +
                                     column * 4 * step_lines * steps;
  constexpr int64_t ahead_step = slice ? step_bytes : step_lines * line_bytes;
  if (lone) {  // what stands before the codes
    const uint8_t* far = t.block + lone_bytes;
    for (; far < from.low + lone_bytes; far += 64) __builtin_prefetch(far, 0, 2);
  }
  for (int64_t step = 0; step < steps; ++step, ahead += ahead_step) {
    if (t.fetches && !whole) {
      for (int64_t line = 0; line < step_lines; ++line) {
        const uint8_t* at = ahead + line * (slice ? 4 * quant_columns : line_bytes);
        for (int64_t i = 0; i < line_bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
      }
    }
    if (lone) {
      const uint8_t* far = from.low + step * step_bytes + lone_bytes;
      for (int64_t i = 0; i < step_bytes; i += 64) __builtin_prefetch(far + i, 0, 2);
    }
#pragma GCC unroll 16
    for (int term = 0; term < D::terms; ++term) {
      typename D::Weights w[vectors];
      for (int v = 0; v < vectors; ++v) w[v] = D::weights(from, step, term, v);
      for (int r = 0; r < rows; ++r) {
        const typename D::Input in = D::input(t.x + r * t.x_stride, step, term);
        for (int v = 0; v < vectors; ++v) part[r][v] = D::add(part[r][v], w[v], in);
      }
    }
  }
}

// `rows` rows by tile_vectors of columns from `column` on, or by a slice.
template <int rows, Code code, bool slice>
void multiply_columns(const GroupTile& t, int64_t column) {
  constexpr int vectors = slice ? slice_vectors : tile_vectors<rows>;
  const int64_t groups = t.weight.groups();
  ivec part[rows][vectors];
  begin_sums<rows>(t, column, groups, part);
  add_products<rows, code, slice>(t, column, part);
  if (t.weight.minimums) {
    add_sums<rows, vectors, true, true>(t, column, groups, part);
  } else if (t.weight.column_scales == nullptr) {
    add_sums<rows, vectors, true, false>(t, column, groups, part);
  } else {
    add_sums<rows, vectors, false, false>(t, column, groups, part);
  }
}

// The same of a nest, group by group.
template <int rows, Code code, bool slice, bool minimums>
void multiply_nest(const GroupTile& t, int64_t column) {
  constexpr int vectors = slice ? slice_vectors : tile_vectors<rows>;
  const int64_t groups = t.weight.groups(), together = t.weight.nest_groups();
  ivec sums[rows][vectors] = {};
  vec lows[rows][vectors] = {};
  GroupTile group = t;
  for (int64_t i = 0; i < together; ++i) {
    ivec part[rows][vectors];
    begin_sums<rows>(group, column, groups, part);
    add_products<rows, code, slice>(group, column, part);
    add_to_nest<rows, vectors, minimums>(group, column, groups, part, sums, lows);
    group.block += t.weight.block_bytes();
    group.x += t.weight.group;
    ++group.sums;
  }
  add_nest<rows, vectors, minimums>(t, column, groups, sums, lows);
}

template <int rows, bool slice>
void multiply_rows(const GroupTile& tile) {
  const int64_t begin = slice ? tile.slice * quant_slice : 0;
  const int64_t end = slice ? begin + quant_slice : quant_columns;
  with_code(tile.weight, [&]<Code code>() {
    for (int64_t column = begin; column < end; column += tile_vectors<rows> * W) {
      if (!tile.weight.nested) {
        multiply_columns<rows, code, slice>(tile, column);
      } else if constexpr (code.bits != 8) {
        (tile.weight.minimums ? multiply_nest<rows, code, slice, true>
                              : multiply_nest<rows, code, slice, false>)(tile, column);
      }
      if (slice) return;
    }
  });
}

using MultiplyRows = void (*)(const GroupTile&);
template <bool slice>
constexpr MultiplyRows row_tiles[] = {
    multiply_rows<1, slice>, multiply_rows<2, slice>, multiply_rows<3, slice>,
    multiply_rows<4, slice>, multiply_rows<5, slice>, multiply_rows<6, slice>,
};

template <bool sliced>
void multiply_panel(const QuantWeight& weight, int64_t panel, int64_t slice, const QuantRows& rows,
                    int64_t first, int64_t count, float* out, int64_t out_stride) {
  const int64_t groups = weight.groups(), group = weight.group;
  const int64_t together = weight.nested ? weight.nest_groups() : 1;
  const int64_t tiles = (count + tile_rows - 1) / tile_rows;
  bool spreads = false;
  with_code(weight, [&]<Code code>() { spreads = Dot<code>::spread; });
  QuantBlocks block(weight, panel);
  for (int64_t g = 0; g < groups; g += together) {
    for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
      const int64_t left = tiles - tile, n = (count - row + left - 1) / left;
      const int64_t at = (first + row) * groups + g;
      GroupTile t{weight, block.head, block.block, g == 0, tile == 0, rows.values + at * group,
                  groups * group, rows.scales + at, rows.sums + at, out + row * out_stride,
                  out_stride, slice};
      alignas(64) int8_t spread[tile_rows][2 * longest_group];
      if (spreads) {
        for (int64_t r = 0; r < n; ++r) {
          spread_row(t.x + r * t.x_stride, together * group, spread[r]);
        }
        t.x = spread[0];
        t.x_stride = sizeof spread[0];
      }
      row_tiles<sliced>[n - 1](t);
      row += n;
    }
    for (int64_t i = 0; i < together; ++i) block.next();
  }
  const int64_t begin = sliced ? slice * quant_slice : 0;
  const int64_t end = sliced ? begin + quant_slice : quant_columns;
  scale_columns(weight, panel, count, out, out_stride, begin, end);
}

void multiply(const QuantWeight& weight, int64_t panel, const QuantRows& rows, int64_t first,
              int64_t count, float* out, int64_t out_stride) {
  multiply_panel<false>(weight, panel, -1, rows, first, count, out, out_stride);
}

// Rounds to the nearest integer, halves to even: adding 1.5 * 2^23 leaves no bits for fractions.
inline ivec nearest(vec x) { return (ivec)(x + 0x1.8p23f) - 0x4b400000; }

// Rounds so many numbers by one scale, which all of their groups have.
void round_groups(const float* x, int64_t count, int64_t group, int8_t* values, float* scales,
                  int32_t* totals) {
  uvec largest{};
  for (int64_t k = 0; k < count; k += W) {
    const uvec magnitude = (uvec)load(x + k) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;  // ordered as the floats are; NaN on top
  }
  uint32_t top = 0;
  for (int i = 0; i < W; ++i) top = largest[i] > top ? largest[i] : top;
  const float most = __builtin_bit_cast(float, top);
  const bool finite = top < 0x7f800000u, none = !finite || most < 0x1p-100f;
  const float inverse = 127.0f / most;
  for (int64_t start = 0; start < count; start += group, ++scales, ++totals) {
    *scales = !finite ? __builtin_nanf("") : none ? 0.0f : most / 127.0f;
    *totals = 0;
    if (none) continue;
    ivec sums{};
    for (int64_t k = start; k < start + group; k += W) {
      const ivec rounded = nearest(load(x + k) * inverse);
      sums += rounded;
      const bvec bytes = narrow_bytes(rounded);
      __builtin_memcpy(values + k, &bytes, W);
    }
    for (int i = 0; i < W; ++i) *totals += sums[i];
  }
  if (none) __builtin_memset(values, 0, count);
}

void round_row(const QuantWeight& weight, const char* x, DType type, int64_t row,
               const QuantRows& rows) {
  const int64_t groups = weight.groups(), group = weight.group;
  const int64_t together = weight.nested ? weight.nest_groups() : 1, span = together * group;
  for (int64_t g = 0; g < groups; g += together) {
    const int64_t at = row * groups + g, left = weight.depth - g * group;
    const int64_t count = left < span ? left : span;
    alignas(64) float numbers[longest_group];
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
    for (int64_t k = count; k < span; ++k) numbers[k] = 0.0f;
    round_groups(numbers, span, group, rows.values + at * group, rows.scales + at, rows.sums + at);
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
      const bvec bytes = narrow_bytes(q);
      __builtin_memcpy(values + start + k, &bytes, W);
    }
  }
}

}  // namespace

#define WEFT_JOIN(a, b) a##b
#define WEFT_TABLE(isa) WEFT_JOIN(quant_kernels_, isa)

extern const QuantKernels WEFT_TABLE(WEFT_ISA);
const QuantKernels WEFT_TABLE(WEFT_ISA) = {round_row, multiply, multiply_panel<true>, round_weights};

}  // namespace weft
