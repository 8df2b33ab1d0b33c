// The engine's side of one ring. Everything that it follows it has copied and checked first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "records.hpp"
#include "segment.hpp"

namespace weft::ring {

// A request as read from its slot.
struct Claim {
  uint64_t id = 0;  // the engine's own name for the sequence
  std::vector<uint32_t> prompt, stop_ids, eos_ids, token_lists, published;
  std::vector<BiasRecord> logit_bias;
  std::string sampling, service_class, cache_salt, grammar;  // `sampling` begins with its head
  uint32_t crashes = 0, memory_kills = 0;
  uint64_t group_id = 0, deadline_ns = 0, arrival = 0;
};

struct Received {
  std::vector<Claim> claims;
  std::vector<std::pair<uint64_t, Reason>> cancels;
};

struct End {
  Reason reason = Reason::Error;
  const Scored* last = nullptr;  // the token that came with the end
  uint32_t cached_tokens = 0, http_status = 0, retry_after_s = 0;
  uint64_t scheduled_ns = 0, prefilled_ns = 0;
  std::string code, param, message;
};

class EngineSide {
 public:
  // `number` tells the rings of one engine apart in the ids of their sequences.
  EngineSide(std::shared_ptr<Segment> segment, uint8_t number)
      : shared_(std::move(segment)), segment_(*shared_), number_(number) {
    held_.resize(segment_.slots());
    Header& header = segment_.header();
    store(header.epoch, load(header.epoch) + 1);
    epoch_ = static_cast<uint16_t>(load(header.epoch));
    store(header.engine_pid, static_cast<uint32_t>(getpid()));
    // The engine before this one is dead: what it held is pending again.
    for (uint32_t i = 0; i < segment_.slots(); ++i) requeue(segment_.slot(i), epoch_);
    heard_ = load(header.to_engine.rung) - 1;
  }

  Segment& segment() { return segment_; }
  uint16_t epoch() const { return epoch_; }
  // The attached request plane: its process, and which one it is (odd; even: none is attached).
  uint32_t client_pid() const { return load(segment_.header().client_pid); }
  uint32_t client_epoch() const { return load(segment_.header().client_epoch); }
  // Whether an engine has attached after this one.
  bool superseded() const { return static_cast<uint16_t>(load(segment_.header().epoch)) != epoch_; }
  uint64_t in_flight() const { return in_flight_; }
  uint64_t refused() const { return refused_; }

  // The request plane of this epoch is dead. May be called by any thread.
  void client_died(uint32_t epoch) { dead_client_.store(epoch); }

  // New requests in the order of their arrival, and ids that are to end.
  Received receive() {
    Received received;
    const uint32_t rung = load(segment_.header().to_engine.rung);
    const uint32_t client = client_epoch();
    if (rung == heard_ && !(gone(client) && !emptied_)) return received;
    heard_ = rung;
    emptied_ = gone(client);
    std::vector<std::pair<uint64_t, uint32_t>> pending;
    for (uint32_t i = 0; i < segment_.slots(); ++i) look_at(i, client, pending, received);
    std::sort(pending.begin(), pending.end());
    for (const auto& [arrival, index] : pending) claim(index, received);
    return received;
  }

  bool publish(uint64_t id, uint32_t token) {
    const uint32_t index = index_of(id);
    Held& held = held_[index];
    if (!may_write(index)) return false;
    if (held.repeated > 0) {
      --held.repeated;
      return true;
    }
    check_room(held);
    held.output.put(held.published, token);
    return count(index);
  }

  bool publish(uint64_t id, const Scored& scored, uint32_t cached_tokens) {
    const uint32_t index = index_of(id);
    Held& held = held_[index];
    if (!may_write(index)) return false;
    check_room(held);
    store(segment_.slot(index).cached_tokens, cached_tokens);
    held.output.put(held.published, scored);
    return count(index);
  }

