// The request plane's side of a ring: it alone allocates slots and arena. It works on its own mapping
// of the ring, and says to a Memory (memory.hpp) what it has written there and what it will read.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <queue>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.hpp"
#include "memory.hpp"
#include "steps.hpp"
#include "submission.hpp"

namespace weft::ring {

template <Memory M = Mapped>
class RequestSide {
 public:
  // Whose process the engine watches is not for `memory` to say: who is attached where the engine
  // is writes `client_pid` and `client_epoch` there.
  explicit RequestSide(std::shared_ptr<Segment> segment, M memory = M())
      : shared_(std::move(segment)),
        segment_(*shared_),
        memory_(std::move(memory)), arena_(segment_.arena_bytes()) {
    live_.resize(segment_.slots());
    known_.resize(segment_.slots());
    Header& header = segment_.header();
    memory_.read(&header, segment_.arena() - reinterpret_cast<std::byte*>(&header));
    store(header.client_pid, static_cast<uint32_t>(getpid()));
    store(header.client_epoch, (load(header.client_epoch) | 1) + 2);
    for (uint32_t i = 0; i < segment_.slots(); ++i) inherit(i);
    hear(header.to_client, heard_);
    --heard_[0];
  }

  // From now on the engine may reclaim every slot. Nothing else may be called afterwards.
  void detach() {
    uint32_t& epoch = segment_.header().client_epoch;
    store(epoch, (load(epoch) | 1) + 1);
  }

  Segment& segment() { return segment_; }
  M& memory() { return memory_; }
  uint64_t free_slots() const { return free_.size(); }
  uint64_t free_bytes() const { return arena_.free_bytes(); }
  // Of the memory that may be in use when a request is taken.
  uint64_t free_memory() const {
    return used_ < segment_.memory_bytes() ? segment_.memory_bytes() - used_ : 0;
  }
  uint64_t in_flight() const { return by_request_.size(); }
  // Engines killed because memory ran out.
  uint32_t memory_kills() const { return load(segment_.header().memory_kills); }
  // Whether the last engine has no successor yet, for want of memory.
  bool out_of_memory() const {
    const Header& header = segment_.header();
    return load(header.short_epoch) == load(header.epoch) + 1;
  }
  // Whether that engine, or one that was to succeed it, was killed because memory ran out.
  bool killed_for_memory() const {
    const Header& header = segment_.header();
    return load(header.kill_epoch) == load(header.epoch) + 1;
  }

  // Fill a slot; the engine sees it only after submit(). The slot's number, or why not.
  Refusal prepare(const Submission& request, uint32_t& index) {
    Live fresh;
    Input& input = fresh.input;
    const uint64_t bytes = lay_out(request, fresh);
    const uint64_t later = uint64_t{fresh.output.most - fresh.output.first} * input.output_stride;
    if (bytes + later > segment_.arena_bytes()) return Refusal::TooLarge;
    fresh.fixed = bytes - uint64_t{fresh.output.first} * input.output_stride;
    if (fresh.uses() > segment_.memory_bytes()) return Refusal::TooLarge;
    if (request.output.size() > request.max_records) return Refusal::TooLarge;
    if (free_.empty()) return Refusal::NoSlot;
    if (fresh.uses() > free_memory()) return Refusal::NoRoom;
    const auto extent = arena_.allocate(bytes);
    if (!extent) return Refusal::NoRoom;
    if (!begin(index, fresh)) {
      arena_.release(*extent);
      return Refusal::NoSlot;
    }
    input.extent = *extent;
    fresh.extents = {*extent};
    for (Extent& section : input.sections) section.offset += extent->offset;
    write(request, input);
    input.request_id = fresh.request_id = request.request_id;
    input.arrival = arrivals_++;
    fresh.used = true;
    fresh.output.piece[0] = at(input, Section::Output);
    fresh.prompt.at = at(input, Section::PromptOutput);
    fresh.give_out(request.output);
    used_ += fresh.uses();
    live_[index] = std::move(fresh);
    lend_output(live_[index]);
    send_payload(index);
    top_ = std::max(top_, index + 1);
    return Refusal::None;
  }

