// What follows attention in a layer.

#include <array>

#include "dispatch.hpp"
#include "heads.hpp"
#include "layer.hpp"
#include "ops.hpp"
#include "phases.hpp"

namespace weft {
namespace {

class Post {
 public:
  Post(const Layer& layer, const char* attended, const char* residual, Rows inputs,
       int64_t tokens, char* out)
      : layer_(layer), tokens_(tokens), inputs_(inputs),
        in_(rows_of(residual, hidden_, type_)), result_(rows_of(out, hidden_, type_)) {
    static thread_local KeptMemory kept;
    attended_ = rows_of(attended, layer.heads * layer.head_size, type_);
    if (layer.latent != nullptr) {
      expand_.matrices = layer.latent->value_up;
      const int64_t skipped = layer.latent->rotated * size_of(type_);
      expand_.x = {attended_.data + skipped, attended_.stride};
      expand_.x_step = layer.head_size * size_of(type_);
      expand_.out_step = expand_.matrices.front()->outputs() * size_of(type_);
    }
    const bool gelu = layer.activation == Activation::gelu;
    gate_up_.activated = dense_ && (layer.gate_up->gated() || gelu);
    gate_up_.activation = layer.activation;
    gate_up_.limit = layer.limit;
    kept.lay_out([this](Slices& slices) { place(slices); });
    connect();
  }

  void run() {
    if (gate_.matrix != nullptr) open_gate();
    const int64_t dense = items_of(gate_up_), routing = items_of(router_);
    Phases phases;
    if (gate_.matrix == nullptr) add_expansion(phases);
    if (layer_.value_size == 0) {
      phases.add_rounding(output_);
    } else {
      phases.add_tokens(tokens_, [this](int64_t token) { gather_values(token); });
    }
    phases.add(output_.items(), [this](int64_t item) { output_.run(kernels_, item); });
    phases.add_tokens(tokens_, [this](int64_t token) { begin(token); });
    phases.add(dense + routing, [this, dense](int64_t item) {
      if (item < dense) return gate_up_.run(kernels_, item);
      router_.run(kernels_, item - dense);
    });
    if (routed_) phases.add_tokens(tokens_, [this](int64_t i) { choose(i); });
    if (dense > 0) {
      if (!gate_up_.activated) phases.add_tokens(tokens_, [this](int64_t token) { activate(token); });
      phases.add_rounding(down_);
      phases.add(down_.items(), [this](int64_t item) { down_.run(kernels_, item); });
      if (down_.out.data == y_.data && !shared_) {
        phases.add_tokens(tokens_, [this](int64_t token) { end_mlp(token); });
      } else if (layer_.norms_sums) {
        phases.add_tokens(tokens_, [this](int64_t token) {
          norm_sum(layer_.post_mlp_norm, layer_.post_mlp_norm_bias, result_, token);
        });
      }
    }
    const Matrix& large = dense_ ? *gate_up_.matrix : *layer_.output;
    const bool share = worth_sharing(work_of(large, tokens_));
    phases.run(share);
    if (routed_) {
      run_experts(*layer_.experts, {ids_, shares_, tokens_, top_k_}, expert_x_, sparse_,
                  [this](int64_t token) { end_experts(token); });
    }
    if (layer_.input_gate != nullptr || layer_.scalar != 1.0f) add_input(share);
  }

 private:
  Multiplication product_of(const Matrix* matrix, const void* bias = nullptr) const {
    return {.matrix = matrix, .bias = bias, .x = {}, .residual = {}, .out = {}, .rows = tokens_,
            .out_type = type_};
  }
  static int64_t items_of(const Multiplication& product) {
    return product.matrix == nullptr ? 0 : product.items();
  }
  void norm(const float* weight, Rows from, Rows add, Rows to, int64_t token) const {
    norm_by(layer_.epsilon, weight, from, add, to, token);
  }
  void norm_by(float epsilon, const float* weight, Rows from, Rows add, Rows to,
                int64_t token) const {
    kernels_.norm(type_, {weight, epsilon, layer_.centred}, from.row(token),
                  add.data == nullptr ? nullptr : add.row(token), to.row(token), hidden_);
  }

  // In place, with the bias that is then added as a residual is.
  void norm_sum(const float* weight, const void* bias, Rows rows, int64_t token) const {
    const Rows added{static_cast<char*>(const_cast<void*>(bias)), 0};
    norm_by(layer_.post_epsilon, weight, rows, added, rows, token);
  }

  // The sum of a residual and what is added to it, normalised and scaled where the layer does that.
  void add(const float* weight, Rows added, Rows residual, Rows to, int64_t token) const {
    const float epsilon = layer_.post_epsilon;
    if (weight != nullptr && !scaled_) return norm_by(epsilon, weight, added, residual, to, token);
    char* const row = added.row(token);
    if (weight != nullptr) norm_by(epsilon, weight, added, {}, added, token);
    if (scaled_) kernels_.scale(type_, layer_.residual_scale, row, nullptr, row, hidden_);
    kernels_.scale(type_, 1.0f, row, residual.row(token), to.row(token), hidden_);
  }

