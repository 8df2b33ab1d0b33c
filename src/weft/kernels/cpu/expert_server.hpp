// Computes routed experts for a device that waits for them: a layer of a step at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "experts.hpp"
#include "tensor.hpp"

namespace weft {

// What device and host tell each other in memory that both see. A ticket is the number of a pass
// times the number of layers, plus the layer: later ones are larger. The device waits for each
// answer before it asks again, so that one of everything is enough.
struct ExpertCalls {
  // Written by the device: rows first, then the ticket that asks for them.
  const int64_t* asked;
  const int32_t* tokens;  // of the pass that are not padding
  Tensor x;               // [most tokens, hidden]
  const int64_t* ids;     // [most tokens, top_k]
  const float* shares;    // [most tokens, top_k]
  int64_t top_k;
  // Written by the host: rows first, then the ticket that they answer, or `given_up`.
  int64_t* answered;
  char* out;  // [most tokens, hidden] of the type of x
};

class ExpertServer {
 public:
  static constexpr int64_t given_up = int64_t{1} << 62;  // larger than any ticket

  // Throws std::invalid_argument if there are no layers, or one whose experts do not fit the rows.
  ExpertServer(const ExpertCalls& calls, std::vector<const Experts*> layers);

  // Answers on the calling thread, with the threads of its pool, until `stop`. Between passes it
  // looks less and less often. Throws what a call throws; nobody answers then.
  void run();
  // Both from any thread. `wake`: a pass has been ordered.
  void wake();
  void stop();

  // Of the answers so far, from any thread.
  uint64_t answers() const { return answers_.load(std::memory_order_relaxed); }
  uint64_t rows() const { return rows_.load(std::memory_order_relaxed); }
  uint64_t busy_ns() const { return busy_ns_.load(std::memory_order_relaxed); }

 private:
  int64_t asked() const;
  bool answer();

  ExpertCalls calls_;
  std::vector<const Experts*> layers_;
  int64_t seen_ = 0;
  uint32_t rung_ = 0;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> answers_{0}, rows_{0}, busy_ns_{0};
};

}  // namespace weft
