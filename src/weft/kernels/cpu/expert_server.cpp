// Computes routed experts for a device that waits for them.

#include "expert_server.hpp"

#include <time.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "../../ring/wake.hpp"

namespace weft {
namespace {

// A layer follows the one before within some hundred microseconds, a pass after a pass within some
// milliseconds. Whoever asks later and rings no bell is found within the longest sleep.
constexpr int64_t spin_ns = 2'000'000, nap_ns = 20'000, naps_ns = 200'000'000;
constexpr int64_t sleep_ns = 50'000'000;

}  // namespace

ExpertServer::ExpertServer(const ExpertCalls& calls, std::vector<const Experts*> layers)
    : calls_(calls), layers_(std::move(layers)) {
  if (layers_.empty()) throw std::invalid_argument("an expert server without layers");
  for (const Experts* layer : layers_) {
    if (layer->down.empty()) throw std::invalid_argument("a layer without experts");
    const Matrix& one = *layer->down.front();
    const bool fits = one.outputs() == calls_.x.shape[1] && one.type() == calls_.x.type;
    if (!fits || calls_.top_k < 1 || calls_.top_k > static_cast<int64_t>(layer->down.size())) {
      throw std::invalid_argument("experts of " + std::to_string(one.outputs()) +
                                  " do not fit rows of " + std::to_string(calls_.x.shape[1]));
    }
  }
}

void ExpertServer::run() {
  uint32_t heard = std::atomic_ref(rung_).load();
  int64_t busy = ring::now_ns();  // when there was something to do
  const auto news = [&] {
    return stopping_ || std::atomic_ref(rung_).load(std::memory_order_relaxed) != heard ||
           asked() != seen_;
  };
  while (!stopping_) {
    if (answer()) {
      busy = ring::now_ns();
      continue;
    }
    if (const uint32_t rung = std::atomic_ref(rung_).load(); rung != heard) {
      heard = rung;
      busy = ring::now_ns();
    }
    const int64_t idle = ring::now_ns() - busy;
    if (idle < spin_ns) {
      ring::spin(news, spin_ns - idle);
    } else if (idle < naps_ns) {
      const timespec nap{0, nap_ns};
      nanosleep(&nap, nullptr);
    } else {
      const ring::Waited waited[] = {{&rung_, heard}};
      ring::futex_wait_any(waited, sleep_ns);
    }
  }
}

int64_t ExpertServer::asked() const {
  return std::atomic_ref(*const_cast<int64_t*>(calls_.asked)).load(std::memory_order_acquire);
}

void ExpertServer::wake() {
  std::atomic_ref(rung_).fetch_add(1);
  ring::futex_wake(&rung_);
}

void ExpertServer::stop() {
  stopping_ = true;
  wake();
}

// Answers what is asked; false if that is nothing new.
bool ExpertServer::answer() {
  const int64_t ticket = asked();
  if (ticket == seen_ || ticket < 0) return false;
  std::atomic_ref answered(*calls_.answered);
  int64_t before = answered.load();
  if (before == given_up) return false;
  seen_ = ticket;
  const int64_t start = ring::now_ns();
  const int64_t tokens = std::clamp<int64_t>(*calls_.tokens, 0, calls_.x.shape[0]);
  const Experts& experts = *layers_[static_cast<size_t>(ticket) % layers_.size()];
  run_experts(experts, {calls_.ids, calls_.shares, tokens, calls_.top_k},
              rows_of(calls_.x.data, calls_.x.stride[0], calls_.x.type),
              rows_of(calls_.out, calls_.x.shape[1], calls_.x.type), [](int64_t) {});
  answers_ += 1;
  rows_ += static_cast<uint64_t>(tokens);
  busy_ns_ += static_cast<uint64_t>(ring::now_ns() - start);
  answered.compare_exchange_strong(before, ticket);  // unless somebody has given up meanwhile
  return true;
}

}  // namespace weft
