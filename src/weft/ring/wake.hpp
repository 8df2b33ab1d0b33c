// Sleeping on shared words (futex) and waking by eventfd.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <span>
#include <thread>
#include <vector>

#include "ring.hpp"

namespace weft::ring {

struct Waited {
  uint32_t* word;
  uint32_t value;  // sleep only while the word has this value
};

inline long futex(uint32_t* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, op, value, timeout, nullptr, 0);
}

inline void futex_wake(uint32_t* word) { futex(word, FUTEX_WAKE, 1, nullptr); }

// Sleep until one of the words changes and is woken, or `timeout_ns` (< 0: none) have passed. May
// return early. Several words need futex_waitv (Linux 5.16); without it the first one is looked at
// in short naps.
inline void futex_wait_any(std::span<const Waited> words, int64_t timeout_ns) {
  struct Waitv {  // struct futex_waitv, which older headers lack
    uint64_t value, address;
    uint32_t flags, reserved;
  };
  std::vector<Waitv> waiters;
  for (const Waited& waited : words) {
    waiters.push_back({waited.value, reinterpret_cast<uint64_t>(waited.word), 2 /* 32 bits */, 0});
  }
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  const int64_t end = until.tv_nsec + timeout_ns % 1'000'000'000;
  until.tv_sec += timeout_ns / 1'000'000'000 + end / 1'000'000'000;
  until.tv_nsec = end % 1'000'000'000;
  constexpr long kFutexWaitv = 449;  // the same number on every architecture
  const long done = syscall(kFutexWaitv, waiters.data(), waiters.size(), 0,
                            timeout_ns < 0 ? nullptr : &until, CLOCK_MONOTONIC);
  if (done >= 0 || (errno != ENOSYS && errno != EPERM)) return;
  constexpr int64_t kNap = 1'000'000;
  const timespec nap{0, timeout_ns >= 0 && timeout_ns < kNap ? timeout_ns : kNap};
  futex(words[0].word, FUTEX_WAIT, words[0].value, &nap);
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Poll `ready` for `spin_ns`, leaving the core to others now and then; whether it became true.
template <class Ready>
bool spin(Ready ready, int64_t spin_ns) {
  if (ready()) return true;
  const int64_t until = now_ns() + spin_ns;
  while (now_ns() < until) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::this_thread::yield();
  }
  return ready();
}

inline void signal_eventfd(int fd) {
  const uint64_t one = 1;
  // A full counter wakes as well, and a closed one has no reader to wake.
  [[maybe_unused]] const auto written = write(fd, &one, sizeof one);
}

}  // namespace weft::ring
