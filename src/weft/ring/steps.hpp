// Steps on one slot, wake-ups, and the info page. For C++ on the host and for CUDA.
#pragma once

#include "ring.hpp"

namespace weft::ring {

// -- steps on one slot ----------------------------------------------------------------------------

enum class Outcome : uint8_t { Done, Stale, Forbidden };

// What the words of a slot say together.
struct Seen {
  uint64_t asked, given;

  WEFT_HD bool answered() const {
    return Word::of(asked).tag.generation == Word::of(given).tag.generation;
  }
  // The engine has given up a sequence that the request plane had not ended before it died.
  WEFT_HD bool reclaimed() const { return answered() && Word::of(given).state() == State::Empty; }
  WEFT_HD bool valid() const {
    const Word mine = Word::of(asked), other = Word::of(given);
    if (!mine.valid_state() || mine.state() > State::PrefillPending) return false;
    if (mine.state() == State::Empty || !answered()) return true;
    if (!other.valid_state() || other.state() == State::Writing) return false;
    return mine.state() != State::Writing || other.state() == State::Empty;
  }
  // Of words that are valid.
  WEFT_HD State state() const {
    const State mine = Word::of(asked).state();
    return mine == State::Empty || !answered() ? mine : Word::of(given).state();
  }
};

WEFT_HD inline Seen look(Words words) { return {load(words.asked), load(words.given.state)}; }

WEFT_HD inline bool can_move(Seen seen, State to, Side by) {
  return seen.valid() && may_move(seen.state(), to, by);
}

// EMPTY -> WRITING. `tag` is the new holder's.
WEFT_HD inline Outcome begin_writing(Words words, Tag& tag) {
  const Seen seen = look(words);
  if (!can_move(seen, State::Writing, Side::Request)) return Outcome::Forbidden;
  tag = {0, next_generation(Word::of(seen.asked).tag.generation)};
  return exchange_if(words.asked, seen.asked, state_word(tag, State::Writing)) ? Outcome::Done
                                                                               : Outcome::Stale;
}

// A step of the request plane that holds this generation, in which the slot is in this state. Tries
// again where it was cancelled meanwhile.
WEFT_HD inline Outcome move_as_request(Words words, Tag tag, State from, uint64_t wanted) {
  for (;;) {
    const Seen seen = look(words);
    if (Word::of(seen.asked).tag.generation != tag.generation) return Outcome::Stale;
    if (!seen.valid() || seen.state() != from) return Outcome::Forbidden;
    if (exchange_if(words.asked, seen.asked, wanted)) return Outcome::Done;
  }
}

// WRITING -> PREFILL_PENDING.
WEFT_HD inline Outcome submit(Words words, Tag tag) {
  const uint64_t wanted = state_word({0, tag.generation}, State::PrefillPending);
  return move_as_request(words, tag, State::Writing, wanted);
}

// WRITING -> EMPTY by the holder itself. The engine has not seen this generation, and it comes
// again; else generations that nobody submitted could go round to one that was answered.
WEFT_HD inline Outcome abandon(Words words, Tag tag) {
  const Tag last{0, next_generation(tag.generation, 0xffffff)};
  return move_as_request(words, tag, State::Writing, state_word(last, State::Empty));
}

// WRITING or COMPLETED -> EMPTY.
WEFT_HD inline Outcome release(Words words, Tag tag) {
  const State from = Word::of(load(words.asked)).state() == State::Writing
                         ? State::Writing
                         : State::DecodeCompleted;
  const uint64_t wanted = state_word({0, tag.generation}, State::Empty);
  return move_as_request(words, tag, from, wanted);
}

// Whether a writer of this tag may follow one of the other.
WEFT_HD constexpr bool not_before(Tag tag, Tag other) {
  const uint32_t behind = (other.generation - tag.generation) & 0xffffff;
  return (behind == 0 || behind >= 1u << 23) && static_cast<int16_t>(tag.epoch - other.epoch) >= 0;
}

// Whether the engine of this epoch can take a new generation: no word of the slot is ahead.
WEFT_HD inline bool can_be_taken(Words words, const Slot& slot, Tag next) {
  const uint64_t seen[] = {load(words.given.state), load(words.given.published),
                           load(slot.prompt_published)};
  for (const uint64_t word : seen) {
    const Tag tag = Word::of(word).tag;
    if (tag.generation == next.generation || !not_before(next, tag)) return false;
  }
  return true;
}

// Give an output word of the slot to this engine, unless a later one has it: writers of earlier
// epochs fail from now on. What an earlier engine has counted of the same sequence stays; another
// sequence has `first` records. Tries again where a stale writer was faster: it cannot come twice.
WEFT_HD inline bool adopt(uint64_t& word, Tag tag, uint32_t first) {
  for (;;) {
    const uint64_t seen = load(word);
    const Word before = Word::of(seen);
    if (!not_before(tag, before.tag)) return false;
    const uint32_t count = before.tag.generation == tag.generation ? before.value : first;
    if (exchange_if(word, seen, Word{tag, count}.bits())) return true;
  }
}

// The deaths of the sequence of this generation.
WEFT_HD inline Deaths& deaths_of(Slot& slot, uint32_t generation) {
  if (slot.deaths.generation != generation) slot.deaths = {generation, 0, 0, 0, Blame::None};
  return slot.deaths;
}

// PREFILL_PENDING -> PREFILL_PROCESSING by the engine of `epoch`; `tag` is the new holder's. The
// output words must be looked at afterwards: they may be out of step in a corrupted slot.
WEFT_HD inline Outcome take(Words words, Slot& slot, uint16_t epoch, Tag& tag) {
  const Seen seen = look(words);
  tag = {epoch, Word::of(seen.asked).tag.generation};
  if (!can_move(seen, State::PrefillProcessing, Side::Engine)) return Outcome::Forbidden;
  if (!not_before(tag, Word::of(seen.given).tag)) return Outcome::Stale;
  const uint64_t taken = state_word(tag, State::PrefillProcessing);
  if (!exchange_if(words.given.state, seen.given, taken)) return Outcome::Stale;
  adopt(words.given.published, tag, slot.input.given_out);
  adopt(slot.prompt_published, tag, 0);
  deaths_of(slot, tag.generation);
  return Outcome::Done;
}

// A step of the engine that holds the slot under exactly this tag.
WEFT_HD inline Outcome move_as_engine(Given& given, Tag tag, State to,
                                      Reason reason = Reason::None) {
  const uint64_t seen = load(given.state);
  const Word before = Word::of(seen);
  if (!(before.tag == tag)) return Outcome::Stale;
  if (!before.valid_state() || !may_move(before.state(), to, Side::Engine)) {
    return Outcome::Forbidden;
  }
  return exchange_if(given.state, seen, state_word(tag, to, reason)) ? Outcome::Done
                                                                     : Outcome::Stale;
}

// Make `count` more records readable; they are written already.
WEFT_HD inline Outcome publish(uint64_t& word, Tag tag, uint32_t from, uint32_t count) {
  return exchange_if(word, Word{tag, from}.bits(), Word{tag, from + count}.bits())
             ? Outcome::Done
             : Outcome::Stale;
}

// Shared deaths make a sequence a suspect and do not count further; after that only its own count.
WEFT_HD inline void count_death(uint32_t& deaths, Blame blame) {
  deaths += blame == Blame::Sole || (blame == Blame::Shared && deaths < kSuspected);
}

// PROCESSING or PAUSED -> PREFILL_PENDING, on behalf of an engine that is proven dead. The output
// words change hands first, so that no earlier engine can publish into the new epoch.
WEFT_HD inline Outcome requeue(Words words, Slot& slot, uint16_t epoch) {
  for (bool counted = false;; counted = true) {
    const Seen seen = look(words);
    if (!can_move(seen, State::PrefillPending, Side::Recovery)) return Outcome::Forbidden;
    const Tag tag{epoch, Word::of(seen.given).tag.generation};
    adopt(words.given.published, tag, slot.input.given_out);
    adopt(slot.prompt_published, tag, 0);
    if (!counted) {
      Deaths& deaths = deaths_of(slot, tag.generation);
      count_death(deaths.crashes, deaths.blame);
    }
    const uint64_t pending = state_word(tag, State::PrefillPending);
    if (exchange_if(words.given.state, seen.given, pending)) return Outcome::Done;
  }
}

// WRITING or COMPLETED -> EMPTY by the engine of `epoch`, in its own word, on behalf of the request
// plane of epoch `dead`. The state is read before the epoch: had a new request plane written that
// state, its epoch would be seen here, too. What it writes later has another generation.
WEFT_HD inline Outcome reclaim(Words words, uint16_t epoch, const uint32_t& client_epoch,
                               uint32_t dead) {
  const Seen seen = look(words);
  if (load(client_epoch) != dead) return Outcome::Forbidden;
  if (!can_move(seen, State::Empty, Side::Request)) return Outcome::Forbidden;
  const Tag tag{epoch, Word::of(seen.asked).tag.generation};
  if (!not_before(tag, Word::of(seen.given).tag)) return Outcome::Stale;
  return exchange_if(words.given.state, seen.given, state_word(tag, State::Empty))
             ? Outcome::Done
             : Outcome::Stale;
}

// Ask for the end of a sequence. One way: the first reason stays.
WEFT_HD inline Outcome cancel(uint64_t& asked, Tag tag, Reason reason) {
  for (;;) {
    const uint64_t seen = load(asked);
    const Word word = Word::of(seen);
    if (word.tag.generation != tag.generation || !word.valid_state()) return Outcome::Stale;
    if (word.state() != State::PrefillPending || word.reason() != Reason::None) {
      return Outcome::Stale;
    }
    const uint64_t wanted = state_word(word.tag, word.state(), reason, word.pieces());
    if (exchange_if(asked, seen, wanted)) return Outcome::Done;
  }
}

// Give an output its next piece, which `Slot::more` names already.
WEFT_HD inline Outcome grow(uint64_t& asked, Tag tag) {
  for (;;) {
    const uint64_t seen = load(asked);
    const Word word = Word::of(seen);
    if (word.tag.generation != tag.generation || !word.valid_state()) return Outcome::Stale;
    if (word.state() != State::PrefillPending || word.pieces() == kMorePieces) {
      return Outcome::Forbidden;
    }
    const uint64_t wanted =
        state_word(word.tag, word.state(), word.reason(), word.pieces() + 1);
    if (exchange_if(asked, seen, wanted)) return Outcome::Done;
  }
}

// How many pieces the output of this sequence has grown by.
WEFT_HD inline uint32_t pieces_of(uint64_t asked, Tag tag) {
  const Word word = Word::of(asked);
  return word.tag.generation == tag.generation && word.valid_state() ? word.pieces() : 0;
}

// The reason for which this sequence is to end, or None.
WEFT_HD inline Reason cancelled(uint64_t asked, Tag tag) {
  const Word word = Word::of(asked);
  if (word.tag.generation != tag.generation || !word.valid_state()) return Reason::None;
  return word.reason();
}

// -- wake-ups -------------------------------------------------------------------------------------

// Whether the reader sleeps under a ticket that `woken` does not know yet.
template <int Writers>
WEFT_HD inline bool to_be_woken(Doorbell<Writers>& bell, uint32_t& woken) {
  const uint32_t ticket =
      atomic_ref<uint32_t>(bell.asleep.value).load(order::memory_order_seq_cst);
  if (ticket % 2 == 0 || ticket == woken) return false;
  woken = ticket;
  return true;
}

// Announce news; true if the reader is to be woken.
// Sequentially consistent against go_to_sleep: either the reader sees the news or we see it asleep.
template <int Writers>
WEFT_HD inline bool ring_bell(Doorbell<Writers>& bell, int writer, uint32_t& woken) {
  atomic_ref<uint32_t> rung(bell.rung[writer].value);
  rung.store(rung.load(order::memory_order_relaxed) + 1, order::memory_order_seq_cst);
  return to_be_woken(bell, woken);
}

// Whether a writer has rung since `heard`, which then knows of it.
template <int Writers>
WEFT_HD inline bool hear(const Doorbell<Writers>& bell, uint32_t (&heard)[Writers]) {
  bool news = false;
  for (int i = 0; i < Writers; ++i) {
    const uint32_t rung = load(bell.rung[i].value);
    news |= rung != heard[i];
    heard[i] = rung;
  }
  return news;
}

// Announce sleep; false (and awake again) if something was rung since `heard`.
template <int Writers>
WEFT_HD inline bool go_to_sleep(Doorbell<Writers>& bell, const uint32_t (&heard)[Writers]) {
  atomic_ref<uint32_t> asleep(bell.asleep.value);
  const uint32_t ticket = (asleep.load(order::memory_order_relaxed) | 1) + 2;
  asleep.store(ticket, order::memory_order_seq_cst);
  bool quiet = true;
  for (int i = 0; i < Writers; ++i) {
    atomic_ref<uint32_t> rung(bell.rung[i].value);
    quiet &= rung.load(order::memory_order_seq_cst) == heard[i];
  }
  if (quiet) return true;
  asleep.store(ticket + 1, order::memory_order_release);
  return false;
}

WEFT_HD inline bool go_to_sleep(Doorbell<1>& bell, uint32_t heard) {
  const uint32_t all[] = {heard};
  return go_to_sleep(bell, all);
}

template <int Writers>
WEFT_HD inline void wake_up(Doorbell<Writers>& bell) {
  store(bell.asleep.value, (load(bell.asleep.value) | 1) + 1);
}

// -- info page ------------------------------------------------------------------------------------

WEFT_HD inline void write_info(InfoPage& page, const uint64_t (&values)[kInfoFields]) {
  // An engine that died while writing has left the number odd; the next one goes on from there.
  const uint64_t odd = load(page.sequence) | 1;
  store(page.sequence, odd);
  for (int i = 0; i < kInfoFields; ++i) store(page.values[i], values[i]);
  store(page.sequence, odd + 1);
}

// False if no quiet moment came in `attempts` (the writer may be dead).
WEFT_HD inline bool read_info(const InfoPage& page, uint64_t (&values)[kInfoFields],
                              int attempts = 1000) {
  while (attempts-- > 0) {
    const uint64_t before = load(page.sequence);
    if (before % 2) continue;
    for (int i = 0; i < kInfoFields; ++i) values[i] = load(page.values[i]);
    if (load(page.sequence) == before) return true;
  }
  return false;
}

}  // namespace weft::ring
