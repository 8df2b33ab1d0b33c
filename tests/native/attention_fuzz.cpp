// Random calls of paged attention against plain loops in double: for sanitizers and other machines.
//
// Usage: attention_fuzz CASES [SEED]. Every case runs for each instruction set that was compiled in
// (WEFT_WIDE names the second), with one thread and with two, and from several threads at once, and
// all of these must give the same bits. Every tensor is a piece of the heap of just its size.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "attention.hpp"
#include "dispatch.hpp"
#ifdef __x86_64__
#include "tile_permission.hpp"
#endif

#define WEFT_JOIN(a, b) a##b
#define WEFT_TABLE(isa) WEFT_JOIN(kernels_, isa)

namespace weft {

extern const Kernels kernels_baseline;
#ifdef WEFT_WIDE
extern const Kernels WEFT_TABLE(WEFT_WIDE);
#endif

namespace {
const Isa isas[] = {
    {"baseline", &kernels_baseline, nullptr, nullptr},
#ifdef WEFT_WIDE
    {"wide", &WEFT_TABLE(WEFT_WIDE), nullptr, nullptr},
#endif
};
const Isa* chosen = isas;
}  // namespace

const Isa& chosen_isa() { return *chosen; }

}  // namespace weft

namespace {

using weft::Attention;
using weft::DType;
using weft::Tensor;

std::mt19937 generator;

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}
template <typename T>
T one_of(std::initializer_list<T> choices) {
  return choices.begin()[draw(0, static_cast<int64_t>(choices.size()) - 1)];
}

