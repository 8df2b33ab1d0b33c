// Cuts the gated delta rule into independent items and runs them on the thread pool.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "delta.hpp"
#include "dispatch.hpp"
#include "matrix.hpp"
#include "phases.hpp"
#include "pool.hpp"

namespace weft {
namespace {

constexpr int64_t kShared = 1 << 16;  // numbers of states from which on more threads are worth it
constexpr int64_t kItems = 8;         // of each thread, at least: some come late
constexpr int64_t kTokens = 16;       // that a slab is taken through at once
alignas(64) constexpr float kZeros[kMostKeys * kSlab] = {};

class Advance {
 public:
  Advance(const Delta& layer, const DeltaStates& states, const DeltaBatch& batch, const Tensor& x,
          const Tensor& gates, char* out)
      : shape_(layer.shape), weights_(layer.weights), states_(states), batch_(batch), x_(x),
        gates_(gates), out_(out), threads_(shared_pool().threads()) {
    static thread_local KeptMemory kept;
    kept.lay_out([this](Slices& slices) { place(slices); });
    find_rows();
    // An item has neighbouring slabs: a thread that takes one waits for what it has written before.
    const int64_t items = std::max<int64_t>(1, kItems * threads_ / std::max<int64_t>(1, rows_));
    each_ = std::clamp<int64_t>(slabs_ / items, 1, slabs_of_head_);
    items_ = (slabs_ + each_ - 1) / each_;
  }

  void run() const {
    const int64_t heads = shape_.key_heads;
    Phases phases;
    phases.add(tokens_ * heads + rows_ * heads, [this, heads](int64_t item) {
      const int64_t number = item / heads;
      if (number < tokens_) return prepare(number, item % heads);
      keep_inputs(number - tokens_, item % heads);
    });
    phases.add(rows_ * items_, [this](int64_t item) { recur(item / items_, item % items_); });
    phases.add(tokens_ * heads,
               [this, heads](int64_t item) { finish(item / heads, item % heads); });
    phases.run((tokens_ + rows_) * shape_.matrices() >= kShared);
  }

 private:
  void place(Slices& slices) {
    row_of_ = slices.take<int32_t>(tokens_);
    first_mark_ = slices.take<size_t>(rows_ + 1);
    mixed_ = slices.take<float>(tokens_ * shape_.channels());
    for (float** const numbers : {&products_, &rates_}) {
      *numbers = slices.take<float>(tokens_ * shape_.value_heads);
    }
    decays_ = slices.take<float>(tokens_ * shape_.decays());
    if (shape_.by_channel) {
      decayed_q_ = slices.take<float>(tokens_ * shape_.decays());
      decayed_k_ = slices.take<float>(tokens_ * shape_.decays());
    }
    read_ = slices.take<float>(tokens_ * shape_.values());
  }

  void find_rows() const {
    size_t mark = 0;
    for (int64_t row = 0; row <= rows_; ++row) {
      const int32_t start = batch_.bounds[row];
      if (row < rows_) std::fill(row_of_ + start, row_of_ + batch_.bounds[row + 1], row);
      while (mark < batch_.marks.size() && batch_.marks[mark].token < start) ++mark;
      first_mark_[row] = mark;
    }
  }

  // The input of the convolution at a place of a row, counted from its first token of the batch.
  TapInput input(int64_t row, int64_t place) const {
    if (place >= 0) {
      const int64_t token = batch_.bounds[row] + place;
      return {x_.as<char>() + token * x_.stride[0] * size_of(x_.type), x_.type};
    }
    const int32_t slot = batch_.reads[row];
    if (slot < 0) return {nullptr, DType::f32};
    return {reinterpret_cast<const char*>(kept(slot) + (shape_.taps - 1 + place) * shape_.channels()),
            DType::f32};
  }

  float* kept(int64_t slot) const {
    return states_.inputs + slot * (shape_.taps - 1) * shape_.channels();
  }

  // Calls body(first, size) for the channels of a key head: of q, of k, and of as many value heads,
  // which are its own but where heads are tiled.
  template <typename Body>
  void each_part(int64_t head, const Body& body) const {
    const int64_t dim = shape_.key_dim, values = values_each_ * shape_.value_dim;
    body(head * dim, dim);
    body(shape_.keys() + head * dim, dim);
    body(2 * shape_.keys() + head * values, values);
  }

