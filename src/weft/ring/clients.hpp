// Python binding of request planes, of the one whose engine is on another machine, and of its agent.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "agent_side.hpp"
#include "changes.hpp"
#include "python_values.hpp"
#include "request_side.hpp"
#include "wake.hpp"

namespace weft::ring {

using namespace nb::literals;

// A request plane whose memory is of kind M.
template <Memory M>
class Client {
 public:
  explicit Client(std::shared_ptr<Segment> segment, M memory = M())
      : side_(std::move(segment), std::move(memory)) {
    ring();
  }
  Client(const Client&) = delete;

  // A slot number; a negative number is a Refusal.
  int64_t prepare(uint64_t id, std::vector<uint32_t> prompt, nb::bytes sampling,
                  const std::vector<std::pair<uint32_t, double>>& logit_bias,
                  std::vector<uint32_t> stop_ids, std::vector<uint32_t> eos_ids,
                  nb::bytes service_class, nb::bytes cache_salt, nb::bytes grammar,
                  std::vector<uint32_t> token_lists, nb::bytes images,
                  std::vector<uint32_t> output, uint32_t max_records) {
    if (sampling.size() < sizeof(SamplingHead)) throw nb::value_error("sampling has no head");
    Submission request;
    request.request_id = id;
    request.prompt = std::move(prompt);
    request.stop_ids = std::move(stop_ids);
    request.eos_ids = std::move(eos_ids);
    request.sampling.assign(sampling.c_str(), sampling.size());
    for (const auto& [token, value] : logit_bias) request.logit_bias.push_back({value, token, 0});
    request.service_class.assign(service_class.c_str(), service_class.size());
    request.cache_salt.assign(cache_salt.c_str(), cache_salt.size());
    request.grammar.assign(grammar.c_str(), grammar.size());
    request.token_lists = std::move(token_lists);
    request.images.assign(images.c_str(), images.size());
    request.output = std::move(output);
    request.max_records = std::min(max_records, kMaxRecords);
    uint32_t index = 0;
    const Refusal refusal = side_.prepare(request, index);
    return refusal == Refusal::None ? int64_t{index} : -static_cast<int64_t>(refusal);
  }

  void submit(const std::vector<uint32_t>& slots) {
    side_.submit(slots);
    ring();
  }
  void abandon(const std::vector<uint32_t>& slots) { side_.abandon(slots); }

  void cancel(uint64_t id, int reason) {
    if (side_.cancel(id, static_cast<Reason>(reason))) ring();
  }
  void disown(const std::vector<uint64_t>& ids) {
    for (const uint64_t id : ids) side_.disown(id, Reason::Cancelled);
    ring();
  }

  nb::list poll() {
    nb::list all;
    for (const News& news : side_.poll()) {
      nb::list tokens;
      for (const uint32_t token : news.tokens) tokens.append(token);
      nb::object scored = nb::none(), prompt = nb::none();
      if (!news.scored.empty()) scored = python_of(news.scored);
      if (!news.prompt.empty()) prompt = nb::make_tuple(news.prompt_start, python_of(news.prompt));
      all.append(nb::make_tuple(news.request_id, tokens, scored, prompt, news.cached_tokens,
                                python_of(news.final, news.end)));
    }
    if (side_.has_grown()) ring();
    return all;
  }

  void ring() {
    if (side_.ring()) futex_wake(&side_.segment().header().to_engine.rung[0].value);
  }
  void detach() {
    side_.detach();
    ring();
  }

  RequestSide<M>& side() { return side_; }

 private:
  RequestSide<M> side_;
};

// Words of one slot, for tests and inspection.
inline nb::dict look(Segment& segment, uint32_t index) {
  if (index >= segment.slots()) throw nb::index_error();
  const Slot& slot = segment.slot(index);
  const Seen words = look(segment.words(index));
  const Word asked = Word::of(words.asked), given = Word::of(words.given);
  const Word published = Word::of(load(segment.given(index).published));
  const bool counted = slot.deaths.generation == asked.tag.generation;
  const Deaths deaths = counted ? slot.deaths : Deaths{};
  nb::dict seen;
  seen["state"] = static_cast<int>(words.state());
  seen["reason"] = words.answered() ? given.value >> 8 & 0xff : 0;
  seen["epoch"] = given.tag.epoch;
  seen["generation"] = asked.tag.generation;
  seen["published"] = published.value;
  seen["cancel"] = asked.value >> 8 & 0xff;
  seen["crashes"] = deaths.crashes;
  seen["memory_kills"] = deaths.memory_kills;
  seen["blame"] = static_cast<uint32_t>(deaths.blame);
  seen["extent_offset"] = slot.input.extent.offset;
  seen["extent_bytes"] = slot.input.extent.bytes;
  return seen;
}


inline std::string_view text_of(nb::bytes bytes) { return {bytes.c_str(), bytes.size()}; }
inline nb::list list_of(const std::vector<std::string>& parts) {
  nb::list all;
  for (const std::string& part : parts) all.append(nb::bytes(part.data(), part.size()));
  return all;
}

// A request plane that works on a copy of a ring elsewhere. It takes in what the agent there sends,
// and hands out what is to be sent there.
class RemoteClient : public Client<LinkMemory> {
 public:
  RemoteClient(int fd, uint64_t sampling, const std::vector<nb::bytes>& snapshot)
      : RemoteClient(filled(fd, sampling, snapshot)) {}

