// What the host's thread says about a lease, and the loop's thread reads.
#pragma once

#include <atomic>

#include "outlet.hpp"

namespace weft::resident {

class Lease {
 public:
  // The loop may go on, unless the lease is recalled, and publishes to the outlet; with none its
  // tokens come with its end. At most once.
  void grant(const Outlet* outlet) {
    outlet_ = outlet;
    State open = State::open;
    state_.compare_exchange_strong(open, State::granted, std::memory_order_acq_rel);
    state_.notify_all();
  }

  // The loop ends after the step that it computes, or does not begin. Any thread may say it.
  void recall() {
    state_.store(State::recalled, std::memory_order_release);
    state_.notify_all();
  }

  // Waits for one of both. Whether the lease was granted, and is still.
  bool await(const Outlet*& outlet) {
    state_.wait(State::open, std::memory_order_acquire);
    if (recalled()) return false;
    outlet = outlet_;
    return true;
  }

  bool recalled() const { return state_.load(std::memory_order_acquire) == State::recalled; }

 private:
  enum class State : int { open, granted, recalled };
  std::atomic<State> state_{State::open};
  const Outlet* outlet_ = nullptr;
};

}  // namespace weft::resident
