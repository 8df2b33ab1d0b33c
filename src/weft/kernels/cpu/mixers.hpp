// Recurrent layers beside the gated delta rule: a gated short convolution alone (LFM2), and Mamba-2
// (Dao and Gu 2024). mixers.cpp is compiled once per instruction set; dispatch.hpp picks the one that
// runs.
#pragma once

#include <cstdint>

#include "delta.hpp"
#include "tensor.hpp"

namespace weft {

struct ConvShape {
  int64_t channels, taps;
};

struct Mamba2Shape {
  int64_t heads, head_dim, groups, state_dim, taps;

  int64_t values() const { return heads * head_dim; }
  int64_t keys() const { return groups * state_dim; }
  int64_t channels() const { return values() + 2 * keys(); }  // of x, B and C, in this order
  int64_t matrices() const { return heads * state_dim * head_dim; }  // numbers of a state
};

// A token of one slab, as the recurrence reads it.
struct ScanToken {
  const float* b;  // [state_dim]
  const float* c;  // [state_dim]
  const float* x;  // [kSlab]
  float step;      // t
  float decay;     // exp(A t)
  float skip;      // D
  float* out;      // [kSlab]
};

struct MixerKernels {
  // out[i] = a[i] * b[i].
  void (*multiply)(DType type, const char* a, const char* b, int64_t size, float* out);
  // out[c] = factors[c] * (bias[c] + sum of weights[tap][c] * inputs[tap][c]); zeros are read for
  // nullptr.
  void (*convolve_gated)(DType type, const float* weights, const float* bias,
                         const float* const* inputs, int64_t taps, int64_t channels,
                         const char* factors, char* out);
  // out[c] = silu(bias[c] + sum of weights[tap][c] * inputs[tap][c]).
  void (*convolve)(const float* weights, const float* bias, const TapInput* inputs, int64_t taps,
                   int64_t channels, float* out);
  // With S [state_dim][kSlab]: S = decay S + b (step x)^T, out = S^T c + skip x.
  void (*scan)(float* slab, int64_t state_dim, const ScanToken& token);
  // With y = x * silu(gate), which x becomes: out = y / sqrt(mean of squares + epsilon) * weight.
  void (*gate_and_norm)(DType type, float* x, const float* weight, const char* gate, int64_t size,
                        float epsilon, char* out);
};

// The parameters of a layer, in float32.
struct ConvWeights {
  const float* conv;  // [taps][channels]
  const float* bias;  // [channels]
};

struct Mamba2Weights {
  const float* conv;       // [taps][channels]
  const float* conv_bias;  // [channels]
  const float* decay;      // [heads]: A
  const float* bias;       // [heads]: of the time step
  const float* skip;       // [heads]: D
  const float* norm;       // [values]
  float epsilon;
  float least_step, largest_step;
};

// A gated short convolution; nothing is owned, here and below. Its states have no matrices.
//
// inputs: of all slots, [slots][taps - 1][channels]: the last products;
// x: [T, 3 * channels] what the input is multiplied by, what the result is, and the input; without
// gates.
struct Conv final : Mixer {
  Conv(const ConvShape& shape, const ConvWeights& weights) : shape(shape), weights(weights) {}
  void advance(const DeltaStates& states, const DeltaBatch& batch, const Tensor& x,
               const Tensor& gates, char* out) const override;

  const ConvShape shape;
  const ConvWeights weights;
};

// Mamba-2.
//
// matrices: [slots][heads][head_dim / kSlab][state_dim][kSlab];
// x: [T, channels + values] what the convolution reads, then the gates of the norm;
// gates: [T, heads]: of the time step.
struct Mamba2 final : Mixer {
  Mamba2(const Mamba2Shape& shape, const Mamba2Weights& weights) : shape(shape), weights(weights) {}
  void advance(const DeltaStates& states, const DeltaBatch& batch, const Tensor& x,
               const Tensor& gates, char* out) const override;

  const Mamba2Shape shape;
  const Mamba2Weights weights;
};

}  // namespace weft
