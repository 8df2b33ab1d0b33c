// A courier: takes the jobs of one place out of a mailbox, and brings their results back.
#pragma once

#include <cstdint>
#include <span>

#include "mailbox.hpp"

namespace weft {

// Changes the states of jobs; whoever uses it copies q, k and v of those that it has claimed, and
// their results, at `Mailbox::layout`. One call at a time but for `wait` and `wake`.
class Courier {
 public:
  // Throws std::invalid_argument if there can be no courier of this place.
  Courier(const Mailbox& mailbox, uint32_t place);

  // Claims Submitted jobs, all of one layer, that of the oldest, as many as there is room for.
  // `orders` gets the numbers of their submission. Returns how many there are.
  size_t claim(std::span<int32_t> slots, std::span<uint64_t> orders, uint32_t& layer);
  // Whether the slot's job is this submission, which is claimed and not given up.
  bool holds(int32_t slot, uint64_t order, uint32_t layer) const;
  // Shows the results of these claimed jobs of a layer; those that were aborted are Empty now.
  void finish(std::span<const int32_t> slots, uint32_t layer);
  // Empties those of these slots whose job is claimed and aborted: nobody writes them any more.
  void forget(std::span<const int32_t> slots);
  // Gives up what is claimed: it is Submitted again, or Empty if it was aborted.
  void give_up() const { mailbox_.reclaim_place(place_); }
  // Waits until a job may have been submitted or `wake` was called since `seen`, or for the time.
  // Returns what to pass as `seen` next. One thread at a time.
  uint32_t wait(uint32_t seen, int64_t timeout_ns);
  void wake();
  uint64_t jobs() const { return ring::load(jobs_); }
  uint64_t round_trip_ns() const { return ring::load(round_trip_ns_); }

 private:
  void check(std::span<const int32_t> slots) const;

  Mailbox mailbox_;
  uint32_t place_;
  uint32_t woken_client_ = 0;
  uint64_t jobs_ = 0, round_trip_ns_ = 0;
};

}  // namespace weft
