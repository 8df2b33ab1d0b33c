// A request side whose memory delays and reorders what was not flushed, against a real engine side.
//
//   delayed SEED EPISODES [BROKEN]
//
// The request side works on a copy of the ring. Its writes reach the engine's ring one by one, at
// random moments, and in any order between two flushes; it sees of the engine's ring what it reads.
// The engine looks only when the bell has rung. Prints one line of JSON; exit status 1 if content is
// wrong, a slot is refused, or a request never ends.
//
// BROKEN must make it fail: flush-payload, flush-piece and flush-word lose the flushes behind
// payload, behind the place of a piece, and behind words; read-records, read-end and read-words
// lose those reads.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine_side.hpp"
#include "request_side.hpp"

using namespace weft::ring;

namespace {

[[noreturn]] void fail(const char* what, uint64_t a = 0, uint64_t b = 0) {
  std::fprintf(stderr, "%s (%llu, %llu)\n", what, (unsigned long long)a, (unsigned long long)b);
  std::_Exit(1);
}

// The wire between the two memories.
struct Wire {
  struct Write {
    uint64_t offset;
    std::vector<std::byte> bytes;
  };
  enum Kind { Payload, Piece, Asked, Bell, None };

  Segment& here;
  Segment& there;
  std::mt19937_64& draw;
  const std::string broken;
  std::vector<std::vector<Write>> batches{1};  // between two flushes

  std::byte* base(Segment& segment) { return reinterpret_cast<std::byte*>(&segment.header()); }

  Kind kind_of(uint64_t offset) {
    const auto at = [&](const void* place) {
      return static_cast<uint64_t>(static_cast<const std::byte*>(place) - base(here));
    };
    if (offset < at(&here.asked(0))) return Bell;
    if (offset < at(&here.given(0))) return Asked;
    if (offset >= at(here.arena())) return Payload;
    const uint64_t inside = (offset - at(&here.slot(0))) % sizeof(Slot);
    return inside >= offsetof(Slot, more) ? Piece : Payload;
  }

  void write(const void* at, uint64_t bytes) {
    const auto* from = static_cast<const std::byte*>(at);
    if (bytes) {
      batches.back().push_back({static_cast<uint64_t>(from - base(here)), {from, from + bytes}});
    }
  }
  void flush() {
    const Kind lost = broken == "flush-payload" ? Payload
                      : broken == "flush-piece" ? Piece
                      : broken == "flush-word"  ? Asked
                                                : None;
    for (const Write& write : batches.back()) {
      if (kind_of(write.offset) == lost) return;
    }
    if (!batches.back().empty()) batches.emplace_back();
  }
  void read(const void* at, uint64_t bytes) {
    const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(at) - base(here));
    const bool records = offset >= static_cast<uint64_t>(here.arena() - base(here));
    if (broken == "read-records" && records) return;
    if (broken == "read-end" && bytes == sizeof(Final)) return;
    if (broken == "read-words" && at == &here.given(0)) return;
    std::memcpy(base(here) + offset, base(there) + offset, bytes);
  }

  // One of the writes that may arrive now; false if nothing is under way.
  bool deliver() {
    while (batches.size() > 1 && batches.front().empty()) batches.erase(batches.begin());
    std::vector<Write>& first = batches.front();
    if (first.empty()) return false;
    const size_t which = draw() % first.size();
    const Write& write = first[which];
    std::memcpy(base(there) + write.offset, write.bytes.data(), write.bytes.size());
    first.erase(first.begin() + static_cast<std::ptrdiff_t>(which));
    return true;
  }
};

struct Delayed {
  Wire* wire;
  void write(const void* at, uint64_t bytes) { wire->write(at, bytes); }
  void flush() { wire->flush(); }
  void read(const void* at, uint64_t bytes) { wire->read(at, bytes); }
  void lend(const void*, uint64_t) {}
  void recall(const void*, uint64_t) {}
  void discard(const void*, uint64_t) {}
};

uint32_t token_of(uint32_t request, uint32_t index) {
  return (request * 2654435761u + index * 40503u) & 0xffffff;
}

struct Expected {
  uint32_t length = 0, seen = 0;
  bool cancelled = false;
};

class Episodes {
 public:
  Episodes(uint64_t seed, const char* broken)
      : draw_(seed),
        here_(mapped()),
        there_(mapped()),
        wire_{*here_, *there_, draw_, broken},
        engine_(there_, 0) {
    store(there_->header().client_epoch, uint32_t{1});  // whoever is there attaches the plane
    side_ = std::make_unique<RequestSide<Delayed>>(here_, Delayed{&wire_});
    side_->ring();
  }

  void run(int episodes) {
    for (int episode = 0; episode < episodes; ++episode) {
      for (uint64_t n = 1 + draw_() % 3; n > 0; --n) submit();
      // Until all is quiet: nothing under way, nothing heard, nothing to compute.
      while (step()) {
      }
      if (side_->in_flight()) fail("a request never ends", episode, side_->in_flight());
    }
    if (engine_.refused()) fail("a slot was refused", engine_.refused());
    if (side_->free_bytes() != here_->arena_bytes()) fail("a part of the arena is lost");
    std::printf("{\"requests\": %u, \"tokens\": %llu, \"cancelled\": %u}\n", requests_,
                (unsigned long long)tokens_, cancelled_);
  }

