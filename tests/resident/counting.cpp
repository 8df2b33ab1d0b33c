// Counts what threads allocate, throw, lock and wait for between two steps of the resident loop: a
// library that is loaded before all others (LD_PRELOAD), and an outlet that stands before the ring's.
//
// Counted are all threads of the process but those that are named: what runs Python is not the loop.

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <linux/futex.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "resident/outlet.hpp"

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

enum Kind { kAllocations, kThrows, kLocks, kStrangeLocks, kWaits, kKinds };
using Counts = std::array<int64_t, kKinds>;

constexpr size_t most_steps = 1 << 16, most_names = 256;

std::array<std::atomic<int64_t>, kKinds> counts{};
// Threads that are not counted. A thread looks itself up once for each list.
std::array<std::atomic<pid_t>, most_names> passed_over{};
std::atomic<int> lists{0};
[[gnu::tls_model("initial-exec")]] thread_local int looked_up = 0;
[[gnu::tls_model("initial-exec")]] thread_local bool counted = false;

void count(Kind kind) {
  const int now = lists.load(std::memory_order_acquire);
  if (looked_up != now) {
    const pid_t self = gettid();
    counted = true;
    for (const auto& name : passed_over) counted &= name.load() != self;
    looked_up = now;
  }
  if (counted) counts[kind].fetch_add(1, std::memory_order_relaxed);
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// Of a condition variable, whose functions were once others.
template <typename Function>
Function* next_of_condition(const char* name) {
  for (const char* version : {"GLIBC_2.3.2", "GLIBC_2.17"}) {
    if (void* found = dlvsym(RTLD_NEXT, name, version)) return reinterpret_cast<Function*>(found);
  }
  return next<Function>(name);
}

// Mutexes under which a thread has slept until another one woke it: those of pools.
std::array<std::atomic<const void*>, most_names> slept_under{};

void sleeps_under(const void* mutex) {
  for (auto& place : slept_under) {
    const void* empty = nullptr;
    if (place.compare_exchange_strong(empty, mutex) || empty == mutex) return;
  }
}

bool is_of_a_pool(const void* mutex) {
  for (const auto& place : slept_under) {
    const void* const known = place.load(std::memory_order_relaxed);
    if (known == mutex) return true;
    if (known == nullptr) return false;
  }
  return false;
}

// -- steps ----------------------------------------------------------------------------------------

struct Step {
  Counts counts;
  int64_t first;  // of a lease: what came before is not the loop's
};

Step steps[most_steps];
std::atomic<size_t> taken{0};
std::atomic<bool> begins{true};
const weft::resident::Outlet* inner = nullptr;

// What a loop must not do. A thread of its own stands for one of the pool.
enum Fault { kNone, kAllocates, kThrowsOnce, kLocksOnce, kOtherThread };
Fault fault = kNone;
std::mutex mutex;
std::atomic<int> asked_of_other{0}, done_by_other{0};
int* volatile sink;

void allocate() {
  sink = new int;
  delete sink;
}

void do_wrong() {
  if (fault == kAllocates) allocate();
  if (fault == kLocksOnce) const std::lock_guard lock(mutex);
  if (fault == kOtherThread) {
    const int wanted = asked_of_other.fetch_add(1) + 1;
    while (done_by_other.load() < wanted) sched_yield();
  }
  if (fault != kThrowsOnce) return;
  try {
    throw std::runtime_error("once");
  } catch (const std::runtime_error&) {
  }
}

void other_thread() {
  while (true) {
    const int done = done_by_other.load();
    if (asked_of_other.load() == done) {
      sched_yield();
      continue;
    }
    allocate();
    done_by_other.store(done + 1);
  }
}

bool asked(void*) { return inner != nullptr && inner->asked(inner->self); }

void publish(void*, const uint64_t* ids, const int64_t* tokens, int64_t count) {
  if (const size_t at = taken.load(); at < most_steps) {
    Step& step = steps[at];
    for (int kind = 0; kind < kKinds; ++kind) step.counts[kind] = counts[kind].load();
    step.first = begins.exchange(false);
    taken.store(at + 1);
  }
  do_wrong();
  if (inner != nullptr) inner->publish(inner->self, ids, tokens, count);
}

const weft::resident::Outlet outlet{nullptr, asked, publish};

}  // namespace

