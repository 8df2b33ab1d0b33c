// Products of each head of some rows with a matrix of its own.
#pragma once

#include <cstdint>
#include <span>

#include "matrix.hpp"
#include "tensor.hpp"

namespace weft {

// The matrices have equal sizes and are not integers. Cut into items as `Multiplication`.
struct HeadProducts {
  std::span<const Matrix* const> matrices;
  Rows x, out;                // of the first head
  int64_t x_step, out_step;   // bytes from one head of a row to the next one
  int64_t rows;
  DType type;                 // of x and out

  int64_t items() const { return static_cast<int64_t>(matrices.size()) * of_head(0).items(); }
  void run(const PanelKernels& kernels, int64_t item) const {
    const int64_t each = of_head(0).items();
    of_head(item / each).run(kernels, item % each);
  }

 private:
  Multiplication of_head(int64_t head) const {
    return {.matrix = matrices[head],
            .x = {x.data + head * x_step, x.stride},
            .out = {out.data + head * out_step, out.stride},
            .rows = rows,
            .out_type = type};
  }
};
// x [tokens, heads, inputs]: out [tokens, heads, outputs].
void multiply_heads(std::span<const Matrix* const> matrices, const Tensor& x, char* out);

}  // namespace weft
