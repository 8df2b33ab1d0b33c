// Routing, and the products of experts with the tokens that go to them.

#include "experts.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"
#include "ops.hpp"
#include "phases.hpp"

namespace weft {
namespace {

// A token at one of its experts. Pairs stand in the order of experts, then of tokens.
struct Pair {
  int64_t token;
  float share;
  int64_t product;  // that of its expert
  int64_t row;      // of the product
};

// The products of one call, one of each kind for each expert that has tokens. A thread keeps them, so
// that the next call finds their memory.
class Mixture {
 public:
  void run(const Experts& experts, const Routes& routes, Rows x, Rows out,
           FunctionRef<void(int64_t)> done) {
    kernels_ = chosen_isa().panel;
    experts_ = &experts;
    routes_ = routes;
    x_ = x;
    out_ = out;
    work_ = 0;
    for (auto* products : {&gate_up_, &down_}) products->clear();
    for (auto* numbers : {&firsts_, &gate_up_ends_, &down_ends_}) numbers->clear();
    group();
    place();
    run_phases(done);
  }

 private:
  void run_phases(FunctionRef<void(int64_t)> done) const {
    const int64_t pairs = static_cast<int64_t>(pairs_.size());
    const bool rounds = std::ranges::any_of(down_, &Multiplication::rounds);
    const bool squares = experts_->activation == Activation::relu2;
    Phases phases;
    phases.add_tokens(pairs, [this](int64_t pair) { take(pair); });
    phases.add(gate_up_ends_.back(), [this](int64_t i) { multiply(gate_up_, gate_up_ends_, i); });
    phases.add_tokens(squares ? pairs : 0, [this](int64_t i) { square(i); });
    phases.add_tokens(rounds ? pairs : 0, [this](int64_t i) {
      down_[pairs_[i].product].round_row(pairs_[i].row);
    });
    phases.add(down_ends_.back(), [this](int64_t i) { multiply(down_, down_ends_, i); });
    phases.add_tokens(routes_.tokens, [this, done](int64_t token) {
      add_up(token);
      done(token);
    });
    phases.run(worth_sharing(work_));
  }

