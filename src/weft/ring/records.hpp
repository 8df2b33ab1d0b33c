// Reading and writing output records: tokens with or without log probabilities.
#pragma once

#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "checks.hpp"

namespace weft::ring {

struct Scored {
  TokenRecord head{0, 0, 0, kNoLogprob};
  std::vector<TopRecord> top;
};

// A stretch of equal records inside an arena.
struct Records {
  std::byte* at = nullptr;
  uint32_t stride = 0, capacity = 0;

  uint32_t token(uint32_t index) const {
    uint32_t value;
    std::memcpy(&value, at + uint64_t{index} * stride, sizeof value);
    return value;
  }

  void put(uint32_t index, uint32_t token) const {
    std::byte* to = at + uint64_t{index} * stride;
    const TokenRecord plain{token, 0, 0, kNoLogprob};
    std::memcpy(to, &plain, stride == kPlainStride ? sizeof token : sizeof plain);
  }

  uint32_t room_for_top() const {
    return stride < sizeof(TokenRecord)
               ? 0
               : static_cast<uint32_t>((stride - sizeof(TokenRecord)) / sizeof(TopRecord));
  }

  // Alternatives beyond the stride chosen at submit were not asked for and are left out.
  void put(uint32_t index, const Scored& scored) const {
    if (stride == kPlainStride) return put(index, scored.head.token);
    std::byte* to = at + uint64_t{index} * stride;
    TokenRecord head = scored.head;
    const auto top = static_cast<uint32_t>(scored.top.size());
    if (head.num_top != kNoLogprob) head.num_top = top < room_for_top() ? top : room_for_top();
    std::memcpy(to, &head, sizeof head);
    if (head.num_top != kNoLogprob && head.num_top != 0) {
      std::memcpy(to + sizeof head, scored.top.data(), head.num_top * sizeof(TopRecord));
    }
  }

  Scored get(uint32_t index) const {
    Scored scored;
    if (stride == kPlainStride) {
      scored.head.token = token(index);
      return scored;
    }
    const std::byte* from = at + uint64_t{index} * stride;
    std::memcpy(&scored.head, from, sizeof scored.head);
    if (scored.head.num_top == kNoLogprob) return scored;
    if (scored.head.num_top > room_for_top()) scored.head.num_top = room_for_top();
    scored.top.resize(scored.head.num_top);
    if (!scored.top.empty()) {
      std::memcpy(scored.top.data(), from + sizeof scored.head,
                  scored.top.size() * sizeof(TopRecord));
    }
    return scored;
  }

  // Where records [from, to) lie: each(at, bytes).
  template <class Each>
  void stretch(uint32_t from, uint32_t to, Each each) const {
    if (from < to) each(at + uint64_t{from} * stride, uint64_t{to - from} * stride);
  }
};

// The records of an output, which grows in pieces.
struct Output {
  std::byte* piece[kMorePieces + 1] = {};
  uint32_t stride = 0, first = 0, most = 0;
  uint32_t pieces = 0;  // after the first one

  uint32_t capacity() const { return records_after(first, most, pieces); }
  uint64_t bytes_of_next() const { return uint64_t{records_of_next(first, most, pieces)} * stride; }

  uint32_t token(uint32_t index) const { return holding(index).token(index); }
  void put(uint32_t index, const Scored& scored) const { holding(index).put(index, scored); }
  void put(uint32_t index, uint32_t token) const { holding(index).put(index, token); }
  Scored get(uint32_t index) const { return holding(index).get(index); }

  // Where records [from, to) lie, piece by piece: each(at, bytes).
  template <class Each>
  void stretches(uint32_t from, uint32_t to, Each each) const {
    while (from < to) {
      uint32_t index = from;
      const Records piece = holding(index);
      const uint32_t begin = from - index;
      const uint32_t room = begin == 0 ? first : records_after(begin, most, 1) - begin;
      const uint32_t upto = room < to - begin ? room : to - begin;
      piece.stretch(index, upto, each);
      from = begin + upto;
    }
  }

 private:
  // The piece with this record; `index` is made to count from its beginning.
  Records holding(uint32_t& index) const {
    uint32_t at = 0;
    if (index >= first) {
      at = static_cast<uint32_t>(std::bit_width(index / first));
      index -= records_after(first, most, at - 1);
    }
    return {piece[at], stride, kMaxRecords};
  }
};

}  // namespace weft::ring