  // What the recurrence reads of a token, for the value heads of a key head.
  void prepare(int64_t token, int64_t key_head) const {
    const int64_t row = row_of_[token], place = token - batch_.bounds[row];
    TapInput inputs[kMostTaps];
    for (int64_t tap = 0; tap < shape_.taps; ++tap) {
      inputs[tap] = input(row, place - shape_.taps + 1 + tap);
    }
    float* const mixed = mixed_ + token * shape_.channels();
    each_part(key_head, [&](int64_t first, int64_t size) {
      kernels_.convolve(weights_.conv, inputs, shape_.taps, shape_.channels(), first, size,
                        mixed + first);
    });
    const int64_t dim = shape_.key_dim, heads = shape_.value_heads;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    float *const q = mixed + key_head * dim, *const k = q + shape_.keys();
    kernels_.normalise(q, dim, scale);
    kernels_.normalise(k, dim, 1.0f);
    const float product = kernels_.dot(q, k, dim);
    const char* const gates = gates_.as<char>() + token * gates_.stride[0] * size_of(gates_.type);
    for (int64_t i = 0; i < values_each_; ++i) {
      const int64_t head = shape_.value_head_of(key_head, i), at = token * heads + head;
      products_[at] = product;
      rates_[at] = 1.0f / (1.0f + std::exp(-number_at(gates, gates_.type, head)));
      if (shape_.by_channel) {
        forget(token, head, gates + (heads + head * dim) * size_of(gates_.type), q);
        continue;
      }
      const float time = number_at(gates, gates_.type, heads + head) + weights_.bias[head];
      const float softplus = time > 20.0f ? time : std::log1p(std::exp(time));
      decays_[at] = std::exp(weights_.decay[head] * softplus);
    }
  }

  // The decays of the channels of a head of a token, and q and k times these.
  void forget(int64_t token, int64_t head, const char* times, const float* q) const {
    const int64_t dim = shape_.key_dim, at = (token * shape_.value_heads + head) * dim;
    const float* const k = q + shape_.keys();
    float* const g = decays_ + at;
    kernels_.forget(gates_.type, times, weights_.bias + head * dim, weights_.decay[head],
                    weights_.floor, dim, g);
    for (int64_t i = 0; i < dim; ++i) decayed_q_[at + i] = q[i] * g[i];
    for (int64_t i = 0; i < dim; ++i) decayed_k_[at + i] = k[i] * g[i];
  }

  // What the recurrence reads of a token for a slab.
  DeltaToken token_of(int64_t token, int64_t slab) const {
    const float* const mixed = mixed_ + token * shape_.channels();
    const int64_t head = slab / slabs_of_head_, dim = shape_.key_dim;
    const float* const q = mixed + shape_.key_head_of(head) * dim;
    const int64_t at = token * shape_.value_heads + head;
    DeltaToken found{q, q + shape_.keys(), mixed + 2 * shape_.keys() + slab * kSlab, products_[at],
                     0.0f, rates_[at], read_ + token * shape_.values() + slab * kSlab, nullptr,
                     nullptr};
    if (shape_.by_channel) {
      found.q = decayed_q_ + at * dim;
      found.decays = decays_ + at * dim;
      found.decayed = decayed_k_ + at * dim;
    } else {
      found.decay = decays_[at];
    }
    return found;
  }

  // Writes the last inputs of the convolution before a place of a row.
  void keep(int64_t row, int64_t key_head, int64_t place, int64_t slot) const {
    for (int64_t tap = 0; tap < shape_.taps - 1; ++tap) {
      float* const to = kept(slot) + tap * shape_.channels();
      const TapInput from = input(row, place - shape_.taps + 1 + tap);
      each_part(key_head, [&](int64_t first, int64_t size) {
        if (from.numbers == nullptr) {
          std::fill_n(to + first, size, 0.0f);
        } else {
          kernels_.widen(from, first, size, to + first);
        }
      });
    }
  }

  void keep_inputs(int64_t row, int64_t key_head) const {
    for (size_t mark = first_mark_[row]; mark < first_mark_[row + 1]; ++mark) {
      const int64_t place = batch_.marks[mark].token + 1 - batch_.bounds[row];
      keep(row, key_head, place, batch_.marks[mark].slot);
    }
    keep(row, key_head, batch_.bounds[row + 1] - batch_.bounds[row], batch_.writes[row]);
  }

  float* slab_of(int64_t slot, int64_t slab) const {
    return states_.matrices + slot * shape_.matrices() + slab * slab_size_;
  }