  // Fills in the pairs, and how many rows each product has.
  void group() {
    const int64_t count = static_cast<int64_t>(experts_->down.size());
    const int64_t size = routes_.tokens * routes_.top_k;
    rows_.assign(count, 0);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t expert = routes_.ids[i];
      if (expert < 0 || expert >= count) {
        throw std::out_of_range("expert " + std::to_string(expert) + " is none of " +
                                std::to_string(count));
      }
      ++rows_[expert];
    }
    products_.resize(count);
    next_.resize(count);
    for (int64_t expert = 0, first = 0; expert < count; ++expert) {
      const int64_t rows = rows_[expert];
      if (rows == 0) continue;
      products_[expert] = static_cast<int64_t>(down_.size());
      next_[expert] = first;
      first += rows;
      const Matrix &gate_up = *experts_->gate_up[expert], &down = *experts_->down[expert];
      const auto bias_of = [expert](const void* all, const Matrix& matrix) -> const void* {
        if (all == nullptr) return nullptr;
        return rows_of(all, matrix.outputs(), matrix.type()).row(expert);
      };
      gate_up_.push_back({.matrix = &gate_up, .bias = bias_of(experts_->gate_up_bias, gate_up),
                          .rows = rows, .activated = gate_up.gated(),
                          .activation = experts_->activation, .limit = experts_->limit});
      down_.push_back(
          {.matrix = &down, .bias = bias_of(experts_->down_bias, down), .rows = rows});
      firsts_.push_back(next_[expert]);
      work_ += work_of(gate_up, rows);
    }
    pairs_.resize(size);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t expert = routes_.ids[i], product = products_[expert], at = next_[expert]++;
      pairs_[at] = {i / routes_.top_k, routes_.shares[i], product, at - firsts_[product]};
    }
    places_.resize(size);
    found_.assign(routes_.tokens, 0);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t token = pairs_[i].token;
      places_[token * routes_.top_k + found_[token]++] = i;
    }
  }

  // Gives the products their memory: rows of all pairs, one expert's after the other's.
  void place() {
    const int64_t size = static_cast<int64_t>(pairs_.size());
    const Matrix& one = *experts_->down.front();
    Rows x{}, gated{};
    memory_.lay_out([&](Slices& slices) {
      for (auto* products : {&gate_up_, &down_}) {
        for (Multiplication& product : *products) {
          product.round_into(slices.take(product.round_bytes()));
        }
      }
      x = slices.rows(size, one.outputs(), one.type());
      gated = slices.rows(size, one.inputs(), one.type());
      results_ = slices.rows(size, one.outputs(), one.type());
      shares_ = slices.take<Share>(size);
    });
    int64_t gate_up_end = 0, down_end = 0;
    for (size_t i = 0; i < down_.size(); ++i) {
      const auto from = [&](Rows all) { return Rows{all.row(firsts_[i]), all.stride}; };
      gate_up_[i].x = from(x);
      gate_up_[i].out = down_[i].x = from(gated);
      down_[i].out = from(results_);
      gate_up_[i].out_type = down_[i].out_type = one.type();
      gate_up_ends_.push_back(gate_up_end += gate_up_[i].items());
      down_ends_.push_back(down_end += down_[i].items());
    }
  }

  // Brings a token to its expert.
  void take(int64_t i) const {
    const auto [token, share, number, row] = pairs_[i];
    const Multiplication& product = gate_up_[number];
    const char* from = x_.row(token);
    if (product.rounds()) return product.round_row(row, from);
    std::copy_n(from, product.x.stride, product.x.row(row));
  }

  // Applies the activation of experts without gates to what a pair's first product gave.
  void square(int64_t i) const {
    const Multiplication& product = down_[pairs_[i].product];
    char* const row = product.x.row(pairs_[i].row);
    activate_row(product.matrix->type(), Activation::relu2, nullptr, row, row,
                 product.matrix->inputs());
  }

  void multiply(const std::vector<Multiplication>& products, const std::vector<int64_t>& ends,
                int64_t item) const {
    const auto at = std::ranges::upper_bound(ends, item) - ends.begin();
    products[at].run(*kernels_, at == 0 ? item : item - ends[at - 1]);
  }

  void add_up(int64_t token) const {
    Share* const shares = shares_ + token * routes_.top_k;
    for (int64_t k = 0; k < routes_.top_k; ++k) {
      const int64_t place = places_[token * routes_.top_k + k];
      shares[k] = {pairs_[place].share, results_.row(place)};
    }
    const Matrix& one = *experts_->down.front();
    kernels_->combine(one.type(), shares, routes_.top_k, out_.row(token), one.outputs());
  }

  const PanelKernels* kernels_ = nullptr;
  const Experts* experts_ = nullptr;
  Routes routes_{};
  Rows x_{}, out_{};
  KeptMemory memory_;
  std::vector<int64_t> rows_, products_, next_;  // of each expert: pairs, its product, its next pair
  std::vector<int64_t> found_;                   // of each token, pairs so far
  std::vector<Pair> pairs_;
  std::vector<int64_t> places_;  // [tokens, top_k], the pairs of each token
  std::vector<Multiplication> gate_up_, down_;
  std::vector<int64_t> firsts_;  // the first pair of each product
  std::vector<int64_t> gate_up_ends_, down_ends_;  // items up to the end of each product
  Rows results_{};
  Share* shares_ = nullptr;  // [tokens, top_k]
  int64_t work_ = 0;
};

constexpr float none = -std::numeric_limits<float>::infinity();