  // Prompt records [start, start + scored.size()); what lies before has none. Those that a dead
  // engine has published already are left as they are.
  bool publish_prompt(uint64_t id, uint32_t start, std::span<const Scored> scored) {
    const uint32_t index = index_of(id);
    Held& held = held_[index];
    const uint64_t end = uint64_t{start} + scored.size();
    const uint32_t fresh = std::max(start, held.prompt_recovered);
    if (end <= fresh) return true;
    if (end > held.prompt.capacity || fresh < held.prompt_published) {
      throw SegmentError("prompt log probabilities that were not asked for, or twice");
    }
    if (!may_write(index)) return false;
    for (uint32_t i = held.prompt_published; i < fresh; ++i) held.prompt.put(i, uint32_t{0});
    for (uint32_t i = fresh; i < end; ++i) held.prompt.put(i, scored[i - start]);
    const auto more = static_cast<uint32_t>(end) - held.prompt_published;
    uint64_t& word = segment_.slot(index).prompt_published;
    touched_ = true;
    const Outcome outcome =
        weft::ring::publish(word, held.tag, held.prompt_published, more);
    held.prompt_published += more;
    return outcome == Outcome::Done;
  }

  bool finish(uint64_t id, const End& end) {
    const uint32_t index = index_of(id);
    Held& held = held_[index];
    if (end.last && may_write(index)) {
      check_room(held);
      held.output.put(held.published, *end.last);
    }
    return complete(index, end, held.published + (end.last != nullptr));
  }

  // Whether news were published since the last call and the sleeping client must be woken.
  bool ring() {
    if (!touched_) return false;
    touched_ = false;
    return ring_bell(segment_.header().to_client, woken_);
  }

  // How far these are to blame if the engine dies from now on.
  void set_blame(uint64_t id, Blame blame) {
    segment_.slot(index_of(id)).blame = blame;
  }

  // Whether the sequence has ended or has got so far that it is no suspect any more.
  bool cleared(uint64_t id) const {
    const auto index = static_cast<uint32_t>(id & 0xffff);
    if (index >= held_.size() || !held_[index].live || held_[index].id != id) return true;
    return held_[index].published >= held_[index].recovered + kClearedTokens;
  }

  // Sequences with more than `limit` records that their reader has not consumed.
  std::vector<std::pair<uint64_t, uint32_t>> lagging(uint32_t limit) const {
    std::vector<std::pair<uint64_t, uint32_t>> found;
    for (uint32_t i = 0; i < held_.size(); ++i) {
      const Held& held = held_[i];
      if (!held.live) continue;
      const Word word = Word::of(load(segment_.slot(i).consumed));
      const bool known = word.tag.generation == held.tag.generation;
      const uint32_t consumed = known ? std::min(word.value, held.published) : 0;
      if (held.published - consumed > limit) found.emplace_back(held.id, held.published - consumed);
    }
    return found;
  }

  std::vector<uint64_t> open_ids() const {
    std::vector<uint64_t> ids;
    for (const Held& held : held_) {
      if (held.live) ids.push_back(held.id);
    }
    return ids;
  }

  bool news() const {
    return load(segment_.header().to_engine.rung) != heard_ || (gone(client_epoch()) && !emptied_);
  }
  bool sleep() { return go_to_sleep(segment_.header().to_engine, heard_); }
  void wake() { wake_up(segment_.header().to_engine); }
  uint32_t* bell() { return &segment_.header().to_engine.rung; }
  uint32_t heard() const { return heard_; }

 private:
  struct Held {
    uint64_t id = 0;
    Tag tag;
    Extent extent{};
    Records output, prompt;
    uint32_t published = 0, prompt_published = 0;
    uint32_t recovered = 0, prompt_recovered = 0;  // published by engines that have died
    uint32_t repeated = 0;  // words of an embedding that will come again
    bool live = false, decoding = false, cancelling = false;
  };

  // More than can be computed and unpublished when an engine dies.
  static constexpr uint32_t kClearedTokens = 4;

  bool gone(uint32_t client) const { return client % 2 == 0 || client == dead_client_.load(); }

  uint32_t index_of(uint64_t id) const {
    const auto index = static_cast<uint32_t>(id & 0xffff);
    if (index >= held_.size() || !held_[index].live || held_[index].id != id) {
      throw SegmentError("sequence " + std::to_string(id) + " is not open");
    }
    return index;
  }

  // Whether no later engine has the slot. What a stalled engine says after that is dropped here;
  // between this look and the exchange that publishes, only the proof of its death protects the
  // payload, which is why recovery asks for one.
  bool may_write(uint32_t index) const {
    return Word::of(load(segment_.slot(index).state)).tag == held_[index].tag;
  }

  static void check_room(const Held& held) {
    if (held.published < held.output.capacity) return;
    throw SegmentError("sequence " + std::to_string(held.id) + " has outgrown its output");
  }

