// Every interleaving of the ring's atomic steps.
//
//   interleave           explores all scenarios; prints their numbers; exit status 1 on a violation
#include "explorer.hpp"

// A small info page, so that its interleavings can be listed.
#define WEFT_RING_INFO(X) X(first) X(second) X(third) X(fourth)
#include "log.hpp"
#include "steps.hpp"
#include "resident/lease_steps.hpp"

using namespace weft::ring;
namespace resident = weft::resident;

namespace explore {

struct World {
  uint64_t asked = 0;
  Given given{};
  Slot slot{};
  uint32_t client_epoch = 1;
  Doorbell<kBells> bell{};
  InfoPage info{};
  Log<2, 2> log{};
  uint32_t lease = 0;
  uint64_t shadow[16] = {};  // what the scenario keeps track of
};

World world;

void reset_world() { world = World{}; }

void hash_world(Hash& hash) {
  hash.mix(&world.asked, sizeof world.asked);
  hash.mix(&world.given, sizeof world.given);
  // The texts of the slot stay as they are.
  hash.mix(&world.slot.input.request_id, sizeof world.slot.input.request_id);
  hash.mix(world.slot.more, sizeof world.slot.more);
  hash.mix(&world.slot.prompt_published, sizeof world.slot.prompt_published);
  hash.mix(&world.slot.deaths, sizeof world.slot.deaths);
  hash.mix(&world.client_epoch, sizeof world.client_epoch);
  hash.mix(&world.bell, sizeof world.bell);
  hash.mix(&world.info, sizeof world.info);
  hash.mix(&world.log, sizeof world.log);
  hash.mix(&world.lease, sizeof world.lease);
  hash.mix(world.shadow, sizeof world.shadow);
}

// -- what the scenarios share ---------------------------------------------------------------------

Word now(uint64_t word) { return Word::of(word); }
Words words() { return {world.asked, world.given}; }
bool is(State state) { return Seen{world.asked, world.given.state}.state() == state; }
// The generation of the sequence that has the slot, or had it last.
uint32_t generation() { return now(world.asked).tag.generation; }

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
    if (begin_writing(words(), tag) == Outcome::Done) break;
    if (!wait_for_free) return false;
    wait_until([] { return is(State::Empty); });
  }
  settled(1, who, question, tag.generation);
  use_payload(who, kWriter);
  slot.input.request_id = question;
  ++world.shadow[kAsked];
  require(submit(words(), tag) == Outcome::Done, "a submission failed");
  wait_until([tag] { return is(State::DecodeCompleted) || generation() != tag.generation; });
  settled(2, who, question, tag.generation);
  require(generation() == tag.generation, "a slot was taken from its owner");
  const Seen seen = look(words());
  require(seen.valid() && seen.state() == State::DecodeCompleted, "an end that is none");
  const Reason reason = now(seen.given).reason();
  const Word published = now(load(world.given.published));
  require(published.tag.generation == tag.generation, "the count of another request");
  const uint32_t tokens = published.value;
  require(reason == Reason::Length ? tokens == 2 : tokens <= 2, "a token is lost");
  require(slot.input.request_id == question, "the answer to another request");
  ++world.shadow[kAnswers];
  require(release(words(), tag) == Outcome::Done, "a release failed");
  settled(3, who, question);
  return true;
}

// Take the request that is pending.
bool claim(uint16_t epoch, Tag& tag) {
  return take(words(), world.slot, epoch, tag) == Outcome::Done;
}
Outcome complete(Tag tag, Reason reason) {
  return move_as_engine(world.given, tag, State::DecodeCompleted, reason);
}
bool say(Tag tag, uint32_t from) {
  return publish(world.given.published, tag, from, 1) == Outcome::Done;
}

