// Products by modelled tiles: the bits of their definitions, for every number of rows, way of
// packing and end of the inputs. Arrays have just their size, so that a sanitizer sees reads beyond.
//
// Usage: tile_products integers|pairs|checks|vectors|machine. `vectors` compares the definitions
// with what this machine's VDPBF16PS gives, `machine` what its tiles do; they print "none" where
// there is no such thing.
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "amx_products.hpp"
#include "empty_isas.hpp"
#include "modelled_tiles.hpp"

using namespace weft;

namespace {

constexpr int64_t most_rows = 67;
std::mt19937 draw(5);

using MultiplyIntegers = decltype(QuantKernels::multiply);
using MultiplyPairs = void (*)(const Product&);

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// ---- integers ----

struct Integers {
  QuantWeight weight;
  std::vector<uint8_t> blocks;
  std::vector<float> column_scales;
  std::vector<std::vector<int>> values, zeros;  // [columns][inputs], [columns][groups]
  std::vector<std::vector<float>> scales;       // [columns][groups]
  std::vector<char> memory;
  QuantRows rows;
};

std::unique_ptr<Integers> integers_of(int64_t depth, int bits, int64_t group, bool zeros,
                                      bool whole) {
  auto made = std::make_unique<Integers>();
  Integers& c = *made;
  c.weight = {.depth = depth, .group = group, .bits = bits, .zeros = zeros};
  c.column_scales.resize(2 * quant_columns);
  if (whole) c.weight.column_scales = c.column_scales.data();
  c.blocks.resize(2 * c.weight.panel_bytes());
  c.weight.blocks = c.blocks.data();
  const int64_t groups = c.weight.groups();
  const int most = (1 << bits) - 1;
  for (int64_t column = 0; column < quant_columns; ++column) {
    std::vector<uint8_t> values(depth), zero(groups, draw() & most);
    std::vector<uint16_t> halves(groups);
    for (auto& v : values) v = column % 7 == 0 ? most : draw() & most;
    if (!whole) {
      for (auto& z : zero) z = column % 7 == 1 ? 0 : draw() & most;
    }
    for (auto& h : halves) h = 0x3c00 + (draw() & 0x1ff);
    const float one = widened(halves[0]);
    const void* scales = whole ? static_cast<const void*>(&one) : halves.data();
    c.weight.write_column(1, column, {values.data(), scales, zeros ? zero.data() : nullptr});
    c.values.emplace_back(values.begin(), values.end());
    c.zeros.emplace_back(zero.begin(), zero.end());
    if (!zeros) c.zeros.back().assign(groups, 1 << (bits - 1));
    c.scales.emplace_back();
    for (const auto h : halves) c.scales.back().push_back(whole ? one : widened(h));
  }
  c.memory.resize(QuantRows::bytes(c.weight, most_rows));
  c.rows = QuantRows::at(c.memory.data(), c.weight, most_rows);
  for (int64_t row = 0; row < most_rows; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      int32_t sum = 0;
      for (int64_t k = g * group; k < (g + 1) * group; ++k) {
        const int x = row % 5 == 0 ? (k % 3 ? -127 : 127) : static_cast<int>(draw() % 255) - 127;
        c.rows.values[row * groups * group + k] = static_cast<int8_t>(k < depth ? x : 0);
        sum += k < depth ? x : 0;
      }
      c.rows.sums[row * groups + g] = sum;
      c.rows.scales[row * groups + g] = static_cast<float>(1 + draw() % 1000) * 1e-4f;
    }
  }
  return made;
}

float defined(const Integers& c, int64_t row, int64_t column) {
  const int64_t groups = c.weight.groups(), group = c.weight.group;
  const bool whole = c.weight.column_scales != nullptr;
  float sum = 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    int64_t part = 0;
    for (int64_t k = g * group; k < (g + 1) * group && k < c.weight.depth; ++k) {
      part += int64_t{c.rows.values[row * groups * group + k]} *
              (c.values[column][k] - c.zeros[column][g]);
    }
    const float scale = (whole ? 1.0f : c.scales[column][g]) * c.rows.scales[row * groups + g];
    const float scaled = static_cast<float>(part) * scale;
    sum = sum + scaled;
  }
  return whole ? sum * c.scales[column][0] : sum;
}

