// The resident loop of a GPU on a device that stands in for one. Its lanes take turns in an order that is
// shuffled at each barrier. It refuses what a GPU refuses: launch 121 of an execution, and a graph that has
// not retired since its last launch, which is when the one behind it is done, at the latest.
//
// Usage: device_loop LANES CASES. What comes out must be what one lane gives on a host. It must not with
// WEFT_TORN (a port without barriers), with WEFT_LAUNCHES=121 or with WEFT_EXECUTABLES=1.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "resident/cuda_port.hpp"
#include "world.hpp"

namespace {

using namespace weft::resident;

constexpr int kLimit = 120;             // launches of an execution
constexpr int64_t kForever = int64_t{1} << 62;

[[noreturn]] void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

// Threads of a block, one at a time.
class Block {
 public:
  Block(int64_t lanes, uint32_t seed) : random_(seed), lanes_(lanes), stacks_(lanes) {
    for (auto& stack : stacks_) stack = std::make_unique<char[]>(kStack);
  }

  int64_t lane() const { return lane_; }
  int64_t lanes() const { return lanes_; }

  // Runs one body a lane to its end.
  void run(const std::function<void()>& body) {
    body_ = &body;
    contexts_.assign(lanes_, {});
    ended_ = 0;
    std::vector<int64_t> order(lanes_);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      getcontext(&contexts_[lane]);
      contexts_[lane].uc_stack.ss_sp = stacks_[lane].get();
      contexts_[lane].uc_stack.ss_size = kStack;
      contexts_[lane].uc_link = &main_;
      const auto self = reinterpret_cast<uintptr_t>(this);
      makecontext(&contexts_[lane], reinterpret_cast<void (*)()>(&Block::enter), 2,
                  static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
    }
    while (ended_ == 0) {
      std::shuffle(order.begin(), order.end(), random_);
      for (const int64_t lane : order) {
        lane_ = lane;
        swapcontext(&main_, &contexts_[lane]);
      }
      verdict_ = pending_;
      pending_ = false;
      if (ended_ != 0 && ended_ != lanes_) fail("some lanes wait at a barrier that others never meet");
    }
  }

  bool meet(bool vote) {
    pending_ |= vote;
    swapcontext(&contexts_[lane_], &main_);
    return verdict_;
  }

 private:
  static constexpr size_t kStack = 1 << 16;

  static void enter(unsigned high, unsigned low) {
    auto& self = *reinterpret_cast<Block*>(uint64_t{high} << 32 | low);
    (*self.body_)();
    ++self.ended_;
  }

  std::mt19937 random_;
  const int64_t lanes_;
  int64_t lane_ = 0, ended_ = 0;
  bool pending_ = false, verdict_ = false;
  std::vector<std::unique_ptr<char[]>> stacks_;
  std::vector<ucontext_t> contexts_;
  ucontext_t main_{};
  const std::function<void()>* body_ = nullptr;
};

// A device, and the world that its graphs compute on.
struct Device {
  Device(World& world, Block& block, uint32_t seed) : world(world), block(block), random(seed) {
    results.resize(2 * (1 + world.plan.rows));
    tokens.resize(world.given.size());
    finite.resize(world.plan.rows);
    board.tokens = tokens.data();
    board.finite = reinterpret_cast<bool*>(finite.data());
  }

  bool launch(int graph) {
    if (launches == kLimit || graph == waiting || graph == draining) return false;
    if (waiting >= 0) fail("a graph was launched before the one ahead of it was done");
    if (world.launched == world.plan.failed_after) return false;
    ++launches;
    waiting = graph;
    return true;
  }

  // A graph that was launched computes, now or later; by then the one before it has retired.
  void go_on() {
    if (waiting < 0 || random() % 3 == 0) return;
    compute();
    draining = waiting;
    waiting = -1;
  }

  // A step, and what its last node says.
  void compute() {
    std::vector<int64_t> out(world.plan.rows);
    world.launch(out.data());
    for (int64_t i = 0; i < world.plan.rows; ++i) {
      results[2 * (1 + i)] = world.finite[i] ? out[i] : -1;
    }
    world.finite.assign(world.finite.size(), 1);  // the loop is to find it out by itself
    state.computed = state.launched;
  }

  World& world;
  Block& block;
  std::mt19937 random;
  std::vector<int64_t> results, tokens;
  std::vector<char> finite;
  Board board{};
  LoopState state{};
  int waiting = -1, draining = -1, launches = 0;
  bool again = false;
  int64_t looks_at_clock = 0, executions = 0;
};

struct StandIn {
  using Graph = int;

  int64_t lane() const { return device.block.lane(); }
  int64_t lanes() const { return device.block.lanes(); }
  void sync() const {
#ifndef WEFT_TORN
    device.block.meet(false);
#endif
  }
  bool any(bool one) const { return device.block.meet(one); }
  void fence() const {}
  uint32_t load(uint32_t& word) const {
    if (&word == &device.board.bell && device.world.looks++ == device.world.plan.asked_after) word = 1;
    return word;
  }
  void store(int64_t& word, int64_t value) const { word = value; }
  void store(int32_t& word, int32_t value) const { word = value; }
  // Stands, until it is late.
  int64_t now_ns() const {
    const bool late = device.world.launched == device.world.plan.late_after;
    return device.looks_at_clock++ > 0 && late ? kForever : 0;
  }
  void rest() const { device.go_on(); }
  bool launch(Graph graph) const { return device.launch(graph); }
  bool relaunch() const { return device.again = true; }

