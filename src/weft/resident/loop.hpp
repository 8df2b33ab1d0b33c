// The resident loop: decode steps of rows that are leased to it, without the host between a token and
// the next one (Blink, section 4.2).
//
// A lease is for the rows of one step, all of which decode, and for so many more steps of the same
// rows. A turn stages the inputs of a step, after which that is launched, awaited and retired, and
// publishes what the one before gave as soon as it is known that there is another: what comes with the
// last one is the host's to look at, as it may end a sequence. The lease ends when a row does, when
// somebody asks for something, when logits are not finite, and when its time is up.
//
// Written for a port with one lane or many: each phase is a loop over rows in strides of lanes. A lane
// reads what others have written after `sync`, or after a call of the port that all lanes make together:
// such a call returns nowhere before all lanes have made it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define WEFT_EACH __host__ __device__
#else
#define WEFT_EACH
#endif

namespace weft::resident {

// Why a lease has ended. `failed`: a step could not be computed, and has left nothing that counts.
// With `paused` it has not: the port wants to be entered anew.
enum class End : int32_t { none, steps, row, asked, late, numbers, failed, paused };

// KV blocks of one group: the tables of the leased rows, and where a step writes.
struct GroupRows {
  const int32_t* tables;  // [rows, max_blocks]
  int64_t max_blocks;
  int64_t* slots;         // [rows]
  const int32_t* from = nullptr;  // [rows] where each table begins, if that is elsewhere
};

// The rows of a lease. Nothing is owned.
struct Rows {
  int64_t count = 0;             // rows
  const int64_t* row = nullptr;  // [rows], those of the executor
  // Of the executor, by its rows: tokens [.., max_tokens], which may be nowhere, and how many each
  // knows.
  int32_t* tokens = nullptr;
  int64_t max_tokens = 0;
  int64_t* length = nullptr;
  // Ids that end row i are stop_ids[stop_from[i], stop_from[i + 1]).
  const int64_t *stop_ids = nullptr, *stop_from = nullptr;
  // Inputs of a step [rows]. `counters`: tokens of output that come before.
  int64_t *ids = nullptr, *positions = nullptr, *counters = nullptr;
  int32_t* seq_lens = nullptr;
  const GroupRows* groups = nullptr;
  int64_t num_groups = 0, block_size = 0;
  // What each step gave: [steps + 1, rows], first that of the step before the lease. `finite` [rows]
  // is of the latest one.
  int64_t* given = nullptr;
  bool* finite = nullptr;
};

// -- phases ---------------------------------------------------------------------------------------

// Whether the last token of a row of this lane ends it.
template <class Port>
WEFT_EACH bool ends(const Rows& rows, const int64_t* given, const Port& port) {
  for (int64_t i = port.lane(); i < rows.count; i += port.lanes()) {
    for (int64_t at = rows.stop_from[i]; at < rows.stop_from[i + 1]; ++at) {
      if (rows.stop_ids[at] == given[i]) return true;
    }
  }
  return false;
}

template <class Port>
WEFT_EACH bool means_nothing(const Rows& rows, const Port& port) {
  for (int64_t i = port.lane(); i < rows.count; i += port.lanes()) {
    if (!rows.finite[i]) return true;
  }
  return false;
}

// Write the inputs of the next step: the token that each row has got last.
template <class Port>
WEFT_EACH void stage(const Rows& rows, const int64_t* given, const Port& port) {
  for (int64_t i = port.lane(); i < rows.count; i += port.lanes()) {
    const int64_t at = rows.length[rows.row[i]] - 1;
    rows.ids[i] = given[i];
    rows.positions[i] = at;
    rows.seq_lens[i] = static_cast<int32_t>(at + 1);
    for (int64_t g = 0; g < rows.num_groups; ++g) {
      const GroupRows& group = rows.groups[g];
      const int64_t from = group.from ? group.from[i] : i * group.max_blocks;
      const int64_t block = group.tables[from + at / rows.block_size];
      group.slots[i] = block * rows.block_size + at % rows.block_size;
    }
  }
}

// Append what a step gave.
template <class Port>
WEFT_EACH void retire(const Rows& rows, const int64_t* given, const Port& port) {
  for (int64_t i = port.lane(); i < rows.count; i += port.lanes()) {
    const int64_t row = rows.row[i], at = rows.length[row]++;
    if (rows.tokens) rows.tokens[row * rows.max_tokens + at] = static_cast<int32_t>(given[i]);
    ++rows.counters[i];
  }
}

// -- the loop -------------------------------------------------------------------------------------

// A port has lane(), lanes() and sync(). All lanes call together any(bool), whether it is so in one of
// them; asked() and late(); pauses(), whether it wants to be entered anew; publish(given, rows);
// launch(rows, given), which computes a step from its staged inputs and returns whether that went well.
// Their answers are the same in all lanes.

// After `done` steps of `steps`, the latest of which has given its tokens and `finite`: whether there is
// another one. If so it is staged, and those tokens are published; if not, `end` says why.
template <class Port>
WEFT_EACH bool turn(const Rows& rows, int64_t steps, int64_t done, Port& port, End& end) {
  int64_t* const given = rows.given + done * rows.count;
  end = done == steps                           ? End::steps
        : port.any(means_nothing(rows, port))   ? End::numbers
        : port.any(ends(rows, given, port))     ? End::row
        : port.asked()                          ? End::asked
        : port.late()                           ? End::late
                                                : End::none;
  if (end != End::none) return false;
  port.publish(given, rows.count);
  stage(rows, given, port);
  port.sync();
  return true;
}

// Runs up to `steps` steps, and returns how many were computed; `end` says why there are no more. The
// caller has written given[0, rows) and `finite`. A loop that has paused goes on from what it returned.
template <class Port>
WEFT_EACH int64_t run(const Rows& rows, int64_t steps, Port& port, End& end, int64_t done = 0) {
  for (;; ++done) {
    if (port.pauses()) {
      end = End::paused;
      return done;
    }
    if (!turn(rows, steps, done, port, end)) return done;
    int64_t* const given = rows.given + (done + 1) * rows.count;
    if (!port.launch(rows, given)) {
      end = End::failed;
      return done;
    }
    retire(rows, given, port);
  }
}

}  // namespace weft::resident

#undef WEFT_EACH
