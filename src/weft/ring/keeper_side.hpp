// The keeper's side of a ring: the info page while a dead engine has no successor yet.
#pragma once

#include "segment.hpp"

namespace weft::ring {

class KeeperSide {
 public:
  explicit KeeperSide(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  Segment& segment() { return *segment_; }

  // The engine takes no requests; the other values of its info page stay.
  void not_ready() {
    uint64_t values[kInfoFields];
    for (int i = 0; i < kInfoFields; ++i) values[i] = load(segment_->info().values[i]);
    values[static_cast<int>(Info::ready)] = 0;
    write_info(segment_->info(), values);
  }

  // The engine was killed from outside: no crash, unless that never ends.
  void killed_from_outside() {
    for (uint32_t i = 0; i < segment_->slots(); ++i) forgive(segment_->slot(i));
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
    for (uint32_t i = 0; i < segment_->slots(); ++i) count(segment_->slot(i));
  }

 private:
  static void forgive(Slot& slot) {
    if (slot.blame == Blame::None || slot.outside_kills == kForgiven) return;
    ++slot.outside_kills;
    slot.blame = Blame::None;
  }

  static void count(Slot& slot) {
    const Word word = Word::of(load(slot.state));
    if (!word.valid_state()) return;
    if (!may_move(word.state(), State::PrefillPending, Side::Recovery)) return;
    count_death(slot.memory_kills, slot.blame);
    slot.blame = Blame::None;
  }

  std::shared_ptr<Segment> segment_;
};

}  // namespace weft::ring
