// The host worker: claims jobs, copies their rows together, attends, and shows the results.

#include "host.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.hpp"

namespace weft {
namespace {

constexpr int64_t spin_ns = 100'000;  // for further jobs, before the worker sleeps

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

int64_t block_size(const HostLayer& layer) { return layer.k_cache.shape[2]; }

int64_t blocks_of(const HostLayer& layer, int64_t context) {
  return (context + block_size(layer) - 1) / block_size(layer);
}

int64_t q_numbers(const HostLayer& layer) { return layer.heads * layer.head_size; }
int64_t kv_numbers(const HostLayer& layer) { return layer.k_cache.shape[1] * layer.head_size; }

template <typename T>
Tensor vector_of(const char* name, std::vector<T>& numbers, DType type) {
  Tensor tensor{name, numbers.data(), type, 1};
  tensor.shape[0] = static_cast<int64_t>(numbers.size());
  tensor.stride[0] = 1;
  return tensor;
}

// Leaves the mailbox as another worker can go on with it, also when memory runs out.
struct Detach {
  const Mailbox& mailbox;
  ~Detach() { mailbox.reclaim(static_cast<uint32_t>(getpid())); }
};

}  // namespace

HostWorker::HostWorker(const Mailbox& mailbox, std::vector<HostLayer> layers, int threads,
                       std::vector<int> cpus)
    : mailbox_(mailbox), layers_(std::move(layers)), cpus_(std::move(cpus)), pool_(1) {
  if (threads < 1 || (!cpus_.empty() && cpus_.size() != static_cast<size_t>(threads))) {
    fail("a worker needs a thread, and a processor for each of its threads or for none");
  }
  const auto fits = [](int cpu) { return cpu >= 0 && cpu < CPU_SETSIZE; };
  if (!std::ranges::all_of(cpus_, fits)) fail("a worker has a processor that does not exist");
  const MailboxSizes& sizes = mailbox_.sizes();
  if (layers_.size() != sizes.layers) {
    fail("the mailbox is for " + std::to_string(sizes.layers) + " layers, not for " +
         std::to_string(layers_.size()));
  }
  query_start_.assign(1, 0);
  for (const HostLayer& layer : layers_) {
    check(call_of(layer));
    if (q_numbers(layer) > sizes.q_width || kv_numbers(layer) > sizes.kv_width ||
        layer.group < 0 || layer.group >= sizes.groups) {
      fail("a layer does not fit the sizes of the mailbox");
    }
  }
  pool_.resize(threads, cpus_);
}

void HostWorker::stop() {
  stopping_ = true;
  ring::Doorbell<1>& bell = mailbox_.header().to_worker;
  std::atomic_ref(bell.rung[0].value).fetch_add(1);
  ring::futex_wake(&bell.rung[0].value);
}

void HostWorker::attach() {
  uint32_t other = 0;
  std::atomic_ref worker(mailbox_.header().worker);
  if (!worker.compare_exchange_strong(other, static_cast<uint32_t>(getpid()))) {
    fail("process " + std::to_string(other) + " serves the mailbox already");
  }
}

void HostWorker::run() {
  const Detach detach{mailbox_};
  const PoolScope scope(pool_);
  if (!cpus_.empty()) stay_on(cpus_[0]);
  ring::Doorbell<1>& bell = mailbox_.header().to_worker;
  ring::wake_up(bell);  // the worker before may have died asleep
  while (!stopping_) {
    const uint32_t heard = ring::load(bell.rung[0].value);
    if (work()) continue;
    const auto news = [&] { return stopping_ || ring::load(bell.rung[0].value) != heard; };
    if (ring::spin(news, spin_ns)) continue;
    if (!ring::go_to_sleep(bell, heard)) continue;
    const ring::Waited waited[] = {{&bell.rung[0].value, heard}};
    ring::futex_wait_any(waited, -1);
    ring::wake_up(bell);
  }
}

// Computes the jobs of a layer; false if there are none.
bool HostWorker::work() {
  uint32_t layer = 0;
  if (!oldest_layer(layer)) return false;
  const int64_t start = ring::now_ns();
  claim_all(layer);
  if (!rows_.empty()) copy_tables(layer);
  if (!rows_.empty()) {
    Fault fault = Fault::None;
    try {
      copy_rows(layers_[layer]);
      paged_attention(call_of(layers_[layer]));
    } catch (const std::exception&) {
      fault = Fault::Kernel;
    }
    show_results(layer, fault);
  }
  MailboxHeader& header = mailbox_.header();
  add(header.worker_counters.calls, 1);
  add(header.worker_counters.busy_ns, ring::now_ns() - start);
  notify(header.to_client, woken_);
  return true;
}

bool HostWorker::oldest_layer(uint32_t& layer) const {
  uint64_t oldest = 0;
  bool found = false;
  for (uint32_t slot = 0; slot < mailbox_.sizes().slots; ++slot) {
    const job::Word seen = job::look(mailbox_.word(slot));
    if (seen.state != job::State::Submitted || mailbox_.place_of(slot) != 0) continue;
    const std::atomic_ref order(mailbox_.record(slot).order);
    const uint64_t number = order.load(std::memory_order_relaxed);
    if (found && number >= oldest) continue;
    oldest = number;
    layer = seen.layer;
    found = true;
  }
  return found;
}

// Makes the Submitted jobs of a layer the rows of the next call. Malformed ones fail.
void HostWorker::claim_all(uint32_t layer) {
  rows_.clear();
  const job::Word wanted{job::State::Submitted, layer};
  for (uint32_t slot = 0; slot < mailbox_.sizes().slots; ++slot) {
    if (ring::load(mailbox_.word(slot)) != wanted.bits()) continue;
    if (!mailbox_.claim(slot, wanted, 0)) continue;
    const Row row{slot, mailbox_.record(slot).context};
    if (const Fault fault = fault_of(layer, row); fault != Fault::None) {
      finish(layer, slot, fault);
    } else {
      rows_.push_back(row);
    }
  }
}

Fault HostWorker::fault_of(uint32_t layer, const Row& row) const {
  if (layer >= layers_.size()) return Fault::Layer;
  const HostLayer& spec = layers_[layer];
  const JobRecord& record = mailbox_.record(row.slot);
  if (record.q_numbers != q_numbers(spec)) return Fault::Shape;
  if (record.kv_numbers != (spec.writes ? kv_numbers(spec) : 0)) return Fault::Shape;
  const int64_t blocks =
      std::min<int64_t>(*mailbox_.table(spec.group, row.slot), mailbox_.sizes().table_width);
  const bool fits = row.context >= 1 && blocks_of(spec, row.context) <= blocks &&
                    row.context <= std::numeric_limits<int32_t>::max();
  return fits ? Fault::None : Fault::Context;
}

// Copies the tables of the rows. Those that name blocks which do not exist fail.
void HostWorker::copy_tables(uint32_t layer) {
  const HostLayer& spec = layers_[layer];
  width_ = 0;
  for (const Row& row : rows_) width_ = std::max(width_, blocks_of(spec, row.context));
  tables_.resize(rows_.size() * width_);
  slot_mapping_.resize(rows_.size());
  seq_lens_.resize(rows_.size());
  int64_t good = 0;
  for (const Row row : rows_) {
    if (copy_table(spec, row, good)) {
      rows_[good++] = row;
    } else {
      finish(layer, row.slot, Fault::Block);
    }
  }
  rows_.resize(good);
  tables_.resize(good * width_);
  slot_mapping_.resize(good);
  seq_lens_.resize(good);
  query_start_.resize(good + 1);
  std::iota(query_start_.begin(), query_start_.end(), 0);
}

// False if a block that the row sees does not exist.
bool HostWorker::copy_table(const HostLayer& layer, const Row& row, int64_t place) {
  int32_t* table = tables_.data() + place * width_;
  const int64_t size = block_size(layer), position = row.context - 1;
  const int64_t seen = layer.window == 0 ? 0 : std::max<int64_t>(0, row.context - layer.window);
  const int64_t blocks = blocks_of(layer, row.context);
  std::copy_n(mailbox_.table(layer.group, row.slot) + 1, blocks, table);
  for (int64_t i = seen / size; i < blocks; ++i) {
    if (table[i] < 0 || table[i] >= layer.k_cache.shape[0]) return false;
  }
  slot_mapping_[place] = table[position / size] * size + position % size;
  seq_lens_[place] = static_cast<int32_t>(row.context);
  return true;
}

void HostWorker::copy_rows(const HostLayer& layer) {
  const size_t q_bytes = q_numbers(layer) * size_of(mailbox_.type());
  const size_t kv_bytes = kv_numbers(layer) * size_of(mailbox_.type());
  q_.resize(rows_.size() * q_bytes);
  out_.resize(rows_.size() * q_bytes);
  k_.resize(rows_.size() * kv_bytes);
  v_.resize(rows_.size() * kv_bytes);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const uint32_t slot = rows_[i].slot;
    std::memcpy(q_.data() + i * q_bytes, mailbox_.q(slot), q_bytes);
    if (!layer.writes) continue;
    std::memcpy(k_.data() + i * kv_bytes, mailbox_.k(slot), kv_bytes);
    std::memcpy(v_.data() + i * kv_bytes, mailbox_.v(slot), kv_bytes);
  }
}

