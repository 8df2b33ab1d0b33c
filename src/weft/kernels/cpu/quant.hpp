// Matrix products with weights of 8 or 4 bits: what is packed, and the inner loops over it.
//
// A weight w[n, k] is scale[n, k / group] * (q[n, k] - zero[n, k / group]) with unsigned q. A row of
// activations is cut into the same groups, each of which is rounded to 8 bits by a scale of its
// own, so the sum over a group is one of integers: exact, and alike on every instruction set. The
// groups' sums are scaled and added in ascending order, in float32 and without fused multiply-adds,
// so that a result depends neither on the machine nor on the other rows.
#pragma once

#include <cstdint>

#include "tensor.hpp"

namespace weft {

inline constexpr int64_t quant_columns = 64;  // of a panel
inline constexpr int64_t quant_slice = 16;    // columns of it that are one line of its bytes

// One column as it comes: its values, its scales of the weight's type (one float for a whole
// column) and its zeros, if any.
struct QuantColumn {
  const uint8_t* values;
  const void* scales;
  const uint8_t* zeros;
};

// Panels of 64 columns (n), each of `groups` blocks. A block has the 64 scales (if each group has
// its own), the 64 zeros (if any) and the values: four bytes of neighbouring k for each column in
// turn; with 4 bits, the low halves are those of the first four k and the high halves of the next.
struct QuantWeight {
  uint8_t* blocks = nullptr;       // all zeros at first
  float* column_scales = nullptr;  // [panels * 64], one scale a column; else the blocks have them
  int64_t depth = 0;               // k, not padded
  int64_t group = 0;               // k of a group: a multiple of 16, at most 256
  int bits = 8;
  DType scale_type = DType::bf16;  // of the scales in the blocks
  bool zeros = false;              // else every zero is 1 << (bits - 1)

  int64_t groups() const { return (depth + group - 1) / group; }
  int64_t zeros_at() const { return column_scales ? 0 : quant_columns * size_of(scale_type); }
  int64_t values_at() const { return zeros_at() + (zeros ? quant_columns : 0); }
  int64_t block_bytes() const { return values_at() + quant_columns * group * bits / 8; }
  int64_t panel_bytes() const { return groups() * block_bytes(); }

  void write_column(int64_t panel, int64_t column, const QuantColumn& from) const;
  void read_column(int64_t panel, int64_t column, float* to) const;
};

// Rows of activations, rounded: x[r, k] is about scales[r][k / group] * values[r][k].
struct QuantRows {
  int8_t* values = nullptr;  // [rows][groups * group], zeros beyond the depth
  float* scales = nullptr;   // [rows][groups]; NaN if a number of the group is not finite
  int32_t* sums = nullptr;   // [rows][groups], of the values

  static int64_t bytes(const QuantWeight& weight, int64_t rows) {
    return rows * weight.groups() * (weight.group + 8);
  }
  static QuantRows at(char* memory, const QuantWeight& weight, int64_t rows) {
    const int64_t count = rows * weight.groups();
    return {reinterpret_cast<int8_t*>(memory + 8 * count), reinterpret_cast<float*>(memory),
            reinterpret_cast<int32_t*>(memory + 4 * count)};
  }
};

struct QuantKernels {
  // Round one row of f32 or bf16 numbers into row `row` of `rows`.
  void (*round_row)(const QuantWeight& weight, const char* x, DType type, int64_t row,
                    const QuantRows& rows);
  // out[i][c] = x[first + i] . w[panel * 64 + c], for `count` rows and the 64 columns of a panel.
  void (*multiply)(const QuantWeight& weight, int64_t panel, const QuantRows& rows, int64_t first,
                   int64_t count, float* out, int64_t out_stride);
  // The same for columns [16 * slice, 16 * slice + 16) of the panel only; null where whole panels
  // are computed at once.
  void (*multiply_slice)(const QuantWeight& weight, int64_t panel, int64_t slice,
                         const QuantRows& rows, int64_t first, int64_t count, float* out,
                         int64_t out_stride);
  // Round a row of weights: `depth` floats, followed by zeros up to a multiple of 16, to as many
  // values and one scale for each `group` of them (`depth` or a multiple of 16).
  void (*round_weights)(const float* x, int64_t depth, int64_t group, int bits, uint8_t* values,
                        float* scales);
};

}  // namespace weft
