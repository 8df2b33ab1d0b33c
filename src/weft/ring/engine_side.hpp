// The engine's side of one ring. Everything that it follows it has copied and checked first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "claim.hpp"
#include "records.hpp"
#include "segment.hpp"
#include "steps.hpp"
#include "wake.hpp"

namespace weft::ring {

struct Received {
  std::vector<Claim> claims;
  std::vector<std::pair<uint64_t, Reason>> cancels;
};

struct End {
  Reason reason = Reason::Error;
  bool with_token = false;  // the last one came with the end
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
    asked_.resize(segment_.slots());
    Header& header = segment_.header();
    store(header.epoch, load(header.epoch) + 1);
    epoch_ = static_cast<uint16_t>(load(header.epoch));
    store(header.engine_pid, static_cast<uint32_t>(getpid()));
    // The engine before this one is dead: what it held is pending again.
    for (uint32_t i = 0; i < segment_.slots(); ++i) {
      requeue(segment_.words(i), segment_.slot(i), epoch_);
    }
    heard_[0] = load(header.to_engine.rung[0].value) - 1;
    if (const uint32_t engine = load(header.epoch); engine > 1) {
      append_recovery(segment_.log(), segment_.info(), engine, now_ns());
    }
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
    const bool rung = hear(segment_.header().to_engine, heard_);
    const uint32_t client = client_epoch();
    const bool leaving = gone(client) && !emptied_;
    if (!rung && !leaving) return received;
    emptied_ = gone(client);
    std::vector<std::pair<uint64_t, uint32_t>> pending;
    for (uint32_t i = 0; i < segment_.slots(); ++i) {
      const uint64_t asked = load(segment_.asked(i));
      if (asked != asked_[i]) look_at(i, asked_[i] = asked, pending, received);
    }
    if (emptied_) {
      for (uint32_t i = 0; i < segment_.slots(); ++i) leave(i, client, received);
    }
    std::sort(pending.begin(), pending.end());
    for (const auto& [arrival, index] : pending) claim(index, received);
    return received;
  }

  // Output for which there is no room yet is kept: the request plane is behind, and will make some.
  bool publish(uint64_t id, uint32_t token) {
    const uint32_t index = index_of(id);
    Held& held = held_[index];
    if (held.end || !may_write(index)) return false;
    if (held.repeated > 0) {
      --held.repeated;
      return true;
    }
    check_room(held);
    if (!has_room(index)) return keep(held, Scored{{token, 0, 0, kNoLogprob}, {}});
    held.output.put(held.published, token);
    return count(index);
  }