void check_integers(MultiplyIntegers multiply, int64_t depth, int bits, int64_t group, bool zeros,
                    bool whole) {
  const auto made = integers_of(depth, bits, group, zeros, whole);
  std::vector<float> expected(most_rows * quant_columns), other(most_rows * quant_columns);
  for (int64_t row = 0; row < most_rows; ++row) {
    for (int64_t c = 0; c < quant_columns; ++c) {
      expected[row * quant_columns + c] = defined(*made, row, c);
    }
  }
  quant_kernels_baseline.multiply(made->weight, 1, made->rows, 0, most_rows, other.data(),
                                  quant_columns);
  const std::string name =
      std::to_string(bits) + " bits, groups of " + std::to_string(group) + ", ";
  if (std::memcmp(other.data(), expected.data(), 4 * expected.size()) != 0) {
    fail(name + "baseline differs");
  }
  for (int64_t count = 1; count <= most_rows; ++count) {
    const int64_t first = count % 2 == 0 ? 0 : most_rows - count;
    std::vector<float> found(count * quant_columns, 7.0f);
    multiply(made->weight, 1, made->rows, first, count, found.data(), quant_columns);
    if (std::memcmp(found.data(), expected.data() + first * quant_columns, 4 * found.size()) != 0) {
      fail(name + std::to_string(count) + " rows differ");
    }
  }
}

// Products with nested scales: the same bits as the baseline's, which tests in Python compare with
// the definition.
void check_nests(MultiplyIntegers multiply, int bits, int64_t group, bool minimums,
                 CodeTable table) {
  constexpr int64_t depth = 2 * quant_nest;
  QuantWeight weight{.depth = depth, .group = group, .bits = bits, .scale_type = DType::f16,
                     .minimums = minimums, .nested = true, .table = table};
  const int64_t groups = weight.groups();
  std::vector<uint8_t> blocks(2 * weight.panel_bytes());
  weight.blocks = blocks.data();
  for (int64_t column = 0; column < quant_columns; ++column) {
    std::vector<uint8_t> values(depth);
    std::vector<uint16_t> scales(2), lows(2);
    std::vector<int8_t> steps(groups), low_steps(groups);
    for (auto& v : values) v = column % 7 == 0 ? (1 << bits) - 1 : draw() & ((1 << bits) - 1);
    for (auto& s : scales) s = 0x2000 + (draw() & 0xfff);
    for (auto& s : lows) s = 0x2000 + (draw() & 0xfff);
    for (auto& s : steps) s = static_cast<int8_t>(column % 5 == 0 ? -128 : draw() & 255);
    for (auto& s : low_steps) s = static_cast<int8_t>(draw() & 255);
    weight.write_column(1, column, {values.data(), scales.data(), nullptr,
                                    minimums ? lows.data() : nullptr, steps.data(),
                                    minimums ? low_steps.data() : nullptr});
  }
  std::vector<char> memory(QuantRows::bytes(weight, most_rows));
  const QuantRows rows = QuantRows::at(memory.data(), weight, most_rows);
  std::normal_distribution<float> normal;
  for (int64_t row = 0; row < most_rows; ++row) {
    std::vector<float> x(depth);
    for (int64_t k = 0; k < depth; ++k) x[k] = row % 5 == 0 ? (k % 3 ? -2.0f : 2.0f) : normal(draw);
    quant_kernels_baseline.round_row(weight, reinterpret_cast<const char*>(x.data()), DType::f32, row,
                                     rows);
  }
  std::vector<float> expected(most_rows * quant_columns);
  quant_kernels_baseline.multiply(weight, 1, rows, 0, most_rows, expected.data(), quant_columns);
  for (const int64_t count : {1, 2, 9, 16, 17, 31, 32, 33, 50, 67}) {
    const int64_t first = count % 2 == 0 ? 0 : most_rows - count;
    std::vector<float> found(count * quant_columns, 7.0f);
    multiply(weight, 1, rows, first, count, found.data(), quant_columns);
    if (std::memcmp(found.data(), expected.data() + first * quant_columns, 4 * found.size()) != 0) {
      fail(std::to_string(bits) + " bits of nests, " + std::to_string(count) + " rows differ");
    }
  }
}

void integers(MultiplyIntegers multiply) {
  for (const int bits : {4, 8}) {
    for (const int64_t group : {16, 32, 48, 80, 112, 128, 208, 256}) {
      check_integers(multiply, 2 * group - 5, bits, group, group % 32 == 0, false);
    }
    check_integers(multiply, 128, bits, 128, false, true);
    check_integers(multiply, 131, bits, 128, true, true);
  }
  for (const bool minimums : {false, true}) {
    for (const int64_t group : {16, 32, 256}) check_nests(multiply, 4, group, minimums, CodeTable::none);
    check_nests(multiply, 5, 32, minimums, CodeTable::none);
    check_nests(multiply, 6, 16, minimums, CodeTable::none);
  }
  check_nests(multiply, 4, 32, false, CodeTable::nonlinear);
}

// ---- pairs of bfloat16 ----

struct Pairs {
  int64_t inputs, x_stride;
  std::vector<uint16_t> x, weights;  // [rows][inputs and a few], [columns][inputs]
  std::vector<uint16_t> panel;
  uint16_t input(int64_t row, int64_t k) const { return k < inputs ? x[row * x_stride + k] : 0; }
  uint16_t weight(int64_t column, int64_t k) const {
    return k < inputs ? weights[column * inputs + k] : 0;
  }
};

