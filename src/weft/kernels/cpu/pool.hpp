// A small pool of threads that lives as long as the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace weft {

// The pool's size counts the calling thread, which always takes part: a call makes progress even
// if every other thread is busy with another call, so calls may come from many threads at once.
//
// A thread without work looks for more for some microseconds before it sleeps, since the calls of
// a model's layers follow each other closely.
class Pool {
 public:
  static constexpr int max_phases = 8;

  explicit Pool(int threads) : threads_(threads) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Calls in flight are finished by the threads that they have. If `pinned`, each thread but the
  // calling one stays on a core of its own, and so near to the memory that it was first to write.
  void resize(int threads, bool pinned = false);
  // Calls body(item) once for each item in [0, count) and returns when all are done. Throws the
  // first exception that a body threw.
  void run(int64_t count, const std::function<void(int64_t)>& body);
  // The same for phases of counts[0], counts[1] ... items: body(phase, item). All items of a phase
  // are done before the next begins. After an exception the items that are left are not run. Here
  // neighbouring items are mostly run by one thread; those of `run` begin in their order.
  void run_phases(std::span<const int64_t> counts,
                  const std::function<void(int, int64_t)>& body);

 private:
  struct Job;

  void run_job(std::span<const int64_t> counts, const std::function<void(int, int64_t)>& body,
               int shares);
  void start_helpers();
  void help(int place);
  bool look_for_work(uint64_t seen) const;
  static void work(Job& job, int place);
  static int64_t take(Job& job, int phase, int64_t begin, int64_t end,
                      std::atomic<int64_t>& taken);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<Job*> jobs_;              // those with items left to take
  std::vector<std::thread> helpers_;  // started by the first call that can use them
  std::atomic<int> threads_;
  std::atomic<bool> pinned_{false};
  std::atomic<uint64_t> posted_{0};   // jobs and stops so far: changes are what helpers look for
  int sleeping_ = 0;
  bool stopping_ = false;
  std::mutex resizing_;               // held by the one thread that stops helpers
};

// The process's pool. A forked child gets a new one, since threads do not survive a fork.
Pool& shared_pool();

}  // namespace weft