  // Takes the slabs of an item through the tokens of a row, some tokens at a time: slab, q and k are
  // in the first cache then.
  void recur(int64_t row, int64_t item) const {
    const int64_t begin = batch_.bounds[row], end = batch_.bounds[row + 1];
    const int64_t first = item * each_, last = std::min(first + each_, slabs_);
    size_t mark = first_mark_[row];
    for (int64_t token = begin; token < end; token += kTokens) {
      const int64_t stop = std::min(end, token + kTokens);
      size_t next = mark;
      while (next < first_mark_[row + 1] && batch_.marks[next].token < stop) ++next;
      const auto marks = batch_.marks.subspan(mark, next - mark);
      for (int64_t slab = first; slab < last; ++slab) recur_slab(row, slab, token, stop, marks);
      mark = next;
    }
    for (int64_t slab = first; begin == end && slab < last; ++slab) {
      std::memcpy(slab_of(batch_.writes[row], slab), read_of(row, slab), slab_bytes_);
    }
    kernels_.settle();
  }

  // Where the state of a row lies that it begins with.
  const float* read_of(int64_t row, int64_t slab) const {
    return batch_.reads[row] < 0 ? kZeros : slab_of(batch_.reads[row], slab);
  }

  // A slab lies where it is written from the row's first token on.
  void recur_slab(int64_t row, int64_t slab, int64_t begin, int64_t end,
                  std::span<const DeltaMark> marks) const {
    const int64_t first = batch_.bounds[row];
    float* const to = slab_of(batch_.writes[row], slab);
    const float* from = begin == first ? read_of(row, slab) : to;
    const bool away = batch_.bounds[row + 1] - first == 1 && marks.empty();
    auto mark = marks.begin();
    for (int64_t token = begin; token < end; ++token) {
      kernels_.step(from, to, shape_.key_dim, token_of(token, slab), away);
      from = to;
      for (; mark != marks.end() && mark->token == token; ++mark) {
        std::memcpy(slab_of(mark->slot, slab), to, slab_bytes_);
      }
    }
  }

  void finish(int64_t token, int64_t key_head) const {
    const int64_t bytes = size_of(x_.type), dim = shape_.value_dim;
    const char* const z =
        x_.as<char>() + (token * x_.stride[0] + shape_.channels()) * bytes;
    const int64_t last = (key_head + 1) * values_each_;
    for (int64_t head = key_head * values_each_; head < last; ++head) {
      const int64_t at = token * shape_.values() + head * dim;
      kernels_.gate(x_.type, weights_.sigmoid, read_ + at, weights_.norm,
                    z + head * dim * bytes, dim, weights_.epsilon, out_ + at * bytes);
    }
  }

  const DeltaKernels& kernels_ = *chosen_isa().delta;
  const DeltaShape& shape_;
  const DeltaWeights& weights_;
  const DeltaStates& states_;
  const DeltaBatch& batch_;
  const Tensor &x_, &gates_;
  char* const out_;
  const int threads_;
  const int64_t rows_ = static_cast<int64_t>(batch_.reads.size()), tokens_ = batch_.bounds.back();
  const int64_t values_each_ = shape_.value_heads / shape_.key_heads;  // heads of a key head
  const int64_t slabs_of_head_ = shape_.value_dim / kSlab;
  const int64_t slabs_ = shape_.value_heads * slabs_of_head_;
  const int64_t slab_size_ = shape_.key_dim * kSlab;
  const int64_t slab_bytes_ = slab_size_ * static_cast<int64_t>(sizeof(float));
  int64_t each_ = 1, items_ = 0;  // slabs of an item, and items of a row
  int32_t* row_of_ = nullptr;     // [T]
  size_t* first_mark_ = nullptr;  // [R + 1]
  float* mixed_ = nullptr;        // [T, channels]: q, k and v
  float *products_ = nullptr, *rates_ = nullptr;  // [T, value_heads]: k q, and beta
  float* decays_ = nullptr;       // [T, decays]
  float *decayed_q_ = nullptr, *decayed_k_ = nullptr;  // by channel: q and k times these
  float* read_ = nullptr;         // [T, values]: what the states give
};

}  // namespace

void Delta::advance(const DeltaStates& states, const DeltaBatch& batch, const Tensor& x,
                    const Tensor& gates, char* out) const {
  if (batch.bounds.back() == 0) return;
  Advance(*this, states, batch, x, gates, out).run();
}

}  // namespace weft
