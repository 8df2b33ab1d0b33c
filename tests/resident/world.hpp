// Rows under a lease, and a model whose next token depends on all that a step reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "resident/loop.hpp"

using weft::resident::End;
using weft::resident::GroupRows;
using weft::resident::Rows;

constexpr int64_t kBlock = 4, kMaxTokens = 400, kBlocks = kMaxTokens / kBlock;

struct Plan {
  int64_t rows, steps, asked_after, late_after, failed_after, numbers_after, stop;
};

// All that the loop reads and writes, and a model whose next token depends on every input.
struct World {
  explicit World(const Plan& plan, uint32_t seed) : plan(plan), random(seed) {
    const int64_t count = plan.rows, all = count + 3;
    tokens.resize(all * kMaxTokens);
    length.resize(all);
    row.resize(all);
    std::iota(row.begin(), row.end(), 0);
    std::shuffle(row.begin(), row.end(), random);
    row.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      length[row[i]] = 1 + static_cast<int64_t>(random() % 20);
      for (int64_t at = 0; at < length[row[i]]; ++at) {
        tokens[row[i] * kMaxTokens + at] = static_cast<int32_t>(random() % 50);
      }
    }
    stop_from.push_back(0);
    for (int64_t i = 0; i < count; ++i) {
      if (plan.stop > 0 && i % plan.stop == 1) stop_ids.push_back(60 + i % 7);
      stop_from.push_back(static_cast<int64_t>(stop_ids.size()));
    }
    for (int g = 0; g < 2; ++g) {
      std::vector<int32_t> table(count * kBlocks);
      for (auto& block : table) block = static_cast<int32_t>(random() % 1000);
      tables.push_back(table);
      slots.emplace_back(count);
    }
    ids.resize(count), positions.resize(count), counters.resize(count), seq_lens.resize(count);
    given.resize((plan.steps + 1) * count);
    for (int64_t i = 0; i < count; ++i) {
      given[i] = tokens[row[i] * kMaxTokens + length[row[i]] - 1];
      finite.push_back(1);
    }
    for (int g = 0; g < 2; ++g) {
      groups.push_back({tables[g].data(), kBlocks, slots[g].data(), nullptr});
    }
  }

  Rows rows() {
    return {.count = plan.rows, .row = row.data(), .tokens = tokens.data(),
            .max_tokens = kMaxTokens, .length = length.data(), .stop_ids = stop_ids.data(),
            .stop_from = stop_from.data(), .ids = ids.data(), .positions = positions.data(),
            .counters = counters.data(), .seq_lens = seq_lens.data(), .groups = groups.data(),
            .num_groups = 2, .block_size = kBlock, .given = given.data(),
            .finite = reinterpret_cast<bool*>(finite.data())};
  }

  bool launch(int64_t* out) {
    if (launched == plan.failed_after) return false;
    ++launched;
    uint64_t all = 0;
    for (int64_t i = 0; i < plan.rows; ++i) {
      all += static_cast<uint64_t>(ids[i] + 3 * positions[i] + 5 * counters[i] + seq_lens[i] +
                                   slots[0][i] + 2 * slots[1][i]) * (i + 1);
    }
    for (int64_t i = 0; i < plan.rows; ++i) out[i] = static_cast<int64_t>((all + i * ids[i]) % 97);
    if (launched == plan.numbers_after) finite[plan.rows - 1] = out[plan.rows - 1] = 0;
    return true;
  }

  bool operator==(const World& other) const {
    return tokens == other.tokens && length == other.length && counters == other.counters &&
           given == other.given && published == other.published && launched == other.launched;
  }

  const Plan plan;
  std::mt19937 random;
  std::vector<int32_t> tokens, seq_lens;
  std::vector<int64_t> length, row, stop_ids, stop_from, ids, positions, counters, given, published;
  std::vector<std::vector<int32_t>> tables;
  std::vector<std::vector<int64_t>> slots;
  std::vector<GroupRows> groups;
  std::vector<char> finite;
  int64_t launched = 0, looks = 0;
};