  void submit(std::span<const uint32_t> indices) {
    for (const uint32_t index : indices) {
      Live& live = live_[index];
      by_request_[live.request_id] = index;
      weft::ring::submit(segment_.words(index), live.tag);
      send_word(index);
    }
  }

  // Give prepared slots back unsubmitted.
  void abandon(std::span<const uint32_t> indices) {
    for (const uint32_t index : indices) {
      let_go(index, weft::ring::abandon(segment_.words(index), live_[index].tag));
      send_word(index);
    }
  }

  bool cancel(uint64_t request_id, Reason reason) {
    const auto found = by_request_.find(request_id);
    if (found == by_request_.end()) return false;
    const Live& live = live_[found->second];
    const Outcome outcome =
        weft::ring::cancel(segment_.asked(found->second), live.tag, reason);
    send_word(found->second);
    return outcome == Outcome::Done;
  }

  // Nobody waits for these any more: cancel them and forget them when the engine has answered.
  void disown(uint64_t request_id, Reason reason) {
    cancel(request_id, reason);
    const auto found = by_request_.find(request_id);
    if (found == by_request_.end()) return;
    live_[found->second].orphan = true;
    by_request_.erase(found);
  }

  // Everything that the engine has published since the last call; ended slots become free.
  std::vector<News> poll() {
    std::vector<News> all;
    const auto& bell = segment_.header().to_client;
    memory_.read(&bell, sizeof bell);
    if (!hear(bell, heard_)) return all;
    if (top_ > 0) memory_.read(&segment_.given(0), top_ * sizeof(Given));
    for (uint32_t i = 0; i < top_; ++i) {
      const Given& given = segment_.given(i);
      const Given seen{load(given.state), load(given.published)};
      Known& known = known_[i];
      if (seen == known.given && !known.prompt) continue;
      known.given = seen;
      if (!live_[i].used) continue;
      News news{};
      bool said = read(i, seen, news) && !live_[i].orphan;
      const bool ended = news.end != Reason::None;
      if (!ended && !live_[i].orphan && !grow(i)) said = give_up(i, news);
      if (said) all.push_back(std::move(news));
      if (ended) end(i);
    }
    while (top_ > 0 && !live_[top_ - 1].used) --top_;
    return all;
  }

  // Whether there is something that the engine has not been told.
  bool has_grown() const { return grown_; }

  // Whether the engine must be woken by the system.
  bool ring() {
    grown_ = false;
    auto& bell = segment_.header().to_engine;
    const bool asleep = ring_bell(bell, 0, woken_);
    memory_.flush();  // the words that it announces are there before it
    memory_.write(&bell.rung[0].value, sizeof(uint32_t));
    return asleep;
  }

  // Write all again that the engine may not have yet: a link was lost, and what was under way on it.
  // The engine's memory has the same bytes otherwise, or older ones. First it hears which slots are
  // free: their extents may be others' by now. Of what is inherited there are only the words here.
  void resend() {
    for (uint32_t i = 0; i < top_; ++i) {
      if (!live_[i].used) memory_.write(&segment_.asked(i), sizeof(uint64_t));
    }
    memory_.write(&segment_.asked(0) + top_, (segment_.slots() - top_) * sizeof(uint64_t));
    memory_.flush();
    for (uint32_t i = 0; i < top_; ++i) {
      if (live_[i].used && !live_[i].inherited) send_payload(i);
    }
    memory_.flush();
    memory_.write(&segment_.asked(0), top_ * sizeof(uint64_t));
    ring();
  }

  const LogPages& log() { return fresh(segment_.log()); }
  const InfoPage& info() { return fresh(segment_.info()); }

  bool sleep() { return go_to_sleep(segment_.header().to_client, heard_); }
  void wake() { wake_up(segment_.header().to_client); }

 private:
  const auto& fresh(const auto& part) {
    memory_.read(&part, sizeof part);
    return part;
  }

  struct Known {
    Given given{};        // as it was read last
    bool prompt = false;  // prompt records may come without a change of these words
  };

  // The word of a slot; all that it announces is there before it, and so are earlier words.
  void send_word(uint32_t index) {
    memory_.flush();
    memory_.write(&segment_.asked(index), sizeof(uint64_t));
  }

