// Jobs of decode attention between a client and a host worker, in memory that both map: an
// anonymous file, or memory of one process.
//
//   header | words | records | block tables | q, k, v | out
//
// A slot is a row on its way through the layers. It waits in one layer at a time, so that its memory
// does not depend on their number (OmniServe section 3.2). Each array has an entry for every slot.
// A slot's jobs are for one place: 0 is the host worker, any other a courier, which has them computed
// elsewhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../../ring/steps.hpp"
#include "../../ring/wake.hpp"
#include "job_state.hpp"
#include "tensor.hpp"

namespace weft {

struct MailboxSizes {
  uint32_t slots = 0, layers = 0;
  uint32_t groups = 0;               // block tables of a row
  uint32_t table_width = 0;          // blocks of a table at most
  uint32_t q_width = 0, kv_width = 0;  // numbers of a token at most: of all query heads, KV heads
  uint32_t type = 0;                 // DType of q, k, v and out
};

inline constexpr uint32_t most_places = 16;

// Why a job has failed. The numbers are shared with `FAULTS` in host.py.
enum class Fault : uint16_t { None, Layer, Shape, Context, Block, Kernel };

// Small, so that a batch of jobs moves few lines from core to core.
struct JobRecord {
  uint64_t order;                  // of submission; atomic: the worker compares before it claims
  int64_t submitted_ns;
  uint32_t context;                // tokens after this one is written, itself included
  uint32_t q_numbers, kv_numbers;  // of this layer
  Fault fault;
  uint16_t place;                  // of all jobs of a token; atomic, as `order` is
};
static_assert(sizeof(JobRecord) == 32);

// One side writes each of them; anybody may read them at any time.
struct alignas(ring::kAlign) WorkerCounters {
  uint64_t calls, jobs, failed, busy_ns, round_trip_ns, longest_round_trip_ns;
};
struct alignas(ring::kAlign) ClientCounters {
  uint64_t submitted, taken, put_back, aborted;
};

struct MailboxHeader {
  uint64_t magic, total_bytes;
  uint32_t version;
  MailboxSizes sizes;
  alignas(ring::kAlign) ring::Doorbell<1> to_worker;
  ring::Doorbell<1> to_places[most_places - 1];  // from place 1 on
  ring::Doorbell<1> to_client;
  alignas(ring::kAlign) uint32_t worker;  // process of the attached worker; 0: none
  WorkerCounters worker_counters;
  ClientCounters client_counters;
};

class Mailbox {
 public:
  // Throw std::invalid_argument for sizes out of bounds.
  static uint64_t bytes_of(const MailboxSizes& sizes);
  static void format(std::span<std::byte> memory, const MailboxSizes& sizes);
  // Throws std::invalid_argument if the memory does not hold a mailbox of this version.
  explicit Mailbox(std::span<std::byte> memory);

  // A copy that was checked: what others write into the memory later is not believed.
  const MailboxSizes& sizes() const { return sizes_; }
  DType type() const { return static_cast<DType>(sizes_.type); }
  MailboxHeader& header() const { return *reinterpret_cast<MailboxHeader*>(base_); }
  uint64_t& word(uint32_t slot) const { return at<uint64_t>(words_)[slot]; }
  JobRecord& record(uint32_t slot) const { return at<JobRecord>(records_)[slot]; }
  ring::Doorbell<1>& bell(uint32_t place) const {
    return place == 0 ? header().to_worker : header().to_places[place - 1];
  }
  uint32_t place_of(uint32_t slot) const {
    return std::atomic_ref(record(slot).place).load(std::memory_order_relaxed);
  }
  // Claims a Submitted job that is for this place; false if it is not, or has changed.
  bool claim(uint32_t slot, job::Word seen, uint32_t place) const;
  // The number of blocks, then the blocks.
  int32_t* table(uint32_t group, uint32_t slot) const {
    const uint64_t row = uint64_t{group} * sizes_.slots + slot;
    return at<int32_t>(tables_) + row * (sizes_.table_width + 1);
  }
  char* q(uint32_t slot) const { return at<char>(qkv_) + slot * qkv_bytes_; }
  char* k(uint32_t slot) const { return q(slot) + k_at_; }
  char* v(uint32_t slot) const { return q(slot) + v_at_; }
  char* out(uint32_t slot) const { return at<char>(out_) + slot * out_bytes_; }

  // To be called when the process of a worker is proved to have ended. If it was the attached one,
  // jobs that it was computing are Submitted again, and those that were aborted meanwhile are Empty.
  void reclaim(uint32_t worker) const;
  // The same for the jobs of one place, whose courier gives them up.
  void reclaim_place(uint32_t place) const;
  // Where arrays begin, and the bytes of a slot in them.
  struct Layout {
    uint64_t records, tables, qkv, k, v, qkv_bytes, out, out_bytes;
  };
  Layout layout() const {
    return {records_, tables_, qkv_, k_at_, v_at_, qkv_bytes_, out_, out_bytes_};
  }

