// A sub-batch on its way through the layers, beside another one. In each layer it is entered and
// left: in between a host worker computes the attention of some rows (NEO section 3.1).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mailbox.hpp"
#include "stack.hpp"

namespace weft {

// Tokens that the calling thread attends to, over the caches of a stack. Nothing is owned.
struct LanePart {
  const Stack* stack;
  int64_t tokens;
  std::vector<GroupBatch> groups;
};

// For the client's thread. Its tokens are those of its parts, one part after the other, and then one
// of each row whose attention the worker computes.
class Lane {
 public:
  explicit Lane(MailboxClient& client) : client_(client) {}

  // Embeds a sub-batch. `stack`, the parts and what they point to must live until `finish`. The
  // tokens of the rows have begun in the mailbox. Throws std::out_of_range for an id outside the
  // vocabulary, std::invalid_argument if the counts do not add up.
  void begin(const Stack& stack, const StackTokens& own, std::vector<LanePart> parts,
             std::vector<int32_t> rows);
  // What precedes attention: hands the rows' q, k and v to the worker, and attends to the parts.
  void enter(uint32_t layer);
  // What follows attention, once the worker has computed the layer's jobs.
  void leave(uint32_t layer);
  // Goes on without attention for rows whose jobs have failed: their tokens mean nothing any more.
  void fail(std::span<const int32_t> rows);
  // The normalised hidden states [tokens, hidden].
  void finish(char* hidden) const;

 private:
  struct Row {
    int32_t slot;
    bool failed;
  };

  const StackLayer& layer_of(const Stack& stack, uint32_t layer) const;
  int64_t in_parts() const { return tokens_ - static_cast<int64_t>(rows_.size()); }
  char* attended_of(const Layer& layer, int64_t token);
  template <typename Call>
  void for_good(Call call) const;

  MailboxClient& client_;
  const Stack* stack_ = nullptr;
  std::vector<LanePart> parts_;
  std::vector<Row> rows_;
  int64_t tokens_ = 0;
  Rows inputs_{};

  // Memory that is kept from step to step.
  Lines<char> residual_, inputs_memory_, looked_up_, qkv_, attended_;
  std::vector<Lines<float>> angles_;  // cos and then sin of each rope
};

}  // namespace weft
