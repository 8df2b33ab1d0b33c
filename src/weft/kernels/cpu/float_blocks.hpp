// Products of float32 numbers in register blocks: some queries of a head by its keys or values.
//
// Included by floats.hpp alone.
#pragma once

#include "ahead.hpp"
#include "vectors.hpp"

namespace weft {
namespace {

constexpr int64_t group_keys = 32;    // read and widened at a time
constexpr int64_t block_queries = 4;  // of a register block, at most

// Keys of a block of Q queries, and vectors of values: what the registers hold, and enough sums that
// none waits for the one before.
template <int Q>
constexpr int block_keys = Q == 1 || (W == 16 && Q < 4) ? (W < 8 ? W : 8)
                           : Q < 4 || W == 16 ? 4 : 2;
template <int Q>
constexpr int block_values = Q == 1 && W < 16 ? 8 : Q == 4 && W < 16 ? 2 : 4;

// Fetches the blocks ahead between the steps of a block of Q queries, `bytes` at each of `steps`.
//
// Few queries of float32 wait for memory, and read faster if the lines are asked for one by one (22
// GB/s instead of 18); others compute, and this keeps the place in a register.
template <DType type, int Q, int64_t bytes>
class Fetching {
 public:
  Fetching(Ahead* ahead, int64_t steps)
      : ahead_(ahead), next_(ahead == nullptr || by_line ? nullptr : ahead->bytes(steps * bytes)) {}

  void step() {
    if (ahead_ == nullptr) return;
    if constexpr (by_line) return ahead_->lines(bytes / 64);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next_ + i, 0, 2);
    next_ += bytes;
  }

 private:
  static constexpr bool by_line = type == DType::f32 && Q < block_queries;
  Ahead* const ahead_;
  const char* next_;
};

// Dot products of Q queries with the keys of a group. Each is summed in the same order for any Q.
template <DType type, int Q>
void score_floats(const float* queries, int64_t width, const char* const* keys, Ahead* ahead,
                  float* scores) {
  constexpr int K = block_keys<Q>, parts = W / K;
  for (int64_t j = 0; j < group_keys; j += W) {
    vec sums[Q][parts];
    for (int part = 0; part < parts; ++part) {
      Fetching<type, Q, K * W * size_of(type)> fetching(ahead, width / W);
      vec block[Q][K] = {};
      for (int64_t d = 0; d < width; d += W) {
        fetching.step();
        vec query[Q];
        for (int i = 0; i < Q; ++i) {
          query[i] = load(queries + i * width + d);
          forget(query[i]);
        }
        for (int k = 0; k < K; ++k) {
          const vec key = read<type>(keys[j + part + parts * k] + d * size_of(type));
          for (int i = 0; i < Q; ++i) block[i][k] += query[i] * key;
        }
      }
      for (int i = 0; i < Q; ++i) sums[i][part] = gather<W, K>(block[i]);
    }
    for (int i = 0; i < Q; ++i) {
      store(scores + i * split_keys + j, gather<parts, parts>(sums[i]));
    }
  }
}

// Add C vectors' width of the values of a group, weighted, to the sums of Q queries.
template <DType type, int Q, int C>
inline void add_values(const float* weights, const char* const* values, int64_t d, int64_t width,
                       Ahead* ahead, float* into) {
  vec sums[Q][C];
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) sums[i][c] = load(into + i * width + d + c * W);
  }
  Fetching<type, Q, C * W * size_of(type)> fetching(ahead, group_keys);
  for (int64_t j = 0; j < group_keys; ++j) {
    fetching.step();
    vec weight[Q];
    for (int i = 0; i < Q; ++i) weight[i] = splat(weights[i * split_keys + j]);
    for (int c = 0; c < C; ++c) {
      const vec value = read<type>(values[j] + (d + c * W) * size_of(type));
      for (int i = 0; i < Q; ++i) sums[i][c] += weight[i] * value;
    }
  }
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) store(into + i * width + d + c * W, sums[i][c]);
  }
}

template <DType type, int Q>
void value_floats(const float* weights, const char* const* values, int64_t width, Ahead* ahead,
                  float* into) {
  constexpr int C = block_values<Q>;
  int64_t d = 0;
  for (; d + C * W <= width; d += C * W) {
    add_values<type, Q, C>(weights, values, d, width, ahead, into);
  }
  for (; d + 2 * W <= width; d += 2 * W) {
    add_values<type, Q, 2>(weights, values, d, width, ahead, into);
  }
  if (d < width) add_values<type, Q, 1>(weights, values, d, width, ahead, into);
}

// A function for each number of queries.
#define WEFT_EACH(name) {name<type, 1>, name<type, 2>, name<type, 3>, name<type, 4>}
template <DType type>
constexpr decltype(&score_floats<type, 1>) score_floats_of[] = WEFT_EACH(score_floats);
template <DType type>
constexpr decltype(&value_floats<type, 1>) value_floats_of[] = WEFT_EACH(value_floats);
#undef WEFT_EACH

}  // namespace
}  // namespace weft
