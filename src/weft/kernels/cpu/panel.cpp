// Compiled once per instruction set (CMakeLists.txt), with WEFT_ISA naming it. Nothing here may be
// an inline function or template of another header that the linker could share between the copies:
// code compiled for a newer machine would then run on an older one. So: no standard library beyond
// types, and everything but the exported table has internal linkage.
#include "panel.hpp"

#include "activations.hpp"
#include "simd.hpp"

namespace weft {
namespace {

// ---- products ----

// Most rows of a tile, and its columns in vectors: what the registers hold. Where there are 16 of
// them, a tile of fewer rows is wider, so that few passes read a panel.
constexpr int tile_rows = 6;
template <int rows>
constexpr int tile_vectors = W == 16 ? 4 : rows == 1 ? 8 : rows <= 2 ? 4 : 2;
template <int rows>
constexpr int tile_columns = tile_vectors<rows> * W;
constexpr int slice_vectors = slice_columns / W;

// Bytes of a panel that the row tiles of one chunk share; they stay in the second-level cache, where
// the tiles in turn prefetch the next chunk, and each fetches them into the first again: with
// chunks that fit there sums would be put down and taken up too often.
constexpr int64_t chunk_bytes = 128 << 10;
// The same if there is one row tile, which passes over the columns of a chunk and then over the next
// ones: these chunks stay in the first-level cache.
constexpr int64_t pass_bytes = 8 << 10;
constexpr int64_t near_bytes = 1 << 10;
constexpr int64_t prefetch_bytes = 4 << 10;  // of a single tile, which runs at the memory's pace
// The cache that a lone tile fetches into: the second one for a row that is multiplied as it is, since
// the first one waits for so few lines at once that the row's own loads stand in line behind them.
template <bool bare_row>
constexpr int lone_locality = bare_row ? 2 : 3;

constexpr int64_t step_bytes = panel_columns * 4;  // one float32 or one pair of bfloat16 a column
constexpr int64_t chunk_steps = chunk_bytes / step_bytes;

// How a step is computed: `inputs` of a row, which take `bytes`, in `terms` multiply-adds.
// `widened`: the rows have become float32 before.
template <Format format>
struct Step;

template <>
struct Step<Format::f32> {
  using Operand = vec;
  static constexpr int inputs = 1, bytes = 4, terms = 1;
  static constexpr bool widened = false;
  template <int rows>
  static Operand weights(const char* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static Operand input(const char* x, int) { return splat(*reinterpret_cast<const float*>(x)); }
  static vec add(vec sum, Operand w, Operand x) { return sum + w * x; }
};

#if defined(__AVX512BF16__)
template <>
struct Step<Format::bf16> {
  using Operand = __m512i;
  static constexpr int inputs = 2, bytes = 4, terms = 1;
  static constexpr bool widened = false;
  template <int rows>
  static Operand weights(const char* p, int) { return _mm512_loadu_si512(p); }
  static Operand input(const char* x, int) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_set1_epi32(pair);
  }
  static vec add(vec sum, Operand w, Operand x) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
};
#else
// Weights become float32 in registers, by a shift or a mask. Where a tile leaves no register for the
// mask, it is read each time.
constexpr uint32_t upper_half = 0xffff0000u;
const volatile uvec upper_halves = uvec{} + upper_half;

template <>
struct Step<Format::bf16> {
  using Operand = vec;
  static constexpr int inputs = 2, bytes = 8, terms = 2;
  static constexpr bool widened = true;
  template <int rows>
  static Operand weights(const char* p, int term) {
    const uvec pairs = *reinterpret_cast<const uvec_at*>(p);
    if (term == 0) return (vec)(pairs << 16);
    return (vec)(W == 16 || rows < 3 ? pairs & upper_half : pairs & upper_halves);
  }
  static Operand input(const char* x, int term) {
    return splat(reinterpret_cast<const float*>(x)[term]);
  }
  static vec add(vec sum, Operand w, Operand x) { return sum + w * x; }
};
#endif

// One row tile of a chunk: the steps [from, to), its place among the chunk's tiles, and how far
// ahead it prefetches.
struct Part {
  int64_t row, from, to;
  int64_t turn, turns;
  int64_t next_bytes;
};

template <Format format, int rows, int vectors>
inline void add_step(vec (&acc)[rows][vectors], const char* weights, const char* x,
                     int64_t x_stride) {
  using S = Step<format>;
  for (int term = 0; term < S::terms; ++term) {
    if constexpr (rows < vectors) {
      typename S::Operand in[rows];
      for (int r = 0; r < rows; ++r) in[r] = S::input(x + r * x_stride, term);
      for (int v = 0; v < vectors; ++v) {
        const typename S::Operand w = S::template weights<rows>(weights + v * 4 * W, term);
        for (int r = 0; r < rows; ++r) acc[r][v] = S::add(acc[r][v], w, in[r]);
      }
    } else {
      typename S::Operand w[vectors];
      for (int v = 0; v < vectors; ++v) w[v] = S::template weights<rows>(weights + v * 4 * W, term);
      for (int r = 0; r < rows; ++r) {
        const typename S::Operand in = S::input(x + r * x_stride, term);
        for (int v = 0; v < vectors; ++v) acc[r][v] = S::add(acc[r][v], w[v], in);
      }
    }
  }
}

// `rows` rows by tile_columns columns, or a slice; `x` is at the first step of the part. The sums rest
// in memory between chunks.
template <Format format, int rows, bool slice>
void tile(const Product& p, const Part& part, const char* x, int64_t x_stride, int64_t column) {
  using S = Step<format>;
  constexpr int vectors = slice ? slice_vectors : tile_vectors<rows>;
  constexpr int line_bytes = vectors * W * 4;
  float* sums = p.sums + part.row * panel_columns + column;
  const char* weights = p.panel + part.from * step_bytes + column * 4;
  vec acc[rows][vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) {
      acc[r][v] = part.from == 0 ? vec{} : load(sums + r * panel_columns + v * W);
    }
  }
  // Of pairs a last input may have no partner.
  const int64_t whole = S::widened ? part.to : p.inputs / S::inputs;
  const int64_t end = part.to < whole ? part.to : whole;
  // A lone tile that passes over its chunk several times fetches the next one in order.
  const char* ahead = weights + part.next_bytes;
  int64_t ahead_step = step_bytes;
  if (!slice && part.turns == 1 && vectors * W < panel_columns) {
    ahead += column * 4 * (part.to - part.from - 1);
    ahead_step = line_bytes;
  }
  for (int64_t k = part.from, wait = part.turn; k < end; ++k, --wait, ahead += ahead_step) {
    if (wait == 0) {
      wait = part.turns;
      for (int i = 0; i < line_bytes; i += 64) {
        if (part.turns == 1) {
          __builtin_prefetch(ahead + i, 0, lone_locality<rows == 1 && !S::widened>);
        } else {
          __builtin_prefetch(ahead + i, 0, 2);
        }
      }
    }
    if (part.turns > 1) {
      for (int i = 0; i < line_bytes; i += 64) __builtin_prefetch(weights + near_bytes + i, 0, 3);
    }
    add_step<format, rows, vectors>(acc, weights, x, x_stride);
    weights += step_bytes;
    x += S::bytes;
  }
  if (part.to > whole) {
    char last[rows][S::bytes] = {};
    for (int r = 0; r < rows; ++r) __builtin_memcpy(last[r], x + r * x_stride, 2);
    add_step<format, rows, vectors>(acc, weights, last[0], S::bytes);
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) store(sums + r * panel_columns + v * W, acc[r][v]);
  }
}

