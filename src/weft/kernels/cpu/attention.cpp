// Cuts a call of paged attention into independent items and runs them on the thread pool.

#include "attention.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "dispatch.hpp"
#include "lines.hpp"
#include "pool.hpp"
#include "tile.hpp"

namespace weft {
namespace {

// Less work than this (multiply-adds, or numbers copied) is not worth waking another thread.
constexpr int64_t min_shared_work = 400'000;

char* at(const Tensor& tensor, int64_t i, int64_t j) {
  return tensor.as<char>() + (i * tensor.stride[0] + j * tensor.stride[1]) * size_of(tensor.type);
}

// Calls body(place, item) at so many places at most.
void run_items(int places, int64_t count, int64_t work, FunctionRef<void(int, int64_t)> body) {
  if (work >= min_shared_work) return shared_pool().run_places(places, count, body);
  for (int64_t i = 0; i < count; ++i) body(0, i);
}

// ---- writing the new keys and values ----

void write_token(const Kernels& kernels, const Attention& call, int64_t token) {
  const int64_t slot = call.slot_mapping.as<int64_t>()[token];
  const int64_t block = slot / call.block_size, offset = slot % call.block_size;
  const auto write = [&](const Tensor& fresh, const Tensor& cache) {
    for (int64_t head = 0; head < cache.shape[1]; ++head) {
      const int64_t size = fresh.shape[2];
      char *block_head = at(cache, block, head), *from = at(fresh, token, head);
      if (is_scaled(cache.type)) {
        auto* scale = reinterpret_cast<float*>(block_head + call.block_size * size) + offset;
        kernels.quantise(block_head + offset * size, scale, cache.type, from, fresh.type, size);
        continue;
      }
      char* to = block_head + offset * cache.stride[2] * size_of(cache.type);
      kernels.convert(to, cache.type, from, fresh.type, size);
    }
  };
  write(*call.k, call.k_cache);
  if (call.v_cache.data != call.k_cache.data) write(*call.v, call.v_cache);  // or one is both
}

void write_kv(const Kernels& kernels, const Attention& call) {
  constexpr int64_t piece = 64;
  const int64_t tokens = call.q.shape[0];
  const int64_t numbers = 2 * tokens * call.k_cache.shape[1] * call.k_cache.shape[3];
  run_items(shared_pool().threads(), (tokens + piece - 1) / piece, numbers, [&](int, int64_t item) {
    const int64_t end = std::min(tokens, (item + 1) * piece);
    for (int64_t token = item * piece; token < end; ++token) write_token(kernels, call, token);
  });
}

// ---- attention ----

// A row of so few query vectors (decode) is cut along its keys; more tiles are work enough.
constexpr int64_t split_queries = 32;

// A row that is cut along its keys.
struct Row {
  int64_t row, vectors, context;
  int64_t first_split, last_split;
  int64_t same_splits;  // that its table has in common with the table of the next row in order
};

// The sums of one such row; the last of its items to finish merges them.
struct Shared {
  float* sums;   // for each split a Partial for each KV head
  int64_t left;  // KV heads of splits, atomic
};

// A tile over a run of splits: some query vectors of one row; or all vectors of some neighbours in
// the order of rows, whose tables begin with the same blocks, so that these are read once for all.
struct Item {
  int64_t row;             // of the batch, or if it is cut, the place in order
  int64_t rows;            // neighbours; 0: a row that is not cut
  int64_t kv_head, heads;
  int64_t first, count;    // query vectors of a head
  int64_t first_split, last_split;
  int64_t keys;
};

Cache cache_of(const Tensor& cache, int64_t head_size, int64_t kv_head) {
  const int64_t bytes = size_of(cache.type);
  return {
      .data = at(cache, 0, kv_head),
      .type = cache.type,
      .block_bytes = cache.stride[0] * bytes,
      .head_bytes = cache.stride[1] * bytes,
      .offset_bytes = is_scaled(cache.type) ? head_size : cache.stride[2] * bytes,
      .scales_bytes = cache.shape[2] * head_size,
  };
}

// Memory that a thread keeps from call to call.
struct Kept {
  std::vector<Item> items;
  std::vector<Row> rows;
  std::vector<Shared> shared;  // by place in the order of rows
  Lines<float> sums, scratch;  // of rows that are cut, and for each place
};

// The work of one call, cut into items that may run in any order on any thread.
class Work {
 public:
  Work(const Kernels& kernels, const Attention& call, Kept& kept)
      : kernels_(kernels),
        call_(call),
        items_(kept.items),
        rows_(kept.rows),
        shared_(kept.shared),
        kv_heads_(call.k_cache.shape[1]),
        group_(call.q.shape[1] / kv_heads_),
        width_(padded(call.q.shape[2], kernels.lanes)) {
    items_.clear();
    rows_.clear();
    scratch_ = refit(kept.scratch, places_ * scratch_stride_);
    for (int64_t row = 0; row < call.seq_lens.shape[0]; ++row) add_row(row);
    // The largest first, so that no thread is left alone with a large one at the end.
    std::ranges::sort(items_, {}, [](const Item& item) {
      return std::tuple(-item.count * item.keys, item.row, item.kv_head, item.first);
    });
    if (rows_.empty()) return;
    order_rows();
    place_sums(kept.sums);
    add_run(0, static_cast<int64_t>(rows_.size()), 0);
  }