uint16_t number(bool extreme) {
  static std::normal_distribution<float> normal;
  static constexpr uint16_t ends[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x7f7f,
                                      0xff7f, 0x2000, 0xa000, 0x1f80, 0x9f81, 0x5f80};
  if (extreme && draw() % 4 == 0) return ends[draw() % std::size(ends)];
  const float x = normal(draw);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

Pairs pairs_of(int64_t inputs, bool extreme) {
  Pairs c{inputs, inputs + inputs % 3, {}, {}, {}};
  c.x.resize((most_rows - 1) * c.x_stride + inputs);
  c.weights.resize(panel_columns * inputs);
  c.panel.resize((inputs + 1) / 2 * 2 * panel_columns);
  for (auto& x : c.x) x = number(extreme);
  for (auto& w : c.weights) w = number(extreme);
  for (int64_t column = 0; column < panel_columns; ++column) {
    for (int64_t k = 0; k < inputs; ++k) {
      c.panel[(k / 2 * panel_columns + column) * 2 + k % 2] = c.weight(column, k);
    }
  }
  return c;
}

// As amx_products.hpp says.
float by_tiles(const Pairs& c, int64_t row, int64_t column) {
  float sum = 0.0f;
  for (int64_t from = 0; from < c.inputs; from += 32) {
    float even = 0.0f, odd = 0.0f;
    for (int64_t k = from; k < from + 32; k += 2) {
      even = flushed_fma(widened(c.input(row, k)), widened(c.weight(column, k)), even);
      odd = flushed_fma(widened(c.input(row, k + 1)), widened(c.weight(column, k + 1)), odd);
    }
    sum = flushed_sum(sum, flushed_sum(even, odd));
  }
  return sum;
}

// As Intel's manual defines VDPBF16PS.
float by_vectors(const Pairs& c, int64_t row, int64_t column) {
  float sum = 0.0f;
  for (int64_t k = 0; k < c.inputs; k += 2) {
    sum = flushed_fma(widened(c.input(row, k + 1)), widened(c.weight(column, k + 1)), sum);
    sum = flushed_fma(widened(c.input(row, k)), widened(c.weight(column, k)), sum);
  }
  return sum;
}

using Definition = float (*)(const Pairs&, int64_t, int64_t);

bool same(float a, float b) {
  return std::memcmp(&a, &b, 4) == 0 || (a != a && b != b);  // NaN is NaN
}

std::vector<float> product(MultiplyPairs multiply, const Pairs& c, int64_t first, int64_t count,
                           int64_t slice = -1) {
  std::vector<float> found(count * panel_columns, 7.0f);
  const char* panel = reinterpret_cast<const char*>(c.panel.data());
  multiply({panel, reinterpret_cast<const char*>(c.x.data() + first * c.x_stride), 2 * c.x_stride,
            count, c.inputs, found.data(), slice, panel, 2 * panel_columns * c.inputs});
  return found;
}

int64_t differences(const Pairs& c, const std::vector<float>& found, int64_t first,
                    Definition definition) {
  int64_t differ = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t row = first + static_cast<int64_t>(i) / panel_columns;
    differ += !same(found[i], definition(c, row, static_cast<int64_t>(i) % panel_columns));
  }
  return differ;
}

void pairs(MultiplyPairs multiply) {
  for (const int64_t inputs : {1, 2, 31, 32, 33, 62, 64, 95, 130}) {
    const Pairs c = pairs_of(inputs, inputs % 2 == 0);
    const auto whole = product(multiply, c, 0, most_rows);
    const std::string name = std::to_string(inputs) + " inputs, ";
    if (differences(c, whole, 0, by_tiles) != 0) fail(name + "the definition differs");
    for (int64_t count = 1; count < most_rows; ++count) {
      const int64_t first = count % 2 == 0 ? 0 : most_rows - count;
      const auto found = product(multiply, c, first, count);
      for (size_t i = 0; i < found.size(); ++i) {
        if (!same(found[i], whole[first * panel_columns + i])) {
          fail(name + std::to_string(count) + " rows differ");
        }
      }
    }
    for (const int64_t count : {1, 17, 33, 49, 67}) {
      for (int64_t slice = 0; slice < panel_columns / slice_columns; ++slice) {
        const auto found = product(multiply, c, 0, count, slice);
        for (size_t i = 0; i < found.size(); ++i) {
          const bool wanted = static_cast<int64_t>(i) % panel_columns / slice_columns == slice;
          if (wanted && !same(found[i], whole[i])) {
            fail(name + std::to_string(count) + " rows of a slice differ");
          }
        }
      }
    }
  }
}

