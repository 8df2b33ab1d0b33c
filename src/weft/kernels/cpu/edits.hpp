// What requests change of their logits before a token is chosen: penalties, a bias, and no end before
// a minimum length.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// Names of the columns of penalties; see kernels/sampling.py.
const std::vector<std::string>& penalty_names();

// Tokens of a row, of which the first `num_prompt` are its prompt.
struct KnownTokens {
  const int32_t* ids;
  int64_t num_prompt, length;
};

// Applies penalties [names] to the logits [size] of the tokens that a row knows, as
// kernels/sampling.py: `penalised` does, in float32 without fused operations. `counts` [size] are
// zeros, and are so again afterwards. Throws std::out_of_range, before anything is changed, for a
// token without a logit.
void penalise(float* logits, int64_t size, const KnownTokens& known, const float* penalties,
              int32_t* counts);

// A list of token ids for each row: those of row i are ids[from[i], from[i + 1]).
struct IdLists {
  const int64_t* ids;
  const int64_t* from;  // [rows + 1]
};

// What rows [rows] want changed. Nothing is owned.
struct Edits {
  const bool* edited;       // [rows], whether anything
  const bool* penalised;    // [rows]
  const float* penalties;   // [rows, names]
  const int64_t* num_prompt;  // [rows]
  IdLists biased;
  const float* biases;      // of each biased id
  IdLists delayed;          // ids that are impossible
  const int64_t* min_tokens;  // [rows], while the output has fewer
};

// Changes the logits of row i, whose output has `counter` tokens so far. Ids without a logit are
// passed over. Whether the logits were finite; if not, they stay as they are. `counts`: see `penalise`.
bool edit(const Edits& edits, int64_t i, float* logits, int64_t size, const KnownTokens& known,
          int64_t counter, int32_t* counts);

}  // namespace weft
