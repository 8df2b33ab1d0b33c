// Compiled once per instruction set (CMakeLists.txt), with WEFT_ISA naming it; what panel.cpp says of
// headers holds here, too.
#include "mixers.hpp"

#include "simd.hpp"

#define WEFT_JOIN(a, b) a##b
#define WEFT_NAME(a, b) WEFT_JOIN(a, b)

namespace weft {
namespace {

typedef float column __attribute__((vector_size(4 * kSlab)));  // however wide the registers are
typedef column column_at __attribute__((aligned(4), may_alias));

inline column columns(const float* p) { return *reinterpret_cast<const column_at*>(p); }
inline void put(float* p, column v) { *reinterpret_cast<column_at*>(p) = v; }

// Sizes are multiples of 16, so of W.
template <DType type>
void multiply_as(const char* a, const char* b, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += W) {
    store(out + i, read<type>(a + i * size_of(type)) * read<type>(b + i * size_of(type)));
  }
}

void multiply(DType type, const char* a, const char* b, int64_t size, float* out) {
  if (type == DType::f32) return multiply_as<DType::f32>(a, b, size, out);
  multiply_as<DType::bf16>(a, b, size, out);
}

template <DType type>
void convolve_gated_as(const float* weights, const float* bias, const float* const* inputs,
                       int64_t taps, int64_t channels, const char* factors, char* out) {
  for (int64_t c = 0; c < channels; c += W) {
    vec sum = load(bias + c);
    for (int64_t tap = 0; tap < taps; ++tap) {
      if (inputs[tap] != nullptr) sum += load(weights + tap * channels + c) * load(inputs[tap] + c);
    }
    write<type>(out + c * size_of(type), read<type>(factors + c * size_of(type)) * sum);
  }
}

void convolve_gated(DType type, const float* weights, const float* bias,
                    const float* const* inputs, int64_t taps, int64_t channels,
                    const char* factors, char* out) {
  const auto convolve = type == DType::f32 ? convolve_gated_as<DType::f32>
                                           : convolve_gated_as<DType::bf16>;
  convolve(weights, bias, inputs, taps, channels, factors, out);
}

inline vec numbers(const TapInput& from, int64_t i) {
  return from.type == DType::f32 ? read<DType::f32>(from.numbers + 4 * i)
                                 : read<DType::bf16>(from.numbers + 2 * i);
}

void convolve(const float* weights, const float* bias, const TapInput* inputs, int64_t taps,
              int64_t channels, float* out) {
  for (int64_t c = 0; c < channels; c += W) {
    vec sum = load(bias + c);
    for (int64_t tap = 0; tap < taps; ++tap) {
      if (inputs[tap].numbers == nullptr) continue;
      sum += load(weights + tap * channels + c) * numbers(inputs[tap], c);
    }
    store(out + c, sum * sigmoid(sum));
  }
}

void scan(float* slab, int64_t state_dim, const ScanToken& token) {
  constexpr int64_t sums = 4;  // as many as hide the latency of an addition
  const column x = columns(token.x), added = x * token.step;
  column found[sums] = {};
  for (int64_t i = 0; i < state_dim; i += sums) {
    for (int64_t j = 0; j < sums; ++j) {
      float* const row = slab + (i + j) * kSlab;
      const column next = columns(row) * token.decay + added * token.b[i + j];
      put(row, next);
      found[j] += next * token.c[i + j];
    }
  }
  put(token.out, (found[0] + found[1]) + (found[2] + found[3]) + x * token.skip);
}

template <DType type>
void gate_and_norm_as(float* x, const float* weight, const char* gate, int64_t size,
                      float epsilon, char* out) {
  vec sum{};
  for (int64_t i = 0; i < size; i += W) {
    const vec z = read<type>(gate + i * size_of(type));
    const vec gated = load(x + i) * (z * sigmoid(z));
    store(x + i, gated);
    sum += gated * gated;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum_of(sum) / static_cast<float>(size) + epsilon);
  for (int64_t i = 0; i < size; i += W) {
    write<type>(out + i * size_of(type), load(x + i) * factor * load(weight + i));
  }
}

void gate_and_norm(DType type, float* x, const float* weight, const char* gate, int64_t size,
                   float epsilon, char* out) {
  if (type == DType::f32) {
    return gate_and_norm_as<DType::f32>(x, weight, gate, size, epsilon, out);
  }
  gate_and_norm_as<DType::bf16>(x, weight, gate, size, epsilon, out);
}

}  // namespace

extern const MixerKernels WEFT_NAME(mixer_kernels_, WEFT_ISA);
const MixerKernels WEFT_NAME(mixer_kernels_, WEFT_ISA) = {multiply, convolve_gated, convolve, scan,
                                                          gate_and_norm};

}  // namespace weft
