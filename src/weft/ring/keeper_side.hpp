// The keeper's side of a ring: the info page while a dead engine has no successor yet.
#pragma once

#include "segment.hpp"
#include "steps.hpp"
#include "wake.hpp"

namespace weft::ring {

class KeeperSide {
 public:
  explicit KeeperSide(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  Segment& segment() { return *segment_; }

  // The engine has died and takes no requests; the other values of its info page stay.
  void not_ready() {
    uint64_t values[kInfoFields];
    for (int i = 0; i < kInfoFields; ++i) values[i] = load(segment_->info().values[i]);
    values[static_cast<int>(Info::ready)] = 0;
    values[static_cast<int>(Info::died_ns)] = now_ns();
    write_info(segment_->info(), values);
  }

  // The engine was killed from outside: no crash, unless that never ends.
  void killed_from_outside() {
    for (uint32_t i = 0; i < segment_->slots(); ++i) forgive(i);
  }

  // There is no memory for the next engine.
  void short_of_memory() {
    Header& header = segment_->header();
    store(header.short_epoch, load(header.epoch) + 1);
  }

  // The engine was killed because memory ran out. No sequence has crashed it; who was computed is
  // counted apart.
  void killed_for_memory() {
    Header& header = segment_->header();
    store(header.kill_epoch, load(header.epoch) + 1);  // first, as the next one lets clients look
    short_of_memory();
    store(header.memory_kills, load(header.memory_kills) + 1);
    for (uint32_t i = 0; i < segment_->slots(); ++i) count(i);
  }

 private:
  void forgive(uint32_t index) {
    const Seen seen = look(segment_->words(index));
    if (!seen.answered() || seen.reclaimed()) return;
    Deaths& deaths = deaths_of(segment_->slot(index), Word::of(seen.asked).tag.generation);
    if (deaths.blame == Blame::None || deaths.outside_kills == kForgiven) return;
    ++deaths.outside_kills;
    deaths.blame = Blame::None;
  }

  void count(uint32_t index) {
    const Seen seen = look(segment_->words(index));
    if (!can_move(seen, State::PrefillPending, Side::Recovery)) return;
    Deaths& deaths = deaths_of(segment_->slot(index), Word::of(seen.asked).tag.generation);
    count_death(deaths.memory_kills, deaths.blame);
    deaths.blame = Blame::None;
  }

  std::shared_ptr<Segment> segment_;
};

}  // namespace weft::ring
