// The ring: shared memory between request plane and engine. One header for C++ on the host and for CUDA.
//
//   header page | info page (engine writes) | slots | arena (prompts and outputs)
//
// One slot is one sequence. In each state exactly one side may write the slot (`owner`), payload
// first, then a release-store of the state. Every shared word carries a tag (epoch, generation), so
// that a writer that has stalled cannot touch a slot that has moved on: its exchange fails.
// Nothing here allocates, throws or calls the system.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(WEFT_RING_ATOMIC_REF)  // tests put a scheduler of interleavings in here
#elif defined(__CUDACC__) || defined(WEFT_RING_LIBCUDACXX)
#include <cuda/atomic>
#else
#include <atomic>
#endif

#if defined(__CUDACC__)
#define WEFT_HD __host__ __device__
#else
#define WEFT_HD
#endif

#include "info.hpp"

namespace weft::ring {

#if defined(WEFT_RING_ATOMIC_REF)
template <class T>
using atomic_ref = WEFT_RING_ATOMIC_REF<T>;
namespace order = WEFT_RING_ORDER;
#elif defined(__CUDACC__) || defined(WEFT_RING_LIBCUDACXX)
template <class T>
using atomic_ref = cuda::atomic_ref<T, cuda::thread_scope_system>;
namespace order = cuda::std;
#else
template <class T>
using atomic_ref = std::atomic_ref<T>;
namespace order = std;
#endif

inline constexpr uint64_t kMagic = 0x676e697274666577;  // "weftring"
inline constexpr uint32_t kVersion = 14;  // any change of layout or meaning
inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kAlign = 64;  // of every extent in the arena, and of slots
inline constexpr uint32_t kMaxSlots = 65535;
inline constexpr uint32_t kMaxTop = 20;                  // alternatives of one token
inline constexpr uint32_t kMaxRecords = (1u << 24) - 1;  // what a word can count

// -- states ---------------------------------------------------------------------------------------

enum class State : uint8_t {
  Empty,
  Writing,
  PrefillPending,
  PrefillProcessing,
  DecodeProcessing,
  DecodePaused,
  DecodeCompleted,
};
inline constexpr int kStates = 7;

enum class Side : uint8_t { Request, Engine, Recovery };
inline constexpr int kSides = 3;

// Why a slot is paused or completed, or why its request is to be cancelled.
enum class Reason : uint8_t { None, Stop, Length, Cancelled, Error, ReaderLag, Preempted };
inline constexpr int kReasons = 7;

// How a death of the engine counts against a sequence now: not at all (it is not computed), shared
// with others computed beside it, or as its own (it is the only suspect).
enum class Blame : uint32_t { None, Shared, Sole };
inline constexpr uint32_t kSuspected = 2;  // crashes that make a sequence a suspect
inline constexpr uint32_t kForgiven = 8;   // engines killed from outside that are no crashes

// The one transition table. Recovery acts only for a dead engine.
WEFT_HD constexpr bool may_move(State from, State to, Side by) {
  switch (from) {
    case State::Empty:
      return by == Side::Request && to == State::Writing;
    case State::Writing:
      return by == Side::Request && (to == State::PrefillPending || to == State::Empty);
    case State::PrefillPending:
      return by == Side::Engine && (to == State::PrefillProcessing || to == State::DecodeCompleted);
    case State::PrefillProcessing:
      if (by == Side::Recovery) return to == State::PrefillPending;
      return by == Side::Engine && (to == State::DecodeProcessing || to == State::DecodeCompleted);
    case State::DecodeProcessing:
      if (by == Side::Recovery) return to == State::PrefillPending;
      return by == Side::Engine && (to == State::DecodePaused || to == State::DecodeCompleted);
    case State::DecodePaused:
      if (by == Side::Recovery) return to == State::PrefillPending;
      return by == Side::Engine && (to == State::DecodeProcessing || to == State::DecodeCompleted);
    case State::DecodeCompleted:
      return by == Side::Request && to == State::Empty;
  }
  return false;
}

// Who may write the payload of a slot in this state.
WEFT_HD constexpr Side owner(State state) {
  const bool request =
      state == State::Empty || state == State::Writing || state == State::DecodeCompleted;
  return request ? Side::Request : Side::Engine;
}

// -- tagged words ---------------------------------------------------------------------------------

// The generation counts how often the slot was emptied, the epoch how many engines there were.
struct Tag {
  uint16_t epoch = 0;
  uint32_t generation = 0;  // 24 bits

