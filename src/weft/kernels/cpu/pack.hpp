// From a planned sub-batch to what one forward pass reads.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

// What the executor keeps of its rows, and where the inputs of a step are written.
struct StepMemory {
  struct Group {
    const int32_t* tables;  // [max_rows, max_blocks]
    int64_t max_blocks;
    int32_t* block_tables;  // [max_rows, max_blocks], of the rows of the batch
    int64_t* slots;         // [capacity]
  };
  const int32_t* tokens;  // [max_rows, max_tokens]
  int64_t max_rows, max_tokens, block_size;
  int64_t capacity;                // tokens of a step
  int64_t *input_ids, *positions;  // [capacity]
  int32_t *query_start, *context_len;  // [max_rows + 1], [max_rows]
  int64_t *rows, *starts, *counts;     // [max_rows]
  int64_t *sample_rows, *sample_at, *sample_lengths;  // [capacity]
  std::vector<Group> groups;
};

// One row of a sub-batch: it computes `count` tokens from `start` on, of which the last `guessed`
// are a draft; with `samples` the token after its last one and after each of the draft is wanted.
struct PlannedRow {
  int64_t row, start, count, guessed;
  bool samples;
};

// How much of the memory a step fills.
struct StepSize {
  int64_t tokens, samples, blocks;  // blocks of the longest context
};

// Throws std::out_of_range where a plan does not fit the rows.
StepSize pack(const std::vector<PlannedRow>& planned, const StepMemory& memory);

}  // namespace weft