  Device& device;
};

struct Outcome {
  int64_t done;
  End end;
  bool operator==(const Outcome&) const = default;
};

// One lane on a host.
struct Plain {
  World& world;
  int64_t lane() const { return 0; }
  int64_t lanes() const { return 1; }
  void sync() const {}
  bool any(bool one) const { return one; }
  bool asked() { return world.looks++ == world.plan.asked_after; }
  bool late() const { return world.launched == world.plan.late_after; }
  bool pauses() const { return false; }
  void publish(const int64_t* given, int64_t count) {
    world.published.insert(world.published.end(), given, given + count);
  }
  bool launch(const Rows&, int64_t* given) { return world.launch(given); }
};

Outcome on_host(World& world) {
  Plain port{world};
  End end = End::none;
  const Rows rows = world.rows();
  const int64_t done = run(rows, world.plan.steps, port, end);
  return {done, end};
}

// By the resident driver, or by the node of a graph that loops.
Outcome on_device(World& world, Device& device, bool resident) {
  const int64_t count = world.plan.rows;
  std::vector<int32_t> from(count), tables[2];
  std::vector<GroupRows> groups = world.groups;
  std::vector<int64_t> row(count), length(count);
  for (int64_t i = 0; i < count; ++i) {  // rows of their own, and tables in another order
    row[i] = i, length[i] = world.length[world.row[i]];
    from[i] = static_cast<int32_t>((count - 1 - i) * kBlocks);
  }
  for (int g = 0; g < 2; ++g) {
    tables[g].resize(world.tables[g].size());
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(world.tables[g].begin() + i * kBlocks, kBlocks, tables[g].begin() + from[i]);
    }
    groups[g] = {tables[g].data(), 0, world.slots[g].data(), from.data()};
  }
  std::vector<uint8_t> buckets(kMostRows + 1, kBuckets - 1);
  buckets[count] = static_cast<uint8_t>(count % 3);
  Loop<int> loop{};
  loop.rows = world.rows();
  loop.rows.row = row.data(), loop.rows.length = length.data(), loop.rows.tokens = nullptr;
  loop.rows.groups = groups.data();
  loop.steps = world.plan.steps, loop.limit_ns = 1;
  loop.results = device.results.data();
  loop.board = &device.board, loop.state = &device.state, loop.buckets = buckets.data();
  for (int b = 0; b < kBuckets; ++b) {
    for (int e = 0; e < kExecutables; ++e) loop.graphs[b][e] = b * kExecutables + e;
  }
  StandIn gpu{device};
  if (resident) {
    do {
      device.again = false, device.launches = 0, device.draining = -1;
      device.block.run([&] { serve(loop, gpu); });
      ++device.executions;
      if (device.waiting >= 0) fail("an execution has ended before its last step");
    } while (device.again);
  } else {
    bool more = true;
    while (more) {
      device.block.run([&] {
        const bool another = between(loop, gpu);
        if (gpu.lane() == 0) more = another;
      });
      if (more) device.compute();
    }
  }
  for (int64_t i = 0; i < count; ++i) world.length[world.row[i]] = length[i];
  const auto all = device.tokens.begin();
  world.published.assign(all, all + device.board.published * count);
  for (int64_t i = 0; i < (device.board.done + 1) * count; ++i) {
    if (device.tokens[i] != world.given[i]) fail("the board has other tokens than the loop");
  }
  world.finite.assign(device.finite.begin(), device.finite.end());
  return {device.board.done, static_cast<End>(device.board.end)};
}

bool same(const World& one, const World& other) {
  return one.length == other.length && one.counters == other.counters &&
         one.given == other.given && one.published == other.published &&
         one.launched == other.launched && one.finite == other.finite;
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  const int64_t lanes = std::atoll(words[1]);
  const int cases = std::atoi(words[2]);
  std::mt19937 random(5);
  Block block(lanes, 7);
  int64_t seen[8] = {}, executions = 0;
  for (int i = 0; i < cases; ++i) {
    const auto draw = [&](int64_t most) { return static_cast<int64_t>(random() % (most + 1)); };
    const bool resident = draw(3) > 0, lasting = i % 4 == 0;
    Plan plan{1 + draw(lasting ? 6 : 300), 1 + draw(lasting ? 370 : 30), -1, -1, -1, -1, 0};
    if (!lasting) plan.stop = draw(3);
    int64_t* const ends[] = {&plan.asked_after, &plan.late_after, &plan.numbers_after,
                             &plan.failed_after};
    if (draw(1) == 0) *ends[draw(resident ? 3 : 2)] = 1 + draw(lasting ? 300 : 20);
    World alone(plan, i), many(plan, i);
    Device device(many, block, i);
    const Outcome wanted = on_host(alone), got = on_device(many, device, resident);
    ++seen[static_cast<int>(wanted.end)];
    executions = std::max(executions, device.executions);
    if (wanted != got || !same(alone, many)) {
      std::printf("case %d: %lld steps, end %d; on the device %lld steps, end %d\n", i,
                  static_cast<long long>(wanted.done), static_cast<int>(wanted.end),
                  static_cast<long long>(got.done), static_cast<int>(got.end));
      return 1;
    }
  }
  for (int end = 1; end < 7; ++end) std::printf("%lld ", static_cast<long long>(seen[end]));
  std::printf("%lld\n", static_cast<long long>(executions));
}