  bool publish(uint64_t id, const Scored& scored, uint32_t cached_tokens) {
    const uint32_t index = index_of(id);
    Held& held = held_[index];
    if (!may_write(index)) return false;
    check_room(held);
    store(segment_.slot(index).cached_tokens, cached_tokens);
    if (!has_room(index)) return keep(held, scored);
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

  // `last` is the token that comes with the end, or null. The end waits, too, for room for all that
  // comes before it, unless nobody reads it.
  bool finish(uint64_t id, const End& end, const Scored* last) {
    const uint32_t index = index_of(id);
    Held& held = held_[index];
    const bool again = held.end.has_value();
    if (again || !may_write(index)) return complete(index, end, held.published);
    if (held.stuck) return complete(index, corrupt("a piece of its output"), held.published);
    if (last) {
      check_room(held);
      held.kept.push_back(*last);
    }
    held.end = end;
    held.end->with_token = last != nullptr;
    const bool ours = say_kept(index);
    if (!held.live || !unread(index)) return ours;
    return complete(index, end, held.published);
  }

  // Whether news were published since the last call and the sleeping client must be woken.
  bool ring(Bell bell) {
    if (!touched_) return false;
    touched_ = false;
    const int writer = static_cast<int>(bell);
    return ring_bell(segment_.header().to_client, writer, woken_[writer]);
  }

  // How far these are to blame if the engine dies from now on.
  void set_blame(uint64_t id, Blame blame) {
    segment_.slot(index_of(id)).deaths.blame = blame;
  }

  // Whether the sequence has ended or has got so far that it is no suspect any more.
  bool cleared(uint64_t id) const {
    const auto index = static_cast<uint32_t>(id & 0xffff);
    if (index >= held_.size() || !held_[index].live || held_[index].id != id) return true;
    return held_[index].published >= held_[index].recovered + kClearedTokens;
  }

  std::vector<uint64_t> open_ids() const {
    std::vector<uint64_t> ids;
    for (const Held& held : held_) {
      if (held.live) ids.push_back(held.id);
    }
    return ids;
  }

  bool news() const {
    return load(segment_.header().to_engine.rung[0].value) != heard_[0] ||
           (gone(client_epoch()) && !emptied_);
  }
  bool sleep() { return go_to_sleep(segment_.header().to_engine, heard_); }
  void wake() { wake_up(segment_.header().to_engine); }
  uint32_t* bell() { return &segment_.header().to_engine.rung[0].value; }
  uint32_t heard() const { return heard_[0]; }

 private:
  struct Held {
    uint64_t id = 0;
    Tag tag;
    std::vector<Extent> extents;
    Output output;
    Records prompt;
    std::vector<Scored> kept;  // output that has no room yet
    std::optional<End> end;    // comes behind it
    uint32_t published = 0, prompt_published = 0;
    uint32_t recovered = 0, prompt_recovered = 0;  // published by engines that have died
    uint32_t repeated = 0;  // words of an embedding that will come again
    bool live = false, decoding = false, cancelling = false, stuck = false;
  };

  // More than can be computed and unpublished when an engine dies, but for sequences with log
  // probabilities under a lease, which have none once they are charged (sched/requests.py).
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
    return Word::of(load(segment_.given(index).state)).tag == held_[index].tag;
  }

  static void check_room(const Held& held) {
    if (held.published + held.kept.size() < held.output.most) return;
    throw SegmentError("sequence " + std::to_string(held.id) + " has outgrown its output");
  }

  static bool keep(Held& held, const Scored& scored) {
    held.kept.push_back(scored);
    return true;
  }

  // Whether the next token can be published at once.
  bool has_room(uint32_t index) {
    Held& held = held_[index];
    if (!held.kept.empty()) say_kept(index);
    if (held.published == held.output.capacity()) follow(index, load(segment_.asked(index)));
    return held.kept.empty() && held.published < held.output.capacity();
  }

  // Publish what was kept, as far as there is room, and then the end, if it has come.
  bool say_kept(uint32_t index) {
    Held& held = held_[index];
    uint32_t said = 0;
    bool ours = true;
    while (ours && said < held.kept.size()) {
      if (held.published == held.output.capacity()) follow(index, load(segment_.asked(index)));
      if (held.published == held.output.capacity()) break;
      held.output.put(held.published, held.kept[said++]);
      const bool last = held.end && held.end->with_token && said == held.kept.size();
      if (last) return complete(index, *held.end, held.published + 1);
      ours = count(index);
    }
    held.kept.erase(held.kept.begin(), held.kept.begin() + said);
    if (!ours || !held.end) return ours;
    if (held.kept.empty()) return complete(index, *held.end, held.published);
    return !held.stuck || complete(index, corrupt("a piece of its output"), held.published);
  }

  // Whether nobody waits for the output.
  bool unread(uint32_t index) const {
    const uint64_t asked = load(segment_.asked(index));
    return gone(client_epoch()) || cancelled(asked, held_[index].tag) != Reason::None;
  }

  // Check and then use the pieces by which the output has grown.
  void follow(uint32_t index, uint64_t asked) {
    Held& held = held_[index];
    Output& output = held.output;
    for (const uint32_t pieces = pieces_of(asked, held.tag); output.pieces < pieces;) {
      const Extent extent{segment_.slot(index).more[output.pieces],
                          round_up(output.bytes_of_next(), kAlign)};
      held.stuck |= !is_sound(extent, segment_.arena_bytes()) || in_use(extent);
      if (held.stuck) return;
      use(held, extent);
      output.piece[++output.pieces] = segment_.arena() + extent.offset;
    }
  }

