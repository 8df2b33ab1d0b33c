// Every interleaving of the steps of a job in a mailbox: client, worker, and the death of a worker.
#include "../ring/explorer.hpp"

#include "job_state.hpp"

using namespace weft;
using job::State;

namespace explore {

struct World {
  uint64_t word = 0;
  uint64_t user = 0;    // who writes the payload and the row's blocks at present
  uint64_t asked = 0;   // what the job is about
  uint64_t answer = 0;
  uint64_t results = 0;
  uint64_t over = 0;    // the client has all that it wants
};
World world;

void reset_world() { world = World{}; }
void hash_world(Hash& hash) { hash.mix(&world, sizeof world); }

enum User : uint64_t { kNobody, kClient, kWorker, kNextWorker };

State state() { return job::Word::of(world.word).state; }

// Whoever uses a slot's payload or its row's blocks must be alone.
void use(User who) {
  require(world.user == kNobody, "two owners at once");
  world.user = who;
  step();
  require(world.user == who, "two owners at once");
  world.user = kNobody;
}

void ask(uint32_t layer) {
  use(kClient);
  world.asked = layer;
  job::submit(world.word, layer);
}

void take_result(uint32_t layer) {
  wait_until([] { return state() == State::Done; });
  const job::Word seen = job::look(world.word);
  settled(1, layer, seen.bits());
  require(seen.layer == layer && world.answer == layer, "the result of another job");
  ring::store(world.word, job::Word{State::Taken, layer}.bits());
  ++world.results;
}

// Aborts, at whatever step the worker is; the slot is the client's own again then.
void abort_job() {
  if (!job::abort(world.word)) wait_until([] { return state() == State::Empty; });
  use(kClient);
}

// Serves jobs until the client wants no more.
void serve(User who) {
  while (true) {
    wait_until([] { return state() == State::Submitted || world.over; });
    const job::Word seen = job::look(world.word);
    settled(2, who, seen.bits(), world.over);
    if (seen.state != State::Submitted && world.over) return;
    if (seen.state != State::Submitted || !job::claim(world.word, seen)) continue;
    use(who);
    world.answer = world.asked;
    require(world.answer == seen.layer, "computed for another layer");
    job::finish(world.word, seen.layer, State::Done);
    settled(3, who);
  }
}

// A worker that may be killed anywhere, and the one that follows it.
void add_workers() {
  actors.push_back(actor([] { serve(kWorker); }, true));
  actors.push_back(actor([] {
    wait_until([] { return actors[1].killed || actors[1].done; });
    if (actors[1].done) return;
    if (world.user == kWorker) world.user = kNobody;  // it is proved to be dead
    job::reclaim(world.word);
    settled(4);
    serve(kNextWorker);
  }));
}

Scenario layers() {
  return {"layers",
          [] {
            actors.push_back(actor([] {
              for (uint32_t layer = 1; layer <= 3; ++layer) {
                ask(layer);
                take_result(layer);
              }
              ring::store(world.word, job::Word{}.bits());
              world.over = 1;
            }));
            add_workers();
          },
          [] {
            require(world.results == 3, "a result is lost");
            require(world.word == 0, "the slot is not empty");
          }};
}

// The same layer and another one after a job that was aborted at any step.
Scenario aborts() {
  return {"aborts",
          [] {
            actors.push_back(actor([] {
              ask(1);
              abort_job();
              ask(1);
              take_result(1);
              ask(2);
              abort_job();
              ask(3);
              take_result(3);
              world.over = 1;
            }));
            add_workers();
          },
          [] { require(world.results == 2, "a result is lost"); }};
}

}  // namespace explore

int main() {
  using namespace explore;
  return explore_all({layers(), aborts()});
}
