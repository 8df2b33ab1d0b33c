// Changes of a ring's memory as bytes on a link: the other side applies them in their order.
//
// Each is a place (offset from the header, bytes) and what stands there from now on, filled up to
// eight bytes. A flush needs nothing: all travel on one ordered connection. Nothing that comes from
// a link is believed: a place must lie where the sender may write.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "segment.hpp"

namespace weft::ring {

struct Place {
  uint64_t offset, bytes;

  // Whether it lies in these bytes, which begin so far behind the header.
  bool within(uint64_t begin, uint64_t length) const {
    return offset >= begin && bytes <= length && offset - begin <= length - bytes;
  }
};
inline constexpr uint64_t kDiscarded = uint64_t{1} << 63;  // of `bytes`: nothing follows
inline constexpr uint64_t kPiece = 1 << 18;  // bytes of a change; what is longer is several
inline constexpr uint64_t kPart = 1 << 20;   // bytes of changes that travel together, but for one

// Collects changes until the link takes them, in parts of whole changes.
class Changes {
 public:
  explicit Changes(const Segment& segment)
      : base_(reinterpret_cast<const std::byte*>(&segment.header())) {}

  // `at` lies in the segment; `from` is what the other side is to have there.
  void put(const void* at, const void* from, uint64_t bytes) {
    for (uint64_t done = 0; done < bytes; done += kPiece) {
      const Place place{offset_of(at) + done, std::min(kPiece, bytes - done)};
      begin(place);
      parts_.back().append(static_cast<const char*>(from) + done, place.bytes);
      parts_.back().resize(round_up(parts_.back().size(), sizeof(uint64_t)));
    }
  }
  void put(const void* at, uint64_t bytes) { put(at, at, bytes); }
  void discard(const void* at, uint64_t bytes) {
    begin({offset_of(at), bytes | kDiscarded});
  }

  // Whether there is more than fits into one part.
  bool full() const { return parts_.size() > 1; }
  std::vector<std::string> take() { return std::exchange(parts_, {}); }

 private:
  void begin(Place place) {
    if (parts_.empty() || parts_.back().size() >= kPart) parts_.emplace_back();
    parts_.back().append(reinterpret_cast<const char*>(&place), sizeof place);
  }
  uint64_t offset_of(const void* at) const { return static_cast<const std::byte*>(at) - base_; }

  const std::byte* base_;
  std::vector<std::string> parts_;
};

// Apply changes to a segment. `may_change(place, discarded)` says whether the sender may write there,
// or have the pages there given back. Words are stored whole, and after what comes before them.
template <class MayChange>
void apply_changes(const Segment& segment, std::string_view text, MayChange may_change) {
  auto* const base = reinterpret_cast<std::byte*>(&segment.header());
  const auto words = reinterpret_cast<std::byte*>(&segment.asked(0)) - base;
  const auto words_end = reinterpret_cast<std::byte*>(&segment.slot(0)) - base;
  while (!text.empty()) {
    Place place;
    if (text.size() < sizeof place) throw SegmentError("a change of the ring is cut off");
    std::memcpy(&place, text.data(), sizeof place);
    text.remove_prefix(sizeof place);
    const bool discarded = place.bytes & kDiscarded;
    place.bytes &= ~kDiscarded;
    const uint64_t end = place.offset + place.bytes;
    if (end < place.offset || place.bytes == 0 || !may_change(place, discarded)) {
      throw SegmentError("a change of the ring where its sender may not write");
    }
    std::byte* to = base + place.offset;
    if (discarded) {
      if (to < segment.arena()) throw SegmentError("only the arena has bytes that nobody needs");
      segment.give_back(to - segment.arena(), place.bytes);
      continue;
    }
    const uint64_t filled = round_up(place.bytes, sizeof(uint64_t));
    if (filled < place.bytes || text.size() < filled) {
      throw SegmentError("a change of the ring is cut off");
    }
    const char* from = text.data();
    text.remove_prefix(filled);
    const bool inside = static_cast<uint64_t>(words) <= place.offset &&
                        end <= static_cast<uint64_t>(words_end);
    if (place.bytes == sizeof(uint32_t) && place.offset % sizeof(uint32_t) == 0) {
      uint32_t value;
      std::memcpy(&value, from, sizeof value);
      atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(to))
          .store(value, order::memory_order_seq_cst);
    } else if (place.offset % sizeof(uint64_t) == 0 && place.bytes % sizeof(uint64_t) == 0 &&
               (inside || place.bytes == sizeof(uint64_t))) {
      for (uint64_t i = 0; i < place.bytes; i += sizeof(uint64_t)) {
        uint64_t value;
        std::memcpy(&value, from + i, sizeof value);
        store(*reinterpret_cast<uint64_t*>(to + i), value);
      }
    } else if (inside) {
      throw SegmentError("a change of a part of a word");
    } else {
      std::memcpy(to, from, place.bytes);
    }
  }
}

