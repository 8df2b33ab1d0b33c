// One sequential range a thread, four accumulators, nothing but loads.
#include "reader.hpp"

#include <algorithm>
#include <atomic>

#include "pool.hpp"

namespace weft {
namespace {

constexpr size_t lane = 8;  // words of a cache line

uint64_t read_range(std::span<const uint64_t> words) {
  uint64_t found[4][lane] = {};
  size_t at = 0;
  for (; at + 4 * lane <= words.size(); at += 4 * lane)
    for (size_t line = 0; line < 4; ++line)
      for (size_t i = 0; i < lane; ++i) found[line][i] ^= words[at + line * lane + i];
  uint64_t all = 0;
  for (; at < words.size(); ++at) all ^= words[at];
  for (const auto& line : found)
    for (const uint64_t word : line) all ^= word;
  return all;
}

}  // namespace

uint64_t read_all(std::span<const uint64_t> words) {
  Pool& pool = shared_pool();
  const int64_t parts = pool.threads();
  const size_t each = (words.size() / parts + lane) / lane * lane;
  std::atomic<uint64_t> all{0};
  pool.run(parts, [&](int64_t part) {
    const size_t from = std::min(words.size(), part * each);
    all ^= read_range(words.subspan(from, std::min(each, words.size() - from)));
  });
  return all;
}

}  // namespace weft
