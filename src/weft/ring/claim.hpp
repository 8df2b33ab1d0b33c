// A request as the engine reads it from its slot.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "ring.hpp"

namespace weft::ring {

struct Claim {
  uint64_t id = 0;  // the engine's own name for the sequence
  std::vector<uint32_t> prompt, stop_ids, eos_ids, token_lists, published;
  std::vector<BiasRecord> logit_bias;
  std::string sampling, service_class, cache_salt, grammar, images;  // `sampling` begins with its head
  uint32_t crashes = 0, memory_kills = 0;
};

// The sections of an input that has been copied and checked.
struct Sections {
  const std::byte* arena;
  const Input& input;

  SamplingHead sampling() const {
    SamplingHead head;
    std::memcpy(&head, arena + of(Section::Sampling).offset, sizeof head);
    return head;
  }

  // What is wrong with the sampling parameters, or nullptr.
  const char* fault_of_sampling() const {
    const SamplingHead head = sampling();
    if (head.set & ~kAllSet) return "its sampling parameters";
    const bool scored = head.set & kLogprobs, prompt_scored = head.set & kPromptLogprobs;
    if (scored && stride_for(true, std::min(head.logprobs, kMaxTop)) != input.output_stride) {
      return "its output stride";
    }
    if (prompt_scored != (of(Section::PromptOutput).bytes != 0)) return "its prompt records";
    return nullptr;
  }

  void read(Claim& claim) const {
    claim.sampling = text(Section::Sampling);
    claim.prompt = ids(Section::Prompt);
    claim.stop_ids = ids(Section::StopIds);
    claim.eos_ids = ids(Section::EosIds);
    claim.logit_bias.resize(of(Section::LogitBias).bytes / sizeof(BiasRecord));
    copy(Section::LogitBias, claim.logit_bias.data());
    claim.service_class = text(Section::ServiceClass);
    claim.cache_salt = text(Section::CacheSalt);
    claim.grammar = text(Section::Grammar);
    claim.token_lists = ids(Section::TokenLists);
    claim.images = text(Section::Images);
  }

 private:
  Extent of(Section section) const { return input.sections[static_cast<int>(section)]; }
  void copy(Section section, void* to) const {
    const Extent from = of(section);
    if (from.bytes) std::memcpy(to, arena + from.offset, from.bytes);
  }
  std::vector<uint32_t> ids(Section section) const {
    std::vector<uint32_t> values(of(section).bytes / sizeof(uint32_t));
    copy(section, values.data());
    return values;
  }
  std::string text(Section section) const {
    std::string value(of(section).bytes, '\0');
    copy(section, value.data());
    return value;
  }
};

}  // namespace weft::ring
