// Every interleaving of atomic steps, on the real headers. To be included before them.
//
// Each actor is a coroutine that stops before every atomic operation. The explorer runs all
// schedules of those steps, from scratch each time, and leaves a schedule when it reaches a state
// (shared memory, and what each actor has seen since its last `settled`) that was explored before.
//
// With -DTORN_EXCHANGE an exchange is two steps, so that the explorer must find violations.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace explore {

void step();                    // lets the explorer choose who goes on
void saw(uint64_t value);       // part of the identity of the actor's state
void violation(const char* what);

enum Order {
  memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel,
  memory_order_seq_cst
};

template <class T>
struct AtomicRef {
  T& at;
  explicit AtomicRef(T& word) : at(word) {}
  T load(Order) const {
    step();
    saw(at);
    return at;
  }
  void store(T value, Order) const {
    step();
    at = value;
  }
  bool compare_exchange_strong(T& expected, T wanted, Order, Order) const {
    step();
    bool same = at == expected;
#if defined(TORN_EXCHANGE)
    step();  // as if it were a load and a store
#endif
    saw(same);
    if (same) at = wanted;
    return same;
  }
};

constexpr size_t kStack = 64 * 1024;

struct Actor {
  std::function<void()> run;
  std::function<bool()> ready;  // empty, or what it waits for
  jmp_buf context;
  bool entered = false, done = false, killable = false, killed = false;
  int process = 0;  // actors of one process are killed together; 0: a process of its own
  uint64_t history = 0;
};

std::vector<Actor> actors;
std::vector<std::string> violations;
jmp_buf explorer;
int running = -1;

void step() {
  if (running >= 0 && _setjmp(actors[running].context) == 0) _longjmp(explorer, 1);
}
// From here on what the actor does depends on these values and no others that it has seen.
template <class... Values>
void settled(Values... values) {
  if (running < 0) return;
  actors[running].history = 0;
  (saw(static_cast<uint64_t>(values)), ...);
}
void saw(uint64_t value) {
  if (running < 0) return;
  uint64_t& history = actors[running].history;
  history = (history ^ value) * 0x9e3779b97f4a7c15u + 1;
  history ^= history >> 29;
}
void violation(const char* what) { violations.emplace_back(what); }
void require(bool holds, const char* what) {
  if (!holds) violation(what);
}
void wait_until(std::function<bool()> ready) {
  actors[running].ready = std::move(ready);
  step();
  actors[running].ready = nullptr;
}

void enter() {
  actors[running].run();
  actors[running].done = true;
  _longjmp(explorer, 1);
}

// Go on with an actor until its next step. Only the entry into a fresh stack needs a system call.
void resume(Actor& actor) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  if (_setjmp(explorer) != 0) return;
  if (actor.entered) _longjmp(actor.context, 1);
  actor.entered = true;
  while (stacks.size() < actors.size()) stacks.push_back(std::make_unique<char[]>(kStack));
  ucontext_t fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = stacks[running].get();
  fresh.uc_stack.ss_size = kStack;
  fresh.uc_link = nullptr;
  makecontext(&fresh, enter, 0);
  setcontext(&fresh);
}

class Hash {
 public:
  void mix(const void* from, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(from);
    for (size_t i = 0; i < bytes; i += 4) {
      uint32_t word;
      std::memcpy(&word, at + i, 4);
      value = (value ^ word) * 0x9e3779b97f4a7c15u;
      value ^= value >> 31;
    }
  }
  uint64_t value = 1469598103934665603u;
};

// The memory that the actors share is the includer's: as at first, and its part of a state.
void reset_world();
void hash_world(Hash& hash);

uint64_t hash_state() {
  Hash hash;
  hash_world(hash);
  for (const Actor& actor : actors) {
    const uint64_t own[2] = {actor.history, uint64_t{actor.done} | uint64_t{actor.killed} << 1};
    hash.mix(own, sizeof own);
  }
  return hash.value;
}

struct Choice {
  int taken, of;
};

struct Scenario {
  const char* name;
  std::function<void()> build;   // fills `actors`
  std::function<void()> finish;  // checks the end of a complete schedule
};

// The moves that can be made now: actor i goes on (i), or is killed (i + 100).
std::vector<int> moves() {
  std::vector<int> all;
  for (size_t i = 0; i < actors.size(); ++i) {
    Actor& actor = actors[i];
    if (actor.done || actor.killed) continue;
    if (!actor.ready || actor.ready()) all.push_back(static_cast<int>(i));
    if (actor.killable) all.push_back(static_cast<int>(i) + 100);
  }
  return all;
}

void make(int move) {
  if (move >= 100) {
    const int process = actors[move - 100].process;
    actors[move - 100].killed = true;
    for (Actor& actor : actors) actor.killed |= process != 0 && actor.process == process;
    return;
  }
  running = move;
  ++actors[move].history;
  resume(actors[move]);
  running = -1;
}

void start(const Scenario& scenario) {
  reset_world();
  actors.clear();
  scenario.build();
}

struct Tally {
  uint64_t states = 0, schedules = 0, violations = 0;
  std::string first;
};

Tally explore(const Scenario& scenario) {
  Tally tally;
  std::unordered_set<uint64_t> visited;
  std::vector<Choice> path;
  for (;;) {
    start(scenario);
    violations.clear();
    size_t depth = 0;
    bool known = false;
    for (;;) {
      const std::vector<int> possible = moves();
      if (possible.empty() || !violations.empty()) break;
      if (depth == path.size()) {
        if (!visited.insert(hash_state()).second) {
          known = true;
          break;
        }
        path.push_back({0, static_cast<int>(possible.size())});
      }
      make(possible[path[depth++].taken]);
    }
    if (!known) {
      ++tally.schedules;
      if (violations.empty()) {
        for (const Actor& actor : actors) {
          if (!actor.done && !actor.killed) violation("an actor waits for ever");
        }
        scenario.finish();
      }
      if (!violations.empty() && tally.violations++ == 0) tally.first = violations.front();
    }
    path.resize(depth);
    while (!path.empty() && path.back().taken + 1 == path.back().of) path.pop_back();
    if (path.empty() || tally.violations > 100) break;
    ++path.back().taken;
  }
  tally.states = visited.size();
  return tally;
}

Actor actor(std::function<void()> run, bool killable = false, int process = 0) {
  Actor made;
  made.run = std::move(run);
  made.killable = killable;
  made.process = process;
  return made;
}

// Explores all scenarios and prints their numbers; 1 if there was a violation.
int explore_all(std::initializer_list<Scenario> scenarios) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  int broken = 0;
  for (const Scenario& scenario : scenarios) {
    const Tally tally = explore(scenario);
    std::printf("%-20s %9llu states %8llu schedules %4llu violations %s\n", scenario.name,
                (unsigned long long)tally.states, (unsigned long long)tally.schedules,
                (unsigned long long)tally.violations, tally.first.c_str());
    broken += tally.violations != 0;
  }
  return broken != 0;
}

}  // namespace explore

#define WEFT_RING_ATOMIC_REF explore::AtomicRef
#define WEFT_RING_ORDER ::explore