  void apply(nb::bytes changes) { side().memory().apply(text_of(changes)); }
  nb::list take() { return list_of(side().memory().take()); }
  void link_down() { side().memory().set_up(false); }
  void link_up() {
    side().memory().set_up(true);
    side().resend();
  }

 private:
  explicit RemoteClient(const std::shared_ptr<Segment>& segment)
      : Client<LinkMemory>(segment, LinkMemory(*segment)) {}

  static std::shared_ptr<Segment> filled(int fd, uint64_t sampling,
                                         const std::vector<nb::bytes>& snapshot) {
    auto segment = std::make_shared<Segment>(fd, sampling);
    for (const nb::bytes& part : snapshot) fill(*segment, text_of(part));
    return segment;
  }

  // Before there is a request the agent writes all but the sizes, with which the copy was made, and
  // the arena.
  static void fill(const Segment& segment, std::string_view changes) {
    const auto* base = reinterpret_cast<const std::byte*>(&segment.header());
    constexpr uint64_t begin = offsetof(Header, epoch);
    const uint64_t bytes = segment.arena() - base - begin;
    apply_changes(segment, changes, [&](Place place, bool) { return place.within(begin, bytes); });
  }
};

class Agent : public AgentSide {
 public:
  Agent(int fd, uint64_t sampling) : AgentSide(std::make_shared<Segment>(fd, sampling)) {}
  Agent(const Agent&) = delete;
};

template <class C>
void bind_client(nb::class_<C>& bound) {
  bound
      .def("prepare", &C::prepare, "id"_a, "prompt"_a, "sampling"_a, "logit_bias"_a,
           "stop_ids"_a, "eos_ids"_a, "service_class"_a, "cache_salt"_a, "grammar"_a,
           "token_lists"_a, "images"_a, "output"_a, "max_records"_a)
      .def("ring", &C::ring)
      .def("submit", &C::submit, "slots"_a)
      .def("abandon", &C::abandon, "slots"_a)
      .def("cancel", &C::cancel, "id"_a, "reason"_a)
      .def("disown", &C::disown, "ids"_a)
      .def("poll", &C::poll)
      .def("sleep", [](C& c) { return c.side().sleep(); })
      .def("wake", [](C& c) { c.side().wake(); })
      .def("detach", &C::detach)
      .def("info", [](C& c) { return info_of(c.side().info()); })
      .def("steps",
           [](C& c, uint64_t since) { return entries_of(c.side().log().steps, since); }, "since"_a)
      .def("recoveries", [](C& c) { return entries_of(c.side().log().recoveries, 0); })
      .def("look", [](C& c, uint32_t i) { return look(c.side().segment(), i); }, "slot"_a)
      .def("engines", [](C& c) { return load(c.side().segment().header().epoch); })
      .def("engine_pid", [](C& c) { return load(c.side().segment().header().engine_pid); })
      .def("memory_kills", [](C& c) { return c.side().memory_kills(); })
      .def("out_of_memory", [](C& c) { return c.side().out_of_memory(); })
      .def("killed_for_memory", [](C& c) { return c.side().killed_for_memory(); })
      .def_prop_ro("free_slots", [](C& c) { return c.side().free_slots(); })
      .def_prop_ro("free_bytes", [](C& c) { return c.side().free_bytes(); })
      .def_prop_ro("free_memory", [](C& c) { return c.side().free_memory(); })
      .def_prop_ro("slots", [](C& c) { return c.side().segment().slots(); })
      .def_prop_ro("memory_bytes", [](C& c) { return c.side().segment().memory_bytes(); })
      .def_prop_ro("in_flight", [](C& c) { return c.side().in_flight(); });
}

inline void bind_clients(nb::module_& m) {
  nb::class_<Client<Mapped>> mapped(m, "Client");
  mapped.def(
      "__init__",
      [](Client<Mapped>* c, int fd, uint64_t sampling) {
        new (c) Client<Mapped>(std::make_shared<Segment>(fd, sampling));
      },
      "memory"_a, "sampling"_a);
  bind_client(mapped);

  nb::class_<RemoteClient> remote(m, "RemoteClient");
  remote
      .def(nb::init<int, uint64_t, const std::vector<nb::bytes>&>(), "memory"_a, "sampling"_a,
           "snapshot"_a)
      .def("apply", &RemoteClient::apply, "changes"_a)
      .def("take", &RemoteClient::take)
      .def("link_down", &RemoteClient::link_down)
      .def("link_up", &RemoteClient::link_up);
  bind_client(remote);

  nb::class_<Agent>(m, "Agent")
      .def(nb::init<int, uint64_t>(), "memory"_a, "sampling"_a)
      .def("attach", [](Agent& a) { a.attach(); })
      .def("detach", [](Agent& a) { a.detach(); })
      .def("forget", [](Agent& a) { a.forget(); })
      .def("snapshot", [](Agent& a) { return list_of(a.snapshot()); })
      .def("apply", [](Agent& a, nb::bytes changes) { a.apply(text_of(changes)); }, "changes"_a)
      .def("collect", [](Agent& a, bool whole) { return list_of(a.collect(whole)); }, "whole"_a)
      .def("sleep", [](Agent& a) { return a.sleep(); })
      .def_prop_ro("pending", [](Agent& a) { return a.pending(); })
      .def_prop_ro("idle", [](Agent& a) { return a.idle(); })
      .def_prop_ro("sizes", [](Agent& a) {
        const Segment& segment = a.segment();
        return nb::make_tuple(segment.slots(), segment.arena_bytes(), segment.memory_bytes());
      });
}

}  // namespace weft::ring
