// Cuts a call of paged attention into independent items and runs them on the thread pool.

#include "attention.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "dispatch.hpp"
#include "pool.hpp"
#include "tile.hpp"

namespace weft {
namespace {

// Less work than this (multiply-adds, or numbers copied) is not worth waking another thread.
constexpr int64_t min_shared_work = 400'000;

char* at(const Tensor& tensor, int64_t i, int64_t j) {
  return tensor.as<char>() + (i * tensor.stride[0] + j * tensor.stride[1]) * size_of(tensor.type);
}

void run_items(int64_t count, int64_t work, const std::function<void(int64_t)>& body) {
  if (work >= min_shared_work) return shared_pool().run(count, body);
  for (int64_t i = 0; i < count; ++i) body(i);
}

// ---- writing the new keys and values ----

void write_token(const Kernels& kernels, const Attention& call, int64_t token) {
  const int64_t slot = call.slots.as<int64_t>()[token];
  const int64_t block = slot / call.block_size, offset = slot % call.block_size;
  const auto write = [&](const Tensor& fresh, const Tensor& cache) {
    for (int64_t head = 0; head < cache.shape[1]; ++head) {
      char* to = at(cache, block, head) + offset * cache.stride[2] * size_of(cache.type);
      kernels.convert(to, cache.type, at(fresh, token, head), fresh.type, cache.shape[3]);
    }
  };
  write(*call.k, call.k_cache);
  write(*call.v, call.v_cache);
}

void write_kv(const Kernels& kernels, const Attention& call) {
  constexpr int64_t piece = 64;
  const int64_t tokens = call.q.shape[0];
  const int64_t numbers = 2 * tokens * call.k_cache.shape[1] * call.k_cache.shape[3];
  run_items((tokens + piece - 1) / piece, numbers, [&](int64_t item) {
    const int64_t end = std::min(tokens, (item + 1) * piece);
    for (int64_t token = item * piece; token < end; ++token) write_token(kernels, call, token);
  });
}

// ---- attention ----

// Split sums of one tile that several items compute; the last of them to finish merges.
struct Shared {
  float* sums;  // one Partial for each split
  int64_t first_split, splits;
  std::atomic<int64_t> left;
};

struct Item {
  int64_t row, kv_head, first, count;  // query vectors of the row
  int64_t first_split, last_split;
  Shared* shared;                      // none: the item alone computes its tile
  int64_t keys;
};

KVHead head_of(const Tensor& cache, int64_t kv_head) {
  const int64_t bytes = size_of(cache.type);
  return {at(cache, 0, kv_head), cache.type, cache.stride[0] * bytes, cache.stride[2] * bytes};
}

Tile tile_of(const Attention& call, const Item& item) {
  const int64_t group = call.q.shape[1] / call.k_cache.shape[1];
  const int32_t* start = call.query_start.as<int32_t>() + item.row;
  const int64_t bytes = size_of(call.q.type);
  return {
      .q = at(call.q, start[0], item.kv_head * group),
      .out = at(call.out, start[0], item.kv_head * group),
      .type = call.q.type,
      .q_token_bytes = call.q.stride[0] * bytes,
      .q_head_bytes = call.q.stride[1] * bytes,
      .out_token_bytes = call.out.stride[0] * bytes,
      .out_head_bytes = call.out.stride[1] * bytes,
      .first = item.first,
      .count = item.count,
      .group = group,
      .head_size = call.q.shape[2],
      .past = call.context_len.as<int32_t>()[item.row] - (start[1] - start[0]),
      .window = call.window,
      .scale = call.scale,
      .softcap = call.softcap,
      .table = call.block_tables.as<int32_t>() + item.row * call.block_tables.stride[0],
      .block_size = call.block_size,
      .key = head_of(call.k_cache, item.kv_head),
      .value = head_of(call.v_cache, item.kv_head),
  };
}

float* thread_memory(int64_t floats) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (size < floats) {
    memory.reset();
    size = 0;
    memory.reset(new float[floats]);
    size = floats;
  }
  return memory.get();
}

// The work of one call, cut into items that may run in any order on any thread.
class Work {
 public:
  Work(const Kernels& kernels, const Attention& call)
      : kernels_(kernels), call_(call), width_(padded(call.q.shape[2], kernels.lanes)) {
    for (int64_t row = 0; row < call.context_len.shape[0]; ++row) add_row(row);
    place_shared_sums();
    // The largest first, so that no thread is left alone with a large one at the end.
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
      return a.count * a.keys > b.count * b.keys;
    });
  }

  void run() {
    int64_t work = 0;
    for (const Item& item : items_) work += 2 * item.count * item.keys * width_;
    run_items(static_cast<int64_t>(items_.size()), work,
              [this](int64_t i) { run_item(items_[i]); });
  }

 private:
  // One tile of a few queries (decode) is cut along its keys; more tiles are work enough.
  void add_row(int64_t row) {
    const int32_t* start = call_.query_start.as<int32_t>() + row;
    const int64_t group = call_.q.shape[1] / call_.k_cache.shape[1];
    const int64_t vectors = (start[1] - start[0]) * group;
    for (int64_t kv_head = 0; kv_head < call_.k_cache.shape[1]; ++kv_head) {
      for (int64_t first = 0; first < vectors; first += tile_queries) {
        Item item{row, kv_head, first, std::min(tile_queries, vectors - first), 0, 0, nullptr, 0};
        const Tile tile = tile_of(call_, item);
        const int64_t lo = first_seen(tile, first);
        const int64_t hi = last_seen(tile, first + item.count - 1) + 1;
        item.first_split = lo / split_keys;
        item.last_split = (hi - 1) / split_keys + 1;
        item.keys = hi - lo;
        if (vectors <= tile_queries && item.last_split - item.first_split > 1) {
          add_splits(item);
        } else {
          items_.push_back(item);
        }
      }
    }
  }

  void add_splits(Item item) {
    const int64_t first = item.first_split, last = item.last_split;
    item.shared = new Shared{nullptr, first, last - first, last - first};
    shared_.emplace_back(item.shared);
    shared_floats_ += (last - first) * partial_floats(item.count, width_);
    item.keys = split_keys;
    for (int64_t split = first; split < last; ++split) {
      item.first_split = split;
      item.last_split = split + 1;
      items_.push_back(item);
    }
  }

  void place_shared_sums() {
    if (shared_.empty()) return;
    memory_.reset(new float[shared_floats_]);
    float* next = memory_.get();
    const Shared* placed = nullptr;
    for (const Item& item : items_) {
      if (item.shared == nullptr || item.shared == placed) continue;
      item.shared->sums = next;
      next += item.shared->splits * partial_floats(item.count, width_);
      placed = item.shared;
    }
  }

  void run_item(const Item& item) const {
    const Tile tile = tile_of(call_, item);
    const int64_t sums_floats = partial_floats(item.count, width_);
    float* own = thread_memory(scratch_floats(width_) + partial_floats(tile_queries, width_));
    float* scratch = own + partial_floats(tile_queries, width_);
    Partial sums = partial_at(own, item.count);
    if (item.shared == nullptr) {
      kernels_.attend(tile, item.first_split, item.last_split, scratch, sums);
      return kernels_.finish(tile, sums);
    }
    Shared& shared = *item.shared;
    float* mine = shared.sums + (item.first_split - shared.first_split) * sums_floats;
    kernels_.attend(tile, item.first_split, item.last_split, scratch,
                    partial_at(mine, item.count));
    if (shared.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    kernels_.clear(sums, item.count, width_);
    for (int64_t i = 0; i < shared.splits; ++i) {
      kernels_.merge(sums, partial_at(shared.sums + i * sums_floats, item.count), item.count,
                     width_);
    }
    kernels_.finish(tile, sums);
  }

  const Kernels& kernels_;
  const Attention& call_;
  const int64_t width_;  // head size, padded to whole vectors
  std::vector<Item> items_;
  std::vector<std::unique_ptr<Shared>> shared_;
  int64_t shared_floats_ = 0;
  std::unique_ptr<float[]> memory_;
};

}  // namespace

void paged_attention(const Attention& call) {
  check(call);
  const Kernels& kernels = *chosen_isa().attention;
  // All writes come before all reads: rows may share blocks.
  if (call.k) write_kv(kernels, call);
  Work(kernels, call).run();
}

int attention_threads() { return shared_pool().threads(); }

void set_attention_threads(int threads) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
  shared_pool().resize(threads);
}

}  // namespace weft
