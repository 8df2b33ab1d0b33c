// What precedes attention; see post.cpp for what follows it.

#include "layer.hpp"

#include <array>
#include <cstring>
#include <span>

#include "dispatch.hpp"
#include "phases.hpp"

namespace weft {
namespace {

// Normalises and rotates the heads of a token, which lie one after the other.
class Heads {
 public:
  Heads(const Layer& layer, const float* cos, const float* sin, int64_t half)
      : layer_(layer), cos_(cos), sin_(sin), stride_(half),
        half_(layer.own_query_angles ? half / 2 : half) {}

  void finish(int64_t token, char* row) const {
    const int64_t keys = layer_.heads, values = keys + layer_.kv_heads;
    if (layer_.value_is_key) {
      std::memcpy(row + values * bytes_, row + keys * bytes_, layer_.kv_heads * bytes_);
    }
    const bool each = layer_.qk_norm != nullptr && !layer_.qk_norm_whole;
    if (layer_.qk_norm_whole) {
      normalise(row, 0, keys);
      normalise(row, keys, layer_.kv_heads);
    }
    for (int64_t head = 0; head < values; ++head) {
      const Norm norm{each ? layer_.qk_norm + head * layer_.head_size : nullptr, layer_.epsilon,
                      layer_.centred};
      const int64_t at = token * stride_ + (head < layer_.heads ? stride_ - half_ : 0);
      kernels_.rotate(type_, each && !layer_.qk_norm_rotated ? &norm : nullptr, cos_ + at,
                      sin_ + at, half_, row + head * bytes_, layer_.head_size);
      if (each && layer_.qk_norm_rotated) normalise(row, head, 1);
    }
    if (!layer_.value_norm) return;
    for (int64_t head = values; head < values + layer_.kv_heads; ++head) {
      char* const value = row + head * bytes_;
      kernels_.norm(type_, {nullptr, layer_.epsilon}, value, nullptr, value, layer_.head_size);
    }
  }

 private:
  // One norm over so many heads.
  void normalise(char* row, int64_t head, int64_t count) const {
    char* const heads = row + head * bytes_;
    const Norm norm{layer_.qk_norm + head * layer_.head_size, layer_.epsilon, layer_.centred};
    kernels_.norm(type_, norm, heads, nullptr, heads, count * layer_.head_size);
  }

  const PanelKernels& kernels_ = *chosen_isa().panel;
  const Layer& layer_;
  const float *cos_, *sin_;
  const int64_t stride_, half_;  // numbers of a token, and those of a head
  const DType type_ = layer_.type();
  const int64_t bytes_ = layer_.head_size * size_of(type_);
};

}  // namespace

void layer_pre(const Layer& layer, const char* residual, int64_t tokens, const float* cos,
               const float* sin, int64_t half, char* qkv) {
  if (layer.latent != nullptr) return latent_pre(layer, residual, tokens, cos, sin, half, qkv);
  static thread_local KeptMemory kept;
  const PanelKernels& kernels = *chosen_isa().panel;
  const DType type = layer.type();
  const int64_t hidden = layer.qkv->inputs();
  const Rows in = rows_of(residual, hidden, type), out = rows_of(qkv, layer.columns(), type);
  Multiplication project{.matrix = layer.qkv, .bias = layer.qkv_bias, .x = {}, .residual = {},
                         .out = out, .rows = tokens, .out_type = type};
  project.cut(shared_pool().threads());
  kept.lay_out([&](Slices& slices) {
    project.round_into(slices.take(project.round_bytes()));
    project.x = layer.input_norm == nullptr ? in : slices.rows(tokens, hidden, type);
  });
  const Rows x = project.x;
  const Heads heads(layer, cos, sin, half);
  Phases phases;
  if (layer.input_norm == nullptr) {
    phases.add_rounding(project);
  } else {
    phases.add_tokens(tokens, [&](int64_t token) {
      kernels.norm(type, {layer.input_norm, layer.epsilon, layer.centred}, in.row(token), nullptr,
                   x.row(token), hidden);
      project.round_row(token);
    });
  }
  phases.add(project.items(), [&](int64_t item) { project.run(kernels, item); });
  phases.add_tokens(tokens, [&](int64_t token) { heads.finish(token, out.row(token)); });
  phases.run(worth_sharing(work_of(*layer.qkv, tokens)));
}

void recurrent_pre(const Layer& layer, const char* residual, int64_t tokens, char* mixed,
                   char* gates) {
  static thread_local KeptMemory kept;
  const PanelKernels& kernels = *chosen_isa().panel;
  const DType type = layer.type();
  const int64_t hidden = layer.qkv->inputs();
  const Rows in = rows_of(residual, hidden, type);
  const auto product_of = [&](const Matrix* matrix, const void* bias, char* out) {
    return Multiplication{.matrix = matrix, .bias = bias, .x = {}, .residual = {},
                          .out = rows_of(out, matrix->outputs(), type), .rows = tokens,
                          .out_type = type};
  };
  std::array<Multiplication, 2> both{product_of(layer.qkv, layer.qkv_bias, mixed)};
  if (layer.state_gates != nullptr) both[1] = product_of(layer.state_gates, nullptr, gates);
  const std::span products(both.data(), layer.state_gates == nullptr ? 1 : 2);
  for (Multiplication& product : products) product.cut(shared_pool().threads());
  kept.lay_out([&](Slices& slices) {
    const Rows x = layer.input_norm == nullptr ? in : slices.rows(tokens, hidden, type);
    for (Multiplication& product : products) {
      product.round_into(slices.take(product.round_bytes()));
      product.x = x;
    }
  });
  const Rows x = both[0].x;
  Phases phases;
  phases.add_tokens(tokens, [&](int64_t token) {
    if (layer.input_norm != nullptr) {
      kernels.norm(type, {layer.input_norm, layer.epsilon, layer.centred}, in.row(token), nullptr,
                   x.row(token), hidden);
    }
    for (const Multiplication& product : products) {
      if (product.rounds()) product.round_row(token);
    }
  });
  const int64_t first = both[0].items(), all = first + (products.size() > 1 ? both[1].items() : 0);
  phases.add(all, [&](int64_t item) {
    if (item < first) return both[0].run(kernels, item);
    both[1].run(kernels, item - first);
  });
  phases.run(worth_sharing(work_of(*layer.qkv, tokens)));
}

}  // namespace weft