  // Of latent attention: heads of latents become heads of values.
  void add_expansion(Phases& phases) {
    if (layer_.latent == nullptr) return;
    phases.add(expand_.items(), [this](int64_t item) { expand_.run(kernels_, item); });
  }

  // What the output projection reads of attended heads whose values are shorter than keys.
  void gather_values(int64_t token) const {
    const int64_t size = layer_.value_size, bytes = size_of(type_);
    for (int64_t head = 0; head < layer_.heads; ++head) {
      kernels_.scale(type_, layer_.value_scale,
                     attended_.row(token) + head * layer_.head_size * bytes, nullptr,
                     output_.x.row(token) + head * size * bytes, size);
    }
    output_.round_row(token);
  }

  // What the output projection reads: attention times the gate that the layer's input opens.
  void open_gate() {
    const int64_t wide = layer_.output->inputs(), each = wide / gate_.matrix->outputs();
    const Rows from = layer_.latent == nullptr ? attended_ : expand_.out;
    Phases phases;
    add_expansion(phases);
    if (layer_.input_norm == nullptr) {
      phases.add_rounding(gate_);
    } else {
      phases.add_tokens(tokens_, [this](int64_t token) {
        norm(layer_.input_norm, in_, {}, gate_.x, token);
        gate_.round_row(token);
      });
    }
    phases.add(gate_.items(), [this](int64_t item) { gate_.run(kernels_, item); });
    phases.add_tokens(tokens_, [this, from, wide, each](int64_t token) {
      kernels_.gate(type_, layer_.gating, from.row(token), gate_.out.row(token), each,
                    output_.x.row(token), wide);
    });
    phases.run(worth_sharing(work_of(*layer_.output_gate, tokens_)));
  }

  void place(Slices& slices) {
    for (Multiplication* product : std::array{&output_, &gate_, &gate_up_, &down_, &router_,
                                              &input_gate_, &input_projection_}) {
      if (product->matrix == nullptr) continue;
      product->cut(threads_);
      product->round_into(slices.take(product->round_bytes()));
    }
    y_ = slices.rows(tokens_, hidden_, type_);
    middle_ = routed_ || dense_ ? slices.rows(tokens_, hidden_, type_) : result_;
    x_ = layer_.mlp_norm == nullptr ? middle_ : slices.rows(tokens_, hidden_, type_);
    output_.x = attended_;
    if (layer_.latent != nullptr) {
      output_.x = expand_.out = slices.rows(tokens_, layer_.output->inputs(), type_);
    }
    if (layer_.value_size > 0) {
      output_.x = slices.rows(tokens_, layer_.output->inputs(), type_);
    }
    if (gate_.matrix != nullptr) {
      gate_.x = layer_.input_norm == nullptr ? in_ : slices.rows(tokens_, hidden_, type_);
      gate_.out = slices.rows(tokens_, gate_.matrix->outputs(), type_);
      output_.x = slices.rows(tokens_, layer_.output->inputs(), type_);
    }
    if (layer_.down != nullptr) down_.x = slices.rows(tokens_, layer_.down->inputs(), type_);
    if (layer_.input_gate != nullptr) {
      input_gate_.out = slices.rows(tokens_, layer_.input_gate->outputs(), type_);
    }
    if (!routed_) return;
    ids_ = slices.take<int64_t>(tokens_ * top_k_);
    shares_ = slices.take<float>(tokens_ * top_k_);
    scores_ = slices.take<float>(tokens_ * layer_.router->outputs());
    if (layer_.float_scores) router_.out_type = DType::f32;
    router_.out = slices.rows(tokens_, layer_.router->outputs(), router_.out_type);
    sparse_ = slices.rows(tokens_, hidden_, type_);
    router_.x = beside_ ? slices.rows(tokens_, hidden_, type_) : x_;
    expert_x_ = beside_ ? slices.rows(tokens_, hidden_, type_) : x_;
  }

  // Where the products read and write.
  void connect() {
    const bool sums = layer_.norms_sums;
    const bool alone = sums || (layer_.post_attention_norm == nullptr && !scaled_);
    output_.out = alone ? middle_ : y_;
    if (alone) output_.residual = in_;
    gate_up_.x = x_;
    gate_up_.out = down_.x;
    const bool more = !sums && (routed_ || layer_.post_mlp_norm != nullptr || scaled_);
    down_.out = more ? y_ : result_;
    if (!more) down_.residual = middle_;
    input_gate_.x = result_;
    input_projection_.x = input_gate_.out;
    input_projection_.out = y_;
  }

  // The first sum, and what MLP, router and experts read.
  void begin(int64_t token) const {
    if (output_.out.data == y_.data) add(layer_.post_attention_norm, y_, in_, middle_, token);
    if (layer_.norms_sums) {
      norm_sum(layer_.post_attention_norm, layer_.post_attention_norm_bias, middle_, token);
    }
    const Rows read = layer_.parallel ? in_ : middle_;
    if (layer_.mlp_norm != nullptr) norm(layer_.mlp_norm, read, {}, x_, token);
    if (beside_) {
      char* const row = router_.x.row(token);
      norm(layer_.router_scale, middle_, {}, router_.x, token);
      kernels_.scale(type_, layer_.router_factor, row, nullptr, row, hidden_);
      norm(layer_.expert_norm, middle_, {}, expert_x_, token);
    }
    for (const Multiplication* product : {&gate_up_, &router_}) {
      if (product->matrix != nullptr) product->round_row(token);
    }
  }

