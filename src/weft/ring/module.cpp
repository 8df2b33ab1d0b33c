// Python binding of the ring. Bulk calls only: one receive, publish or poll serves every slot.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "clients.hpp"
#include "engine_side.hpp"
#include "keeper_side.hpp"
#include "python_values.hpp"
#include "resident/outlet.hpp"
#include "wake.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace weft::ring;

// -- the keeper of both ----------------------------------------------------------------------------

// The info page of a ring, read without being one of its two sides, and the keeper's side.
class Page : public KeeperSide {
 public:
  explicit Page(int fd) : KeeperSide(std::make_shared<Segment>(fd)) {}
  Page(const Page&) = delete;

  nb::dict info() { return info_of(segment().info()); }
  // Of each slot; None for words that do not fit each other.
  nb::list states() {
    nb::list all;
    for (uint32_t i = 0; i < segment().slots(); ++i) {
      const Seen seen = look(segment().words(i));
      all.append(seen.valid() ? nb::object(nb::int_(static_cast<int>(seen.state()))) : nb::none());
    }
    return all;
  }
};

// -- the engine -----------------------------------------------------------------------------------

class Engine {
 public:
  Engine(const Engine&) = delete;
  Engine(const std::vector<std::pair<int, int>>& rings, uint64_t sampling) {
    if (rings.empty() || rings.size() > 100) throw nb::value_error("an engine has 1 to 100 rings");
    for (const auto& [memory, wake] : rings) {
      sides_.emplace_back(std::make_shared<Segment>(memory, sampling),
                          static_cast<uint8_t>(sides_.size()));
      wake_fds_.push_back(wake);
    }
  }

  nb::tuple receive() {
    looked_ = load(poke_);
    lost_ = false;
    nb::list claims, cancels;
    for (EngineSide& side : sides_) {
      const Received received = side.receive();
      for (const Claim& claim : received.claims) claims.append(python_of_claim(claim));
      for (const auto& [id, reason] : received.cancels) {
        cancels.append(nb::make_tuple(id, static_cast<int>(reason)));
      }
    }
    flush(static_cast<int>(Bell::Control));  // some may have been refused
    return nb::make_tuple(claims, cancels);
  }

  // Whether every token could still be published: no other engine has taken over.
  bool publish(nb::list tokens) {
    bool held = true;
    for (const nb::handle pair : tokens) {
      const auto item = nb::cast<nb::tuple>(pair);
      const auto id = nb::cast<uint64_t>(item[0]);
      held &= side(id).publish(id, nb::cast<uint32_t>(item[1]));
    }
    return held;
  }
  bool publish_scored(uint64_t id, nb::tuple scored, uint32_t cached_tokens) {
    return side(id).publish(id, scored_of(scored), cached_tokens);
  }
  bool publish_prompt(uint64_t id, uint32_t start, nb::list entries) {
    std::vector<Scored> scored;
    for (const nb::handle entry : entries) scored.push_back(scored_of(entry));
    return side(id).publish_prompt(id, start, scored);
  }
  // `last` is None, a token, or a scored one.
  bool finish(uint64_t id, int reason, nb::object last, uint32_t cached_tokens, uint32_t status,
              const std::string& code, const std::string& param, const std::string& message,
              uint32_t retry_after_s, uint64_t scheduled_ns, uint64_t prefilled_ns) {
    Scored token;
    if (nb::isinstance<nb::tuple>(last)) {
      token = scored_of(last);
    } else if (!last.is_none()) {
      token.head.token = nb::cast<uint32_t>(last);
    }
    const End end{static_cast<Reason>(reason), false, cached_tokens, status, retry_after_s,
                  scheduled_ns, prefilled_ns, code, param, message};
    return side(id).finish(id, end, last.is_none() ? nullptr : &token);
  }

  // Where a resident loop publishes, and what it asks, as long as this engine lives. Only one of both
  // may use the engine at a time: the loop, from when it has this until its lease ends, or the host.
  nb::capsule outlet() { return nb::capsule(&outlet_, weft::resident::kOutlet); }

