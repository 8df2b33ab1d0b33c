// The instruction sets that dispatch.cpp finds on a CPU that has the features on the command line,
// and how often it asked Linux for tiles, which gives them if "given" is among these.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <vector>

static std::vector<std::string> features;

bool modelled_cpu_supports(const char* feature) {
  for (const std::string& one : features) {
    if (one == feature) return true;
  }
  return false;
}

static int requests = 0;

long modelled_syscall(long number, int request, int feature) {
  if (number != SYS_arch_prctl || request != 0x1023 || feature != 18) return -1;
  ++requests;
  return modelled_cpu_supports("given") ? 0 : -1;
}

#define __builtin_cpu_supports modelled_cpu_supports
#define syscall modelled_syscall
#include "dispatch.cpp"
#undef __builtin_cpu_supports
#undef syscall
#include "empty_isas.hpp"

namespace weft {
const TileKernels tile_kernels{};
}  // namespace weft

int main(int count, char** words) {
  features.assign(words + 1, words + count);
  for (const weft::Isa* isa : weft::runnable_isas()) std::printf("%s ", isa->name);
  const bool chosen = weft::choose_isa("amxbf16");
  std::printf("%d %s", requests, chosen ? weft::chosen_isa().name : "");
}
