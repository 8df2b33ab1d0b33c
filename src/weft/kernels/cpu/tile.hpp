// The arithmetic of paged attention for one tile: a few query vectors for each of some KV heads,
// against a run of those heads' keys and values. tile.cpp is compiled once per instruction set;
// dispatch.hpp picks the widest that this machine runs.
//
// Exactness: the keys of a sequence are cut into splits of `split_keys` at fixed positions. A score
// is one sum over the head size in ascending order, a split's sum of values one over its positions
// in ascending order, and splits are merged in ascending order. So the bits of a query's result
// depend on its own context only: not on the other queries of the tile, on how the splits were
// shared out to threads, or on the batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

enum class DType : int;

inline constexpr int64_t tile_queries = 96;
inline constexpr int64_t split_keys = 256;
inline constexpr int64_t panel_keys = 128;  // converted and packed at a time

// Keys or values of one layer's cache, seen through the block table of one sequence.
struct Cache {
  const char* data;       // block 0, first head of the tile, offset 0
  DType type;
  int64_t block_bytes;    // from one block to the next
  int64_t head_bytes;
  int64_t offset_bytes;   // from one position to the next inside a block
  int64_t scales_bytes;   // from a head of a block to its scales, if the type is scaled
};

// One head of one token: where it lies, its position in the sequence, and how many positions behind
// that it sees. `sink` is the score of a key without a value that it sees besides; -infinity: there
// is none.
struct Query {
  const char* q;
  char* out;
  int64_t position;
  int64_t ahead = 0;
  float sink = -__builtin_inff();
};

struct Tile {
  const Query* queries;   // [heads][count]; the positions are those of the first head for each
  int64_t heads, count;   // heads * count is at most tile_queries
  DType type;             // of the queries and of what comes out
  int64_t head_size;
  int64_t window;         // positions that a query sees up to its own; 0: all
  float scale;
  float softcap;          // 0: none
  const int32_t* table;   // block ids of the sequence
  int64_t block_size;
  Cache key, value;
};

// The small functions here are static so that the linker never shares a copy of them: see tile.cpp.

// The positions [first, end) that query vector i of each head sees.
struct Span {
  int64_t first, end;
};
static inline Span seen_by(const Tile& tile, int64_t i) {
  const int64_t own = tile.queries[i].position + 1, first = own - tile.window;
  return {tile.window == 0 || first < 0 ? 0 : first, own + tile.queries[i].ahead};
}
// Those that any of the queries [first, first + count) sees.
static inline Span seen_by_any(const Tile& tile, int64_t first, int64_t count) {
  Span all = seen_by(tile, first);
  for (int64_t i = first + 1; i < first + count; ++i) {
    const Span one = seen_by(tile, i);
    if (one.first < all.first) all.first = one.first;
    if (one.end > all.end) all.end = one.end;
  }
  return all;
}
static inline Span both(Span a, Span b) {
  return {a.first > b.first ? a.first : b.first, a.end < b.end ? a.end : b.end};
}

// Softmax sums of a tile over some of its keys: for each query vector the largest score, the sum
// of exp(score - largest) and the equally weighted sum of values (rows of `width` floats).
// The vectors of a tile stand in the order of its queries.
struct Partial {
  float* largest;
  float* total;
  float* values;
};

struct Kernels {
  const char* isa;
  int64_t lanes;  // the width of a row is the head size padded to a multiple of it
  // Sum over the splits [first_split, last_split) into `sums`, in order. `scratch` is aligned.
  void (*attend)(const Tile&, int64_t first_split, int64_t last_split, float* scratch,
                 const Partial& sums);
  void (*clear)(const Partial& sums, int64_t count, int64_t width);
  void (*merge)(const Partial& into, const Partial& from, int64_t count, int64_t width);
  // Add the queries' sinks, normalise and write to their outputs. `sums` is destroyed.
  void (*finish)(const Tile&, const Partial& sums);
  void (*convert)(char* to, DType to_type, const char* from, DType from_type, int64_t count);
  // To a scaled type.
  void (*quantise)(char* to, float* scale, DType to_type, const char* from, DType from_type,
                   int64_t count);
};

static inline int64_t padded(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Floats that a Partial of `count` vectors needs, and that `attend` needs for one tile.
static inline int64_t partial_floats(int64_t count, int64_t width) { return count * (width + 2); }
static inline int64_t scratch_floats(int64_t width) {
  return tile_queries * (2 * width + 2 + 2 * split_keys) + (2 * panel_keys + 1) * width +
         2 * split_keys;
}
static inline Partial partial_at(float* memory, int64_t count, int64_t width) {
  return {memory + count * width, memory + count * (width + 1), memory};
}

}  // namespace weft