// ---- numbers ----

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Finite numbers only.
double decode(const char* p, DType type) {
  uint16_t half;
  if (type == DType::f32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  if (type == DType::i8) return static_cast<int8_t>(*p);
  if (type == DType::f8) {
    const int exponent = *p >> 3 & 15, mantissa = *p & 7;
    const double size = exponent == 0 ? std::ldexp(mantissa, -9)
                                      : std::ldexp(8 + mantissa, exponent - 10);
    return *p & 0x80 ? -size : size;
  }
  std::memcpy(&half, p, 2);
  if (type == DType::bf16) return from_bits(uint32_t{half} << 16);
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const double size = exponent == 0 ? std::ldexp(mantissa, -24)
                                    : std::ldexp(1024 + mantissa, exponent - 25);
  return half & 0x8000 ? -size : size;
}

// A random number of about unit size; its type is a float of 16 or 32 bits.
void put_random(char* p, DType type) {
  const float x = std::normal_distribution<float>()(generator);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (type == DType::f32) {
    std::memcpy(p, &x, 4);
    return;
  }
  const auto half = static_cast<uint16_t>(
      type == DType::bf16 ? bits >> 16 : draw(0, 1) << 15 | draw(0, 15) << 10 | draw(0, 1023));
  std::memcpy(p, &half, 2);
}

// ---- tensors ----

struct Memory {
  std::vector<char> bytes;
  Tensor tensor;

  Memory(const char* name, DType type, std::vector<int64_t> shape) {
    const int64_t numbers =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    bytes.resize(numbers * weft::size_of(type));
    bytes.shrink_to_fit();
    tensor = {.name = name, .data = bytes.data(), .type = type, .rank = int(shape.size())};
    int64_t stride = 1;
    for (int i = tensor.rank - 1; i >= 0; --i) {
      tensor.shape[i] = shape[i];
      tensor.stride[i] = stride;
      stride *= shape[i];
    }
  }
  Memory(const Memory&) = delete;

  char* at(int64_t number) { return bytes.data() + number * weft::size_of(tensor.type); }
  void fill_random() {
    const int64_t size = weft::size_of(tensor.type);
    for (size_t i = 0; i < bytes.size() / size; ++i) put_random(at(i), tensor.type);
  }
};

struct Case {
  int64_t rows, heads, kv_heads, head_size, block_size, blocks, tokens = 0, window;
  float softcap;
  std::vector<int64_t> counts, pasts;
  std::vector<std::unique_ptr<Memory>> memory;
  Attention call;
};

Tensor& keep(Case& made, const char* name, DType type, std::vector<int64_t> shape) {
  made.memory.push_back(std::make_unique<Memory>(name, type, std::move(shape)));
  return made.memory.back()->tensor;
}

// Codes of every size, none of them NaN, with scales that make them numbers of about unit size.
void fill_codes(Memory& cache, int64_t head_size) {
  const bool integers = cache.tensor.type == DType::i8;
  const int64_t heads = cache.tensor.shape[0] * cache.tensor.shape[1];
  const int64_t block_size = cache.tensor.shape[2];
  for (int64_t i = 0; i < heads; ++i) {
    char* codes = cache.at(i * cache.tensor.stride[1]);
    for (int64_t j = 0; j < block_size * head_size; ++j) {
      codes[j] = static_cast<char>(draw(0, 1) << 7 | draw(0, 126));
    }
    for (int64_t j = 0; j < block_size; ++j) {
      const float scale = (integers ? 1.0f / 64 : 1.0f / 200) * static_cast<float>(draw(1, 3));
      std::memcpy(codes + block_size * head_size + 4 * j, &scale, 4);
    }
  }
}

std::unique_ptr<Case> make_case() {
  auto made = std::make_unique<Case>();
  Case& c = *made;
  c.rows = draw(1, 6);
  c.kv_heads = draw(1, 3);
  c.heads = c.kv_heads * draw(1, 5);
  c.head_size = one_of<int64_t>({7, 16, 24, 32, 40, 64, 80, 128});
  c.block_size = one_of<int64_t>({1, 7, 16, 32, 100});
  c.window = draw(0, 3) == 0 ? draw(1, 300) : 0;
  c.softcap = draw(0, 3) == 0 ? 20.0f : 0.0f;
  const int64_t prefix = draw(0, 1) ? draw(0, 700) : 0;
  int64_t longest = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    c.counts.push_back(draw(0, 3) ? draw(1, 3) : draw(1, 60));
    c.pasts.push_back(prefix + draw(0, 300));
    c.tokens += c.counts[row];
    longest = std::max(longest, (c.counts[row] + c.pasts[row] - 1) / c.block_size + 1);
  }
  c.blocks = c.rows * longest;
  const DType q_type = one_of({DType::f32, DType::bf16, DType::bf16, DType::f16});
  const DType kv_type = one_of({DType::f32, DType::bf16, DType::bf16, DType::f16, DType::i8,
                                DType::f8});
  const int64_t row_size = c.head_size + (weft::is_scaled(kv_type) ? 4 : 0);
  const std::vector<int64_t> cache{c.blocks, c.kv_heads, c.block_size, row_size};
  c.call.out = keep(c, "out", q_type, {c.tokens, c.heads, c.head_size});
  c.call.q = keep(c, "q", q_type, {c.tokens, c.heads, c.head_size});
  c.call.k = keep(c, "k", q_type, {c.tokens, c.kv_heads, c.head_size});
  c.call.v = keep(c, "v", q_type, {c.tokens, c.kv_heads, c.head_size});
  c.call.k_cache = keep(c, "k_cache", kv_type, cache);
  c.call.v_cache = keep(c, "v_cache", kv_type, cache);
  c.call.block_tables = keep(c, "block_tables", DType::i32, {c.rows, longest});
  c.call.query_start = keep(c, "query_start", DType::i32, {c.rows + 1});
  c.call.seq_lens = keep(c, "seq_lens", DType::i32, {c.rows});
  c.call.slot_mapping = keep(c, "slots", DType::i64, {c.tokens});
  for (int i = 1; i < 4; ++i) c.memory[i]->fill_random();
  for (int i : {4, 5}) {
    if (weft::is_scaled(kv_type)) {
      fill_codes(*c.memory[i], c.head_size);
    } else {
      c.memory[i]->fill_random();
    }
  }
  auto* table = c.call.block_tables.as<int32_t>();
  std::vector<int32_t> ids(c.blocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), generator);
  const int64_t same = prefix / c.block_size;
  for (int64_t i = 0; i < c.blocks; ++i) {
    const bool shared = i % longest < same && draw(0, 9) > 0;
    table[i] = shared ? table[i % longest] : ids[i];
    if (i < longest) table[i] = ids[i];
  }
  auto* start = c.call.query_start.as<int32_t>();
  start[0] = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    start[row + 1] = static_cast<int32_t>(start[row] + c.counts[row]);
    c.call.seq_lens.as<int32_t>()[row] = static_cast<int32_t>(c.counts[row] + c.pasts[row]);
    for (int64_t i = 0; i < c.counts[row]; ++i) {
      const int64_t position = c.pasts[row] + i;
      const int64_t block = table[row * longest + position / c.block_size];
      c.call.slot_mapping.as<int64_t>()[start[row] + i] =
          block * c.block_size + position % c.block_size;
    }
  }
  c.call.block_size = c.block_size;
  c.call.window = c.window;
  c.call.scale = 1.0f / std::sqrt(static_cast<float>(c.head_size));
  c.call.softcap = c.softcap;
  if (draw(0, 1)) {
    c.call.sinks = keep(c, "sinks", DType::f32, {c.heads});
    c.memory.back()->fill_random();
  }
  return made;
}

// ---- the plain loops ----