  void choose(int64_t token) const {
    const int64_t width = layer_.router->outputs(), first = token * top_k_;
    float* const scores = scores_ + token * width;
    for (int64_t i = 0; i < width; ++i) {
      scores[i] = number_at(router_.out.row(token), router_.out_type, i);
    }
    const int64_t count = static_cast<int64_t>(layer_.experts->down.size());
    route_row(scores, count, layer_.routing, ids_ + first, shares_ + first);
    if (layer_.expert_scale == nullptr) return;
    for (int64_t i = first; i < first + top_k_; ++i) {
      shares_[i] *= layer_.expert_scale[ids_[i]];
    }
  }

  // Applies the activation of an MLP without a gate to what its first product gave.
  void activate(int64_t token) const {
    char* const row = down_.x.row(token);
    activate_row(type_, layer_.activation, layer_.activation_numbers, row, row,
                 layer_.down->inputs());
  }

  void end_mlp(int64_t token) const {
    if (beside_) return norm(layer_.dense_post_norm, y_, {}, y_, token);
    add(layer_.post_mlp_norm, y_, middle_, result_, token);
  }

  void end_experts(int64_t token) const {
    if (beside_) norm(layer_.expert_post_norm, sparse_, y_, sparse_, token);
    if (shared_) {
      char *const more = y_.row(token), *const row = sparse_.row(token);
      if (layer_.mlp_gate) {
        const int64_t width = layer_.router->outputs();
        float gate = scores_[token * width + width - 1];
        sigmoids(&gate, 1);
        kernels_.scale(type_, gate, more, nullptr, more, hidden_);
      }
      kernels_.scale(type_, 1.0f, more, row, row, hidden_);
    }
    add(layer_.post_mlp_norm, sparse_, middle_, result_, token);
  }

  // Gates the tokens' own inputs to the layer by the residual, and multiplies it.
  void add_input(bool share) {
    Phases phases;
    if (layer_.input_gate != nullptr) {
      const int64_t width = layer_.input_gate->outputs();
      phases.add_rounding(input_gate_);
      phases.add(input_gate_.items(), [this](int64_t item) { input_gate_.run(kernels_, item); });
      phases.add_tokens(tokens_, [this, width](int64_t token) {
        char* const gate = input_gate_.out.row(token);
        act_mul_row(type_, layer_.activation, layer_.limit, gate, inputs_.row(token), gate, width);
        input_projection_.round_row(token);
      });
      phases.add(input_projection_.items(),
                 [this](int64_t item) { input_projection_.run(kernels_, item); });
    }
    phases.add_tokens(tokens_, [this](int64_t token) {
      char* const row = result_.row(token);
      if (layer_.input_gate != nullptr) norm(layer_.post_input_norm, y_, result_, result_, token);
      if (layer_.scalar != 1.0f) kernels_.scale(type_, layer_.scalar, row, nullptr, row, hidden_);
    });
    phases.run(share);
  }

  const PanelKernels& kernels_ = *chosen_isa().panel;
  const Layer& layer_;
  const bool routed_ = layer_.experts != nullptr, dense_ = layer_.down != nullptr;
  const bool beside_ = routed_ && dense_ && layer_.dense_post_norm != nullptr;
  const bool shared_ = routed_ && dense_ && !beside_;
  const bool scaled_ = layer_.residual_scale != 1.0f;
  const DType type_ = layer_.type();
  const int64_t hidden_ = layer_.output->outputs(), tokens_;
  const int64_t top_k_ = layer_.routing.top_k;
  const int threads_ = shared_pool().threads();
  const Rows inputs_, in_, result_;
  Rows attended_{};
  HeadProducts expand_{.matrices = {}, .x = {}, .out = {}, .x_step = 0, .out_step = 0,
                       .rows = tokens_, .type = type_};  // of latent attention
  Multiplication output_ = product_of(layer_.output, layer_.output_bias);
  Multiplication gate_ = product_of(layer_.output_gate);
  Multiplication gate_up_ = product_of(layer_.gate_up, layer_.gate_up_bias);
  Multiplication down_ = product_of(layer_.down, layer_.down_bias);
  Multiplication router_ = product_of(layer_.router, layer_.router_bias);
  Multiplication input_gate_ = product_of(layer_.input_gate);
  Multiplication input_projection_ = product_of(layer_.input_projection);
  Rows middle_{}, x_{}, y_{};
  Rows sparse_{}, expert_x_{};  // of experts
  int64_t* ids_ = nullptr;
  float *shares_ = nullptr, *scores_ = nullptr;
};

}  // namespace

void layer_post(const Layer& layer, const char* attended, const char* residual, Rows inputs,
                int64_t tokens, char* out) {
  Post(layer, attended, residual, inputs, tokens, out).run();
}

}  // namespace weft