// The Memory of a request side whose engine is at the other end of a link. What the engine changes
// is brought here without being asked for (agent_side.hpp), so there is nothing to read.
class LinkMemory {
 public:
  explicit LinkMemory(const Segment& segment)
      : segment_(&segment), changes_(std::make_unique<Changes>(segment)) {}

  // What the engine has written. Throws SegmentError if it may not write there: all that it writes
  // in a ring are its words, its info page, its log, and what is lent of the arena.
  void apply(std::string_view text) {
    apply_changes(*segment_, text, [this](Place place, bool discarded) {
      return !discarded && may_change(place);
    });
  }

  void write(const void* at, uint64_t bytes) {
    if (up_) changes_->put(at, bytes);
  }
  void flush() {}
  void read(const void*, uint64_t) {}
  void lend(const void* at, uint64_t bytes) {
    if (bytes) lent_[behind_header(at)] = bytes;
  }
  void recall(const void* at, uint64_t bytes) {
    const uint64_t begin = behind_header(at);
    lent_.erase(lent_.lower_bound(begin), lent_.lower_bound(begin + bytes));
  }
  void discard(const void* at, uint64_t bytes) {
    if (up_) changes_->discard(at, bytes);
  }

  // While the link is down nothing is collected: `RequestSide::resend` says all of it.
  void set_up(bool up) {
    up_ = up;
    if (!up) changes_->take();
  }
  std::vector<std::string> take() { return changes_->take(); }

 private:
  uint64_t behind_header(const void* at) const {
    const auto* base = reinterpret_cast<const std::byte*>(&segment_->header());
    return static_cast<const std::byte*>(at) - base;
  }

  bool may_change(Place place) const {
    const auto lent = lent_.upper_bound(place.offset);
    if (lent != lent_.begin()) {
      const auto& [begin, bytes] = *std::prev(lent);
      if (place.within(begin, bytes)) return true;
    }
    const Segment& segment = *segment_;
    if (place.within(behind_header(&segment.given(0)), segment.slots() * sizeof(Given))) return true;
    const uint64_t slots = behind_header(&segment.slot(0));
    if (place.within(slots, segment.slots() * sizeof(Slot))) {
      const uint64_t at = (place.offset - slots) % sizeof(Slot);
      return at >= offsetof(Slot, prompt_published) && at + place.bytes <= sizeof(Slot);
    }
    const Header& header = segment.header();
    for (const Count& rung : header.to_client.rung) {
      if (place.offset == behind_header(&rung) && place.bytes == sizeof rung.value) return true;
    }
    constexpr uint64_t begin = offsetof(Header, epoch), end = offsetof(Header, client_epoch);
    return place.within(begin, end - begin) ||
           place.within(behind_header(&segment.info()), sizeof(InfoPage)) ||
           place.within(behind_header(&segment.log()), sizeof(LogPages));
  }

  const Segment* segment_;
  std::unique_ptr<Changes> changes_;
  std::map<uint64_t, uint64_t> lent_;  // offset behind the header -> bytes
  bool up_ = true;
};
static_assert(Memory<LinkMemory>);

}  // namespace weft::ring