// All wanted columns of `rows` rows.
template <Format format, int rows, bool slice>
void pass(const Product& p, const Part& part, const char* x, int64_t x_stride) {
  if constexpr (slice) {
    return tile<format, rows, true>(p, part, x, x_stride, p.slice * slice_columns);
  }
  for (int64_t column = 0; column < panel_columns; column += tile_columns<rows>) {
    tile<format, rows, false>(p, part, x, x_stride, column);
  }
}

// The inputs of a part's bfloat16 rows as float32; 0 beyond the last of them.
inline void widen_rows(const Product& p, const Part& part, int64_t rows, float* to, int64_t to_stride) {
  const int64_t from = 2 * part.from, end = 2 * part.to < p.inputs ? 2 * part.to : p.inputs;
  const int64_t count = end - from, whole = count / W * W;
  for (int64_t r = 0; r < rows; ++r, to += to_stride) {
    const char* x = p.x + (part.row + r) * p.x_stride + 2 * from;
    for (int64_t i = 0; i < whole; i += W) store(to + i, read<DType::bf16>(x + 2 * i));
    if (whole < count) store(to + whole, read<DType::bf16>(x + 2 * whole, count - whole));
  }
}

template <Format format, bool slice>
void multiply_columns(const Product& p) {
  using S = Step<format>;
  using Pass = void (*)(const Product&, const Part&, const char*, int64_t);
  static constexpr Pass passes[] = {pass<format, 1, slice>, pass<format, 2, slice>,
                                    pass<format, 3, slice>, pass<format, 4, slice>,
                                    pass<format, 5, slice>, pass<format, 6, slice>};
  static constexpr int widths[] = {tile_columns<1>, tile_columns<2>, tile_columns<3>,
                                   tile_columns<4>, tile_columns<5>, tile_columns<6>};
  const int64_t steps = (p.inputs + S::inputs - 1) / S::inputs;
  const int64_t turns = (p.rows + tile_rows - 1) / tile_rows;
  const bool streams = turns == 1 && (slice || widths[p.rows - 1] == panel_columns);
  const int64_t chunk = turns == 1 && !streams ? pass_bytes / step_bytes
                        : streams && !S::widened ? steps : chunk_steps;
  const int64_t lines = slice ? panel_columns / slice_columns : 1;  // a slice has one of so many
  const int64_t ahead = streams ? prefetch_bytes * lines : chunk * step_bytes;
  for (int64_t from = 0; from < steps; from += chunk) {
    Part part{0, from, from + chunk < steps ? from + chunk : steps, 0, turns, ahead};
    for (; part.turn < turns; ++part.turn) {
      const int64_t left = turns - part.turn;
      const int64_t rows = (p.rows - part.row + left - 1) / left;
      if constexpr (S::widened) {
        constexpr int64_t stride = S::inputs * chunk_steps + W;
        alignas(64) float wide[tile_rows * stride];
        widen_rows(p, part, rows, wide, stride);
        passes[rows - 1](p, part, reinterpret_cast<const char*>(wide), 4 * stride);
      } else {
        const char* x = p.x + part.row * p.x_stride + from * S::bytes;
        passes[rows - 1](p, part, x, p.x_stride);
      }
      part.row += rows;
    }
  }
}

