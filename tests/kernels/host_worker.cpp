// A mailbox and its workers under a sanitizer, with a stand-in for the kernel: clients submit, take
// and abort at random while one worker follows another, and a courier whose link breaks now and then. Nothing is computed from half-written rows,
// nothing is lost, and nobody writes to the blocks of a slot that the client calls its own.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "check.hpp"
#include "courier.hpp"
#include "host.hpp"
#include "pool_checks.hpp"

using namespace weft;

namespace {

constexpr uint32_t slots = 12, layers = 3, heads = 2, size = 4, block = 8;
constexpr int64_t blocks = 2 * slots;

std::vector<float> cache(2 * blocks * block * size);

Tensor tensor(const char* name, void* data, DType type, std::vector<int64_t> shape) {
  Tensor made{name, data, type, static_cast<int>(shape.size())};
  int64_t stride = 1;
  for (int i = made.rank - 1; i >= 0; --i) {
    made.shape[i] = shape[i];
    made.stride[i] = stride;
    stride *= shape[i];
  }
  return made;
}

Tensor half(const char* name, int64_t which) {
  float* data = cache.data() + which * blocks * block * size;
  return tensor(name, data, DType::f32, {blocks, 1, block, size});
}

}  // namespace

// Writes k and v, and gives q + k + v of the row.
void weft::paged_attention(const Attention& call) {
  check(call);
  const auto row = [&](const Tensor& rows, int64_t token) {
    return rows.as<float>() + token * rows.stride[0];
  };
  shared_pool().run(call.q.shape[0], [&](int64_t token) {
    const int64_t slot = call.slot_mapping.as<int64_t>()[token];
    float* key = call.k_cache.as<float>() + slot * size;
    float* value = call.v_cache.as<float>() + slot * size;
    std::copy_n(row(*call.k, token), size, key);
    std::copy_n(row(*call.v, token), size, value);
    for (uint32_t i = 0; i < heads * size; ++i) {
      row(call.out, token)[i] = row(call.q, token)[i] + key[i % size] + value[i % size];
    }
  });
}

namespace {

// A courier with its place: it answers what it has claimed later, in any order, or never.
class Place {
 public:
  explicit Place(const Mailbox& mailbox) : courier_(mailbox, 1), mailbox_(mailbox) {}

  void serve(const std::atomic<bool>& over) {
    uint32_t seen = 0;
    while (!over) {
      seen = courier_.wait(seen, 1'000'000);
      claim();
      while (!claimed_.empty() && dice_() % 3 != 0) answer();
      if (dice_() % 40 == 0) {
        const std::lock_guard lock(lock_);
        courier_.give_up();
        if (dice_() % 2 == 0) claimed_.clear();  // else the answers come late
      }
    }
    courier_.give_up();
  }

  // What the client has aborted, its slots are Empty from now on.
  void forget(std::span<const int32_t> aborted) {
    const std::lock_guard lock(lock_);
    courier_.forget(aborted);
  }

 private:
  struct Job {
    int32_t slot;
    uint64_t order;
    uint32_t layer;
    float q, k, v;
  };

  void claim() {
    const std::lock_guard lock(lock_);
    int32_t found[slots];
    uint64_t orders[slots];
    uint32_t layer = 0;
    const size_t room = 1 + dice_() % slots;
    const size_t count = courier_.claim(std::span(found, room), std::span(orders, room), layer);
    for (size_t i = 0; i < count; ++i) {
      const auto number = [](const char* row) { return *reinterpret_cast<const float*>(row); };
      claimed_.push_back({found[i], orders[i], layer, number(mailbox_.q(found[i])),
                          number(mailbox_.k(found[i])), number(mailbox_.v(found[i]))});
    }
  }

  void answer() {
    const std::lock_guard lock(lock_);
    std::swap(claimed_[dice_() % claimed_.size()], claimed_.back());
    const Job job = claimed_.back();
    claimed_.pop_back();
    if (!courier_.holds(job.slot, job.order, job.layer)) return;
    auto* out = reinterpret_cast<float*>(mailbox_.out(job.slot));
    std::fill_n(out, heads * size, job.q + job.k + job.v);
    courier_.finish(std::span(&job.slot, 1), job.layer);
  }

  Courier courier_;
  const Mailbox& mailbox_;
  std::mutex lock_;
  std::mt19937 dice_{2};
  std::vector<Job> claimed_;
};

class Client {
 public:
  Client(const Mailbox& mailbox, Place& place, unsigned seed)
      : client_(mailbox), mailbox_(mailbox), place_(place), dice_(seed) {
    std::fill_n(layer_, slots, -1);
  }

