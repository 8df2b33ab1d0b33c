// A model's forward pass as one call: embedding, then for each layer what precedes attention,
// attention and what follows it, then the final norm.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention.hpp"
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

// A model without its output head. Nothing is owned.
struct Stack {
  const Matrix* packed = nullptr;    // the embedding as a packed matrix, or else
  Tensor table{};                    // as [vocabulary, hidden], of the layers' type
  float embedding_scale = 1;         // multiplies embeddings, rounded to their type
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

// hidden [tokens, hidden] of token ids at positions, normalised. Throws std::out_of_range for an id
// outside the vocabulary, else as paged_attention does.
void run_stack(const Stack& stack, const int64_t* ids, const int64_t* positions, int64_t tokens,
               std::span<const GroupBatch> groups, char* hidden);

// cos and sin [tokens, half] of positions times frequencies [half], both multiplied by `scale`.
void compute_angles(const int64_t* positions, int64_t tokens, const float* frequencies,
                    int64_t half, float scale, float* cos, float* sin);

// Normalises x [tokens, heads, size] into contiguous rows. The weight has heads * size numbers, or
// size numbers, or is not there; with plus_one 1 is added to it.
void normalise(const Tensor& x, const Tensor* weight, bool plus_one, float epsilon, char* out);

}  // namespace weft
