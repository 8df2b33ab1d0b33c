// A borrowed view of a tensor: pointer, element type, shape and strides (in elements).
#pragma once

#include <array>
#include <cstdint>

namespace weft {

// The numbers are shared with `_CODES` in attention.py.
enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, i32 = 3, i64 = 4, i8 = 5, f8 = 6 };

static inline bool is_float(DType type) { return type <= DType::f16; }
// Numbers of 8 bits that mean something only with their row's scale: a cache of them holds for each
// head of a block its rows, then a float32 scale for each of them (kernels/kv_storage.py).
static constexpr bool is_scaled(DType type) { return type >= DType::i8; }
static constexpr int64_t size_of(DType type) {
  if (is_scaled(type)) return 1;
  return type == DType::i64 ? 8 : type == DType::f32 || type == DType::i32 ? 4 : 2;
}

struct Tensor {
  static constexpr int max_rank = 4;

  const char* name = "";
  void* data = nullptr;
  DType type = DType::f32;
  int rank = 0;
  std::array<int64_t, max_rank> shape{};
  std::array<int64_t, max_rank> stride{};

  template <typename T>
  T* as() const { return static_cast<T*>(data); }
};

// A view [tokens, heads, size] into rows of `columns` numbers that begins at one of their heads.
inline Tensor heads_of(const char* name, char* rows, DType type, int64_t tokens, int64_t columns,
                       int64_t first, int64_t heads, int64_t size) {
  Tensor view{name, rows + first * size * size_of(type), type, 3};
  view.shape = {tokens, heads, size};
  view.stride = {columns, size, 1};
  return view;
}

}  // namespace weft