  // One random step; the number of tokens that have passed all layers.
  int step() {
    const auto slot = static_cast<int32_t>(dice_() % slots);
    const job::State state = job::look(mailbox_.word(slot)).state;
    require(state != job::State::Failed, "no job fails");
    if (state == job::State::Empty) return begin(slot), 0;
    if (state == job::State::Done) return take(slot);
    if (dice_() % 8 == 0) {
      client_.abort(std::span(&slot, 1));
      place_.forget(std::span(&slot, 1));
      if (at_place_[slot]) {
        require(job::look(mailbox_.word(slot)).state == job::State::Empty, "it waits for no place");
      }
      layer_[slot] = -1;
    }
    return 0;
  }

  bool wait() { return client_.wait(1'000'000); }

 private:
  // The blocks of an Empty slot are the client's: it fills them, as their next owner would.
  void begin(int32_t slot) {
    int32_t table[] = {2 * slot, 2 * slot + 1};
    for (const int64_t which : {0, 1}) {
      std::fill_n(half("", which).as<float>() + table[0] * block * size, 2 * block * size, -1.0f);
    }
    const auto context = static_cast<int32_t>(1 + dice_() % (2 * block));
    const Tensor tables[] = {tensor("tables", table, DType::i32, {1, 2})};
    const auto place = static_cast<int32_t>(dice_() % 2);
    at_place_[slot] = place == 1;
    client_.begin(std::span(&slot, 1), std::span(&context, 1), tables, std::span(&place, 1));
    layer_[slot] = 0;
    submit(slot);
  }

  void submit(int32_t slot) {
    number_[slot] = static_cast<float>(dice_() % 1000);
    float q[heads * size], k[size], v[size];
    std::fill_n(q, heads * size, number_[slot]);
    std::fill_n(k, size, 2 * number_[slot]);
    std::fill_n(v, size, 4 * number_[slot]);
    const Tensor keys = tensor("k", k, DType::f32, {1, 1, size});
    const Tensor values = tensor("v", v, DType::f32, {1, 1, size});
    client_.submit(std::span(&slot, 1), layer_[slot], tensor("q", q, DType::f32, {1, heads, size}),
                   &keys, &values);
  }

  int take(int32_t slot) {
    float out[heads * size];
    const Tensor results = tensor("out", out, DType::f32, {1, heads, size});
    client_.take(std::span(&slot, 1), layer_[slot], results);
    for (const float number : out) {
      require(number == 7 * number_[slot], "a result is that of its row");
    }
    if (dice_() % 4 == 0) return client_.put_back(std::span(&slot, 1)), 0;
    if (++layer_[slot] < static_cast<int>(layers)) return submit(slot), 0;
    client_.release(std::span(&slot, 1));
    return 1;
  }

  MailboxClient client_;
  const Mailbox& mailbox_;
  Place& place_;
  std::mt19937 dice_;
  bool at_place_[slots] = {};
  int layer_[slots];
  float number_[slots] = {};
};

}  // namespace

int main(int, char** words) {
  const int tokens = std::atoi(words[1]);
  const MailboxSizes sizes{slots, layers, 1, 2, heads * size, size, 0};
  std::vector<std::byte> memory(Mailbox::bytes_of(sizes) + ring::kPage);
  void* at = memory.data();
  size_t room = memory.size();
  std::align(ring::kPage, room - ring::kPage, at, room);
  const std::span<std::byte> page(static_cast<std::byte*>(at), room);
  Mailbox::format(page, sizes);
  const Mailbox mailbox(page);

  std::atomic<bool> over{false};
  std::thread workers([&] {
    const HostLayer layer{half("k_cache", 0), half("v_cache", 1), heads, size};
    while (!over) {
      HostWorker worker(mailbox, std::vector<HostLayer>(layers, layer), 2, {});
      worker.attach();
      std::thread thread([&] { worker.run(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      worker.stop();
      thread.join();
    }
  });
  Place place(mailbox);
  std::thread courier([&] { place.serve(over); });
  Client client(mailbox, place, 1);
  for (int ended = 0, i = 0; ended < tokens; ++i) {
    ended += client.step();
    if (i % 64 == 0) client.wait();
  }
  over = true;
  workers.join();
  courier.join();
  std::puts("good");
}