double cached(const Case& c, const Tensor& cache, int64_t block, int64_t head, int64_t offset,
              int64_t d) {
  const char* base = cache.as<char>() + (block * cache.stride[0] + head * cache.stride[1]) *
                                            weft::size_of(cache.type);
  if (!weft::is_scaled(cache.type)) {
    return decode(base + (offset * cache.stride[2] + d) * weft::size_of(cache.type), cache.type);
  }
  const char* scale = base + c.block_size * c.head_size + 4 * offset;
  return decode(base + offset * c.head_size + d, cache.type) * decode(scale, DType::f32);
}

// The worst difference from what `out` holds, relative to max(1, |value|).
double difference(const Case& c) {
  const auto* start = c.call.query_start.as<int32_t>();
  const auto* tables = c.call.block_tables.as<int32_t>();
  const int64_t width = c.call.block_tables.shape[1], group = c.heads / c.kv_heads;
  const DType type = c.call.q.type;
  double worst = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t i = 0; i < c.counts[row]; ++i) {
      const int64_t end = c.pasts[row] + i + 1;
      const int64_t first = c.window == 0 ? 0 : std::max<int64_t>(0, end - c.window);
      for (int64_t head = 0; head < c.heads; ++head) {
        const int64_t vector = ((start[row] + i) * c.heads + head) * c.head_size;
        const auto number = [&](const Tensor& tensor, int64_t d) {
          return decode(tensor.as<char>() + (vector + d) * weft::size_of(type), type);
        };
        std::vector<double> sums(c.head_size);
        double total = 0;
        for (int64_t position = first; position < end; ++position) {
          const int64_t block = tables[row * width + position / c.block_size];
          const int64_t offset = position % c.block_size, kv_head = head / group;
          double score = 0;
          for (int64_t d = 0; d < c.head_size; ++d) {
            score += number(c.call.q, d) * cached(c, c.call.k_cache, block, kv_head, offset, d);
          }
          score *= c.call.scale;
          if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
          const double weight = std::exp(score - 40.0);
          total += weight;
          for (int64_t d = 0; d < c.head_size; ++d) {
            sums[d] += weight * cached(c, c.call.v_cache, block, kv_head, offset, d);
          }
        }
        if (c.call.sinks) total += std::exp(c.call.sinks->as<float>()[head] - 40.0);
        for (int64_t d = 0; d < c.head_size; ++d) {
          const double expected = sums[d] / total;
          const double off = std::abs(number(c.call.out, d) - expected);
          worst = std::max(worst, off / std::max(1.0, std::abs(expected)));
          if (std::isnan(off)) return off;
        }
      }
    }
  }
  return worst;
}

bool same_for_callers(const Case& c, const std::vector<char>& expected) {
  std::vector<std::vector<char>> outs(3, std::vector<char>(expected.size()));
  std::vector<std::thread> callers;
  for (auto& out : outs) {
    callers.emplace_back([&c, &out] {
      Attention call = c.call;
      call.k = call.v = std::nullopt;
      call.out.data = out.data();
      weft::paged_attention(call);
    });
  }
  for (std::thread& caller : callers) caller.join();
  return std::all_of(outs.begin(), outs.end(), [&](const auto& out) { return out == expected; });
}

bool check_case(int number) {
  const auto made = make_case();
  const Case& c = *made;
  Memory& out = *c.memory[0];
  const double tolerance = c.call.q.type == DType::f32    ? 2e-5
                           : c.call.q.type == DType::bf16 ? 1.5e-2
                                                          : 2e-3;
  for (const weft::Isa& isa : weft::isas) {
    weft::chosen = &isa;
    weft::set_attention_threads(1);
    weft::paged_attention(c.call);
    const std::vector<char> alone = out.bytes;
    const double worst = difference(c);
    weft::set_attention_threads(2);
    weft::paged_attention(c.call);
    const bool same = out.bytes == alone && same_for_callers(c, alone);
    if (worst <= tolerance && same) continue;
    std::printf("case %d, %s: q type %d, kv type %d, head size %d: off by %g, %s\n", number,
                isa.name, int(c.call.q.type), int(c.call.k_cache.type), int(c.head_size), worst,
                same ? "same bits" : "other bits");
    return false;
  }
  return true;
}

}  // namespace

int main(int count, char** words) {
  if (count < 2) return 2;
#ifdef __x86_64__
  if (__builtin_cpu_supports("amx-bf16") && !weft::tiles_are_given()) {
    std::puts("tiles are forbidden");
    return 0;
  }
#endif
  generator.seed(count > 2 ? std::atoi(words[2]) : 1);
  const int cases = std::atoi(words[1]);
  for (int i = 0; i < cases; ++i) {
    if (!check_case(i)) return 1;
  }
  std::printf("%d cases, %d instruction sets\n", cases, int(std::size(weft::isas)));
}
