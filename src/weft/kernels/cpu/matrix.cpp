// Packing, and products cut into items for the thread pool.

#include "matrix.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"
#include "pool.hpp"

namespace weft {
namespace {

constexpr int64_t huge_page = 2 << 20;
// Rows of one item: a multiple of a tile's, few enough that their activations stay in the cache.
constexpr int64_t item_rows = 96;
// Less work than this is not worth another thread: bytes of weights, for each six rows.
constexpr int64_t min_shared_work = 64 << 10;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Zeroed memory for matrices, cut one after the other from large runs of huge pages: most matrices
// are smaller than a few of these. A run goes back when its last matrix is gone. Memory beyond the
// last panel of a matrix is prefetched, but never read.
class Arena {
 public:
  std::shared_ptr<char> take(int64_t size) {
    const std::lock_guard lock(mutex_);
    size = round_up(std::max<int64_t>(size, 1), alignment);
    if (run_ == nullptr || size > left_) start(std::max(size, run_bytes));
    std::shared_ptr<char> piece(run_, next_);
    next_ += size;
    left_ -= size;
    return piece;
  }

 private:
  static constexpr int64_t alignment = 4096, run_bytes = 64 << 20;

  void start(int64_t size) {
    size = round_up(size, huge_page);
    const int64_t whole = size + huge_page;  // so that there is an aligned start
    void* data = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    run_ = std::shared_ptr<char>(static_cast<char*>(data), [whole](char* p) { munmap(p, whole); });
    const auto address = reinterpret_cast<intptr_t>(data);
    next_ = run_.get() + (round_up(address, huge_page) - address);
    left_ = size;
#ifdef MADV_HUGEPAGE
    madvise(next_, size, MADV_HUGEPAGE);
#endif
  }

