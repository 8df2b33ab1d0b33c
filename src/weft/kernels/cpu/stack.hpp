// A model's forward pass as one call: embedding, then for each layer what precedes attention,
// attention and what follows it, then the final norm.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention.hpp"
#include "carried.hpp"
#include "layer.hpp"
#include "lines.hpp"
#include "ops.hpp"

namespace weft {

// One layer: how it attends, and where its cache lies. Nothing is owned.
struct StackLayer {
  const Layer* layer;
  int64_t rope, group;       // which angles and which metadata of a call are its own
  Tensor k_cache, v_cache;
  float scale;
  int64_t window;            // 0: none
  float softcap;             // 0: none
  std::optional<Tensor> sinks;
  bool causal = true;
  DeltaStates states{};      // of a recurrent layer, which has nothing of the above but itself
};

// What makes the input of a token to each layer: rows of a table, of the layers' type, and a product
// with its embedding, which is scaled and normalised for each layer.
struct LayerInputs {
  Tensor table{};                      // [vocabulary, layers * width]
  const Matrix* projection = nullptr;  // [layers * width, hidden]
  const float* norm = nullptr;         // [width]
  int64_t width = 0;
  float table_scale = 1, projection_scale = 1, sum_scale = 1;  // that of the table rounded
};

// A model without its output head. Nothing is owned.
struct Stack {
  const Matrix* packed = nullptr;    // the embedding as a packed matrix, or else
  Tensor table{};                    // as [vocabulary, hidden], of the layers' type
  float embedding_scale = 1;         // multiplies embeddings, rounded to their type
  bool embedding_norm = false;       // they are normalised then, without a weight
  LayerInputs inputs{};              // without a projection there are none
  std::vector<Rope> ropes;
  std::vector<StackLayer> layers;
  const float* final_norm = nullptr; // [hidden], what is multiplied with; none: layers end with norms
  float epsilon = 0;
  bool centred = false;              // norms subtract the mean first
  int64_t state_slots = 0;           // of each recurrent layer
};

// Attention metadata of one KV group; see Attention.
struct GroupBatch {
  Tensor block_tables, query_start, seq_lens, slot_mapping;
  int64_t block_size;
};

// A step's own tokens, [tokens] each; behind the ids those of the rows whose token `carry` begins.
struct StackTokens {
  const int64_t *ids, *positions;
  int64_t tokens;
  const char* embedded = nullptr;  // [tokens, hidden], in place of what the stack makes of ids
};

// hidden [tokens + carried, hidden], normalised. Returns the number of carried rows that have come
// through the last layer: those are `carry->rows.taken`. Throws std::out_of_range for an id outside
// the vocabulary, else as paged_attention and MailboxClient do.
//
// `states`: what the rows of a model with recurrent layers read and write; without them, or with
// rows to carry, such a model throws std::invalid_argument.
int64_t run_stack(const Stack& stack, const StackTokens& own, std::span<const GroupBatch> groups,
                  const Carry* carry, char* hidden, const DeltaBatch* states = nullptr);

// ---- parts of a pass, for those that weave them in another order ----

// The scaled embeddings of tokens. Throws std::out_of_range for an id outside the vocabulary.
void embed(const Stack& stack, const int64_t* ids, int64_t tokens, Rows to, int64_t hidden);

// The tokens' inputs to the layers [tokens, layers, width], in `inputs`; `looked_up` is used meanwhile.
Rows compute_inputs(const Stack& stack, const int64_t* ids, int64_t tokens, Rows embedded,
                    Lines<char>& inputs, Lines<char>& looked_up);

// Queries, keys and values [count, heads, size] of tokens [first, first + count) in the rows that
// layer_pre has written; no keys and values where the layer reads the KV of another one.
struct Projected {
  Tensor q;
  std::optional<Tensor> k, v;
};
Projected projected(const Layer& layer, char* qkv, int64_t first, int64_t count);

// Attention of a layer over its cache: out [tokens, heads, size] from the tokens' projections.
void attend(const StackLayer& layer, const GroupBatch& batch, const Projected& tokens, char* out);

// The normalised hidden states of residuals, both [rows, hidden].
void normalise(const Stack& stack, const char* residual, int64_t rows, char* hidden);

}  // namespace weft
