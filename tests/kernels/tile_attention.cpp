// Attention by tiles: a query has the same bits alone, where keys are the rows of tiles, as among
// many, where it is one itself; and nearly those of pairs. Memory has just its size, so that a
// sanitizer sees reads beyond. Needs AVX-512 with bfloat16; tiles are modelled, and with the word
// `machine` compared with those of the machine.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "amx_attention.hpp"
#include "floats.hpp"
#include "machine_tiles.hpp"
#include "modelled_tiles.hpp"
#include "tile_permission.hpp"

using namespace weft;

namespace {

std::mt19937 draw(7);

uint16_t random_half() {
  const float x = std::normal_distribution<float>()(draw);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

std::vector<uint16_t> random_halves(int64_t count) {
  std::vector<uint16_t> halves(count);
  for (uint16_t& half : halves) half = random_half();
  return halves;
}

// A sequence of `context` positions, the last of which have queries.
struct Case {
  int64_t context, queries, heads, size, block, window;
  bool codes = false;  // of 8 bits in the cache
  float softcap = 0.0f;
};

// One layer's cache of a sequence, whose blocks lie in another order.
struct Sequence {
  Case given;
  std::vector<int32_t> table;
  std::vector<char> keys, values;  // [blocks][heads], of each rows and then, of codes, their scales
  std::vector<uint16_t> queries;   // [queries][heads][size]

  explicit Sequence(const Case& c) : given(c), table((c.context + c.block - 1) / c.block) {
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
    queries = random_halves(c.queries * c.heads * c.size);
    for (std::vector<char>* memory : {&keys, &values}) {
      memory->resize(table.size() * c.heads * head_bytes());
      for (int64_t at = 0; at < static_cast<int64_t>(table.size()) * c.block; ++at) {
        for (int64_t head = 0; head < c.heads; ++head) write_row(*memory, at, head);
      }
    }
  }

  int64_t row_bytes() const { return given.codes ? given.size : 2 * given.size; }
  int64_t head_bytes() const { return given.block * (row_bytes() + (given.codes ? 4 : 0)); }

  // Where nobody looks, behind the context, anything may stand.
  void write_row(std::vector<char>& memory, int64_t at, int64_t head) const {
    const int64_t offset = at % given.block;
    char* first = memory.data() + (table[at / given.block] * given.heads + head) * head_bytes();
    char* row = first + offset * row_bytes();
    const bool seen = at < given.context;
    if (!given.codes) {
      const auto halves = random_halves(given.size);
      const std::vector<uint16_t> nothing(given.size, 0x7fc0);
      std::memcpy(row, seen ? halves.data() : nothing.data(), 2 * given.size);
      return;
    }
    for (int64_t i = 0; i < given.size; ++i) row[i] = static_cast<char>(draw() % 255 - 127);
    const float scale = seen ? static_cast<float>(1 + draw() % 100) * 2e-4f : NAN;
    std::memcpy(first + given.block * row_bytes() + 4 * offset, &scale, 4);
  }

  Cache cache(const std::vector<char>& memory) const {
    return {memory.data(), given.codes ? DType::i8 : DType::bf16, head_bytes() * given.heads,
            head_bytes(), row_bytes(), given.block * row_bytes()};
  }
};

using Attend = void (*)(const Tile&, int64_t, int64_t, float*, const Partial&, int64_t);

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};
using Floats = std::unique_ptr<float, Free>;
Floats floats(int64_t count) {
  return Floats(static_cast<float*>(std::aligned_alloc(64, padded(4 * count, 64))));
}

// Results of the queries [first, first + count) of a sequence: [count][heads][size].
std::vector<uint16_t> attended(const Sequence& s, Attend attend, int64_t first, int64_t count) {
  const Case& c = s.given;
  std::vector<uint16_t> out(count * c.heads * c.size);
  std::vector<Query> queries;
  for (int64_t head = 0; head < c.heads; ++head) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (first + i) * c.heads + head, to = i * c.heads + head;
      queries.push_back({reinterpret_cast<const char*>(s.queries.data() + row * c.size),
                         reinterpret_cast<char*>(out.data() + to * c.size),
                         c.context - c.queries + first + i});
    }
  }
  const Tile tile{.queries = queries.data(), .heads = c.heads, .count = count,
                  .type = DType::bf16, .head_size = c.size, .window = c.window,
                  .scale = 0.3f, .softcap = c.softcap, .table = s.table.data(),
                  .block_size = c.block, .key = s.cache(s.keys), .value = s.cache(s.values)};
  const int64_t width = padded(c.size, 2 * W), vectors = c.heads * count;
  const Floats scratch = floats(scratch_floats(width));
  const Floats memory = floats(partial_floats(vectors, width));
  std::memset(scratch.get(), 0xff, 4 * scratch_floats(width));  // what was not written is no number
  const Partial sums = partial_at(memory.get(), vectors, width);
  attend(tile, 0, (c.context + split_keys - 1) / split_keys, scratch.get(), sums, width);
  finish(tile, sums, width);
  return out;
}

[[noreturn]] void fail(const Case& c, const std::string& what) {
  throw std::runtime_error(std::to_string(c.queries) + " queries of " + std::to_string(c.heads) +
                           " heads of " + std::to_string(c.size) + " in " +
                           std::to_string(c.context) + ": " + what);
}

void check(const Case& c, bool machine) {
  const Sequence s(c);
  const auto many = attended(s, attend_by_tiles<ModelledTiles>, 0, c.queries);
  const auto pairs = attended(s, attend_pairs, 0, c.queries);
  for (size_t i = 0; i < many.size(); ++i) {
    if (!(std::fabs(widened(many[i]) - widened(pairs[i])) <= 0.02f)) fail(c, "far from pairs");
  }
  const int64_t row = c.heads * c.size;
  for (const int64_t count : {1, 3, 16, 19}) {
    for (int64_t first = 0; first + count <= c.queries; first += count) {
      const auto few = attended(s, attend_by_tiles<ModelledTiles>, first, count);
      if (std::memcmp(few.data(), many.data() + first * row, 2 * few.size()) != 0) {
        fail(c, std::to_string(count) + " from " + std::to_string(first) + " differ");
      }
    }
  }
  if (machine && attended(s, attend_by_tiles<MachineTiles>, 0, c.queries) != many) {
    fail(c, "the machine's tiles differ");
  }
}

}  // namespace

int main(int count, char** words) try {
  const bool machine = count > 1 && std::string(words[1]) == "machine";
  if (machine && !tiles_are_given()) {
    std::puts("none");
    return 0;
  }
  for (const int64_t window : {0, 70}) {
    for (const int64_t block : {16, 8, 32}) {
      for (const int64_t size : {64, 80, 128}) check({337, 48, 2, size, block, window}, machine);
    }
    for (const int64_t block : {1, 16, 48}) {
      check({300, 32, 3, 64, block, window, true}, machine);
      check({300, 32, 3, 64, block, window, false, 5.0f}, machine);
    }
    check({30, 30, 1, 64, 16, window}, machine);
    check({600, 96, 1, 64, 16, window}, machine);
    check({513, 1, 8, 64, 16, window}, machine);
  }
  std::puts("good");
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
