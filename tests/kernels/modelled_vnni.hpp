// Included before a source that is compiled for AVX-VNNI where no machine has it: the instruction
// by plain loops.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define __AVXVNNI__ 1

static inline __m256i modelled_dpbusd(__m256i sums, __m256i a, __m256i b) {
  int32_t total[8];
  uint8_t left[32];
  int8_t right[32];
  __builtin_memcpy(total, &sums, 32);
  __builtin_memcpy(left, &a, 32);
  __builtin_memcpy(right, &b, 32);
  for (int i = 0; i < 32; ++i) total[i / 4] += left[i] * right[i];
  __builtin_memcpy(&sums, total, 32);
  return sums;
}
#define _mm256_dpbusd_avx_epi32 modelled_dpbusd
