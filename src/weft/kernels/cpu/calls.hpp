// Functions that are called without memory of their own: a step that is computed again and again is
// to allocate nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

namespace weft {

// A function of somebody else's, which outlives this: usually an argument of a call.
template <typename Signature>
class FunctionRef;

template <typename Result, typename... Words>
class FunctionRef<Result(Words...)> {
 public:
  template <typename Function>
    requires(!std::is_same_v<Function, FunctionRef>)
  FunctionRef(const Function& function)
      : function_(&function), call_([](const void* of, Words... words) -> Result {
          return (*static_cast<const Function*>(of))(std::forward<Words>(words)...);
        }) {}

  Result operator()(Words... words) const { return call_(function_, std::forward<Words>(words)...); }

 private:
  const void* function_;
  Result (*call_)(const void*, Words...);
};

// A function of an item that lies in here, with the few words that it refers to.
class ItemFunction {
 public:
  ItemFunction() = default;
  template <typename Function>
    requires(!std::is_same_v<Function, ItemFunction>)
  ItemFunction(const Function& function)
      : call_([](const std::byte* of, int64_t item) {
          (*std::launder(reinterpret_cast<const Function*>(of)))(item);
        }) {
    static_assert(sizeof(Function) <= most_bytes && std::is_trivially_copyable_v<Function>);
    new (memory_) Function(function);
  }

  void operator()(int64_t item) const { call_(memory_, item); }

 private:
  static constexpr size_t most_bytes = 96;

  alignas(std::max_align_t) std::byte memory_[most_bytes];
  void (*call_)(const std::byte*, int64_t) = nullptr;
};

}  // namespace weft
