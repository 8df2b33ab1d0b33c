// Chooses the widest compiled copy of tile.cpp that this CPU can run, or the one a test asks for.

#include "dispatch.hpp"

#include <atomic>

namespace weft {

extern const Kernels kernels_baseline;
#ifdef WEFT_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512bf16;
#endif

namespace {

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{runnable_kernels().front()};
  return kernels;
}

}  // namespace

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> result;
#ifdef WEFT_X86
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    result.push_back(&kernels_avx512bf16);
  }
  if (avx512) result.push_back(&kernels_avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    result.push_back(&kernels_avx2);
  }
#endif
  result.push_back(&kernels_baseline);
  return result;
}

const Kernels& chosen_kernels() { return *chosen().load(); }

bool choose_kernels(std::string_view isa) {
  for (const Kernels* kernels : runnable_kernels()) {
    if (isa != kernels->isa) continue;
    chosen().store(kernels);
    return true;
  }
  return false;
}

}  // namespace weft
