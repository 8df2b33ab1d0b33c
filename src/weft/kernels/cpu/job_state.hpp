// The life of a job in a slot of a mailbox: one word, which changes by one atomic step at a time.
//
//   Empty -submit-> Submitted -claim-> Running -finish-> Done -take-> Taken -release-> Empty
//
// The worker owns a slot's payload while it is Running or Aborting, the client in all other states
// but Submitted, in which nobody writes it. `put_back` makes Taken Done again, and a taken slot may
// be submitted for its next layer. A Failed slot is released like a taken one.
#pragma once

#include <cstdint>

#include "../../ring/ring.hpp"

namespace weft::job {

enum class State : uint8_t { Empty, Submitted, Running, Done, Taken, Failed, Aborting };

struct Word {
  State state = State::Empty;
  uint32_t layer = 0;

  constexpr uint64_t bits() const { return uint64_t{layer} << 8 | static_cast<uint64_t>(state); }
  static constexpr Word of(uint64_t bits) {
    return {static_cast<State>(bits & 0xff), static_cast<uint32_t>(bits >> 8)};
  }
};

inline Word look(const uint64_t& word) { return Word::of(ring::load(word)); }

// Changes the state of a word that was seen; false if it has changed since.
inline bool move(uint64_t& word, Word seen, State to) {
  return ring::exchange_if(word, seen.bits(), Word{to, seen.layer}.bits());
}

// ---- the client's steps ----

inline bool may_submit(Word seen) {
  return seen.state == State::Empty || seen.state == State::Taken;
}

inline bool has_result(Word seen) {
  return seen.state == State::Done || seen.state == State::Failed;
}

inline void submit(uint64_t& word, uint32_t layer) {
  ring::store(word, Word{State::Submitted, layer}.bits());
}

// Whether the slot is Empty now; if not, the worker computes it, and empties it when it has ended.
inline bool abort(uint64_t& word) {
  while (true) {
    const Word seen = look(word);
    if (seen.state == State::Empty) return true;
    if (seen.state == State::Aborting) return false;
    const bool running = seen.state == State::Running;
    if (move(word, seen, running ? State::Aborting : State::Empty)) return !running;
  }
}

// ---- the worker's steps ----

inline bool claim(uint64_t& word, Word seen) { return move(word, seen, State::Running); }

// Whether the result is shown; if not, the job was aborted, and its slot is Empty now.
inline bool finish(uint64_t& word, uint32_t layer, State result) {
  if (move(word, {State::Running, layer}, result)) return true;
  ring::store(word, Word{}.bits());
  return false;
}

// After the death of a worker: what it was computing waits for the next one.
inline void reclaim(uint64_t& word) {
  while (true) {
    const Word seen = look(word);
    const bool aborting = seen.state == State::Aborting;
    if (!aborting && seen.state != State::Running) return;
    if (move(word, seen, aborting ? State::Empty : State::Submitted)) return;
  }
}

}  // namespace weft::job
