// Changes of logits before a token is chosen. Compiled without fused operations: planned steps, the
// resident loop and numpy get the same bits.

#include "edits.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "dispatch.hpp"

namespace weft {
namespace {

// The penalties of a row, in the order of kernels/sampling.py.
#define WEFT_PENALTIES(X) X(repetition_penalty) X(presence_penalty) X(frequency_penalty)

struct Penalties {
#define WEFT_PENALTY(name) float name;
  WEFT_PENALTIES(WEFT_PENALTY)
#undef WEFT_PENALTY

  // The logit of a token that the output has so often.
  float apply(float score, int32_t count) const {
    const auto times = static_cast<float>(count);
    score = score > 0 ? score / repetition_penalty : score * repetition_penalty;
    score -= frequency_penalty * times;
    score -= presence_penalty * (count > 0 ? 1.0f : 0.0f);
    // A tiny repetition penalty may overflow.
    if (std::isnan(score)) return 0.0f;
    constexpr float most = std::numeric_limits<float>::max();
    return std::clamp(score, -most, most);
  }
};

constexpr int32_t in_prompt = 1 << 30;  // beside the count of a token

}  // namespace

const std::vector<std::string>& penalty_names() {
#define WEFT_PENALTY(name) #name,
  static const std::vector<std::string> names{WEFT_PENALTIES(WEFT_PENALTY)};
#undef WEFT_PENALTY
  return names;
}

void penalise(float* logits, int64_t size, const KnownTokens& known, const float* penalties,
              int32_t* counts) {
  const Penalties given{penalties[0], penalties[1], penalties[2]};
  for (int64_t i = 0; i < known.length; ++i) {
    const int32_t token = known.ids[i];
    if (token < 0 || token >= size) throw std::out_of_range("a row has a token without a logit");
  }
  for (int64_t i = 0; i < known.num_prompt && i < known.length; ++i) {
    counts[known.ids[i]] = in_prompt;
  }
  for (int64_t i = known.num_prompt; i < known.length; ++i) ++counts[known.ids[i]];
  for (int64_t i = 0; i < known.length; ++i) {
    const int32_t token = known.ids[i];
    int32_t& count = counts[token];
    if (count == 0) continue;  // met before
    logits[token] = given.apply(logits[token], count & ~in_prompt);
    count = 0;
  }
}

bool edit(const Edits& edits, int64_t i, float* logits, int64_t size, const KnownTokens& known,
          int64_t counter, int32_t* counts) {
  if (!chosen_isa().scan->peak(logits, size).finite) return false;
  if (edits.penalised[i]) {
    penalise(logits, size, known, edits.penalties + i * penalty_names().size(), counts);
  }
  const auto each = [&](const IdLists& lists, const auto& use) {
    for (int64_t at = lists.from[i]; at < lists.from[i + 1]; ++at) {
      const int64_t id = lists.ids[at];
      if (id >= 0 && id < size) use(logits[id], at);
    }
  };
  each(edits.biased, [&](float& logit, int64_t at) { logit += edits.biases[at]; });
  if (counter < edits.min_tokens[i]) {
    each(edits.delayed, [](float& logit, int64_t) { logit = std::numeric_limits<float>::lowest(); });
  }
  return true;
}

}  // namespace weft