// Serve one request with two tokens.
void serve(uint64_t who, uint16_t epoch) {
  wait_until([] { return is(State::PrefillPending); });
  Tag tag;
  if (!claim(epoch, tag)) return;
  settled(4, who, epoch, tag.generation);
  use_payload(who, kHolder);
  const uint32_t from = now(load(world.given.published)).value;
  require(move_as_engine(world.given, tag, State::DecodeProcessing) == Outcome::Done,
          "engine: no decode");
  Reason reason = Reason::Length;
  for (uint32_t i = from; i < 2; ++i) {
    reason = cancelled(load(world.asked), tag);
    if (reason != Reason::None) break;
    reason = Reason::Length;
    require(say(tag, i), "engine: a lost token");
    settled(5, who, i, tag.generation);
  }
  require(complete(tag, reason) == Outcome::Done, "engine: the end was lost");
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
              wait_until([] { return generation() >= 2; });
              const Tag old{1, 1}, client{0, 1};
              // These may still hit words that the ended request has left, and must do no harm.
              cancel(world.asked, old, Reason::Cancelled);
              say(old, 2);
              const bool stale = submit(words(), client) != Outcome::Done &&
                                 abandon(words(), client) != Outcome::Done &&
                                 release(words(), client) != Outcome::Done &&
                                 complete(old, Reason::Length) != Outcome::Done;
              require(stale, "a stale handle moved a slot");
            }));
          },
          [] {
            require(world.shadow[kAnswers] == 2, "a request is lost");
            require(is(State::Empty) && generation() == 2, "not emptied");
            require(now(world.asked).reason() == Reason::None, "a stale cancel");
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
              cancel(world.asked, Tag{0, 1}, Reason::Cancelled);
              cancel(world.asked, Tag{0, 1}, Reason::Error);
            }));
          },
          [] {
            require(world.shadow[kAnswers] == 2, "a request is lost");
            require(now(world.asked).reason() == Reason::None, "the wrong request was cancelled");
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
              if (!claim(1, tag)) return;
              use_payload(who, kHolder);
              say(tag, 0);
              say(tag, 1);
              require(complete(tag, Reason::Length) == Outcome::Done, "engine: the end was lost");
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
              wait_until([] { return is(State::PrefillPending); });
              Tag tag;
              if (!claim(1, tag)) return;
              move_as_engine(world.given, tag, State::DecodeProcessing);
              for (uint32_t i = 0; i < 2; ++i) {
                const bool granted = say(tag, i);
                require(!granted || now(world.given.published).tag == tag, "a zombie published");
                if (!granted) return;
              }
              complete(tag, Reason::Length);
            }));
            actors.push_back(actor([] {
              wait_until([] { return is(State::PrefillProcessing) || is(State::DecodeProcessing) ||
                                     world.shadow[kAnswers]; });
              const Outcome outcome = requeue(words(), world.slot, 2);
              if (outcome != Outcome::Done) return;  // it ended before
              Tag tag;
              require(claim(2, tag), "recovery: not taken");
              const uint32_t from = now(load(world.given.published)).value;
              for (uint32_t i = from; i < 2; ++i) require(say(tag, i), "recovery: a token");
              require(complete(tag, Reason::Length) == Outcome::Done, "recovery: the end was lost");
            }));
          },
          [] { require(world.shadow[kAnswers] == 1, "the request is lost"); }};
}

// With -DHASTY_RECLAIM the epoch is read before the state.
void empty_for_the_dead() {
#if defined(HASTY_RECLAIM)
  if (load(world.client_epoch) != 1) return;
  const uint32_t same = 1;
  reclaim(words(), 1, same, 1);
#else
  reclaim(words(), 1, world.client_epoch, 1);
#endif
}