// Whether VDPBF16PS is what the manual says, and TDPBF16PS therefore something else.
bool vectors() {
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  const MultiplyPairs multiply = panel_kernels_avx512bf16.multiply[static_cast<int>(Format::bf16)];
  for (const int64_t inputs : {1, 2, 3, 64, 130}) {
    const Pairs c = pairs_of(inputs, inputs == 64);
    const auto found = product(multiply, c, 0, most_rows);
    if (differences(c, found, 0, by_vectors) != 0) fail("VDPBF16PS is not what is said of it");
    const int64_t others = differences(c, found, 0, by_tiles);
    if (inputs > 2 && others == 0) fail("tiles have the same bits and need no set of their own");
    std::fprintf(stderr, "%ld inputs: %ld of %ld sums differ\n", static_cast<long>(inputs),
                 static_cast<long>(others), static_cast<long>(found.size()));
  }
  return true;
}

// ---- the checks of the model ----

void refuses(const char* message, const std::function<void()>& use) {
  try {
    use();
  } catch (const std::runtime_error& error) {
    if (std::strcmp(error.what(), message) == 0) return;
    fail(std::string("'") + error.what() + "' instead of '" + message + "'");
  }
  fail(std::string("nothing instead of '") + message + "'");
}

void refuses_config(const char* message, const std::function<void(TileConfig&)>& spoil) {
  TileConfig config = config_of(5, 32);
  ModelledTiles::configure(config);
  spoil(config);
  refuses(message, [&] { ModelledTiles::configure(config); });
}

void refuses_product(const char* message, const std::function<void(TileConfig&)>& spoil) {
  TileConfig config = config_of(5, 32);
  spoil(config);
  ModelledTiles::configure(config);
  refuses(message, [] { ModelledTiles::add_bytes<0, 4, 6>(); });
  refuses(message, [] { ModelledTiles::add_pairs<0, 4, 6>(); });
}

void checks() {
  char memory[1024] = {};
  refuses("tiles are not configured", [] { ModelledTiles::zero<0>(); });
  refuses_config("the palette is unknown", [](TileConfig& c) { c.palette = 2; });
  refuses_config("a reserved byte is set", [](TileConfig& c) { c.reserved[13] = 1; });
  refuses_config("a row has 64 bytes at most", [](TileConfig& c) { c.row_bytes[7] = 68; });
  refuses_config("a tile has 16 rows at most", [](TileConfig& c) { c.rows[3] = 17; });
  refuses_config("there are 8 tiles", [](TileConfig& c) { c.rows[8] = 1; });
  refuses_config("a tile has rows or bytes alone",
                 [](TileConfig& c) { c.rows[2] = 0; });
  refuses_product("sums have other rows than the left tile", [](TileConfig& c) { c.rows[0] = 6; });
  refuses_product("sums have other columns than the right tile",
                  [](TileConfig& c) { c.row_bytes[0] = 32; });
  refuses_product("the left tile has other columns than rows on the right",
                  [](TileConfig& c) { c.rows[6] = 9; });
  refuses_product("a row ends within four bytes", [](TileConfig& c) { c.row_bytes[4] = 33; });
  refuses_product("the tile is not configured",
                  [](TileConfig& c) { c.rows[6] = c.row_bytes[6] = 0; });
  ModelledTiles::configure(config_of(16, 64));
  refuses("the tiles of a product are three", [] { ModelledTiles::add_bytes<0, 4, 4>(); });
  ModelledTiles::load<0>(memory, 64);
  TileConfig none{};
  ModelledTiles::configure(none);
  refuses("tiles are not configured", [&] { ModelledTiles::store<0>(memory, 64); });
}

// ---- what multiplies ----

void modelled_integers(const QuantWeight& weight, int64_t panel, const QuantRows& rows,
                       int64_t first, int64_t count, float* out, int64_t out_stride) {
  multiply_integers<ModelledTiles>(weight, panel, rows, first, count, out, out_stride);
  if (ModelledTiles::configured) fail("tiles were not released");
}

void modelled_pairs(const Product& product) {
  multiply_pairs<ModelledTiles>(product);
  if (ModelledTiles::configured) fail("tiles were not released");
}

bool machine() {
  if (!choose_isa("amxbf16")) return false;
  integers(chosen_isa().quant->multiply);
  pairs(chosen_isa().panel->multiply[static_cast<int>(Format::bf16)]);
  return true;
}

}  // namespace

int main(int, char** words) {
  const std::string mode = words[1];
  bool found = true;
  try {
    if (mode == "integers") integers(modelled_integers);
    if (mode == "pairs") pairs(modelled_pairs);
    if (mode == "checks") checks();
    if (mode == "vectors") found = vectors();
    if (mode == "machine") found = machine();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::puts(found ? "good" : "none");
}
