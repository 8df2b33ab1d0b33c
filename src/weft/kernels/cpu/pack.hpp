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
    int64_t* slot_mapping;         // [capacity]
  };
  const int32_t* tokens;  // [max_rows, max_tokens]
  int64_t max_rows, max_tokens, block_size;
  int64_t capacity;                // tokens of a step
  int64_t *input_ids, *positions;  // [capacity]
  int32_t *query_start, *seq_lens;  // [max_rows + 1], [max_rows]
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

// Block tables one behind the other, those of a group after those of the one before it.
struct RaggedTables {
  int32_t* blocks;  // [capacity]
  int64_t capacity;
  int32_t* starts;  // [groups, rows]: where a row's table begins
  int64_t rows;     // of which those beyond the planned ones get 0
};

// Writes the tables up to the last block of each row, and on to that of `ahead` more tokens; -1 for
// blocks that lie wholly before the window of the row's first token. `windows` has one entry for each
// group, 0 for none. Returns the number of entries; throws std::out_of_range if there is no room for
// them.
int64_t pack_tables(const std::vector<PlannedRow>& planned, const StepMemory& memory,
                    const std::vector<int64_t>& windows, int64_t ahead, const RaggedTables& to);

}  // namespace weft
