// What an engine on a GPU does with a slot: that the headers compile for the device.
#include "checks.hpp"
#include "steps.hpp"

using namespace weft::ring;

__global__ void serve(uint64_t* asked, Given* given, Slot* slots, InfoPage* info,
                      Doorbell<kBells>* bell, uint64_t arena) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const Words words{asked[i], given[i]};
  Slot& slot = slots[i];
  Tag tag;
  uint32_t woken = 0;
  uint64_t values[kInfoFields] = {};
  if (take(words, slot, 1, tag) != Outcome::Done) return;
  const uint32_t pieces = pieces_of(load(words.asked), tag);
  if (!fault_of(slot.input, arena) && records_after(1, slot.input.max_records, pieces) > 0) {
    publish(words.given.published, tag, 0, 1);
  }
  const Reason why = cancelled(load(words.asked), tag);
  move_as_engine(words.given, tag, State::DecodeCompleted, why);
  ring_bell(*bell, static_cast<int>(Bell::Output), woken);
  write_info(*info, values);
}
