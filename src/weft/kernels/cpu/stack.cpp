// The loop over the layers, and the small steps before and after it.

#include "stack.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "dispatch.hpp"
#include "ops.hpp"
#include "phases.hpp"

namespace weft {
namespace {

// Memory that a thread keeps from step to step: fresh one would be faulted in page by page.
struct Kept {
  std::vector<char> residual, inputs, looked_up, qkv, attended;
  std::vector<std::vector<float>> angles;  // cos and then sin of each rope

  template <typename T>
  static T* fit(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
  }
};

void embed(const Stack& stack, const int64_t* ids, int64_t tokens, Rows to, int64_t hidden) {
  const DType type = stack.layers.front().layer->type();
  if (stack.packed != nullptr) {
    check_ids(ids, tokens, stack.packed->outputs());
    gather(*stack.packed, ids, tokens, to);
  } else {
    gather_rows(stack.table, ids, tokens, to.data);
  }
  if (stack.embedding_scale == 1.0f) return;
  const PanelKernels& kernels = *chosen_isa().panel;
  Phases phases;
  phases.add_tokens(tokens, [&](int64_t token) {
    kernels.scale(type, stack.embedding_scale, to.row(token), nullptr, to.row(token), hidden);
  });
  phases.run(tokens > piece);
}

// The tokens' inputs to the layers [tokens, layers, width].
Rows compute_inputs(const Stack& stack, const int64_t* ids, int64_t tokens, Rows embedded,
                    Kept& kept) {
  const LayerInputs& inputs = stack.inputs;
  const DType type = stack.layers.front().layer->type();
  const int64_t columns = inputs.projection->outputs(), bytes = columns * size_of(type);
  const Rows out{Kept::fit(kept.inputs, tokens * bytes), bytes};
  const Rows found{Kept::fit(kept.looked_up, tokens * bytes), bytes};
  gather_rows(inputs.table, ids, tokens, found.data);
  multiply({.matrix = inputs.projection, .bias = nullptr, .x = embedded, .residual = {},
            .out = out, .rows = tokens, .out_type = type});
  const PanelKernels& kernels = *chosen_isa().panel;
  Phases phases;
  phases.add_tokens(tokens, [&](int64_t token) {
    char *const row = out.row(token), *const more = found.row(token);
    kernels.scale(type, inputs.projection_scale, row, nullptr, row, columns);
    for (int64_t first = 0; first < columns; first += inputs.width) {
      char* const part = row + first * size_of(type);
      kernels.norm(type, {inputs.norm, stack.epsilon}, part, nullptr, part, inputs.width);
    }
    kernels.scale(type, inputs.table_scale, more, nullptr, more, columns);
    kernels.scale(type, inputs.sum_scale, row, more, row, columns);
  });
  phases.run(tokens > piece);
  return out;
}

}  // namespace

void run_stack(const Stack& stack, const int64_t* ids, const int64_t* positions, int64_t tokens,
               std::span<const GroupBatch> groups, char* hidden) {
  thread_local Kept kept;
  const Layer& first = *stack.layers.front().layer;
  const DType type = first.type();
  const int64_t width = first.qkv->inputs(), row_bytes = width * size_of(type);
  char* residual = Kept::fit(kept.residual, tokens * row_bytes);
  embed(stack, ids, tokens, {residual, row_bytes}, width);
  Rows inputs{};
  if (stack.inputs.projection != nullptr) {
    inputs = compute_inputs(stack, ids, tokens, {residual, row_bytes}, kept);
  }
  kept.angles.resize(std::max(kept.angles.size(), stack.ropes.size()));
  for (size_t i = 0; i < stack.ropes.size(); ++i) {
    const Rope& rope = stack.ropes[i];
    float* cos = Kept::fit(kept.angles[i], 2 * tokens * rope.half);
    compute_angles(positions, tokens, rope.frequencies, rope.half, rope.scale, cos,
                   cos + tokens * rope.half);
  }
  for (const StackLayer& stacked : stack.layers) {
    const Layer& layer = *stacked.layer;
    const int64_t columns = layer.columns(), size = layer.head_size;
    const int64_t wide = layer.heads * size;
    char* qkv = Kept::fit(kept.qkv, tokens * columns * size_of(type));
    char* attended = Kept::fit(kept.attended, tokens * wide * size_of(type));
    const Rope& rope = stack.ropes[stacked.rope];
    const float* cos = kept.angles[stacked.rope].data();
    layer_pre(layer, residual, tokens, cos, cos + tokens * rope.half, rope.half, qkv);
    const auto view = [&](const char* name, int64_t head, int64_t heads) {
      return heads_of(name, qkv, type, tokens, columns, head, heads, size);
    };
    std::optional<Tensor> k, v;
    if (layer.kv_heads > 0) {
      k = view("k", layer.heads, layer.kv_heads);
      v = view("v", layer.heads + layer.kv_heads, layer.kv_heads);
    }
    const GroupBatch& batch = groups[stacked.group];
    paged_attention({
        .out = heads_of("out", attended, type, tokens, wide, 0, layer.heads, size),
        .q = view("q", 0, layer.heads),
        .k = k,
        .v = v,
        .k_cache = stacked.k_cache,
        .v_cache = stacked.v_cache,
        .block_tables = batch.block_tables,
        .query_start = batch.query_start,
        .seq_lens = batch.seq_lens,
        .slot_mapping = batch.slot_mapping,
        .block_size = batch.block_size,
        .window = stacked.window,
        .scale = stacked.scale,
        .softcap = stacked.softcap,
    });
    layer_post(layer, attended, residual, inputs, tokens, residual);
    inputs.data += stack.inputs.width * size_of(type);
  }
  const PanelKernels& kernels = *chosen_isa().panel;
  for (int64_t token = 0; token < tokens; ++token) {
    kernels.norm(type, {stack.final_norm, stack.epsilon}, residual + token * row_bytes, nullptr,
                 hidden + token * row_bytes, width);
  }
}

}  // namespace weft
