// The resident loop on the threads of a CPU: forward pass, choice and publication of leased rows
// without Python (resident/loop.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "edits.hpp"
#include "matrix.hpp"
#include "resident/lease.hpp"
#include "resident/loop.hpp"
#include "stack.hpp"

namespace weft {

using resident::Lease;

// A whole model, and what the executor keeps of its rows. Nothing is owned.
struct DecodeModel {
  const Stack* stack = nullptr;
  const Matrix* head = nullptr;
  float logit_scale = 1;
  float softcap = 0;  // 0: none
  int32_t* tokens = nullptr;   // [max_rows, max_tokens]
  int64_t max_rows = 0, max_tokens = 0;
  int64_t* length = nullptr;  // [max_rows]
  struct Group {
    const int32_t* tables;  // [max_rows, max_blocks]
    int64_t max_blocks;
  };
  std::vector<Group> groups;
  int64_t block_size = 0;
};

// Rows whose tokens are chosen elsewhere, as by a grammar. Called once in each step, from the thread
// that decodes.
struct Guests {
  const bool* guest = nullptr;  // [rows]
  // Chooses the tokens of these rows from logits [rows, size], leaves those of others alone, and says
  // which of them can go on in `finite`. False if that failed.
  std::function<bool(float* logits, int64_t size, int64_t* tokens, bool* finite)> choose;
};

// The slots of recurrent states that leased rows [rows] go on with; nowhere without recurrent layers.
//
// A step reads `now` and writes the last of `spare`, which takes the slot that was read, unless that is
// kept. States after multiples of `every` tokens are kept, each until the next one is.
struct LeasedStates {
  static constexpr int64_t most = 3;  // spare slots of a row

  const int32_t* now = nullptr;
  const int32_t* spare = nullptr;  // [rows, most]; behind the last one are -1
  const bool* kept = nullptr;      // whether `now` is
  const int64_t* every = nullptr;  // 0: none is
};

// Terms of a lease for rows [rows]; see resident/loop.hpp.
struct LeaseTerms {
  std::span<const int64_t> rows;
  const uint64_t* ids;             // of their sequences
  const double* settings;          // of their choices; see sample.hpp
  const int64_t *seeds, *counters;
  Edits edits;
  Guests guests;
  LeasedStates states;
  const bool* withheld;            // rows whose tokens are not published, but come with the end
  std::span<const int64_t> stop_ids, stop_from;  // the latter [rows + 1]
  const int64_t* given;            // the tokens of the step before the lease
  int64_t steps;
  // From the grant on. The second where tokens come with the end: none waits for longer, as no step
  // begins that would not end by then, if it takes as long as steps do.
  int64_t limit_ns, unpublished_ns, step_ns;
};

struct LeaseResult {
  std::vector<int64_t> given;  // [steps + 1, rows]
  std::vector<char> finite;    // [rows], of the last step
  int64_t steps = 0;
  bool published = false;      // all but the tokens of the last step, and those withheld
  resident::End end = resident::End::none;
};

// Waits for the grant, then decodes until the lease ends. Throws std::out_of_range, before anything is
// computed, for rows without room for the steps.
LeaseResult decode(const DecodeModel& model, const LeaseTerms& terms, Lease& lease);

}  // namespace weft
