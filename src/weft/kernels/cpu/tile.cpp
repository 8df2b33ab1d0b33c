// Compiled once per instruction set (CMakeLists.txt), with WEFT_ISA naming it. Nothing here may be
// an inline function or template of another header that the linker could share between the copies:
// code compiled for a newer machine would then run on an older one. So: no standard library beyond
// types, and everything but the exported table has internal linkage.
//
// The vectors are GCC/Clang vector extensions as wide as the instruction set's registers.
#include "tile.hpp"

#include <utility>

#include "tensor.hpp"

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
typedef hvec hvec_at __attribute__((aligned(2), may_alias));

constexpr float infinity = __builtin_inff();

inline vec load(const float* p) { return *reinterpret_cast<const vec_at*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<vec_at*>(p) = v; }
inline vec splat(float x) { return x - vec{}; }
inline vec pick(ivec condition, vec yes, vec no) {
  return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}
inline vec max(vec a, vec b) { return pick(a > b, a, b); }  // a NaN in a is passed over

// ---- numbers of 16 bits ----

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t x) { return __builtin_bit_cast(float, x); }

inline float widen_bf16(uint16_t x) { return float_of(uint32_t{x} << 16); }

// Exponent and mantissa are shifted into place and the bias is corrected by a multiplication,
// which also normalises subnormals; infinity and NaN keep the largest exponent.
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

inline vec widen(hvec x, DType type) {
  const uvec wide = __builtin_convertvector(x, uvec);
  if (type == DType::bf16) return (vec)(wide << 16);
  const uvec magnitude = wide & 0x7fffu;
  const uvec scaled = (uvec)((vec)(magnitude << 13) * 0x1p112f);
  const uvec special = (uvec)(magnitude >= 0x7c00u) & 0x7f800000u;
  return (vec)(scaled | special | (wide & 0x8000u) << 16);
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

// `count` numbers as floats, then zeros up to `width`.
void read_row(const char* from, DType type, float* to, int64_t count, int64_t width) {
  if (type == DType::f32) {
    __builtin_memcpy(to, from, count * sizeof(float));
  } else if (type == DType::bf16) {
    widen_row<DType::bf16>(from, to, count);
  } else {
    widen_row<DType::f16>(from, to, count);
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

// ---- sums over lanes ----

template <int... I>
inline vec shuffle(vec a, vec b, std::integer_sequence<int, I...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, ivec{I...});
#endif
}

// Halve `segments` equal runs of lanes, those of a and then those of b: each run's lower half comes
// from `offset` 0, its upper half from `offset` run / 2.
template <int segments, int offset, int... I>
inline auto halves(std::integer_sequence<int, I...>) {
  constexpr int run = W / segments, half = run / 2;
  return std::integer_sequence<int, (I / half * run + I % half + offset)...>{};
}

template <int segments>
inline vec fold(vec a, vec b) {
  constexpr std::make_integer_sequence<int, W> lanes{};
  constexpr int half = W / segments / 2;
  return shuffle(a, b, halves<segments, 0>(lanes)) + shuffle(a, b, halves<segments, half>(lanes));
}

// The sums of four vectors, always added up in the same tree: halves, quarters, ...
inline void sum_four(const vec* v, float* out) {
  vec sums = fold<2>(fold<1>(v[0], v[1]), fold<1>(v[2], v[3]));  // W / 4 lanes for each of the four
  if constexpr (W >= 8) sums = fold<4>(sums, sums);              // then twice W / 8 lanes for each
  if constexpr (W >= 16) sums = fold<8>(sums, sums);             // then four times one lane
  for (int i = 0; i < 4; ++i) out[i] = sums[i];
}

inline float sum(vec v) {
  const vec four[4] = {v, v, v, v};
  float sums[4];
  sum_four(four, sums);
  return sums[0];
}

// ---- functions ----

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

// ---- attention ----

struct Scratch {
  float* queries;  // [tile_queries][width]
  float* scores;   // [tile_queries][split_keys]
  float* rows;     // [group_keys][width]
  float* zeros;    // [width]
  Partial split;
};

Scratch divide(float* memory, int64_t width) {
  float* scores = memory + tile_queries * width;
  float* rows = scores + tile_queries * split_keys;
  float* zeros = rows + group_keys * width;
  for (int64_t i = 0; i < width; ++i) zeros[i] = 0.0f;
  return {memory, scores, rows, zeros, partial_at(zeros + width, tile_queries)};
}

void clear(const Partial& sums, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) sums.largest[i] = -infinity;
  __builtin_memset(sums.total, 0, count * sizeof(float));
  __builtin_memset(sums.values, 0, count * width * sizeof(float));
}

inline float exp_one(float x) { return exp_negative(splat(x))[0]; }

void merge(const Partial& into, const Partial& from, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    if (from.total[i] == 0.0f) continue;  // saw no key
    const bool larger = from.largest[i] > into.largest[i];
    const float largest = larger ? from.largest[i] : into.largest[i];
    const float old_scale = exp_one(into.largest[i] - largest);
    const float new_scale = exp_one(from.largest[i] - largest);
    into.largest[i] = largest;
    into.total[i] = into.total[i] * old_scale + from.total[i] * new_scale;
    float* sums = into.values + i * width;
    const float* add = from.values + i * width;
    for (int64_t d = 0; d < width; d += W) {
      store(sums + d, load(sums + d) * old_scale + load(add + d) * new_scale);
    }
  }
}