  bool count(uint32_t index) {
    Held& held = held_[index];
    Slot& slot = segment_.slot(index);
    touched_ = true;
    if (!held.decoding) {
      held.decoding = true;
      if (move_as_engine(slot, held.tag, State::DecodeProcessing) != Outcome::Done) return false;
    }
    if (held.published + 1 == held.recovered + kClearedTokens) {
      slot.crashes = slot.memory_kills = slot.outside_kills = 0;
      slot.blame = Blame::Shared;
    }
    return weft::ring::publish(slot.published, held.tag, held.published++, 1) == Outcome::Done;
  }

  void look_at(uint32_t index, uint32_t client,
               std::vector<std::pair<uint64_t, uint32_t>>& pending, Received& received) {
    Slot& slot = segment_.slot(index);
    const Word word = Word::of(load(slot.state));
    if (!word.valid_state()) return;
    Held& held = held_[index];
    if (word.state() == State::PrefillPending) {
      // One that is held cannot be pending: it is corrupt, and not taken a second time.
      if (!held.live) pending.emplace_back(slot.input.arrival, index);
    } else if (gone(client) && owner(word.state()) == Side::Request) {
      reclaim(slot, segment_.header().client_epoch, client);
    } else if (held.live && !held.cancelling) {
      const Reason reason = gone(client) ? Reason::Cancelled : cancelled(slot, held.tag);
      if (reason == Reason::None) return;
      held.cancelling = true;
      received.cancels.emplace_back(held.id, reason);
    }
  }

  void claim(uint32_t index, Received& received) {
    Slot& slot = segment_.slot(index);
    Tag tag;
    if (take(slot, epoch_, tag) != Outcome::Done) return;
    Held& held = held_[index] = Held{};
    held.tag = tag;
    held.id = ++serial_ << 24 | uint64_t{number_} << 16 | index;
    held.live = true;
    ++in_flight_;
    End end;
    Claim found;
    if (read(slot, held, found, end)) {
      end.reason = cancelled(slot, tag);
    } else {
      ++refused_;
    }
    // Read after the state: a request of a new request plane is not taken for a dead one's.
    if (gone(client_epoch())) end.reason = Reason::Cancelled;
    slot.blame = Blame::None;
    if (end.reason != Reason::None) {
      complete(index, end, held.published);
    } else {
      received.claims.push_back(std::move(found));
    }
  }

  // Copy, check, and only then follow. False if the slot is corrupt; `end` then says so.
  bool read(const Slot& slot, Held& held, Claim& found, End& end) {
    Input input;
    std::memcpy(&input, &slot.input, sizeof input);
    const char* fault = fault_of(input, segment_.arena_bytes());
    for (const Held& other : held_) {
      if (fault || &other == &held || !other.live) continue;
      if (overlap(other.extent, input.extent)) fault = "an extent that is in use";
    }
    if (!fault) fault = adopt_output(slot, input, held);
    SamplingHead sampling{};
    if (!fault) fault = read_sampling(input, found.sampling, sampling);
    if (fault) {
      end.reason = Reason::Error;
      end.http_status = 500;
      end.code = "ring_corrupt";
      end.message = std::string("The request's slot is corrupt: ") + fault + ".";
      return false;
    }
    found.id = held.id;
    found.prompt = ids(input, Section::Prompt);
    found.stop_ids = ids(input, Section::StopIds);
    found.eos_ids = ids(input, Section::EosIds);
    found.logit_bias.resize(size(input, Section::LogitBias) / sizeof(BiasRecord));
    copy(input, Section::LogitBias, found.logit_bias.data());
    found.service_class = text(input, Section::ServiceClass);
    found.cache_salt = text(input, Section::CacheSalt);
    found.grammar = text(input, Section::Grammar);
    found.token_lists = ids(input, Section::TokenLists);
    if (sampling.set & kEmbed) {
      held.repeated = held.published;  // computed again from the start: equal words
    } else {
      for (uint32_t i = 0; i < held.published; ++i) found.published.push_back(held.output.token(i));
    }
    found.crashes = slot.crashes;
    found.memory_kills = slot.memory_kills;
    found.group_id = input.group_id;
    found.deadline_ns = input.deadline_ns;
    found.arrival = input.arrival;
    return true;
  }

