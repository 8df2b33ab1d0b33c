// Compiled once per instruction set (CMakeLists.txt), with WEFT_ISA naming it. Nothing here may be
// an inline function or template of another header that the linker could share between the copies:
// code compiled for a newer machine would then run on an older one. So: no standard library beyond
// types, and everything but the exported table has internal linkage.
#include "panel.hpp"

#include "simd.hpp"

namespace weft {
namespace {

// ---- products ----

// Columns of a tile, in vectors, and its most rows: what the registers hold.
constexpr int tile_vectors = W == 16 ? 4 : 2;
constexpr int tile_rows = 6;
constexpr int tile_columns = tile_vectors * W;
// Bytes of a panel that the row tiles of one chunk share; they stay in the second-level cache, where
// the tiles in turn prefetch the next chunk, and each fetches them into the first again: with
// chunks that fit there sums would be put down and taken up too often.
constexpr int64_t chunk_bytes = 128 << 10;
constexpr int64_t near_bytes = 1 << 10;
constexpr int64_t prefetch_bytes = 4 << 10;  // of a single tile, which runs at the memory's pace

template <Format format>
constexpr int64_t step_inputs = format == Format::bf16 ? 2 : 1;
constexpr int64_t step_bytes = panel_columns * 4;  // of both formats

// What one input, or one pair of inputs, of a row contributes.
template <Format format>
struct Step;

template <>
struct Step<Format::f32> {
  using Weights = vec;
  using Input = vec;
  static Weights weights(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static Input input(const char* x) { return splat(*reinterpret_cast<const float*>(x)); }
  static vec add(vec sum, Weights w, Input x) { return sum + w * x; }
};

#if defined(__AVX512BF16__)
template <>
struct Step<Format::bf16> {
  using Weights = __m512i;
  using Input = __m512i;
  static Weights weights(const char* p) { return _mm512_loadu_si512(p); }
  static Input input(const char* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_set1_epi32(pair);
  }
  static vec add(vec sum, Weights w, Input x) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
};
#else
template <>
struct Step<Format::bf16> {
  struct Weights {
    vec low, high;
  };
  using Input = Weights;
  static Weights weights(const char* p) {
    const uvec pairs = *reinterpret_cast<const uvec_at*>(p);
    return {(vec)(pairs << 16), (vec)(pairs & 0xffff0000u)};
  }
  static Input input(const char* x) {
    uint32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return {splat(__builtin_bit_cast(float, pair << 16)),
            splat(__builtin_bit_cast(float, pair & 0xffff0000u))};
  }
  static vec add(vec sum, Weights w, Input x) { return sum + w.low * x.low + w.high * x.high; }
};
#endif

// One row tile of a chunk: the steps [from, to), its place among the chunk's tiles, and how far the
// next chunk is.
struct Part {
  int64_t row, from, to;
  int64_t turn, turns;
  int64_t next_bytes;
};

// `rows` rows by tile_columns columns. The sums rest in memory between chunks.
template <Format format, int rows>
void tile(const Product& p, const Part& part, int64_t column) {
  constexpr int64_t bytes = 4;  // of a row in one step, in both formats
  using S = Step<format>;
  float* sums = p.sums + part.row * panel_columns + column;
  const char* x = p.x + part.row * p.x_stride;
  const char* panel = p.panel + column * 4;
  vec acc[rows][tile_vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < tile_vectors; ++v) {
      acc[r][v] = part.from == 0 ? vec{} : load(sums + r * panel_columns + v * W);
    }
  }
  const auto step = [&](const char* weights, auto input) __attribute__((always_inline)) {
    typename S::Weights w[tile_vectors];
    for (int v = 0; v < tile_vectors; ++v) w[v] = S::weights(weights + v * 4 * W);
    for (int r = 0; r < rows; ++r) {
      const typename S::Input in = input(r);
      for (int v = 0; v < tile_vectors; ++v) acc[r][v] = S::add(acc[r][v], w[v], in);
    }
  };
  const int64_t whole = p.inputs / step_inputs<format>;
  const int64_t end = part.to < whole ? part.to : whole;
  for (int64_t k = part.from, wait = part.turn; k < end; ++k, --wait) {
    const char* weights = panel + k * step_bytes;
    if (wait == 0) {
      wait = part.turns;
      for (int i = 0; i < tile_columns * 4; i += 64) {
        if (part.turns == 1) {
          __builtin_prefetch(weights + prefetch_bytes + i, 0, 3);
        } else {
          __builtin_prefetch(weights + part.next_bytes + i, 0, 2);
        }
      }
    }
    if (part.turns > 1) {
      for (int i = 0; i < tile_columns * 4; i += 64) {
        __builtin_prefetch(weights + near_bytes + i, 0, 3);
      }
    }
    step(weights, [&](int r) { return S::input(x + r * p.x_stride + k * bytes); });
  }
  if (part.to > whole) {  // a last input without a partner
    step(panel + whole * step_bytes, [&](int r) {
      char pair[4] = {};
      __builtin_memcpy(pair, x + r * p.x_stride + whole * bytes, 2);
      return S::input(pair);
    });
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < tile_vectors; ++v) store(sums + r * panel_columns + v * W, acc[r][v]);
  }
}

template <Format format>
void multiply(const Product& p) {
  using Tile = void (*)(const Product&, const Part&, int64_t);
  static constexpr Tile tiles[] = {tile<format, 1>, tile<format, 2>, tile<format, 3>,
                                   tile<format, 4>, tile<format, 5>, tile<format, 6>};
  const int64_t steps = (p.inputs + step_inputs<format> - 1) / step_inputs<format>;
  const int64_t turns = (p.rows + tile_rows - 1) / tile_rows;
  const int64_t most = chunk_bytes / step_bytes;
  const bool whole = steps <= most || (turns == 1 && tile_columns == panel_columns);
  const int64_t chunk = whole ? steps : most;
  for (int64_t from = 0; from < steps; from += chunk) {
    Part part{0, from, from + chunk < steps ? from + chunk : steps, 0, turns,
              chunk * step_bytes};
    for (; part.turn < turns; ++part.turn) {
      const int64_t left = turns - part.turn;
      const int64_t rows = (p.rows - part.row + left - 1) / left;
      for (int64_t column = 0; column < panel_columns; column += tile_columns) {
        tiles[rows - 1](p, part, column);
      }
      part.row += rows;
    }
  }
}

// ---- what becomes of the sums ----

template <DType type>
void finish_as(const Finish& f) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  for (int64_t row = 0; row < f.rows; ++row) {
    const float* sums = f.sums + row * panel_columns;
    char* out = f.out + row * f.out_stride;
    const char* residual = f.residual + row * f.residual_stride;
    for (int64_t i = 0; i < f.columns; i += W) {
      const int64_t left = f.columns - i;
      vec x = load(sums + i);
      if (f.bias != nullptr) x += load(f.bias + i);
      if (f.residual != nullptr) x = rounded<type>(x) + read<type>(residual + i * size, left);
      write<type>(out + i * size, x, left);
    }
  }
}

