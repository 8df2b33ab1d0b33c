// The phases of a layer. Between two phases all threads meet; within one, items are independent.

#include "layer.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "dispatch.hpp"
#include "pool.hpp"

namespace weft {
namespace {

constexpr int64_t piece = 4;  // tokens of one item of what is done token by token

int64_t pieces(int64_t tokens) { return (tokens + piece - 1) / piece; }

template <typename Body>
void each_token(int64_t item, int64_t tokens, const Body& body) {
  const int64_t end = std::min(tokens, (item + 1) * piece);
  for (int64_t token = item * piece; token < end; ++token) body(token);
}

void run(bool share, std::span<const int64_t> counts, const std::function<void(int, int64_t)>& body) {
  if (share) return shared_pool().run_phases(counts, body);
  for (int phase = 0; phase < static_cast<int>(counts.size()); ++phase) {
    for (int64_t item = 0; item < counts[phase]; ++item) body(phase, item);
  }
}

// Memory of the calling thread for what lives during one call.
char* thread_memory(int64_t bytes) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory.reset();
    size = 0;
    memory.reset(new char[bytes]);
    size = bytes;
  }
  return memory.get();
}

Rows rows_of(const void* data, int64_t columns, DType type) {
  return {static_cast<char*>(const_cast<void*>(data)), columns * size_of(type)};
}

}  // namespace

void layer_pre(const Layer& layer, const char* residual, int64_t tokens, const float* cos,
               const float* sin, int64_t half, char* qkv) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const DType type = layer.type();
  const int64_t hidden = layer.qkv->inputs(), head_bytes = layer.head_size * size_of(type);
  const Rows in = rows_of(residual, hidden, type), out = rows_of(qkv, layer.qkv->outputs(), type);
  Multiplication project{.matrix = layer.qkv, .bias = layer.qkv_bias, .x = {}, .residual = {},
                         .out = out, .rows = tokens, .out_type = type};
  char* memory = thread_memory(tokens * in.stride + project.round_bytes());
  project.round_into(memory);
  const Rows x = project.x = rows_of(memory + project.round_bytes(), hidden, type);
  const auto rotate = [&](int64_t token) {
    for (int64_t head = 0; head < layer.heads + layer.kv_heads; ++head) {
      const float* weight = layer.qk_norm == nullptr ? nullptr : layer.qk_norm + head * layer.head_size;
      const Norm norm{weight, layer.epsilon};
      kernels.rotate(type, weight == nullptr ? nullptr : &norm, cos + token * half,
                     sin + token * half, half, out.row(token) + head * head_bytes, layer.head_size);
    }
  };
  const std::array counts{pieces(tokens), project.items(), pieces(tokens)};
  run(worth_sharing(*layer.qkv, tokens), counts, [&](int phase, int64_t item) {
    if (phase == 1) return project.run(kernels, item);
    each_token(item, tokens, [&](int64_t token) {
      if (phase == 2) return rotate(token);
      kernels.norm(type, {layer.input_norm, layer.epsilon}, in.row(token), nullptr, x.row(token),
                   hidden);
      project.round_row(token);
    });
  });
}

void layer_post(const Layer& layer, const char* attended, const char* residual, int64_t tokens,
                char* out) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const DType type = layer.type();
  const int64_t hidden = layer.output->outputs(), size = layer.down->inputs();
  const Rows in = rows_of(residual, hidden, type), result = rows_of(out, hidden, type);
  int64_t round_bytes = 0;
  for (const Matrix* matrix : {layer.output, layer.gate_up, layer.down}) {
    round_bytes += matrix->round_bytes(tokens);
  }
  char* rounded = thread_memory(round_bytes + tokens * (3 * hidden + size) * size_of(type));
  char* memory = rounded + round_bytes;
  const auto take = [&](int64_t columns) {
    const Rows rows = rows_of(memory, columns, type);
    memory += tokens * rows.stride;
    return rows;
  };
  const Rows middle = take(hidden), x = take(hidden), y = take(hidden), gated = take(size);
  const bool norm_attention = layer.post_attention_norm != nullptr;
  const bool norm_mlp = layer.post_mlp_norm != nullptr;
  Multiplication output{
      .matrix = layer.output, .bias = layer.output_bias,
      .x = rows_of(attended, layer.output->inputs(), type), .residual = norm_attention ? Rows{} : in,
      .out = norm_attention ? y : middle, .rows = tokens, .out_type = type};
  Multiplication gate_up{
      .matrix = layer.gate_up, .bias = layer.gate_up_bias, .x = x, .residual = {}, .out = gated,
      .rows = tokens, .out_type = type, .activated = true, .activation = layer.activation};
  Multiplication down{
      .matrix = layer.down, .bias = layer.down_bias, .x = gated,
      .residual = norm_mlp ? Rows{} : middle, .out = norm_mlp ? y : result, .rows = tokens,
      .out_type = type};
  const auto norm = [&](const float* weight, Rows from, Rows add, Rows to, int64_t token) {
    kernels.norm(type, {weight, layer.epsilon}, from.row(token),
                 add.data == nullptr ? nullptr : add.row(token), to.row(token), hidden);
  };
  for (Multiplication* product : {&output, &gate_up, &down}) {
    product->round_into(rounded);
    rounded += product->round_bytes();
  }
  const std::array counts{output.rounds() ? pieces(tokens) : 0, output.items(), pieces(tokens),
                          gate_up.items(), down.rounds() ? pieces(tokens) : 0, down.items(),
                          norm_mlp ? pieces(tokens) : 0};
  run(worth_sharing(*layer.gate_up, tokens), counts, [&](int phase, int64_t item) {
    if (phase == 1) return output.run(kernels, item);
    if (phase == 3) return gate_up.run(kernels, item);
    if (phase == 5) return down.run(kernels, item);
    each_token(item, tokens, [&](int64_t token) {
      if (phase == 0) return output.round_row(token);
      if (phase == 4) return down.round_row(token);
      if (phase == 6) return norm(layer.post_mlp_norm, y, middle, result, token);
      if (norm_attention) norm(layer.post_attention_norm, y, in, middle, token);
      norm(layer.mlp_norm, middle, {}, x, token);
      gate_up.round_row(token);
    });
  });
}

}  // namespace weft
