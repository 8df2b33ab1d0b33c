// The pool, packed matrices, layers of floats and of integers with and without experts, and the
// choice of tokens under a sanitizer: several callers at once, a pool that is resized meanwhile,
// bodies that throw, and memory of exactly the size that a call may touch.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "sample.hpp"
#include "dispatch.hpp"
#include "layer.hpp"
#include "pool_checks.hpp"

namespace weft {
// dispatch.cpp names the table of a source that has no part in this.
extern const Kernels kernels_baseline;
const Kernels kernels_baseline{};
}  // namespace weft

using namespace weft;

namespace {

// Numbers of a type in memory of exactly their size.
struct Numbers {
  std::unique_ptr<char[]> data;
  Numbers(std::mt19937& draw, DType type, int64_t count) : data(new char[count * size_of(type)]) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t i = 0; i < count; ++i) {
      const float x = uniform(draw) * 0.1f;
      if (type == DType::f32) {
        std::memcpy(data.get() + 4 * i, &x, 4);
      } else {
        std::memcpy(data.get() + 2 * i, reinterpret_cast<const char*>(&x) + 2, 2);
      }
    }
  }
};

// What a layer has beside attention.
enum class Has { mlp, experts, shared, everything };

// How the matrices of a model are stored, and the type of its activations.
struct Kind {
  DType type;
  Format format;
  int64_t group = 0;  // of integers; 0: one scale an output
  Has has = Has::mlp;
};
constexpr Kind kinds[] = {{DType::f32, Format::f32},
                          {DType::bf16, Format::bf16},
                          {DType::bf16, Format::int8},
                          {DType::f32, Format::int4, 32},
                          {DType::bf16, Format::int4, 128},
                          {DType::bf16, Format::bf16, 0, Has::experts},
                          {DType::f32, Format::int4, 32, Has::experts},
                          {DType::f32, Format::f32, 0, Has::shared},
                          {DType::bf16, Format::int4, 32, Has::shared},
                          {DType::f32, Format::f32, 0, Has::everything},
                          {DType::bf16, Format::int8, 0, Has::everything}};

struct Model {
  static constexpr int64_t hidden = 130, size = 333, heads = 3, kv_heads = 1, head_size = 24;
  static constexpr int64_t columns = (heads + 2 * kv_heads) * head_size, half = 5, tokens = 21;
  static constexpr int64_t experts = 6, expert_size = 40, width = 9;
  const Kind kind;
  const DType type = kind.type;
  std::mt19937 draw{7};
  std::vector<Numbers> kept;
  std::vector<std::unique_ptr<Matrix>> matrices;
  Layer layer;
  Experts mixture;
  const char *residual, *attended, *inputs;
  const float *cos, *sin;

  explicit Model(const Kind& kind) : kind(kind) {
    layer.qkv = matrix(columns, hidden, false);
    layer.output = matrix(hidden, heads * head_size, false);
    layer.qkv_bias = numbers(type, columns);
    if (kind.has == Has::experts) layer.output_gate = matrix(heads * head_size, hidden, false);
    if (kind.has != Has::experts) {
      layer.gate_up = matrix(2 * size, hidden, true);
      layer.down = matrix(hidden, size, false);
      layer.gate_up_bias = numbers(type, 2 * size);
    }
    if (kind.has != Has::mlp) add_experts();
    if (kind.has == Has::everything) add_extras();
    layer.input_norm = floats(hidden);
    layer.qk_norm = floats((heads + kv_heads) * head_size);
    layer.post_attention_norm = floats(hidden);
    layer.mlp_norm = floats(hidden);
    layer.post_mlp_norm = floats(hidden);
    layer.heads = heads;
    layer.kv_heads = kv_heads;
    layer.head_size = head_size;
    layer.epsilon = 1e-5f;
    residual = numbers(type, tokens * hidden);
    attended = numbers(type, tokens * heads * head_size);
    inputs = numbers(type, tokens * width);
    cos = floats(tokens * half);
    sin = floats(tokens * half);
  }

  void add_experts() {
    for (int64_t i = 0; i < experts; ++i) {
      mixture.gate_up.push_back(matrix(2 * expert_size, hidden, true));
      mixture.down.push_back(matrix(hidden, expert_size, false));
    }
    layer.experts = &mixture;
    layer.mlp_gate = kind.has == Has::shared;
    layer.router = matrix(experts + (layer.mlp_gate ? 1 : 0), hidden, false);
    layer.routing.top_k = 2;
    layer.routing.normalise = true;
    if (layer.mlp_gate) add_routing();
  }

  void add_routing() {
    layer.activation = Activation::swiglu_oai;
    layer.float_scores = true;
    layer.router_bias = numbers(type, experts + 1);
    layer.routing.sigmoid = true;
    layer.routing.groups = 3;
    layer.routing.top_groups = 2;
    layer.routing.group_best = 2;
    layer.routing.scale = 1.5f;
    layer.routing.bias = floats(experts);
    mixture.activation = Activation::swiglu_oai;
    mixture.gate_up_bias = numbers(type, experts * 2 * expert_size);
    mixture.down_bias = numbers(type, experts * hidden);
  }

