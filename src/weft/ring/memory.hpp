// How the request side reaches a ring that an engine serves: mapped here, or on another machine.
//
// RequestSide works on a Segment in its own address space. What it changes there it writes, and what
// the engine may have changed it reads, with three operations whose places are in that segment:
//
//   write(at, bytes)   bring these bytes to the engine; unordered with other writes
//   flush()            all writes so far come before all writes that follow
//   read(at, bytes)    bring the engine's bytes here; what was read before is older than they
//
// They are those of one-sided network transports (put, fence, get). None waits for the engine. As
// there, memory that the other side is to write must be lent to it (registered), until recalled:
//
//   lend(at, bytes)    the engine may write these bytes of the arena
//   recall(at, bytes)  it may not write any of these any more
//
// One more is advice: nobody needs these bytes any more, and pages of them may be given back:
//
//   discard(at, bytes)
#pragma once

#include <concepts>
#include <cstdint>

namespace weft::ring {

template <class M>
concept Memory = requires(M memory, const void* at, const void* from, uint64_t bytes) {
  memory.write(from, bytes);
  memory.flush();
  memory.lend(from, bytes);
  memory.recall(from, bytes);
  memory.discard(from, bytes);
  memory.read(at, bytes);
};

// The engine maps the same segment: every store is there at once and in order. Costs nothing.
struct Mapped {
  void write(const void*, uint64_t) {}
  void flush() {}
  void read(const void*, uint64_t) {}
  void lend(const void*, uint64_t) {}  // the engine writes where it will
  void recall(const void*, uint64_t) {}
  void discard(const void*, uint64_t) {}  // the segment is the engine's own
};
static_assert(Memory<Mapped>);

}  // namespace weft::ring
