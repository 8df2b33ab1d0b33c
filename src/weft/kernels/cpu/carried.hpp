// Piggybacked rows in a forward pass: they enter a layer with the attention that a host worker has
// computed, and leave it with q, k and v for the worker to attend with in the next one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mailbox.hpp"
#include "panel.hpp"
#include "tensor.hpp"

namespace weft {

// What is kept of rows between passes, by slot of the mailbox. For the client's thread. Owns nothing
// but the list of rows that a pass has taken.
class CarriedRows {
 public:
  // residuals [slots, hidden], rows of `row_bytes`; waits [slots], the layer in which each waits.
  CarriedRows(MailboxClient& client, int64_t slots, char* residuals, int64_t row_bytes,
              int32_t* waits);
  // The next rope's cos and sin [slots, half] of the rows' positions.
  void add_angles(const float* cos, const float* sin, int64_t half);

  // Hands q, k, v [n, heads, D] of a layer to the worker and keeps the residuals [n, hidden]; k, v as
  // in MailboxClient::submit.
  void submit(std::span<const int32_t> rows, uint32_t layer, const char* residuals, const Tensor& q,
              const Tensor* k, const Tensor* v);
  // Takes at most `most` results of a layer, the first submitted first: their attention to
  // attended [n, heads, D] and their residuals.
  std::span<const int32_t> take(uint32_t layer, int64_t most, const Tensor& attended,
                                char* residuals);
  // cos and sin [n, half] of these rows' positions for a rope.
  void copy_angles(std::span<const int32_t> rows, int64_t rope, float* cos, float* sin) const;

  // Rows that were taken and neither handed on nor ended yet.
  std::vector<int32_t> taken;
  int64_t spent_ns = 0;  // in all calls, which is what rows cost beside products and attention

 private:
  struct Angles {
    const float *cos, *sin;
    int64_t half;
  };

  MailboxClient& client_;
  char* residuals_;
  int64_t row_bytes_;
  int32_t* waits_;
  std::vector<Angles> angles_;
};

// What a pass carries: rows whose token begins, their ids after those of the pass's own tokens; and
// for each layer at most so many results, none without limits.
struct Carry {
  CarriedRows& rows;
  std::span<const int32_t> begun, limits;
  int64_t most;  // rows in any layer
};

}  // namespace weft