template <Format format>
void multiply(const Product& p) {
  if (p.slice < 0) return multiply_columns<format, false>(p);
  multiply_columns<format, true>(p);
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
      const vec y = gated(rounded<type>(gate), rounded<type>(up), activation, f.limit);
      write<type>(out + i * size, y, f.columns - i);
    }
  }
}

void finish_gated(DType type, Activation activation, const Finish& f) {
  if (type == DType::f32) return finish_gated_as<DType::f32>(activation, f);
  finish_gated_as<DType::bf16>(activation, f);
}

// ---- activation without a gate ----

template <DType type>
void xielu_as(const float* numbers, const char* x, char* out, int64_t count) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  const vec rise = splat(softplus(numbers[0])), slope = splat(numbers[2]);
  const vec fall = slope + softplus(numbers[1]);
  const vec largest = splat(numbers[3]);
  for (int64_t i = 0; i < count; i += W) {
    const int64_t left = count - i;
    const vec v = read<type>(x + i * size, left);
    const vec low = pick(v > largest, largest, v);
    const vec below = (exp_beyond_line(low) + (low - v)) * fall;
    write<type>(out + i * size, pick(v > 0.0f, rise * v * v, below) + slope * v, left);
  }
}

void xielu(DType type, const float* numbers, const char* x, char* out, int64_t count) {
  if (type == DType::f32) return xielu_as<DType::f32>(numbers, x, out, count);
  xielu_as<DType::bf16>(numbers, x, out, count);
}

template <DType type>
void gelu_as(const char* x, char* out, int64_t count) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  for (int64_t i = 0; i < count; i += W) {
    write<type>(out + i * size, gelu_of(read<type>(x + i * size, count - i)), count - i);
  }
}

void gelu(DType type, const char* x, char* out, int64_t count) {
  if (type == DType::f32) return gelu_as<DType::f32>(x, out, count);
  gelu_as<DType::bf16>(x, out, count);
}

// ---- gates of attention's output ----

template <DType type>
void gate_as(Gating gating, const char* x, const char* gates, int64_t each, char* out,
             int64_t count) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  if (each == 1) {
    for (int64_t i = 0; i < count; i += W) {
      const int64_t left = count - i;
      const vec factor = open(read<type>(gates + i * size, left), gating);
      write<type>(out + i * size, read<type>(x + i * size, left) * factor, left);
    }
    return;
  }
  for (int64_t first = 0; first < count; first += each) {
    const float factor = open(splat(read<type>(gates + first / each * size, 1)[0]), gating)[0];
    for (int64_t i = first; i < first + each; i += W) {
      const int64_t left = first + each - i;
      write<type>(out + i * size, read<type>(x + i * size, left) * factor, left);
    }
  }
}

void gate(DType type, Gating gating, const char* x, const char* gates, int64_t each, char* out,
          int64_t count) {
  if (type == DType::f32) return gate_as<DType::f32>(gating, x, gates, each, out, count);
  gate_as<DType::bf16>(gating, x, gates, each, out, count);
}

// ---- norms and rotation ----

