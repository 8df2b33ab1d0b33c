// What an engine on a GPU does with a slot: that the header compiles for the device.
#include "checks.hpp"

using namespace weft::ring;

__global__ void serve(Slot* slot, InfoPage* info, Doorbell* bell, uint64_t arena) {
  Tag tag;
  uint32_t woken = 0;
  uint64_t values[kInfoFields] = {};
  if (take(*slot, 1, tag) != Outcome::Done) return;
  if (!fault_of(slot->input, arena)) publish(slot->published, tag, 0, 1);
  const Reason why = cancelled(*slot, tag);
  move_as_engine(*slot, tag, State::DecodeCompleted, why);
  ring_bell(*bell, woken);
  write_info(*info, values);
}
