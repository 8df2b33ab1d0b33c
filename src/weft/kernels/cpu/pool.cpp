// The thread pool: jobs, helpers, and waking them.

#include "pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <exception>

namespace weft {

struct Pool::Job {
  const std::function<void(int64_t)>& body;
  const int64_t count;
  std::atomic<int64_t> next{0};
  int helpers = 0;  // guarded by the pool's mutex
  std::condition_variable left{};
  std::once_flag failed{};
  std::exception_ptr error{};
};

void Pool::resize(int threads) {
  const std::lock_guard resizing(resizing_);
  std::vector<std::thread> old;
  {
    const std::lock_guard lock(mutex_);
    threads_ = threads;
    stopping_ = true;
    old.swap(helpers_);
  }
  wake_.notify_all();
  for (std::thread& helper : old) helper.join();
  const std::lock_guard lock(mutex_);
  stopping_ = false;
}

void Pool::run(int64_t count, const std::function<void(int64_t)>& body) {
  Job job{body, count};
  std::unique_lock lock(mutex_);
  const bool share = count > 1 && threads_ > 1 && !stopping_;
  if (share) {
    start_helpers();
    jobs_.push_back(&job);
  }
  lock.unlock();
  if (share) wake_.notify_all();
  work(job);
  if (share) {
    lock.lock();
    jobs_.remove(&job);
    job.left.wait(lock, [&] { return job.helpers == 0; });
  }
  if (job.error) std::rethrow_exception(job.error);
}

void Pool::start_helpers() {
  while (static_cast<int>(helpers_.size()) < threads_ - 1) {
    helpers_.emplace_back([this] { help(); });
  }
}

void Pool::help() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job& job = *jobs_.front();
    ++job.helpers;
    lock.unlock();
    work(job);
    lock.lock();
    jobs_.remove(&job);  // it has no items left; it may be gone from the list already
    // The caller sleeps on the job's own variable and frees the job as soon as it can take the
    // mutex with no helper left, so it must be told while the mutex is held.
    if (--job.helpers == 0) job.left.notify_one();
  }
}

void Pool::work(Job& job) {
  while (true) {
    const int64_t item = job.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= job.count) return;
    try {
      job.body(item);
    } catch (...) {
      std::call_once(job.failed, [&] { job.error = std::current_exception(); });
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