void finish(DType type, const Finish& f) {
  if (type == DType::f32) return finish_as<DType::f32>(f);
  finish_as<DType::bf16>(f);
}

inline vec activate(vec x, Activation activation) {
  if (activation == Activation::silu) return x * sigmoid(x);
  // 0.5 * x * (1 + tanh(u)) = x / (1 + exp(-2 u))
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * (x * x * x)));
}

template <DType type>
void finish_gated_as(Activation activation, const Finish& f) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  for (int64_t row = 0; row < f.rows; ++row) {
    const float* sums = f.sums + row * panel_columns;
    char* out = f.out + row * f.out_stride;
    for (int64_t i = 0; i < f.columns; i += W) {
      vec gate = load(sums + i), up = load(sums + gated_columns + i);
      if (f.bias != nullptr) {
        gate += load(f.bias + i);
        up += load(f.bias + gated_columns + i);
      }
      gate = activate(rounded<type>(gate), activation);
      write<type>(out + i * size, gate * rounded<type>(up), f.columns - i);
    }
  }
}

void finish_gated(DType type, Activation activation, const Finish& f) {
  if (type == DType::f32) return finish_gated_as<DType::f32>(activation, f);
  finish_gated_as<DType::bf16>(activation, f);
}

// ---- norms and rotation ----

template <DType type>
float inverse_rms(const char* x, int64_t count, float epsilon) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  vec squares{};
  for (int64_t i = 0; i < count; i += W) {
    const vec v = read<type>(x + i * size, count - i);
    squares += v * v;
  }
  return 1.0f / __builtin_sqrtf(sum_of(squares) / static_cast<float>(count) + epsilon);
}

inline vec weigh(vec x, float scale, const float* weight, int64_t left) {
  x *= scale;
  if (weight == nullptr) return x;
  return x * read<DType::f32>(reinterpret_cast<const char*>(weight), left);
}

template <DType type>
void norm_as(const Norm& norm, const char* x, const char* residual, char* out, int64_t count) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  const float scale = inverse_rms<type>(x, count, norm.epsilon);
  for (int64_t i = 0; i < count; i += W) {
    const int64_t left = count - i;
    const float* weight = norm.weight == nullptr ? nullptr : norm.weight + i;
    vec y = weigh(read<type>(x + i * size, left), scale, weight, left);
    if (residual != nullptr) y = rounded<type>(y) + read<type>(residual + i * size, left);
    write<type>(out + i * size, y, left);
  }
}

void norm(DType type, const Norm& norm, const char* x, const char* residual, char* out,
          int64_t count) {
  if (type == DType::f32) return norm_as<DType::f32>(norm, x, residual, out, count);
  norm_as<DType::bf16>(norm, x, residual, out, count);
}

template <DType type>
void rotate_as(const Norm* norm, const float* cos, const float* sin, int64_t half, char* head,
               int64_t count) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  if (norm != nullptr) norm_as<type>(*norm, head, nullptr, head, count);
  char* far = head + half * size;
  for (int64_t i = 0; i < half; i += W) {
    const int64_t left = half - i;
    const vec c = read<DType::f32>(reinterpret_cast<const char*>(cos + i), left);
    const vec s = read<DType::f32>(reinterpret_cast<const char*>(sin + i), left);
    const vec low = read<type>(head + i * size, left), high = read<type>(far + i * size, left);
    write<type>(head + i * size, low * c - high * s, left);
    write<type>(far + i * size, high * c + low * s, left);
  }
}

void rotate(DType type, const Norm* norm, const float* cos, const float* sin, int64_t half,
            char* head, int64_t count) {
  if (type == DType::f32) return rotate_as<DType::f32>(norm, cos, sin, half, head, count);
  rotate_as<DType::bf16>(norm, cos, sin, half, head, count);
}

}  // namespace

#define WEFT_JOIN(a, b) a##b
#define WEFT_NAME(a, b) WEFT_JOIN(a, b)
#define WEFT_TEXT_OF(x) #x
#define WEFT_TEXT(x) WEFT_TEXT_OF(x)

extern const PanelKernels WEFT_NAME(panel_kernels_, WEFT_ISA);
const PanelKernels WEFT_NAME(panel_kernels_, WEFT_ISA) = {
    WEFT_TEXT(WEFT_ISA), {multiply<Format::f32>, multiply<Format::bf16>},
    finish, finish_gated, norm, rotate,
};

}  // namespace weft
