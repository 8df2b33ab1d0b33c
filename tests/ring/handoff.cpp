// Two sides of a ring against each other: content check and latencies.
//
//   handoff processes SECONDS REQUESTS   two processes, content checked, stops at either bound
//   handoff threads SECONDS REQUESTS     the same in threads of one process (for the sanitizer)
//   handoff relayed SECONDS REQUESTS     the same with an agent in a thread between the two sides
//   handoff MODE N                       latencies in microseconds: spin, spin_futex, futex,
//                                        eventfd (one way), pipe (round trip)
//
// Prints one line of JSON; exit status 1 if anything was wrong.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "engine_side.hpp"
#include "relay.hpp"
#include "request_side.hpp"
#include "wake.hpp"

using namespace weft::ring;

namespace {

[[noreturn]] void fail(const char* what, uint64_t a = 0, uint64_t b = 0) {
  std::fprintf(stderr, "%s (%llu, %llu)\n", what, (unsigned long long)a, (unsigned long long)b);
  std::_Exit(1);
}

uint32_t token_of(const std::vector<uint32_t>& prompt, uint32_t index) {
  uint32_t hash = 2166136261u + index;
  for (const uint32_t id : prompt) hash = (hash ^ id) * 16777619u;
  return hash & 0x7fffffff;
}

// -- everything against everything ----------------------------------------------------------------

constexpr uint32_t kOutput = 12, kLongOutput = 3000, kStopId = 0xdead;

// Most outputs are short; some grow.
uint32_t most_of(const std::vector<uint32_t>& prompt) {
  return prompt[1] % 64 ? kOutput : kLongOutput;
}
uint32_t length_of(const std::vector<uint32_t>& prompt) {
  return 1 + prompt[1] % most_of(prompt);
}

void run_engine(std::shared_ptr<Segment> segment, int wake_fd) {
  struct Open {
    Claim claim;
    uint32_t said = 0;
    Reason cancel = Reason::None;
  };
  EngineSide side(std::move(segment), 0);
  std::vector<Open> open;
  bool stopping = false;
  while (!stopping || !open.empty()) {
    Received received = side.receive();
    for (Claim& claim : received.claims) {
      stopping |= claim.prompt[0] == kStopId;
      open.push_back({std::move(claim), 0, Reason::None});
    }
    for (const auto& [id, reason] : received.cancels) {
      for (Open& one : open) {
        if (one.claim.id == id) one.cancel = reason;
      }
    }
    for (Open& one : open) {
      Scored last;
      last.head.token = token_of(one.claim.prompt, one.said);
      End end;
      end.reason = one.cancel != Reason::None ? one.cancel : Reason::Length;
      end.cached_tokens = one.said;
      const Scored* with = one.cancel == Reason::None ? &last : nullptr;
      const bool ends = !with || one.said + 1 == length_of(one.claim.prompt);
      const uint64_t id = one.claim.id;
      if (!(ends ? side.finish(id, end, with) : side.publish(id, last.head.token))) {
        fail("the engine lost a slot", id);
      }
      one.said = ends ? ~0u : one.said + 1;
    }
    std::erase_if(open, [](const Open& one) { return one.said == ~0u; });
    if (side.ring(Bell::Output)) signal_eventfd(wake_fd);
    if (!open.empty() || received.claims.size()) continue;
    if (!spin([&] { return side.news(); }, 20'000) && side.sleep()) {
      const Waited word{side.bell(), side.heard()};
      futex_wait_any({&word, 1}, 1'000'000'000);
    }
    side.wake();
  }
}

struct Tally {
  uint64_t requests = 0, tokens = 0, cancelled = 0, refused = 0;
};

template <Memory M = Mapped>
class Requests {
 public:
  using Exchange = std::function<void(RequestSide<M>&)>;

  // `exchange` brings what was written to the engine, and its news here, where memory is not shared.
  Requests(std::shared_ptr<Segment> segment, int wake_fd, M memory = M(),
           Exchange exchange = [](auto&) {})
      : side_(std::move(segment), std::move(memory)), wake_fd_(wake_fd), exchange_(exchange) {}

  Tally run(double seconds, uint64_t requests) {
    const int64_t until = now_ns() + static_cast<int64_t>(seconds * 1e9);
    send(~0u);  // until the ring is full
    while (tally_.requests < requests && now_ns() < until) {
      send(next() % 8);
      take_news();
    }
    while (side_.in_flight()) take_news();
    Submission stop = request_of(0);
    stop.prompt[0] = kStopId;
    uint32_t slot = 0;
    if (side_.prepare(stop, slot) != Refusal::None) fail("no slot left for the last request");
    submit({slot});
    while (side_.in_flight()) take_news();
    if (side_.free_slots() != side_.segment().slots()) fail("a slot is lost");
    if (side_.free_bytes() != side_.segment().arena_bytes()) fail("a part of the arena is lost");
    return tally_;
  }

 private:
  struct Sent {
    std::vector<uint32_t> prompt;
    uint32_t seen = 0;
    bool cancelled = false;
  };

  Submission request_of(uint64_t id) {
    Submission request;
    request.request_id = id;
    const uint32_t length = 2 + next() % 40;
    for (uint32_t i = 0; i < length; ++i) request.prompt.push_back(next() % 50'000);
    request.service_class = "interactive";
    request.max_records = most_of(request.prompt);
    return request;
  }

  void send(uint32_t count) {
    std::vector<uint32_t> slots;
    for (uint32_t i = 0; i < count; ++i) {
      const Submission request = request_of(++last_id_);
      uint32_t slot = 0;
      if (side_.prepare(request, slot) != Refusal::None) {
        ++tally_.refused;
        break;
      }
      sent_[request.request_id] = {request.prompt, 0, false};
      slots.push_back(slot);
    }
    if (!slots.empty() && next() % 16 == 0) {
      side_.abandon({&slots.back(), 1});
      sent_.erase(last_id_);
      slots.pop_back();
    }
    submit(slots);
    if (next() % 32 == 0 && !sent_.empty()) cancel(sent_.rbegin()->first);
  }

  void cancel(uint64_t id) {
    sent_[id].cancelled |= side_.cancel(id, Reason::Cancelled);
    wake_engine();
  }

  void submit(const std::vector<uint32_t>& slots) {
    side_.submit(slots);
    wake_engine();
  }
  void wake_engine() {
    if (side_.ring()) futex_wake(&side_.segment().header().to_engine.rung[0].value);
    exchange_(side_);
  }

  void take_news() {
    exchange_(side_);
    const auto all = side_.poll();
    if (side_.has_grown()) wake_engine();
    for (const News& news : all) check(news);
    if (!all.empty() || side_.in_flight() == 0 || !side_.sleep()) return;
    pollfd waited{wake_fd_, POLLIN, 0};
    if (::poll(&waited, 1, 60'000) == 0) fail("no news for a minute", side_.in_flight());
    uint64_t count;
    [[maybe_unused]] const auto bytes = read(wake_fd_, &count, sizeof count);
    side_.wake();
  }

  void check(const News& news) {
    const auto found = sent_.find(news.request_id);
    if (news.request_id == 0) return;  // the one that stops the engine
    if (found == sent_.end()) fail("news of nobody", news.request_id);
    Sent& sent = found->second;
    for (const uint32_t token : news.tokens) {
      if (token != token_of(sent.prompt, sent.seen++)) fail("a wrong token", news.request_id);
    }
    tally_.tokens += news.tokens.size();
    if (news.end == Reason::None) return;
    const bool whole = sent.seen == length_of(sent.prompt);
    if (news.end == Reason::Error) {  // many long ones at once may have no room to grow
      const bool no_room = std::strcmp(news.final.code, "out_of_memory") == 0;
      if (!no_room || whole) fail(news.final.message, sent.seen);
    } else if (news.end == Reason::Cancelled ? !sent.cancelled : !whole) {
      fail("a wrong end", news.request_id);
    }
    tally_.cancelled += news.end == Reason::Cancelled;
    ++tally_.requests;
    sent_.erase(found);
  }

  uint32_t next() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(random_ >> 33);
  }

  RequestSide<M> side_;
  int wake_fd_;
  Exchange exchange_;
  Tally tally_;
  std::map<uint64_t, Sent> sent_;
  uint64_t random_ = 7, last_id_ = 0;
};

void print(const Tally& tally, int64_t start) {
  std::printf("{\"requests\": %llu, \"handoffs\": %llu, \"cancelled\": %llu, \"refused\": %llu, "
              "\"seconds\": %.3f}\n",
              (unsigned long long)tally.requests,
              (unsigned long long)(tally.tokens + 2 * tally.requests),
              (unsigned long long)tally.cancelled, (unsigned long long)tally.refused,
              (now_ns() - start) / 1e9);
}

int run_relayed(double seconds, uint64_t requests) {
  const auto there = std::make_shared<Segment>(Segment::create(64, 1 << 18));
  const auto here = std::make_shared<Segment>(Segment::create(64, 1 << 18));
  const int wake_there = eventfd(0, EFD_NONBLOCK), wake_here = eventfd(0, EFD_NONBLOCK);
  const int64_t start = now_ns();
  std::thread engine([&] { run_engine(there, wake_there); });
  Tally tally;
  {
    Relay relay(there, here, wake_there, wake_here);
    tally = Requests<LinkMemory>(here, wake_here, LinkMemory(*here), [&](auto& side) {
              relay.exchange(side);
            }).run(seconds, requests);
    engine.join();
  }
  print(tally, start);
  return 0;
}

int run_all(bool threads, double seconds, uint64_t requests) {
  const int memory = Segment::create(64, 1 << 18);
  const int wake = eventfd(0, EFD_NONBLOCK);
  const auto segment = std::make_shared<Segment>(memory);
  const int64_t start = now_ns();
  Tally tally;
  int status = 0;
  const auto ask = [&] { tally = Requests<>(segment, wake).run(seconds, requests); };
  if (threads) {
    std::thread engine([&] { run_engine(segment, wake); });
    ask();
    engine.join();
  } else if (const pid_t child = fork(); child == 0) {
    run_engine(segment, wake);
    std::_Exit(0);
  } else {
    ask();
    waitpid(child, &status, 0);
  }
  print(tally, start);
  return status != 0;
}

// -- latencies ------------------------------------------------------------------------------------

struct Payload {
  int64_t sent_ns;
  uint64_t words[7];
};
static_assert(sizeof(Payload) == 64);

void fill(std::byte* to, uint64_t round) {
  Payload payload;
  for (uint64_t& word : payload.words) word = round;
  payload.sent_ns = now_ns();
  std::memcpy(to, &payload, sizeof payload);
}

double arrive(const std::byte* from, uint64_t round) {
  const int64_t now = now_ns();
  Payload payload;
  std::memcpy(&payload, from, sizeof payload);
  for (const uint64_t word : payload.words) {
    if (word != round) fail("a wrong payload", round, word);
  }
  return static_cast<double>(now - payload.sent_ns) / 1e3;
}

State state_of(Segment& ring) { return look(ring.words(0)).state(); }

template <class Ready>
void spin_forever(Ready ready) {
  while (!ready()) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

void pause_ns(int64_t gap) {
  const timespec time{0, gap};
  if (gap) nanosleep(&time, nullptr);
}

// Request to engine: the payload lies in the arena, the state changes hands.
void receive_all(Segment& ring, uint64_t rounds, int64_t spin_ns, double* latencies) {
  auto& bell = ring.header().to_engine;
  for (uint64_t round = 0; round < rounds; ++round) {
    const auto ready = [&] { return state_of(ring) == State::PrefillPending; };
    if (spin_ns < 0) {
      spin_forever(ready);
    } else {
      while (!spin(ready, spin_ns)) {
        uint32_t heard[1];
        hear(bell, heard);
        if (!ready() && go_to_sleep(bell, heard)) {
          futex(&bell.rung[0].value, FUTEX_WAIT, heard[0], nullptr);
          wake_up(bell);
        }
      }
    }
    latencies[round] = arrive(ring.arena(), round);
    Tag tag;
    take(ring.words(0), ring.slot(0), 1, tag);
    move_as_engine(ring.given(0), tag, State::DecodeCompleted);
  }
}

void send_all(Segment& ring, uint64_t rounds, int64_t gap) {
  auto& bell = ring.header().to_engine;
  uint32_t woken = 0;
  for (uint64_t round = 0; round < rounds; ++round) {
    pause_ns(gap);
    Tag tag;
    begin_writing(ring.words(0), tag);
    fill(ring.arena(), round);
    submit(ring.words(0), tag);
    if (ring_bell(bell, 0, woken)) futex_wake(&bell.rung[0].value);
    while (state_of(ring) != State::DecodeCompleted) {
      if (gap) std::this_thread::yield();
    }
    release(ring.words(0), tag);
  }
}

// Engine to request plane: news wait in the slot, the event loop sleeps on an eventfd.
void await_all(Segment& ring, uint64_t rounds, int wake_fd, double* latencies) {
  uint64_t& published = ring.given(0).published;
  auto& bell = ring.header().to_client;
  for (uint64_t round = 0; round < rounds; ++round) {
    while (Word::of(load(published)).value <= round) {
      uint32_t heard[kBells];
      hear(bell, heard);
      if (Word::of(load(published)).value > round || !go_to_sleep(bell, heard)) continue;
      pollfd waited{wake_fd, POLLIN, 0};
      ::poll(&waited, 1, -1);
      uint64_t count;
      [[maybe_unused]] const auto bytes = read(wake_fd, &count, sizeof count);
      wake_up(bell);
    }
    latencies[round] = arrive(ring.arena(), round);
    store(ring.asked(0), round + 1);
  }
}

void announce_all(Segment& ring, uint64_t rounds, int wake_fd, int64_t gap) {
  const int writer = static_cast<int>(Bell::Output);
  uint32_t woken = 0;
  for (uint64_t round = 0; round < rounds; ++round) {
    pause_ns(gap);
    fill(ring.arena(), round);
    publish(ring.given(0).published, {}, static_cast<uint32_t>(round), 1);
    if (ring_bell(ring.header().to_client, writer, woken)) signal_eventfd(wake_fd);
    while (load(ring.asked(0)) <= round) std::this_thread::yield();
  }
}

void pipe_all(uint64_t rounds, int64_t gap, double* latencies) {
  int there[2], back[2];
  if (pipe(there) != 0 || pipe(back) != 0) fail("no pipe");
  std::byte buffer[64]{};
  const auto pass = [&](int from, int to, bool read_first) {
    if (read_first && read(from, buffer, 64) != 64) std::_Exit(0);
    if (write(to, buffer, 64) != 64) fail("the pipe is closed");
    if (!read_first && read(from, buffer, 64) != 64) fail("the pipe is closed");
  };
  if (fork() == 0) {
    close(there[1]);
    for (;;) pass(there[0], back[1], true);
  }
  close(there[0]);
  for (uint64_t round = 0; round < rounds; ++round) {
    pause_ns(gap);
    const int64_t start = now_ns();
    pass(back[0], there[1], false);
    latencies[round] = static_cast<double>(now_ns() - start) / 1e3;
  }
}

int measure(const std::string& mode, uint64_t rounds) {
  constexpr int64_t kGap = 200'000;
  const int wake = eventfd(0, 0);
  Segment ring(Segment::create(1, 1 << 20));
  auto* latencies = static_cast<double*>(mmap(nullptr, rounds * sizeof(double),
      PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  pid_t child = 0;
  if (mode == "pipe") {
    pipe_all(rounds, kGap, latencies);
  } else if (child = fork(); child == 0) {
    if (mode == "eventfd") {
      await_all(ring, rounds, wake, latencies);
    } else {
      receive_all(ring, rounds, mode == "spin" ? -1 : mode == "futex" ? 0 : 50'000, latencies);
    }
    std::_Exit(0);
  } else if (mode == "eventfd") {
    announce_all(ring, rounds, wake, kGap);
  } else {
    send_all(ring, rounds, mode == "spin" ? 0 : kGap);
  }
  if (child) waitpid(child, nullptr, 0);
  std::sort(latencies, latencies + rounds);
  std::printf("{\"mode\": \"%s\", \"rounds\": %llu, \"p50_us\": %.3f, \"p99_us\": %.3f}\n",
              mode.c_str(), (unsigned long long)rounds, latencies[rounds / 2],
              latencies[rounds * 99 / 100]);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::string mode = count > 2 ? words[1] : "";
  if (mode == "relayed") {
    return run_relayed(std::atof(words[2]), std::strtoull(words[3], nullptr, 10));
  }
  if (mode == "processes" || mode == "threads") {
    return run_all(mode == "threads", std::atof(words[2]), std::strtoull(words[3], nullptr, 10));
  }
  if (mode == "spin" || mode == "spin_futex" || mode == "futex" || mode == "eventfd" ||
      mode == "pipe") {
    return measure(mode, std::strtoull(words[2], nullptr, 10));
  }
  std::fprintf(stderr, "see the top of the source\n");
  return 2;
}
