// Ops that go row by row, over the pool where there are many numbers.

#include "ops.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace weft {
namespace {

constexpr int64_t min_shared_numbers = 64 << 10;
constexpr int64_t min_shared_bytes = 256 << 10;

void each_row(int64_t rows, int64_t numbers, const auto& body) {
  if (rows * numbers >= min_shared_numbers) return shared_pool().run(rows, body);
  for (int64_t row = 0; row < rows; ++row) body(row);
}

// What a norm multiplies with.
std::vector<float> factors_of(const Tensor& weight, bool plus_one) {
  std::vector<float> factors(weight.shape[0]);
  for (int64_t i = 0; i < weight.shape[0]; ++i) {
    factors[i] = number_at(weight.data, weight.type, i) + (plus_one ? 1.0f : 0.0f);
  }
  return factors;
}

const char* head_at(const Tensor& x, int64_t token, int64_t head) {
  return x.as<char>() + (token * x.stride[0] + head * x.stride[1]) * size_of(x.type);
}

}  // namespace

void compute_angles(const int64_t* positions, int64_t tokens, const Rope& rope, float* cos,
                    float* sin) {
  constexpr int64_t piece = 32;
  const bool own_queries = rope.query_scales != nullptr;
  const int64_t half = own_queries ? rope.half / 2 : rope.half;
  shared_pool().run((tokens + piece - 1) / piece, [&](int64_t item) {
    const int64_t end = std::min(tokens, (item + 1) * piece);
    for (int64_t token = item * piece; token < end; ++token) {
      const auto position = static_cast<float>(positions[token]);
      float *const c = cos + token * rope.half, *const s = sin + token * rope.half;
      for (int64_t i = 0; i < half; ++i) {
        const float turn = position * rope.frequencies[i];
        c[i] = std::cos(turn) * rope.scale;
        s[i] = std::sin(turn) * rope.scale;
      }
      if (!own_queries) continue;
      const int64_t step = std::min(positions[token] / rope.query_step, rope.query_scale_count - 1);
      for (int64_t i = 0; i < half; ++i) {
        c[half + i] = c[i] * rope.query_scales[step];
        s[half + i] = s[i] * rope.query_scales[step];
      }
    }
  });
}

void normalise(const Tensor& x, const Tensor* weight, bool plus_one, float epsilon, bool centred,
               char* out) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t tokens = x.shape[0], heads = x.shape[1], size = x.shape[2];
  std::vector<float> weights;
  if (weight != nullptr) weights = factors_of(*weight, plus_one);
  const bool each_head = static_cast<int64_t>(weights.size()) > size;
  each_row(tokens, heads * size, [&](int64_t token) {
    for (int64_t head = 0; head < heads; ++head) {
      const float* w = weight == nullptr ? nullptr : weights.data() + (each_head ? head * size : 0);
      kernels.norm(x.type, {w, epsilon, centred}, head_at(x, token, head), nullptr,
                   out + (token * heads + head) * size * size_of(x.type), size);
    }
  });
}

void square_sums(const Tensor& x, int64_t first, float* sums) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t tokens = x.shape[0], heads = x.shape[1], size = x.shape[2];
  each_row(tokens, heads * size, [&](int64_t token) {
    const char* row = head_at(x, token, 0);
    sums[2 * token] = kernels.squares(x.type, row, first * size);
    row += first * size * size_of(x.type);
    sums[2 * token + 1] = kernels.squares(x.type, row, (heads - first) * size);
  });
}

void normalise_by(const Tensor& x, int64_t first, const float* sums, const Tensor& weight,
                  bool plus_one, float epsilon, int64_t ranks, char* out) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t tokens = x.shape[0], heads = x.shape[1], size = x.shape[2];
  const std::vector<float> weights = factors_of(weight, plus_one);
  const int64_t begins[] = {0, first, heads};
  each_row(tokens, heads * size, [&](int64_t token) {
    for (int64_t part = 0; part < 2; ++part) {
      const int64_t begin = begins[part] * size, count = begins[part + 1] * size - begin;
      const float mean = sums[2 * token + part] / static_cast<float>(count * ranks);
      kernels.weigh(x.type, 1.0f / std::sqrt(mean + epsilon), weights.data() + begin,
                    head_at(x, token, 0) + begin * size_of(x.type),
                    out + (token * heads * size + begin) * size_of(x.type), count);
    }
  });
}

void rotate(const Tensor& x, const float* cos, const float* sin, int64_t half, char* out) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t tokens = x.shape[0], heads = x.shape[1], size = x.shape[2];
  const int64_t bytes = size * size_of(x.type);
  each_row(tokens, heads * size, [&](int64_t token) {
    for (int64_t head = 0; head < heads; ++head) {
      char* const to = out + (token * heads + head) * bytes;
      std::memcpy(to, head_at(x, token, head), bytes);
      kernels.rotate(x.type, nullptr, cos + token * half, sin + token * half, half, to, size);
    }
  });
}