  void add_extras() {
    layer.output_gate = matrix(heads, hidden, false);
    layer.gating = Gating::softplus;
    layer.value_norm = true;
    layer.expert_scale = floats(experts);
    layer.router_scale = floats(hidden);
    layer.router_factor = 0.1f;
    layer.expert_norm = floats(hidden);
    layer.dense_post_norm = floats(hidden);
    layer.expert_post_norm = floats(hidden);
    layer.input_gate = matrix(width, hidden, false);
    layer.input_projection = matrix(hidden, width, false);
    layer.post_input_norm = floats(hidden);
    layer.scalar = 0.7f;
  }

  const char* numbers(DType of, int64_t count) {
    kept.emplace_back(draw, of, count);
    return kept.back().data.get();
  }
  const float* floats(int64_t count) {
    return reinterpret_cast<const float*>(numbers(DType::f32, count));
  }
  const Matrix* matrix(int64_t outputs, int64_t inputs, bool gated) {
    Tensor weight{"weight", const_cast<char*>(numbers(type, outputs * inputs)), type, 2};
    weight.shape = {outputs, inputs};
    weight.stride = {inputs, 1};
    if (is_quantised(kind.format)) {
      const DType scale_type = kind.group == 0 ? DType::f32 : DType::bf16;
      matrices.push_back(Matrix::quantised(
          {kind.format, outputs, inputs, gated, type, kind.group, scale_type, false}));
      matrices.back()->write_rounded(0, weight);
    } else {
      matrices.push_back(Matrix::pack({&weight, 1}, gated));
    }
    return matrices.back().get();
  }

  // What the layer makes of the tokens [first, first + count).
  std::vector<char> run(int64_t first, int64_t count) const {
    const int64_t bytes = size_of(type);
    std::vector<char> qkv(count * columns * bytes), out(count * hidden * bytes);
    const char* rows = residual + first * hidden * bytes;
    layer_pre(layer, rows, count, cos + first * half, sin + first * half, half, qkv.data());
    const Rows own = rows_of(inputs + first * width * bytes, width, type);
    layer_post(layer, attended + first * heads * head_size * bytes, rows, own, count, out.data());
    qkv.insert(qkv.end(), out.begin(), out.end());
    return qkv;
  }

  std::vector<char> expected(const std::vector<char>& whole, int64_t first, int64_t count) const {
    const int64_t wide = columns * size_of(type), narrow = hidden * size_of(type);
    const auto qkv = whole.begin() + first * wide;
    const auto out = whole.begin() + tokens * wide + first * narrow;
    std::vector<char> part(qkv, qkv + count * wide);
    part.insert(part.end(), out, out + count * narrow);
    return part;
  }
};

// Rows of settings, whose further columns are 0.
std::vector<double> rows_of(const std::vector<std::vector<double>>& given) {
  std::vector<double> all;
  for (std::vector<double> row : given) {
    row.resize(weft::settings().size());
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

// Rows of logits that fill no whole vectors, by every filter: the same tokens each time.
void check_choice() {
  constexpr int64_t rows = 5;
  for (const int64_t size : {1, 3, 130, 5003}) {
    const std::vector<double> settings = rows_of(
        {{0, 0, 1, 0}, {1, 0, 1, 0}, {0.7, 7, 1, 0}, {1.2, 0, 0.9, 0}, {1, 40, 0.8, 0.01}});
    const double draws[rows] = {0, 0.999, 0.5, 0.1, 0.3};
    int64_t tokens[2][rows];
    for (auto& chosen : tokens) {
      std::mt19937 draw(3);
      const Numbers logits(draw, DType::f32, rows * size);
      bool finite[rows];
      sample({reinterpret_cast<float*>(logits.data.get()), rows, size, settings.data(), draws, chosen,
              finite});
      for (const bool good : finite) require(good, "all logits are finite");
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = tokens[0][row];
      require(token >= 0 && token < size && token == tokens[1][row], "the same token each time");
    }
  }
}

}  // namespace

int main(int, char** words) {
  const int rounds = std::atoi(words[1]);
  shared_pool().resize(1);
  std::vector<std::unique_ptr<const Model>> models;
  std::vector<std::vector<char>> wholes;
  for (const Kind& kind : kinds) {
    models.push_back(std::make_unique<const Model>(kind));
    wholes.push_back(models.back()->run(0, Model::tokens));
  }
  shared_pool().resize(3);
  run_callers([&](int caller) {
    std::mt19937 draw(caller);
    for (int i = 0; i < rounds; ++i) {
      const size_t which = draw() % models.size();
      const int64_t first = draw() % Model::tokens;
      const int64_t count = 1 + draw() % (Model::tokens - first);
      const Model& model = *models[which];
      require(model.run(first, count) == model.expected(wholes[which], first, count),
              "the same bits for any rows, callers and threads");
      check_phases();
      if (i % 8 == 0) check_throwing();
      if (i % 8 == 4) check_choice();
    }
  });
  std::puts("good");
}
