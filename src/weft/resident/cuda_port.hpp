// The port of the resident loop for a GPU (Blink, section 4.2): the threads of one block are its lanes,
// and a step is a captured graph, which is done when its last node says so in the device's memory.
//
// Two drivers. `serve` stays resident and launches graphs by itself. A graph may launch 120 others in
// one execution, so it pauses before that, and launches its own graph to be executed after this one.
// A graph that says that it is done may not have retired yet, and must not be launched while it has not:
// so two executables of each take turns. `between` runs once before each step, as a node of a loop that
// is a graph itself, and needs none of that.
//
// Tokens go to the host through mapped memory, the count of steps that are there last. Written for a
// `Gpu`, which is the device or, in tests, what stands in for it. Nothing here has run on a GPU yet.
#pragma once

#include "loop.hpp"

#if defined(__CUDACC__)
#define WEFT_EACH __host__ __device__
#else
#define WEFT_EACH
#endif

// Tests set what is wrong on purpose.
#ifndef WEFT_LAUNCHES
#define WEFT_LAUNCHES 118
#endif
#ifndef WEFT_EXECUTABLES
#define WEFT_EXECUTABLES 2
#endif

namespace weft::resident {

inline constexpr int kLanes = 256;
inline constexpr int kLaunches = WEFT_LAUNCHES;        // in one execution
inline constexpr int kExecutables = WEFT_EXECUTABLES;  // of each graph
inline constexpr int kBuckets = 40, kMostRows = 512;
inline constexpr int64_t kPatienceNs = 10'000'000'000;  // until a step that does not end has failed

// Memory of the host that the device writes, but for the bell. The host reads `published` and `end`
// first, and then what they stand for.
struct Board {
  uint32_t bell;       // other than 0: no further step
  int32_t end;         // an `End`, once all is here
  int64_t published;   // steps whose tokens are here, first of all the one before the lease
  int64_t done;        // with `end`: steps that were computed; their tokens are all here
  int64_t* tokens;     // [steps + 1, rows]
  bool* finite;        // [rows], with `end`
};

// What outlives an execution, in the device's memory.
struct LoopState {
  int64_t done = 0;         // steps that were computed, and retired
  int64_t deadline_ns = 0;  // of the device's clock; 0 before the first turn
  uint32_t launched = 0;    // steps
  uint32_t computed = 0;    // the same, said by the last node of each
};

template <class Graph>
struct Loop {
  Rows rows;
  int64_t steps, limit_ns;
  const int64_t* results;  // [1 + rows, 2] of a step, behind what it was read by: tokens, or -1
  Board* board;            // in the device's addresses, and so are its pointers
  LoopState* state;
  const uint8_t* buckets;  // [kMostRows + 1], the graph for so many rows
  Graph graphs[kBuckets][kExecutables];
};

// A Gpu has lane(), lanes(), sync() and any(bool) as a port has them; fence(), after which others see
// what this lane has written; load(x) and store(x, value) of words that the host or another graph reads
// or writes, with what comes before or after them; now_ns() and rest(); launch(graph) and relaunch(),
// which return whether that went well.
template <class Gpu>
class CudaPort {
 public:
  using Terms = Loop<typename Gpu::Graph>;

  WEFT_EACH CudaPort(const Terms& loop, Gpu& gpu) : loop_(loop), gpu_(gpu) {}

  WEFT_EACH int64_t lane() const { return gpu_.lane(); }
  WEFT_EACH int64_t lanes() const { return gpu_.lanes(); }
  WEFT_EACH void sync() const { gpu_.sync(); }
  WEFT_EACH bool any(bool one) const { return gpu_.any(one); }

  WEFT_EACH bool asked() const { return any(lane() == 0 && gpu_.load(loop_.board->bell) != 0); }
  WEFT_EACH bool late() const {
    return any(lane() == 0 && gpu_.now_ns() >= loop_.state->deadline_ns);
  }
  WEFT_EACH bool pauses() const { return launches_ == kLaunches; }

