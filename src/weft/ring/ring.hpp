// The ring: shared memory between request plane and engine. For C++ on the host and for CUDA.
//
//   header page | info page | log | asked[] | given[] | slots | arena (prompts and outputs)
//
// One slot is one sequence. Two words say in which state it is: the request plane writes asked[i],
// the engine given[i], and each side reads the other's array in one go. In each state one side may
// write the slot (`owner`), payload first, then a release-store of its own word (steps.hpp).
//
// No word has writers on both sides, since exchanges are not atomic across a bus. They settle who
// of one side writes: every word carries a tag (epoch, generation), so that a writer that has
// stalled cannot touch a slot that has moved on. Nothing here allocates, throws or calls the system.
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
inline constexpr uint32_t kVersion = 21;  // any change of layout or meaning
inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kAlign = 64;  // of every extent in the arena, and of slots
inline constexpr uint32_t kMaxSlots = 65535;
inline constexpr uint32_t kMaxTop = 20;                  // alternatives of one token
inline constexpr uint32_t kMaxRecords = (1u << 24) - 1;  // what a word can count
// An output begins with room for `kFirstRecords` or for all that may come, and each further piece
// doubles it.
inline constexpr uint32_t kFirstRecords = 256, kMorePieces = 16;
static_assert(kFirstRecords << kMorePieces > kMaxRecords);

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
enum class Reason : uint8_t { None, Stop, Length, Cancelled, Error, Preempted };
inline constexpr int kReasons = 6;

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

// The generation counts the sequences of a slot, the epoch the engines (0 in words of the request
// plane).
struct Tag {
  uint16_t epoch = 0;
  uint32_t generation = 0;  // 24 bits

  WEFT_HD constexpr bool operator==(const Tag& other) const {
    return epoch == other.epoch && generation == other.generation;
  }
};

WEFT_HD constexpr uint32_t next_generation(uint32_t generation, uint32_t steps = 1) {
  return (generation + steps) & 0xffffff;
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
    return (value & 0xff) < kStates && (value >> 8 & 0xff) < kReasons && pieces() <= kMorePieces;
  }
  WEFT_HD constexpr State state() const { return static_cast<State>(value & 0xff); }
  WEFT_HD constexpr Reason reason() const { return static_cast<Reason>(value >> 8 & 0xff); }
  // How often the output has grown; only the request plane's words have any.
  WEFT_HD constexpr uint32_t pieces() const { return value >> 16; }
};

WEFT_HD constexpr uint64_t state_word(Tag tag, State state, Reason reason = Reason::None,
                                      uint32_t pieces = 0) {
  const auto low = static_cast<uint32_t>(state) | static_cast<uint32_t>(reason) << 8;
  return Word{tag, low | pieces << 16}.bits();
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
  Images,         // of the prompt, or empty: core/images.py packs them
  Output,         // the first records of `output_stride` bytes
  PromptOutput,   // records of `prompt_stride` bytes, one for each prompt token, or empty
};
inline constexpr int kSections = 12;

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
  uint64_t arrival;     // counts submissions of this ring, so that the engine can keep the order
  Extent extent;        // all of the arena that this slot holds; every section lies inside
  Extent sections[kSections];
  uint32_t output_stride, prompt_stride;
  uint32_t given_out;   // output records that are there from the start, and read
  uint32_t max_records;  // output records that may come
};

// Records of an output that has grown so often, and of the piece that it grows by next.
WEFT_HD constexpr uint32_t records_after(uint32_t first, uint32_t most, uint32_t pieces) {
  const uint64_t room = uint64_t{first} << pieces;
  return room < most ? static_cast<uint32_t>(room) : most;
}
WEFT_HD constexpr uint32_t records_of_next(uint32_t first, uint32_t most, uint32_t pieces) {
  return records_after(first, most, pieces + 1) - records_after(first, most, pieces);
}

// What the engine writes before it completes the slot.
struct Final {
  uint32_t records;        // output tokens in all
  uint32_t with_token;     // whether the last of them came with the end
  uint32_t http_status, retry_after_s;  // 0: no use in asking again
  uint64_t scheduled_ns, prefilled_ns;  // on the monotonic clock, 0: never
  char code[48], param[48];  // zero-terminated UTF-8
  char message[280];
};

// Engines that died computing the sequence of `generation`. Written by the engine; once it is dead,
// by its keeper and its successor.
struct Deaths {
  uint32_t generation;
  uint32_t crashes;        // counted by the successor
  uint32_t outside_kills;  // engines killed from outside; keeper
  uint32_t memory_kills;   // engines killed for memory; keeper
  Blame blame;             // should the engine die now; engine, then its keeper
};

// The dense words of a slot, each written by one side.
struct alignas(16) Given {
  uint64_t state;      // Word of State and Reason
  uint64_t published;  // Word: output records that may be read

  WEFT_HD constexpr bool operator==(const Given& other) const {
    return state == other.state && published == other.published;
  }
};
struct Words {
  uint64_t& asked;  // Word of EMPTY, WRITING or PREFILL_PENDING, why to end, pieces; request plane
  Given& given;     // of the generations that it has taken; engine
};

struct alignas(kAlign) Slot {
  Input input;                                // request plane
  uint64_t more[kMorePieces];                 // where pieces of the output begin; request plane
  alignas(kAlign) uint64_t prompt_published;  // Word: prompt records that may be read; engine
  uint32_t cached_tokens;                     // prompt tokens from the prefix cache; atomic; engine
  Deaths deaths;
  alignas(kAlign) Final final;
};

// A wake-up: `rung` counts the news of each writer, `asleep` is odd while their reader sleeps. Each
// word has one writer.
struct alignas(kAlign) Count {
  uint32_t value;
};
template <int Writers>
struct Doorbell {
  Count rung[Writers];
  Count asleep;
};

// The engine has a bell for each thread that may have news: the one that takes requests in, and the
// one that publishes output.
enum class Bell : uint8_t { Control, Output };
inline constexpr int kBells = 2;

struct Header {
  uint64_t magic;
  uint32_t version, header_bytes, info_bytes, slot_bytes;
  uint32_t slots, not_slots;  // the latter has every bit the other way
  uint64_t total_bytes, info_offset, log_offset, log_bytes;
  uint64_t asked_offset, given_offset, slots_offset;
  uint64_t arena_offset, arena_bytes;
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
  Doorbell<1> to_engine;       // rung by the request plane
  Doorbell<kBells> to_client;  // rung by the engine
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

}  // namespace weft::ring
