// The log of a ring: the last steps that its engines have computed, and the last engines that took
// over from another one. layout.py says what the fields mean.
//
// An engine appends; readers take no locks and hold nobody up. What they find half written, or gone,
// they know by the turn of the entry. A successor goes on where the dead engine stopped.
#pragma once

#include "ring.hpp"

namespace weft::ring {

// Counts by class are of the first ones in the order of their names; the last has all further ones.
inline constexpr int kLogClasses = 8;
inline constexpr int kLoggedSteps = 256, kLoggedRecoveries = 16;

#define WEFT_RING_STEP(X)                                                                          \
  X(engine) X(step) X(began_ns) X(ended_ns) X(predicted_ns) X(steps) X(split) X(drafts)            \
  X(host_tokens) X(prefill_0) X(prefill_1) X(prefill_2) X(prefill_3) X(prefill_4) X(prefill_5)     \
  X(prefill_6) X(prefill_7) X(decode_0) X(decode_1) X(decode_2) X(decode_3) X(decode_4)            \
  X(decode_5) X(decode_6) X(decode_7)
#define WEFT_RING_RECOVERY(X) X(engine) X(next_step) X(died_ns) X(back_ns)

#define WEFT_RING_FIELD(name) +1
inline constexpr int kStepFields = WEFT_RING_STEP(WEFT_RING_FIELD);
inline constexpr int kRecoveryFields = WEFT_RING_RECOVERY(WEFT_RING_FIELD);
#undef WEFT_RING_FIELD

template <int Fields>
struct LogEntry {
  uint64_t turn;  // 2n + 1 while entry n is written, 2n + 2 when it is whole
  uint64_t values[Fields];
};

template <int Fields, int Entries>
struct Log {
  static constexpr int kFields = Fields, kEntries = Entries;
  uint64_t written;  // entries since the ring was made
  LogEntry<Fields> entries[Entries];

  // The oldest entry that may be there.
  static constexpr uint64_t oldest(uint64_t written) {
    return written > Entries ? written - Entries : 0;
  }
};

using StepLog = Log<kStepFields, kLoggedSteps>;
using RecoveryLog = Log<kRecoveryFields, kLoggedRecoveries>;

struct LogPages {
  StepLog steps;
  RecoveryLog recoveries;
};

template <int Fields, int Entries>
void append(Log<Fields, Entries>& log, const uint64_t (&values)[Fields]) {
  const uint64_t n = load(log.written);
  LogEntry<Fields>& entry = log.entries[n % Entries];
  store(entry.turn, 2 * n + 1);
  for (int i = 0; i < Fields; ++i) store(entry.values[i], values[i]);
  store(entry.turn, 2 * n + 2);
  store(log.written, n + 1);
}

// Entry n; false if it is not there, not any more, or not whole.
template <int Fields, int Entries>
bool read_entry(const Log<Fields, Entries>& log, uint64_t n, uint64_t (&values)[Fields]) {
  const LogEntry<Fields>& entry = log.entries[n % Entries];
  const uint64_t whole = 2 * n + 2;
  if (load(entry.turn) != whole) return false;
  for (int i = 0; i < Fields; ++i) values[i] = load(entry.values[i]);
  return load(entry.turn) == whole;
}

}  // namespace weft::ring
