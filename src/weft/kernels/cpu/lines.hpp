// Memory that begins with a cache line: a vector that straddles two of them costs two reads, and a
// tile is all vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <new>
#include <vector>

namespace weft {

inline constexpr size_t line_bytes = 64;

template <typename T>
struct LineAllocator {
  using value_type = T;

  LineAllocator() = default;
  template <typename Other>
  LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(line_bytes)));
  }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(line_bytes)); }
  // What nobody has written yet is left to whoever writes it first.
  template <typename Other>
  void construct(Other* place) {
    ::new (static_cast<void*>(place)) Other;
  }
  bool operator==(const LineAllocator&) const { return true; }
};

template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

// Makes memory as large as it must be, at least; it keeps its content.
template <typename T>
T* fit(Lines<T>& memory, int64_t size) {
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// The same without its content, which would be copied. It grows by half at least, so that memory for
// something that grows bit by bit is seldom replaced.
template <typename T>
T* refit(Lines<T>& memory, int64_t size) {
  if (const auto before = std::ssize(memory); before < size) {
    memory = Lines<T>();
    memory.resize(std::max(size, before + before / 2));
  }
  return memory.data();
}

}  // namespace weft