  WEFT_HD constexpr bool operator==(const Tag& other) const {
    return epoch == other.epoch && generation == other.generation;
  }
};

WEFT_HD constexpr uint32_t next_generation(uint32_t generation) {
  return (generation + 1) & 0xffffff;
}

// epoch (16) | generation (24) | value (24)
struct Word {
  Tag tag;
  uint32_t value = 0;

  WEFT_HD constexpr uint64_t bits() const {
    return uint64_t{tag.epoch} << 48 | uint64_t{tag.generation} << 24 | (value & 0xffffff);
  }
  WEFT_HD static constexpr Word of(uint64_t bits) {
    return {{static_cast<uint16_t>(bits >> 48), static_cast<uint32_t>(bits >> 24) & 0xffffff},
            static_cast<uint32_t>(bits) & 0xffffff};
  }
  WEFT_HD constexpr bool valid_state() const {
    return (value & 0xff) < kStates && (value >> 8 & 0xff) < kReasons && value >> 16 == 0;
  }
  WEFT_HD constexpr State state() const { return static_cast<State>(value & 0xff); }
  WEFT_HD constexpr Reason reason() const { return static_cast<Reason>(value >> 8 & 0xff); }
};

WEFT_HD constexpr uint64_t state_word(Tag tag, State state, Reason reason = Reason::None) {
  return Word{tag, static_cast<uint32_t>(state) | static_cast<uint32_t>(reason) << 8}.bits();
}

template <class T>
WEFT_HD T load(const T& word) {
  return atomic_ref<T>(const_cast<T&>(word)).load(order::memory_order_acquire);
}
template <class T>
WEFT_HD void store(T& word, T value) {
  atomic_ref<T>(word).store(value, order::memory_order_release);
}
WEFT_HD inline bool exchange_if(uint64_t& word, uint64_t expected, uint64_t wanted) {
  return atomic_ref<uint64_t>(word).compare_exchange_strong(
      expected, wanted, order::memory_order_acq_rel, order::memory_order_acquire);
}

// -- layout ---------------------------------------------------------------------------------------

// A part of the arena: `offset` from its start, both in bytes.
struct Extent {
  uint64_t offset;
  uint64_t bytes;
};

enum class Section : uint8_t {
  Prompt,         // uint32 ids
  Sampling,       // a SamplingHead, then numbers that only Python reads: codec.py packs them
  LogitBias,      // BiasRecord
  StopIds,        // uint32 ids
  EosIds,         // uint32 ids
  ServiceClass,   // UTF-8
  CacheSalt,      // bytes
  Grammar,        // UTF-8, or empty
  TokenLists,     // uint32 words, or empty: which tokens are allowed, scored and bad
  Output,         // records of `output_stride` bytes
  PromptOutput,   // records of `prompt_stride` bytes, one for each prompt token, or empty
};
inline constexpr int kSections = 11;

// Bits of SamplingHead::set: numbers that have a value, and whether an embedding is wanted.
enum Set : uint32_t { kLogprobs = 1, kPromptLogprobs = 2, kEmbed = 4 };
inline constexpr uint32_t kAllSet = 7;

// The sampling parameters that the ring itself reads; Header::sampling says what follows them.
struct SamplingHead {
  uint32_t set, logprobs, prompt_logprobs, unused;
};

struct BiasRecord {
  double value;
  uint32_t token, unused;
};

// One output token; `num_top` (id, logprob) pairs follow where the stride has room for them.
// With a stride of 4 only the token is there.
struct TokenRecord {
  uint32_t token;
  float logprob;
  uint32_t rank;
  uint32_t num_top;  // kNoLogprob: this token has none
};
struct TopRecord {
  uint32_t token;
  float logprob;
};
inline constexpr uint32_t kNoLogprob = ~0u;
inline constexpr uint32_t kPlainStride = sizeof(uint32_t);

WEFT_HD constexpr uint32_t stride_for(bool logprobs, uint32_t top) {
  return logprobs ? sizeof(TokenRecord) + top * sizeof(TopRecord) : kPlainStride;
}

// What the request plane writes while it owns the slot.
struct Input {
  uint64_t request_id;  // the request plane's own name for it
  uint64_t group_id;    // choices of one request share it (0: none)
  uint64_t arrival;     // counts submissions of this ring, so that the engine can keep the order
  uint64_t deadline_ns; // on the monotonic clock, 0: none
  Extent extent;        // all of the arena that this slot holds; every section lies inside
  Extent sections[kSections];
  uint32_t output_stride, prompt_stride;
};

// What the engine writes before it completes the slot.
struct Final {
  uint32_t records;        // output tokens in all
  uint32_t with_token;     // whether the last of them came with the end
  uint32_t http_status, retry_after_s;  // 0: no use in asking again
  uint64_t scheduled_ns, prefilled_ns;  // on the monotonic clock, 0: never
  char code[48], param[48];  // zero-terminated UTF-8
  char message[280];
};

struct alignas(kAlign) Slot {
  alignas(kAlign) uint64_t state;      // Word of State and Reason; written by the owner
  alignas(kAlign) uint64_t published;  // Word: output records that may be read; engine
  uint64_t prompt_published;           // Word: prompt records that may be read; engine
  uint32_t outside_kills;              // engines killed from outside computing this slot; keeper
  uint32_t cached_tokens;              // prompt tokens from the prefix cache; atomic; engine
  uint32_t crashes;                    // engines that died computing this slot; recovery
  Blame blame;                         // should the engine die now; engine, then its keeper
  uint32_t memory_kills;               // engines killed for memory computing this slot; keeper
  alignas(kAlign) uint64_t consumed;   // Word: output records that the reader is done with; request
  uint64_t cancel;                     // Word of a Reason, 0: not cancelled; request, one way
  alignas(kAlign) Input input;
  alignas(kAlign) Final final;
};

// A wake-up: `rung` counts news, `asleep` is odd while the other side sleeps. Each has one writer.
struct Doorbell {
  alignas(kAlign) uint32_t rung;
  alignas(kAlign) uint32_t asleep;
};

struct Header {
  uint64_t magic;
  uint32_t version, header_bytes, info_bytes, slot_bytes;
  uint32_t slots, not_slots;  // the latter has every bit the other way
  uint64_t total_bytes, info_offset, slots_offset, arena_offset, arena_bytes;
  uint64_t sampling;      // a hash of the fields that follow SamplingHead
  // Of the arena, those that may be in use when a request is taken; the latter every bit inverted.
  uint64_t memory_bytes, not_memory_bytes;
  alignas(kAlign) uint32_t epoch;  // of the attached engine; grows by one with each; engine
  uint32_t engine_pid;
  alignas(kAlign) uint32_t memory_kills;  // engines killed because memory ran out; keeper
  uint32_t short_epoch;  // 1 + that of the last engine for whose successor memory fell short; keeper
  uint32_t kill_epoch;   // the same of the last one that, or whose successor, was killed for memory
  alignas(kAlign) uint32_t client_epoch;  // odd while a request plane is attached; request plane
  uint32_t client_pid;
  alignas(kAlign) Doorbell to_engine;  // rung by the request plane
  Doorbell to_client;                  // rung by the engine
};

enum class Info : uint32_t {
#define WEFT_RING_FIELD(name) name,
  WEFT_RING_INFO(WEFT_RING_FIELD)
#undef WEFT_RING_FIELD
      count
};
inline constexpr int kInfoFields = static_cast<int>(Info::count);

struct InfoPage {
  uint64_t sequence;  // odd while the engine writes
  uint64_t values[kInfoFields];
};

static_assert(sizeof(Header) <= kPage && sizeof(InfoPage) <= kPage && sizeof(Slot) % kAlign == 0);
static_assert(sizeof(SamplingHead) == 16 && sizeof(BiasRecord) == 16 && sizeof(TopRecord) == 8);

// -- steps on one slot ----------------------------------------------------------------------------

// A slot as its holder knows it.
struct Handle {
  uint32_t slot = 0;
  Tag tag;
};

enum class Outcome : uint8_t { Done, Stale, Forbidden };

// Change the state from exactly what was `seen`. Fails as Stale if anyone was there in between.
WEFT_HD inline Outcome move(Slot& slot, uint64_t seen, State to, Side by, Tag tag,
                            Reason reason = Reason::None) {
  const Word before = Word::of(seen);
  if (!before.valid_state() || !may_move(before.state(), to, by)) return Outcome::Forbidden;
  return exchange_if(slot.state, seen, state_word(tag, to, reason)) ? Outcome::Done
                                                                    : Outcome::Stale;
}

// Start an output or request word afresh, unless a later holder has done so already. Tries again
// where a stale writer was faster: it cannot come twice.
WEFT_HD inline bool restart(uint64_t& word, Tag tag) {
  for (;;) {
    const uint64_t seen = load(word);
    const uint32_t behind = (tag.generation - Word::of(seen).tag.generation) & 0xffffff;
    if (behind >= 1u << 23) return false;
    if (exchange_if(word, seen, Word{tag, 0}.bits())) return true;
  }
}

// EMPTY -> WRITING. `tag` is the new holder's; the words of the slot start afresh under it.
WEFT_HD inline Outcome begin_writing(Slot& slot, Tag& tag) {
  const uint64_t seen = load(slot.state);
  tag = Word::of(seen).tag;
  const Outcome outcome = move(slot, seen, State::Writing, Side::Request, tag);
  if (outcome != Outcome::Done) return outcome;
  const Tag own{0, tag.generation};  // of the words that no engine writes
  const bool fresh = restart(slot.published, tag) && restart(slot.prompt_published, tag) &&
                     restart(slot.consumed, own) && restart(slot.cancel, own);
  slot.crashes = slot.memory_kills = slot.outside_kills = 0;
  slot.blame = Blame::None;
  store(slot.cached_tokens, 0u);
  return fresh ? Outcome::Done : Outcome::Stale;
}

// A step of the request plane: the generation must be the holder's, whatever the engine's epoch.
WEFT_HD inline Outcome move_as_request(Slot& slot, Tag tag, State to) {
  const uint64_t seen = load(slot.state);
  const Word word = Word::of(seen);
  if (word.tag.generation != tag.generation) return Outcome::Stale;
  Tag next = word.tag;
  if (to == State::Empty) next.generation = next_generation(next.generation);
  return move(slot, seen, to, Side::Request, next);
}

WEFT_HD inline Outcome submit(Slot& slot, Tag tag) {
  return move_as_request(slot, tag, State::PrefillPending);
}
WEFT_HD inline Outcome release(Slot& slot, Tag tag) {
  return move_as_request(slot, tag, State::Empty);
}

// Give an output word of the slot to this engine, unless a later one has it: writers of earlier
// epochs fail from now on.
WEFT_HD inline bool adopt(uint64_t& word, Tag tag) {
  for (;;) {
    const uint64_t seen = load(word);
    const Word before = Word::of(seen);
    const auto ahead = static_cast<int16_t>(tag.epoch - before.tag.epoch);
    if (before.tag.generation != tag.generation || ahead < 0) return false;
    if (exchange_if(word, seen, Word{tag, before.value}.bits())) return true;
  }
}

// PREFILL_PENDING -> PREFILL_PROCESSING by the engine of `epoch`; `tag` is the new holder's. The
// output words must be looked at afterwards: they may be out of step in a corrupted slot.
WEFT_HD inline Outcome take(Slot& slot, uint16_t epoch, Tag& tag) {
  const uint64_t seen = load(slot.state);
  tag = {epoch, Word::of(seen).tag.generation};
  const Outcome outcome = move(slot, seen, State::PrefillProcessing, Side::Engine, tag);
  if (outcome != Outcome::Done) return outcome;
  adopt(slot.published, tag);
  adopt(slot.prompt_published, tag);
  return Outcome::Done;
}

// A step of the engine that holds the slot under exactly this tag.
WEFT_HD inline Outcome move_as_engine(Slot& slot, Tag tag, State to, Reason reason = Reason::None) {
  const uint64_t seen = load(slot.state);
  if (!(Word::of(seen).tag == tag)) return Outcome::Stale;
  return move(slot, seen, to, Side::Engine, tag, reason);
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
WEFT_HD inline Outcome requeue(Slot& slot, uint16_t epoch) {
  for (bool counted = false;; counted = true) {
    const uint64_t seen = load(slot.state);
    const Word before = Word::of(seen);
    const Tag tag{epoch, before.tag.generation};
    if (!before.valid_state() || !may_move(before.state(), State::PrefillPending, Side::Recovery)) {
      return Outcome::Forbidden;
    }
    adopt(slot.published, tag);
    adopt(slot.prompt_published, tag);
    if (!counted) count_death(slot.crashes, slot.blame);
    const Outcome outcome = move(slot, seen, State::PrefillPending, Side::Recovery, tag);
    if (outcome != Outcome::Stale) return outcome;
  }
}

// WRITING or COMPLETED -> EMPTY on behalf of the request plane of epoch `dead`. The state is read
// before the epoch: had a new request plane written that state, its epoch would be seen here, too.
WEFT_HD inline Outcome reclaim(Slot& slot, const uint32_t& client_epoch, uint32_t dead) {
  const uint64_t seen = load(slot.state);
  const Word before = Word::of(seen);
  if (load(client_epoch) != dead) return Outcome::Forbidden;
  const Tag next{before.tag.epoch, next_generation(before.tag.generation)};
  return move(slot, seen, State::Empty, Side::Request, next);
}

// Ask for the end of a sequence. One way: the first reason stays.
WEFT_HD inline Outcome cancel(Slot& slot, Tag tag, Reason reason) {
  const Tag own{0, tag.generation};
  const uint64_t wanted = Word{own, static_cast<uint32_t>(reason)}.bits();
  return exchange_if(slot.cancel, Word{own, 0}.bits(), wanted) ? Outcome::Done : Outcome::Stale;
}

// The reason for which this sequence is to end, or None.
WEFT_HD inline Reason cancelled(const Slot& slot, Tag tag) {
  const Word word = Word::of(load(slot.cancel));
  if (word.tag.generation != tag.generation || word.value >= kReasons) return Reason::None;
  return static_cast<Reason>(word.value);
}

// -- wake-ups -------------------------------------------------------------------------------------

// Announce news; true if the other side sleeps under a ticket that `woken` does not know yet.
// Sequentially consistent against go_to_sleep: either the sleeper sees the news or we see it asleep.
WEFT_HD inline bool ring_bell(Doorbell& bell, uint32_t& woken) {
  atomic_ref<uint32_t> rung(bell.rung);
  rung.store(rung.load(order::memory_order_relaxed) + 1, order::memory_order_seq_cst);
  const uint32_t ticket = atomic_ref<uint32_t>(bell.asleep).load(order::memory_order_seq_cst);
  if (ticket % 2 == 0 || ticket == woken) return false;
  woken = ticket;
  return true;
}

// Announce sleep; false (and awake again) if something was rung since `seen`.
WEFT_HD inline bool go_to_sleep(Doorbell& bell, uint32_t seen) {
  atomic_ref<uint32_t> asleep(bell.asleep);
  const uint32_t ticket = (asleep.load(order::memory_order_relaxed) | 1) + 2;
  asleep.store(ticket, order::memory_order_seq_cst);
  if (atomic_ref<uint32_t>(bell.rung).load(order::memory_order_seq_cst) == seen) return true;
  asleep.store(ticket + 1, order::memory_order_release);
  return false;
}

WEFT_HD inline void wake_up(Doorbell& bell) { store(bell.asleep, (load(bell.asleep) | 1) + 1); }

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
