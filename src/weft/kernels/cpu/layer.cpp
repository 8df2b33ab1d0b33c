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
    if (layer_.value_size > 0) spread(row + values * bytes_);
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
  // Moves heads of values, which lie one after the other, to where heads of keys' size begin.
  void spread(char* values) const {
    const int64_t bytes = layer_.value_size * size_of(type_);
    for (int64_t head = layer_.kv_heads - 1; head >= 0; --head) {
      char* const to = values + head * bytes_;
      std::memmove(to, values + head * bytes, bytes);
      std::memset(to + bytes, 0, bytes_ - bytes);
    }
  }

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

void recurrent_pre(const Layer& layer, const char* residual, int64_t tokens, Rows mixed,
                   char* gates) {
  static thread_local KeptMemory kept;
  const PanelKernels& kernels = *chosen_isa().panel;
  const DType type = layer.type();
  const int64_t hidden = layer.qkv->inputs(), bytes = size_of(type);
  const bool gated = layer.state_gates != nullptr, low_rank = layer.state_gate_up != nullptr;
  const Rows in = rows_of(residual, hidden, type), opened = rows_of(gates, layer.mixer_gates, type);
  const auto product_of = [&](const Matrix* matrix, const void* bias, Rows out) {
    return Multiplication{.matrix = matrix, .bias = bias, .x = {}, .residual = {}, .out = out,
                          .rows = tokens, .out_type = type};
  };
  const auto from = [bytes](Rows rows, int64_t column) {
    return Rows{rows.data + column * bytes, rows.stride};
  };
  std::array<Multiplication, 2> both{product_of(layer.qkv, layer.qkv_bias, mixed)};
  if (gated) both[1] = product_of(layer.state_gates, nullptr, opened);
  const std::span products(both.data(), gated ? 2 : 1);
  std::array<Multiplication, 2> second{};
  if (low_rank) {
    const int64_t last = layer.mixer_gates - layer.forget_up->outputs();
    second = {product_of(layer.state_gate_up, nullptr, from(mixed, layer.qkv->outputs())),
              product_of(layer.forget_up, nullptr, from(opened, last))};
  }
  const std::span seconds(second.data(), low_rank ? 2 : 0);
  for (Multiplication& product : products) product.cut(shared_pool().threads());
  for (Multiplication& product : seconds) product.cut(shared_pool().threads());
  kept.lay_out([&](Slices& slices) {
    const Rows x = layer.input_norm == nullptr ? in : slices.rows(tokens, hidden, type);
    for (Multiplication& product : products) {
      product.round_into(slices.take(product.round_bytes()));
      product.x = x;
    }
    if (!low_rank) return;
    both[1].out = slices.rows(tokens, layer.state_gates->outputs(), type);
    for (Multiplication& product : seconds) product.round_into(slices.take(product.round_bytes()));
    const int64_t rank = layer.forget_up->inputs(), first = both[1].matrix->outputs() - 2 * rank;
    second[0].x = from(both[1].out, first);
    second[1].x = from(both[1].out, first + rank);
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
  const auto multiply_both = [&](std::array<Multiplication, 2>& two, bool pair) {
    const int64_t first = two[0].items(), all = first + (pair ? two[1].items() : 0);
    phases.add(all, [&two, &kernels, first](int64_t item) {
      if (item < first) return two[0].run(kernels, item);
      two[1].run(kernels, item - first);
    });
  };
  multiply_both(both, gated);
  if (low_rank) {
    const int64_t given = layer.mixer_gates - layer.forget_up->outputs();
    phases.add_tokens(tokens, [&, given](int64_t token) {
      std::memcpy(opened.row(token), both[1].out.row(token), given * bytes);
      for (const Multiplication& product : seconds) {
        if (product.rounds()) product.round_row(token);
      }
    });
    multiply_both(second, true);
  } else if (gated && layer.mixer_gates > layer.state_gates->outputs()) {
    // Of gates that `qkv` gives behind what is mixed.
    const int64_t given = layer.state_gates->outputs(), more = layer.mixer_gates - given;
    phases.add_tokens(tokens, [&, given, more](int64_t token) {
      std::memcpy(opened.row(token) + given * bytes, mixed.row(token) + layer.mixer_inputs * bytes,
                  more * bytes);
    });
  }
  phases.run(worth_sharing(work_of(*layer.qkv, tokens)));
}

}  // namespace weft