// Turns scores into weights; returns their sum, which is NaN if one of the scores is.
float weigh(float* scores, int64_t count, bool sigmoid) {
  const ScanKernels& scan = *chosen_isa().scan;
  if (sigmoid) {
    sigmoids(scores, count);
  } else {
    scan.weigh(scores, count, scan.peak(scores, count).value, 1.0f);
  }
  float total = 0.0f;
  for (int64_t i = 0; i < count; ++i) total += scores[i];
  if (total == total && !sigmoid) {
    for (int64_t i = 0; i < count; ++i) scores[i] /= total;
  }
  return total;
}

// Leaves the experts of the best groups, of equal ones the first.
void keep_groups(float* weights, int64_t count, const Routing& routing) {
  const int64_t size = count / routing.groups;
  thread_local std::vector<float> ranks, best;
  ranks.clear();
  for (int64_t group = 0; group < routing.groups; ++group) {
    const float* const first = weights + group * size;
    best.resize(routing.group_best);
    std::partial_sort_copy(first, first + size, best.begin(), best.end(), std::greater<>());
    ranks.push_back(std::accumulate(best.begin(), best.end(), 0.0f));
  }
  for (int64_t left = routing.top_groups; left > 0; --left) {
    *std::ranges::max_element(ranks) = none;
  }
  for (int64_t group = 0; group < routing.groups; ++group) {
    if (ranks[group] != none) std::fill_n(weights + group * size, size, none);
  }
}

}  // namespace

void sigmoids(float* row, int64_t count) {
  thread_local std::vector<float> powers;  // exp(-|x|)
  powers.resize(count);
  for (int64_t i = 0; i < count; ++i) powers[i] = -std::abs(row[i]);
  chosen_isa().scan->weigh(powers.data(), count, 0.0f, 1.0f);
  for (int64_t i = 0; i < count; ++i) {
    row[i] = (row[i] < 0.0f ? powers[i] : 1.0f) / (1.0f + powers[i]);
  }
}

void route_row(float* scores, int64_t count, const Routing& routing, int64_t* ids, float* shares) {
  const int64_t top_k = routing.top_k;
  if (const float total = weigh(scores, count, routing.sigmoid); total != total) {
    std::iota(ids, ids + top_k, 0);
    std::fill_n(shares, top_k, total);
    return;
  }
  float* chosen_by = scores;
  if (routing.bias != nullptr || routing.groups > 1) {
    thread_local std::vector<float> kept;
    kept.assign(scores, scores + count);
    chosen_by = kept.data();
    if (routing.bias != nullptr) {
      for (int64_t i = 0; i < count; ++i) chosen_by[i] += routing.bias[i];
    }
    if (routing.groups > routing.top_groups) keep_groups(chosen_by, count, routing);
  }
  float chosen = 0.0f;
  for (int64_t k = 0; k < top_k; ++k) {
    float* const best = std::max_element(chosen_by, chosen_by + count);
    ids[k] = best - chosen_by;
    chosen += shares[k] = scores[ids[k]];
    *best = none;
  }
  const float divisor = routing.normalise ? chosen + 1e-20f : 1.0f;
  for (int64_t k = 0; k < top_k; ++k) shares[k] = shares[k] / divisor * routing.scale;
}

void route(const Tensor& scores, const Routing& routing, int64_t* ids, float* shares) {
  const int64_t tokens = scores.shape[0], count = scores.shape[1], top_k = routing.top_k;
  Phases phases;
  phases.add_tokens(tokens, [&](int64_t token) {
    std::vector<float> row(count);
    for (int64_t i = 0; i < count; ++i) {
      row[i] = number_at(scores.data, scores.type, token * scores.stride[0] + i);
    }
    route_row(row.data(), count, routing, ids + token * top_k, shares + token * top_k);
  });
  phases.run(tokens > piece);
}

void run_experts(const Experts& experts, const Routes& routes, Rows x, Rows out,
                 FunctionRef<void(int64_t)> done) {
  if (routes.tokens == 0) return;
  thread_local Mixture mixture;
  mixture.run(experts, routes, x, out, done);
}

}  // namespace weft
