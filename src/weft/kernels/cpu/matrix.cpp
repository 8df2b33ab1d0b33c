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

Matrix::Matrix(Format format, int64_t outputs, int64_t inputs, bool gated)
    : format_(format), outputs_(outputs), inputs_(inputs), gated_(gated) {
  const int64_t half = gated ? outputs / 2 : outputs;
  panels_ = round_up(half, gated ? gated_columns : panel_columns) /
            (gated ? gated_columns : panel_columns);
  panel_bytes_ = panel_columns * (format == Format::bf16 ? 2 * round_up(inputs, 2) : 4 * inputs);
  data_ = arena().take(bytes());
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
  std::unique_ptr<Matrix> matrix(new Matrix(format, weight.shape[0], weight.shape[1], gated));
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

void Matrix::copy_row(int64_t output, char* to) const {
  int64_t panel = output / panel_columns, column = output % panel_columns;
  if (gated_) {
    const int64_t half = outputs_ / 2, place = output % half;
    panel = place / gated_columns;
    column = place % gated_columns + (output < half ? 0 : gated_columns);
  }
  const char* from = this->panel(panel) + column * 4;
  const int64_t bytes = inputs_ * size_of(type());
  int64_t done = 0;
  for (; done + 4 <= bytes; done += 4) std::memcpy(to + done, from + done * panel_columns, 4);
  std::memcpy(to + done, from + done * panel_columns, bytes - done);
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
  kernels.multiply[static_cast<int>(matrix->format())](
      {matrix->panel(panel), x.row(first), x.stride, count, matrix->inputs(), sums});
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

void multiply(const Multiplication& call) {
  const PanelKernels& kernels = *chosen_isa().panel;
  const auto body = [&](int64_t item) { call.run(kernels, item); };
  if (worth_sharing(*call.matrix, call.rows)) return shared_pool().run(call.items(), body);
  for (int64_t i = 0; i < call.items(); ++i) body(i);
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
