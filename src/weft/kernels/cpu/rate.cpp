// Compiled once per instruction set (CMakeLists.txt), with WEFT_ISA naming it; what panel.cpp says of
// headers holds here, too.
#include "rate.hpp"

#include "quant_dot.hpp"

#define WEFT_JOIN(a, b) a##b
#define WEFT_NAME(a, b) WEFT_JOIN(a, b)

namespace weft {
namespace {

constexpr int sums = 8;  // as many as hide the latency of two multiply-adds a cycle

template <typename Vector>
inline int64_t counted(const Vector (&found)[sums], int64_t operations) {
  for (Vector sum : found) forget(sum);
  return operations;
}

int64_t add_floats(int64_t rounds) {
  vec found[sums] = {}, weights = splat(0.75f), x = splat(0.5f);
  for (int64_t round = 0; round < rounds; ++round) {
    for (vec& sum : found) {
      forget(weights);
      sum += weights * x;
    }
  }
  return counted(found, rounds * sums * W * 2);
}

#if defined(__AVX512BF16__)
int64_t add_pairs(int64_t rounds) {
  vec found[sums] = {};
  ivec weights = ivec{} + 0x3f003f00, x = ivec{} + 0x3f403f40;
  for (int64_t round = 0; round < rounds; ++round) {
    for (vec& sum : found) {
      forget(weights);
      sum = (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x);
    }
  }
  return counted(found, rounds * sums * W * 4);
}
#else
constexpr auto add_pairs = add_floats;  // they are widened
#endif

template <int bits>
int64_t add_integers(int64_t rounds) {
  using D = Dot<Code{bits}>;
  alignas(64) uint8_t bytes[4 * W];
  alignas(64) int8_t row[2 * longest_group] = {1, 2, 3, 4, 5, 6, 7, 8};
  for (int i = 0; i < 4 * W; ++i) bytes[i] = static_cast<uint8_t>(i);
  ivec found[sums] = {};
  union {
    typename D::Weights all;
    ivec parts[sizeof(typename D::Weights) / sizeof(ivec)];
  } weights{D::weights(CodePlaces{bytes, bytes, bytes}, 0, 0, 0)};
  const typename D::Input x = D::input(row, 0, 0);
  for (int64_t round = 0; round < rounds; ++round) {
    for (ivec& sum : found) {
      for (ivec& part : weights.parts) forget(part);
      sum = D::add(sum, weights.all, x);
    }
  }
  return counted(found, rounds * sums * W * (32 / bits) * 2 / D::terms);
}

}  // namespace

extern const RateKernels WEFT_NAME(rate_kernels_, WEFT_ISA);
const RateKernels WEFT_NAME(rate_kernels_, WEFT_ISA) = {
    {add_floats, add_pairs, add_integers<8>, add_integers<4>}};

}  // namespace weft