// A request plane is killed anywhere. The engine reclaims while a new request plane attaches.
Scenario dead_client() {
  return {"dead request plane",
          [] {
            actors.push_back(actor([] { ask(1, 10, true); }, true));
            actors.push_back(actor([] {  // the engine, which has noticed the death
              wait_until([] { return actors[0].killed || actors[0].done; });
              if (load(world.client_epoch) == 1) {
                empty_for_the_dead();
                Tag tag;
                const bool pending = look(words()).state() == State::PrefillPending;
                // The new request plane may have submitted meanwhile; then it is served.
                if (pending && load(world.client_epoch) == 1 && claim(1, tag)) {
                  complete(tag, Reason::Cancelled);
                  empty_for_the_dead();
                }
              }
              while (world.shadow[kAnswers] < world.shadow[kGranted] || !world.shadow[kTold]) {
                wait_until([] { return is(State::PrefillPending) || world.shadow[kTold]; });
                if (world.shadow[kTold]) return;
                Tag tag;
                if (!claim(1, tag)) continue;
                const Reason why = cancelled(load(world.asked), tag);
                if (why == Reason::None) {
                  say(tag, 0);
                  say(tag, 1);
                }
                complete(tag, why == Reason::None ? Reason::Length : why);
              }
            }));
            actors.push_back(actor([] {  // the new request plane
              wait_until([] { return actors[0].killed || actors[0].done; });
              world.shadow[kWriter] = 0;
              store(world.client_epoch, 3u);
              const Seen left = look(words());
              const Tag tag = now(left.asked).tag;
              if (left.state() == State::Writing || left.state() == State::DecodeCompleted) {
                release(words(), tag);
              } else if (left.state() != State::Empty) {
                cancel(world.asked, tag, Reason::Cancelled);
                wait_until([] { return is(State::DecodeCompleted) || is(State::Empty); });
                release(words(), tag);
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

// News and sleep cross each other in every way; the reader must always wake. With -DSHARED_BELL both
// writers ring the same one.
Scenario wake_up_calls() {
  return {"wake-ups",
          [] {
            for (int writer = 0; writer < kBells; ++writer) {
              actors.push_back(actor([writer] {
                uint32_t woken = 0;
#if defined(SHARED_BELL)
                const int bell = 0;
#else
                const int bell = writer;
#endif
                for (int i = 0; i < 2 - writer; ++i) {
                  ++world.shadow[kTold];
                  if (ring_bell(world.bell, bell, woken)) world.shadow[kGranted] = 1;
                }
              }));
            }
            actors.push_back(actor([] {
              uint32_t seen[kBells] = {};
              while (world.shadow[kStarted] < 3) {
                hear(world.bell, seen);
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

// An output grows while the engine waits for room, and is cancelled at any time. With -DEARLY_GROWTH
// the engine is told of a piece before the slot names it.
Scenario growing_output() {
  return {"growing output",
          [] {
            actors.push_back(actor([] {
              Tag tag;
              require(begin_writing(words(), tag) == Outcome::Done, "the slot is not free");
              world.slot.input.given_out = 1;
              require(submit(words(), tag) == Outcome::Done, "a submission failed");
              for (uint32_t piece = 0; piece < 2; ++piece) {
                wait_until([piece] {
                  return now(world.given.published).value > piece || is(State::DecodeCompleted);
                });
                settled(1, piece);
                if (is(State::DecodeCompleted)) break;
#if defined(EARLY_GROWTH)
                grow(world.asked, tag);
                step();
#endif
                world.slot.more[piece] = 64 * (piece + 1);
#if !defined(EARLY_GROWTH)
                require(grow(world.asked, tag) == Outcome::Done, "an output that cannot grow");
#endif
              }
              wait_until([] { return is(State::DecodeCompleted); });
              const uint32_t tokens = now(load(world.given.published)).value;
              const Reason reason = now(load(world.given.state)).reason();
              require(reason != Reason::Length || tokens == 3, "a token is lost");
              require(release(words(), tag) == Outcome::Done, "a release failed");
              world.shadow[kAnswers] = 1;
            }));
            actors.push_back(actor([] {
              wait_until([] { return is(State::PrefillPending); });
              Tag tag;
              require(claim(1, tag), "engine: not taken");
              uint32_t pieces = 0;
              Reason reason = Reason::Length;
              for (uint32_t i = now(load(world.given.published)).value; i < 3; ++i) {
                while (pieces < i && reason == Reason::Length) {  // each piece has one record
                  const uint64_t asked = load(world.asked);
                  settled(2, i, asked);
                  if (cancelled(asked, tag) != Reason::None) reason = cancelled(asked, tag);
                  for (; pieces < pieces_of(asked, tag); ++pieces) {
                    require(world.slot.more[pieces] == 64 * (pieces + 1), "a piece that is none");
                  }
                  if (pieces >= i || reason != Reason::Length) break;
                  wait_until([asked] { return world.asked != asked; });
                }
                if (reason != Reason::Length) break;
                require(say(tag, i), "engine: a lost token");
              }
              require(complete(tag, reason) == Outcome::Done, "engine: the end was lost");
            }));
            actors.push_back(actor([] {
              cancel(world.asked, Tag{0, 1}, Reason::Cancelled);
              cancel(world.asked, Tag{0, 1}, Reason::Error);
            }));
          },
          [] {
            require(world.shadow[kAnswers] == 1, "a request is lost");
            require(now(world.asked).pieces() == 0, "pieces without a sequence");
          }};
}

// An engine leases its sequence to the loop, a thread of its own: granted, recalled at any time, also
// before, and cancelled; the engine is killed anywhere, and the next one goes on. With -DHASTY_HOST
// the host does not wait for the end of the lease.
Scenario leased_steps() {
  using resident::LeaseState;
  constexpr uint32_t tokens = 3;  // the first and the last one are the host's
  enum LeaseShadow { kGiven = 8, kEndedLoop, kRecalled, kClaimed };
  constexpr int engine = 1;
  const auto finish = [](Tag tag, uint32_t from) {
    Reason reason = Reason::Length;
    for (uint32_t i = from; i < tokens; ++i) {
      reason = cancelled(load(world.asked), tag);
      if (reason != Reason::None) break;
      reason = Reason::Length;
      require(say(tag, i), "host: a lost token");
    }
    require(complete(tag, reason) == Outcome::Done, "host: the end was lost");
  };
  return {"leased steps",
          [finish] {
            actors.push_back(actor([] {
              Tag tag;
              require(begin_writing(words(), tag) == Outcome::Done, "the slot is not free");
              require(submit(words(), tag) == Outcome::Done, "a submission failed");
              wait_until([] { return is(State::DecodeCompleted); });
              const uint32_t given = now(load(world.given.published)).value;
              const Reason reason = now(load(world.given.state)).reason();
              require(reason != Reason::Length || given == tokens, "a token is lost");
              require(release(words(), tag) == Outcome::Done, "a release failed");
              world.shadow[kAnswers] = 1;
            }));
            actors.push_back(actor([finish] {  // the host of the engine
              wait_until([] { return is(State::PrefillPending); });
              Tag tag;
              require(claim(1, tag), "host: not taken");
              require(move_as_engine(world.given, tag, State::DecodeProcessing) == Outcome::Done,
                      "host: no decode");
              use_payload(7, kHolder);
              require(say(tag, 0), "host: the first token is lost");
              world.shadow[kClaimed] = 1;
              resident::grant(world.lease);
#if !defined(HASTY_HOST)
              wait_until([] { return world.shadow[kEndedLoop] == 1; });
#endif
              settled(3, world.shadow[kGiven]);
              use_payload(7, kHolder);
              finish(tag, 1 + static_cast<uint32_t>(world.shadow[kGiven]));
            }, true, engine));
            actors.push_back(actor([] {  // the loop of the engine
              wait_until([] {
                return world.shadow[kClaimed] == 1 &&
                       world.lease != static_cast<uint32_t>(LeaseState::open);
              });
              const Tag tag = now(load(world.given.state)).tag;
              for (uint32_t i = 1; i + 1 < tokens; ++i) {
                const bool told = world.shadow[kRecalled] == 1;
                const LeaseState seen = resident::look(world.lease);
                require(!told || seen != LeaseState::granted, "a recall is lost");
                if (seen != LeaseState::granted) break;
                if (cancelled(load(world.asked), tag) != Reason::None) break;
                use_payload(8, kHolder);
                require(say(tag, i), "loop: a lost token");
                ++world.shadow[kGiven];
              }
              world.shadow[kEndedLoop] = 1;
            }, true, engine));
            actors.push_back(actor([] {  // another thread of the engine
              resident::recall(world.lease);
              world.shadow[kRecalled] = 1;
            }, true, engine));
            actors.push_back(actor([] { cancel(world.asked, Tag{0, 1}, Reason::Cancelled); }));
            actors.push_back(actor([finish] {  // the next engine
              wait_until([] { return actors[1].killed || world.shadow[kAnswers] == 1; });
              if (world.shadow[kAnswers] == 1) return;
              world.shadow[kHolder] = 0;
              wait_until([] {
                return world.shadow[kAnswers] == 1 || !(is(State::Empty) || is(State::Writing));
              });
              requeue(words(), world.slot, 2);
              Tag tag;
              if (!is(State::PrefillPending) || !claim(2, tag)) return;  // it has its end
              move_as_engine(world.given, tag, State::DecodeProcessing);
              finish(tag, now(load(world.given.published)).value);
            }));
          },
          [] { require(world.shadow[kAnswers] == 1, "the request is lost"); }};
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

// An engine writes more entries than there is room for, and may die amid one; the next one goes on.
// With -DHASTY_READER a reader looks at the turn of an entry only before it reads the rest.
Scenario log_of_steps() {
  const auto put = [](uint64_t value) {
    const uint64_t values[2] = {value, value};
    append(world.log, values);
  };
  return {"log of steps",
          [put] {
            actors.push_back(actor([put] {
              for (uint64_t value = 1; value <= 3; ++value) put(value);
            }, true));
            actors.push_back(actor([put] {
              wait_until([] { return actors[0].done || actors[0].killed; });
              put(4);
            }));
            actors.push_back(actor([] {
              const uint64_t written = load(world.log.written);
              for (uint64_t n = world.log.oldest(written); n < written; ++n) {
                uint64_t values[2];
#if defined(HASTY_READER)
                const LogEntry<2>& entry = world.log.entries[n % 2];
                if (load(entry.turn) != 2 * n + 2) continue;
                for (int i = 0; i < 2; ++i) values[i] = load(entry.values[i]);
#else
                if (!read_entry(world.log, n, values)) continue;
#endif
                require(values[0] == values[1], "a torn step");
                require(values[0] == n + 1 || values[0] == 4, "the step of another round");
              }
            }));
          },
          [] {
            uint64_t values[2];
            const uint64_t written = world.log.written;
            require(written > 0 && read_entry(world.log, written - 1, values) && values[0] == 4,
                    "the next engine's step is lost");
          }};
}

}  // namespace explore

int main() {
  using namespace explore;
  return explore_all({stale_handles(), cancellation(), two_writers(), two_engines(),
                      zombie_engine(), dead_client(), growing_output(), leased_steps(),
                      wake_up_calls(), info_page(), log_of_steps()});
}