extern "C" {

// -- for the test ---------------------------------------------------------------------------------

// An outlet that counts, and passes everything on to another one.
const void* counting_outlet(const void* before) {
  inner = static_cast<const weft::resident::Outlet*>(before);
  return &outlet;
}

void counting_pass_over(const int* threads, int number) {
  for (size_t i = 0; i < most_names; ++i) {
    passed_over[i].store(i < static_cast<size_t>(number) ? threads[i] : 0);
  }
  lists.fetch_add(1);
}

void counting_lease() { begins.store(true); }

void counting_fault(int which) {
  fault = static_cast<Fault>(which);
  static bool started = false;
  if (fault == kOtherThread && !std::exchange(started, true)) std::thread(other_thread).detach();
}

// Takes the steps so far: `first` and then the counts of each.
int64_t counting_take(int64_t* to) {
  const size_t number = taken.exchange(0);
  for (size_t i = 0; i < number; ++i) {
    *to++ = steps[i].first;
    for (const int64_t one : steps[i].counts) *to++ = one;
  }
  return static_cast<int64_t>(number);
}

// -- what is counted ------------------------------------------------------------------------------

void* malloc(size_t size) {
  count(kAllocations);
  return __libc_malloc(size);
}
void* calloc(size_t number, size_t size) {
  count(kAllocations);
  return __libc_calloc(number, size);
}
void* realloc(void* memory, size_t size) {
  count(kAllocations);
  return __libc_realloc(memory, size);
}
void* memalign(size_t alignment, size_t size) {
  count(kAllocations);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  count(kAllocations);
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** to, size_t alignment, size_t size) {
  count(kAllocations);
  void* const memory = __libc_memalign(alignment, size);
  if (memory == nullptr) return ENOMEM;
  *to = memory;
  return 0;
}
void* mmap(void* at, size_t size, int protection, int flags, int file, off_t offset) {
  static auto* const real = next<decltype(mmap)>("mmap");
  count(kAllocations);
  return real(at, size, protection, flags, file, offset);
}

[[noreturn]] void __cxa_throw(void* object, void* type, void (*destroy)(void*)) {
  using Throw = void(void*, void*, void (*)(void*));
  static Throw* const real = next<Throw>("__cxa_throw");
  count(kThrows);
  real(object, type, destroy);
  abort();
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static auto* const real = next<decltype(pthread_mutex_lock)>("pthread_mutex_lock");
  count(kLocks);
  if (!is_of_a_pool(mutex)) count(kStrangeLocks);
  return real(mutex);
}
int pthread_rwlock_rdlock(pthread_rwlock_t* lock) {
  static auto* const real = next<decltype(pthread_rwlock_rdlock)>("pthread_rwlock_rdlock");
  count(kStrangeLocks);
  return real(lock);
}
int pthread_rwlock_wrlock(pthread_rwlock_t* lock) {
  static auto* const real = next<decltype(pthread_rwlock_wrlock)>("pthread_rwlock_wrlock");
  count(kStrangeLocks);
  return real(lock);
}

// Threads of a pool sleep by this one, which is their own business.
int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  static auto* const real = next_of_condition<decltype(pthread_cond_wait)>("pthread_cond_wait");
  sleeps_under(mutex);
  return real(condition, mutex);
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* end) {
  static auto* const real =
      next_of_condition<decltype(pthread_cond_timedwait)>("pthread_cond_timedwait");
  count(kWaits);
  return real(condition, mutex, end);
}
int sem_wait(sem_t* semaphore) {
  static auto* const real = next<decltype(sem_wait)>("sem_wait");
  count(kWaits);
  return real(semaphore);
}
int sem_timedwait(sem_t* semaphore, const timespec* end) {
  static auto* const real = next<decltype(sem_timedwait)>("sem_timedwait");
  count(kWaits);
  return real(semaphore, end);
}
int sem_clockwait(sem_t* semaphore, clockid_t clock, const timespec* end) {
  static auto* const real = next<decltype(sem_clockwait)>("sem_clockwait");
  count(kWaits);
  return real(semaphore, clock, end);
}

// Waits of std::atomic and of the ring.
long syscall(long number, ...) {
  using Call = long(long, ...);
  static Call* const real = next<Call>("syscall");
  va_list rest;
  va_start(rest, number);
  long words[6];
  for (long& word : words) word = va_arg(rest, long);
  va_end(rest);
  constexpr long futex_waitv = 449;
  const bool waits = number == SYS_futex && ((words[1] & FUTEX_CMD_MASK) == FUTEX_WAIT ||
                                             (words[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET);
  if (waits || number == futex_waitv) count(kWaits);
  return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

}  // extern "C"