  void use(Held& held, Extent extent) {
    held.extents.push_back(extent);
    taken_[extent.offset] = extent.bytes;
  }

  bool count(uint32_t index) {
    Held& held = held_[index];
    Given& given = segment_.given(index);
    touched_ = true;
    if (!held.decoding) {
      held.decoding = true;
      if (move_as_engine(given, held.tag, State::DecodeProcessing) != Outcome::Done) return false;
    }
    if (held.published + 1 == held.recovered + kClearedTokens) {
      segment_.slot(index).deaths = {held.tag.generation, 0, 0, 0, Blame::Shared};
    }
    return weft::ring::publish(given.published, held.tag, held.published++, 1) == Outcome::Done;
  }

  // The request plane has changed its word.
  void look_at(uint32_t index, uint64_t asked,
               std::vector<std::pair<uint64_t, uint32_t>>& pending, Received& received) {
    Held& held = held_[index];
    if (held.live) {
      follow(index, asked);
      say_kept(index);
      const Reason reason = held.stuck ? Reason::Error : cancelled(asked, held.tag);
      if (held.live && (!held.cancelling || held.end)) cancel(index, reason, received);
    } else if (can_move(look(segment_.words(index)), State::PrefillProcessing, Side::Engine)) {
      pending.emplace_back(segment_.slot(index).input.arrival, index);
    }
  }

  // The request plane is gone.
  void leave(uint32_t index, uint32_t client, Received& received) {
    Held& held = held_[index];
    if (!held.live) {
      reclaim(segment_.words(index), epoch_, segment_.header().client_epoch, client);
    } else if (!held.cancelling || held.end) {
      cancel(index, Reason::Cancelled, received);
    }
  }

  void cancel(uint32_t index, Reason reason, Received& received) {
    Held& held = held_[index];
    if (reason == Reason::None) return;
    if (held.end) {  // only its reader had still to see it
      End end;
      end.reason = reason;
      complete(index, end, held.published);
      return;
    }
    held.cancelling = true;
    received.cancels.emplace_back(held.id, reason);
  }

  void claim(uint32_t index, Received& received) {
    Slot& slot = segment_.slot(index);
    Tag tag;
    if (take(segment_.words(index), slot, epoch_, tag) != Outcome::Done) return;
    Held& held = held_[index] = Held{};
    held.tag = tag;
    // The same for the next engine, should this one die.
    held.id = uint64_t{tag.generation} << 24 | uint64_t{number_} << 16 | index;
    held.live = true;
    ++in_flight_;
    End end;
    Claim found;
    if (read(index, held, found, end)) {
      end.reason = cancelled(load(segment_.asked(index)), tag);
    } else {
      ++refused_;
    }
    // Read after the state: a request of a new request plane is not taken for a dead one's.
    if (gone(client_epoch())) end.reason = Reason::Cancelled;
    slot.deaths.blame = Blame::None;
    if (end.reason != Reason::None) {
      complete(index, end, held.published);
    } else {
      received.claims.push_back(std::move(found));
    }
  }

  // Copy, check, and only then follow. False if the slot is corrupt; `end` then says so.
  bool read(uint32_t index, Held& held, Claim& found, End& end) {
    const Slot& slot = segment_.slot(index);
    Input input;
    std::memcpy(&input, &slot.input, sizeof input);
    const char* fault = fault_of(input, segment_.arena_bytes());
    if (!fault && in_use(input.extent)) fault = "an extent that is in use";
    if (!fault) fault = adopt_output(index, input, held);
    const Sections sections{segment_.arena(), input};
    if (!fault) fault = sections.fault_of_sampling();
    if (fault) {
      end = corrupt(fault);
      return false;
    }
    found.id = held.id;
    sections.read(found);
    if (sections.sampling().set & kEmbed) {
      held.repeated = held.published;  // computed again from the start: equal words
    } else {
      for (uint32_t i = 0; i < held.published; ++i) found.published.push_back(held.output.token(i));
    }
    found.crashes = slot.deaths.crashes;
    found.memory_kills = slot.deaths.memory_kills;
    return true;
  }

