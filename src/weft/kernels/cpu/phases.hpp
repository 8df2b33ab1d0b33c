// Work in phases: between two of them all threads meet, within one items are independent.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <span>

#include "calls.hpp"
#include "lines.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace weft {

inline constexpr int64_t piece = 4;  // tokens of one item of what is done token by token
inline int64_t pieces(int64_t tokens) { return (tokens + piece - 1) / piece; }

class Phases {
 public:
  void add(int64_t items, const ItemFunction& body) {
    if (items == 0) return;
    counts_[size_] = items;
    bodies_[size_++] = body;
  }

  // The body is called for each token.
  template <typename Body>
  void add_tokens(int64_t tokens, const Body& body) {
    add(pieces(tokens), [tokens, body](int64_t item) {
      const int64_t end = std::min(tokens, (item + 1) * piece);
      for (int64_t token = item * piece; token < end; ++token) body(token);
    });
  }

  // What rounds the rows of a product, if it is one of integers.
  void add_rounding(const Multiplication& product) {
    if (product.rounds()) {
      add_tokens(product.rows, [&product](int64_t row) { product.round_row(row); });
    }
  }

  // Runs the phases in their order, on all threads if `share`.
  void run(bool share) const {
    const auto body = [this](int phase, int64_t item) { bodies_[phase](item); };
    const std::span counts(counts_.data(), size_);
    if (share) return shared_pool().run_phases(counts, body);
    for (int phase = 0; phase < size_; ++phase) {
      for (int64_t item = 0; item < counts_[phase]; ++item) body(phase, item);
    }
  }

 private:
  int size_ = 0;
  std::array<int64_t, Pool::max_phases> counts_;
  std::array<ItemFunction, Pool::max_phases> bodies_;
};

// Cuts memory into slices that begin with a cache line each; without memory it counts what they need.
class Slices {
 public:
  explicit Slices(char* memory) : memory_(reinterpret_cast<uintptr_t>(memory)) {}

  template <typename T = char>
  T* take(int64_t count) {
    T* const slice = reinterpret_cast<T*>(memory_ + used_);
    constexpr int64_t line = line_bytes;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + line - 1) / line * line;
    return slice;
  }
  Rows rows(int64_t count, int64_t columns, DType type) {
    const int64_t stride = columns * size_of(type);
    return {take(count * stride), stride};
  }
  int64_t used() const { return used_; }

 private:
  uintptr_t memory_;
  int64_t used_ = 0;
};

// Memory of a thread that stays until it needs more: fresh one would be faulted in page by page.
class KeptMemory {
 public:
  // Calls layout(slices) to count, then with memory of that size.
  template <typename Layout>
  void lay_out(const Layout& layout) {
    Slices counted(nullptr);
    layout(counted);
    Slices slices(refit(memory_, counted.used()));
    layout(slices);
  }

 private:
  Lines<char> memory_;
};

}  // namespace weft
