// Products with integers by two copies of the inner loops: the same bits, for every way of packing and
// number of rows.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "quant.hpp"

namespace weft {
extern const QuantKernels quant_kernels_baseline, quant_kernels_other;
}  // namespace weft

using namespace weft;

namespace {

constexpr int64_t depth = 391, outputs = 2 * quant_columns, most_rows = 17;

std::vector<float> product(const QuantKernels& kernels, const QuantWeight& weight,
                           const std::vector<float>& x, int64_t first, int64_t count) {
  std::vector<char> memory(QuantRows::bytes(weight, most_rows) + 64);
  const QuantRows rows = QuantRows::at(memory.data(), weight, most_rows);
  for (int64_t row = 0; row < most_rows; ++row) {
    kernels.round_row(weight, reinterpret_cast<const char*>(x.data() + row * depth), DType::f32,
                      row, rows);
  }
  std::vector<float> out(count * outputs);
  for (int64_t panel = 0; panel < 2; ++panel) {
    kernels.multiply(weight, panel, rows, first, count, out.data() + panel * quant_columns,
                     outputs);
  }
  return out;
}

bool same(const QuantWeight& weight, const std::vector<float>& x) {
  const std::vector<float> whole = product(quant_kernels_baseline, weight, x, 0, most_rows);
  for (int64_t count = 1; count <= most_rows; ++count) {
    const int64_t first = most_rows - count;
    const std::vector<float> found = product(quant_kernels_other, weight, x, first, count);
    if (std::memcmp(found.data(), whole.data() + first * outputs, found.size() * 4) != 0) {
      std::fprintf(stderr, "%d bits, groups of %ld, %ld rows differ\n", weight.bits,
                   static_cast<long>(weight.group), static_cast<long>(count));
      return false;
    }
  }
  return true;
}

}  // namespace

int main() {
  std::mt19937 draw(5);
  std::normal_distribution<float> normal;
  std::vector<float> x(most_rows * depth);
  for (float& number : x) number = normal(draw);
  for (int64_t k = 0; k < depth; ++k) x[k] = k % 3 ? -2.0f : 2.0f;  // all at the ends of the range
  for (const int bits : {4, 8}) {
    for (const int64_t group : {16, 48, 128, 256}) {
      for (const bool zeros : {false, true}) {
        QuantWeight weight{.depth = depth, .group = group, .bits = bits,
                           .scale_type = DType::f16, .zeros = zeros};
        std::vector<uint8_t> blocks(2 * weight.panel_bytes() + 4096);
        weight.blocks = blocks.data();
        const auto most = static_cast<uint8_t>((1 << bits) - 1);
        for (int64_t output = 0; output < outputs; ++output) {
          std::vector<uint8_t> values(depth), zero(weight.groups());
          std::vector<uint16_t> scales(weight.groups());
          for (auto& v : values) v = output % 7 == 0 ? most : draw() & most;
          for (auto& z : zero) z = draw() & most;
          for (auto& s : scales) s = 0x2000 + (draw() & 0xfff);
          weight.write_column(output / quant_columns, output % quant_columns,
                              {values.data(), scales.data(), zeros ? zero.data() : nullptr});
        }
        if (!same(weight, x)) return 1;
      }
    }
  }
  std::puts("good");
}