  // Tell those who have news; wakes only who sleeps.
  void flush(int bell) {
    if (bell < 0 || bell >= kBells) throw nb::index_error();
    for (size_t i = 0; i < sides_.size(); ++i) {
      if (sides_[i].ring(static_cast<Bell>(bell))) signal_eventfd(wake_fds_[i]);
    }
  }

  // Sleep until there may be something to receive, after looking for `spin_ns` without sleeping.
  void wait(int64_t spin_ns, int64_t timeout_ns) {
    const nb::gil_scoped_release released;
    const auto ready = [&] {
      if (load(poke_) != poked_) return true;
      return std::any_of(sides_.begin(), sides_.end(), [](auto& side) { return side.news(); });
    };
    if (!spin(ready, spin_ns)) sleep(timeout_ns);
    poked_ = load(poke_);
  }

  void poke() {
    atomic_ref<uint32_t>(poke_).fetch_add(1);
    futex_wake(&poke_);
  }
  void client_died(size_t ring, uint32_t epoch) {
    sides_.at(ring).client_died(epoch);
    poke();
  }
  nb::list clients() {
    nb::list all;
    for (EngineSide& side : sides_) {
      const uint32_t epoch = side.client_epoch();
      all.append(nb::make_tuple(epoch, side.client_pid()));
    }
    return all;
  }

  // What it would mean for these sequences if the engine died now: a Blame.
  void set_blame(const std::vector<uint64_t>& ids, int blame) {
    for (const uint64_t id : ids) side(id).set_blame(id, static_cast<Blame>(blame));
  }
  bool cleared(uint64_t id) { return side(id).cleared(id); }
  std::vector<uint64_t> open_ids() {
    std::vector<uint64_t> ids;
    for (EngineSide& side : sides_) {
      for (const uint64_t id : side.open_ids()) ids.push_back(id);
    }
    return ids;
  }
  void write_info(const std::vector<uint64_t>& given) {
    if (given.size() != kInfoFields) throw nb::value_error("a field of the info page is missing");
    uint64_t values[kInfoFields];
    std::copy(given.begin(), given.end(), values);
    for (EngineSide& side : sides_) weft::ring::write_info(side.segment().info(), values);
  }
  // The fields of a step in the log, but for the first.
  void log_step(const std::vector<uint64_t>& given) {
    if (given.size() != kStepFields - 1) throw nb::value_error("a field of the step is missing");
    uint64_t values[kStepFields];
    std::copy(given.begin(), given.end(), values + 1);
    for (EngineSide& side : sides_) {
      values[0] = load(side.segment().header().epoch);
      append(side.segment().log().steps, values);
    }
  }
  uint64_t refused() {
    uint64_t sum = 0;
    for (EngineSide& side : sides_) sum += side.refused();
    return sum;
  }
  uint32_t epoch() { return sides_[0].epoch(); }
  // A successor has all rings; the word of a single one may be corrupt.
  bool superseded() {
    return std::all_of(sides_.begin(), sides_.end(),
                       [](const EngineSide& side) { return side.superseded(); });
  }

 private:
  EngineSide& side(uint64_t id) {
    const size_t number = id >> 16 & 0xff;
    if (number >= sides_.size()) throw nb::value_error("the sequence is not open");
    return sides_[number];
  }

  static nb::tuple python_of_claim(const Claim& claim) {
    nb::list prompt, published;
    for (const uint32_t token : claim.prompt) prompt.append(token);
    for (const uint32_t token : claim.published) published.append(token);
    std::vector<std::pair<uint32_t, double>> bias;
    for (const BiasRecord& record : claim.logit_bias) bias.emplace_back(record.token, record.value);
    const auto bytes = [](const std::string& text) { return nb::bytes(text.data(), text.size()); };
    return nb::make_tuple(claim.id, nb::tuple(prompt), bytes(claim.sampling), bias, claim.stop_ids,
                          claim.eos_ids, bytes(claim.service_class), bytes(claim.cache_salt),
                          nb::tuple(published), claim.crashes, claim.memory_kills,
                          bytes(claim.grammar), claim.token_lists, bytes(claim.images));
  }

