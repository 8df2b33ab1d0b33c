// Runs products of each head with a matrix of its own.

#include "heads.hpp"

#include "dispatch.hpp"
#include "pool.hpp"

namespace weft {

void multiply_heads(std::span<const Matrix* const> matrices, const Tensor& x, char* out) {
  const Matrix& first = *matrices.front();
  const auto heads = static_cast<int64_t>(matrices.size());
  const int64_t size = size_of(x.type), step = first.outputs() * size;
  const HeadProducts products{.matrices = matrices,
                              .x = {x.as<char>(), x.stride[0] * size},
                              .out = {out, heads * step},
                              .x_step = x.stride[1] * size,
                              .out_step = step,
                              .rows = x.shape[0],
                              .type = x.type};
  const PanelKernels& kernels = *chosen_isa().panel;
  const auto body = [&](int64_t item) { products.run(kernels, item); };
  if (worth_sharing(heads * work_of(first, x.shape[0]))) {
    return shared_pool().run(products.items(), body);
  }
  for (int64_t item = 0; item < products.items(); ++item) body(item);
}

}  // namespace weft
