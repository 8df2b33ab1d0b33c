// The thread pool: jobs, helpers, and waking them.

#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>

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

// Binds the calling thread to one of the cores that the process may use. Where that is not allowed,
// it runs where it may.
void stay_on_core(int number) {
  cpu_set_t all, one;
  if (sched_getaffinity(getpid(), sizeof all, &all) != 0) return;
  number %= std::max(1, CPU_COUNT(&all));
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &all) && number-- == 0) CPU_SET(core, &one);
  }
  sched_setaffinity(0, sizeof one, &one);
}

// A phase's items are cut into as many shares as there are threads, up to a few. Each thread takes
// those of its own share in order, then helps with the others: so it reads what lies together, and
// the same from call to call.
constexpr int max_shares = 8;

struct Phase {
  struct alignas(64) Count {
    std::atomic<int64_t> value{0};
  };
  std::array<Count, max_shares> taken{};
  Count done{};
};

}  // namespace

struct Pool::Job {
  std::span<const int64_t> counts;
  const std::function<void(int, int64_t)>& body;
  const int shares;
  std::array<Phase, max_phases> phases{};
  std::atomic<int> helpers{0};  // raised only with the pool's mutex held
  std::atomic<bool> failed{false};
  std::exception_ptr error{};   // of the thread that set `failed`
};

void Pool::resize(int threads, bool pinned) {
  const std::lock_guard resizing(resizing_);
  std::vector<std::thread> old;
  {
    const std::lock_guard lock(mutex_);
    threads_ = threads;
    pinned_ = pinned;
    stopping_ = true;
    ++posted_;
    old.swap(helpers_);
  }
  wake_.notify_all();
  for (std::thread& helper : old) helper.join();
  const std::lock_guard lock(mutex_);
  stopping_ = false;
}

void Pool::run(int64_t count, const std::function<void(int64_t)>& body) {
  const std::array counts{count};
  run_job(counts, [&](int, int64_t item) { body(item); }, 1);
}

void Pool::run_phases(std::span<const int64_t> counts,
                      const std::function<void(int, int64_t)>& body) {
  run_job(counts, body, std::min<int>(threads_, max_shares));
}

void Pool::run_job(std::span<const int64_t> counts,
                   const std::function<void(int, int64_t)>& body, int shares) {
  Job job{counts, body, shares};
  const bool divisible = std::ranges::any_of(counts, [](int64_t count) { return count > 1; });
  bool shared = false, wake = false;
  if (divisible && threads_ > 1) {
    const std::lock_guard lock(mutex_);
    shared = !stopping_;
    if (shared) {
      start_helpers();
      jobs_.push_back(&job);
      ++posted_;
      wake = sleeping_ > 0;
    }
  }
  if (wake) wake_.notify_all();
  work(job, 0);
  if (shared) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.remove(&job);
    }
    spin_until([&] { return job.helpers.load(std::memory_order_acquire) == 0; });
  }
  if (job.failed) std::rethrow_exception(job.error);
}

void Pool::start_helpers() {
  while (static_cast<int>(helpers_.size()) < threads_ - 1) {
    const int place = static_cast<int>(helpers_.size()) + 1;
    helpers_.emplace_back([this, place] { help(place); });
  }
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

void Pool::help(int place) {
  if (pinned_) stay_on_core(place);
  uint64_t seen = 0;
  while (true) {
    look_for_work(seen);
    std::unique_lock lock(mutex_);
    if (jobs_.empty() && seen == posted_) {
      ++sleeping_;
      wake_.wait(lock, [&] { return seen != posted_; });
      --sleeping_;
    }
    seen = posted_;
    if (stopping_) return;
    if (jobs_.empty()) continue;  // others were faster
    Job& job = *jobs_.front();
    job.helpers.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    work(job, place);
    lock.lock();
    jobs_.remove(&job);  // it has no items left; it may be gone from the list already
    lock.unlock();
    job.helpers.fetch_sub(1, std::memory_order_release);  // the caller may free the job now
  }
}

void Pool::work(Job& job, int place) {
  const int last = static_cast<int>(job.counts.size()) - 1;
  for (int phase = 0; phase <= last; ++phase) {
    Phase& state = job.phases[phase];
    const int64_t count = job.counts[phase];
    int64_t mine = 0;
    for (int i = 0; i < job.shares; ++i) {
      const int64_t share = (place + i) % job.shares;
      const int64_t begin = count * share / job.shares, end = count * (share + 1) / job.shares;
      mine += take(job, phase, begin, end, state.taken[share].value);
    }
    std::atomic<int64_t>& done = state.done.value;
    if (mine > 0) done.fetch_add(mine, std::memory_order_acq_rel);
    spin_until([&] { return done.load(std::memory_order_acquire) >= count; });
  }
}

// Runs items of a share until none is left; returns how many.
int64_t Pool::take(Job& job, int phase, int64_t begin, int64_t end, std::atomic<int64_t>& taken) {
  int64_t mine = 0;
  while (true) {
    const int64_t item = begin + taken.fetch_add(1, std::memory_order_relaxed);
    if (item >= end) return mine;
    ++mine;
    if (job.failed.load(std::memory_order_relaxed)) continue;
    try {
      job.body(phase, item);
    } catch (...) {
      if (!job.failed.exchange(true)) job.error = std::current_exception();
    }
  }
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

void replace_after_fork() {
  // The parent's mutex may have been held by another thread at the fork: do not touch it.
  current.store(new Pool(current.load()->threads()));
}

}  // namespace

Pool& shared_pool() {
  std::call_once(created, [] {
    current.store(new Pool(available_cores()));
    pthread_atfork(nullptr, nullptr, replace_after_fork);
  });
  return *current.load();
}

}  // namespace weft