  // Whether something has come since the last look.
  bool asked() {
    return lost_ || load(poke_) != looked_ ||
           std::any_of(sides_.begin(), sides_.end(), [](auto& side) { return side.news(); });
  }

  // What a slot can no longer take is lost with that slot alone. But it ends the lease: the host is
  // the next one to publish, and says what is to be said.
  void publish_of_loop(const uint64_t* ids, const int64_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      try {
        lost_ |= !side(ids[i]).publish(ids[i], tokens[i]);
      } catch (const SegmentError&) {
        lost_ = true;
      }
    }
    flush(static_cast<int>(Bell::Output));
  }

  void sleep(int64_t timeout_ns) {
    std::vector<Waited> words{{&poke_, poked_}};
    bool quiet = true;
    for (EngineSide& side : sides_) {
      words.push_back({side.bell(), side.heard()});
      quiet &= side.sleep();
    }
    // A fallback without futex_waitv looks at the first word only; with one ring let it be the bell.
    std::swap(words.front(), words.back());
    if (quiet) futex_wait_any(words, timeout_ns);
    for (EngineSide& side : sides_) side.wake();
  }

  std::deque<EngineSide> sides_;
  std::vector<int> wake_fds_;
  uint32_t poke_ = 0, poked_ = 0;
  uint32_t looked_ = 0;  // `poke_` when the host received last
  bool lost_ = false;    // whether a token of the resident loop was, since then
  const weft::resident::Outlet outlet_{
      this, [](void* self) { return static_cast<Engine*>(self)->asked(); },
      [](void* self, const uint64_t* ids, const int64_t* tokens, int64_t count) {
        static_cast<Engine*>(self)->publish_of_loop(ids, tokens, count);
      }};
};

