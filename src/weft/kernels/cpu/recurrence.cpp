// Cuts the gated delta rule into independent items and runs them on the thread pool.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "delta.hpp"
#include "dispatch.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace weft {
namespace {

// What tokens are made into before the recurrence reads them.
struct Prepared {
  std::vector<float> mixed;     // [T, channels]: q, k and v
  std::vector<float> products;  // [T, value_heads]: k q
  std::vector<float> decays;    // [T, value_heads], by channel [T, value_heads, key_dim]
  std::vector<float> decayed;   // by channel: q, then k, times these, [2, T, value_heads, key_dim]
  std::vector<float> rates;     // [T, value_heads]
  std::vector<float> out;       // [T, values]
};

alignas(64) constexpr float kZeros[kMostKeys * kSlab] = {};

class Advance {
 public:
  Advance(const DeltaShape& shape, const DeltaWeights& weights, const DeltaStates& states,
          const DeltaBatch& batch, const Tensor& x, const Tensor& gates, char* out)
      : shape_(shape), weights_(weights), states_(states), batch_(batch), x_(x), gates_(gates),
        out_(out), rows_(static_cast<int64_t>(batch.reads.size())), tokens_(batch.bounds.back()),
        row_of_(tokens_), first_mark_(rows_ + 1) {
    for (int64_t row = 0; row < rows_; ++row) {
      std::fill(row_of_.begin() + batch.bounds[row], row_of_.begin() + batch.bounds[row + 1],
                static_cast<int32_t>(row));
    }
    size_t mark = 0;
    for (int64_t row = 0; row <= rows_; ++row) {
      const int32_t start = row < rows_ ? batch.bounds[row] : batch.bounds.back();
      while (mark < batch.marks.size() && batch.marks[mark].token < start) ++mark;
      first_mark_[row] = mark;
    }
    made_.mixed.resize(tokens_ * shape.channels());
    for (auto* numbers : {&made_.products, &made_.rates}) {
      numbers->resize(tokens_ * shape.value_heads);
    }
    made_.decays.resize(tokens_ * shape.decays());
    if (shape.by_channel) made_.decayed.resize(2 * made_.decays.size());
    made_.out.resize(tokens_ * shape.values());
  }

  void run() {
    Pool& pool = shared_pool();
    const int64_t slabs = shape_.value_heads * (shape_.value_dim / kSlab);
    pool.run(tokens_, [&](int64_t token) { prepare(token); });
    pool.run(rows_, [&](int64_t row) { keep_inputs(row); });
    pool.run(rows_ * slabs, [&](int64_t item) { recur(item / slabs, item % slabs); });
    pool.run(tokens_, [&](int64_t token) { finish(token); });
  }

 private:
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

  void prepare(int64_t token) {
    const DeltaKernels& kernels = *chosen_isa().delta;
    const int64_t row = row_of_[token], place = token - batch_.bounds[row];
    TapInput inputs[kMostTaps];
    for (int64_t tap = 0; tap < shape_.taps; ++tap) {
      inputs[tap] = input(row, place - shape_.taps + 1 + tap);
    }
    float* const mixed = made_.mixed.data() + token * shape_.channels();
    kernels.convolve(weights_.conv, inputs, shape_.taps, shape_.channels(), mixed);
    const int64_t dim = shape_.key_dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int64_t head = 0; head < shape_.key_heads; ++head) {
      kernels.normalise(mixed + head * dim, dim, scale);
      kernels.normalise(mixed + shape_.keys() + head * dim, dim, 1.0f);
    }
    const char* const gates = gates_.as<char>() + token * gates_.stride[0] * size_of(gates_.type);
    const int64_t heads = shape_.value_heads, each = heads / shape_.key_heads;
    for (int64_t head = 0; head < heads; ++head) {
      const float* const q = mixed + head / each * dim;
      const int64_t at = token * heads + head;
      made_.products[at] = kernels.dot(q, q + shape_.keys(), dim);
      made_.rates[at] = 1.0f / (1.0f + std::exp(-number_at(gates, gates_.type, head)));
      if (shape_.by_channel) {
        forget(token, head, gates + (heads + head * dim) * size_of(gates_.type), q);
        continue;
      }
      const float time = number_at(gates, gates_.type, heads + head) + weights_.bias[head];
      const float softplus = time > 20.0f ? time : std::log1p(std::exp(time));
      made_.decays[at] = std::exp(weights_.decay[head] * softplus);
    }
  }