  static End corrupt(const char* fault) {
    End end;
    end.http_status = 500;
    end.code = "ring_corrupt";
    end.message = std::string("The request's slot is corrupt: ") + fault + ".";
    return end;
  }

  // Whether a sequence that is open has a part of it.
  bool in_use(Extent extent) const {
    const auto after = taken_.lower_bound(extent.offset);
    const auto meets = [&](const auto& other) {
      return overlap(extent, {other.first, other.second});
    };
    return (after != taken_.end() && meets(*after)) ||
           (after != taken_.begin() && meets(*std::prev(after)));
  }

  const char* adopt_output(uint32_t index, const Input& input, Held& held) {
    const Extent output = input.sections[static_cast<int>(Section::Output)];
    const Extent prompt = input.sections[static_cast<int>(Section::PromptOutput)];
    const Word published = Word::of(load(segment_.given(index).published));
    const Word prompt_published = Word::of(load(segment_.slot(index).prompt_published));
    held.output.piece[0] = segment_.arena() + output.offset;
    held.output.stride = input.output_stride;
    held.output.first = static_cast<uint32_t>(output.bytes / input.output_stride);
    held.output.most = input.max_records;
    use(held, input.extent);
    follow(index, load(segment_.asked(index)));
    if (held.stuck) return "a piece of its output";
    held.prompt = {segment_.arena() + prompt.offset, input.prompt_stride, 0};
    if (prompt.bytes) {
      held.prompt.capacity = static_cast<uint32_t>(
          std::min<uint64_t>(prompt.bytes / input.prompt_stride, kMaxRecords));
    }
    if (!(published.tag == held.tag) || published.value > held.output.capacity()) {
      return "its count of tokens";
    }
    if (!(prompt_published.tag == held.tag) || prompt_published.value > held.prompt.capacity) {
      return "its count of prompt tokens";
    }
    held.published = published.value;
    held.prompt_published = held.prompt_recovered = prompt_published.value;
    held.recovered = held.published;
    return nullptr;
  }

  bool complete(uint32_t index, const End& end, uint32_t records) {
    Held& held = held_[index];
    Slot& slot = segment_.slot(index);
    Final final{};
    final.records = records;
    final.with_token = end.with_token;
    final.http_status = end.http_status;
    final.retry_after_s = end.retry_after_s;
    final.scheduled_ns = end.scheduled_ns;
    final.prefilled_ns = end.prefilled_ns;
    put_text(final.code, end.code);
    put_text(final.param, end.param);
    put_text(final.message, end.message);
    held.live = false;
    --in_flight_;
    for (const Extent extent : held.extents) taken_.erase(extent.offset);
    if (!may_write(index)) return false;
    slot.final = final;
    store(slot.cached_tokens, end.cached_tokens);
    touched_ = true;
    const Outcome outcome =
        move_as_engine(segment_.given(index), held.tag, State::DecodeCompleted, end.reason);
    const uint32_t client = client_epoch();
    if (gone(client)) {
      reclaim(segment_.words(index), epoch_, segment_.header().client_epoch, client);
    }
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
  std::vector<Held> held_;       // by slot
  std::vector<uint64_t> asked_;  // by slot, as it was looked at
  std::map<uint64_t, uint64_t> taken_;  // offset -> bytes of the extents of open sequences
  std::atomic<uint32_t> dead_client_{0};
  uint64_t in_flight_ = 0, refused_ = 0;
  uint32_t heard_[1] = {}, woken_[kBells] = {};
  uint16_t epoch_ = 0;
  uint8_t number_;
  bool touched_ = false, emptied_ = false;
};

}  // namespace weft::ring
