// Registers of 16 rows by 64 bytes (AMX), and an instruction that multiplies two of them and adds the
// products to a third.
//
// `Tiles` are the instructions: machine_tiles.hpp has the machine's, the tests have a model of them.
// All of it has internal linkage: see panel.cpp.
//
// A tile of weights is 16 steps of a packed panel by 16 columns, as they lie there. A tile of sums
// has some rows of activations. All row tiles of a call have the same number of rows, so that one
// configuration serves it: the last one shares rows with the one before, if need be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace weft {
namespace {

constexpr int64_t tile_rows = 16, tile_bytes = 64, tile_columns = 16;
constexpr int64_t tile_pair_inputs = tile_bytes / 2;  // bfloat16 of a row

// What LDTILECFG reads.
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
inline TileConfig config_of(int64_t rows, int64_t x_bytes) {
  TileConfig config{};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = tile == 4 || tile == 5 ? x_bytes : tile_bytes;
    config.rows[tile] = tile < 6 ? rows : x_bytes / 4;
  }
  return config;
}

// Rows cut into tiles.
struct RowTiles {
  int64_t count, tiles, rows;

  explicit RowTiles(int64_t all)
      : count(all), tiles((all + tile_rows - 1) / tile_rows), rows((all + tiles - 1) / tiles) {}
  int64_t start(int64_t tile) const {
    return tile * rows < count - rows ? tile * rows : count - rows;
  }
};

// Memory that is asked for while something else is computed: so many cache lines a step.
struct Fetch {
  const char* from = nullptr;
  int64_t lines = 0;
  int64_t stride = 64;  // from one line to the next, in bytes

  void operator()() {
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(from + i * stride, 0, 2);
    from += lines * stride;
  }
};

// What R row tiles and some column tiles are multiplied with, step by step. Of the weights a step is
// a row of pairs, or of four bytes, for each 4 bytes of `x`.
template <int R>
struct TileSteps {
  const char* x[R];
  int64_t x_stride;
  const char* weights;  // at the first column
  int64_t weight_stride;
  int64_t steps;
  int64_t x_bytes;  // of a row in a step
};

// Calls use(R, tile) for two row tiles at a time, and for the last one of an odd number.
inline void each_row_tiles(const RowTiles& rows, const auto& use) {
  int64_t tile = 0;
  for (; tile + 2 <= rows.tiles; tile += 2) use(std::integral_constant<int, 2>{}, tile);
  if (tile < rows.tiles) use(std::integral_constant<int, 1>{}, tile);
}

template <int count>
inline void each(const auto& body) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (body(std::integral_constant<int, static_cast<int>(i)>{}), ...);
  }(std::make_index_sequence<count>{});
}

// What is multiplied: pairs of bfloat16, or signed bytes by unsigned or signed ones.
enum class Terms { pairs, bytes, signed_bytes };

template <typename Tiles, Terms terms, int sum, int x, int weights>
inline void add_product() {
  if constexpr (terms == Terms::pairs) {
    Tiles::template add_pairs<sum, x, weights>();
  } else if constexpr (terms == Terms::bytes) {
    Tiles::template add_bytes<sum, x, weights>();
  } else {
    Tiles::template add_signed_bytes<sum, x, weights>();
  }
}

// Sums lie row tile by row tile in tiles 0 to R * C - 1. Each step asks for memory by fetch().
template <typename Tiles, Terms terms, int R, int C>
inline void add_steps(TileSteps<R> s, auto&& fetch) {
  static_assert(R * C <= 4);
  for (int64_t step = 0; step < s.steps; ++step) {
    each<R>([&](auto r) {
      Tiles::template load<4 + r % 2>(s.x[r], s.x_stride);
      s.x[r] += s.x_bytes;
      each<C>([&](auto c) {
        if (r == 0) Tiles::template load<6 + c % 2>(s.weights + c * tile_bytes, s.weight_stride);
        add_product<Tiles, terms, r * C + c, 4 + r % 2, 6 + c % 2>();
      });
    });
    fetch();
    s.weights += s.x_bytes / 4 * s.weight_stride;
  }
}

template <typename Tiles, int R, int C>
inline void clear_sums() {
  each<R * C>([](auto sum) { Tiles::template zero<sum>(); });
}

// The sums are float or int32_t: rows of `stride` of them, from the first row of each row tile on.
template <typename Tiles, int R, int C, typename Sum>
inline void store_sums(Sum* const (&sums)[R], int64_t stride) {
  each<R>([&](auto r) {
    each<C>([&](auto c) {
      Tiles::template store<r * C + c>(sums[r] + c * tile_columns, stride * sizeof(Sum));
    });
  });
}

}  // namespace
}  // namespace weft