  void run() {
    int64_t work = 0;
    for (const Item& item : items_) {
      work += 2 * item.heads * item.count * item.keys * width_;
    }
    run_items(places_, static_cast<int64_t>(items_.size()), work, [this](int place, int64_t i) {
      run_item(items_[i], scratch_ + place * scratch_stride_);
    });
  }

 private:
  int64_t tokens_of(int64_t row) const {
    const int32_t* start = call_.query_start.as<int32_t>() + row;
    return start[1] - start[0];
  }
  // Positions behind its own that a query sees.
  int64_t ahead_of(int64_t position, int64_t context) const {
    if (call_.causal) return 0;
    const int64_t left = context - 1 - position;
    return call_.window == 0 ? left : std::min(left, call_.window - 1);
  }
  const int32_t* table_of(int64_t row) const {
    return call_.block_tables.as<int32_t>() + row * call_.block_tables.stride[0];
  }

  void add_row(int64_t row) {
    const int64_t tokens = tokens_of(row), vectors = tokens * group_;
    const int64_t context = call_.seq_lens.as<int32_t>()[row], past = context - tokens;
    const auto first_seen = [&](int64_t position) {
      return call_.window == 0 ? 0 : std::max<int64_t>(0, position + 1 - call_.window);
    };
    if (vectors == 0) return;
    if (vectors <= split_queries) {
      const int64_t last_split = (context - 1) / split_keys + 1;
      rows_.push_back({row, vectors, context, first_seen(past) / split_keys, last_split, 0});
      return;
    }
    for (int64_t kv_head = 0; kv_head < kv_heads_; ++kv_head) {
      for (int64_t first = 0; first < vectors; first += tile_queries) {
        const int64_t count = std::min(tile_queries, vectors - first);
        const int64_t lo = first_seen(past + first / group_);
        const int64_t last = past + (first + count - 1) / group_;
        const int64_t hi = last + 1 + ahead_of(last, context);
        items_.push_back({row, 0, kv_head, 1, first, count, lo / split_keys,
                          (hi - 1) / split_keys + 1, hi - lo});
      }
    }
  }

  // Rows whose tables begin alike become neighbours. With a window, what a row has given back of
  // the prefix may be anything, so there each row reads its own.
  void order_rows() {
    if (call_.window > 0) return;
    const auto blocks = [&](const Row& row) { return row.context / call_.block_size; };
    std::ranges::sort(rows_, [&](const Row& a, const Row& b) {
      const int32_t *left = table_of(a.row), *right = table_of(b.row);
      const auto order = std::lexicographical_compare_three_way(left, left + blocks(a), right,
                                                                right + blocks(b));
      return order < 0 || (order == 0 && a.row < b.row);
    });
    for (size_t i = 0; i + 1 < rows_.size(); ++i) {
      const int32_t* table = table_of(rows_[i].row);
      const int64_t most = std::min(blocks(rows_[i]), blocks(rows_[i + 1]));
      const int32_t* end = std::mismatch(table, table + most, table_of(rows_[i + 1].row)).first;
      rows_[i].same_splits = (end - table) * call_.block_size / split_keys;
    }
  }

