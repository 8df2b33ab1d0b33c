// A borrowed view of a tensor: pointer, element type, shape and strides (in elements).
#pragma once

#include <array>
#include <cstdint>

namespace weft {

// The numbers are shared with `_CODES` in attention.py.
enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, i32 = 3, i64 = 4 };

static inline bool is_float(DType type) { return type <= DType::f16; }
static inline int64_t size_of(DType type) {
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

}  // namespace weft
