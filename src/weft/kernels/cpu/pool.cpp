// The thread pool: jobs, helpers, and waking them.

#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstddef>
#include <exception>
#include <new>
#include <type_traits>
#include <utility>

namespace weft {
namespace {

constexpr auto patience = std::chrono::microseconds(100);
constexpr int looks = 64;  // between two looks at the clock

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for what another thread is about to do; if it is not even running, makes room for it.
template <typename Condition>
void spin_until(const Condition& condition) {
  for (int i = 0; !condition(); ++i) {
    if (i < 2048) {
      pause();
    } else {
      sched_yield();
    }
  }
}

// The items of a phase are cut into as many shares as there are threads. Each thread takes those of
// its own share in order, then helps with those after it: so it reads what lies together, and the
// same from call to call.
constexpr int max_shares = 256;
constexpr int neighbours = 8;  // shares that a thread works on without having to wait
constexpr int short_wait = 256;
// Counters that all threads write would be handed from core to core: so many shares are counted
// together, and only then in one place.
constexpr int group_shares = 8;

using Counters = std::array<std::atomic<int64_t>, Pool::max_phases>;

struct ShareState {
  alignas(64) Counters taken{};
  alignas(64) Counters done{};
};

struct alignas(64) GroupState {
  Counters done{};
};

// An array of which only the first elements are ever written.
template <typename T, int most>
class First {
 public:
  explicit First(int count) {
    for (int i = 0; i < count; ++i) new (memory_ + i * sizeof(T)) T;
  }
  T& operator[](int i) { return *std::launder(reinterpret_cast<T*>(memory_) + i); }

 private:
  static_assert(std::is_trivially_destructible_v<T>);
  alignas(T) std::byte memory_[most * sizeof(T)];
};

}  // namespace

struct Pool::Job {
  std::span<const int64_t> counts;
  const FunctionRef<void(int, int64_t, int)> body;  // of a phase, an item, and a place
  const int shares;
  const int places = INT_MAX;  // of the threads that take part: those before this one
  First<ShareState, max_shares> states{shares};
  First<GroupState, max_shares / group_shares> groups{(shares + group_shares - 1) / group_shares};
  GroupState whole{};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};  // of the thread that set `failed`

  int64_t begin(int phase, int share) const { return share_begin(counts[phase], share, shares); }
  bool done(int phase) const {
    return whole.done[phase].load(std::memory_order_acquire) == counts[phase];
  }
  void finish(int phase, int share, int64_t items);
};

// Counts items that are done: in their share, with its last one in its group, and so on.
void Pool::Job::finish(int phase, int share, int64_t items) {
  const auto add = [&](Counters& counters, int64_t more, int64_t all) {
    return counters[phase].fetch_add(more, std::memory_order_acq_rel) + more == all;
  };
  const int64_t all = begin(phase, share + 1) - begin(phase, share);
  if (!add(states[share].done, items, all)) return;
  if (shares <= group_shares) {
    add(whole.done, all, 0);
    return;
  }
  const int group = share / group_shares, first = group * group_shares;
  const int last = std::min(shares, first + group_shares);
  const int64_t together = begin(phase, last) - begin(phase, first);
  if (add(groups[group].done, all, together)) add(whole.done, together, 0);
}

std::vector<int> Pool::nodes() {
  const std::lock_guard lock(mutex_);
  return nodes_;
}

void Pool::resize(int threads, std::vector<int> cpus, std::vector<int> nodes) {
  const std::lock_guard resizing(resizing_);
  std::vector<std::thread> old;
  {
    const std::lock_guard lock(mutex_);
    threads_ = threads;
    cpus_ = std::move(cpus);
    nodes_ = std::move(nodes);
    stopping_ = true;
    ++posted_;
    old.swap(helpers_);
  }
  wake_.notify_all();
  for (std::thread& helper : old) helper.join();
  const std::lock_guard lock(mutex_);
  started_ = 0;
  stopping_ = false;
}

void Pool::run(int64_t count, FunctionRef<void(int64_t)> body) {
  const auto any_place = [&](int, int64_t item, int) { body(item); };
  Job job{{&count, 1}, any_place, 1};
  run_job(job);
}

void Pool::run_places(int places, int64_t count, FunctionRef<void(int, int64_t)> body) {
  const auto one_phase = [&](int, int64_t item, int place) { body(place, item); };
  Job job{{&count, 1}, one_phase, 1, places};
  run_job(job);
}

void Pool::run_phases(std::span<const int64_t> counts, FunctionRef<void(int, int64_t)> body) {
  if (counts.empty()) return;
  const auto any_place = [&](int phase, int64_t item, int) { body(phase, item); };
  Job job{counts, any_place, std::min<int>(threads_, max_shares)};
  run_job(job);
}

void Pool::run_job(Job& job) {
  const auto counts = job.counts;
  const bool divisible = std::ranges::any_of(counts, [](int64_t count) { return count > 1; });
  Slot* const slot = divisible && threads_ > 1 ? post(job) : nullptr;
  work(job, 0);
  spin_until([&] { return job.done(static_cast<int>(counts.size()) - 1); });
  if (slot != nullptr) withdraw(*slot);
  if (job.failed) std::rethrow_exception(job.error);
}