// Numbers that Python shares with the header.
void bind_layout(nb::module_& m) {
  nb::dict sizes;
  sizes["magic"] = kMagic;
  sizes["version"] = kVersion;
  sizes["page_bytes"] = kPage;
  sizes["header_bytes"] = sizeof(Header);
  sizes["slot_bytes"] = sizeof(Slot);
  sizes["input_bytes"] = sizeof(Input);
  sizes["extents_offset"] = offsetof(Input, extent);  // and those of the sections behind it
  sizes["extents"] = 1 + kSections;
  sizes["more_offset"] = offsetof(Slot, more);
  sizes["prompt_published_offset"] = offsetof(Slot, prompt_published);
  sizes["version_offset"] = offsetof(Header, version);
  sizes["slots_offset"] = offsetof(Header, slots);
  sizes["epoch_offset"] = offsetof(Header, epoch);
  sizes["client_epoch_offset"] = offsetof(Header, client_epoch);
  sizes["to_engine_offset"] = offsetof(Header, to_engine);
  sizes["to_client_asleep_offset"] = offsetof(Header, to_client.asleep);
  sizes["max_slots"] = kMaxSlots;
  sizes["max_records"] = kMaxRecords;
  sizes["max_top"] = kMaxTop;
  sizes["sampling_head"] = sizeof(SamplingHead);
  sizes["suspected"] = kSuspected;
  sizes["log_classes"] = kLogClasses;
  sizes["logged_steps"] = kLoggedSteps;
  sizes["logged_recoveries"] = kLoggedRecoveries;
  m.attr("SIZES") = sizes;
  m.attr("STATES") = nb::make_tuple("EMPTY", "WRITING", "PREFILL_PENDING", "PREFILL_PROCESSING",
                                    "DECODE_PROCESSING", "DECODE_PAUSED", "DECODE_COMPLETED");
  m.attr("SIDES") = nb::make_tuple("REQUEST", "ENGINE", "RECOVERY");
  m.attr("REASONS") = nb::make_tuple("NONE", "STOP", "LENGTH", "CANCELLED", "ERROR", "PREEMPTED");
  m.attr("BELLS") = nb::make_tuple("CONTROL", "OUTPUT");
  m.attr("REFUSALS") = nb::make_tuple("NONE", "NO_SLOT", "NO_ROOM", "TOO_LARGE");
  nb::dict set;
  set["logprobs"] = uint32_t{kLogprobs};
  set["prompt_logprobs"] = uint32_t{kPromptLogprobs};
  set["embed"] = uint32_t{kEmbed};
  m.attr("SET") = set;
  nb::list fields, of_step, of_recovery;
#define WEFT_RING_FIELD(name) fields.append(#name);
  WEFT_RING_INFO(WEFT_RING_FIELD)
#undef WEFT_RING_FIELD
#define WEFT_RING_FIELD(name) of_step.append(#name);
  WEFT_RING_STEP(WEFT_RING_FIELD)
#undef WEFT_RING_FIELD
#define WEFT_RING_FIELD(name) of_recovery.append(#name);
  WEFT_RING_RECOVERY(WEFT_RING_FIELD)
#undef WEFT_RING_FIELD
  m.attr("INFO_FIELDS") = nb::tuple(fields);
  m.attr("STEP_FIELDS") = nb::tuple(of_step);
  m.attr("RECOVERY_FIELDS") = nb::tuple(of_recovery);
  m.def("may_move", [](int from, int to, int by) {
    return may_move(static_cast<State>(from), static_cast<State>(to), static_cast<Side>(by));
  }, "before"_a, "after"_a, "by"_a);
  m.def("offsets", [](uint32_t slots) {
    const Header header = Segment::plan(slots, kPage, 0, kPage);
    nb::dict offsets;
    offsets["log"] = header.log_offset;
    offsets["asked"] = header.asked_offset;
    offsets["given"] = header.given_offset;
    offsets["slots"] = header.slots_offset;
    offsets["arena"] = header.arena_offset;
    return offsets;
  }, "slots"_a);
  m.def("owner", [](int state) { return static_cast<int>(owner(static_cast<State>(state))); },
        "state"_a);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a process that ends by a signal has no time to tidy up
  bind_layout(m);
  m.def("create", &Segment::create, "slots"_a, "arena_bytes"_a, "sampling"_a,
        "memory_bytes"_a = 0);

  bind_clients(m);
  nb::class_<Page>(m, "Page")
      .def(nb::init<int>(), "memory"_a)
      .def("info", &Page::info)
      .def("states", &Page::states)
      .def("not_ready", &Page::not_ready)
      .def("killed_from_outside", &Page::killed_from_outside)
      .def("short_of_memory", &Page::short_of_memory)
      .def("killed_for_memory", &Page::killed_for_memory);

  nb::class_<Engine>(m, "Engine")
      .def(nb::init<const std::vector<std::pair<int, int>>&, uint64_t>(), "rings"_a, "sampling"_a)
      .def("receive", &Engine::receive)
      .def("publish", &Engine::publish, "tokens"_a)
      .def("publish_scored", &Engine::publish_scored, "id"_a, "scored"_a, "cached_tokens"_a)
      .def("publish_prompt", &Engine::publish_prompt, "id"_a, "start"_a, "entries"_a)
      .def("finish", &Engine::finish, "id"_a, "reason"_a, "last"_a.none(), "cached_tokens"_a,
           "status"_a, "code"_a, "param"_a, "message"_a, "retry_after_s"_a = 0,
           "scheduled_ns"_a = 0, "prefilled_ns"_a = 0)
      .def("outlet", &Engine::outlet)
      .def("flush", &Engine::flush, "bell"_a)
      .def("wait", &Engine::wait, "spin_ns"_a, "timeout_ns"_a)
      .def("poke", &Engine::poke)
      .def("client_died", &Engine::client_died, "ring"_a, "epoch"_a)
      .def("clients", &Engine::clients)
      .def("set_blame", &Engine::set_blame, "ids"_a, "blame"_a)
      .def("cleared", &Engine::cleared, "id"_a)
      .def("open_ids", &Engine::open_ids)
      .def("write_info", &Engine::write_info, "values"_a)
      .def("log_step", &Engine::log_step, "values"_a)
      .def_prop_ro("refused", &Engine::refused)
      .def_prop_ro("superseded", &Engine::superseded)
      .def_prop_ro("epoch", &Engine::epoch);
}
