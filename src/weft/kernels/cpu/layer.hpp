// The two parts of a transformer layer that are not attention, each as one call.
#pragma once

#include <cstdint>

#include "matrix.hpp"

namespace weft {

// A layer of the common kind. Nothing is owned. Norms and biases are null where there are none;
// those of norms are what is multiplied with, in float32, biases are of the matrices' type.
struct Layer {
  const Matrix* qkv = nullptr;      // [(heads + 2 kv_heads) * head_size, hidden]
  const Matrix* output = nullptr;   // [hidden, heads * head_size]
  const Matrix* gate_up = nullptr;  // gated [2 * size, hidden]
  const Matrix* down = nullptr;     // [hidden, size]
  const void* qkv_bias = nullptr;
  const void* output_bias = nullptr;
  const void* gate_up_bias = nullptr;
  const void* down_bias = nullptr;
  const float* input_norm = nullptr;           // [hidden]
  const float* qk_norm = nullptr;              // [heads + kv_heads, head_size]
  const float* post_attention_norm = nullptr;  // [hidden]
  const float* mlp_norm = nullptr;             // [hidden]
  const float* post_mlp_norm = nullptr;        // [hidden]
  int64_t heads = 0, kv_heads = 0, head_size = 0;
  float epsilon = 0;
  Activation activation = Activation::silu;

  DType type() const { return qkv->type(); }
};

// All rows are contiguous and of the layer's type; cos and sin are [tokens, half].

// Norm, QKV, norm of Q and K, rotation of their first 2 * half dimensions: qkv [tokens, ...].
void layer_pre(const Layer& layer, const char* residual, int64_t tokens, const float* cos,
               const float* sin, int64_t half, char* qkv);
// Output projection, MLP, norms and both sums: out [tokens, hidden] is the new residual. It may be
// the old one's memory.
void layer_post(const Layer& layer, const char* attended, const char* residual, int64_t tokens,
                char* out);

}  // namespace weft
