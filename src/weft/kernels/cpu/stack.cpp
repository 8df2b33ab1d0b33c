// The loop over the layers, and the small steps before and after it.

#include "stack.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "pool.hpp"

namespace weft {
namespace {

constexpr int64_t min_shared_numbers = 64 << 10;

// A view [tokens, heads, size] into rows of `columns` numbers that begins at one of their heads.
Tensor heads_of(const char* name, char* rows, DType type, int64_t tokens, int64_t columns,
                int64_t first, int64_t heads, int64_t size) {
  Tensor view{name, rows + first * size * size_of(type), type, 3};
  view.shape = {tokens, heads, size};
  view.stride = {columns, size, 1};
  return view;
}

// Memory that a thread keeps from step to step: fresh one would be faulted in page by page.
struct Kept {
  std::vector<char> residual, qkv, attended;
  std::vector<std::vector<float>> angles;  // cos and then sin of each rope

  template <typename T>
  static T* fit(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
  }
};

void scale_row(char* row, DType type, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    write_number(number_at(row, type, i) * factor, row, type, i);
  }
}

void embed(const Stack& stack, const int64_t* ids, int64_t tokens, Rows to, int64_t hidden) {
  const DType type = stack.layers.front().layer->type();
  const int64_t count = stack.packed == nullptr ? stack.table.shape[0] : stack.packed->outputs();
  for (int64_t token = 0; token < tokens; ++token) {
    if (ids[token] >= 0 && ids[token] < count) continue;
    throw std::out_of_range("token " + std::to_string(ids[token]) + " is outside the vocabulary");
  }
  const auto body = [&](int64_t token) {
    if (stack.packed != nullptr) {
      stack.packed->copy_row(ids[token], to.row(token));
    } else {
      const int64_t bytes = stack.table.stride[0] * size_of(type);
      std::memcpy(to.row(token), stack.table.as<char>() + ids[token] * bytes, to.stride);
    }
    if (stack.embedding_scale == 1.0f) return;
    scale_row(to.row(token), type, hidden, stack.embedding_scale);
  };
  if (tokens * hidden >= min_shared_numbers) return shared_pool().run(tokens, body);
  for (int64_t token = 0; token < tokens; ++token) body(token);
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
  kept.angles.resize(std::max(kept.angles.size(), stack.ropes.size()));
  for (size_t i = 0; i < stack.ropes.size(); ++i) {
    const Rope& rope = stack.ropes[i];
    float* cos = Kept::fit(kept.angles[i], 2 * tokens * rope.half);
    compute_angles(positions, tokens, rope.frequencies, rope.half, rope.scale, cos,
                   cos + tokens * rope.half);
  }
  for (const StackLayer& stacked : stack.layers) {
    const Layer& layer = *stacked.layer;
    const int64_t columns = layer.qkv->outputs(), size = layer.head_size;
    const int64_t wide = layer.heads * size;
    char* qkv = Kept::fit(kept.qkv, tokens * columns * size_of(type));
    char* attended = Kept::fit(kept.attended, tokens * wide * size_of(type));
    const Rope& rope = stack.ropes[stacked.rope];
    const float* cos = kept.angles[stacked.rope].data();
    layer_pre(layer, residual, tokens, cos, cos + tokens * rope.half, rope.half, qkv);
    const auto view = [&](const char* name, int64_t head, int64_t heads) {
      return heads_of(name, qkv, type, tokens, columns, head, heads, size);
    };
    const GroupBatch& batch = groups[stacked.group];
    paged_attention({
        .out = heads_of("out", attended, type, tokens, wide, 0, layer.heads, size),
        .q = view("q", 0, layer.heads),
        .k = view("k", layer.heads, layer.kv_heads),
        .v = view("v", layer.heads + layer.kv_heads, layer.kv_heads),
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
    layer_post(layer, attended, residual, tokens, residual);
  }
  const PanelKernels& kernels = *chosen_isa().panel;
  for (int64_t token = 0; token < tokens; ++token) {
    kernels.norm(type, {stack.final_norm, stack.epsilon}, residual + token * row_bytes, nullptr,
                 hidden + token * row_bytes, width);
  }
}

void compute_angles(const int64_t* positions, int64_t tokens, const float* frequencies,
                    int64_t half, float scale, float* cos, float* sin) {
  constexpr int64_t piece = 32;
  shared_pool().run((tokens + piece - 1) / piece, [&](int64_t item) {
    const int64_t end = std::min(tokens, (item + 1) * piece);
    for (int64_t token = item * piece; token < end; ++token) {
      const auto position = static_cast<float>(positions[token]);
      for (int64_t i = 0; i < half; ++i) {
        const float turn = position * frequencies[i];
        cos[token * half + i] = std::cos(turn) * scale;
        sin[token * half + i] = std::sin(turn) * scale;
      }
    }
  });
}

void normalise(const Tensor& x, const Tensor* weight, bool plus_one, float epsilon, char* out) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t tokens = x.shape[0], heads = x.shape[1], size = x.shape[2];
  const int64_t bytes = size_of(x.type);
  std::vector<float> weights;
  if (weight != nullptr) {
    weights.resize(weight->shape[0]);
    for (int64_t i = 0; i < weight->shape[0]; ++i) {
      weights[i] = number_at(weight->data, weight->type, i) + (plus_one ? 1.0f : 0.0f);
    }
  }
  const bool each_head = static_cast<int64_t>(weights.size()) > size;
  const auto body = [&](int64_t token) {
    for (int64_t head = 0; head < heads; ++head) {
      const float* w = weight == nullptr ? nullptr : weights.data() + (each_head ? head * size : 0);
      const int64_t at = token * x.stride[0] + head * x.stride[1];
      kernels.norm(x.type, {w, epsilon}, x.as<char>() + at * bytes, nullptr,
                   out + (token * heads + head) * size * bytes, size);
    }
  };
  if (tokens * heads * size >= min_shared_numbers) return shared_pool().run(tokens, body);
  for (int64_t token = 0; token < tokens; ++token) body(token);
}

}  // namespace weft
