// What a resident loop needs of the host's side of a ring: where tokens go, and whether somebody has
// asked for something. One native module makes it and another one calls it: plain functions.
#pragma once

#include <cstdint>

namespace weft::resident {

struct Outlet {
  void* self;
  // Whether there is something to receive.
  bool (*asked)(void* self);
  // Publishes a token of each sequence, and wakes who waits for it. Where one cannot be published,
  // `asked` says so. Throws std::bad_alloc, which must end the engine: a token would be missing.
  void (*publish)(void* self, const uint64_t* ids, const int64_t* tokens, int64_t count);
};

inline constexpr char kOutlet[] = "weft.resident.Outlet";  // name of a capsule with a pointer to one

}  // namespace weft::resident
