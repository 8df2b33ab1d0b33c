// The arithmetic of paged attention for one tile: a few query vectors of one sequence that share a
// KV head, against a run of that head's keys and values. tile.cpp is compiled once per instruction
// set; dispatch.hpp picks the widest that this machine runs.
//
// Exactness: the keys of a sequence are cut into splits of `split_keys` at fixed positions, and
// into groups of `group_keys` inside a split. What a query adds to its sums, and in what order,
// depends on positions only: not on the other queries of the tile, on how the splits were shared
// out to threads, or on the batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

enum class DType : int;

inline constexpr int64_t tile_queries = 32;
inline constexpr int64_t split_keys = 256;
inline constexpr int64_t group_keys = 16;

// One KV head of one layer's cache, seen through the block table of one sequence.
struct KVHead {
  const char* data;       // block 0, this head, offset 0
  DType type;
  int64_t block_bytes;    // from one block to the next
  int64_t offset_bytes;   // from one position to the next inside a block
};

// Query vector i (first <= i < first + count) is head i % group of token i / group of the sequence.
struct Tile {
  const char* q;          // token 0 of the sequence, first head of the group
  char* out;
  DType type;             // of q and out
  int64_t q_token_bytes, q_head_bytes;
  int64_t out_token_bytes, out_head_bytes;
  int64_t first, count, group;
  int64_t head_size;
  int64_t past;           // position of token 0
  int64_t window;         // positions that a query sees, itself included; 0: all
  float scale;
  float softcap;          // 0: none
  const int32_t* table;   // block ids of the sequence
  int64_t block_size;
  KVHead key, value;
};

// The small functions here are static so that the linker never shares a copy of them: see tile.cpp.

// Position of the last key, and of the first, that query vector i sees.
static inline int64_t last_seen(const Tile& tile, int64_t i) { return tile.past + i / tile.group; }
static inline int64_t first_seen(const Tile& tile, int64_t i) {
  const int64_t first = last_seen(tile, i) + 1 - tile.window;
  return tile.window == 0 || first < 0 ? 0 : first;
}

// Softmax sums of a tile over some of its keys: for each query vector the largest score, the sum
// of exp(score - largest) and the equally weighted sum of values (rows of `padded_head` floats).
struct Partial {
  float* largest;
  float* total;
  float* values;
};

struct Kernels {
  const char* isa;
  int64_t lanes;
  // Sum over the splits [first_split, last_split) into `sums`, in order.
  void (*attend)(const Tile&, int64_t first_split, int64_t last_split, float* scratch,
                 const Partial& sums);
  void (*clear)(const Partial& sums, int64_t count, int64_t width);
  void (*merge)(const Partial& into, const Partial& from, int64_t count, int64_t width);
  // Normalise and write to `tile.out`. `sums` is destroyed.
  void (*finish)(const Tile&, const Partial& sums);
  void (*convert)(char* to, DType to_type, const char* from, DType from_type, int64_t count);
};

static inline int64_t padded(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Floats that `attend` needs for one tile, and those that a Partial of `count` vectors needs.
static inline int64_t partial_floats(int64_t count, int64_t width) { return count * (width + 2); }
static inline int64_t scratch_floats(int64_t width) {
  return tile_queries * (width + split_keys) + group_keys * width + width +
         partial_floats(tile_queries, width);
}
static inline Partial partial_at(float* memory, int64_t count) {
  return {memory, memory + count, memory + 2 * count};
}

}  // namespace weft
