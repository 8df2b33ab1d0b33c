// The pool under a sanitizer: several callers at once, a pool that is resized meanwhile, phases in
// their order, and bodies that throw.
#include "pool.hpp"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

using namespace weft;

namespace {

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

void check_phases() {
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

void check_throwing() {
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

}  // namespace

int main(int, char** words) {
  const int rounds = std::atoi(words[1]);
  std::atomic<bool> over{false};
  std::thread resizer([&] {
    for (int i = 0; !over; ++i) {
      shared_pool().resize(1 + i % 4);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < rounds; ++i) {
        check_phases();
        if (i % 8 == 0) check_throwing();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  over = true;
  resizer.join();
  shared_pool().resize(1);
  std::puts("good");
}