  // What this side has written of a slot and its extents: all before the output, and what of that
  // was given out before. By this side's own copy of the input, which nobody else can change.
  void send_payload(uint32_t index) {
    const Live& live = live_[index];
    Slot& slot = segment_.slot(index);
    slot.input = live.input;
    const uint64_t pieces = live.extents.size() - 1;
    for (uint64_t i = 0; i < pieces; ++i) slot.more[i] = live.extents[i + 1].offset;
    const std::byte* begin = segment_.arena() + live.input.extent.offset;
    memory_.write(begin, live.given_out_end() - begin);
    memory_.write(&slot.input, offsetof(Slot, more) + pieces * sizeof(uint64_t));
  }

  // The engine writes the records that are to come, and nothing else of the arena.
  void lend_output(const Live& live) {
    const uint64_t records = live.output.first - live.input.given_out;
    memory_.lend(live.given_out_end(), records * live.output.stride);
    memory_.lend(live.prompt.at, uint64_t{live.prompt.capacity} * live.prompt.stride);
  }

  std::byte* at(const Input& input, Section section) const {
    return segment_.arena() + input.sections[static_cast<int>(section)].offset;
  }

  void write(const Submission& request, const Input& input) const {
    const auto copy = [&](Section section, const void* from) {
      const uint64_t bytes = input.sections[static_cast<int>(section)].bytes;
      if (bytes) std::memcpy(at(input, section), from, bytes);
    };
    copy(Section::Prompt, request.prompt.data());
    copy(Section::Sampling, request.sampling.data());
    copy(Section::LogitBias, request.logit_bias.data());
    copy(Section::StopIds, request.stop_ids.data());
    copy(Section::EosIds, request.eos_ids.data());
    copy(Section::ServiceClass, request.service_class.data());
    copy(Section::CacheSalt, request.cache_salt.data());
    copy(Section::Grammar, request.grammar.data());
    copy(Section::TokenLists, request.token_lists.data());
    copy(Section::Images, request.images.data());
  }

  // Take the first slot that is free. One that turns out not to be ours is never used again.
  bool begin(uint32_t& index, Live& live) {
    while (!free_.empty()) {
      index = free_.top();
      free_.pop();
      const Words words = segment_.words(index);
      live.before = load(words.given.state);
      if (begin_writing(words, live.tag) != Outcome::Done) continue;
      send_word(index);
      const auto epoch = static_cast<uint16_t>(load(segment_.header().epoch));
      if (!can_be_taken(words, segment_.slot(index), {epoch, live.tag.generation})) continue;
      known_[index] = {{live.before, load(words.given.published)}, live.prompt.capacity != 0};
      return true;
    }
    return false;
  }

  // At attach: take over what an earlier request plane has left in the slot.
  void inherit(uint32_t index) {
    const Words words = segment_.words(index);
    Seen seen = look(words);
    Live& live = live_[index];
    live.tag = {0, Word::of(seen.asked).tag.generation};
    if (!seen.valid()) return;
    if (seen.state() == State::Writing || seen.state() == State::DecodeCompleted) {
      release(words, live.tag);
      send_word(index);
      seen = look(words);
    }
    if (seen.state() == State::Empty) return free_.push(index);
    // The engine works on it for nobody: cancelled, and forgotten when it has ended. Its extent
    // stays reserved until then; one that cannot be right is quarantined with its slot.
    weft::ring::cancel(words.asked, live.tag, Reason::Cancelled);
    send_word(index);
    live.used = reserve(index, live, Word::of(seen.asked).pieces());
    live.orphan = live.inherited = true;
    top_ = index + 1;
  }

