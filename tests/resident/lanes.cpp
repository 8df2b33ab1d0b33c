// The resident loop with many lanes that take turns in any order: each is a thread, and all of them
// meet at every barrier of the port. What comes out must be what one lane gives.
//
// Usage: lanes LANES CASES. With WEFT_TORN defined the port forgets a barrier, and a case must fail.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "world.hpp"

namespace {

// What lanes share of a port.
struct Meeting {
  explicit Meeting(int64_t lanes) : barrier(lanes), votes(lanes) {}
  std::barrier<> barrier;
  std::vector<char> votes;
  bool verdict = false;
};

class LanePort {
 public:
  LanePort(World& world, Meeting& meeting, int64_t lane, int64_t lanes)
      : world_(world), meeting_(meeting), lane_(lane), lanes_(lanes), random_(lane + 1) {}

  int64_t lane() const { return lane_; }
  int64_t lanes() const { return lanes_; }
  void sync() {
    dawdle();
#ifndef WEFT_TORN
    meeting_.barrier.arrive_and_wait();
#endif
  }
  bool any(bool one) {
    meeting_.votes[lane_] = one;
    meeting_.barrier.arrive_and_wait();
    return together([&] {
      for (const char vote : meeting_.votes) {
        if (vote) return true;
      }
      return false;
    });
  }
  bool asked() {
    return together([&] { return world_.looks++ == world_.plan.asked_after; });
  }
  bool late() {
    return together([&] { return world_.launched == world_.plan.late_after; });
  }
  bool pauses() const { return false; }
  void publish(const int64_t* given, int64_t count) {
    together([&] {
      world_.published.insert(world_.published.end(), given, given + count);
      return true;
    });
  }
  bool launch(const Rows&, int64_t* given) {
    return together([&] { return world_.launch(given); });
  }

 private:
  // One lane does it, as soon as it comes, and all of them know what came out.
  template <class Do>
  bool together(Do&& what) {
    if (lane_ == 0) meeting_.verdict = what();
    meeting_.barrier.arrive_and_wait();
    const bool verdict = meeting_.verdict;
    meeting_.barrier.arrive_and_wait();
    return verdict;
  }
  void dawdle() {
    for (uint32_t i = random_() % 3; i > 0; --i) std::this_thread::yield();
    if (random_() % 512 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  World& world_;
  Meeting& meeting_;
  const int64_t lane_, lanes_;
  std::mt19937 random_;
};

std::pair<int64_t, End> run(World& world, int64_t lanes) {
  Meeting meeting(lanes);
  const Rows rows = world.rows();
  std::vector<std::pair<int64_t, End>> found(lanes);
  std::vector<std::thread> threads;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    threads.emplace_back([&, lane] {
      LanePort port(world, meeting, lane, lanes);
      End end = End::none;
      const int64_t done = weft::resident::run(rows, world.plan.steps, port, end);
      found[lane] = {done, end};
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& one : found) {
    if (one != found[0]) return {-1, End::none};
  }
  return found[0];
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  const int64_t lanes = std::atoll(words[1]);
  const int cases = std::atoi(words[2]);
  std::mt19937 random(5);
  int64_t seen[16] = {};
  for (int i = 0; i < cases; ++i) {
    const auto draw = [&](int64_t most) { return static_cast<int64_t>(random() % (most + 1)); };
    const auto once = [&](int64_t most) { return draw(2) == 0 ? draw(most) : int64_t{-1}; };
    Plan plan{1 + draw(40), draw(30), -1, -1, -1, -1, draw(3)};
    int64_t* const ends[] = {&plan.asked_after, &plan.late_after, &plan.failed_after,
                             &plan.numbers_after};
    *ends[draw(3)] = once(20);
    World alone(plan, i), many(plan, i);
    const auto wanted = run(alone, 1), got = run(many, lanes);
    ++seen[static_cast<int>(wanted.second)];
    if (wanted != got || !(alone == many)) {
      std::printf("case %d: %lld steps, end %d; with %lld lanes %lld steps, end %d\n", i,
                  static_cast<long long>(wanted.first), static_cast<int>(wanted.second),
                  static_cast<long long>(lanes), static_cast<long long>(got.first),
                  static_cast<int>(got.second));
      return 1;
    }
  }
  for (int end = 1; end < 7; ++end) std::printf("%lld ", static_cast<long long>(seen[end]));
  std::puts("");
}