void act_mul(const Tensor& gate_up, Activation activation, float limit, char* out) {
  const int64_t size = gate_up.shape[1] / 2, bytes = size * size_of(gate_up.type);
  each_row(gate_up.shape[0], 2 * size, [&](int64_t token) {
    const char* gate = head_at(gate_up, token, 0);
    act_mul_row(gate_up.type, activation, limit, gate, gate + bytes, out + token * bytes, size);
  });
}

// By what follows a gated product, as if these were its sums.
void act_mul_row(DType type, Activation activation, float limit, const char* gate,
                 const char* value, char* out, int64_t count) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t bytes = size_of(type);
  for (int64_t first = 0; first < count; first += gated_columns) {
    float sums[panel_columns] = {};
    const int64_t columns = std::min(gated_columns, count - first);
    for (int64_t i = 0; i < columns; ++i) {
      sums[i] = number_at(gate, type, first + i);
      sums[gated_columns + i] = number_at(value, type, first + i);
    }
    kernels.finish_gated(type, activation,
                         {.sums = sums, .bias = nullptr, .residual = nullptr, .residual_stride = 0,
                          .out = out + first * bytes, .out_stride = 0, .rows = 1,
                          .columns = columns, .limit = limit});
  }
}

void activate(const Tensor& x, Activation activation, const float* numbers, char* out) {
  const int64_t size = x.shape[1], bytes = size * size_of(x.type);
  each_row(x.shape[0], size, [&](int64_t token) {
    activate_row(x.type, activation, numbers, head_at(x, token, 0), out + token * bytes, size);
  });
}

void activate_row(DType type, Activation activation, const float* numbers, const char* row, char* out,
                  int64_t count) {
  if (activation == Activation::xielu) {
    return chosen_isa().panel->xielu(type, numbers, row, out, count);
  }
  if (activation == Activation::gelu) return chosen_isa().panel->gelu(type, row, out, count);
  for (int64_t i = 0; i < count; ++i) {
    const float number = number_at(row, type, i);
    const float positive = number < 0.0f ? 0.0f : number;  // NaN stays NaN
    write_number(positive * positive, out, type, i);
  }
}

void gate(const Tensor& x, const Tensor& gates, Gating gating, char* out) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t wide = x.shape[1] * x.shape[2];
  each_row(x.shape[0], wide, [&](int64_t token) {
    kernels.gate(x.type, gating, head_at(x, token, 0), head_at(gates, token, 0),
                 wide / gates.shape[1], out + token * wide * size_of(x.type), wide);
  });
}

void check_ids(const int64_t* ids, int64_t tokens, int64_t size) {
  for (int64_t token = 0; token < tokens; ++token) {
    if (ids[token] >= 0 && ids[token] < size) continue;
    throw std::out_of_range("token " + std::to_string(ids[token]) + " is outside the vocabulary");
  }
}

void gather_rows(const Tensor& table, const int64_t* ids, int64_t tokens, char* out) {
  check_ids(ids, tokens, table.shape[0]);
  const int64_t bytes = table.shape[1] * size_of(table.type);
  each_row(tokens, table.shape[1], [&](int64_t token) {
    std::memcpy(out + token * bytes, head_at(table, ids[token], 0), bytes);
  });
}

void copy_blocks(std::span<const char* const> sources, std::span<char* const> targets,
                 int64_t block_bytes, std::span<const int64_t> from, std::span<const int64_t> to) {
  if (sources.size() != targets.size() || from.size() != to.size()) {
    throw std::invalid_argument("sources and targets differ in number");
  }
  const auto arrays = static_cast<int64_t>(sources.size());
  const auto blocks = static_cast<int64_t>(from.size());
  const int64_t piece = std::max<int64_t>(1, min_shared_bytes / std::max<int64_t>(1, block_bytes));
  const int64_t pieces = (blocks + piece - 1) / piece;
  const auto copy = [&](int64_t item) {
    const char* const source = sources[item / pieces];
    char* const target = targets[item / pieces];
    const int64_t first = item % pieces * piece;
    for (int64_t i = first; i < std::min(blocks, first + piece); ++i) {
      std::memcpy(target + to[i] * block_bytes, source + from[i] * block_bytes, block_bytes);
    }
  };
  if (arrays * blocks * block_bytes >= min_shared_bytes) {
    return shared_pool().run(arrays * pieces, copy);
  }
  for (int64_t item = 0; item < arrays * pieces; ++item) copy(item);
}

void softcap(float* numbers, int64_t count, float cap) {
  constexpr int64_t run = 4096;  // numbers that are one row
  each_row((count + run - 1) / run, run, [&](int64_t i) {
    chosen_isa().scan->softcap(numbers + i * run, std::min(run, count - i * run), cap);
  });
}

}  // namespace weft
