// The layout of a mailbox, and its client's side.

#include "mailbox.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tile.hpp"

namespace weft {
namespace {

constexpr uint64_t magic = 0x74736f6874666577;  // "wefthost"
constexpr uint32_t version = 2;                 // any change of layout or meaning
constexpr uint64_t most_bytes = uint64_t{1} << 44;
constexpr uint32_t most_slots = 65535, most_layers = 4096, most_groups = 64;
constexpr uint32_t most_width = 1 << 24;
constexpr int64_t spin_ns = 50'000;

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void check_sizes(const MailboxSizes& sizes) {
  const auto check = [](const char* name, uint32_t size, uint32_t most) {
    if (size >= 1 && size <= most) return;
    fail(std::string("a mailbox has 1 to ") + std::to_string(most) + " " + name + ", not " +
         std::to_string(size));
  };
  check("slots", sizes.slots, most_slots);
  check("layers", sizes.layers, most_layers);
  check("groups", sizes.groups, most_groups);
  check("blocks of a table", sizes.table_width, most_width);
  check("numbers of queries", sizes.q_width, most_width);
  check("numbers of keys", sizes.kv_width, most_width);
  if (sizes.type > static_cast<uint32_t>(DType::f16)) {
    fail("queries must be float32, bfloat16 or float16");
  }
}

std::string text(const Tensor& tensor) {
  std::string words = std::string(tensor.name) + " [";
  for (int i = 0; i < tensor.rank; ++i) {
    words += (i > 0 ? ", " : "") + std::to_string(tensor.shape[i]);
  }
  return words + "]";
}

// Copies between a slot and token `i` of [n, heads, D].
template <typename Copy>
void each_head(const Tensor& tensor, int64_t i, char* row, const Copy& copy) {
  const int64_t bytes = size_of(tensor.type), head_bytes = tensor.shape[2] * bytes;
  char* token = tensor.as<char>() + i * tensor.stride[0] * bytes;
  if (tensor.stride[1] == tensor.shape[2]) return copy(row, token, tensor.shape[1] * head_bytes);
  for (int64_t head = 0; head < tensor.shape[1]; ++head) {
    copy(row + head * head_bytes, token + head * tensor.stride[1] * bytes, head_bytes);
  }
}

void store_row(const Tensor& tensor, int64_t i, char* row) {
  each_head(tensor, i, row, [](char* to, const char* from, size_t n) { std::memcpy(to, from, n); });
}

void load_row(const Tensor& tensor, int64_t i, char* row) {
  each_head(tensor, i, row, [](const char* from, char* to, size_t n) { std::memcpy(to, from, n); });
}

// Arrays without rows may have any strides: numpy's are 0.
bool dense(const Tensor& tensor) {
  const int last = tensor.rank - 1;
  return tensor.shape[0] == 0 || tensor.shape[last] <= 1 || tensor.stride[last] == 1;
}

void check_rows(const Tensor& tensor, size_t rows, DType type, uint32_t width) {
  const bool shaped = tensor.rank == 3 && tensor.shape[0] == static_cast<int64_t>(rows) &&
                      tensor.shape[1] * tensor.shape[2] <= width;
  if (!shaped || !dense(tensor)) {
    fail(text(tensor) + " must be [" + std::to_string(rows) +
         ", heads, D], contiguous in D, of no more than " + std::to_string(width) +
         " numbers a row");
  }
  if (tensor.type != type) fail(text(tensor) + " must have the type of the mailbox");
}

const char* name_of(job::State state) {
  constexpr const char* names[] = {"empty", "submitted", "running", "done",
                                   "taken", "failed",    "aborting"};
  return state <= job::State::Aborting ? names[static_cast<int>(state)] : "broken";
}

}  // namespace

void Mailbox::place(const MailboxSizes& sizes) {
  uint64_t next = padded(sizeof(MailboxHeader), ring::kPage);
  const auto array = [&](uint64_t bytes) {
    const uint64_t offset = next;
    next = padded(next + bytes, ring::kPage);
    return offset;
  };
  const auto row_bytes = [&](uint64_t numbers, uint64_t align) {
    return padded(numbers * size_of(static_cast<DType>(sizes.type)), align);
  };
  const uint64_t slots = sizes.slots;
  sizes_ = sizes;
  k_at_ = row_bytes(sizes.q_width, sizeof(uint64_t));
  v_at_ = k_at_ + row_bytes(sizes.kv_width, sizeof(uint64_t));
  qkv_bytes_ = padded(v_at_ + row_bytes(sizes.kv_width, sizeof(uint64_t)), ring::kAlign);
  out_bytes_ = row_bytes(sizes.q_width, ring::kAlign);
  words_ = array(slots * sizeof(uint64_t));
  records_ = array(slots * sizeof(JobRecord));
  tables_ = array(slots * sizes.groups * (sizes.table_width + 1) * sizeof(int32_t));
  qkv_ = array(slots * qkv_bytes_);
  out_ = array(slots * out_bytes_);
  total_ = next;
}

uint64_t Mailbox::bytes_of(const MailboxSizes& sizes) {
  check_sizes(sizes);
  Mailbox mailbox;
  mailbox.place(sizes);
  if (mailbox.total_ > most_bytes) fail("a mailbox has 16 TiB at most");
  return mailbox.total_;
}

void Mailbox::format(std::span<std::byte> memory, const MailboxSizes& sizes) {
  const uint64_t bytes = bytes_of(sizes);
  if (memory.size() < bytes) fail("the memory is too small for the mailbox");
  std::memset(memory.data(), 0, sizeof(MailboxHeader));
  auto& header = *reinterpret_cast<MailboxHeader*>(memory.data());
  header.magic = magic;
  header.version = version;
  header.total_bytes = bytes;
  header.sizes = sizes;
  Mailbox mailbox;
  mailbox.base_ = memory.data();
  mailbox.place(sizes);
  std::memset(memory.data() + mailbox.words_, 0, mailbox.tables_ - mailbox.words_);
}

Mailbox::Mailbox(std::span<std::byte> memory) : base_(memory.data()) {
  if (memory.size() < sizeof(MailboxHeader)) fail("the memory does not hold a mailbox");
  const MailboxHeader& seen = header();
  if (seen.magic != magic) fail("the memory does not hold a mailbox");
  if (seen.version != version) {
    fail("the mailbox has version " + std::to_string(seen.version) +
         ", this process speaks version " + std::to_string(version));
  }
  const MailboxSizes sizes = seen.sizes;
  if (bytes_of(sizes) > memory.size()) fail("the mailbox is truncated");
  place(sizes);
}

void Mailbox::reclaim(uint32_t worker) const {
  if (ring::load(header().worker) != worker) return;
  reclaim_place(0);
  ring::store(header().worker, 0u);
}

// A place that is read while its job is neither Running nor Aborting may be another one's by the
// time of the claim. A job that is claimed keeps its place.
void Mailbox::reclaim_place(uint32_t place) const {
  for (uint32_t slot = 0; slot < sizes_.slots; ++slot) {
    const job::State state = job::look(word(slot)).state;
    const bool claimed = state == job::State::Running || state == job::State::Aborting;
    if (claimed && place_of(slot) == place) job::reclaim(word(slot));
  }
}

bool Mailbox::claim(uint32_t slot, job::Word seen, uint32_t place) const {
  if (place_of(slot) != place || !job::claim(word(slot), seen)) return false;
  if (place_of(slot) == place) return true;
  job::reclaim(word(slot));  // another token has begun in the slot since it was looked at
  return false;
}

MailboxClient::MailboxClient(const Mailbox& mailbox)
    : mailbox_(mailbox), rows_(mailbox.sizes().slots) {}

void MailboxClient::require(std::span<const int32_t> slots, const char* what,
                            bool (*good)(job::Word)) {
  ++call_;
  for (const int32_t slot : slots) {
    const auto refuse = [&](const std::string& why) { fail("slot " + std::to_string(slot) + why); };
    if (slot < 0 || slot >= static_cast<int64_t>(rows_.size())) refuse(" does not exist");
    if (std::exchange(rows_[slot].named, call_) == call_) refuse(" occurs twice");
    const job::Word seen = job::look(mailbox_.word(slot));
    if (!good(seen)) refuse(std::string(" is ") + name_of(seen.state) + " and cannot be " + what);
  }
}

void MailboxClient::begin(std::span<const int32_t> slots,
                          std::span<const int32_t> contexts, std::span<const Tensor> tables,
                          std::span<const int32_t> places) {
  const MailboxSizes& sizes = mailbox_.sizes();
  if (contexts.size() != slots.size()) fail("each slot needs a context");
  if (!places.empty() && places.size() != slots.size()) fail("each slot needs a place, or none");
  for (const int32_t place : places) {
    if (place >= 0 && place < static_cast<int32_t>(most_places)) continue;
    fail("there is no place " + std::to_string(place));
  }
  if (tables.size() != sizes.groups) fail("each group needs its block tables");
  for (const Tensor& table : tables) {
    const bool shaped = table.rank == 2 && table.shape[0] == static_cast<int64_t>(slots.size()) &&
                        table.shape[1] <= sizes.table_width;
    if (!shaped || table.type != DType::i32 || !dense(table)) {
      fail(text(table) + " must be int32 [" + std::to_string(slots.size()) +
           ", blocks], contiguous, of no more than " + std::to_string(sizes.table_width) +
           " blocks");
    }
  }
  for (const int32_t context : contexts) {
    if (context < 1) fail("a context has 1 token at least, not " + std::to_string(context));
  }
  require(slots, "begun", [](job::Word seen) { return seen.state == job::State::Empty; });
  for (size_t i = 0; i < slots.size(); ++i) {
    JobRecord& record = mailbox_.record(slots[i]);
    rows_[slots[i]].begun = true;
    rows_[slots[i]].place = places.empty() ? 0 : static_cast<uint32_t>(places[i]);
    std::atomic_ref(record.place)
        .store(static_cast<uint16_t>(rows_[slots[i]].place), std::memory_order_relaxed);
    record.context = static_cast<uint32_t>(contexts[i]);
    for (uint32_t group = 0; group < sizes.groups; ++group) {
      const Tensor& table = tables[group];
      int32_t* to = mailbox_.table(group, slots[i]);
      *to = static_cast<int32_t>(table.shape[1]);
      std::copy_n(table.as<int32_t>() + i * table.stride[0], table.shape[1], to + 1);
    }
  }
}

void MailboxClient::submit(std::span<const int32_t> slots, uint32_t layer, const Tensor& q,
                           const Tensor* k, const Tensor* v) {
  const MailboxSizes& sizes = mailbox_.sizes();
  if (layer >= sizes.layers) fail("there is no layer " + std::to_string(layer));
  check_rows(q, slots.size(), mailbox_.type(), sizes.q_width);
  if ((k == nullptr) != (v == nullptr)) fail("k and v must both be given, or neither");
  for (const Tensor* fresh : {k, v}) {
    if (fresh != nullptr) check_rows(*fresh, slots.size(), mailbox_.type(), sizes.kv_width);
  }
  require(slots, "submitted", job::may_submit);
  for (const int32_t slot : slots) {
    if (!rows_[slot].begun) fail("slot " + std::to_string(slot) + " has no token");
  }
  // These lines come from the worker's core: all at once, and not one after another.
  for (const int32_t slot : slots) {
    __builtin_prefetch(&mailbox_.record(slot), 1);
    __builtin_prefetch(mailbox_.q(slot), 1);
  }
  const int64_t now = ring::now_ns();
  for (size_t i = 0; i < slots.size(); ++i) {
    JobRecord& record = mailbox_.record(slots[i]);
    Row& row = rows_[slots[i]];
    row.order = next_++;
    row.q_numbers = static_cast<uint32_t>(q.shape[1] * q.shape[2]);
    std::atomic_ref(record.order).store(row.order, std::memory_order_relaxed);
    record.submitted_ns = now;
    record.q_numbers = row.q_numbers;
    record.kv_numbers = k == nullptr ? 0 : static_cast<uint32_t>(k->shape[1] * k->shape[2]);
    store_row(q, i, mailbox_.q(slots[i]));
    if (k != nullptr) store_row(*k, i, mailbox_.k(slots[i]));
    if (v != nullptr) store_row(*v, i, mailbox_.v(slots[i]));
  }
  // All together, so that the worker takes them in one call.
  uint32_t called = 0;  // a bit for each place
  for (const int32_t slot : slots) {
    job::submit(mailbox_.word(slot), layer);
    called |= 1u << rows_[slot].place;
  }
  add(mailbox_.header().client_counters.submitted, slots.size());
  for (uint32_t place = 0; place < most_places; ++place) {
    if (called >> place & 1) notify(mailbox_.bell(place), woken_[place]);
  }
}

size_t MailboxClient::done(uint32_t layer, std::span<int32_t> slots) {
  const uint64_t wanted = job::Word{job::State::Done, layer}.bits();
  found_.clear();
  for (uint32_t slot = 0; slot < mailbox_.sizes().slots; ++slot) {
    if (ring::load(mailbox_.word(slot)) != wanted) continue;
    found_.emplace_back(rows_[slot].order, slot);
  }
  const size_t count = std::min(found_.size(), slots.size());
  if (!std::ranges::is_sorted(found_)) {
    std::ranges::partial_sort(found_, found_.begin() + count);
  }
  for (size_t i = 0; i < count; ++i) slots[i] = found_[i].second;
  return count;
}

void MailboxClient::done_counts(std::span<int32_t> counts) const {
  std::ranges::fill(counts, 0);
  for (uint32_t slot = 0; slot < mailbox_.sizes().slots; ++slot) {
    const job::Word seen = job::look(mailbox_.word(slot));
    if (seen.state == job::State::Done && seen.layer < counts.size()) ++counts[seen.layer];
  }
}

std::vector<std::pair<int32_t, Fault>> MailboxClient::failed() const {
  std::vector<std::pair<int32_t, Fault>> found;
  for (uint32_t slot = 0; slot < mailbox_.sizes().slots; ++slot) {
    if (job::look(mailbox_.word(slot)).state != job::State::Failed) continue;
    found.emplace_back(slot, mailbox_.record(slot).fault);
  }
  return found;
}

void MailboxClient::take(std::span<const int32_t> slots, uint32_t layer, const Tensor& out) {
  check_rows(out, slots.size(), mailbox_.type(), mailbox_.sizes().q_width);
  require(slots, "taken", [](job::Word seen) { return seen.state == job::State::Done; });
  const int64_t numbers = out.shape[1] * out.shape[2];
  for (const int32_t slot : slots) {
    const uint32_t at = job::look(mailbox_.word(slot)).layer;
    if (at == layer && rows_[slot].q_numbers == numbers) continue;
    fail("slot " + std::to_string(slot) + " has a result of layer " + std::to_string(at) +
         " that does not fit " + text(out) + " of layer " + std::to_string(layer));
  }
  for (const int32_t slot : slots) __builtin_prefetch(mailbox_.out(slot));
  for (size_t i = 0; i < slots.size(); ++i) {
    load_row(out, i, mailbox_.out(slots[i]));
    ring::store(mailbox_.word(slots[i]), job::Word{job::State::Taken, layer}.bits());
  }
  add(mailbox_.header().client_counters.taken, slots.size());
}

void MailboxClient::release(std::span<const int32_t> slots) {
  require(slots, "released", [](job::Word seen) {
    return seen.state == job::State::Taken || seen.state == job::State::Failed;
  });
  for (const int32_t slot : slots) {
    rows_[slot].begun = false;
    ring::store(mailbox_.word(slot), job::Word{}.bits());
  }
}

void MailboxClient::put_back(std::span<const int32_t> slots) {
  require(slots, "put back", [](job::Word seen) { return seen.state == job::State::Taken; });
  for (const int32_t slot : slots) {
    const uint32_t layer = job::look(mailbox_.word(slot)).layer;
    ring::store(mailbox_.word(slot), job::Word{job::State::Done, layer}.bits());
  }
  add(mailbox_.header().client_counters.put_back, slots.size());
}

std::vector<int32_t> MailboxClient::abort(std::span<const int32_t> slots) {
  require(slots, "aborted", [](job::Word) { return true; });
  std::vector<int32_t> computed;
  for (const int32_t slot : slots) {
    rows_[slot].begun = false;
    if (!job::abort(mailbox_.word(slot))) computed.push_back(slot);
  }
  add(mailbox_.header().client_counters.aborted, slots.size());
  return computed;
}

bool MailboxClient::any_result() const {
  for (uint32_t slot = 0; slot < mailbox_.sizes().slots; ++slot) {
    if (job::has_result(job::look(mailbox_.word(slot)))) return true;
  }
  return false;
}

bool MailboxClient::all_computed(std::span<const int32_t> slots) const {
  return std::ranges::none_of(slots, [&](int32_t slot) {
    const job::State state = job::look(mailbox_.word(slot)).state;
    return state == job::State::Submitted || state == job::State::Running;
  });
}

bool MailboxClient::first_has_result() const {
  const Row* first = nullptr;
  bool there = false;
  for (uint32_t slot = 0; slot < mailbox_.sizes().slots; ++slot) {
    const job::Word seen = job::look(mailbox_.word(slot));
    const bool waits = seen.state == job::State::Submitted || seen.state == job::State::Running;
    if (!waits && !job::has_result(seen)) continue;
    if (first != nullptr && rows_[slot].order >= first->order) continue;
    first = &rows_[slot];
    there = !waits;
  }
  return there;
}

template <typename Ready>
bool MailboxClient::wait_until(const Ready& ready, int64_t timeout_ns) {
  ring::Doorbell<1>& bell = mailbox_.header().to_client;
  const int64_t end = ring::now_ns() + timeout_ns;
  while (true) {
    const uint32_t heard = ring::load(bell.rung[0].value);
    if (ready()) return true;
    int64_t left = end - ring::now_ns();
    if (left <= 0) return false;
    const auto news = [&] { return ring::load(bell.rung[0].value) != heard; };
    if (ring::spin(news, std::min(left, spin_ns))) continue;
    left = end - ring::now_ns();
    if (left > 0 && ring::go_to_sleep(bell, heard)) {
      const ring::Waited waited[] = {{&bell.rung[0].value, heard}};
      ring::futex_wait_any(waited, left);
      ring::wake_up(bell);
    }
  }
}

bool MailboxClient::wait(int64_t timeout_ns) {
  return wait_until([this] { return any_result(); }, timeout_ns);
}

bool MailboxClient::wait_for_first(int64_t timeout_ns) {
  return wait_until([this] { return first_has_result(); }, timeout_ns);
}

bool MailboxClient::wait_for(std::span<const int32_t> slots, int64_t timeout_ns) {
  require(slots, "waited for", [](job::Word) { return true; });
  return wait_until([&] { return all_computed(slots); }, timeout_ns);
}

}  // namespace weft
