// A lease between the host's threads and the loop's thread, which waits for it.
#pragma once

#include <atomic>

#include "lease_steps.hpp"
#include "outlet.hpp"

namespace weft::resident {

class Lease {
 public:
  // The loop may go on, unless the lease is recalled, and publishes to the outlet; with none its
  // tokens come with its end. At most once.
  void grant(const Outlet* outlet) {
    outlet_ = outlet;
    resident::grant(word_);
    word().notify_all();
  }

  // The loop ends after the step that it computes, or does not begin. Any thread may say it.
  void recall() {
    resident::recall(word_);
    word().notify_all();
  }

  // Waits for one of both. Whether the lease was granted, and is still.
  bool await(const Outlet*& outlet) {
    word().wait(static_cast<uint32_t>(LeaseState::open), std::memory_order_acquire);
    if (recalled()) return false;
    outlet = outlet_;
    return true;
  }

  bool recalled() const { return look(word_) == LeaseState::recalled; }

 private:
  std::atomic_ref<uint32_t> word() { return std::atomic_ref(word_); }

  uint32_t word_ = static_cast<uint32_t>(LeaseState::open);
  const Outlet* outlet_ = nullptr;
};

}  // namespace weft::resident
