// Linux gives the memory for tiles to processes that ask: once, for all threads, and for processes
// that they fork. Before Linux 5.16, or where a filter forbids it, there is none, and the first
// instruction of a tile ends the process.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

namespace weft {

inline bool tiles_are_given() {
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  static const bool given = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return given;
}

}  // namespace weft
