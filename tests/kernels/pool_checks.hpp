// Checks of the thread pool, alike for the pool alone and beside layers: phases in their order, bodies
// that throw, and several callers of a pool that is resized meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pool.hpp"

namespace weft {

inline void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

inline void check_phases() {
  constexpr int64_t counts[] = {5, 1, 0, 17, 3};
  int64_t written[17] = {};  // by one thread each, and read by others in the next phase
  std::atomic<int64_t> done[5] = {};
  shared_pool().run_phases(counts, [&](int phase, int64_t item) {
    for (int before = 0; before < phase; ++before) {
      require(done[before] == counts[before], "a phase begins when the one before is done");
    }
    if (phase == 3) written[item] = item + 1;
    if (phase == 4) require(written[16 - item] == 17 - item, "what a phase wrote is seen");
    ++done[phase];
  });
  for (int phase = 0; phase < 5; ++phase) require(done[phase] == counts[phase], "all items ran");
}

// Every item runs once, however few there are for each thread.
inline void check_shares() {
  constexpr int64_t counts[] = {1, 100, 7, 1000};
  std::vector<std::atomic<int>> ran[4];
  for (int phase = 0; phase < 4; ++phase) ran[phase] = std::vector<std::atomic<int>>(counts[phase]);
  shared_pool().run_phases(counts, [&](int phase, int64_t item) { ++ran[phase][item]; });
  shared_pool().run_phases({}, [](int, int64_t) { require(false, "no phases have no items"); });
  for (const auto& phase : ran) {
    for (const auto& times : phase) require(times == 1, "each item runs once");
  }
  for (int64_t items : {1, 5, 64, 77, 592}) {
    int64_t least = items, most = 0;
    for (int64_t share = 0; share < 64; ++share) {
      const int64_t size = share_begin(items, share + 1, 64) - share_begin(items, share, 64);
      least = std::min(least, size);
      most = std::max(most, size);
    }
    require(share_begin(items, 0, 64) == 0 && share_begin(items, 64, 64) == items, "all items");
    require(most - least <= 1 && most * 64 < items + 64, "shares are alike");
  }
}

// Memory of a place is used by one item at a time, whoever joins meanwhile.
inline void check_places() {
  for (const int places : {1, 2, 3, 40}) {
    std::vector<int64_t> sums(places);  // not atomic
    shared_pool().run_places(places, 200, [&](int place, int64_t item) {
      require(place >= 0 && place < places, "a place is one of those");
      sums[place] += item;
    });
    int64_t all = 0;
    for (const int64_t sum : sums) all += sum;
    require(all == 199 * 200 / 2, "each item has a place of its own");
  }
}

inline void check_throwing() {
  bool thrown = false;
  try {
    shared_pool().run(40, [](int64_t item) {
      if (item % 7 == 3) throw std::runtime_error("as wished");
    });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  require(thrown, "an exception of a body reaches the caller");
}

// A thread's own pool ends with its helpers, and is nobody else's.
inline void check_scope() {
  Pool own(3), inner(2);
  Pool& before = shared_pool();
  {
    const PoolScope scope(own);
    require(&shared_pool() == &own, "a thread has the pool of its scope");
    check_shares();
    std::thread([&] { require(&shared_pool() == &before, "other threads have not"); }).join();
    {
      const PoolScope nested(inner);
      require(&shared_pool() == &inner, "scopes nest");
    }
    require(&shared_pool() == &own, "an inner scope ends");
  }
  require(&shared_pool() == &before, "a scope ends");
}

// Runs `body(caller)` on three threads at once while another one resizes the pool.
template <typename Body>
void run_callers(Body body) {
  std::atomic<bool> over{false};
  std::thread resizer([&] {
    for (int i = 0; !over; ++i) {
      // More threads than are counted together, at times.
      shared_pool().resize(i % 8 == 7 ? 21 : 1 + i % 4, {}, std::vector<int>(i % 2));
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) callers.emplace_back(body, caller);
  for (std::thread& caller : callers) caller.join();
  over = true;
  resizer.join();
  shared_pool().resize(1);
}

}  // namespace weft
