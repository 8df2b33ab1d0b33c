// What the request plane asks and gets: a submission, its place in the arena, and its news.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "records.hpp"
#include "segment.hpp"

namespace weft::ring {

struct Submission {
  uint64_t request_id = 0;
  std::vector<uint32_t> prompt, stop_ids, eos_ids, token_lists;
  std::string sampling = std::string(sizeof(SamplingHead), '\0');  // begins with one
  std::vector<BiasRecord> logit_bias;
  std::string service_class, cache_salt, grammar, images;
  std::vector<uint32_t> output;  // given out before: counted as published and read
  uint32_t max_records = 0;
};

// What is new of one request since the last poll.
struct News {
  uint64_t request_id;
  std::vector<uint32_t> tokens;
  std::vector<Scored> scored;  // parallel to `tokens`, or empty
  uint32_t prompt_start = 0;
  std::vector<Scored> prompt;
  uint32_t cached_tokens = 0;
  Reason end = Reason::None;
  Final final{};
};

enum class Refusal { None, NoSlot, NoRoom, TooLarge };

// A slot as the request plane holds it. Nobody else writes this copy of the input, by which the
// engine is told where to write.
struct Live {
  Tag tag;
  uint64_t before = 0;  // what the engine's word says until it takes the slot
  uint64_t request_id = 0;
  Input input{};  // of a request of this request plane
  std::vector<Extent> extents;  // the first has all sections, each other a piece of the output
  Output output;
  Records prompt;
  uint64_t fixed = 0;  // bytes of all but the output
  uint32_t seen = 0, prompt_seen = 0;
  // `inherited`: what an earlier request plane has left, always an orphan.
  bool used = false, orphan = false, inherited = false, broken = false;

  // The memory of a request: an output takes pages only as tokens come.
  uint64_t uses() const { return fixed + uint64_t{std::max(seen, output.first)} * output.stride; }

  // The engine goes on behind these tokens, as behind those of an engine that has died.
  void give_out(const std::vector<uint32_t>& tokens) {
    for (const uint32_t token : tokens) output.put(seen++, token);
    input.given_out = seen;
  }
  std::byte* given_out_end() const {
    return output.piece[0] + uint64_t{input.given_out} * output.stride;
  }

  // How many bytes of an extent may lie in pages.
  uint64_t written(uint32_t piece) const {
    if (orphan) return extents[piece].bytes;
    if (piece == 0) return fixed + uint64_t{output.first} * output.stride;
    const uint32_t before = records_after(output.first, output.most, piece - 1);
    return uint64_t{std::max(seen, before) - before} * output.stride;
  }
};

// Lay the sections out from offset 0; returns the bytes of all of them.
inline uint64_t lay_out(const Submission& request, Live& live) {
  Input& input = live.input;
  SamplingHead sampling;
  std::memcpy(&sampling, request.sampling.data(), sizeof sampling);
  input.output_stride = stride_for(sampling.set & kLogprobs, sampling.logprobs);
  input.prompt_stride = stride_for(sampling.set & kPromptLogprobs, sampling.prompt_logprobs);
  const auto given_out = static_cast<uint32_t>(request.output.size());
  const bool whole = sampling.set & kEmbed;  // its words come all at once
  live.output.stride = input.output_stride;
  live.output.most = input.max_records = std::max(1u, request.max_records);
  live.output.first = std::min(
      live.output.most, whole ? kMaxRecords : std::max(kFirstRecords, 2 * given_out));
  live.prompt = {nullptr, input.prompt_stride, 0};
  if (sampling.set & kPromptLogprobs) {
    live.prompt.capacity = static_cast<uint32_t>(request.prompt.size());
  }
  uint64_t end = 0;
  const auto place = [&](Section section, uint64_t bytes) {
    input.sections[static_cast<int>(section)] = {end, bytes};
    end = round_up(end + bytes, sizeof(uint64_t));
  };
  place(Section::Prompt, request.prompt.size() * sizeof(uint32_t));
  place(Section::Sampling, request.sampling.size());
  place(Section::LogitBias, request.logit_bias.size() * sizeof(BiasRecord));
  place(Section::StopIds, request.stop_ids.size() * sizeof(uint32_t));
  place(Section::EosIds, request.eos_ids.size() * sizeof(uint32_t));
  place(Section::ServiceClass, request.service_class.size());
  place(Section::CacheSalt, request.cache_salt.size());
  place(Section::Grammar, request.grammar.size());
  place(Section::TokenLists, request.token_lists.size() * sizeof(uint32_t));
  place(Section::Images, request.images.size());
  place(Section::Output, uint64_t{live.output.first} * input.output_stride);
  place(Section::PromptOutput, uint64_t{live.prompt.capacity} * input.prompt_stride);
  return round_up(end, kAlign);
}

}  // namespace weft::ring
