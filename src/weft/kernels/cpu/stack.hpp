// A model's forward pass as one call: embedding, then for each layer what precedes attention,
// attention and what follows it, then the final norm.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention.hpp"
#include "carried.hpp"
#include "layer.hpp"

namespace weft {

// One layer: how it attends, and where its cache lies. Nothing is owned.
struct StackLayer {
  const Layer* layer;
  int64_t rope, group;       // which angles and which metadata of a call are its own
  Tensor k_cache, v_cache;
  float scale;
  int64_t window;            // 0: none
  float softcap;             // 0: none
};

// One rotary embedding: frequencies [half], and what cos and sin are multiplied with.
struct Rope {
  const float* frequencies;
  int64_t half;
  float scale;
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
  LayerInputs inputs{};              // without a projection there are none
  std::vector<Rope> ropes;
  std::vector<StackLayer> layers;
  const float* final_norm = nullptr; // [hidden], what is multiplied with
  float epsilon = 0;
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
};

// hidden [tokens + carried, hidden], normalised. Returns the number of carried rows that have come
// through the last layer: those are `carry->rows.taken`. Throws std::out_of_range for an id outside
// the vocabulary, else as paged_attention and MailboxClient do.
int64_t run_stack(const Stack& stack, const StackTokens& own, std::span<const GroupBatch> groups,
                  const Carry* carry, char* hidden);

}  // namespace weft
