// Every interleaving of the ring's atomic steps.
//
//   interleave           explores all scenarios; prints their numbers; exit status 1 on a violation
#include "explorer.hpp"

// A small info page, so that its interleavings can be listed.
#define WEFT_RING_INFO(X) X(first) X(second) X(third) X(fourth)
#include "ring.hpp"

using namespace weft::ring;

namespace explore {

struct World {
  Slot slot{};
  uint32_t client_epoch = 1;
  Doorbell bell{};
  InfoPage info{};
  uint64_t shadow[16] = {};  // what the scenario keeps track of
};

World world;

void reset_world() { world = World{}; }

void hash_world(Hash& hash) {
  // The texts of the slot stay as they are.
  hash.mix(&world.slot, offsetof(Slot, input) + 64);
  hash.mix(&world.client_epoch, sizeof world.client_epoch);
  hash.mix(&world.bell, sizeof world.bell);
  hash.mix(&world.info, sizeof world.info);
  hash.mix(world.shadow, sizeof world.shadow);
}

// -- what the scenarios share ---------------------------------------------------------------------

Word now(uint64_t word) { return Word::of(word); }
bool is(State state) { return now(world.slot.state).state() == state; }

enum Shadow { kWriter, kHolder, kAnswers, kStarted, kEnded, kGranted, kTold, kAsked };

// The payload: whoever writes it must be alone.
void use_payload(uint64_t who, Shadow kind) {
  require(world.shadow[kind] == 0, "two owners at once");
  world.shadow[kind] = who;
  step();
  require(world.shadow[kind] == who, "two owners at once");
  world.shadow[kind] = 0;
}

// One request by request plane `who`; false if the slot was taken by another one.
bool ask(uint64_t who, uint64_t question, bool wait_for_free) {
  Slot& slot = world.slot;
  Tag tag;
  for (;;) {
    if (begin_writing(slot, tag) == Outcome::Done) break;
    if (!wait_for_free) return false;
    wait_until([] { return is(State::Empty); });
  }
  settled(1, who, question, tag.generation);
  use_payload(who, kWriter);
  slot.input.request_id = question;
  ++world.shadow[kAsked];
  require(submit(slot, tag) == Outcome::Done, "a submission failed");
  wait_until([tag] {
    return is(State::DecodeCompleted) || now(world.slot.state).tag.generation != tag.generation;
  });
  settled(2, who, question, tag.generation);
  require(now(slot.state).tag.generation == tag.generation, "a slot was taken from its owner");
  const Reason reason = now(load(slot.state)).reason();
  const uint32_t tokens = now(load(slot.published)).value;
  require(reason == Reason::Length ? tokens == 2 : tokens <= 2, "a token is lost");
  require(slot.input.request_id == question, "the answer to another request");
  ++world.shadow[kAnswers];
  require(release(slot, tag) == Outcome::Done, "a release failed");
  settled(3, who, question);
  return true;
}

// Serve one request with two tokens.
void serve(uint64_t who, uint16_t epoch) {
  Slot& slot = world.slot;
  wait_until([] { return is(State::PrefillPending); });
  Tag tag;
  if (take(slot, epoch, tag) != Outcome::Done) return;
  settled(4, who, epoch, tag.generation);
  use_payload(who, kHolder);
  const uint32_t from = now(load(slot.published)).value;
  require(move_as_engine(slot, tag, State::DecodeProcessing) == Outcome::Done, "engine: no decode");
  Reason reason = Reason::Length;
  for (uint32_t i = from; i < 2; ++i) {
    reason = cancelled(slot, tag);
    if (reason != Reason::None) break;
    reason = Reason::Length;
    require(publish(slot.published, tag, i, 1) == Outcome::Done, "engine: a lost token");
    settled(5, who, i, tag.generation);
  }
  require(move_as_engine(slot, tag, State::DecodeCompleted, reason) == Outcome::Done,
          "engine: the end was lost");
  settled(6, who, epoch, tag.generation);
}

// -- scenarios ------------------------------------------------------------------------------------

// A holder of the first request's handle comes back at any time during the second one.
Scenario stale_handles() {
  return {"stale handles",
          [] {
            actors.push_back(actor([] {
              ask(1, 10, true);
              ask(1, 11, true);
            }));
            actors.push_back(actor([] {
              serve(7, 1);
              serve(7, 1);
            }));
            actors.push_back(actor([] {
              Slot& slot = world.slot;
              wait_until([] { return now(world.slot.state).tag.generation >= 1; });
              const Tag old{1, 0}, client{0, 0};
              // These may still hit words that the ended request has left, and must do no harm.
              cancel(slot, old, Reason::Cancelled);
              publish(slot.published, old, 2, 1);
              const bool stale = submit(slot, client) != Outcome::Done &&
                                 release(slot, client) != Outcome::Done &&
                                 move_as_engine(slot, old, State::DecodeCompleted) != Outcome::Done;
              require(stale, "a stale handle moved a slot");
            }));
          },
          [] {
            require(world.shadow[kAnswers] == 2, "a request is lost");
            require(is(State::Empty) && now(world.slot.state).tag.generation == 2, "not emptied");
            require(now(world.slot.cancel).bits() == (Word{{0, 1}, 0}).bits(), "a stale cancel");
          }};
}

// A cancellation may come at any time, also too late.
Scenario cancellation() {
  return {"cancellation",
          [] {
            actors.push_back(actor([] {
              ask(1, 10, true);
              ask(1, 11, true);
            }));
            actors.push_back(actor([] {
              serve(7, 1);
              serve(7, 1);
            }));
            actors.push_back(actor([] {
              cancel(world.slot, Tag{0, 0}, Reason::Cancelled);
              cancel(world.slot, Tag{0, 0}, Reason::Error);
            }));
          },
          [] {
            require(world.shadow[kAnswers] == 2, "a request is lost");
            require(now(world.slot.cancel).value == 0, "the wrong request was cancelled");
          }};
}

// Two threads that both believe to be the request plane.
Scenario two_writers() {
  return {"two writers",
          [] {
            actors.push_back(actor([] { ask(1, 10, true); }));
            actors.push_back(actor([] { ask(2, 20, true); }));
            actors.push_back(actor([] {
              serve(7, 1);
              serve(7, 1);
            }));
          },
          [] { require(world.shadow[kAnswers] == 2, "a request is lost"); }};
}

// Two threads that both believe to be the engine.
Scenario two_engines() {
  return {"two engines",
          [] {
            const auto engine = [](uint64_t who) {
              wait_until([] { return is(State::PrefillPending) || world.shadow[kAnswers]; });
              if (world.shadow[kAnswers]) return;
              Tag tag;
              if (take(world.slot, 1, tag) != Outcome::Done) return;
              use_payload(who, kHolder);
              publish(world.slot.published, tag, 0, 1);
              publish(world.slot.published, tag, 1, 1);
              require(move_as_engine(world.slot, tag, State::DecodeCompleted, Reason::Length) ==
                          Outcome::Done,
                      "engine: the end was lost");
            };
            actors.push_back(actor([] { ask(1, 10, true); }));
            actors.push_back(actor([engine] { engine(7); }));
            actors.push_back(actor([engine] { engine(8); }));
          },
          [] { require(world.shadow[kAnswers] == 1, "a request is lost"); }};
}

// An engine stalls anywhere; its successor recovers; then the first one comes back.
Scenario zombie_engine() {
  return {"zombie engine",
          [] {
            actors.push_back(actor([] { ask(1, 10, true); }));
            actors.push_back(actor([] {
              Slot& slot = world.slot;
              wait_until([] { return is(State::PrefillPending); });
              Tag tag;
              if (take(slot, 1, tag) != Outcome::Done) return;
              move_as_engine(slot, tag, State::DecodeProcessing);
              for (uint32_t i = 0; i < 2; ++i) {
                const bool granted = publish(slot.published, tag, i, 1) == Outcome::Done;
                require(!granted || now(slot.published).tag == tag, "a zombie published");
                if (!granted) return;
              }
              move_as_engine(slot, tag, State::DecodeCompleted, Reason::Length);
            }));
            actors.push_back(actor([] {
              wait_until([] { return is(State::PrefillProcessing) || is(State::DecodeProcessing) ||
                                     world.shadow[kAnswers]; });
              Slot& slot = world.slot;
              const Outcome outcome = requeue(slot, 2);
              if (outcome != Outcome::Done) return;  // it ended before
              Tag tag;
              require(take(slot, 2, tag) == Outcome::Done, "recovery: not taken");
              const uint32_t from = now(load(slot.published)).value;
              for (uint32_t i = from; i < 2; ++i) {
                require(publish(slot.published, tag, i, 1) == Outcome::Done, "recovery: a token");
              }
              require(move_as_engine(slot, tag, State::DecodeCompleted, Reason::Length) ==
                          Outcome::Done,
                      "recovery: the end was lost");
            }));
          },
          [] { require(world.shadow[kAnswers] == 1, "the request is lost"); }};
}

// A request plane is killed anywhere. The engine reclaims while a new request plane attaches.
Scenario dead_client() {
  return {"dead request plane",
          [] {
            actors.push_back(actor([] { ask(1, 10, true); }, true));
            actors.push_back(actor([] {  // the engine, which has noticed the death
              Slot& slot = world.slot;
              wait_until([] { return actors[0].killed || actors[0].done; });
              const uint32_t client = load(world.client_epoch);
              if (client == 1) {
                reclaim(slot, world.client_epoch, 1);
                Tag tag;
                const bool pending = Word::of(load(slot.state)).state() == State::PrefillPending;
                // The new request plane may have submitted meanwhile; then it is served.
                if (pending && load(world.client_epoch) == 1 &&
                    take(slot, 1, tag) == Outcome::Done) {
                  move_as_engine(slot, tag, State::DecodeCompleted, Reason::Cancelled);
                  reclaim(slot, world.client_epoch, 1);
                }
              }
              while (world.shadow[kAnswers] < world.shadow[kGranted] || !world.shadow[kTold]) {
                wait_until([] { return is(State::PrefillPending) || world.shadow[kTold]; });
                if (world.shadow[kTold]) return;
                Tag tag;
                if (take(slot, 1, tag) != Outcome::Done) continue;
                const Reason why = cancelled(slot, tag);
                if (why == Reason::None) {
                  publish(slot.published, tag, 0, 1);
                  publish(slot.published, tag, 1, 1);
                }
                move_as_engine(slot, tag, State::DecodeCompleted,
                               why == Reason::None ? Reason::Length : why);
              }
            }));
            actors.push_back(actor([] {  // the new request plane
              Slot& slot = world.slot;
              wait_until([] { return actors[0].killed || actors[0].done; });
              world.shadow[kWriter] = 0;
              store(world.client_epoch, 3u);
              const Word word = Word::of(load(slot.state));
              if (word.state() == State::Writing || word.state() == State::DecodeCompleted) {
                release(slot, word.tag);
              } else if (word.state() != State::Empty) {
                cancel(slot, word.tag, Reason::Cancelled);
                wait_until([] { return is(State::DecodeCompleted) || is(State::Empty); });
                release(slot, word.tag);
              }
              // A dead request plane cannot write; ours must be answered in full.
              const uint64_t before = world.shadow[kAnswers];
              require(is(State::Empty), "the slot is lost");
              require(ask(2, 20, false), "the slot is not free");
              require(world.shadow[kAnswers] == before + 1, "the request is lost");
              world.shadow[kTold] = 1;
            }));
          },
          [] { require(world.shadow[kTold] == 1, "the request is lost"); }};
}

// News and sleep cross each other in every way; the sleeper must always wake.
Scenario wake_up_calls() {
  return {"wake-ups",
          [] {
            actors.push_back(actor([] {
              uint32_t woken = 0;
              for (int i = 0; i < 3; ++i) {
                ++world.shadow[kTold];
                if (ring_bell(world.bell, woken)) world.shadow[kGranted] = 1;
              }
            }));
            actors.push_back(actor([] {
              uint32_t seen = 0;
              while (world.shadow[kStarted] < 3) {
                seen = load(world.bell.rung);
                world.shadow[kStarted] = world.shadow[kTold];
                if (world.shadow[kStarted] == 3 || !go_to_sleep(world.bell, seen)) continue;
                wait_until([] { return world.shadow[kGranted] == 1; });
                world.shadow[kGranted] = 0;
                wake_up(world.bell);
              }
            }));
          },
          [] {}};
}

Scenario info_page() {
  return {"info page",
          [] {
            actors.push_back(actor([] {
              for (uint64_t version = 1; version <= 3; ++version) {
                uint64_t values[kInfoFields];
                for (uint64_t& value : values) value = version;
                write_info(world.info, values);
              }
            }, true));
            actors.push_back(actor([] {
              uint64_t values[kInfoFields];
              if (!read_info(world.info, values, 2)) return;
              for (const uint64_t value : values) {
                require(value == values[0], "a torn info page");
              }
            }));
          },
          [] {}};
}

}  // namespace explore

int main() {
  using namespace explore;
  return explore_all({stale_handles(), cancellation(), two_writers(), two_engines(),
                      zombie_engine(), dead_client(), wake_up_calls(), info_page()});
}
