// The agent of a request plane on another machine: applies what it writes to the engine's ring, and
// brings it what the engine has published.
//
// It holds the ring in the request plane's place: the engine watches the agent's process. It pushes,
// so that a token needs one way over the network and nobody polls; sequences whose first token is
// there come first. It may say the same again: after a link was lost it begins from the start.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "changes.hpp"
#include "checks.hpp"
#include "records.hpp"
#include "steps.hpp"
#include "wake.hpp"

namespace weft::ring {

class AgentSide {
 public:
  explicit AgentSide(std::shared_ptr<Segment> segment)
      : shared_(std::move(segment)), segment_(*shared_), changes_(segment_) {
    told_.resize(segment_.slots());
    left_.resize(segment_.slots(), kNoGeneration);
  }

  Segment& segment() { return segment_; }

  // From now on a request plane is attached, by the agent.
  void attach() {
    Header& header = segment_.header();
    store(header.client_pid, static_cast<uint32_t>(getpid()));
    store(header.client_epoch, (load(header.client_epoch) | 1) + 2);
    for (uint32_t i = 0; i < segment_.slots(); ++i) {
      left_[i] = Word::of(load(segment_.asked(i))).tag.generation;
    }
    forget();
  }

  // From now on the engine may reclaim every slot. No link may write any more.
  void detach() {
    uint32_t& epoch = segment_.header().client_epoch;
    store(epoch, (load(epoch) | 1) + 1);
    auto& bell = segment_.header().to_engine;
    if (ring_bell(bell, 0, woken_)) futex_wake(&bell.rung[0].value);
  }

  // The other side knows nothing of the ring, or not what of the news it has got.
  void forget() {
    std::fill(told_.begin(), told_.end(), Told{});
    header_ = {};
    info_ = steps_ = recoveries_ = 0;
    pending_ = true;
  }

  // What an empty ring has to have to become a copy of this one, beside the news: the engine's
  // state, all words, and what earlier request planes have written into slots.
  std::vector<std::string> snapshot() {
    tell_state();
    put_word(segment_.header().to_engine.rung[0].value);
    for (uint32_t i = 0; i < segment_.slots(); ++i) {
      const Seen seen = look(segment_.words(i));
      Slot& slot = segment_.slot(i);
      if (seen.asked == 0 && seen.given == 0) continue;
      put_word(segment_.asked(i));
      put_word(segment_.given(i).state);
      put_word(segment_.given(i).published);
      put_word(slot.prompt_published);
      changes_.put(&slot, offsetof(Slot, prompt_published));
    }
    return changes_.take();
  }

  // What the request plane has written. Throws SegmentError if it may not write there.
  void apply(std::string_view text) {
    auto& bell = segment_.header().to_engine;
    const auto* base = reinterpret_cast<const std::byte*>(&segment_.header());
    const uint64_t rung = reinterpret_cast<const std::byte*>(&bell.rung[0].value) - base;
    bool rings = false;
    apply_changes(segment_, text, [&](Place place, bool) {
      const bool bells = place.offset == rung && place.bytes == sizeof(uint32_t);
      rings |= bells;
      return bells || may_change(place);
    });
    if (rings && to_be_woken(bell, woken_)) futex_wake(&bell.rung[0].value);
  }

  // Changes since the last call, as many as fit into a part or two; empty if there are none. `whole`
  // asks for the info page and the log, too.
  std::vector<std::string> collect(bool whole) {
    if (whole) tell_state();
    const auto& bell = segment_.header().to_client;
    if (hear(bell, heard_)) pending_ = true;
    if (!pending_) return changes_.take();
    pending_ = false;
    find_changed();
    for (const uint32_t index : changed_) {
      if (changes_.full()) {
        pending_ = true;
        break;
      }
      tell(index);
    }
    for (int i = 0; i < kBells; ++i) {
      changes_.put(&bell.rung[i].value, &heard_[i], sizeof heard_[i]);
    }
    return changes_.take();
  }
  bool pending() const { return pending_; }

  bool sleep() { return go_to_sleep(segment_.header().to_client, heard_); }

