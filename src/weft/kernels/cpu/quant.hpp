// Matrix products with weights of 8 to 4 bits: what is packed, and the inner loops over it.
//
// A weight w[n, k] is scale[n, k / group] * (q[n, k] - zero[n, k / group]) with unsigned q, or, of
// weights with minimums, scale * q - minimum. A row of activations is cut into the same groups, each
// of which is rounded to 8 bits by a scale of its own, so the sum over a group is one of integers:
// exact, and alike on every instruction set. The groups' sums are scaled and added in ascending
// order, in float32 and without fused multiply-adds, so that a result depends neither on the machine
// nor on the other rows.
//
// Of nested scales, which are whole steps of a float16 for 256 k, activations are rounded by one scale
// for these 256: the sum over all of them, times the steps, is one of integers as well.
#pragma once

#include <cstdint>

#include "tensor.hpp"

namespace weft {

inline constexpr int64_t quant_columns = 64;  // of a panel
inline constexpr int64_t quant_slice = 16;    // columns of it that are one line of its bytes
inline constexpr int64_t quant_nest = 256;    // k that share a float16 where scales are nested

// What 4 bits stand for: themselves, or one of sixteen numbers, each a byte with 128 added. Those of
// GGUF's IQ4_NL and IQ4_XS; and twice those of E2M1.
enum class CodeTable : int { none = 0, nonlinear = 1, e2m1 = 2 };
inline constexpr int num_tables = 3;
alignas(16) inline constexpr uint8_t code_tables[num_tables][16] = {
    {},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
};

// One column as it comes: its values; its scales of the weight's type (one float for a whole
// column, a float16 for each `quant_nest` of nested ones, whose groups have steps of that); its
// zeros, or its minimums, which are as the scales are, if any.
struct QuantColumn {
  const uint8_t* values;
  const void* scales;
  const uint8_t* zeros = nullptr;
  const void* minimums = nullptr;
  const int8_t* steps = nullptr;
  const int8_t* minimum_steps = nullptr;
};

// Panels of 64 columns (n), each of `groups` blocks. A block has the 64 scales (if each group has
// its own), the 64 zeros or minimums (if any) and the values: four bytes of neighbouring k for each
// column in turn; with 4 bits, the low halves are those of the first four k and the high halves of
// the next. With 5 or 6 bits these are the low four bits, and the others follow: one or two bits of
// each byte for each four k in turn, the lowest first. Nested scales are a byte in the block; before
// the blocks of each `quant_nest` k are the 64 float16 that they are steps of, then those of the
// minimums.
struct QuantWeight {
  uint8_t* blocks = nullptr;       // all zeros at first
  float* column_scales = nullptr;  // [panels * 64], one scale a column; else the blocks have them
  int64_t depth = 0;               // k, not padded
  int64_t group = 0;               // k of a group: a multiple of 16, at most 256
  int bits = 8;                    // 4, 5, 6 or 8
  DType scale_type = DType::bf16;  // of the scales in the blocks
  bool zeros = false;              // else every zero is `centre`
  bool minimums = false;
  bool nested = false;             // 4 to 6 bits, without zeros, and a depth of whole nests
  CodeTable table = CodeTable::none;

  int64_t groups() const { return (depth + group - 1) / group; }
  // What stands for 0 in weights without zeros of their own: with minimums also a code of 4 or 5 bits
  // that is 0.
  int centre() const {
    return minimums && bits < 6 ? 0 : table != CodeTable::none ? 128 : 1 << (bits - 1);
  }
  int64_t scale_bytes() const {
    return column_scales ? 0 : quant_columns * (nested ? 1 : size_of(scale_type));
  }
  int64_t zeros_at() const { return scale_bytes(); }
  int64_t minimums_at() const { return scale_bytes(); }
  int64_t values_at() const {
    return zeros_at() + (zeros ? quant_columns : 0) + (minimums ? scale_bytes() : 0);
  }
  int64_t high_at() const { return values_at() + quant_columns * group / 2; }  // of 5 and 6 bits
  int64_t block_bytes() const { return values_at() + quant_columns * group * bits / 8; }
  // Of nested scales: what stands before the blocks of a nest, and how many these are.
  int64_t head_bytes() const { return nested ? quant_columns * 2 * (minimums ? 2 : 1) : 0; }
  int64_t nest_groups() const { return nested ? quant_nest / group : groups() + 1; }
  int64_t panel_bytes() const {
    const int64_t heads = nested ? (groups() + nest_groups() - 1) / nest_groups() : 0;
    return groups() * block_bytes() + heads * head_bytes();
  }

  void write_column(int64_t panel, int64_t column, const QuantColumn& from) const;
  void read_column(int64_t panel, int64_t column, float* to) const;
};

// Goes through the blocks of a panel: `block` is that of a group, `head` what its nest begins with.
class QuantBlocks {
 public:
  QuantBlocks(const QuantWeight& weight, int64_t panel)
      : block(weight.blocks + panel * weight.panel_bytes()), head_bytes_(weight.head_bytes()),
        block_bytes_(weight.block_bytes()), nest_groups_(weight.nest_groups()) {
    enter(0);
  }
  void next() {
    block += block_bytes_;
    enter(++group_);
  }

  uint8_t* block;
  uint8_t* head = nullptr;

 private:
  void enter(int64_t group) {
    if (head_bytes_ == 0 || group % nest_groups_ != 0) return;
    head = block;
    block += head_bytes_;
  }

  int64_t head_bytes_, block_bytes_, nest_groups_, group_ = 0;
};

// Rows of activations, rounded: x[r, k] is about scales[r][k / group] * values[r][k].
struct QuantRows {
  int8_t* values = nullptr;  // [rows][groups * group], zeros beyond the depth
  float* scales = nullptr;   // [rows][groups], alike in a nest; NaN if a number is not finite
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
