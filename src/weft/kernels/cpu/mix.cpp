// Cuts gated convolutions and Mamba-2 into independent items and runs them on the thread pool.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "dispatch.hpp"
#include "matrix.hpp"
#include "mixers.hpp"
#include "pool.hpp"

namespace weft {
namespace {

// Where the tokens and the marks of a batch stand.
class Places {
 public:
  explicit Places(const DeltaBatch& batch)
      : batch_(batch), row_of_(batch.bounds.back()), first_mark_(rows() + 1) {
    for (int64_t row = 0; row < rows(); ++row) {
      std::fill(row_of_.begin() + batch.bounds[row], row_of_.begin() + batch.bounds[row + 1],
                static_cast<int32_t>(row));
    }
    size_t mark = 0;
    for (int64_t row = 0; row <= rows(); ++row) {
      while (mark < batch.marks.size() && batch.marks[mark].token < batch.bounds[row]) ++mark;
      first_mark_[row] = mark;
    }
  }

  int64_t rows() const { return static_cast<int64_t>(batch_.reads.size()); }
  int64_t tokens() const { return batch_.bounds.back(); }
  int64_t row_of(int64_t token) const { return row_of_[token]; }
  int64_t place_of(int64_t token) const { return token - batch_.bounds[row_of_[token]]; }
  std::span<const DeltaMark> marks_of(int64_t row) const {
    return batch_.marks.subspan(first_mark_[row], first_mark_[row + 1] - first_mark_[row]);
  }

  // Calls keep(place, slot) for each slot that a row writes, with the tokens of the row before it.
  template <typename Keep>
  void each_kept(int64_t row, const Keep& keep) const {
    for (const DeltaMark& mark : marks_of(row)) {
      keep(mark.token + 1 - batch_.bounds[row], mark.slot);
    }
    keep(batch_.bounds[row + 1] - batch_.bounds[row], batch_.writes[row]);
  }

 private:
  const DeltaBatch& batch_;
  std::vector<int32_t> row_of_;
  std::vector<size_t> first_mark_;
};

class Convolution {
 public:
  Convolution(const ConvShape& shape, const ConvWeights& weights, float* inputs,
              const DeltaBatch& batch, const Tensor& x, char* out)
      : shape_(shape), weights_(weights), inputs_(inputs), batch_(batch), x_(x), out_(out),
        places_(batch), products_(places_.tokens() * shape.channels) {}

  void run() {
    Pool& pool = shared_pool();
    const int64_t tokens = places_.tokens();
    pool.run(tokens, [&](int64_t token) {
      chosen_isa().mixers->multiply(x_.type, part(token, 0), part(token, 2), shape_.channels,
                                    products_.data() + token * shape_.channels);
    });
    pool.run(tokens + places_.rows(), [&](int64_t item) {
      if (item < tokens) return convolve(item);
      const int64_t row = item - tokens;
      places_.each_kept(row, [&](int64_t place, int64_t slot) { keep(row, place, slot); });
    });
  }

 private:
  // One of the three parts of a token.
  const char* part(int64_t token, int64_t number) const {
    return x_.as<char>() + (token * x_.stride[0] + number * shape_.channels) * size_of(x_.type);
  }

  float* kept(int64_t slot) const { return inputs_ + slot * (shape_.taps - 1) * shape_.channels; }

  // The products at a place of a row, counted from its first token of the batch.
  const float* input(int64_t row, int64_t place) const {
    if (place >= 0) return products_.data() + (batch_.bounds[row] + place) * shape_.channels;
    const int32_t slot = batch_.reads[row];
    return slot < 0 ? nullptr : kept(slot) + (shape_.taps - 1 + place) * shape_.channels;
  }

  void convolve(int64_t token) const {
    const int64_t row = places_.row_of(token), place = places_.place_of(token);
    const float* inputs[kMostTaps];
    for (int64_t tap = 0; tap < shape_.taps; ++tap) {
      inputs[tap] = input(row, place - shape_.taps + 1 + tap);
    }
    const int64_t bytes = shape_.channels * size_of(x_.type);
    chosen_isa().mixers->convolve_gated(x_.type, weights_.conv, weights_.bias, inputs, shape_.taps,
                                        shape_.channels, part(token, 1), out_ + token * bytes);
  }

  void keep(int64_t row, int64_t place, int64_t slot) const {
    for (int64_t tap = 0; tap < shape_.taps - 1; ++tap) {
      float* const to = kept(slot) + tap * shape_.channels;
      const float* const from = input(row, place - shape_.taps + 1 + tap);
      if (from == nullptr) {
        std::fill_n(to, shape_.channels, 0.0f);
      } else {
        std::copy_n(from, shape_.channels, to);
      }
    }
  }

  const ConvShape& shape_;
  const ConvWeights& weights_;
  float* const inputs_;
  const DeltaBatch& batch_;
  const Tensor& x_;
  char* const out_;
  const Places places_;
  std::vector<float> products_;  // [T, channels]
};

class Mamba2Advance {
 public:
  Mamba2Advance(const Mamba2Shape& shape, const Mamba2Weights& weights, const DeltaStates& states,
                const DeltaBatch& batch, const Tensor& x, const Tensor& gates, char* out)
      : shape_(shape), weights_(weights), states_(states), batch_(batch), x_(x), gates_(gates),
        out_(out), places_(batch), mixed_(places_.tokens() * shape.channels()),
        steps_(places_.tokens() * shape.heads), decays_(steps_.size()),
        found_(places_.tokens() * shape.values()) {}

