// The gated delta rule (Yang et al. 2024): a short convolution, a recurrence over a matrix for each
// value head, and a gated norm. delta.cpp is compiled once per instruction set; dispatch.hpp picks
// the one that runs.
#pragma once

#include <cstdint>
#include <span>

#include "tensor.hpp"

namespace weft {

constexpr int64_t kSlab = 16;       // columns of a head's matrix that are computed together
constexpr int64_t kMostTaps = 16;   // inputs that a convolution reads for each output
constexpr int64_t kMostKeys = 256;  // rows of a head's matrix

struct DeltaShape {
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
  bool by_channel = false;  // each row of a head's matrix has a decay of its own (KDA)
  bool tiled = false;       // value head h reads key head h % key_heads, not h / their ratio

  int64_t decays() const { return by_channel ? value_heads * key_dim : value_heads; }
  // The key head that a value head reads, and the i-th value head that reads a key head.
  int64_t key_head_of(int64_t value_head) const {
    return tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
  int64_t value_head_of(int64_t key_head, int64_t i) const {
    return tiled ? i * key_heads + key_head : key_head * (value_heads / key_heads) + i;
  }
  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }  // of q, k and v, in this order
  int64_t matrices() const { return value_heads * key_dim * value_dim; }  // numbers of a state
};

// Where the input of one tap of a convolution lies; nullptr for zeros.
struct TapInput {
  const char* numbers;
  DType type;
};

// A token of one slab, as the recurrence reads it.
struct DeltaToken {
  const float* q;  // [key_dim], normalised and scaled; by channel times g
  const float* k;  // [key_dim], normalised
  const float* v;  // [kSlab]
  float product;   // k q
  float decay;     // g
  float rate;      // beta
  float* out;      // [kSlab]
  const float* decays;   // [key_dim], g by channel; else nullptr, as the next
  const float* decayed;  // [key_dim], k times g
};

struct DeltaKernels {
  // out[c] = silu(sum of weights[tap][c] * inputs[tap][c]), for `size` channels from `first` on of all.
  void (*convolve)(const float* weights, const TapInput* inputs, int64_t taps, int64_t channels,
                   int64_t first, int64_t size, float* out);
  // out[i] = from[first + i].
  void (*widen)(const TapInput& from, int64_t first, int64_t size, float* out);
  // row *= scale / sqrt(sum of squares + 1e-6).
  void (*normalise)(float* row, int64_t size, float scale);
  float (*dot)(const float* a, const float* b, int64_t size);
  // With S [key_dim][kSlab]: delta = beta (v - g S^T k), out = g S^T q + (k q) delta,
  // S = g S + k delta^T, which is read from one place and written to another, or to the same. By
  // channel g is a diagonal matrix. `away`: past the caches, as nobody reads it soon; other threads
  // see it after `settle`.
  void (*step)(const float* from, float* to, int64_t key_dim, const DeltaToken& token, bool away);
  void (*settle)();
  // out[i] = exp(decay softplus(t[i])), or with a floor exp(floor sigmoid(-decay t[i])), where t is
  // the sum of times and bias; decay and floor are below 0.
  void (*forget)(DType type, const char* times, const float* bias, float decay, float floor,
                 int64_t size, float* out);
  // out = x / sqrt(mean of squares + epsilon) * weight * silu(gate), or * sigmoid(gate).
  void (*gate)(DType type, bool sigmoid, const float* x, const float* weight, const char* gate,
               int64_t size, float epsilon, char* out);
};

// The parameters of a layer, in float32.
struct DeltaWeights {
  const float* conv;   // [taps][channels]
  const float* decay;  // [value_heads]: -exp(A_log)
  const float* bias;   // [decays]: of the time step
  const float* norm;   // [value_dim]
  float epsilon;
  bool sigmoid;  // what the norm is multiplied by; else silu
  float floor;   // of decays by channel, as logarithms; 0: they have none
};

// States of a layer by slot, in float32.
struct DeltaStates {
  float* matrices;  // [slots][value_heads][value_dim / kSlab][key_dim][kSlab]
  float* inputs;    // [slots][taps - 1][channels]: the last inputs of the convolution
};

struct DeltaMark {
  int32_t token, slot;  // the state after this token of the batch goes to the slot, too
};

struct DeltaBatch {
  std::span<const int32_t> bounds;         // [R + 1]: where the tokens of each row begin
  std::span<const int32_t> reads, writes;  // [R]: slots; zeros are read for -1
  std::span<const DeltaMark> marks;        // by token
};

// What takes attention's place in a recurrent layer of a stack, of any kind.
class Mixer {
 public:
  virtual ~Mixer() = default;
  // Computes all rows of a batch. No row may read a slot that another one writes.
  //
  // x: [T, N] what the layer mixes; gates: [T, M] in the type of x, those of the states;
  // out: [T, values] in the type of x.
  virtual void advance(const DeltaStates& states, const DeltaBatch& batch, const Tensor& x,
                       const Tensor& gates, char* out) const = 0;
};

// The gated delta rule. Nothing is owned.
//
// x: [T, channels + values] what the convolution reads, then the gates of the norm;
// gates: [T, value_heads + decays]: of beta, then of the decay.
struct Delta final : Mixer {
  Delta(const DeltaShape& shape, const DeltaWeights& weights) : shape(shape), weights(weights) {}
  void advance(const DeltaStates& states, const DeltaBatch& batch, const Tensor& x,
               const Tensor& gates, char* out) const override;

  const DeltaShape shape;
  const DeltaWeights weights;
};

}  // namespace weft
