// Compiled once per instruction set (CMakeLists.txt), with WEFT_ISA naming it; what panel.cpp says of
// headers holds here, too.
#include "delta.hpp"

#include "simd.hpp"

#define WEFT_JOIN(a, b) a##b
#define WEFT_NAME(a, b) WEFT_JOIN(a, b)

namespace weft {
namespace {

typedef float column __attribute__((vector_size(4 * kSlab)));  // however wide the registers are
typedef column column_at __attribute__((aligned(4), may_alias));

inline column columns(const float* p) { return *reinterpret_cast<const column_at*>(p); }
inline void put(float* p, column v) { *reinterpret_cast<column_at*>(p) = v; }

// A line that is written whole need not be read first.
inline void put_away(float* p, column v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  vec halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  _mm256_stream_ps(p, (__m256)halves[0]);
  _mm256_stream_ps(p + W, (__m256)halves[1]);
#else
  put(p, v);
#endif
}

void settle() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

inline vec numbers(DType type, const char* row, int64_t i) {
  return type == DType::f32 ? read<DType::f32>(row + 4 * i) : read<DType::bf16>(row + 2 * i);
}

inline float root(float x) { return 1.0f / __builtin_sqrtf(x); }

// Sizes are multiples of 16, so of W.
void convolve(const float* weights, const TapInput* inputs, int64_t taps, int64_t channels,
              int64_t first, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += W) {
    const int64_t c = first + i;
    vec sum{};
    for (int64_t tap = 0; tap < taps; ++tap) {
      if (inputs[tap].numbers == nullptr) continue;
      sum += load(weights + tap * channels + c) * numbers(inputs[tap].type, inputs[tap].numbers, c);
    }
    store(out + i, sum * sigmoid(sum));
  }
}

void widen(const TapInput& from, int64_t first, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += W) {
    store(out + i, numbers(from.type, from.numbers, first + i));
  }
}

float dot(const float* a, const float* b, int64_t size) {
  vec sum{};
  for (int64_t i = 0; i < size; i += W) sum += load(a + i) * load(b + i);
  return sum_of(sum);
}

void normalise(float* row, int64_t size, float scale) {
  const float factor = scale * root(dot(row, row, size) + 1e-6f);
  for (int64_t i = 0; i < size; i += W) store(row + i, load(row + i) * factor);
}

// log(1 + exp(x)): the logarithm of 1 + e, e in [0, 1], is 2 artanh(e / (2 + e)).
inline vec softplus(vec x) {
  const vec e = exp_negative((vec)((ivec)x | (int32_t)0x80000000));  // of -|x|
  const vec s = e / (e + 2.0f), square = s * s;
  vec p = square * (1.0f / 15) + 1.0f / 13;
  p = p * square + 1.0f / 11;
  p = p * square + 1.0f / 9;
  p = p * square + 1.0f / 7;
  p = p * square + 1.0f / 5;
  p = p * square + 1.0f / 3;
  p = p * square + 1.0f;
  return pick(x > 0.0f, x, vec{}) + 2.0f * s * p;
}

template <DType type>
void forget_as(const char* times, const float* bias, float decay, float floor, int64_t size,
               float* out) {
  for (int64_t i = 0; i < size; i += W) {
    const vec time = read<type>(times + i * size_of(type)) + load(bias + i);
    const vec logarithm = floor < 0 ? sigmoid(time * -decay) * floor : softplus(time) * decay;
    store(out + i, exp_negative(logarithm));
  }
}

void forget(DType type, const char* times, const float* bias, float decay, float floor,
            int64_t size, float* out) {
  if (type == DType::f32) return forget_as<DType::f32>(times, bias, decay, floor, size, out);
  forget_as<DType::bf16>(times, bias, decay, floor, size, out);
}

template <bool by_channel, bool away>
void step_as(const float* from, float* to, int64_t key_dim, const DeltaToken& token) {
  const float* const read_by = by_channel ? token.decayed : token.k;
  constexpr int64_t sums = 4;  // as many of each as hide the latency of an addition
  column by_key[sums] = {}, by_query[sums] = {};
  for (int64_t i = 0; i < key_dim; i += sums) {
    for (int64_t j = 0; j < sums; ++j) {
      const column row = columns(from + (i + j) * kSlab);
      by_key[j] += row * read_by[i + j];
      by_query[j] += row * token.q[i + j];
    }
  }
  const column key = (by_key[0] + by_key[1]) + (by_key[2] + by_key[3]);
  const column query = (by_query[0] + by_query[1]) + (by_query[2] + by_query[3]);
  const auto write = [&](int64_t i, column row) {
    if constexpr (away) return put_away(to + i * kSlab, row);
    put(to + i * kSlab, row);
  };
  if constexpr (by_channel) {
    const column delta = (columns(token.v) - key) * token.rate;
    put(token.out, query + delta * token.product);
    for (int64_t i = 0; i < key_dim; ++i) {
      write(i, columns(from + i * kSlab) * token.decays[i] + delta * token.k[i]);
    }
  } else {
    const float g = token.decay;
    const column delta = (columns(token.v) - key * g) * token.rate;
    put(token.out, query * g + delta * token.product);
    for (int64_t i = 0; i < key_dim; ++i) {
      write(i, columns(from + i * kSlab) * g + delta * token.k[i]);
    }
  }
}

void step(const float* from, float* to, int64_t key_dim, const DeltaToken& token, bool away) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % (4 * kSlab) == 0;
  const auto run = [&]<bool by_channel>() {
    if (away && aligned) return step_as<by_channel, true>(from, to, key_dim, token);
    step_as<by_channel, false>(from, to, key_dim, token);
  };
  token.decays == nullptr ? run.template operator()<false>() : run.template operator()<true>();
}

template <DType type, bool by_sigmoid>
void gate_as(const float* x, const float* weight, const char* gates, int64_t size, float epsilon,
             char* out) {
  const float factor = root(dot(x, x, size) / static_cast<float>(size) + epsilon);
  for (int64_t i = 0; i < size; i += W) {
    const vec z = read<type>(gates + i * size_of(type));
    const vec opened = by_sigmoid ? sigmoid(z) : z * sigmoid(z);
    write<type>(out + i * size_of(type), load(x + i) * factor * load(weight + i) * opened);
  }
}

void gate(DType type, bool by_sigmoid, const float* x, const float* weight, const char* gates,
          int64_t size, float epsilon, char* out) {
  const auto run = [&]<bool sigmoids>() {
    if (type == DType::f32) {
      return gate_as<DType::f32, sigmoids>(x, weight, gates, size, epsilon, out);
    }
    gate_as<DType::bf16, sigmoids>(x, weight, gates, size, epsilon, out);
  };
  by_sigmoid ? run.template operator()<true>() : run.template operator()<false>();
}

}  // namespace

extern const DeltaKernels WEFT_NAME(delta_kernels_, WEFT_ISA);
const DeltaKernels WEFT_NAME(delta_kernels_, WEFT_ISA) = {convolve, widen, normalise, dot,
                                                          step, settle, forget, gate};

}  // namespace weft
