// The tile instructions of AMX in plain C++, with the checks that machines make, by volume 2 of
// Intel's manual: for amx_products.hpp, which takes them as `Tiles`.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace weft {

// Float32 with subnormal operands and results taken for zeros. Whether a result is subnormal is
// known once it is rounded.
inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
inline float flushed_fma(float a, float b, float c) {
  return flushed(std::fma(flushed(a), flushed(b), flushed(c)));
}
inline float flushed_sum(float a, float b) { return flushed(flushed(a) + flushed(b)); }

inline float widened(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

struct ModelledTile {
  int rows = 0, row_bytes = 0;
  uint8_t bytes[16][64] = {};

  template <typename T>
  T at(int row, int i) const {
    T number;
    std::memcpy(&number, bytes[row] + i * sizeof(T), sizeof(T));
    return number;
  }
  template <typename T>
  void put(int row, int i, T number) {
    std::memcpy(bytes[row] + i * sizeof(T), &number, sizeof(T));
  }
};

struct ModelledTiles {
  static inline thread_local ModelledTile tiles[8];
  static inline thread_local bool configured = false;

  static void check(bool right, const char* what) {
    if (!right) throw std::runtime_error(what);
  }

  template <typename Config>
  static void configure(const Config& config) {
    uint8_t bytes[64];
    std::memcpy(bytes, &config, sizeof bytes);
    if (bytes[0] == 0) return release();
    check(bytes[0] == 1, "the palette is unknown");
    for (int i = 2; i < 16; ++i) check(bytes[i] == 0, "a reserved byte is set");
    check(bytes[1] == 0, "a start row is not modelled");
    ModelledTile found[8];
    for (int i = 0; i < 16; ++i) {
      uint16_t row_bytes;
      std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
      const int rows = bytes[48 + i];
      check(i < 8 || (row_bytes == 0 && rows == 0), "there are 8 tiles");
      check(row_bytes <= 64, "a row has 64 bytes at most");
      check(rows <= 16, "a tile has 16 rows at most");
      check((row_bytes == 0) == (rows == 0), "a tile has rows or bytes alone");
      if (i < 8) found[i] = {rows, row_bytes, {}};
    }
    for (int i = 0; i < 8; ++i) tiles[i] = found[i];
    configured = true;
  }
  static void release() {
    for (ModelledTile& tile : tiles) tile = ModelledTile{};
    configured = false;
  }

  static ModelledTile& valid(int i) {
    check(configured, "tiles are not configured");
    check(tiles[i].rows > 0, "the tile is not configured");
    return tiles[i];
  }
  static ModelledTile& whole(int i) {
    ModelledTile& tile = valid(i);
    check(tile.row_bytes % 4 == 0, "a row ends within four bytes");
    return tile;
  }

  template <int i>
  static void zero() {
    std::memset(valid(i).bytes, 0, sizeof tiles[i].bytes);
  }
  template <int i>
  static void load(const void* from, int64_t stride) {
    ModelledTile& tile = whole(i);
    std::memset(tile.bytes, 0, sizeof tile.bytes);
    for (int row = 0; row < tile.rows; ++row) {
      std::memcpy(tile.bytes[row], static_cast<const char*>(from) + row * stride, tile.row_bytes);
    }
  }
  template <int i>
  static void store(void* to, int64_t stride) {
    const ModelledTile& tile = whole(i);
    for (int row = 0; row < tile.rows; ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, tile.bytes[row], tile.row_bytes);
    }
  }

  template <int c, int a, int b>
  static void check_product() {
    check(c != a && c != b && a != b, "the tiles of a product are three");
    const ModelledTile &sums = whole(c), &left = whole(a), &right = whole(b);
    check(sums.rows == left.rows, "sums have other rows than the left tile");
    check(sums.row_bytes == right.row_bytes, "sums have other columns than the right tile");
    check(left.row_bytes / 4 == right.rows, "the left tile has other columns than rows on the right");
  }
  // TDPBSUD: signed bytes on the left, unsigned ones on the right.
  template <int c, int a, int b>
  static void add_bytes() {
    add_products<uint8_t, c, a, b>();
  }
  // TDPBSSD: signed bytes on both sides.
  template <int c, int a, int b>
  static void add_signed_bytes() {
    add_products<int8_t, c, a, b>();
  }
  template <typename Weight, int c, int a, int b>
  static void add_products() {
    check_product<c, a, b>();
    ModelledTile& sums = tiles[c];
    for (int m = 0; m < sums.rows; ++m) {
      for (int k = 0; k < tiles[b].rows; ++k) {
        for (int n = 0; n < sums.row_bytes / 4; ++n) {
          auto sum = sums.at<uint32_t>(m, n);
          for (int i = 0; i < 4; ++i) {
            sum += static_cast<uint32_t>(int32_t{tiles[a].at<int8_t>(m, 4 * k + i)} *
                                         int32_t{tiles[b].at<Weight>(k, 4 * n + i)});
          }
          sums.put(m, n, sum);
        }
      }
    }
  }
  // TDPBF16PS.
  template <int c, int a, int b>
  static void add_pairs() {
    check_product<c, a, b>();
    ModelledTile& sums = tiles[c];
    for (int m = 0; m < sums.rows; ++m) {
      float both[32] = {};
      for (int k = 0; k < tiles[b].rows; ++k) {
        for (int n = 0; n < sums.row_bytes / 4; ++n) {
          for (int i = 0; i < 2; ++i) {
            both[2 * n + i] = flushed_fma(widened(tiles[a].at<uint16_t>(m, 2 * k + i)),
                                          widened(tiles[b].at<uint16_t>(k, 2 * n + i)),
                                          both[2 * n + i]);
          }
        }
      }
      for (int n = 0; n < sums.row_bytes / 4; ++n) {
        const float found = flushed_sum(both[2 * n], both[2 * n + 1]);
        sums.put(m, n, flushed_sum(sums.at<float>(m, n), found));
      }
    }
  }
};

}  // namespace weft
