// Packing quantised weights into panels, reading rows back, and rounding rows of activations.

#include "quant.hpp"

#include <bit>
#include <cstring>

namespace weft {
namespace {

float widen_f16(uint16_t x) {
  const uint32_t magnitude = uint32_t{x} & 0x7fffu;
  const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(scaled | special | (uint32_t{x} & 0x8000u) << 16);
}

float number_at(const uint8_t* data, DType type, int64_t i) {
  if (type == DType::f32) {
    float number;
    std::memcpy(&number, data + 4 * i, 4);
    return number;
  }
  uint16_t half;
  std::memcpy(&half, data + 2 * i, 2);
  return type == DType::f16 ? widen_f16(half) : std::bit_cast<float>(uint32_t{half} << 16);
}

// A scale or minimum of a group: a number of the block, or a step of one of its nest's.
float scale_at(const QuantWeight& weight, const QuantBlocks& at, int64_t column, bool minimum) {
  const uint8_t* here = at.block + (minimum ? weight.minimums_at() : 0);
  if (!weight.nested) return number_at(here, weight.scale_type, column);
  const uint8_t* base = at.head + (minimum ? 2 * quant_columns : 0);
  return number_at(base, DType::f16, column) * static_cast<float>(static_cast<int8_t>(here[column]));
}

// The code of input k of a group.
int code_at(const QuantWeight& weight, const uint8_t* block, int64_t k, int64_t column) {
  const uint8_t* values = block + weight.values_at() + 4 * column + k % 4;
  constexpr int64_t line = 4 * quant_columns;
  if (weight.bits == 8) return values[k / 4 * line];
  const int low = values[k / 8 * line] >> (k % 8 < 4 ? 0 : 4) & 15;
  if (weight.bits == 4) return low;
  const int more = weight.bits - 4, fours = 8 / more;
  const uint8_t byte = block[weight.high_at() + 4 * column + k % 4 + k / (4 * fours) * line];
  return low | (byte >> (k / 4 % fours * more) & ((1 << more) - 1)) << 4;
}

}  // namespace

void QuantWeight::write_column(int64_t panel, int64_t column, const QuantColumn& from) const {
  const int64_t wide = size_of(nested ? DType::f16 : scale_type);
  if (column_scales != nullptr) {
    std::memcpy(column_scales + panel * quant_columns + column, from.scales, sizeof(float));
  }
  const auto copy = [&](uint8_t* to, const void* numbers, int64_t i) {
    std::memcpy(to + column * wide, static_cast<const char*>(numbers) + i * wide, wide);
  };
  QuantBlocks at(*this, panel);
  for (int64_t g = 0; g < groups(); ++g, at.next()) {
    uint8_t* const block = at.block;
    if (nested) {
      copy(at.head, from.scales, g / nest_groups());
      block[column] = from.steps[g];
      if (minimums) {
        copy(at.head + 2 * quant_columns, from.minimums, g / nest_groups());
        block[minimums_at() + column] = from.minimum_steps[g];
      }
    } else if (column_scales == nullptr) {
      copy(block, from.scales, g);
      if (minimums) copy(block + minimums_at(), from.minimums, g);
    }
    // What is beyond the depth adds nothing: its activations are zeros.
    uint8_t zero = table == CodeTable::none ? centre() : 0;
    if (from.zeros != nullptr) zero = from.zeros[column_scales == nullptr ? g : 0];
    if (zeros) block[zeros_at() + column] = zero;
    uint8_t values[quant_nest];
    const int64_t count = depth - g * group < group ? depth - g * group : group;
    std::memset(values, zero, sizeof values);
    std::memcpy(values, from.values + g * group, count);
    uint8_t* to = block + values_at() + 4 * column;
    for (int64_t k = 0; k < group; k += bits == 8 ? 4 : 8, to += 4 * quant_columns) {
      for (int i = 0; i < 4; ++i) {
        to[i] = bits == 8 ? values[k + i]
                          : static_cast<uint8_t>((values[k + i] & 15) | values[k + 4 + i] << 4);
      }
    }
    if (bits == 4 || bits == 8) continue;
    const int64_t fours = 8 / (bits - 4);  // of inputs in a word of their other bits
    to = block + high_at() + 4 * column;
    for (int64_t k = 0; k < group; k += 4 * fours, to += 4 * quant_columns) {
      for (int i = 0; i < 4; ++i) {
        int rest = 0;
        for (int64_t t = 0; t < fours; ++t) rest |= values[k + 4 * t + i] >> 4 << t * (bits - 4);
        to[i] = static_cast<uint8_t>(rest);
      }
    }
  }
}

void QuantWeight::read_column(int64_t panel, int64_t column, float* to) const {
  QuantBlocks at(*this, panel);
  for (int64_t g = 0; g < groups(); ++g, at.next()) {
    uint8_t* const block = at.block;
    const float scale = column_scales == nullptr ? scale_at(*this, at, column, false)
                                                 : column_scales[panel * quant_columns + column];
    const float minimum = minimums ? scale_at(*this, at, column, true) : 0.0f;
    const int zero = zeros ? block[zeros_at() + column] : centre();
    for (int64_t k = 0; k < group && g * group + k < depth; ++k) {
      int code = code_at(*this, block, k, column);
      if (table != CodeTable::none) code = code_tables[static_cast<int>(table)][code];
      const float number = static_cast<float>(code - zero) * scale;
      to[g * group + k] = minimums ? number - minimum : number;
    }
  }
}

}  // namespace weft
