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

}  // namespace

void QuantWeight::write_column(int64_t panel, int64_t column, const QuantColumn& from) const {
  const int64_t wide = size_of(scale_type);
  if (column_scales != nullptr) {
    std::memcpy(column_scales + panel * quant_columns + column, from.scales, sizeof(float));
  }
  uint8_t* block = blocks + panel * panel_bytes();
  for (int64_t g = 0; g < groups(); ++g, block += block_bytes()) {
    if (column_scales == nullptr) {
      const auto* scales = static_cast<const char*>(from.scales);
      std::memcpy(block + column * wide, scales + g * wide, wide);
    }
    const uint8_t zero = from.zeros == nullptr ? 1 << (bits - 1)
                                               : from.zeros[column_scales == nullptr ? g : 0];
    if (zeros) block[zeros_at() + column] = zero;
    uint8_t* to = block + values_at() + 4 * column;
    for (int64_t k = 0; k < group; k += 32 / bits, to += 4 * quant_columns) {
      uint8_t values[8];  // what is beyond the depth adds nothing: its activations are zeros
      const int64_t start = g * group + k, left = depth - start;
      std::memset(values, zero, sizeof values);
      if (left > 0) std::memcpy(values, from.values + start, left < 32 / bits ? left : 32 / bits);
      for (int i = 0; i < 4; ++i) {
        to[i] = bits == 8 ? values[i] : static_cast<uint8_t>(values[i] | values[i + 4] << 4);
      }
    }
  }
}

void QuantWeight::read_column(int64_t panel, int64_t column, float* to) const {
  const uint8_t* block = blocks + panel * panel_bytes();
  for (int64_t g = 0; g < groups(); ++g, block += block_bytes()) {
    const float scale = column_scales == nullptr ? number_at(block, scale_type, column)
                                                 : column_scales[panel * quant_columns + column];
    const int zero = zeros ? block[zeros_at() + column] : 1 << (bits - 1);
    const uint8_t* values = block + values_at() + 4 * column;
    for (int64_t i = 0; i < group && g * group + i < depth; ++i) {
      const int64_t step = i / (32 / bits), place = i % (32 / bits);
      const uint8_t byte = values[step * 4 * quant_columns + place % 4];
      const int value = bits == 8 ? byte : place < 4 ? byte & 15 : byte >> 4;
      to[g * group + i] = static_cast<float>(value - zero) * scale;
    }
  }
}

}  // namespace weft
