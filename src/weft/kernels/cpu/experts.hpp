// Mixtures of experts: which experts a token goes to, and what they make of it.
#pragma once

#include <cstdint>
#include <vector>

#include "calls.hpp"
#include "matrix.hpp"

namespace weft {

// The matrices of each expert. Nothing is owned.
struct Experts {
  std::vector<const Matrix*> gate_up;  // gated [2 * size, hidden]
  std::vector<const Matrix*> down;     // [hidden, size]
  Activation activation = Activation::silu;
};

// Which experts each token goes to, and what their results are multiplied with: [tokens, top_k].
struct Routes {
  const int64_t* ids;
  const float* shares;
  int64_t tokens, top_k;
};

// Chooses the experts with the largest softmax of `count` scores, of equal ones the first, the
// largest share first. The scores are overwritten. If one of them is NaN, so are all shares.
void route_row(float* scores, int64_t count, int64_t top_k, bool normalise, int64_t* ids,
               float* shares);
// The same for scores [tokens, experts].
void route(const Tensor& scores, int64_t top_k, bool normalise, int64_t* ids, float* shares);

// out [tokens, hidden] is the sum of what each token's experts make of x [tokens, hidden] times
// their shares, in the order of the experts; out may be x. The matrices of an expert are read once
// for all its tokens. Calls done(token) as soon as a token's sum is there. Throws std::out_of_range
// for an expert that does not exist.
void run_experts(const Experts& experts, const Routes& routes, Rows x, Rows out,
                 FunctionRef<void(int64_t)> done);

}  // namespace weft
