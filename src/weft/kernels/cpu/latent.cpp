// What precedes latent attention, in its absorbed form (DeepSeek-V2 2024, appendix C).

#include <cmath>
#include <cstring>

#include "dispatch.hpp"
#include "heads.hpp"
#include "layer.hpp"
#include "phases.hpp"

namespace weft {
namespace {

class LatentPre {
 public:
  LatentPre(const Layer& layer, const char* residual, int64_t tokens, const float* cos,
            const float* sin, int64_t half, char* qkv)
      : layer_(layer), tokens_(tokens), cos_(cos), sin_(sin), stride_(half),
        half_(layer.own_query_angles ? half / 2 : half),
        in_(rows_of(residual, hidden_, type_)), out_(rows_of(qkv, layer.columns(), type_)) {
    static thread_local KeptMemory kept;
    project_.cut(threads_);
    if (latent_.query_up != nullptr) up_.cut(threads_);
    kept.lay_out([this](Slices& slices) { place(slices); });
  }

  void run() {
    Phases phases;
    phases.add_tokens(tokens_, [this](int64_t token) {
      if (layer_.input_norm != nullptr) {
        kernels_.norm(type_, {layer_.input_norm, layer_.epsilon, layer_.centred}, in_.row(token),
                      nullptr, project_.x.row(token), hidden_);
      }
      if (project_.rounds()) project_.round_row(token);
    });
    phases.add(project_.items(), [this](int64_t item) { project_.run(kernels_, item); });
    phases.add_tokens(tokens_, [this](int64_t token) { end_projection(token); });
    if (latent_.query_up != nullptr) {
      phases.add(up_.items(), [this](int64_t item) { up_.run(kernels_, item); });
      phases.add_tokens(tokens_, [this](int64_t token) { rotate_queries(token); });
    }
    phases.add(absorb_.items(), [this](int64_t item) { absorb_.run(kernels_, item); });
    phases.run(worth_sharing(work_of(*layer_.qkv, tokens_)));
  }

 private:
  void place(Slices& slices) {
    project_.round_into(slices.take(project_.round_bytes()));
    project_.x = layer_.input_norm == nullptr ? in_ : slices.rows(tokens_, hidden_, type_);
    project_.out = slices.rows(tokens_, layer_.qkv->outputs(), type_);
    queries_ = project_.out;
    if (latent_.query_up != nullptr) {
      up_.round_into(slices.take(up_.round_bytes()));
      up_.x = project_.out;
      up_.out = queries_ = slices.rows(tokens_, latent_.query_up->outputs(), type_);
    }
    absorb_.x = queries_;
    absorb_.out = {out_.data + latent_.rotated * size_, out_.stride};
  }

  void rotate(int64_t token, int64_t first, char* numbers) const {
    const int64_t at = token * stride_ + first;
    kernels_.rotate(type_, nullptr, cos_ + at, sin_ + at, half_, numbers, latent_.rotated);
  }

  // What the angles of a token's queries are multiples of those of its key by.
  float query_factor(int64_t token) const {
    const float *const c = cos_ + token * stride_, *const s = sin_ + token * stride_;
    return std::fabs(c[0]) >= std::fabs(s[0]) ? c[half_] / c[0] : s[half_] / s[0];
  }

  // The row, which is written as key and as value, and what queries are made of.
  void end_projection(int64_t token) const {
    char* const joint = project_.out.row(token);
    const char* const row = joint + (layer_.qkv->outputs() - layer_.head_size) * size_;
    char* const key = out_.row(token) + layer_.heads * row_bytes_;
    std::memcpy(key, row + rank_ * size_, latent_.rotated * size_);
    rotate(token, 0, key);
    kernels_.norm(type_, {latent_.row_norm, latent_.epsilon}, row, nullptr,
                  key + latent_.rotated * size_, rank_);
    std::memcpy(key + row_bytes_, key, row_bytes_);
    if (latent_.query_up == nullptr) return rotate_queries(token);
    kernels_.norm(type_, {latent_.query_norm, latent_.epsilon}, joint, nullptr, joint,
                  latent_.query_up->inputs());
    if (up_.rounds()) up_.round_row(token);
  }

  void rotate_queries(int64_t token) const {
    const float factor = layer_.own_query_angles ? query_factor(token) : 1.0f;
    for (int64_t head = 0; head < layer_.heads; ++head) {
      char* const to = out_.row(token) + head * row_bytes_;
      char* const query = queries_.row(token) + head * absorb_.x_step;
      std::memcpy(to, query + plain_ * size_, latent_.rotated * size_);
      rotate(token, stride_ - half_, to);
      if (layer_.own_query_angles) kernels_.scale(type_, factor, query, nullptr, query, plain_);
    }
  }

  const PanelKernels& kernels_ = *chosen_isa().panel;
  const Layer& layer_;
  const Latent& latent_ = *layer_.latent;
  const int64_t tokens_;
  const float *const cos_, *const sin_;
  const int64_t stride_, half_;  // numbers of a token, and those of a head
  const DType type_ = layer_.type();
  const int64_t size_ = size_of(type_), hidden_ = layer_.qkv->inputs();
  const int64_t row_bytes_ = layer_.head_size * size_;
  const int64_t rank_ = layer_.head_size - latent_.rotated;
  const int64_t plain_ = latent_.key_up.front()->inputs();
  const int threads_ = shared_pool().threads();
  const Rows in_, out_;
  Rows queries_{};  // of each head those that are not rotated, then those that are
  Multiplication project_{.matrix = layer_.qkv, .bias = layer_.qkv_bias, .x = {}, .residual = {},
                          .out = {}, .rows = tokens_, .out_type = type_};
  Multiplication up_{.matrix = latent_.query_up, .bias = nullptr, .x = {}, .residual = {},
                     .out = {}, .rows = tokens_, .out_type = type_};
  HeadProducts absorb_{.matrices = latent_.key_up, .x = {}, .out = {},
                       .x_step = (plain_ + latent_.rotated) * size_, .out_step = row_bytes_,
                       .rows = tokens_, .type = type_};
};

}  // namespace

void latent_pre(const Layer& layer, const char* residual, int64_t tokens, const float* cos,
                const float* sin, int64_t half, char* qkv) {
  LatentPre(layer, residual, tokens, cos, sin, half, qkv).run();
}

}  // namespace weft