 private:
  Mailbox() = default;
  void place(const MailboxSizes& sizes);
  template <typename T>
  T* at(uint64_t offset) const { return reinterpret_cast<T*>(base_ + offset); }

  std::byte* base_ = nullptr;
  MailboxSizes sizes_;
  uint64_t words_ = 0, records_ = 0, tables_ = 0, qkv_ = 0, out_ = 0, total_ = 0;
  uint64_t k_at_ = 0, v_at_ = 0, qkv_bytes_ = 0, out_bytes_ = 0;  // of a slot
};

// The client's side, for one thread. Nothing here waits for the worker but `wait` and `wait_for`. Every call throws
// std::invalid_argument, before anything is changed, for slots that do not exist, occur twice or are
// not in the state that the call is for.
class MailboxClient {
 public:
  explicit MailboxClient(const Mailbox& mailbox);

  // A token of these rows begins: `contexts` tokens each, this one included, and for each group the
  // rows' block tables [n, any] i32. `places`: for each row, where its KV lies; none: all with the
  // host worker. The slots must be Empty.
  void begin(std::span<const int32_t> slots, std::span<const int32_t> contexts,
             std::span<const Tensor> tables, std::span<const int32_t> places = {});
  // Hands q, k and v [n, heads, D] of a layer to the worker. k, v: both null where the layer reads
  // the KV of another one. The slots must be Empty, with a token begun, or Taken.
  void submit(std::span<const int32_t> slots, uint32_t layer, const Tensor& q, const Tensor* k,
              const Tensor* v);
  // Slots with a result of this layer, the first submitted first, as many as there is room for.
  // Returns how many there are of them.
  size_t done(uint32_t layer, std::span<int32_t> slots);
  // The number of slots with a result for each layer.
  void done_counts(std::span<int32_t> counts) const;
  // Slots whose job has failed, and why.
  std::vector<std::pair<int32_t, Fault>> failed() const;
  // Copies results of a layer to `out` [n, heads, D]; the slots are Taken then.
  void take(std::span<const int32_t> slots, uint32_t layer, const Tensor& out);
  // The tokens of these Taken or Failed slots are over: they are Empty.
  void release(std::span<const int32_t> slots);
  // The results of these Taken slots can be taken again.
  void put_back(std::span<const int32_t> slots);
  // Empties slots in any state. Returns those that the worker is computing: it may write to their
  // blocks until their state is Empty, too.
  std::vector<int32_t> abort(std::span<const int32_t> slots);
  // Waits until there is a result or a failure that is not taken; false if there is none in time.
  // Any thread may call this, but one at a time.
  bool wait(int64_t timeout_ns);
  // Waits until the job that was submitted first, of those not taken, has a result or a failure. It
  // is the same one in the mailboxes of several clients that submit and take the same rows.
  bool wait_for_first(int64_t timeout_ns);
  // Waits until the worker has computed all of these slots that were submitted, well or not; false
  // if it has not in time. As `wait`.
  bool wait_for(std::span<const int32_t> slots, int64_t timeout_ns);

 private:
  void require(std::span<const int32_t> slots, const char* what, bool (*good)(job::Word));
  bool any_result() const;
  bool first_has_result() const;
  bool all_computed(std::span<const int32_t> slots) const;
  template <typename Ready>
  bool wait_until(const Ready& ready, int64_t timeout_ns);

  Mailbox mailbox_;
  uint64_t next_ = 0;             // order of the next job
  uint32_t woken_[most_places] = {};  // sleep of each place that has been ended
  struct Row {
    uint64_t order = 0;           // as in the record, which would have to come from another core
    uint32_t q_numbers = 0;
    uint32_t place = 0;
    bool begun = false;           // it has a token
    uint64_t named = 0;           // the last call that named its slot
  };
  std::vector<Row> rows_;         // of each slot
  uint64_t call_ = 0;
  std::vector<std::pair<uint64_t, int32_t>> found_;
};

// Rings a bell, and wakes the other side if it sleeps. The worker and the couriers of all places
// ring that of the client, hence the addition.
inline void notify(ring::Doorbell<1>& bell, uint32_t& woken) {
  std::atomic_ref(bell.rung[0].value).fetch_add(1, std::memory_order_seq_cst);
  if (ring::to_be_woken(bell, woken)) ring::futex_wake(&bell.rung[0].value);
}

// Adds to a counter that this side alone writes.
inline void add(uint64_t& counter, uint64_t more) {
  std::atomic_ref<uint64_t> word(counter);
  word.store(word.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}
inline void raise(uint64_t& counter, uint64_t least) {
  std::atomic_ref<uint64_t> word(counter);
  if (word.load(std::memory_order_relaxed) < least) word.store(least, std::memory_order_relaxed);
}

}  // namespace weft
