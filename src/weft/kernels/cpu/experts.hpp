// Mixtures of experts: which experts a token goes to, and what they make of it.
#pragma once

#include <cstdint>
#include <vector>

#include "calls.hpp"
#include "matrix.hpp"

namespace weft {

// The matrices of each expert. Nothing is owned.
struct Experts {
  std::vector<const Matrix*> gate_up;  // gated [2 * size, hidden]; with relu2 not, [size, hidden]
  std::vector<const Matrix*> down;     // [hidden, size]
  // Of the matrices' type, or null.
  const void* gate_up_bias = nullptr;  // [experts, 2 * size]
  const void* down_bias = nullptr;     // [experts, hidden]
  Activation activation = Activation::silu;
  float limit = 0;  // of Activation::limited
};

// Which experts each token goes to, and what their results are multiplied with: [tokens, top_k].
struct Routes {
  const int64_t* ids;
  const float* shares;
  int64_t tokens, top_k;
};

// How experts are chosen and weighed; see `Routing` in routing.py.
struct Routing {
  int64_t top_k = 0;
  bool normalise = false;  // shares of a token sum to 1
  bool sigmoid = false;    // weights are the scores' sigmoids, in place of their softmax
  int64_t groups = 1, top_groups = 1;
  int64_t group_best = 1;        // so many weights of a group, added up, rank it
  float scale = 1;               // multiplies shares at the end
  const float* bias = nullptr;   // [experts], is added to what chooses
};

// row[i] = 1 / (1 + exp(-row[i])), with the bits of the instruction set's own exponential.
void sigmoids(float* row, int64_t count);

// Chooses experts by `count` scores, of equal ones the first, the best one first. The scores are
// overwritten. If one of them is NaN, so are all shares.
void route_row(float* scores, int64_t count, const Routing& routing, int64_t* ids, float* shares);
// The same for scores [tokens, experts].
void route(const Tensor& scores, const Routing& routing, int64_t* ids, float* shares);

// out [tokens, hidden] is the sum of what each token's experts make of x [tokens, hidden] times
// their shares, in the order of the experts; out may be x. The matrices of an expert are read once
// for all its tokens. Calls done(token) as soon as a token's sum is there. Throws std::out_of_range
// for an expert that does not exist.
void run_experts(const Experts& experts, const Routes& routes, Rows x, Rows out,
                 FunctionRef<void(int64_t)> done);

}  // namespace weft