  // What an earlier request plane has taken of the arena for a slot.
  bool reserve(uint32_t index, Live& live, uint32_t pieces) {
    const Input input = segment_.slot(index).input;
    if (fault_of(input, segment_.arena_bytes())) return false;
    const uint64_t bytes = input.sections[static_cast<int>(Section::Output)].bytes;
    const auto first = static_cast<uint32_t>(bytes / input.output_stride);
    live.extents.push_back(input.extent);
    for (uint32_t i = 0; i < pieces; ++i) {
      const uint64_t more = records_of_next(first, input.max_records, i);
      const uint64_t offset = segment_.slot(index).more[i];
      live.extents.push_back({offset, round_up(more * input.output_stride, kAlign)});
    }
    return std::all_of(live.extents.begin(), live.extents.end(),
                       [&](Extent extent) { return arena_.reserve(extent); });
  }

  // Keep the output ahead of the engine, so that it has room for as many tokens as there are. False
  // if it can get no further.
  bool grow(uint32_t index) {
    Live& live = live_[index];
    Output& output = live.output;
    while (output.capacity() < output.most && live.seen >= output.capacity() / 2) {
      const auto extent = arena_.allocate(output.bytes_of_next());
      if (!extent) return live.seen < output.capacity();
      uint64_t& more = segment_.slot(index).more[output.pieces];
      more = extent->offset;
      memory_.write(&more, sizeof more);
      std::byte* const piece = segment_.arena() + extent->offset;
      memory_.lend(piece, output.bytes_of_next());
      output.piece[++output.pieces] = piece;
      live.extents.push_back(*extent);
      weft::ring::grow(segment_.asked(index), live.tag);
      send_word(index);
      grown_ = true;
    }
    return true;
  }

  // There is no room for the rest of an output: the request fails, and the engine is told.
  bool give_up(uint32_t index, News& news) {
    Live& live = live_[index];
    fail(news, 503, "out_of_memory",
         "The memory shared with the engine has no room for the rest of the output; raise "
         "ring_memory.");
    by_request_.erase(live.request_id);
    weft::ring::cancel(segment_.asked(index), live.tag, Reason::Error);
    send_word(index);
    live.orphan = grown_ = true;
    return true;
  }

  static void fail(News& news, uint32_t http_status, const char* code, const char* message) {
    news.end = Reason::Error;
    news.final = Final{};
    news.final.http_status = http_status;
    std::strcpy(news.final.code, code);
    std::strcpy(news.final.message, message);
  }

  bool read(uint32_t index, const Given& seen, News& news) {
    Live& live = live_[index];
    const Slot& slot = segment_.slot(index);
    news.request_id = live.request_id;
    const Word word = Word::of(seen.state);
    const bool taken = word.tag.generation == live.tag.generation;
    const bool ended = taken && word.valid_state() && word.state() == State::DecodeCompleted;
    if (live.orphan) {
      // The engine has emptied an orphan for a request plane that it believed dead.
      const bool emptied = taken && word.valid_state() && word.state() == State::Empty;
      if (ended || emptied) news.end = Reason::Cancelled;
      return ended || emptied;
    }
    if (seen.state == live.before) return false;
    if (word.valid_state() && word.state() == State::Empty &&
        next_generation(word.tag.generation) == live.tag.generation) {
      live.before = seen.state;  // an engine has freed the slot of the dead request plane, but late
      return false;
    }
    if (!taken || !word.valid_state() || owner(word.state()) == Side::Request) {
      if (!ended) return broken(live, news);
    }
    if (!read_prompt(slot, live, news)) return broken(live, news);
    const uint64_t before = live.uses();
    const bool sound = read_output(slot, seen, live, ended, news);
    used_ += live.uses() - before;
    if (!sound) return broken(live, news);
    memory_.read(&slot.cached_tokens, sizeof slot.cached_tokens);
    news.cached_tokens = load(slot.cached_tokens);
    if (ended) {
      news.end = word.reason();
      news.final = slot.final;
    }
    return ended || !news.tokens.empty() || !news.prompt.empty();
  }

