// The loop over the layers, and the small steps before and after it.

#include "stack.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "dispatch.hpp"
#include "ops.hpp"
#include "phases.hpp"

namespace weft {
namespace {

// Memory that a thread keeps from step to step: fresh one would be faulted in page by page.
struct Kept {
  Lines<char> residual, inputs, looked_up, qkv, state_gates, attended;
  std::vector<Lines<float>> angles;  // cos and then sin of each rope
};

}  // namespace

void embed(const Stack& stack, const int64_t* ids, int64_t tokens, Rows to, int64_t hidden) {
  const DType type = stack.layers.front().layer->type();
  if (stack.packed != nullptr) {
    check_ids(ids, tokens, stack.packed->outputs());
    gather(*stack.packed, ids, tokens, to);
  } else {
    gather_rows(stack.table, ids, tokens, to.data);
  }
  const bool scaled = stack.embedding_scale != 1.0f;
  if (!scaled && !stack.embedding_norm) return;
  const PanelKernels& kernels = *chosen_isa().panel;
  Phases phases;
  phases.add_tokens(tokens, [&](int64_t token) {
    char* const row = to.row(token);
    if (scaled) kernels.scale(type, stack.embedding_scale, row, nullptr, row, hidden);
    if (stack.embedding_norm) {
      kernels.norm(type, {nullptr, stack.epsilon}, row, nullptr, row, hidden);
    }
  });
  phases.run(tokens > piece);
}

Rows compute_inputs(const Stack& stack, const int64_t* ids, int64_t tokens, Rows embedded,
                    Lines<char>& inputs_memory, Lines<char>& looked_up) {
  const LayerInputs& inputs = stack.inputs;
  const DType type = stack.layers.front().layer->type();
  const int64_t columns = inputs.projection->outputs(), bytes = columns * size_of(type);
  const Rows out{fit(inputs_memory, tokens * bytes), bytes};
  const Rows found{fit(looked_up, tokens * bytes), bytes};
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

Projected projected(const Layer& layer, char* qkv, int64_t first, int64_t count) {
  const int64_t columns = layer.columns(), size = layer.head_size;
  char* const from = qkv + first * columns * size_of(layer.type());
  const auto heads = [&](const char* name, int64_t head, int64_t number) {
    return heads_of(name, from, layer.type(), count, columns, head, number, size);
  };
  Projected found{heads("q", 0, layer.heads), std::nullopt, std::nullopt};
  if (layer.kv_heads > 0) {
    found.k = heads("k", layer.heads, layer.kv_heads);
    found.v = heads("v", layer.heads + layer.kv_heads, layer.kv_heads);
  }
  return found;
}

void attend(const StackLayer& stacked, const GroupBatch& batch, const Projected& tokens,
            char* out) {
  const Layer& layer = *stacked.layer;
  const int64_t size = layer.head_size, wide = layer.heads * size;
  paged_attention({
      .out = heads_of("out", out, layer.type(), tokens.q.shape[0], wide, 0, layer.heads, size),
      .q = tokens.q,
      .k = tokens.k,
      .v = tokens.v,
      .k_cache = stacked.k_cache,
      .v_cache = stacked.v_cache,
      .block_tables = batch.block_tables,
      .query_start = batch.query_start,
      .seq_lens = batch.seq_lens,
      .slot_mapping = batch.slot_mapping,
      .block_size = batch.block_size,
      .window = stacked.window,
      .causal = stacked.causal,
      .scale = stacked.scale,
      .softcap = stacked.softcap,
      .sinks = stacked.sinks,
  });
}

void normalise(const Stack& stack, const char* residual, int64_t rows, char* hidden) {
  const Layer& first = *stack.layers.front().layer;
  const int64_t width = first.qkv->inputs(), bytes = width * size_of(first.type());
  if (stack.final_norm == nullptr) {
    std::memcpy(hidden, residual, rows * bytes);
    return;
  }
  const PanelKernels& kernels = *chosen_isa().panel;
  for (int64_t row = 0; row < rows; ++row) {
    kernels.norm(first.type(), {stack.final_norm, stack.epsilon, stack.centred}, residual + row * bytes,
                 nullptr, hidden + row * bytes, width);
  }
}

namespace {

// The rows of a pass: the step's own tokens, and behind them those that it carries.
class Pass {
 public:
  Pass(const Stack& stack, const StackTokens& own, std::span<const GroupBatch> groups,
       const Carry* carry, const DeltaBatch* states, Kept& kept)
      : stack_(stack), own_(own), groups_(groups), carry_(carry), states_(states), kept_(kept),
        type_(stack.layers.front().layer->type()),
        width_(stack.layers.front().layer->qkv->inputs()),
        row_bytes_(width_ * size_of(type_)),
        room_(own.tokens + (carry == nullptr ? 0 : carry->most)) {
    if (carry != nullptr) carried_ = carry->begun;
  }

  int64_t run(char* hidden) {
    residual_ = fit(kept_.residual, room_ * row_bytes_);
    if (own_.embedded != nullptr) {
      std::memcpy(residual_, own_.embedded, own_.tokens * row_bytes_);
    } else {
      embed(stack_, own_.ids, rows(), {residual_, row_bytes_}, width_);
    }
    if (stack_.inputs.projection != nullptr) {
      inputs_ = compute_inputs(stack_, own_.ids, own_.tokens, {residual_, row_bytes_}, kept_.inputs,
                               kept_.looked_up);
    }
    compute_own_angles();
    for (size_t i = 0; i < stack_.layers.size(); ++i) run_layer(i);
    normalise(stack_, residual_, rows(), hidden);
    return static_cast<int64_t>(carried_.size());
  }

 private:
  int64_t rows() const { return own_.tokens + static_cast<int64_t>(carried_.size()); }
  char* carried_residuals() const { return residual_ + own_.tokens * row_bytes_; }
  float* cos(size_t rope) const { return kept_.angles[rope].data(); }
  float* sin(size_t rope) const { return cos(rope) + room_ * stack_.ropes[rope].half; }

  void compute_own_angles() {
    kept_.angles.resize(std::max(kept_.angles.size(), stack_.ropes.size()));
    for (size_t i = 0; i < stack_.ropes.size(); ++i) {
      const Rope& rope = stack_.ropes[i];
      fit(kept_.angles[i], 2 * room_ * rope.half);
      compute_angles(own_.positions, own_.tokens, rope, cos(i), sin(i));
    }
  }

  void run_layer(size_t index) {
    const StackLayer& stacked = stack_.layers[index];
    const Layer& layer = *stacked.layer;
    const int64_t size = layer.head_size, wide = layer.heads * size;
    char* attended = fit(kept_.attended, room_ * wide * size_of(type_));
    if (layer.mixer != nullptr) {
      if (rows() > 0) mix(index, attended);
    } else if (rows() > 0) {
      attend(index, attended);
    }
    if (carry_ != nullptr) {
      carried_ = {};
      if (!carry_->limits.empty()) {
        char* theirs = attended + own_.tokens * wide * size_of(type_);
        const int64_t most = std::min<int64_t>(carry_->limits[index], carry_->most);
        const Tensor room = heads_of("out", theirs, type_, most, wide, 0, layer.heads, size);
        carried_ = carry_->rows.take(index, most, room, carried_residuals());
      }
    }
    if (rows() > 0) layer_post(layer, attended, residual_, inputs_, rows(), residual_);
    inputs_.data += stack_.inputs.width * size_of(type_);
  }

  void attend(size_t index, char* attended) {
    const StackLayer& stacked = stack_.layers[index];
    const Layer& layer = *stacked.layer;
    const int64_t half = stack_.ropes[stacked.rope].half, own = own_.tokens;
    char* qkv = fit(kept_.qkv, room_ * layer.columns() * size_of(type_));
    float *const cosines = cos(stacked.rope), *const sines = sin(stacked.rope);
    if (!carried_.empty()) {
      carry_->rows.copy_angles(carried_, stacked.rope, cosines + own * half, sines + own * half);
    }
    layer_pre(layer, residual_, rows(), cosines, sines, half, qkv);
    if (const auto count = static_cast<int64_t>(carried_.size()); count > 0) {
      const Projected theirs = projected(layer, qkv, own, count);
      carry_->rows.submit(carried_, index, carried_residuals(), theirs.q,
                          theirs.k ? &*theirs.k : nullptr, theirs.v ? &*theirs.v : nullptr);
    }
    if (own == 0) return;
    weft::attend(stacked, groups_[stacked.group], projected(layer, qkv, 0, own), attended);
  }

  void mix(size_t index, char* mixed) {
    const StackLayer& stacked = stack_.layers[index];
    const Layer& layer = *stacked.layer;
    const auto rows_in = [this](const char* name, Lines<char>& memory, int64_t columns,
                                int64_t stride) {
      Tensor rows{name, fit(memory, room_ * stride * size_of(type_)), type_, 2};
      rows.shape = {own_.tokens, columns};
      rows.stride = {stride, 1};
      return rows;
    };
    const int64_t wide = std::max(layer.columns(), layer.mixer_inputs);
    const Tensor x = rows_in("x", kept_.qkv, layer.mixer_inputs, wide);
    const Tensor gates =
        rows_in("gates", kept_.state_gates, layer.mixer_gates, layer.mixer_gates);
    recurrent_pre(layer, residual_, own_.tokens, rows_of(x.as<char>(), wide, type_),
                  gates.as<char>());
    layer.mixer->advance(stacked.states, *states_, x, gates, mixed);
  }

  const Stack& stack_;
  const StackTokens& own_;
  const std::span<const GroupBatch> groups_;
  const Carry* const carry_;
  const DeltaBatch* const states_;
  Kept& kept_;
  const DType type_;
  const int64_t width_, row_bytes_;
  const int64_t room_;               // rows of any layer at most
  char* residual_ = nullptr;         // [room, hidden]
  Rows inputs_{};
  std::span<const int32_t> carried_;
};

}  // namespace

int64_t run_stack(const Stack& stack, const StackTokens& own, std::span<const GroupBatch> groups,
                  const Carry* carry, char* hidden, const DeltaBatch* states) {
  if (stack.state_slots > 0 && (states == nullptr || carry != nullptr)) {
    throw std::invalid_argument(states == nullptr
                                    ? "recurrent layers need the slots that rows read and write"
                                    : "rows are not carried through recurrent layers");
  }
  thread_local Kept kept;
  return Pass(stack, own, groups, carry, states, kept).run(hidden);
}

}  // namespace weft