  std::mutex mutex_;
  std::shared_ptr<char> run_;
  char* next_ = nullptr;
  int64_t left_ = 0;
};

Arena& arena() {
  static Arena* const one = new Arena;  // never destroyed: matrices may be freed at any time
  return *one;
}

}  // namespace

Matrix::Matrix(Format format, int64_t outputs, int64_t inputs, bool gated, DType type,
               const QuantWeight& quant, bool column_scales)
    : format_(format), outputs_(outputs), inputs_(inputs), gated_(gated), type_(type),
      quant_(quant) {
  const int64_t half = gated ? outputs / 2 : outputs;
  panels_ = round_up(half, gated ? gated_columns : panel_columns) /
            (gated ? gated_columns : panel_columns);
  if (is_quantised(format)) {
    if (column_scales) column_scales_.resize(panels_ * panel_columns);
    quant_.column_scales = column_scales ? column_scales_.data() : nullptr;
    panel_bytes_ = quant_.panel_bytes();
  } else {
    panel_bytes_ = panel_columns * (format == Format::bf16 ? 2 * round_up(inputs, 2) : 4 * inputs);
  }
  data_ = arena().take(panels_ * panel_bytes_);
  quant_.blocks = reinterpret_cast<uint8_t*>(data_.get());
}

std::unique_ptr<Matrix> Matrix::quantised(Format format, int64_t outputs, int64_t inputs,
                                          bool gated, DType type, int64_t group,
                                          DType scale_type, bool zeros) {
  constexpr int64_t activation_group = 128;  // where a whole row of weights has one scale
  const QuantWeight quant{.depth = inputs,
                          .group = group == 0 ? activation_group : group,
                          .bits = format == Format::int8 ? 8 : 4,
                          .scale_type = scale_type,
                          .zeros = zeros};
  if (!is_quantised(format) || quant.group % 16 != 0 || quant.group > 256) {
    throw std::invalid_argument("a quantised matrix has int8 or int4 and groups of 16 to 256");
  }
  if (gated && outputs % 2 != 0) {
    throw std::invalid_argument("a gated matrix has an even number of outputs");
  }
  return std::unique_ptr<Matrix>(
      new Matrix(format, outputs, inputs, gated, type, quant, group == 0));
}

namespace {

// So many rows of weights are an item for the thread pool.
constexpr int64_t packed_rows = 16;

void each_row(int64_t rows, const auto& body) {
  shared_pool().run((rows + packed_rows - 1) / packed_rows, [&](int64_t item) {
    const int64_t end = std::min(rows, (item + 1) * packed_rows);
    for (int64_t row = item * packed_rows; row < end; ++row) body(row);
  });
}

}  // namespace

void Matrix::write(int64_t first, int64_t rows, const uint8_t* values, const char* scales,
                   const uint8_t* zeros) {
  const int64_t groups = quant_.column_scales == nullptr ? quant_.groups() : 1;
  const int64_t scale_bytes = quant_.column_scales == nullptr ? size_of(quant_.scale_type) : 4;
  each_row(rows, [&](int64_t row) {
    const auto [panel, column] = place_of(first + row);
    quant_.write_column(panel, column,
                        {values + row * inputs_, scales + row * groups * scale_bytes,
                         zeros == nullptr ? nullptr : zeros + row * groups});
  });
}

void Matrix::write_rounded(int64_t first, const Tensor& weight) {
  const bool whole = quant_.column_scales != nullptr;
  const int64_t group = whole ? inputs_ : quant_.group;
  const int64_t padded = round_up(inputs_, 16), row_bytes = weight.stride[0] * size_of(weight.type);
  each_row(weight.shape[0], [&](int64_t row) {
    std::vector<float> numbers(padded), scales(whole ? 1 : quant_.groups());
    std::vector<uint8_t> values(padded);
    const char* from = weight.as<char>() + row * row_bytes;
    float poison = 0.0f;
    for (int64_t i = 0; i < inputs_; ++i) {
      numbers[i] = number_at(from, weight.type, i);
      poison += numbers[i] * 0.0f;
    }
    if (poison != 0.0f) throw std::invalid_argument("only finite numbers can be rounded");
    chosen_isa().quant->round_weights(numbers.data(), inputs_, group, quant_.bits, values.data(),
                                      scales.data());
    std::vector<uint16_t> halves;
    const void* scales_here = scales.data();
    if (!whole) {  // they are such that bf16 holds them
      for (const float scale : scales) halves.push_back(std::bit_cast<uint32_t>(scale) >> 16);
      scales_here = halves.data();
    }
    const auto [panel, column] = place_of(first + row);
    quant_.write_column(panel, column, {values.data(), scales_here, nullptr});
  });
}

std::unique_ptr<Matrix> Matrix::pack(const Tensor& weight, bool gated) {
  if (weight.rank != 2 || (weight.type != DType::f32 && weight.type != DType::bf16)) {
    throw std::invalid_argument("a matrix is packed from two dimensions of float32 or bfloat16");
  }
  if (weight.shape[1] > 1 && weight.stride[1] != 1) {
    throw std::invalid_argument("the rows of a matrix must be contiguous");
  }
  if (gated && weight.shape[0] % 2 != 0) {
    throw std::invalid_argument("a gated matrix has an even number of outputs");
  }
  const Format format = weight.type == DType::f32 ? Format::f32 : Format::bf16;
  std::unique_ptr<Matrix> matrix(
      new Matrix(format, weight.shape[0], weight.shape[1], gated, weight.type, {}, false));
  shared_pool().run(matrix->panels(), [&](int64_t i) { matrix->pack_panel(weight, i); });
  return matrix;
}

int64_t Matrix::output_at(int64_t panel, int64_t column) const {
  int64_t output = panel * panel_columns + column, end = outputs_;
  if (gated_) {
    const bool gate = column < gated_columns;
    end = gate ? outputs_ / 2 : outputs_;
    output = panel * gated_columns + (gate ? column : outputs_ / 2 + column - gated_columns);
  }
  return output < end ? output : -1;
}

// Reads a few rows at a time over a stretch of inputs, so that a cache line of the panel is filled
// while it is near. Fresh memory is zero: columns and inputs that do not exist are left alone.
void Matrix::pack_panel(const Tensor& weight, int64_t panel) {
  constexpr int64_t stretch = 64;
  char* to = data_.get() + panel * panel_bytes_;
  const int64_t row_bytes = weight.stride[0] * size_of(weight.type);
  for (int64_t first = 0; first < inputs_; first += stretch) {
    const int64_t count = std::min(stretch, inputs_ - first);
    for (int64_t column = 0; column < panel_columns; ++column) {
      const int64_t output = output_at(panel, column);
      if (output < 0) continue;
      const char* from = weight.as<char>() + output * row_bytes + first * size_of(weight.type);
      // A step is 4 bytes of a row in both formats.
      const int64_t bytes = count * size_of(weight.type);
      char* place = to + first * size_of(weight.type) * panel_columns + column * 4;
      int64_t done = 0;
      for (; done + 4 <= bytes; done += 4) std::memcpy(place + done * panel_columns, from + done, 4);
      std::memcpy(place + done * panel_columns, from + done, bytes - done);
    }
  }
}

Matrix::Place Matrix::place_of(int64_t output) const {
  if (!gated_) return {output / panel_columns, output % panel_columns};
  const int64_t half = outputs_ / 2, place = output % half;
  return {place / gated_columns, place % gated_columns + (output < half ? 0 : gated_columns)};
}

void Matrix::copy_row(int64_t output, char* to) const {
  const auto [panel, column] = place_of(output);
  if (is_quantised(format_)) {
    std::vector<float> numbers(inputs_);
    quant_.read_column(panel, column, numbers.data());
    for (int64_t i = 0; i < inputs_; ++i) write_number(numbers[i], to, type_, i);
    return;
  }
  const char* from = this->panel(panel) + column * 4;
  const int64_t bytes = inputs_ * size_of(type());
  int64_t done = 0;
  for (; done + 4 <= bytes; done += 4) std::memcpy(to + done, from + done * panel_columns, 4);
  std::memcpy(to + done, from + done * panel_columns, bytes - done);
}

void Multiplication::round_into(char* memory) {
  if (rounds()) rounded = QuantRows::at(memory, matrix->quant(), rows);
}

void Multiplication::round_row(int64_t row) const {
  if (!rounds()) return;
  chosen_isa().quant->round_row(matrix->quant(), x.row(row), matrix->type(), row, rounded);
}

int64_t Multiplication::items() const {
  return matrix->panels() * ((rows + item_rows - 1) / item_rows);
}

// Items of one panel follow each other, so that it is read from memory once.
void Multiplication::run(const PanelKernels& kernels, int64_t item) const {
  alignas(64) float sums[item_rows * panel_columns];
  alignas(64) float bias_here[panel_columns] = {};
  const int64_t blocks = (rows + item_rows - 1) / item_rows;
  const int64_t panel = item / blocks, first = item % blocks * item_rows;
  const int64_t count = std::min(item_rows, rows - first);
  if (is_quantised(matrix->format())) {
    chosen_isa().quant->multiply(matrix->quant(), panel, rounded, first, count, sums,
                                 panel_columns);
  } else {
    kernels.multiply[static_cast<int>(matrix->format())](
        {matrix->panel(panel), x.row(first), x.stride, count, matrix->inputs(), sums});
  }
  const int64_t half = matrix->gated() ? gated_columns : panel_columns;
  const int64_t start = panel * half;
  const int64_t end = matrix->gated() ? matrix->outputs() / 2 : matrix->outputs();
  const int64_t columns = std::min(half, end - start);
  const int64_t size = size_of(out_type);
  const auto read_bias = [&](int64_t output, float* to) {
    for (int64_t i = 0; i < panel_columns && i < columns; ++i) {
      to[i] = number_at(bias, matrix->type(), output + i);
    }
  };
  if (bias != nullptr) {
    read_bias(start, bias_here);
    if (matrix->gated()) read_bias(end + start, bias_here + gated_columns);
  }
  Finish finish{sums, bias == nullptr ? nullptr : bias_here, nullptr, residual.stride,
                out.row(first) + start * size, out.stride, count, columns};
  if (residual.data != nullptr) finish.residual = residual.row(first) + start * size;
  if (activated) return kernels.finish_gated(out_type, activation, finish);
  kernels.finish(out_type, finish);
  if (!matrix->gated()) return;
  finish.sums += gated_columns;
  if (bias != nullptr) finish.bias += gated_columns;
  if (residual.data != nullptr) finish.residual += end * size;
  finish.out += end * size;
  kernels.finish(out_type, finish);
}

bool worth_sharing(const Matrix& matrix, int64_t rows) {
  return matrix.bytes() * ((rows + 5) / 6) >= min_shared_work;
}

void multiply(const Multiplication& given) {
  constexpr int64_t piece = 4;  // rows that are rounded by one item
  Multiplication call = given;
  std::vector<char> memory(call.round_bytes());
  call.round_into(memory.data());
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t counts[] = {call.rounds() ? (call.rows + piece - 1) / piece : 0, call.items()};
  const auto body = [&](int phase, int64_t item) {
    if (phase == 1) return call.run(kernels, item);
    const int64_t end = std::min(call.rows, (item + 1) * piece);
    for (int64_t row = item * piece; row < end; ++row) call.round_row(row);
  };
  if (worth_sharing(*call.matrix, call.rows)) return shared_pool().run_phases(counts, body);
  for (int phase = 0; phase < 2; ++phase) {
    for (int64_t i = 0; i < counts[phase]; ++i) body(phase, i);
  }
}

void gather(const Matrix& matrix, const int64_t* outputs, int64_t count, Rows to) {
  constexpr int64_t piece = 8;
  const auto body = [&](int64_t item) {
    const int64_t end = std::min(count, (item + 1) * piece);
    for (int64_t i = item * piece; i < end; ++i) matrix.copy_row(outputs[i], to.row(i));
  };
  shared_pool().run((count + piece - 1) / piece, body);
}

}  // namespace weft