// Shows a job to the helpers; null if no more can be shown.
Pool::Slot* Pool::post(Job& job) {
  const auto slot = std::ranges::find_if(slots_, [](Slot& slot) { return !slot.taken.exchange(true); });
  if (slot == slots_.end()) return nullptr;
  if (started_ < threads_ - 1) start_helpers();
  slot->job = &job;
  ++posted_;
  if (sleeping_ > 0) {
    { const std::lock_guard lock(mutex_); }  // whoever is about to sleep does so before it is woken
    wake_.notify_all();
  }
  return &*slot;
}

void Pool::withdraw(Slot& slot) {
  slot.job = nullptr;
  for (auto& users : slot.users) {
    spin_until([&] { return users.value.load() == 0; });
  }
  slot.taken = false;
}

void Pool::start_helpers() {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  while (static_cast<int>(helpers_.size()) < threads_ - 1) {
    const int place = static_cast<int>(helpers_.size()) + 1;
    const int cpu = place < static_cast<int>(cpus_.size()) ? cpus_[place] : -1;
    helpers_.emplace_back([this, place, cpu] { help(place, cpu); });
  }
  started_ = static_cast<int>(helpers_.size());
}

// Whether something was posted since `seen` while patience lasted.
bool Pool::look_for_work(uint64_t seen) const {
  const auto end = std::chrono::steady_clock::now() + patience;
  do {
    for (int i = 0; i < looks; ++i) {
      if (posted_.load(std::memory_order_acquire) != seen) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void Pool::sleep(uint64_t seen) {
  std::unique_lock lock(mutex_);
  ++sleeping_;
  wake_.wait(lock, [&] { return seen != posted_; });
  --sleeping_;
}

void Pool::help(int place, int cpu) {
  if (cpu >= 0) stay_on(cpu);
  uint64_t seen = 0;
  while (true) {
    if (!look_for_work(seen)) sleep(seen);
    seen = posted_;
    if (stopping_) return;
    for (Slot& slot : slots_) join(slot, place);
  }
}

void Pool::join(Slot& slot, int place) {
  if (slot.job.load(std::memory_order_relaxed) == nullptr) return;
  std::atomic<int>& users = slot.users[place / group_shares % user_groups].value;
  users.fetch_add(1);  // before the look at the job: its caller clears it and then looks here
  Job* const job = slot.job.load();
  if (job != nullptr && place < job->places) work(*job, place);
  users.fetch_sub(1, std::memory_order_release);
}

// Returns when no item is left to take; those of the last phase may still be under way.
void Pool::work(Job& job, int place) {
  const int last = static_cast<int>(job.counts.size()) - 1, own = place % job.shares;
  for (int phase = 0; phase <= last; ++phase) {
    for (int i = 0; i < std::min(job.shares, neighbours); ++i) {
      run_share(job, phase, (own + i) % job.shares, place);
    }
    for (int i = 0; i < short_wait && !job.done(phase); ++i) pause();
    for (int i = neighbours; i < job.shares && !job.done(phase); ++i) {
      run_share(job, phase, (own + i) % job.shares, place);
    }
    if (phase < last) spin_until([&] { return job.done(phase); });
  }
}

// Runs items of a share until none is left.
void Pool::run_share(Job& job, int phase, int share, int place) {
  const int64_t begin = job.begin(phase, share), count = job.begin(phase, share + 1) - begin;
  std::atomic<int64_t>& taken = job.states[share].taken[phase];
  int64_t mine = 0;
  while (taken.load(std::memory_order_relaxed) < count) {
    const int64_t item = taken.fetch_add(1, std::memory_order_relaxed);
    if (item >= count) break;
    ++mine;
    if (job.failed.load(std::memory_order_relaxed)) continue;
    try {
      job.body(phase, begin + item, place);
    } catch (...) {
      if (!job.failed.exchange(true)) job.error = std::current_exception();
    }
  }
  if (mine > 0) job.finish(phase, share, mine);
}

namespace {

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// Never destroyed: at exit the helpers may still be asleep in it.
std::atomic<Pool*> current{nullptr};
std::once_flag created;
thread_local Pool* own = nullptr;

void replace_after_fork() {
  // The parent's mutex may have been held by another thread at the fork: do not touch it.
  current.store(new Pool(current.load()->threads()));
}

}  // namespace

Pool& shared_pool() {
  if (own != nullptr) return *own;
  std::call_once(created, [] {
    current.store(new Pool(available_cores()));
    pthread_atfork(nullptr, nullptr, replace_after_fork);
  });
  return *current.load();
}

PoolScope::PoolScope(Pool& pool) : before_(std::exchange(own, &pool)) {}

PoolScope::~PoolScope() { own = before_; }

void stay_on(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  sched_setaffinity(0, sizeof one, &one);
}

}  // namespace weft