template <DType type>
float mean_of(const char* x, int64_t count) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  vec sums{};
  for (int64_t i = 0; i < count; i += W) sums += read<type>(x + i * size, count - i);
  return sum_of(sums) / static_cast<float>(count);
}

// What is subtracted from a vector of which so many numbers are left: nothing from the others.
inline vec shift_of(float mean, int64_t left) {
  vec shift = vec{} + mean;
  if (left >= W) return shift;
  for (int64_t i = left; i < W; ++i) shift[i] = 0.0f;
  return shift;
}

template <DType type>
float squares_as(const char* x, int64_t count, float mean = 0.0f) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  vec squares{};
  for (int64_t i = 0; i < count; i += W) {
    const vec v = read<type>(x + i * size, count - i) - shift_of(mean, count - i);
    squares += v * v;
  }
  return sum_of(squares);
}

float squares(DType type, const char* x, int64_t count) {
  return type == DType::f32 ? squares_as<DType::f32>(x, count) : squares_as<DType::bf16>(x, count);
}

inline vec weighed(vec x, float scale, const float* weight, int64_t left) {
  x *= scale;
  if (weight == nullptr) return x;
  return x * read<DType::f32>(reinterpret_cast<const char*>(weight), left);
}

template <DType type>
void weigh_as(float scale, const float* weights, const char* x, const char* residual, char* out,
              int64_t count, float mean = 0.0f) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  for (int64_t i = 0; i < count; i += W) {
    const int64_t left = count - i;
    const float* weight = weights == nullptr ? nullptr : weights + i;
    vec y = weighed(read<type>(x + i * size, left) - mean, scale, weight, left);
    if (residual != nullptr) y = rounded<type>(y) + read<type>(residual + i * size, left);
    write<type>(out + i * size, y, left);
  }
}

void weigh(DType type, float scale, const float* weights, const char* x, char* out,
           int64_t count) {
  if (type == DType::f32) return weigh_as<DType::f32>(scale, weights, x, nullptr, out, count);
  weigh_as<DType::bf16>(scale, weights, x, nullptr, out, count);
}

template <DType type>
void norm_as(const Norm& norm, const char* x, const char* residual, char* out, int64_t count) {
  const float mean = norm.centred ? mean_of<type>(x, count) : 0.0f;
  const float squares = squares_as<type>(x, count, mean) / static_cast<float>(count);
  const float scale = 1.0f / __builtin_sqrtf(squares + norm.epsilon);
  weigh_as<type>(scale, norm.weight, x, residual, out, count, mean);
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

// ---- sums of rows ----

template <DType type>
void scale_as(float factor, const char* x, const char* residual, char* out, int64_t count) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  for (int64_t i = 0; i < count; i += W) {
    const int64_t left = count - i;
    vec y = read<type>(x + i * size, left);
    if (residual != nullptr) y = rounded<type>(y + read<type>(residual + i * size, left));
    write<type>(out + i * size, y * factor, left);
  }
}

void scale(DType type, float factor, const char* x, const char* residual, char* out,
           int64_t count) {
  if (type == DType::f32) return scale_as<DType::f32>(factor, x, residual, out, count);
  scale_as<DType::bf16>(factor, x, residual, out, count);
}

template <DType type>
void combine_as(const Share* shares, int64_t rows, char* out, int64_t count) {
  constexpr int64_t size = type == DType::f32 ? 4 : 2;
  for (int64_t i = 0; i < count; i += W) {
    const int64_t left = count - i;
    vec sum{};
    for (int64_t r = 0; r < rows; ++r) {
      sum += read<type>(shares[r].row + i * size, left) * shares[r].factor;
    }
    write<type>(out + i * size, sum, left);
  }
}

void combine(DType type, const Share* shares, int64_t rows, char* out, int64_t count) {
  if (type == DType::f32) return combine_as<DType::f32>(shares, rows, out, count);
  combine_as<DType::bf16>(shares, rows, out, count);
}

}  // namespace

#define WEFT_JOIN(a, b) a##b
#define WEFT_NAME(a, b) WEFT_JOIN(a, b)
#define WEFT_TEXT_OF(x) #x
#define WEFT_TEXT(x) WEFT_TEXT_OF(x)

extern const PanelKernels WEFT_NAME(panel_kernels_, WEFT_ISA);
const PanelKernels WEFT_NAME(panel_kernels_, WEFT_ISA) = {
    WEFT_TEXT(WEFT_ISA), {multiply<Format::f32>, multiply<Format::bf16>},
    finish, finish_gated, xielu, gelu, gate, norm, squares, weigh, rotate, scale, combine,
};

}  // namespace weft