  void run() {
    Pool& pool = shared_pool();
    const int64_t slabs = shape_.values() / kSlab;
    pool.run(places_.tokens(), [&](int64_t token) { prepare(token); });
    pool.run(places_.rows(), [&](int64_t row) {
      places_.each_kept(row, [&](int64_t place, int64_t slot) { keep(row, place, slot); });
    });
    pool.run(places_.rows() * slabs, [&](int64_t item) { recur(item / slabs, item % slabs); });
    pool.run(places_.tokens(), [&](int64_t token) { finish(token); });
  }

 private:
  float* kept(int64_t slot) const {
    return states_.inputs + slot * (shape_.taps - 1) * shape_.channels();
  }

  // The input of the convolution at a place of a row, counted from its first token of the batch.
  TapInput input(int64_t row, int64_t place) const {
    if (place >= 0) {
      const int64_t token = batch_.bounds[row] + place;
      return {x_.as<char>() + token * x_.stride[0] * size_of(x_.type), x_.type};
    }
    const int32_t slot = batch_.reads[row];
    if (slot < 0) return {nullptr, DType::f32};
    const float* const from = kept(slot) + (shape_.taps - 1 + place) * shape_.channels();
    return {reinterpret_cast<const char*>(from), DType::f32};
  }

  void prepare(int64_t token) {
    const int64_t row = places_.row_of(token), place = places_.place_of(token);
    TapInput inputs[kMostTaps];
    for (int64_t tap = 0; tap < shape_.taps; ++tap) {
      inputs[tap] = input(row, place - shape_.taps + 1 + tap);
    }
    chosen_isa().mixers->convolve(weights_.conv, weights_.conv_bias, inputs, shape_.taps,
                                  shape_.channels(), mixed_.data() + token * shape_.channels());
    const char* const gates = gates_.as<char>() + token * gates_.stride[0] * size_of(gates_.type);
    for (int64_t head = 0; head < shape_.heads; ++head) {
      const float time = number_at(gates, gates_.type, head) + weights_.bias[head];
      const float softplus = time > 20.0f ? time : std::log1p(std::exp(time));
      const float step = std::clamp(softplus, weights_.least_step, weights_.largest_step);
      steps_[token * shape_.heads + head] = step;
      decays_[token * shape_.heads + head] = std::exp(weights_.decay[head] * step);
    }
  }

  void keep(int64_t row, int64_t place, int64_t slot) const {
    for (int64_t tap = 0; tap < shape_.taps - 1; ++tap) {
      float* const to = kept(slot) + tap * shape_.channels();
      const TapInput from = input(row, place - shape_.taps + 1 + tap);
      if (from.numbers == nullptr) {
        std::fill_n(to, shape_.channels(), 0.0f);
      } else {
        chosen_isa().delta->widen(from, 0, shape_.channels(), to);
      }
    }
  }

  void recur(int64_t row, int64_t slab) {
    const int64_t size = shape_.state_dim * kSlab;
    alignas(64) float matrix[kMostKeys * kSlab];
    const auto slab_of = [&](int64_t slot) {
      return states_.matrices + slot * shape_.matrices() + slab * size;
    };
    if (batch_.reads[row] < 0) {
      std::memset(matrix, 0, size * sizeof(float));
    } else {
      std::memcpy(matrix, slab_of(batch_.reads[row]), size * sizeof(float));
    }
    const int64_t head = slab / (shape_.head_dim / kSlab);
    const int64_t group = head / (shape_.heads / shape_.groups);
    const auto scan_to = [&](int64_t token, int64_t end) {
      for (; token < end; ++token) {
        const float* const mixed = mixed_.data() + token * shape_.channels();
        const float* const b = mixed + shape_.values() + group * shape_.state_dim;
        const int64_t at = token * shape_.heads + head;
        chosen_isa().mixers->scan(matrix, shape_.state_dim,
                                  {b, b + shape_.keys(), mixed + slab * kSlab, steps_[at],
                                   decays_[at], weights_.skip[head],
                                   found_.data() + token * shape_.values() + slab * kSlab});
      }
    };
    int64_t done = 0;
    places_.each_kept(row, [&](int64_t place, int64_t slot) {
      scan_to(batch_.bounds[row] + done, batch_.bounds[row] + place);
      std::memcpy(slab_of(slot), matrix, size * sizeof(float));
      done = place;
    });
  }

  void finish(int64_t token) {
    const int64_t bytes = size_of(x_.type), each = shape_.values() / shape_.groups;
    const char* const gate = x_.as<char>() + (token * x_.stride[0] + shape_.channels()) * bytes;
    for (int64_t first = 0; first < shape_.values(); first += each) {
      const int64_t at = token * shape_.values() + first;
      chosen_isa().mixers->gate_and_norm(x_.type, found_.data() + at, weights_.norm + first,
                                         gate + first * bytes, each, weights_.epsilon,
                                         out_ + at * bytes);
    }
  }

  const Mamba2Shape& shape_;
  const Mamba2Weights& weights_;
  const DeltaStates& states_;
  const DeltaBatch& batch_;
  const Tensor &x_, &gates_;
  char* const out_;
  const Places places_;
  std::vector<float> mixed_;           // [T, channels]: x, B and C
  std::vector<float> steps_, decays_;  // [T, heads]
  std::vector<float> found_;           // [T, values]
};

}  // namespace

void Conv::advance(const DeltaStates& states, const DeltaBatch& batch, const Tensor& x,
                   const Tensor& /*gates*/, char* out) const {
  if (batch.bounds.back() == 0) return;
  Convolution(shape, weights, states.inputs, batch, x, out).run();
}

void Mamba2::advance(const DeltaStates& states, const DeltaBatch& batch, const Tensor& x,
                     const Tensor& gates, char* out) const {
  if (batch.bounds.back() == 0) return;
  Mamba2Advance(shape, weights, states, batch, x, gates, out).run();
}

}  // namespace weft