  void place_sums(Lines<float>& memory) {
    int64_t floats = 0;
    for (const Row& row : rows_) floats += row_floats(row);
    float* next = refit(memory, floats);
    shared_.clear();
    for (const Row& row : rows_) {
      shared_.push_back({next, kv_heads_ * (row.last_split - row.first_split)});
      next += row_floats(row);
    }
  }
  int64_t row_floats(const Row& row) const {
    return (row.last_split - row.first_split) * kv_heads_ * partial_floats(row.vectors, width_);
  }
  Partial split_sums(int64_t place, int64_t split, int64_t kv_head) const {
    const Row& row = rows_[place];
    const int64_t number = (split - row.first_split) * kv_heads_ + kv_head;
    return partial_at(shared_[place].sums + number * partial_floats(row.vectors, width_),
                      row.vectors, width_);
  }

  // The rows at [first, last) in order have all splits before `split` in common, and these are
  // dealt with. Items for each further one that they share, then the same for each part that goes
  // on together.
  void add_run(int64_t first, int64_t last, int64_t split) {
    if (last - first == 1) {
      const Row& row = rows_[first];
      split = std::max(split, row.first_split);
      for (; split < row.last_split; ++split) add_split(first, split);
      return;
    }
    int64_t common = rows_[first].same_splits;
    for (int64_t i = first; i + 1 < last; ++i) common = std::min(common, rows_[i].same_splits);
    for (; split < common; ++split) add_shared_split(first, last, split);
    for (int64_t i = first + 1; i <= last; ++i) {
      if (i < last && rows_[i - 1].same_splits > common) continue;
      add_run(first, i, split);
      first = i;
    }
  }

  // Blocks are read fastest from front to back, that is all heads of a block together.
  void add_split(int64_t place, int64_t split) {
    const int64_t vectors = rows_[place].vectors;
    const int64_t most = std::min(kv_heads_, std::max<int64_t>(1, tile_queries / vectors));
    for (int64_t kv_head = 0; kv_head < kv_heads_; kv_head += most) {
      const int64_t heads = std::min(most, kv_heads_ - kv_head);
      items_.push_back({place, 1, kv_head, heads, 0, vectors, split, split + 1, split_keys});
    }
  }

  // As many rows at a time as a tile takes.
  void add_shared_split(int64_t first, int64_t last, int64_t split) {
    while (first < last) {
      Item item{first, 0, 0, 1, 0, 0, split, split + 1, split_keys};
      while (first < last && item.count + rows_[first].vectors <= tile_queries) {
        item.count += rows_[first++].vectors;
        ++item.rows;
      }
      for (; item.kv_head < kv_heads_; ++item.kv_head) items_.push_back(item);
    }
  }

  // Fill in the query vectors [first, first + count) of a row.
  void add_queries(int64_t row, int64_t kv_head, int64_t first, int64_t count, Query* to) const {
    const int64_t start = call_.query_start.as<int32_t>()[row];
    const int64_t context = call_.seq_lens.as<int32_t>()[row], past = context - tokens_of(row);
    for (int64_t i = first; i < first + count; ++i) {
      const int64_t token = i / group_, head = kv_head * group_ + i % group_;
      *to = {at(call_.q, start + token, head), at(call_.out, start + token, head), past + token,
             ahead_of(past + token, context)};
      if (call_.sinks) to->sink = call_.sinks->as<float>()[head];
      ++to;
    }
  }

  Tile tile_of(int64_t row, int64_t kv_head, int64_t heads, int64_t count,
               const Query* queries) const {
    return {
        .queries = queries,
        .heads = heads,
        .count = count,
        .type = call_.q.type,
        .head_size = call_.q.shape[2],
        .window = call_.window,
        .scale = call_.scale,
        .softcap = call_.softcap,
        .table = table_of(row),
        .block_size = call_.block_size,
        .key = cache_of(call_.k_cache, call_.q.shape[2], kv_head),
        .value = cache_of(call_.v_cache, call_.q.shape[2], kv_head),
    };
  }

