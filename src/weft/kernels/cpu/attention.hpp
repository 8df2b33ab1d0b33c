// Paged attention over host memory: writes the new keys and values, then attends.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tensor.hpp"

namespace weft {

struct Attention {
  Tensor out, q;                     // [T, H, D]
  std::optional<Tensor> k, v;        // [T, Hkv, D]; none: the cache holds them already
  Tensor k_cache, v_cache;           // [num_blocks, Hkv, block_size, D]
  Tensor block_tables;               // [R, B] i32; an entry that no query sees may be anything
  Tensor query_start;                // [R + 1] i32
  Tensor seq_lens;                // [R] i32
  Tensor slot_mapping;                      // [T] i64
  int64_t block_size = 0;
  int64_t window = 0;                // positions that a query sees up to its own; 0: all
  bool causal = true;                // it sees none behind its own, else as many as before it
  float scale = 1.0f;
  float softcap = 0.0f;              // 0: none
  std::optional<Tensor> sinks;       // [H] f32, a score without a value that all queries of a head see
};

// Throws std::invalid_argument, before anything is written, if shapes, types or indices do not fit.
void paged_attention(const Attention& call);

int attention_threads();
// Throws std::invalid_argument if threads < 1, or if there are `cpus` or `nodes` and not one for each
// thread.
void set_attention_threads(int threads, std::vector<int> cpus = {}, std::vector<int> nodes = {});

}  // namespace weft
