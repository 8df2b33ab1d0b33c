// A lease between two threads, for the thread sanitizer: one grants or recalls it at any moment, or
// both, and the loop's thread reads what the outlet points to, which the host wrote before.
//
// Usage: lease ROUNDS. With WEFT_TORN defined the host writes after the grant, and the sanitizer must
// find it.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "resident/lease.hpp"

using weft::resident::Lease;
using weft::resident::Outlet;

namespace {

struct Host {
  int64_t written = 0;  // of the host, until the grant; then of the loop, until it has ended
  Outlet outlet{this, [](void*) { return false; },
                [](void* self, const uint64_t*, const int64_t*, int64_t count) {
                  static_cast<Host*>(self)->written += count;
                }};
};

void dawdle(std::mt19937& random) {
  for (uint32_t i = random() % 4; i > 0; --i) std::this_thread::yield();
}

}  // namespace

int main(int count, char** words) {
  if (count < 2) return 2;
  std::mt19937 random(3);
  int seen[3] = {};
  for (int round = std::atoi(words[1]); round > 0; --round) {
    Lease lease;
    Host host;
    int64_t steps = 0;
    bool granted = false;
    const uint32_t how = random() % 4, seed = random();
    std::thread loop([&] {
      std::mt19937 own(seed);
      dawdle(own);
      const Outlet* outlet = nullptr;
      granted = lease.await(outlet);
      if (!granted) return;
      while (steps < 20 && !lease.recalled()) {
        if (outlet) outlet->publish(outlet->self, nullptr, nullptr, 1);
        ++steps;
        if (own() % 2) std::this_thread::yield();
      }
    });
    std::thread other([&, seed] {
      std::mt19937 own(seed + 1);
      dawdle(own);
      if (how == 1 || how == 2) lease.recall();
    });
    dawdle(random);
    if (how != 1) {
      host.written = 100;
      lease.grant(how == 3 ? nullptr : &host.outlet);
#ifdef WEFT_TORN
      host.written = 100;
#endif
    }
    loop.join();
    other.join();
    const int64_t expected = (how != 1) * 100 + (how == 3 ? 0 : steps);
    const bool full = how == 0 || how == 3;
    if (host.written != expected || (full && (!granted || steps != 20)) || (how == 1 && granted)) {
      std::printf("how %u: granted %d, %lld steps\n", how, granted, static_cast<long long>(steps));
      return 1;
    }
    ++seen[granted ? (steps < 20 ? 1 : 2) : 0];
  }
  std::printf("%d %d %d\n", seen[0], seen[1], seen[2]);
}
