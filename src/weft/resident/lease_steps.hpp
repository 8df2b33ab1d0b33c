// The word of a lease: what the host's threads say about it, and the loop's thread reads.
#pragma once

#include "ring/ring.hpp"

namespace weft::resident {

enum class LeaseState : uint32_t { open, granted, recalled };

inline LeaseState look(const uint32_t& lease) {
  return static_cast<LeaseState>(
      ring::atomic_ref<uint32_t>(const_cast<uint32_t&>(lease)).load(ring::order::memory_order_acquire));
}

// Nothing, if it was recalled before: a recall is never lost.
inline void grant(uint32_t& lease) {
  auto open = static_cast<uint32_t>(LeaseState::open);
  ring::atomic_ref<uint32_t>(lease).compare_exchange_strong(
      open, static_cast<uint32_t>(LeaseState::granted), ring::order::memory_order_acq_rel,
      ring::order::memory_order_acquire);
}

inline void recall(uint32_t& lease) {
  ring::atomic_ref<uint32_t>(lease).store(static_cast<uint32_t>(LeaseState::recalled),
                                          ring::order::memory_order_release);
}

}  // namespace weft::resident
