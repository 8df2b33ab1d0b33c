// The loop of a GPU with one lane on the host, over memory that host code has laid out, and steps that a
// function of it computes.
#include <cstddef>

#include "resident/cuda_port.hpp"

namespace {

using namespace weft::resident;

using Step = void (*)();
using HostLoop = Loop<Step>;

struct Host {
  using Graph = Step;

  int64_t lane() const { return 0; }
  int64_t lanes() const { return 1; }
  void sync() const {}
  bool any(bool one) const { return one; }
  void fence() const {}
  template <class T>
  T load(T& word) const {
    return word;
  }
  template <class T>
  void store(T& word, T value) const {
    word = value;
  }
  int64_t now_ns() const { return 0; }
  void rest() const {}
  bool launch(Graph graph) const {
    graph();
    state.computed = state.launched;
    return true;
  }
  bool relaunch() const { return again = true; }

  LoopState& state;
  mutable bool again = false;
};

}  // namespace

extern "C" void serve_here(const HostLoop* loop) {
  Host host{*loop->state};
  do {
    host.again = false;
    serve(*loop, host);
  } while (host.again);
}

extern "C" void between_here(const HostLoop* loop) {
  Host host{*loop->state};
  while (between(*loop, host)) {
    loop->graphs[loop->buckets[loop->rows.count]][0]();
    host.state.computed = host.state.launched;
  }
}

// Where each part lies: sizes of all structures, and where the last member of each is.
extern "C" void layout_here(int64_t* to) {
  const int64_t found[] = {
      sizeof(GroupRows), offsetof(GroupRows, from),   sizeof(Rows),      offsetof(Rows, finite),
      sizeof(Board),     offsetof(Board, finite),     sizeof(LoopState), offsetof(LoopState, computed),
      sizeof(HostLoop),  offsetof(HostLoop, graphs),
  };
  for (const int64_t one : found) *to++ = one;
}
