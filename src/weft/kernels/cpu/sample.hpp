// From logits to tokens: the likeliest, or a draw from what temperature, top-k, top-p and min-p keep.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// Rows [rows, size] of logits, which are overwritten, and what is wanted of each.
struct Choice {
  float* logits;
  int64_t rows, size;
  const double* settings;  // [rows, number of settings()]
  const double* draws;     // [rows], in [0, 1)
  int64_t* tokens;         // [rows]; those of rows that are not finite mean nothing
  bool* finite;            // [rows]: whether all logits are
};

// Names of the columns of `Choice::settings`; see kernels/reference_sampling.py.
const std::vector<std::string>& settings();

// A row's token depends on this row alone. Runs on the thread pool.
void sample(const Choice& choice);

// For each (seed, counter) a number in [0, 1) with 53 random bits, by Philox4x32-10 (Salmon et al.
// 2011, "Parallel random numbers").
void uniform(const int64_t* seeds, const int64_t* counters, int64_t count, double* numbers);

}  // namespace weft
