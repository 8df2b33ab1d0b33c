// Compiled once per instruction set (CMakeLists.txt), with WEFT_ISA naming it; what panel.cpp says of
// headers holds here, too.

#include "scan.hpp"

#include "simd.hpp"

#define WEFT_JOIN(a, b) a##b
#define WEFT_NAME(a, b) WEFT_JOIN(a, b)

namespace weft {
namespace {

constexpr uint32_t kExponent = 0x7f800000u;

typedef double dvec __attribute__((vector_size(64)));  // 8 of them, whatever the registers
typedef float half __attribute__((vector_size(32), aligned(4), may_alias));

inline vec larger(vec a, vec b) { return pick(a > b, a, b); }

inline bool any(ivec x) {
  typedef int64_t pairs __attribute__((vector_size(4 * W)));
  int64_t found = 0;
  for (int i = 0; i < W / 2; ++i) found |= ((pairs)x)[i];
  return found != 0;
}

inline float largest_of(vec x) {
  float result = x[0];
  for (int i = 1; i < W; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

Peak peak(const float* row, int64_t size) {
  constexpr int64_t step = 4 * W;
  vec most[4] = {splat(row[0]), splat(row[0]), splat(row[0]), splat(row[0])};
  ivec strange{};
  int64_t i = 0;
  for (; i + step <= size; i += step) {
    for (int j = 0; j < 4; ++j) {
      const vec x = load(row + i + j * W);
      strange |= (ivec)(((uvec)x & kExponent) == kExponent);
      most[j] = larger(x, most[j]);
    }
  }
  const vec top = larger(larger(most[0], most[1]), larger(most[2], most[3]));
  Peak result{largest_of(top), !any(strange)};
  for (; i < size; ++i) {
    result.value = row[i] > result.value ? row[i] : result.value;
    result.finite &= (__builtin_bit_cast(uint32_t, row[i]) & kExponent) != kExponent;
  }
  return result;
}

int64_t find(const float* row, int64_t size, float value) {
  constexpr int64_t step = 4 * W;
  const vec wanted = splat(value);
  int64_t i = 0;
  for (; i + step <= size; i += step) {
    ivec met{};
    for (int j = 0; j < 4; ++j) met |= (ivec)(load(row + i + j * W) == wanted);
    if (any(met)) break;
  }
  while (i < size && row[i] != value) ++i;
  return i;
}

void weigh(float* row, int64_t size, float peak, float temperature) {
  const vec top = splat(peak), divisor = splat(temperature);
  int64_t i = 0;
  for (; i + W <= size; i += W) store(row + i, exp_negative((load(row + i) - top) / divisor));
  if (i == size) return;
  vec rest = top;
  for (int64_t j = i; j < size; ++j) rest[j - i] = row[j];
  rest = exp_negative((rest - top) / divisor);
  for (int64_t j = i; j < size; ++j) row[j] = rest[j - i];
}

void sum_blocks(const float* row, int64_t size, double* sums) {
  for (int64_t from = 0; from < size; from += kSumBlock) {
    const int64_t to = from + kSumBlock < size ? from + kSumBlock : size;
    dvec lanes[2] = {};
    int64_t i = from;
    for (; i + 16 <= to; i += 16) {
      for (int j = 0; j < 2; ++j) {
        const half x = *reinterpret_cast<const half*>(row + i + 8 * j);
        lanes[j] += __builtin_convertvector(x, dvec);
      }
    }
    lanes[0] += lanes[1];
    double sum = 0.0;
    for (int j = 0; j < 8; ++j) sum += lanes[0][j];
    for (; i < to; ++i) sum += row[i];
    *sums++ = sum;
  }
}

void peaks(const float* row, int64_t size, float* largest) {
  for (int64_t from = 0; from < size; from += kPeakBlock) {
    if (from + kPeakBlock <= size) {
      vec most = load(row + from);
      for (int64_t i = W; i < kPeakBlock; i += W) most = larger(load(row + from + i), most);
      *largest++ = largest_of(most);
    } else {
      float most = row[from];
      for (int64_t i = from + 1; i < size; ++i) most = row[i] > most ? row[i] : most;
      *largest++ = most;
    }
  }
}

int64_t gather(const float* row, int64_t size, float least, float* to) {
  constexpr int64_t step = 4 * W;
  const vec limit = splat(least);
  int64_t count = 0, i = 0;
  for (int64_t end = step; end <= size; end += step) {
    ivec kept{};
    for (int j = 0; j < 4; ++j) kept |= (ivec)(load(row + end - step + j * W) >= limit);
    if (!any(kept)) {
      i = end;
      continue;
    }
    for (; i < end; ++i) {
      to[count] = row[i];
      count += row[i] >= least;
    }
  }
  for (; i < size; ++i) {
    to[count] = row[i];
    count += row[i] >= least;
  }
  return count;
}

void drop(float* row, int64_t size, float least) {
  const vec limit = splat(least);
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const vec x = load(row + i);
    store(row + i, pick(x >= limit, x, vec{}));
  }
  for (; i < size; ++i) row[i] = row[i] >= least ? row[i] : 0.0f;
}

void softcap(float* row, int64_t size, float cap) {
  for (int64_t i = 0; i < size; i += W) {
    char* at = reinterpret_cast<char*>(row + i);
    write<DType::f32>(at, cap * tanh_of(read<DType::f32>(at, size - i) / cap), size - i);
  }
}

}  // namespace

extern const ScanKernels WEFT_NAME(scan_kernels_, WEFT_ISA);
const ScanKernels WEFT_NAME(scan_kernels_, WEFT_ISA) = {peak,  find,   weigh, sum_blocks,
                                                        peaks, gather, drop,  softcap};

}  // namespace weft
