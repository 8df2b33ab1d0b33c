// A weight [outputs, inputs], packed into panels when it is loaded, and products with it.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "panel.hpp"
#include "quant.hpp"
#include "tensor.hpp"

namespace weft {

inline constexpr int64_t matrix_alignment = 64;  // of its first panel

// Read and write one number of float32 or bfloat16 memory.
inline float number_at(const void* data, DType type, int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(data)[i];
  return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(data)[i]} << 16);
}

inline void write_number(float x, void* data, DType type, int64_t i) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (type == DType::f32) {
    static_cast<float*>(data)[i] = x;
  } else {
    static_cast<uint16_t*>(data)[i] =
        static_cast<uint16_t>(x != x ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}

// Raised by whoever changes the bytes of a packed matrix: files of other versions are not mapped.
inline constexpr int layout_version = 1;

// What the bytes of a packed matrix are: a run of panels, then a float scale for each of their
// columns if quantised outputs have one scale each.
struct MatrixForm {
  Format format = Format::f32;
  int64_t outputs = 0, inputs = 0;
  bool gated = false;
  DType type = DType::f32;  // of the activations
  // Of integers only, as for `Matrix::quantised`.
  int64_t group = 0;
  DType scale_type = DType::f32;
  bool zeros = false;
  bool minimums = false;
  bool nested = false;  // scales and minimums
};

inline constexpr int64_t activation_group = 128;  // where a whole row of weights has one scale

inline int bits_of(Format format) {
  return format == Format::int8 ? 8 : format == Format::int6 ? 6 : format == Format::int5 ? 5 : 4;
}

inline CodeTable table_of(Format format) {
  return format == Format::nl4    ? CodeTable::nonlinear
         : format == Format::mx4  ? CodeTable::e2m1
                                  : CodeTable::none;
}

inline QuantWeight quant_of(const MatrixForm& form) {
  if (!is_quantised(form.format)) return {};
  return {.depth = form.inputs,
          .group = form.group == 0 ? activation_group : form.group,
          .bits = bits_of(form.format),
          .scale_type = form.scale_type,
          .zeros = form.zeros,
          .minimums = form.minimums,
          .nested = form.nested,
          .table = table_of(form.format)};
}

// Rows of codes as they are written to a matrix, each contiguous: see `QuantColumn`.
struct QuantInput {
  const uint8_t* values;  // [rows, inputs]
  const char* scales;     // [rows, groups]; of nested ones [rows, nests]
  const uint8_t* zeros;   // [rows, groups], or none
  const char* minimums = nullptr;
  const int8_t* steps = nullptr;  // [rows, groups]
  const int8_t* minimum_steps = nullptr;
};

class Matrix {
 public:
  // Packs float32 or bfloat16 tensors [n, inputs] as they are, the outputs of one below those of the
  // one before. `gated`: the first half of all outputs are gates, the second half the values they
  // multiply; both halves share panels. Throws std::invalid_argument.
  static std::unique_ptr<Matrix> pack(std::span<const Tensor> pieces, bool gated);
  // A matrix of integers for activations of `type`, whose outputs are written next, in any order.
  // `group` inputs share a scale of `scale_type`; 0: all of them, a float32 one.
  static std::unique_ptr<Matrix> quantised(const MatrixForm& form);
  // A matrix whose bytes lie in memory of the caller's, which outlives it and is not written; such
  // as a file that is mapped. Throws std::invalid_argument if they are not as many as `form` has, or
  // not aligned to `matrix_alignment`.
  static std::unique_ptr<Matrix> mapped(const MatrixForm& form, const char* data, int64_t bytes);
  // Writes the outputs from `first` on.
  void write(int64_t first, int64_t rows, const QuantInput& from);
  // The same from a float32 or bfloat16 tensor, rounded to the nearest. Throws
  // std::invalid_argument for numbers that are not finite.
  void write_rounded(int64_t first, const Tensor& weight);

  Format format() const { return format_; }
  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  bool gated() const { return gated_; }
  int64_t bytes() const { return panels() * panel_bytes_ + scale_bytes(); }
  const char* data() const { return data_.get(); }
  MatrixForm form() const;
  int64_t panels() const { return panels_; }
  const char* panel(int64_t i) const { return data_.get() + i * panel_bytes_; }
  int64_t panel_bytes() const { return panel_bytes_; }
  // The type of activations that it is multiplied with.
  DType type() const { return type_; }
  // How an int8 or int4 matrix is packed.
  const QuantWeight& quant() const { return quant_; }
  // Memory for so many rows of rounded activations; a multiple of 8, 0 for a matrix of floats.
  int64_t round_bytes(int64_t rows) const {
    return is_quantised(format_) ? QuantRows::bytes(quant_, rows) : 0;
  }
  // Copies the weights of one output, in the matrix's own type; `numbers` [inputs] is used meanwhile.
  void copy_row(int64_t output, char* to, float* numbers) const;

 private:
  // In memory of its own, or in `mapped`.
  explicit Matrix(const MatrixForm& form, const char* mapped = nullptr);
  int64_t scale_bytes() const {
    return column_scales_ ? panels_ * panel_columns * int64_t{sizeof(float)} : 0;
  }
  void check_writable() const;
  void place();
  struct Place {
    int64_t panel, column;
  };
  Place place_of(int64_t output) const;
  // Which output stands in a column of a panel; -1: none.
  int64_t output_at(int64_t panel, int64_t column) const;
  // `rows` has the address of each output's weights.
  void pack_panel(std::span<const char* const> rows, int64_t panel);

  Format format_;
  int64_t outputs_, inputs_;
  bool gated_;
  DType type_;
  QuantWeight quant_;
  bool column_scales_, mapped_;
  int64_t panels_, panel_bytes_;
  std::shared_ptr<char> data_;
};

// Rows of numbers in memory, each row contiguous.
struct Rows {
  char* data;
  int64_t stride;  // bytes
  char* row(int64_t i) const { return data + i * stride; }
};

inline Rows rows_of(const void* data, int64_t columns, DType type) {
  return {static_cast<char*>(const_cast<void*>(data)), columns * size_of(type)};
}

// A product of rows with a matrix, cut into items that may run in any order on any thread.
//
// out [rows, outputs] = x [rows, inputs] times the matrix, plus bias and residual where there are
// any. For a gated matrix with an activation it is activation(gate) * value [rows, outputs / 2];
// for another one the GELU of its outputs.
struct Multiplication {
  const Matrix* matrix = nullptr;
  const void* bias = nullptr;       // [outputs], of the matrix's type
  Rows x{}, residual{}, out{};
  int64_t rows = 0;
  DType out_type = DType::f32;
  bool activated = false;
  Activation activation = Activation::silu;
  float limit = 0;      // of Activation::limited
  QuantRows rounded{};  // what an int8 or int4 matrix is multiplied with
  int64_t slices = 1;   // of each panel; see `cut`

  // Whether `rounded` must be filled before the items run: row by row in any order, in memory of
  // `round_bytes` that is aligned for floats.
  bool rounds() const { return is_quantised(matrix->format()); }
  int64_t round_bytes() const { return matrix->round_bytes(rows); }
  void round_into(char* memory);
  void round_row(int64_t row) const { round_row(row, x.row(row)); }
  // The same of numbers that lie elsewhere.
  void round_row(int64_t row, const char* from) const;
  // Cuts panels into slices where whole ones would leave some of the threads with less to do.
  void cut(int threads);
  int64_t items() const;
  void run(const PanelKernels& kernels, int64_t item) const;

 private:
  struct Place {
    int64_t panel, slice, block;  // of rows
    int64_t part, blocks;         // of the blocks that a panel is read once for
  };
  Place place_of(int64_t item) const;
  void multiply(const PanelKernels& kernels, const Place& place, int64_t slice, int64_t first,
                int64_t count, float* sums) const;
};

// How many items a product has for so many threads, and slices each panel.
struct ProductCut {
  int64_t slices, items;
};
int64_t panels_of(int64_t outputs, bool gated);
ProductCut product_items(int64_t panels, bool gated, int64_t rows, int threads);

// How much work a product is, and whether so much is worth another thread.
int64_t work_of(const Matrix& matrix, int64_t rows);
bool worth_sharing(int64_t work);
void multiply(const Multiplication& call);

// Copies rows of the matrix: embeddings.
void gather(const Matrix& matrix, const int64_t* outputs, int64_t count, Rows to);

}  // namespace weft