 private:
  static std::shared_ptr<Segment> mapped() {
    const int fd = Segment::create(8, 1 << 20);
    auto segment = std::make_shared<Segment>(fd);
    close(fd);
    return segment;
  }

  void submit() {
    const uint32_t id = ++requests_;
    Submission request;
    request.request_id = id;
    request.max_records = draw_() % 4 ? 1 + draw_() % 20 : 1 + draw_() % 3000;
    const auto length = static_cast<uint32_t>(1 + draw_() % request.max_records);
    request.prompt = {id, length};
    for (uint64_t n = draw_() % 40; n > 0; --n) request.prompt.push_back(id + n);
    uint32_t slot = 0;
    if (side_->prepare(request, slot) != Refusal::None) fail("no room");
    if (draw_() % 8 == 0) {  // somebody changed their mind
      side_->abandon({&slot, 1});
      return submit();
    }
    expected_[id] = {length, 0, false};
    side_->submit({&slot, 1});
    side_->ring();
  }

  // Something that may happen now; false if nothing can.
  bool step() {
    const uint64_t first = draw_() % 4;
    for (uint64_t i = 0; i < 4; ++i) {
      switch ((first + i) % 4) {
        case 0:
          if (wire_.deliver()) return true;
          break;
        case 1:
          if (look()) return true;
          break;
        case 2:
          if (compute()) return true;
          break;
        case 3:
          if (take_news()) return true;
          break;
      }
    }
    return false;
  }

  bool look() {
    if (!engine_.news()) return false;
    Received received = engine_.receive();
    for (const Claim& claim : received.claims) {
      if (claim.prompt.size() < 2) fail("a prompt that nobody wrote");
      const auto found = expected_.find(claim.prompt[0]);
      if (found == expected_.end() || found->second.length != claim.prompt[1]) {
        fail("a prompt that nobody wrote", claim.prompt[0], claim.prompt[1]);
      }
      open_[claim.id] = {claim.prompt[0], claim.prompt[1]};
    }
    for (const auto& [id, reason] : received.cancels) {
      if (reason != Reason::Cancelled) fail("the engine gives a request up", id);
      open_.erase(id);
      End end;
      end.reason = reason;
      engine_.finish(id, end, nullptr);
    }
    engine_.ring(Bell::Control);
    return true;
  }

  bool compute() {
    if (open_.empty()) return false;
    auto at = std::next(open_.begin(), static_cast<std::ptrdiff_t>(draw_() % open_.size()));
    for (uint64_t n = 1 + draw_() % 50; n > 0; --n) {
      auto& [id, work] = *at;
      Scored token;
      token.head.token = token_of(work.request, work.said++);
      if (work.said < work.length) {
        engine_.publish(id, token.head.token);
        continue;
      }
      End end;
      end.reason = Reason::Length;
      engine_.finish(id, end, &token);
      open_.erase(at);
      break;
    }
    engine_.ring(Bell::Output);
    return true;
  }

  bool take_news() {
    const std::vector<News> all = side_->poll();
    if (side_->has_grown()) side_->ring();
    for (const News& news : all) {
      Expected& wanted = expected_.at(news.request_id);
      for (const uint32_t token : news.tokens) {
        if (token != token_of(static_cast<uint32_t>(news.request_id), wanted.seen++)) {
          fail("a wrong token", news.request_id, wanted.seen - 1);
        }
        ++tokens_;
      }
      if (news.end == Reason::Error) fail("an error", news.request_id);
      if (news.end == Reason::Cancelled) ++cancelled_;
      if (news.end == Reason::Cancelled && !wanted.cancelled) fail("cancelled by nobody");
      const bool whole = wanted.seen == wanted.length || wanted.cancelled;  // then nobody reads
      if (news.end == Reason::Length && !whole) fail("tokens are missing", news.request_id);
      if (news.end == Reason::None && draw_() % 64 == 0) {
        wanted.cancelled = true;
        side_->cancel(news.request_id, Reason::Cancelled);
        side_->ring();
      }
    }
    return !all.empty();
  }

  struct Work {
    uint32_t request, length, said = 0;
  };

  std::mt19937_64 draw_;
  std::shared_ptr<Segment> here_, there_;
  Wire wire_;
  EngineSide engine_;
  std::unique_ptr<RequestSide<Delayed>> side_;
  std::map<uint64_t, Expected> expected_;
  std::map<uint64_t, Work> open_;
  uint32_t requests_ = 0, cancelled_ = 0;
  uint64_t tokens_ = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  const char* broken = count > 3 ? words[3] : "";
  Episodes(std::strtoull(words[1], nullptr, 10), broken).run(std::atoi(words[2]));
}