  bool read_prompt(const Slot& slot, Live& live, News& news) {
    if (live.prompt.capacity == 0) return true;
    memory_.read(&slot.prompt_published, sizeof slot.prompt_published);
    const Word word = Word::of(load(slot.prompt_published));
    if (word.tag.generation != live.tag.generation) return live.prompt_seen == 0;  // to come
    if (word.value > live.prompt.capacity || word.value < live.prompt_seen) return false;
    news.prompt_start = live.prompt_seen;
    live.prompt.stretch(live.prompt_seen, word.value, reading());
    for (; live.prompt_seen < word.value; ++live.prompt_seen) {
      Scored scored = live.prompt.get(live.prompt_seen);
      if (scored.head.num_top == kNoLogprob && news.prompt.empty()) {
        news.prompt_start = live.prompt_seen + 1;  // the first token has none
        continue;
      }
      news.prompt.push_back(std::move(scored));
    }
    return true;
  }

  bool read_output(const Slot& slot, const Given& seen, Live& live, bool ended, News& news) {
    if (ended) memory_.read(&slot.final, sizeof slot.final);
    const Word word = Word::of(seen.published);
    const bool counted = word.tag.generation == live.tag.generation;
    const uint32_t upto = ended ? slot.final.records : counted ? word.value : live.seen;
    if (upto > live.output.capacity() || upto < live.seen) return false;
    live.output.stretches(live.seen, upto, reading());
    for (; live.seen < upto; ++live.seen) {
      news.tokens.push_back(live.output.token(live.seen));
      if (live.output.stride != kPlainStride) news.scored.push_back(live.output.get(live.seen));
    }
    return true;
  }

  auto reading() {
    return [this](const std::byte* at, uint64_t bytes) { memory_.read(at, bytes); };
  }

  // The other side broke the contract: the request fails and the slot is never used again.
  static bool broken(Live& live, News& news) {
    live.broken = true;
    fail(news, 500, "ring_corrupt", "The memory shared with the engine is corrupt.");
    return true;
  }

  void end(uint32_t index) {
    Live& live = live_[index];
    if (!live.orphan) by_request_.erase(live.request_id);
    if (live.broken) {
      live.used = false;
      return;
    }
    const Words words = segment_.words(index);
    const Outcome outcome = release(words, live.tag);
    send_word(index);
    const bool emptied = live.orphan && look(words).reclaimed();
    let_go(index, emptied ? Outcome::Done : outcome);
  }

  void let_go(uint32_t index, Outcome outcome) {
    Live& live = live_[index];
    live.used = false;
    if (outcome != Outcome::Done) return;
    used_ -= live.uses();
    for (uint32_t i = 0; i < live.extents.size(); ++i) {
      memory_.recall(segment_.arena() + live.extents[i].offset, live.extents[i].bytes);
      give_back(live.extents[i], live.written(i));
    }
    free_.push(index);
  }

  // Free an extent of which so many bytes were written. Pages that nobody uses go back to the
  // system, when there may be enough of them to be worth it; but for those that lie within the
  // first `memory_bytes`, which are used again soonest.
  void give_back(Extent extent, uint64_t written) {
    arena_.release(extent);
    const uint64_t kept = segment_.memory_bytes();
    if (extent.offset + extent.bytes <= kept) return;
    stale_ += round_up(written, kPage) + 2 * kPage;
    if (stale_ < kept / 4) return;
    stale_ = 0;
    for (const auto& [offset, bytes] : arena_.gaps()) {
      const uint64_t first = std::max(round_up(offset, kPage), kept);
      const uint64_t last = (offset + bytes) / kPage * kPage;
      if (first < last) segment_.give_back(first, last - first);
      if (first < last) memory_.discard(segment_.arena() + first, last - first);
    }
    memory_.flush();  // before it is written again
  }

  std::shared_ptr<Segment> shared_;
  Segment& segment_;
  [[no_unique_address]] M memory_;
  Arena arena_;
  std::vector<Live> live_;    // by slot
  std::vector<Known> known_;  // by slot
  uint32_t top_ = 0;          // beyond the last slot in use
  // The first free slot is taken, so that those in use lie together.
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> free_;
  std::unordered_map<uint64_t, uint32_t> by_request_;
  uint64_t arrivals_ = 0;
  bool grown_ = false;  // an output, and the engine was not told
  uint64_t used_ = 0;   // the memory of all requests
  uint64_t stale_ = 0;  // at most so much lies in pages that nobody uses and that are not kept
  uint32_t woken_ = 0, heard_[kBells] = {};
};

}  // namespace weft::ring
