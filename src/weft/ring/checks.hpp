// Reads a slot's untrusted input; for host and device, like ring.hpp.
#pragma once

#include "ring.hpp"

namespace weft::ring {

WEFT_HD inline bool inside(Extent inner, Extent outer) {
  return inner.offset >= outer.offset && inner.bytes <= outer.bytes &&
         inner.offset - outer.offset <= outer.bytes - inner.bytes;
}

WEFT_HD inline bool overlap(Extent a, Extent b) {
  return a.bytes != 0 && b.bytes != 0 && a.offset < b.offset + b.bytes &&
         b.offset < a.offset + a.bytes;
}

WEFT_HD constexpr uint64_t element_bytes(Section section) {
  switch (section) {
    case Section::Prompt:
    case Section::StopIds:
    case Section::EosIds:
    case Section::TokenLists:
      return sizeof(uint32_t);
    case Section::LogitBias:
      return sizeof(BiasRecord);
    default:
      return 1;
  }
}

WEFT_HD inline bool is_sound(Extent extent, uint64_t arena_bytes) {
  return extent.bytes != 0 && inside(extent, {0, arena_bytes}) && extent.offset % kAlign == 0;
}

// What is wrong with a (copied) input, or nullptr. A slot that fails here is never followed.
WEFT_HD inline const char* fault_of(const Input& input, uint64_t arena_bytes) {
  if (!is_sound(input.extent, arena_bytes)) return "its extent";
  for (int i = 0; i < kSections; ++i) {
    const Extent section = input.sections[i];
    if (!inside(section, input.extent)) return "a section outside its extent";
    if (section.bytes && section.offset % sizeof(uint64_t)) return "a section off its alignment";
    if (section.bytes % element_bytes(static_cast<Section>(i))) return "the length of a section";
    for (int j = 0; j < i; ++j) {
      if (overlap(section, input.sections[j])) return "sections that overlap";
    }
  }
  const auto section = [&](Section which) { return input.sections[static_cast<int>(which)]; };
  const uint64_t tokens = section(Section::Prompt).bytes / sizeof(uint32_t);
  if (tokens == 0 || tokens > kMaxRecords) return "the length of its prompt";
  if (section(Section::Sampling).bytes < sizeof(SamplingHead)) return "its sampling parameters";
  const auto stride_ok = [](uint32_t stride) {
    const uint32_t top = (stride - sizeof(TokenRecord)) / sizeof(TopRecord);
    return stride == kPlainStride || (top <= kMaxTop && stride == stride_for(true, top));
  };
  if (!stride_ok(input.output_stride)) return "its output stride";
  const uint64_t records = section(Section::Output).bytes / input.output_stride;
  const bool most = input.max_records >= records && input.max_records <= kMaxRecords;
  if (records == 0 || !most) return "the length of its output";
  const uint64_t scored = section(Section::PromptOutput).bytes;
  if (scored == 0) return nullptr;
  if (!stride_ok(input.prompt_stride) || input.prompt_stride == kPlainStride ||
      scored / input.prompt_stride < tokens) {
    return "its prompt records";
  }
  return nullptr;
}

}  // namespace weft::ring
