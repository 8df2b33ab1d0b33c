// A weight [outputs, inputs], packed into panels when it is loaded, and products with it.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>

#include "panel.hpp"
#include "tensor.hpp"

namespace weft {

// One number of float32 or bfloat16 memory.
inline float number_at(const void* data, DType type, int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(data)[i];
  return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(data)[i]} << 16);
}

class Matrix {
 public:
  // Packs a float32 or bfloat16 tensor [outputs, inputs] as it is. `gated`: the first half of the
  // outputs are gates, the second half the values they multiply; both halves share panels. Throws
  // std::invalid_argument.
  static std::unique_ptr<Matrix> pack(const Tensor& weight, bool gated);

  Format format() const { return format_; }
  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  bool gated() const { return gated_; }
  int64_t bytes() const { return panels() * panel_bytes_; }
  int64_t panels() const { return panels_; }
  const char* panel(int64_t i) const { return data_.get() + i * panel_bytes_; }
  // The type of activations that it is multiplied with.
  DType type() const { return format_ == Format::f32 ? DType::f32 : DType::bf16; }
  // Copies the weights of one output, in the matrix's own type.
  void copy_row(int64_t output, char* to) const;

 private:
  Matrix(Format format, int64_t outputs, int64_t inputs, bool gated);
  // Which output stands in a column of a panel; -1: none.
  int64_t output_at(int64_t panel, int64_t column) const;
  void pack_panel(const Tensor& weight, int64_t panel);

  Format format_;
  int64_t outputs_, inputs_;
  bool gated_;
  int64_t panels_, panel_bytes_;
  std::shared_ptr<char> data_;
};

// Rows of numbers in memory, each row contiguous.
struct Rows {
  char* data;
  int64_t stride;  // bytes
  char* row(int64_t i) const { return data + i * stride; }
};

// A product of rows with a matrix, cut into items that may run in any order on any thread.
//
// out [rows, outputs] = x [rows, inputs] times the matrix, plus bias and residual where there are
// any. For a gated matrix with an activation it is activation(gate) * value [rows, outputs / 2].
struct Multiplication {
  const Matrix* matrix = nullptr;
  const void* bias = nullptr;       // [outputs], of the matrix's type
  Rows x{}, residual{}, out{};
  int64_t rows = 0;
  DType out_type = DType::f32;
  bool activated = false;
  Activation activation = Activation::silu;

  int64_t items() const;
  void run(const PanelKernels& kernels, int64_t item) const;
};

// Whether a product is large enough to wake another thread.
bool worth_sharing(const Matrix& matrix, int64_t rows);
void multiply(const Multiplication& call);
// Copies rows of the matrix: embeddings.
void gather(const Matrix& matrix, const int64_t* outputs, int64_t count, Rows to);

}  // namespace weft
