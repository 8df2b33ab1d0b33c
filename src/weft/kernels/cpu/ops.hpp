// The small ops of a model, one by one. Rows are read where they lie and written contiguous.
#pragma once

#include <cstdint>
#include <span>

#include "panel.hpp"
#include "tensor.hpp"

namespace weft {

// One rotary embedding: frequencies, and what cos and sin are multiplied with. There are `half`
// numbers of a token, and as many frequencies; or, where queries are scaled by position, half as
// many: the angles of keys, and then those of queries, whose factor is the one of each `query_step`
// positions, of which the last one goes on for ever.
struct Rope {
  const float* frequencies;
  int64_t half;
  float scale;
  const float* query_scales = nullptr;
  int64_t query_scale_count = 0, query_step = 0;
};

// cos and sin [tokens, half] of positions times frequencies.
void compute_angles(const int64_t* positions, int64_t tokens, const Rope& rope, float* cos,
                    float* sin);

// Normalises x [tokens, heads, size]. The weight has heads * size numbers, or size numbers, or is
// not there; with plus_one 1 is added to it.
void normalise(const Tensor& x, const Tensor* weight, bool plus_one, float epsilon, bool centred,
               char* out);

// The sums [tokens, 2] of the squares of the first heads of x [tokens, heads, size] and of the
// others. Heads of a token lie one behind the other.
void square_sums(const Tensor& x, int64_t first, float* sums);
// Normalises the first heads of such x, and the others, by `sums` over so many ranks with as many
// heads each. The weight has heads * size numbers.
void normalise_by(const Tensor& x, int64_t first, const float* sums, const Tensor& weight,
                  bool plus_one, float epsilon, int64_t ranks, char* out);

// Rotates the first 2 * half dimensions of x [tokens, heads, size].
void rotate(const Tensor& x, const float* cos, const float* sin, int64_t half, char* out);

// activation(gate) * value of rows [tokens, 2 * size], gates first; limit is that of
// Activation::limited.
void act_mul(const Tensor& gate_up, Activation activation, float limit, char* out);
// The same for one row, whose gates and values may lie apart.
void act_mul_row(DType type, Activation activation, float limit, const char* gate,
                 const char* value, char* out, int64_t count);

// The activation of rows [tokens, size] of an MLP without a gate, with its numbers if it has some.
void activate(const Tensor& x, Activation activation, const float* numbers, char* out);
void activate_row(DType type, Activation activation, const float* numbers, const char* row, char* out,
                  int64_t count);

// Heads of x [tokens, heads, size] times the factors of their gates, which have a number for each of
// x's [tokens, heads * size], or one a head [tokens, heads].
void gate(const Tensor& x, const Tensor& gates, Gating gating, char* out);

// Throws std::out_of_range for an id outside a vocabulary of this size.
void check_ids(const int64_t* ids, int64_t tokens, int64_t size);
// Rows of a table [vocabulary, size] by ids. Throws as `check_ids` does.
void gather_rows(const Tensor& table, const int64_t* ids, int64_t tokens, char* out);

// Copies block from[i] of each source to block to[i] of the target in the same place. No block may
// be written twice. Throws std::invalid_argument if there are not as many of both.
void copy_blocks(std::span<const char* const> sources, std::span<char* const> targets,
                 int64_t block_bytes, std::span<const int64_t> from, std::span<const int64_t> to);

// In place: cap * tanh(x / cap) of contiguous numbers.
void softcap(float* numbers, int64_t count, float cap);

}  // namespace weft
