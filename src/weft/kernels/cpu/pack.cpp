// Gathers tokens, positions, write slots and block tables of a sub-batch.

#include "pack.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace weft {
namespace {

void check(const PlannedRow& planned, const StepMemory& memory, int64_t before) {
  const int64_t end = planned.start + planned.count;
  bool fits = planned.row >= 0 && planned.row < memory.max_rows && planned.start >= 0 &&
              planned.count > 0 && planned.guessed < planned.count && end <= memory.max_tokens &&
              before + planned.count <= memory.capacity;
  for (const auto& group : memory.groups) fits &= end <= group.max_blocks * memory.block_size;
  if (fits) return;
  throw std::out_of_range("a plan computes tokens [" + std::to_string(planned.start) + ", " +
                          std::to_string(end) + ") of row " + std::to_string(planned.row) +
                          ", which has no room for them");
}

}  // namespace

StepSize pack(const std::vector<PlannedRow>& planned, const StepMemory& memory) {
  if (static_cast<int64_t>(planned.size()) > memory.max_rows) {
    throw std::out_of_range("a plan has more rows than there are");
  }
  int64_t token = 0, sample = 0, longest = 0;
  for (size_t i = 0; i < planned.size(); ++i) {
    const PlannedRow& part = planned[i];
    check(part, memory, token);
    const int64_t end = part.start + part.count;
    const int32_t* known = memory.tokens + part.row * memory.max_tokens;
    memory.rows[i] = part.row;
    memory.starts[i] = part.start;
    memory.counts[i] = part.count;
    memory.query_start[i] = static_cast<int32_t>(token);
    memory.seq_lens[i] = static_cast<int32_t>(end);
    for (const auto& group : memory.groups) {
      const int32_t* table = group.tables + part.row * group.max_blocks;
      int64_t* slots = group.slot_mapping + token;
      for (int64_t at = part.start; at < end; ++at) {
        *slots++ = table[at / memory.block_size] * memory.block_size + at % memory.block_size;
      }
    }
    for (int64_t at = part.start; at < end; ++at, ++token) {
      memory.input_ids[token] = known[at];
      memory.positions[token] = at;
    }
    for (int64_t back = part.guessed; part.samples && back >= 0; --back, ++sample) {
      memory.sample_rows[sample] = part.row;
      memory.sample_at[sample] = token - 1 - back;
      memory.sample_lengths[sample] = end - back;
    }
    longest = std::max(longest, end);
  }
  memory.query_start[planned.size()] = static_cast<int32_t>(token);
  const int64_t blocks = (longest + memory.block_size - 1) / memory.block_size;
  for (const auto& group : memory.groups) {
    int32_t* to = group.block_tables;
    for (const PlannedRow& part : planned) {
      std::copy_n(group.tables + part.row * group.max_blocks, blocks, to);
      to += group.max_blocks;
    }
  }
  return {token, sample, blocks};
}

int64_t pack_tables(const std::vector<PlannedRow>& planned, const StepMemory& memory,
                    const std::vector<int64_t>& windows, int64_t ahead, const RaggedTables& to) {
  if (static_cast<int64_t>(planned.size()) > to.rows) {
    throw std::out_of_range("there are fewer places for tables than rows");
  }
  int64_t end = 0;
  for (size_t g = 0; g < memory.groups.size(); ++g) {
    const auto& group = memory.groups[g];
    int32_t* starts = to.starts + static_cast<int64_t>(g) * to.rows;
    for (const PlannedRow& part : planned) {
      const int64_t tokens = part.start + part.count + ahead;
      const int64_t used = (tokens + memory.block_size - 1) / memory.block_size;
      if (used > group.max_blocks) throw std::out_of_range("a row has no table for its steps");
      if (end + used > to.capacity) throw std::out_of_range("block tables outgrow their memory");
      *starts++ = static_cast<int32_t>(end);
      std::copy_n(group.tables + part.row * group.max_blocks, used, to.blocks + end);
      const int64_t unseen = std::max<int64_t>(0, part.start - windows[g] + 1) / memory.block_size;
      if (windows[g] > 0) std::fill_n(to.blocks + end, unseen, -1);
      end += used;
    }
    std::fill(starts, to.starts + static_cast<int64_t>(g + 1) * to.rows, 0);
  }
  return end;
}

}  // namespace weft