  // The decays of the channels of a head of a token, and q and k times these.
  void forget(int64_t token, int64_t head, const char* times, const float* q) {
    const int64_t dim = shape_.key_dim, at = (token * shape_.value_heads + head) * dim;
    float* const g = made_.decays.data() + at;
    chosen_isa().delta->forget(gates_.type, times, weights_.bias + head * dim, weights_.decay[head],
                               weights_.floor, dim, g);
    for (const float* from : {q, q + shape_.keys()}) {
      float* const to = decayed(from != q) + at;
      for (int64_t i = 0; i < dim; ++i) to[i] = from[i] * g[i];
    }
  }

  float* decayed(bool keys) { return made_.decayed.data() + (keys ? made_.decays.size() : 0); }

  // Writes the last inputs of the convolution before a place of a row.
  void keep(int64_t row, int64_t place, int64_t slot) const {
    for (int64_t tap = 0; tap < shape_.taps - 1; ++tap) {
      float* const to = kept(slot) + tap * shape_.channels();
      const TapInput from = input(row, place - shape_.taps + 1 + tap);
      if (from.numbers == nullptr) {
        std::fill_n(to, shape_.channels(), 0.0f);
      } else {
        chosen_isa().delta->widen(from, shape_.channels(), to);
      }
    }
  }

  void keep_inputs(int64_t row) const {
    for (size_t mark = first_mark_[row]; mark < first_mark_[row + 1]; ++mark) {
      keep(row, batch_.marks[mark].token + 1 - batch_.bounds[row], batch_.marks[mark].slot);
    }
    keep(row, batch_.bounds[row + 1] - batch_.bounds[row], batch_.writes[row]);
  }

  void recur(int64_t row, int64_t slab) {
    const DeltaKernels& kernels = *chosen_isa().delta;
    const int64_t dim = shape_.key_dim, size = dim * kSlab, all = shape_.matrices();
    alignas(64) float matrix[kMostKeys * kSlab];
    const auto place = [&](int64_t slot) { return states_.matrices + slot * all + slab * size; };
    const int64_t end = batch_.bounds[row + 1], read = batch_.reads[row];
    float* const written = place(batch_.writes[row]);
    const float* from = read < 0 ? kZeros : place(read);
    if (batch_.bounds[row] == end) std::memcpy(written, from, size * sizeof(float));
    const int64_t heads = shape_.value_heads, each = heads / shape_.key_heads;
    const int64_t head = slab / (shape_.value_dim / kSlab);
    size_t mark = first_mark_[row];
    // The first token is read from a slot and the last one written to one, in one pass each.
    for (int64_t token = batch_.bounds[row]; token < end; ++token) {
      const float* const mixed = made_.mixed.data() + token * shape_.channels();
      const float* const q = mixed + head / each * dim;
      const bool marked = mark < first_mark_[row + 1] && batch_.marks[mark].token == token;
      float* const to = token == end - 1 ? written : matrix;
      const int64_t at = token * heads + head;
      const bool by_channel = shape_.by_channel;
      kernels.step(from, to, dim, to == written && !marked,
                   {by_channel ? decayed(false) + at * dim : q, q + shape_.keys(),
                    mixed + 2 * shape_.keys() + slab * kSlab, made_.products[at],
                    by_channel ? 0.0f : made_.decays[at], made_.rates[at],
                    made_.out.data() + token * shape_.values() + slab * kSlab,
                    by_channel ? made_.decays.data() + at * dim : nullptr,
                    by_channel ? decayed(true) + at * dim : nullptr});
      for (; mark < first_mark_[row + 1] && batch_.marks[mark].token == token; ++mark) {
        std::memcpy(place(batch_.marks[mark].slot), to, size * sizeof(float));
      }
      from = to;
    }
  }

  void finish(int64_t token) {
    const int64_t bytes = size_of(x_.type), dim = shape_.value_dim;
    const char* const z =
        x_.as<char>() + (token * x_.stride[0] + shape_.channels()) * bytes;
    for (int64_t head = 0; head < shape_.value_heads; ++head) {
      const int64_t at = token * shape_.values() + head * dim;
      chosen_isa().delta->gate(x_.type, weights_.sigmoid, made_.out.data() + at, weights_.norm,
                               z + head * dim * bytes, dim, weights_.epsilon, out_ + at * bytes);
    }
  }

  const DeltaShape& shape_;
  const DeltaWeights& weights_;
  const DeltaStates& states_;
  const DeltaBatch& batch_;
  const Tensor &x_, &gates_;
  char* const out_;
  const int64_t rows_, tokens_;
  std::vector<int32_t> row_of_;
  std::vector<size_t> first_mark_;
  Prepared made_;
};

}  // namespace

void advance_delta(const DeltaShape& shape, const DeltaWeights& weights, const DeltaStates& states,
                   const DeltaBatch& batch, const Tensor& x, const Tensor& gates, char* out) {
  if (batch.bounds.back() == 0) return;
  Advance(shape, weights, states, batch, x, gates, out).run();
}

}  // namespace weft