  // `sums`: memory of this thread.
  void run_item(const Item& item, float* sums) const {
    float* const scratch = sums + own_floats_;
    const Partial all = partial_at(sums, item.heads * item.count, width_);
    Query queries[tile_queries], *next = queries;
    if (item.rows == 0) {
      add_queries(item.row, item.kv_head, item.first, item.count, queries);
      const Tile tile = tile_of(item.row, item.kv_head, 1, item.count, queries);
      kernels_.attend(tile, item.first_split, item.last_split, scratch, all);
      return kernels_.finish(tile, all);
    }
    for (int64_t head = item.kv_head; head < item.kv_head + item.heads; ++head) {
      for (int64_t i = item.row; i < item.row + item.rows; ++i) {
        add_queries(rows_[i].row, head, 0, rows_[i].vectors, next);
        next += rows_[i].vectors;
      }
    }
    const Tile tile = tile_of(rows_[item.row].row, item.kv_head, item.heads, item.count, queries);
    kernels_.attend(tile, item.first_split, item.last_split, scratch, all);
    keep(item, all);
    for (int64_t i = item.row; i < item.row + item.rows; ++i) {
      const int64_t left =
          std::atomic_ref(shared_[i].left).fetch_sub(item.heads, std::memory_order_acq_rel);
      if (left == item.heads) merge_row(i, sums);
    }
  }

  // Copy each row's part of an item's sums to the row.
  void keep(const Item& item, const Partial& from) const {
    int64_t first = 0;
    for (int64_t head = item.kv_head; head < item.kv_head + item.heads; ++head) {
      for (int64_t i = item.row; i < item.row + item.rows; ++i) {
        const int64_t vectors = rows_[i].vectors;
        const Partial to = split_sums(i, item.first_split, head);
        std::copy_n(from.largest + first, vectors, to.largest);
        std::copy_n(from.total + first, vectors, to.total);
        std::copy_n(from.values + first * width_, vectors * width_, to.values);
        first += vectors;
      }
    }
  }

  void merge_row(int64_t place, float* memory) const {
    const Row& row = rows_[place];
    const Partial all = partial_at(memory, row.vectors, width_);
    Query queries[split_queries];
    for (int64_t head = 0; head < kv_heads_; ++head) {
      kernels_.clear(all, row.vectors, width_);
      for (int64_t split = row.first_split; split < row.last_split; ++split) {
        kernels_.merge(all, split_sums(place, split, head), row.vectors, width_);
      }
      add_queries(row.row, head, 0, row.vectors, queries);
      kernels_.finish(tile_of(row.row, head, 1, row.vectors, queries), all);
    }
  }

  const Kernels& kernels_;
  const Attention& call_;
  std::vector<Item>& items_;
  std::vector<Row>& rows_;
  std::vector<Shared>& shared_;
  const int64_t kv_heads_;
  const int64_t group_;  // query heads of a KV head
  const int64_t width_;  // head size, padded to whole vectors
  const int places_ = shared_pool().threads();
  const int64_t own_floats_ = padded(partial_floats(tile_queries, width_), 16);
  const int64_t scratch_stride_ = padded(own_floats_ + scratch_floats(width_), 16);
  float* scratch_ = nullptr;  // [places, stride]
};

}  // namespace

void paged_attention(const Attention& call) {
  check(call);
  const Kernels& kernels = *chosen_isa().attention;
  // All writes come before all reads: rows may share blocks.
  if (call.k) write_kv(kernels, call);
  thread_local Kept kept;
  Work(kernels, call, kept).run();
}

int attention_threads() { return shared_pool().threads(); }

void set_attention_threads(int threads, std::vector<int> cpus, std::vector<int> nodes) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
  const auto fit = [&](const std::vector<int>& numbers) {
    const auto fits = [](int number) { return number >= 0 && number < CPU_SETSIZE; };
    return numbers.empty() ||
           (static_cast<int>(numbers.size()) == threads && std::ranges::all_of(numbers, fits));
  };
  if (!fit(cpus) || !fit(nodes)) {
    throw std::invalid_argument("each thread needs a processor and a node of its own");
  }
  shared_pool().resize(threads, std::move(cpus), std::move(nodes));
}

}  // namespace weft