  const char* adopt_output(const Slot& slot, const Input& input, Held& held) {
    const Extent output = input.sections[static_cast<int>(Section::Output)];
    const Extent prompt = input.sections[static_cast<int>(Section::PromptOutput)];
    const Word published = Word::of(load(slot.published));
    const Word prompt_published = Word::of(load(slot.prompt_published));
    held.output = {segment_.arena() + output.offset, input.output_stride,
                   static_cast<uint32_t>(output.bytes / input.output_stride)};
    held.prompt = {segment_.arena() + prompt.offset, input.prompt_stride, 0};
    if (prompt.bytes) {
      held.prompt.capacity = static_cast<uint32_t>(
          std::min<uint64_t>(prompt.bytes / input.prompt_stride, kMaxRecords));
    }
    if (!(published.tag == held.tag) || published.value > held.output.capacity) {
      return "its count of tokens";
    }
    if (!(prompt_published.tag == held.tag) || prompt_published.value > held.prompt.capacity) {
      return "its count of prompt tokens";
    }
    held.extent = input.extent;
    held.published = published.value;
    held.prompt_published = held.prompt_recovered = prompt_published.value;
    held.recovered = held.published;
    return nullptr;
  }

  const char* read_sampling(const Input& input, std::string& packed, SamplingHead& head) {
    packed = text(input, Section::Sampling);
    std::memcpy(&head, packed.data(), sizeof head);
    if (head.set & ~kAllSet) return "its sampling parameters";
    const bool scored = head.set & kLogprobs, prompt_scored = head.set & kPromptLogprobs;
    if (scored && stride_for(true, std::min(head.logprobs, kMaxTop)) != input.output_stride) {
      return "its output stride";
    }
    if (prompt_scored != (size(input, Section::PromptOutput) != 0)) return "its prompt records";
    return nullptr;
  }

  static uint64_t size(const Input& input, Section section) {
    return input.sections[static_cast<int>(section)].bytes;
  }
  void copy(const Input& input, Section section, void* to) const {
    const Extent from = input.sections[static_cast<int>(section)];
    if (from.bytes) std::memcpy(to, segment_.arena() + from.offset, from.bytes);
  }
  std::vector<uint32_t> ids(const Input& input, Section section) const {
    std::vector<uint32_t> values(size(input, section) / sizeof(uint32_t));
    copy(input, section, values.data());
    return values;
  }
  std::string text(const Input& input, Section section) const {
    std::string value(size(input, section), '\0');
    copy(input, section, value.data());
    return value;
  }

  bool complete(uint32_t index, const End& end, uint32_t records) {
    Held& held = held_[index];
    Slot& slot = segment_.slot(index);
    Final final{};
    final.records = records;
    final.with_token = end.last != nullptr;
    final.http_status = end.http_status;
    final.retry_after_s = end.retry_after_s;
    final.scheduled_ns = end.scheduled_ns;
    final.prefilled_ns = end.prefilled_ns;
    put_text(final.code, end.code);
    put_text(final.param, end.param);
    put_text(final.message, end.message);
    held.live = false;
    --in_flight_;
    if (!may_write(index)) return false;
    slot.final = final;
    store(slot.cached_tokens, end.cached_tokens);
    touched_ = true;
    const Outcome outcome =
        move_as_engine(slot, held.tag, State::DecodeCompleted, end.reason);
    const uint32_t client = client_epoch();
    if (gone(client)) reclaim(slot, segment_.header().client_epoch, client);
    return outcome == Outcome::Done;
  }

  // Shortened to what fits, never inside a character.
  template <size_t N>
  static void put_text(char (&to)[N], const std::string& from) {
    size_t length = std::min(from.size(), N - 1);
    if (length < from.size()) {
      while (length > 0 && (from[length] & 0xc0) == 0x80) --length;
    }
    std::memcpy(to, from.data(), length);
    to[length] = '\0';
  }

  std::shared_ptr<Segment> shared_;
  Segment& segment_;
  std::vector<Held> held_;  // by slot
  std::atomic<uint32_t> dead_client_{0};
  uint64_t serial_ = 0, in_flight_ = 0, refused_ = 0;
  uint32_t heard_ = 0, woken_ = 0;
  uint16_t epoch_ = 0;
  uint8_t number_;
  bool touched_ = false, emptied_ = false;
};

}  // namespace weft::ring
