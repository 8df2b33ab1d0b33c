// Which parts of an arena are free; only the request plane knows.
#pragma once

#include <map>
#include <optional>

#include "checks.hpp"
#include "segment.hpp"

namespace weft::ring {

// First fit over the free stretches, which are kept in order and joined.
class Arena {
 public:
  explicit Arena(uint64_t bytes) : free_bytes_(bytes), free_{{0, bytes}} {}

  std::optional<Extent> allocate(uint64_t bytes) {
    bytes = round_up(bytes, kAlign);
    for (const auto& [offset, room] : free_) {
      if (room < bytes) continue;
      const Extent extent{offset, bytes};
      reserve(extent);
      return extent;
    }
    return std::nullopt;
  }

  // Take a given stretch, if all of it is free.
  bool reserve(Extent extent) {
    auto at = free_.upper_bound(extent.offset);
    if (at == free_.begin()) return false;
    --at;
    const Extent gap{at->first, at->second};
    if (!inside(extent, gap)) return false;
    free_.erase(at);
    const uint64_t before = extent.offset - gap.offset;
    const uint64_t after = gap.bytes - before - extent.bytes;
    if (before) free_[gap.offset] = before;
    if (after) free_[extent.offset + extent.bytes] = after;
    free_bytes_ -= extent.bytes;
    return true;
  }

  void release(Extent extent) {
    free_bytes_ += extent.bytes;
    auto next = free_.upper_bound(extent.offset);
    if (next != free_.end() && extent.offset + extent.bytes == next->first) {
      extent.bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == extent.offset) {
        before->second += extent.bytes;
        return;
      }
    }
    free_[extent.offset] = extent.bytes;
  }

  uint64_t free_bytes() const { return free_bytes_; }
  const std::map<uint64_t, uint64_t>& gaps() const { return free_; }

 private:
  uint64_t free_bytes_;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes
};

}  // namespace weft::ring