  // Whether no request is in the ring.
  bool idle() const {
    for (uint32_t i = 0; i < segment_.slots(); ++i) {
      const Seen seen = look(segment_.words(i));
      if (seen.valid() && seen.state() != State::Empty && seen.state() != State::Writing) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr uint32_t kNoGeneration = ~0u;

  // What the other side has been told of a slot.
  struct Told {
    Given given{~uint64_t{0}, ~uint64_t{0}};
    uint32_t generation = kNoGeneration;  // of what follows
    bool sound = false;         // its input
    Output output;
    Records prompt;
    uint32_t first = 0, records = 0, prompt_records = 0, cached_tokens = 0;
  };
  struct State32 {
    uint32_t epoch = 0, pid = 0, memory_kills = 0, short_epoch = 0, kill_epoch = 0;
    bool operator==(const State32&) const = default;
  };

  template <class T>
  void put_word(T& word) {
    const T value = load(word);
    changes_.put(&word, &value, sizeof value);
  }

  // Where a request plane writes: its words, its inputs, and the arena.
  bool may_change(Place place) const {
    const auto* base = reinterpret_cast<const std::byte*>(&segment_.header());
    const auto within = [&](const void* from, uint64_t bytes) {
      return place.within(static_cast<const std::byte*>(from) - base, bytes);
    };
    if (within(&segment_.asked(0), segment_.slots() * sizeof(uint64_t))) return true;
    if (within(segment_.arena(), segment_.arena_bytes())) return true;
    if (!within(&segment_.slot(0), segment_.slots() * sizeof(Slot))) return false;
    const uint64_t slots = reinterpret_cast<const std::byte*>(&segment_.slot(0)) - base;
    const uint64_t at = (place.offset - slots) % sizeof(Slot);
    return at + place.bytes <= offsetof(Slot, prompt_published);
  }

  // The slots with news; those whose first token nobody has seen come first.
  void find_changed() {
    changed_.clear();
    for (uint32_t i = 0; i < segment_.slots(); ++i) {
      const Given& given = segment_.given(i);
      const Given seen{load(given.state), load(given.published)};
      if (!(seen == told_[i].given) || more_of_prompt(i)) changed_.push_back(i);
    }
    std::stable_partition(changed_.begin(), changed_.end(), [&](uint32_t i) {
      return told_[i].records == told_[i].first;
    });
  }

  // Whether prompt records have come, which they may without a change of the dense words.
  bool more_of_prompt(uint32_t index) const {
    const Told& told = told_[index];
    if (told.prompt.capacity == 0) return false;
    const Word word = Word::of(load(segment_.slot(index).prompt_published));
    return word.tag.generation == told.generation && word.value > told.prompt_records;
  }

  // The state is read before what it announces; and the payload is told before the words.
  void tell(uint32_t index) {
    const Given& given = segment_.given(index);
    const Given seen{load(given.state), load(given.published)};
    Told& told = told_[index];
    const Word word = Word::of(seen.state);
    if (told.generation != word.tag.generation || !told.sound) follow(index, word.tag.generation);
    if (told.sound) tell_payload(index, seen);
    if (seen == told.given) return;
    changes_.put(&given, &seen, sizeof seen);
    told.given = seen;
  }

  // Whatever a request plane has written may be wrong: it is copied, checked, and then followed. The
  // output of what an earlier one has left is for nobody, and only its words are told.
  void follow(uint32_t index, uint32_t generation) {
    const Word asked = Word::of(load(segment_.asked(index)));
    const Given last = told_[index].given;
    Told& told = told_[index] = Told{};
    told.given = last;
    told.generation = generation;
    if (asked.tag.generation != left_[index]) left_[index] = kNoGeneration;  // may come again
    if (asked.tag.generation != generation || !asked.valid_state()) return;
    if (generation == left_[index]) return;
    if (asked.state() != State::PrefillPending) return;
    Input input;
    std::memcpy(&input, &segment_.slot(index).input, sizeof input);
    if (fault_of(input, segment_.arena_bytes())) return;
    const Extent output = input.sections[static_cast<int>(Section::Output)];
    const Extent prompt = input.sections[static_cast<int>(Section::PromptOutput)];
    told.output.piece[0] = segment_.arena() + output.offset;
    told.output.stride = input.output_stride;
    told.output.first = static_cast<uint32_t>(output.bytes / input.output_stride);
    told.output.most = input.max_records;
    told.prompt = {segment_.arena() + prompt.offset, input.prompt_stride, 0};
    if (prompt.bytes) {
      told.prompt.capacity = static_cast<uint32_t>(prompt.bytes / input.prompt_stride);
    }
    told.first = told.records = std::min(input.given_out, told.output.first);
    told.sound = true;
  }

  void tell_payload(uint32_t index, const Given& seen) {
    Slot& slot = segment_.slot(index);
    Told& told = told_[index];
    const Tag tag{0, told.generation};
    Output& output = told.output;
    for (const uint32_t pieces = pieces_of(load(segment_.asked(index)), tag);
         output.pieces < pieces; ++output.pieces) {
      const Extent extent{slot.more[output.pieces], round_up(output.bytes_of_next(), kAlign)};
      if (!is_sound(extent, segment_.arena_bytes())) break;
      output.piece[output.pieces + 1] = segment_.arena() + extent.offset;
    }
    const auto write = [this](const std::byte* at, uint64_t bytes) { changes_.put(at, bytes); };
    const Word word = Word::of(seen.published);
    const bool ended = Word::of(seen.state).state() == State::DecodeCompleted;
    const bool counted = word.tag.generation == tag.generation;
    const uint32_t upto = ended ? slot.final.records : counted ? word.value : told.records;
    if (upto > told.records && upto <= output.capacity()) {
      output.stretches(told.records, upto, write);
      told.records = upto;
    }
    const uint64_t scored = load(slot.prompt_published);
    const Word prompt = Word::of(scored);
    if (prompt.tag.generation == tag.generation && prompt.value > told.prompt_records &&
        prompt.value <= told.prompt.capacity) {
      told.prompt.stretch(told.prompt_records, prompt.value, write);
      changes_.put(&slot.prompt_published, &scored, sizeof scored);
      told.prompt_records = prompt.value;
    }
    const uint32_t cached_tokens = load(slot.cached_tokens);
    if (cached_tokens != told.cached_tokens || !(seen == told.given)) {
      changes_.put(&slot.cached_tokens, &cached_tokens, sizeof cached_tokens);
      told.cached_tokens = cached_tokens;
    }
    if (ended && !(seen == told.given)) changes_.put(&slot.final, sizeof slot.final);
  }

  // The engine's part of the header, its info page, and its log.
  void tell_state() {
    const Header& header = segment_.header();
    const State32 now{load(header.epoch), load(header.engine_pid), load(header.memory_kills),
                      load(header.short_epoch), load(header.kill_epoch)};
    if (!(now == header_)) {
      changes_.put(&header.memory_kills, &now.memory_kills, sizeof(uint32_t));
      changes_.put(&header.short_epoch, &now.short_epoch, sizeof(uint32_t));
      changes_.put(&header.kill_epoch, &now.kill_epoch, sizeof(uint32_t));
      changes_.put(&header.engine_pid, &now.pid, sizeof(uint32_t));
      changes_.put(&header.epoch, &now.epoch, sizeof(uint32_t));
      header_ = now;
    }
    tell_log(segment_.log().steps, steps_);
    tell_log(segment_.log().recoveries, recoveries_);
    const InfoPage& page = segment_.info();
    const uint64_t sequence = load(page.sequence);
    if (sequence == info_ || sequence % 2) return;
    uint64_t values[1 + kInfoFields];
    values[0] = sequence;
    uint64_t(&fields)[kInfoFields] = *reinterpret_cast<uint64_t(*)[kInfoFields]>(values + 1);
    if (!read_info(page, fields, 10)) return;
    changes_.put(&page, values, sizeof values);
    info_ = sequence;
  }

  // Entries since the last call. The copy has one writer, and is read between two messages.
  template <int Fields, int Entries>
  void tell_log(const Log<Fields, Entries>& log, uint64_t& told) {
    const uint64_t written = load(log.written);
    if (written == told) return;
    for (uint64_t n = std::max(told, log.oldest(written)); n < written; ++n) {
      LogEntry<Fields> entry{2 * n + 2, {}};
      if (!read_entry(log, n, entry.values)) continue;
      changes_.put(&log.entries[n % Entries], &entry, sizeof entry);
    }
    changes_.put(&log.written, &written, sizeof written);
    told = written;
  }

  std::shared_ptr<Segment> shared_;
  Segment& segment_;
  Changes changes_;
  std::vector<Told> told_;         // by slot
  std::vector<uint32_t> left_;     // by slot: the generation that the request plane has inherited
  std::vector<uint32_t> changed_;  // slots with news
  State32 header_;
  uint64_t info_ = 0;     // sequence of the page that was told
  uint64_t steps_ = 0, recoveries_ = 0;  // entries of the log that were told
  bool pending_ = true;   // there are, or may be, more news than were told
  uint32_t woken_ = 0, heard_[kBells] = {};
};

}  // namespace weft::ring
