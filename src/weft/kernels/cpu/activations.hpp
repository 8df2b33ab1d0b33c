// Activations and gates of single vectors, for files that are compiled once per instruction set.
#pragma once

#include "panel.hpp"
#include "simd.hpp"

namespace weft {
namespace {

inline vec within(vec x, vec most) { return pick(x > most, most, pick(x < -most, -most, x)); }

// x (1 + erf(x / sqrt(2))) / 2; erf by Abramowitz and Stegun, 7.1.26, off by 1.5e-7 at most.
inline vec gelu_of(vec x) {
  const vec z = (vec)((ivec)x & 0x7fffffff) * 0.70710678118654752f;
  const vec t = 1.0f / (1.0f + 0.3275911f * z);
  vec p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = (p * t + 0.254829592f) * t;
  const vec half = 0.5f * p * exp_negative(-(z * z));  // of what lies beyond |x|
  return x * pick(x < 0.0f, half, 1.0f - half);
}

inline vec gated(vec gate, vec up, Activation activation, float limit) {
  if (activation == Activation::silu) return gate * sigmoid(gate) * up;
  if (activation == Activation::limited) {
    const vec most = splat(limit), opened = gate * sigmoid(gate);
    return pick(opened > most, most, opened) * within(up, most);
  }
  if (activation == Activation::gelu_tanh) {
    // 0.5 * x * (1 + tanh(u)) = x / (1 + exp(-2 u))
    return gate * sigmoid(1.5957691216057308f * (gate + 0.044715f * (gate * gate * gate))) * up;
  }
  if (activation == Activation::gelu) return gelu_of(gate) * up;
  const vec most = splat(7.0f);
  gate = pick(gate > most, most, gate);
  return gate * sigmoid(1.702f * gate) * (within(up, most) + 1.0f);
}

inline vec open(vec x, Gating gating) {
  if (gating == Gating::sigmoid) return sigmoid(x);
  vec y = exp_negative((vec)((ivec)x | (int32_t)0x80000000));  // log(1 + exp(x)), by exp(-|x|)
  for (int i = 0; i < W; ++i) y[i] = __builtin_log1pf(y[i]) + (x[i] > 0.0f ? x[i] : 0.0f);
  return y;
}

inline float softplus(float x) {
  return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
}

// exp(x) - 1 - x for x <= 0; near 0, where that cancels, by its series.
inline vec exp_beyond_line(vec x) {
  vec p = x * 2.4801587302e-5f + 1.9841269841e-4f;
  p = p * x + 1.3888888889e-3f;
  p = p * x + 8.3333333333e-3f;
  p = p * x + 4.1666666667e-2f;
  p = p * x + 1.6666666667e-1f;
  p = p * x + 0.5f;
  return pick(x > -0.5f, p * (x * x), exp_negative(x) - 1.0f - x);
}

}  // namespace
}  // namespace weft
