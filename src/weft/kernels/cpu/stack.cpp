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

// The rows of a pass: the step's own tokens, and behind them those that it carries.
class Pass {
 public:
  Pass(const Stack& stack, const StackTokens& own, std::span<const GroupBatch> groups,
       const Carry* carry, Kept& kept)
      : stack_(stack), own_(own), groups_(groups), carry_(carry), kept_(kept),
        type_(stack.layers.front().layer->type()),
        width_(stack.layers.front().layer->qkv->inputs()),
        row_bytes_(width_ * size_of(type_)),
        room_(own.tokens + (carry == nullptr ? 0 : carry->most)) {
    if (carry != nullptr) carried_ = carry->begun;
  }

  int64_t run(char* hidden) {
    residual_ = Kept::fit(kept_.residual, room_ * row_bytes_);
    embed(stack_, own_.ids, rows(), {residual_, row_bytes_}, width_);
    if (stack_.inputs.projection != nullptr) {
      inputs_ = compute_inputs(stack_, own_.ids, own_.tokens, {residual_, row_bytes_}, kept_);
    }
    compute_own_angles();
    for (size_t i = 0; i < stack_.layers.size(); ++i) run_layer(i);
    const PanelKernels& kernels = *chosen_isa().panel;
    for (int64_t row = 0; row < rows(); ++row) {
      kernels.norm(type_, {stack_.final_norm, stack_.epsilon}, residual_ + row * row_bytes_,
                   nullptr, hidden + row * row_bytes_, width_);
    }
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
      Kept::fit(kept_.angles[i], 2 * room_ * rope.half);
      compute_angles(own_.positions, own_.tokens, rope.frequencies, rope.half, rope.scale, cos(i),
                     sin(i));
    }
  }

  void run_layer(size_t index) {
    const StackLayer& stacked = stack_.layers[index];
    const Layer& layer = *stacked.layer;
    const int64_t size = layer.head_size, wide = layer.heads * size;
    char* attended = Kept::fit(kept_.attended, room_ * wide * size_of(type_));
    if (rows() > 0) attend(index, attended);
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
    const int64_t columns = layer.columns(), size = layer.head_size, half =
        stack_.ropes[stacked.rope].half, own = own_.tokens;
    char* qkv = Kept::fit(kept_.qkv, room_ * columns * size_of(type_));
    float *const cosines = cos(stacked.rope), *const sines = sin(stacked.rope);
    if (!carried_.empty()) {
      carry_->rows.copy_angles(carried_, stacked.rope, cosines + own * half, sines + own * half);
    }
    layer_pre(layer, residual_, rows(), cosines, sines, half, qkv);
    const auto view = [&](const char* name, int64_t first, int64_t count, int64_t head,
                          int64_t heads) {
      char* const from = qkv + first * columns * size_of(type_);
      return heads_of(name, from, type_, count, columns, head, heads, size);
    };
    const auto q = [&](int64_t first, int64_t count) {
      return view("q", first, count, 0, layer.heads);
    };
    const auto k = [&](int64_t first, int64_t count) -> std::optional<Tensor> {
      if (layer.kv_heads == 0) return std::nullopt;
      return view("k", first, count, layer.heads, layer.kv_heads);
    };
    const auto v = [&](int64_t first, int64_t count) -> std::optional<Tensor> {
      if (layer.kv_heads == 0) return std::nullopt;
      return view("v", first, count, layer.heads + layer.kv_heads, layer.kv_heads);
    };
    if (const auto count = static_cast<int64_t>(carried_.size()); count > 0) {
      const std::optional<Tensor> keys = k(own, count), values = v(own, count);
      carry_->rows.submit(carried_, index, carried_residuals(), q(own, count),
                          keys ? &*keys : nullptr, values ? &*values : nullptr);
    }
    if (own == 0) return;
    const GroupBatch& batch = groups_[stacked.group];
    paged_attention({
        .out = heads_of("out", attended, type_, own, layer.heads * size, 0, layer.heads, size),
        .q = q(0, own),
        .k = k(0, own),
        .v = v(0, own),
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
  }

  const Stack& stack_;
  const StackTokens& own_;
  const std::span<const GroupBatch> groups_;
  const Carry* const carry_;
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
                  const Carry* carry, char* hidden) {
  thread_local Kept kept;
  return Pass(stack, own, groups, carry, kept).run(hidden);
}

}  // namespace weft