  WEFT_EACH void publish(const int64_t* given, int64_t count) {
    const int64_t step = put(given, count);
    if (lane() == 0) gpu_.store(loop_.board->published, step + 1);
  }

  // A step that is not done in time may still be: before anything else writes what it writes, the
  // host waits for the stream.
  WEFT_EACH bool launch(const Rows& rows, int64_t* given) {
    ++launches_;
    bool failed = false;
    if (lane() == 0) {
      const uint32_t step = ++loop_.state->launched;
      gpu_.fence();
      failed = rows.count > kMostRows || !gpu_.launch(loop_.graphs[loop_.buckets[rows.count]][step % kExecutables]);
      const int64_t until = gpu_.now_ns() + kPatienceNs;
      while (!failed && gpu_.load(loop_.state->computed) != step) {
        failed = gpu_.now_ns() >= until;
        gpu_.rest();
      }
    }
    if (any(failed)) return false;
    take(rows, given);
    return true;
  }

  // Reads what a step gave.
  WEFT_EACH void take(const Rows& rows, int64_t* given) const {
    for (int64_t i = lane(); i < rows.count; i += lanes()) {
      const int64_t token = loop_.results[2 * (1 + i)];
      rows.finite[i] = token >= 0;
      given[i] = token < 0 ? 0 : token;
    }
  }

  // Begins a lease, in its first turn.
  WEFT_EACH void begin() const {
    if (lane() == 0 && loop_.state->deadline_ns == 0) {
      loop_.state->deadline_ns = gpu_.now_ns() + loop_.limit_ns;
    }
    sync();
  }

  // Says that the lease has ended.
  WEFT_EACH void finish(int64_t done, End end) {
    const Rows& rows = loop_.rows;
    for (int64_t i = lane(); i < rows.count; i += lanes()) loop_.board->finite[i] = rows.finite[i];
    put(rows.given + done * rows.count, rows.count);
    if (lane() != 0) return;
    loop_.board->done = done;
    gpu_.store(loop_.board->end, static_cast<int32_t>(end));
  }

 private:
  // Writes tokens to the board; what lane 0 stores from then on comes after them.
  WEFT_EACH int64_t put(const int64_t* given, int64_t count) {
    const int64_t first = given - loop_.rows.given;
    for (int64_t i = lane(); i < count; i += lanes()) loop_.board->tokens[first + i] = given[i];
    gpu_.fence();
    sync();
    return first / count;
  }

  const Terms& loop_;
  Gpu& gpu_;
  int launches_ = 0;
};

// One execution of the resident driver. All lanes call it.
template <class Gpu>
WEFT_EACH void serve(const Loop<typename Gpu::Graph>& loop, Gpu& gpu) {
  CudaPort<Gpu> port(loop, gpu);
  port.begin();
  End end = End::none;
  const int64_t done = run(loop.rows, loop.steps, port, end, loop.state->done);
  port.sync();
  if (gpu.lane() == 0) loop.state->done = done;
  if (end == End::paused && !port.any(gpu.lane() == 0 && !gpu.relaunch())) return;
  port.finish(done, end == End::paused ? End::failed : end);
}

// What comes before each step in a graph that loops, and after the last one. Returns whether there is
// another step; the caller says so to the graph.
template <class Gpu>
WEFT_EACH bool between(const Loop<typename Gpu::Graph>& loop, Gpu& gpu) {
  const Rows& rows = loop.rows;
  CudaPort<Gpu> port(loop, gpu);
  port.begin();
  int64_t done = loop.state->done;
  if (loop.state->launched > done) {
    int64_t* const given = rows.given + ++done * rows.count;
    port.take(rows, given);
    retire(rows, given, port);
  }
  End end = End::none;
  const bool more = turn(rows, loop.steps, done, port, end);
  port.sync();
  if (gpu.lane() == 0) {
    loop.state->done = done;
    if (more) ++loop.state->launched;
  }
  if (!more) port.finish(done, end);
  return more;
}

}  // namespace weft::resident

#undef WEFT_EACH