void finish(const Tile& tile, const Partial& sums) {
  const int64_t width = padded(tile.head_size, W);
  for (int64_t i = 0; i < tile.count; ++i) {
    float* values = sums.values + i * width;
    for (int64_t d = 0; d < width; d += W) store(values + d, load(values + d) / sums.total[i]);
    const int64_t vector = tile.first + i;
    char* out = tile.out + vector / tile.group * tile.out_token_bytes +
                vector % tile.group * tile.out_head_bytes;
    write_row(values, out, tile.type, tile.head_size);
  }
}

void read_queries(const Tile& tile, float* queries, int64_t width) {
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t vector = tile.first + i;
    const char* q = tile.q + vector / tile.group * tile.q_token_bytes +
                    vector % tile.group * tile.q_head_bytes;
    read_row(q, tile.type, queries + i * width, tile.head_size, width);
  }
}

// Float rows of the keys (or values) at positions start .. start + group_keys. Positions outside
// [lo, hi) are not read, since no query of the tile sees them and nothing may stand there: zeros.
void read_group(const Tile& tile, const KVHead& head, int64_t start, int64_t lo, int64_t hi,
                const Scratch& scratch, const float** rows) {
  const int64_t width = padded(tile.head_size, W);
  const bool in_place = head.type == DType::f32 && width == tile.head_size;
  const int64_t from = start < lo ? lo : start;
  const int64_t to = start + group_keys < hi ? start + group_keys : hi;
  for (int64_t j = 0; j < group_keys; ++j) rows[j] = scratch.zeros;
  int64_t block = from / tile.block_size, offset = from % tile.block_size;
  for (int64_t position = from; position < to; ++position) {
    const char* row =
        head.data + tile.table[block] * head.block_bytes + offset * head.offset_bytes;
    const int64_t j = position - start;
    if (in_place) {
      rows[j] = reinterpret_cast<const float*>(row);
    } else {
      read_row(row, head.type, scratch.rows + j * width, tile.head_size, width);
      rows[j] = scratch.rows + j * width;
    }
    if (++offset == tile.block_size) {
      offset = 0;
      ++block;
    }
  }
}

// Dot products of Q queries with the keys of a group. Each is summed in the same order for any Q.
template <int Q>
void dot_group(const float* queries, int64_t width, const float* const* keys, float* scores) {
  for (int64_t j = 0; j < group_keys; j += 4) {
    vec sums[Q][4] = {};
    for (int64_t d = 0; d < width; d += W) {
      for (int k = 0; k < 4; ++k) {
        const vec key = load(keys[j + k] + d);
        for (int i = 0; i < Q; ++i) sums[i][k] += load(queries + i * width + d) * key;
      }
    }
    for (int i = 0; i < Q; ++i) sum_four(sums[i], scores + i * split_keys + j);
  }
}

// Add C vectors' width of the values of a group, weighted, to the sums of Q queries.
template <int Q, int C>
void add_values(const float* weights, const float* const* values, int64_t d, int64_t width,
                float* into) {
  vec sums[Q][C];
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) sums[i][c] = load(into + i * width + d + c * W);
  }
  for (int64_t j = 0; j < group_keys; ++j) {
    for (int c = 0; c < C; ++c) {
      const vec value = load(values[j] + d + c * W);
      for (int i = 0; i < Q; ++i) sums[i][c] += weights[i * split_keys + j] * value;
    }
  }
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) store(into + i * width + d + c * W, sums[i][c]);
  }
}

