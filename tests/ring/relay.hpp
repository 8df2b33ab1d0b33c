// An agent in a thread between an engine and a request plane of the same process.
#pragma once

#include <poll.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "agent_side.hpp"
#include "request_side.hpp"
#include "wake.hpp"

namespace weft::ring {

// An agent in a thread of its own, and two queues that stand for its link.
class Relay {
 public:
  Relay(std::shared_ptr<Segment> there, std::shared_ptr<Segment> here, int wake_there, int wake_here)
      : agent_(std::move(there)), wake_there_(wake_there), wake_here_(wake_here) {
    agent_.attach();
    for (const std::string& part : agent_.snapshot()) apply_anywhere(*here, part);
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    stopping_.store(true);
    signal_eventfd(wake_there_);
    thread_.join();
  }

  void exchange(RequestSide<LinkMemory>& side) {
    std::vector<std::string> came;
    {
      const std::lock_guard held(lock_);
      for (std::string& part : side.memory().take()) to_agent_.push_back(std::move(part));
      came.swap(to_client_);
    }
    signal_eventfd(wake_there_);
    for (const std::string& part : came) side.memory().apply(part);
  }

 private:
  static void apply_anywhere(Segment& segment, const std::string& part) {
    apply_changes(segment, part, [](Place, bool) { return true; });
  }

  void run() {
    while (!stopping_.load()) {
      std::vector<std::string> came;
      {
        const std::lock_guard held(lock_);
        came.swap(to_agent_);
      }
      for (const std::string& part : came) agent_.apply(part);
      std::vector<std::string> news = agent_.collect(true);
      const bool any = !news.empty();
      {
        const std::lock_guard held(lock_);
        for (std::string& part : news) to_client_.push_back(std::move(part));
      }
      if (any) signal_eventfd(wake_here_);
      if (agent_.pending() || !agent_.sleep()) continue;
      pollfd waited{wake_there_, POLLIN, 0};
      ::poll(&waited, 1, 1000);
      uint64_t count;
      [[maybe_unused]] const auto bytes = read(wake_there_, &count, sizeof count);
    }
  }

  AgentSide agent_;
  int wake_there_, wake_here_;
  std::mutex lock_;
  std::vector<std::string> to_agent_, to_client_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace weft::ring
