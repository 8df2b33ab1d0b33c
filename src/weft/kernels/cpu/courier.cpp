// A courier's side of a mailbox.

#include "courier.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

namespace weft {

Courier::Courier(const Mailbox& mailbox, uint32_t place) : mailbox_(mailbox), place_(place) {
  if (place >= 1 && place < most_places) return;
  throw std::invalid_argument("a courier is for place 1 to " + std::to_string(most_places - 1) +
                              ", not " + std::to_string(place));
}

void Courier::check(std::span<const int32_t> slots) const {
  const auto exists = [&](int32_t slot) {
    return slot >= 0 && slot < static_cast<int64_t>(mailbox_.sizes().slots);
  };
  if (!std::ranges::all_of(slots, exists)) throw std::invalid_argument("a slot does not exist");
}

size_t Courier::claim(std::span<int32_t> slots, std::span<uint64_t> orders, uint32_t& layer) {
  const auto order_of = [&](uint32_t slot) {
    return std::atomic_ref(mailbox_.record(slot).order).load(std::memory_order_relaxed);
  };
  uint64_t oldest = 0;
  bool found = false;
  for (uint32_t slot = 0; slot < mailbox_.sizes().slots; ++slot) {
    const job::Word seen = job::look(mailbox_.word(slot));
    if (seen.state != job::State::Submitted || mailbox_.place_of(slot) != place_) continue;
    if (found && order_of(slot) >= oldest) continue;
    oldest = order_of(slot);
    layer = seen.layer;
    found = true;
  }
  const size_t room = std::min(slots.size(), orders.size());
  size_t count = 0;
  const job::Word wanted{job::State::Submitted, layer};
  for (uint32_t slot = 0; found && count < room && slot < mailbox_.sizes().slots; ++slot) {
    if (ring::load(mailbox_.word(slot)) != wanted.bits()) continue;
    if (!mailbox_.claim(slot, wanted, place_)) continue;
    slots[count] = static_cast<int32_t>(slot);
    orders[count++] = order_of(slot);
  }
  return count;
}

bool Courier::holds(int32_t slot, uint64_t order, uint32_t layer) const {
  check(std::span(&slot, 1));
  const job::Word running{job::State::Running, layer};
  if (ring::load(mailbox_.word(slot)) != running.bits()) return false;
  const std::atomic_ref seen(mailbox_.record(slot).order);
  return mailbox_.place_of(slot) == place_ && seen.load(std::memory_order_relaxed) == order;
}

void Courier::finish(std::span<const int32_t> slots, uint32_t layer) {
  check(slots);
  const int64_t now = ring::now_ns();
  for (const int32_t slot : slots) {
    JobRecord& record = mailbox_.record(slot);
    record.fault = Fault::None;
    add(round_trip_ns_, std::max<int64_t>(0, now - record.submitted_ns));
    job::finish(mailbox_.word(slot), layer, job::State::Done);
  }
  add(jobs_, slots.size());
  notify(mailbox_.header().to_client, woken_client_);
}

void Courier::forget(std::span<const int32_t> slots) {
  check(slots);
  for (const int32_t slot : slots) {
    const job::Word seen = job::look(mailbox_.word(slot));
    if (seen.state != job::State::Aborting || mailbox_.place_of(slot) != place_) continue;
    ring::store(mailbox_.word(slot), job::Word{}.bits());
  }
}

uint32_t Courier::wait(uint32_t seen, int64_t timeout_ns) {
  ring::Doorbell<1>& bell = mailbox_.bell(place_);
  if (ring::load(bell.rung[0].value) == seen && ring::go_to_sleep(bell, seen)) {
    const ring::Waited waited[] = {{&bell.rung[0].value, seen}};
    ring::futex_wait_any(waited, timeout_ns);
    ring::wake_up(bell);
  }
  return ring::load(bell.rung[0].value);
}

void Courier::wake() {
  ring::Doorbell<1>& bell = mailbox_.bell(place_);
  std::atomic_ref(bell.rung[0].value).fetch_add(1);
  ring::futex_wake(&bell.rung[0].value);
}

}  // namespace weft