template <int Q>
void add_group(const float* weights, const float* const* values, int64_t width, float* into) {
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) add_values<Q, 4>(weights, values, d, width, into);
  for (; d < width; d += W) add_values<Q, 1>(weights, values, d, width, into);
}

// Turn the raw dot products of one query into weights exp(score - largest), in place; keys at
// positions outside [seen_from, seen_to] get weight 0. `start` is the position of scores[0].
void weigh(const Tile& tile, float* scores, int64_t start, int64_t keys, int64_t seen_from,
           int64_t seen_to, float* largest, float* total) {
  vec top = splat(-infinity);
  for (int64_t j = 0; j < keys; j += W) {
    vec score = load(scores + j) * tile.scale;
    if (tile.softcap != 0.0f) score = tile.softcap * tanh_of(score / tile.softcap);
    store(scores + j, score);
  }
  for (int64_t j = 0; j < seen_from - start && j < keys; ++j) scores[j] = -infinity;
  for (int64_t j = seen_to + 1 > start ? seen_to + 1 - start : 0; j < keys; ++j) {
    scores[j] = -infinity;
  }
  for (int64_t j = 0; j < keys; j += W) top = max(load(scores + j), top);
  float most = top[0];
  for (int i = 1; i < W; ++i) most = top[i] > most ? top[i] : most;
  // With no finite score every weight is exp(-inf) = 0, and a NaN stays one.
  const float base = most == -infinity ? 0.0f : most;
  vec sums{};
  for (int64_t j = 0; j < keys; j += W) {
    const vec weight = exp_negative(load(scores + j) - base);
    store(scores + j, weight);
    sums += weight;
  }
  *largest = most;
  *total = sum(sums);
}

// One split's sums, for the keys [lo, hi) of it.
void attend_split(const Tile& tile, int64_t lo, int64_t hi, const Scratch& scratch) {
  const int64_t width = padded(tile.head_size, W), count = tile.count;
  const int64_t start = lo / group_keys * group_keys;
  const float* rows[group_keys];
  for (int64_t at = start; at < hi; at += group_keys) {
    read_group(tile, tile.key, at, lo, hi, scratch, rows);
    float* scores = scratch.scores + (at - start);
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      dot_group<2>(scratch.queries + i * width, width, rows, scores + i * split_keys);
    }
    if (i < count) dot_group<1>(scratch.queries + i * width, width, rows, scores + i * split_keys);
  }
  for (int64_t i = 0; i < count; ++i) {
    weigh(tile, scratch.scores + i * split_keys, start, padded(hi - start, group_keys),
          first_seen(tile, tile.first + i), last_seen(tile, tile.first + i),
          scratch.split.largest + i, scratch.split.total + i);
  }
  __builtin_memset(scratch.split.values, 0, count * width * sizeof(float));
  for (int64_t at = start; at < hi; at += group_keys) {
    read_group(tile, tile.value, at, lo, hi, scratch, rows);
    const float* weights = scratch.scores + (at - start);
    float* into = scratch.split.values;
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      add_group<2>(weights + i * split_keys, rows, width, into + i * width);
    }
    if (i < count) add_group<1>(weights + i * split_keys, rows, width, into + i * width);
  }
}

void attend(const Tile& tile, int64_t first_split, int64_t last_split, float* memory,
            const Partial& sums) {
  const int64_t width = padded(tile.head_size, W);
  const Scratch scratch = divide(memory, width);
  const int64_t tile_lo = first_seen(tile, tile.first);
  const int64_t tile_hi = last_seen(tile, tile.first + tile.count - 1) + 1;
  clear(sums, tile.count, width);
  read_queries(tile, scratch.queries, width);
  for (int64_t split = first_split; split < last_split; ++split) {
    const int64_t begin = split * split_keys, end = begin + split_keys;
    const int64_t lo = begin < tile_lo ? tile_lo : begin;
    const int64_t hi = end < tile_hi ? end : tile_hi;
    if (lo >= hi) continue;
    attend_split(tile, lo, hi, scratch);
    merge(sums, scratch.split, tile.count, width);
  }
}

}  // namespace

#define WEFT_STRING(x) #x
#define WEFT_NAME(x) WEFT_STRING(x)
#define WEFT_JOIN(a, b) a##b
#define WEFT_TABLE(isa) WEFT_JOIN(kernels_, isa)

extern const Kernels WEFT_TABLE(WEFT_ISA);
const Kernels WEFT_TABLE(WEFT_ISA) = {WEFT_NAME(WEFT_ISA), W,     attend, clear,
                                      merge,               finish, convert};

}  // namespace weft
