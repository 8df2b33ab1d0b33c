// Passes over one row of logits or weights. scan.cpp is compiled once per instruction set;
// dispatch.hpp picks the widest that this machine runs.
#pragma once

#include <cstdint>

namespace weft {

constexpr int64_t kSumBlock = 256;   // weights whose sum is one number of `sum_blocks`
constexpr int64_t kPeakBlock = 64;   // weights whose largest is one number of `peaks`

struct Peak {
  float value;  // the largest
  bool finite;  // whether all are
};

struct ScanKernels {
  Peak (*peak)(const float* row, int64_t size);
  // The first index at which the row has this value; size if nowhere.
  int64_t (*find)(const float* row, int64_t size, float value);
  // row[i] = exp((row[i] - peak) / temperature), 0 below the smallest normal number.
  void (*weigh)(float* row, int64_t size, float peak, float temperature);
  // Sums of kSumBlock weights each, in float64; the last block may be shorter.
  void (*sum_blocks)(const float* row, int64_t size, double* sums);
  // The largest of kPeakBlock weights each.
  void (*peaks)(const float* row, int64_t size, float* largest);
  // Copies the weights that are at least this large; returns how many.
  int64_t (*gather)(const float* row, int64_t size, float least, float* to);
  // Makes smaller weights 0.
  void (*drop)(float* row, int64_t size, float least);
  // row[i] = cap * tanh(row[i] / cap).
  void (*softcap)(float* row, int64_t size, float cap);
};

}  // namespace weft