Attention HostWorker::call_of(const HostLayer& layer) {
  const auto rows = static_cast<int64_t>(rows_.size());
  const auto view = [&](const char* name, std::vector<char>& memory, int64_t heads) {
    const int64_t columns = heads * layer.head_size;
    return heads_of(name, memory.data(), mailbox_.type(), rows, columns, 0, heads, layer.head_size);
  };
  Attention call{
      .out = view("out", out_, layer.heads),
      .q = view("q", q_, layer.heads),
      .k = std::nullopt,
      .v = std::nullopt,
      .k_cache = layer.k_cache,
      .v_cache = layer.v_cache,
      .block_tables = {"block_tables", tables_.data(), DType::i32, 2, {rows, width_}, {width_, 1}},
      .query_start = vector_of("query_start", query_start_, DType::i32),
      .seq_lens = vector_of("seq_lens", seq_lens_, DType::i32),
      .slot_mapping = vector_of("slot_mapping", slot_mapping_, DType::i64),
      .block_size = block_size(layer),
      .window = layer.window,
      .scale = layer.scale,
      .softcap = layer.softcap,
      .sinks = std::nullopt,
  };
  if (!layer.sinks.empty()) {
    call.sinks = vector_of("sinks", const_cast<std::vector<float>&>(layer.sinks), DType::f32);
  }
  if (layer.writes) {
    call.k = view("k", k_, layer.k_cache.shape[1]);
    call.v = view("v", v_, layer.k_cache.shape[1]);
  }
  return call;
}

void HostWorker::show_results(uint32_t layer, Fault fault) {
  const size_t bytes = q_numbers(layers_[layer]) * size_of(mailbox_.type());
  for (size_t i = 0; i < rows_.size(); ++i) {
    const uint32_t slot = rows_[i].slot;
    if (fault == Fault::None) std::memcpy(mailbox_.out(slot), out_.data() + i * bytes, bytes);
    finish(layer, slot, fault);
  }
}

void HostWorker::finish(uint32_t layer, uint32_t slot, Fault fault) {
  JobRecord& record = mailbox_.record(slot);
  WorkerCounters& counters = mailbox_.header().worker_counters;
  record.fault = fault;
  const uint64_t round_trip = std::max<int64_t>(0, ring::now_ns() - record.submitted_ns);
  job::finish(mailbox_.word(slot), layer,
              fault == Fault::None ? job::State::Done : job::State::Failed);
  add(counters.jobs, 1);
  add(counters.failed, fault != Fault::None);
  add(counters.round_trip_ns, round_trip);
  raise(counters.longest_round_trip_ns, round_trip);
}

}  // namespace weft
