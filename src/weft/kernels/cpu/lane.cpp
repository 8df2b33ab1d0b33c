// The two halves of a layer for a sub-batch whose attention is computed in between.

#include "lane.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "ops.hpp"

namespace weft {

void Lane::begin(const Stack& stack, const StackTokens& own, std::vector<LanePart> parts,
                 std::vector<int32_t> rows) {
  const auto add = [](int64_t sum, const LanePart& part) { return sum + part.tokens; };
  const int64_t in_parts = std::accumulate(parts.begin(), parts.end(), int64_t{0}, add);
  if (in_parts + static_cast<int64_t>(rows.size()) != own.tokens) {
    throw std::invalid_argument("parts and rows do not have " + std::to_string(own.tokens) +
                                " tokens");
  }
  stack_ = &stack;
  parts_ = std::move(parts);
  tokens_ = own.tokens;
  rows_.clear();
  for (const int32_t slot : rows) rows_.push_back({slot, false});
  const Layer& first = *stack.layers.front().layer;
  const int64_t width = first.qkv->inputs(), bytes = width * size_of(first.type());
  const Rows residual{fit(residual_, tokens_ * bytes), bytes};
  embed(stack, own.ids, tokens_, residual, width);
  inputs_ = {};
  if (stack.inputs.projection != nullptr) {
    inputs_ = compute_inputs(stack, own.ids, tokens_, residual, inputs_memory_, looked_up_);
  }
  angles_.resize(stack.ropes.size());
  for (size_t i = 0; i < stack.ropes.size(); ++i) {
    const Rope& rope = stack.ropes[i];
    float* const cos = fit(angles_[i], 2 * tokens_ * rope.half);
    compute_angles(own.positions, tokens_, rope, cos, cos + tokens_ * rope.half);
  }
}

void Lane::enter(uint32_t index) {
  const StackLayer& stacked = layer_of(*stack_, index);
  const Layer& layer = *stacked.layer;
  const int64_t half = stack_->ropes[stacked.rope].half;
  const float* const cos = angles_[stacked.rope].data();
  char* const qkv = fit(qkv_, tokens_ * layer.columns() * size_of(layer.type()));
  layer_pre(layer, residual_.data(), tokens_, cos, cos + tokens_ * half, half, qkv);
  for_good([&](std::span<const int32_t> slots, int64_t first) {
    const auto count = static_cast<int64_t>(slots.size());
    const Projected theirs = projected(layer, qkv, in_parts() + first, count);
    client_.submit(slots, index, theirs.q, theirs.k ? &*theirs.k : nullptr,
                   theirs.v ? &*theirs.v : nullptr);
  });
  int64_t first = 0;
  for (const LanePart& part : parts_) {
    const StackLayer& own = layer_of(*part.stack, index);
    attend(own, part.groups.at(own.group), projected(layer, qkv, first, part.tokens),
           attended_of(layer, first));
    first += part.tokens;
  }
}

void Lane::leave(uint32_t index) {
  const Layer& layer = *layer_of(*stack_, index).layer;
  const int64_t size = layer.head_size, wide = layer.heads * size;
  char* const attended = attended_of(layer, 0);
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i].failed) continue;
    std::memset(attended_of(layer, in_parts() + static_cast<int64_t>(i)), 0,
                wide * size_of(layer.type()));
  }
  for_good([&](std::span<const int32_t> slots, int64_t first) {
    char* const out = attended_of(layer, in_parts() + first);
    const auto count = static_cast<int64_t>(slots.size());
    client_.take(slots, index,
                 heads_of("out", out, layer.type(), count, wide, 0, layer.heads, size));
  });
  Rows inputs = inputs_;
  inputs.data += index * stack_->inputs.width * size_of(layer.type());
  layer_post(layer, attended, residual_.data(), inputs, tokens_, residual_.data());
}

void Lane::fail(std::span<const int32_t> slots) {
  for (Row& row : rows_) row.failed |= std::ranges::find(slots, row.slot) != slots.end();
}

void Lane::finish(char* hidden) const { normalise(*stack_, residual_.data(), tokens_, hidden); }

const StackLayer& Lane::layer_of(const Stack& stack, uint32_t layer) const {
  if (layer >= stack.layers.size()) {
    throw std::invalid_argument("there is no layer " + std::to_string(layer));
  }
  return stack.layers[layer];
}

char* Lane::attended_of(const Layer& layer, int64_t token) {
  const int64_t bytes = layer.heads * layer.head_size * size_of(layer.type());
  return fit(attended_, tokens_ * bytes) + token * bytes;
}

// Calls call(slots, place of the first) for each run of rows that have not failed.
template <typename Call>
void Lane::for_good(Call call) const {
  std::vector<int32_t> slots;
  for (size_t i = 0; i <= rows_.size(); ++i) {
    if (i < rows_.size() && !rows_[i].failed) {
      slots.push_back(rows_[i].slot);
    } else if (!slots.empty()) {
      call(std::span<const int32_t>(slots), static_cast<int64_t>(i - slots.size()));
      slots.clear();
    }
  }
}

}  // namespace weft
