// Reads memory as fast as the machine can: the yardstick of kernels that memory bounds.
#pragma once

#include <cstdint>
#include <span>

namespace weft {

// Returns the exclusive or of all words, read by every thread of the pool.
uint64_t read_all(std::span<const uint64_t> words);

}  // namespace weft
