// The two parts of a transformer layer that are not attention, each as one call.
#pragma once

#include <cstdint>
#include <vector>

#include "delta.hpp"
#include "experts.hpp"
#include "matrix.hpp"

namespace weft {

// Latent attention: the heads share one row of `rotated` numbers and a latent, key and value of all.
struct Latent {
  const Matrix* query_up = nullptr;    // of the latent of queries; none: they are projected whole
  const float* query_norm = nullptr;   // of that latent
  const float* row_norm = nullptr;     // of the row's latent
  std::vector<const Matrix*> key_up;   // of each head [latent, plain]
  std::vector<const Matrix*> value_up; // of each head [value, latent]
  int64_t rotated = 0;
  float epsilon = 0;
};

// A layer. Nothing is owned. What a layer may lack is null; norms are what is multiplied with, in
// float32, biases are of the matrices' type.
struct Layer {
  // [(heads + 2 kv_heads) * head_size, hidden]; where the values are the keys [(heads + kv_heads)
  // * head_size, hidden].
  const Matrix* qkv = nullptr;
  const Matrix* output = nullptr;   // [hidden, heads * head_size]
  const Matrix* output_gate = nullptr;  // of what `output` reads: [heads or heads * head_size, hidden]
  // Gated [2 * size, hidden]; with relu2 and xielu not, [size, hidden]. Without it and without experts what
  // attention adds is all that the layer does.
  const Matrix* gate_up = nullptr;
  const Matrix* down = nullptr;     // [hidden, size]
  const Matrix* router = nullptr;   // [experts, hidden], with a gate of the MLP one output more
  const void* qkv_bias = nullptr;
  const void* output_bias = nullptr;
  const void* gate_up_bias = nullptr;  // or of `up`
  const void* down_bias = nullptr;
  const void* router_bias = nullptr;
  const float* input_norm = nullptr;           // [hidden]
  // [heads + kv_heads, head_size], for a norm of each head, or of all of Q and of all of K.
  const float* qk_norm = nullptr;
  bool qk_norm_whole = false, qk_norm_rotated = false;  // rotated: after their rotation
  const float* post_attention_norm = nullptr;  // [hidden]
  const float* mlp_norm = nullptr;             // [hidden]
  const float* post_mlp_norm = nullptr;        // [hidden]
  // The two norms behind attention and MLP are of the sums with the residual, and have biases.
  bool norms_sums = false;
  const void* post_attention_norm_bias = nullptr;  // [hidden]
  const void* post_mlp_norm_bias = nullptr;        // [hidden]
  // Experts, in place of an MLP or beside it. Beside it both read the same and are added up, the MLP
  // times the sigmoid of its gate; or, with `dense_post_norm`, they have norms of their own, and the
  // router reads a norm of the residual times a factor.
  const Experts* experts = nullptr;
  Routing routing;
  bool float_scores = false;                // scores are not rounded to the layer's type
  bool mlp_gate = false;                    // the router's last output is the gate of the MLP
  const float* expert_scale = nullptr;      // [experts], multiplies shares
  const float* router_scale = nullptr;      // [hidden], of that norm
  float router_factor = 1;
  const float* expert_norm = nullptr;       // [hidden]
  const float* dense_post_norm = nullptr;   // [hidden], of what the MLP adds
  const float* expert_post_norm = nullptr;  // [hidden]
  // What the layer makes of each token's own input to it.
  const Matrix* input_gate = nullptr;        // [width, hidden]
  const Matrix* input_projection = nullptr;  // [hidden, width]
  const float* post_input_norm = nullptr;    // [hidden]
  float scalar = 1;                          // multiplies the residual at the end
  int64_t heads = 0, kv_heads = 0, head_size = 0;  // no kv_heads: it reads another layer's cache
  bool value_is_key = false;  // values are the keys before their norm and rotation
  bool value_norm = false;    // values are normalised, without a weight
  // Numbers of a head of values as `qkv` gives them and `output` takes them, which are multiplied
  // then; caches have heads of keys' size, filled with 0. 0: all are of one size.
  int64_t value_size = 0;
  float value_scale = 1;
  float residual_scale = 1;   // multiplies what attention and MLP or experts add
  const Latent* latent = nullptr;  // then qkv gives queries, or their latent, and the row
  // Of a recurrent layer, whose `qkv` gives what the mixer mixes, without norms and rotation of
  // heads; it gives `heads` of `head_size`.
  const Mixer* mixer = nullptr;
  const Matrix* state_gates = nullptr;  // of its state, [M, hidden], where it has any
  // Low-rank gates (KDA): the last numbers of what `state_gates` gives, R for each of both, times these
  // are the last numbers of the mixer's input and of its gates.
  const Matrix* state_gate_up = nullptr;  // [.., R]
  const Matrix* forget_up = nullptr;      // [.., R]
  int64_t mixer_inputs = 0, mixer_gates = 0;  // what the mixer takes of a token
  float epsilon = 0, post_epsilon = 0;  // post: of the norms after attention and MLP or experts
  bool centred = false;       // norms subtract the mean first
  bool parallel = false;      // the MLP reads the residual that attention reads
  // Angles are [tokens, half] of keys and then of queries, in one row of 2 * half.
  bool own_query_angles = false;
  Activation activation = Activation::silu;
  const float* activation_numbers = nullptr;  // of xielu
  float limit = 0;  // of Activation::limited
  Gating gating = Gating::sigmoid;  // of `output_gate`

  DType type() const { return qkv->type(); }
  int64_t columns() const {
    return mixer != nullptr ? qkv->outputs() : (heads + 2 * kv_heads) * head_size;
  }
};

// All rows are contiguous and of the layer's type; cos and sin are [tokens, half].

// Norm, QKV, norms of Q, K and V, rotation of the first 2 * half dimensions of Q and K:
// qkv [tokens, columns].
void layer_pre(const Layer& layer, const char* residual, int64_t tokens, const float* cos,
               const float* sin, int64_t half, char* qkv);
// The same of a layer with latent attention: of its absorbed queries, and twice of the row.
void latent_pre(const Layer& layer, const char* residual, int64_t tokens, const float* cos,
                const float* sin, int64_t half, char* qkv);
// Norm and products of a recurrent layer: what it mixes, of `mixer_inputs` numbers in rows that may
// have more behind them, at least `columns`; and the gates of its state [tokens, mixer_gates].
void recurrent_pre(const Layer& layer, const char* residual, int64_t tokens, Rows mixed, char* gates);
// Output projection, MLP and experts, norms and sums, the token's own input: out [tokens, hidden]
// is the new residual. It may be the old one's memory.
//
// The inputs [tokens, width] need not lie together; without a matrix for them they are not read.
void layer_post(const Layer& layer, const char* attended, const char* residual, Rows inputs,
                int64_t tokens, char* out);

}  // namespace weft
