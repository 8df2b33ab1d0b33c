// A small pool of threads.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "calls.hpp"

namespace weft {

// The pool's size counts the calling thread, which always takes part: a call makes progress even
// if every other thread is busy with another call, so calls may come from many threads at once.
//
// A thread without work looks for more for some microseconds before it sleeps, since the calls of
// a model's layers follow each other closely.
class Pool {
 public:
  static constexpr int max_phases = 10;

  explicit Pool(int threads) : threads_(threads) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() { resize(1); }  // no call may be in flight

  int threads() const { return threads_; }
  // The NUMA node of each thread, near which the memory of its shares is to lie; none if it does not
  // matter.
  std::vector<int> nodes();
  // Calls in flight are finished by the threads that they have. With `cpus`, thread i stays on
  // cpus[i], but for the calling one, which is thread 0.
  void resize(int threads, std::vector<int> cpus = {}, std::vector<int> nodes = {});
  // Calls body(item) once for each item in [0, count) and returns when all are done. Throws the
  // first exception that a body threw.
  void run(int64_t count, FunctionRef<void(int64_t)> body);
  // The same as body(place, item) by at most so many threads, each at a place of its own in [0, places):
  // memory of a place is used by one item at a time.
  void run_places(int places, int64_t count, FunctionRef<void(int, int64_t)> body);
  // The same for phases of counts[0], counts[1] ... items: body(phase, item). All items of a phase
  // are done before the next begins. After an exception the items that are left are not run. Here
  // a thread begins with a share of neighbouring items, of equal calls always the same one, and
  // then helps out others; items of `run` begin in their order.
  void run_phases(std::span<const int64_t> counts,
                  FunctionRef<void(int, int64_t)> body);

 private:
  struct Job;
  static constexpr int max_jobs = 4;    // that are shared at once; a further one runs alone
  static constexpr int user_groups = 32;

  // Where helpers find a job. The memory of a job is its caller's: whoever may be looking at it is
  // counted here, in several places so that many threads can come and go at once.
  struct Slot {
    struct alignas(64) Users {
      std::atomic<int> value{0};
    };
    alignas(64) std::atomic<bool> taken{false};
    std::atomic<Job*> job{nullptr};
    std::array<Users, user_groups> users{};
  };

  void run_job(Job& job);
  Slot* post(Job& job);
  static void withdraw(Slot& slot);
  void start_helpers();
  void help(int place, int cpu);
  bool look_for_work(uint64_t seen) const;
  void sleep(uint64_t seen);
  static void join(Slot& slot, int place);
  static void work(Job& job, int place);
  static void run_share(Job& job, int phase, int share, int place);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::array<Slot, max_jobs> slots_;
  std::vector<std::thread> helpers_;  // started by the first call that can use them
  std::vector<int> cpus_, nodes_;
  std::atomic<int> threads_;
  std::atomic<int> started_{0};       // helpers
  std::atomic<uint64_t> posted_{0};   // jobs and stops so far: changes are what helpers look for
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
  std::mutex resizing_;               // held by the one thread that stops helpers
};

// The items of a share begin here and end where those of the next one begin.
constexpr int64_t share_begin(int64_t items, int64_t share, int64_t shares) {
  return (items * share + shares - 1) / shares;
}

// The pool of the calling thread: its own within a PoolScope, else the process's. A forked child gets
// a new one of the process, since threads do not survive a fork.
Pool& shared_pool();

// While it lives, calls of this thread run on a pool of their own instead of the process's.
class PoolScope {
 public:
  explicit PoolScope(Pool& pool);
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;
  ~PoolScope();

 private:
  Pool* const before_;
};

// Keeps the calling thread on a processor. Where that is not allowed, it runs where it may.
void stay_on(int cpu);

}  // namespace weft
