// The arithmetic of a transformer layer that is not attention, for one piece of it: rows of
// activations by one panel of a packed matrix, what becomes of the sums, norms and rotation.
// panel.cpp is compiled once per instruction set; dispatch.hpp picks the one that runs.
//
// Exactness: every output is one float32 sum that runs over the inputs in ascending order, in steps
// of one (float32) or two (bfloat16). It depends on its own row and column only: not on the rows
// computed with it, on their place, or on how work was shared out to threads.
#pragma once

#include <cstdint>

#include "tensor.hpp"

namespace weft {

// How the numbers of a packed matrix are stored; shared with `FORMATS` in matrix.py.
//
// A panel holds all inputs of 64 outputs (columns), one input (f32) or one pair of inputs (bf16)
// after the other: [inputs][64] float32, or [inputs / 2][64][2] bfloat16. What is missing at the
// ends is 0. A new format needs its number here, a size and a `pack` in matrix.cpp, and its
// `multiply` in panel.cpp; sums, epilogues and everything above stay as they are.
//
// The formats of integers are packed and multiplied as quant.hpp says.
enum class Format : int {
  f32 = 0,
  bf16 = 1,
  int8 = 2,
  int4 = 3,
  int5 = 4,
  int6 = 5,
  nl4 = 6,  // 4 bits that choose from a table, see CodeTable
  mx4 = 7,
};
inline constexpr int num_formats = 2;  // of floats
static inline bool is_quantised(Format format) { return static_cast<int>(format) >= num_formats; }

inline constexpr int64_t panel_columns = 64;
// A gated panel holds this many columns of the gate and then as many of the values ("up").
inline constexpr int64_t gated_columns = panel_columns / 2;

// swiglu_oai is gpt-oss's: (value + 1) * gate * sigmoid(1.702 * gate), of a gate of at most 7 and a
// value within [-7, 7]. relu2 and xielu belong to products without a gate: see
// `activate`; gelu has one or none. limited is silu of at most a limit, times a value within the same.
enum class Activation : int {
  silu = 0,
  gelu_tanh = 1,
  swiglu_oai = 2,
  relu2 = 3,
  xielu = 4,
  limited = 5,
  gelu = 6,
};
// What makes a factor of a gate.
enum class Gating : int { sigmoid = 0, softplus = 1 };

// Columns that are computed by themselves where whole panels are too few for the threads: those of a
// cache line of a panel.
inline constexpr int64_t slice_columns = 16;

// Rows of activations times one panel. Strides are in bytes.
struct Product {
  const char* panel;
  const char* x;
  int64_t x_stride;
  int64_t rows;
  int64_t inputs;
  float* sums;  // [rows][panel_columns], written
  int64_t slice = -1;  // of the columns, if only that one is wanted; the others may be written, too
  const char* next = nullptr;  // so many bytes of weights will be wanted after these
  int64_t next_bytes = 0;
};

// Where sums go: to `columns` columns of `rows` rows, with the bias and the residual added that are
// there. A residual is added to what the sum is once rounded to the type, as separate ops would.
struct Finish {
  const float* sums;  // row stride panel_columns
  const float* bias;
  const char* residual;
  int64_t residual_stride;
  char* out;
  int64_t out_stride;
  int64_t rows, columns;
  float limit = 0;  // of Activation::limited
};

// One row or head to normalise: out = x / rms(x) * weight, or of x less its mean.
struct Norm {
  const float* weight;  // none: 1
  float epsilon;
  bool centred = false;
};

// A row of numbers, and what they are multiplied with in a sum of rows.
struct Share {
  float factor;
  const char* row;
};

// The functions with a DType take activations of that type: f32 or bf16.
struct PanelKernels {
  const char* isa;
  void (*multiply[num_formats])(const Product&);
  void (*finish)(DType, const Finish&);
  // Activation(gate) * value of sums of gated panels; `columns` counts the outputs.
  void (*finish_gated)(DType, Activation, const Finish&);
  // xIELU by its four numbers: what softplus makes the slopes of its square and, less that of its
  // linear part, of its exponential of; that slope; and the largest number that the exponential takes.
  // `out` may be x.
  void (*xielu)(DType, const float* numbers, const char* x, char* out, int64_t count);
  // x times the share of a normal distribution below it. `out` may be x.
  void (*gelu)(DType, const char* x, char* out, int64_t count);
  // x times the factors of its gates, of which each is that of `each` numbers of x. `out` may be x.
  void (*gate)(DType, Gating, const char* x, const char* gates, int64_t each, char* out,
               int64_t count);
  // With a residual the result is added to it, once rounded to the type.
  void (*norm)(DType, const Norm&, const char* x, const char* residual, char* out, int64_t count);
  // The sum of the squares of a row.
  float (*squares)(DType, const char* x, int64_t count);
  // out = x * factor * weight.
  void (*weigh)(DType, float factor, const float* weight, const char* x, char* out, int64_t count);
  // In place: normalise one head (without a norm: not), then rotate its first 2 * half dimensions.
  void (*rotate)(DType, const Norm* norm, const float* cos, const float* sin, int64_t half,
                 char* head, int64_t count);
  // out = x * factor, or with a residual (x + residual, rounded to the type) * factor.
  void (*scale)(DType, float factor, const char* x, const char* residual, char* out,
                int64_t count);
  // out = the sum of so many rows times their factors, added up in float32 in their order.
  void (*combine)(DType, const Share* shares, int64_t rows, char* out, int64_t count);
};

}  // namespace weft
