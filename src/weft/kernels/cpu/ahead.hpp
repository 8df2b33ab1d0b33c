// Prefetching of the KV blocks of a tile, in the order in which attention reads them. Included by
// tile.cpp alone: all of it has internal linkage.
#pragma once

#include "tile.hpp"

namespace weft {
namespace {

// Starts the lines of blocks on their way, in the order in which they will be used, a few at a time
// between other work. They go to the second cache: the first one waits for so few lines at once that
// a core would read blocks in a random order at a third of its rate, and the hardware sees no stream
// in them.
class Ahead {
 public:
  // How many positions are read of one head before those of the next.
  struct Steps {
    int64_t keys, values;
  };

  // Of the splits [first, last), the positions in `seen`: keys and then values of each, by pieces
  // of so many positions, in each the heads in turn.
  Ahead(const Tile& tile, Steps steps, Span seen, int64_t first, int64_t last)
      : tile_(tile), seen_(seen), steps_(steps), last_split_(last), split_(first),
        cache_(&tile.key) {
    begin();
    lines(distance);
  }

  // Where the next `count` bytes begin, for a caller that fetches them itself, step by step. At the
  // ends of blocks they are fetched at once, and the caller is sent where it does no harm.
  const char* bytes(int64_t count) {
    const char* from = at_;
    if (end_ - at_ < count) {
      lines((count + 63) / 64);
      return from;
    }
    at_ += count;
    if (at_ >= end_) go_on();
    return from;
  }

  void lines(int64_t count) {
    while (count > 0 && at_ < end_) {
      const int64_t left = (end_ - at_ + 63) / 64, now = count < left ? count : left;
      for (int64_t i = 0; i < now; ++i) __builtin_prefetch(at_ + 64 * i, 0, 2);
      at_ += 64 * now;
      count -= now;
      if (at_ >= end_) go_on();
    }
  }

 private:
  static constexpr int64_t distance = 192;

  void begin() {
    if (split_ >= last_split_) return;
    const int64_t start = split_ * split_keys;
    const Span span = both(seen_, {start, start + split_keys});
    piece_ = block_ = span.first / tile_.block_size;
    end_block_ = (span.end - 1) / tile_.block_size + 1;
    head_ = 0;
    place();
  }
  void place() {
    at_ = cache_->data + tile_.table[block_] * cache_->block_bytes + head_ * cache_->head_bytes;
    end_ = at_ + cache_->head_bytes;
  }
  void go_on() {
    const int64_t step = cache_ == &tile_.key ? steps_.keys : steps_.values;
    const int64_t blocks = step > tile_.block_size ? step / tile_.block_size : 1;
    const int64_t most = piece_ + blocks, end = most < end_block_ ? most : end_block_;
    if (++block_ < end) return place();
    block_ = piece_;
    if (++head_ < tile_.heads) return place();
    head_ = 0;
    piece_ = block_ = end;
    if (piece_ < end_block_) return place();
    if (cache_ == &tile_.value) ++split_;
    cache_ = cache_ == &tile_.key ? &tile_.value : &tile_.key;
    begin();
  }

  const Tile& tile_;
  const Span seen_;
  const Steps steps_;
  const int64_t last_split_;
  int64_t split_, piece_, block_, end_block_, head_;
  const Cache* cache_;
  const char *at_ = nullptr, *end_ = nullptr;
};

}  // namespace
}  // namespace weft
