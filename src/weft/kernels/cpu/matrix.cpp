// Packing, and products cut into items for the thread pool.

#include "matrix.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"
#include "lines.hpp"
#include "pool.hpp"

namespace weft {
namespace {

constexpr int64_t huge_page = 2 << 20, page = 4096;
// Rows of one item: a multiple of a tile's, few enough that their activations stay in the cache.
constexpr int64_t item_rows = 96;
constexpr int64_t cached_rows = 1 << 20;  // bytes of activations that stay in the second cache
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
  static constexpr int64_t alignment = page, run_bytes = 64 << 20;

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

void prefer_node(char* data, int64_t bytes, int node) {
  constexpr int preferred = 1, bits = 8 * sizeof(long), words = 16;
  unsigned long mask[words] = {};
  if (node >= bits * words) return;
  mask[node / bits] = 1ul << node % bits;
  syscall(SYS_mbind, data, bytes, preferred, mask, bits * words + 1, 0);
}

Arena& arena() {
  static Arena* const one = new Arena;  // never destroyed: matrices may be freed at any time
  return *one;
}

}  // namespace

namespace {

constexpr int64_t most_numbers = 1 << 28;  // of outputs and of inputs, so that sizes fit 64 bits

void check(const MatrixForm& form) {
  const bool floats = form.format == Format::f32 || form.format == Format::bf16;
  if (form.format < Format::f32 || form.format > Format::mx4) {
    throw std::invalid_argument("a matrix is of float32, bfloat16 or codes of 8 to 4 bits");
  }
  if (form.type != DType::f32 && form.type != DType::bf16) {
    throw std::invalid_argument("activations are float32 or bfloat16");
  }
  if (floats && (form.type == DType::f32) != (form.format == Format::f32)) {
    throw std::invalid_argument("a matrix of floats has the type of the activations");
  }
  if (form.outputs < 0 || form.inputs < 0 || form.outputs > most_numbers ||
      form.inputs > most_numbers) {
    throw std::invalid_argument("a matrix has at most 2^28 outputs and inputs");
  }
  if (form.gated && form.outputs % 2 != 0) {
    throw std::invalid_argument("a gated matrix has an even number of outputs");
  }
  const int64_t group = quant_of(form).group;
  if (!floats && (group < 16 || group > 256 || group % 16 != 0)) {
    throw std::invalid_argument("a quantised matrix has codes in groups of 16 to 256");
  }
  if (!floats && !(form.scale_type <= DType::f16)) {
    throw std::invalid_argument("scales are float32, bfloat16 or float16");
  }
  if (form.format == Format::int5 && group % 32 != 0) {
    throw std::invalid_argument("codes of 5 bits have groups of multiples of 32");
  }
  if (form.nested && (form.group == 0 || quant_nest % group != 0)) {
    throw std::invalid_argument("nested scales are of groups that divide 256");
  }
  if (form.nested && (form.inputs % quant_nest != 0 || form.zeros || form.format == Format::int8)) {
    throw std::invalid_argument("nested scales are of 256 inputs each, in 4 to 6 bits, without zeros");
  }
  const bool tabled = table_of(form.format) != CodeTable::none;
  if ((form.minimums && form.group == 0) || form.zeros + form.minimums + tabled > 1) {
    throw std::invalid_argument("codes have zeros, minimums of groups, or a table");
  }
}

}  // namespace

Matrix::Matrix(const MatrixForm& form, const char* mapped)
    : format_(form.format), outputs_(form.outputs), inputs_(form.inputs), gated_(form.gated),
      type_(form.type), quant_(quant_of(form)),
      column_scales_(is_quantised(form.format) && form.group == 0), mapped_(mapped != nullptr) {
  panels_ = panels_of(outputs_, gated_);
  if (is_quantised(format_)) {
    // Blocks have no scales if the columns have; only the address says so.
    float nothing;
    if (column_scales_) quant_.column_scales = &nothing;
    panel_bytes_ = quant_.panel_bytes();
  } else {
    const int64_t padded = format_ == Format::bf16 ? 2 * round_up(inputs_, 2) : 4 * inputs_;
    panel_bytes_ = panel_columns * padded;
  }
  // Nothing writes to mapped memory: `check_writable`.
  data_ = mapped_ ? std::shared_ptr<char>(std::shared_ptr<char>(), const_cast<char*>(mapped))
                  : arena().take(bytes());
  quant_.blocks = reinterpret_cast<uint8_t*>(data_.get());
  if (column_scales_) {
    quant_.column_scales = reinterpret_cast<float*>(data_.get() + panels_ * panel_bytes_);
  }
  if (!mapped_) place();
}

// Has fresh pages lie on the NUMA nodes of the threads whose shares they are. Who touches them first
// is no rule: threads help each other. A system that refuses does as it does otherwise.
void Matrix::place() {
  const std::vector<int> nodes = shared_pool().nodes();
  const auto threads = static_cast<int64_t>(nodes.size());
  const auto at = [&](int64_t thread) {
    return round_up(share_begin(panels_, thread, threads) * panel_bytes_, page);
  };
  for (int64_t first = 0, last; first < threads; first = last) {
    last = first + 1;
    while (last < threads && nodes[last] == nodes[first]) ++last;
    if (at(first) < at(last)) prefer_node(data_.get() + at(first), at(last) - at(first), nodes[first]);
  }
}

std::unique_ptr<Matrix> Matrix::quantised(const MatrixForm& form) {
  if (!is_quantised(form.format)) {
    throw std::invalid_argument("a quantised matrix has codes in groups of 16 to 256");
  }
  check(form);
  return std::unique_ptr<Matrix>(new Matrix(form));
}

std::unique_ptr<Matrix> Matrix::mapped(const MatrixForm& form, const char* data, int64_t bytes) {
  check(form);
  if (data == nullptr || reinterpret_cast<uintptr_t>(data) % matrix_alignment != 0) {
    throw std::invalid_argument("the bytes of a matrix must be aligned");
  }
  std::unique_ptr<Matrix> matrix(new Matrix(form, data));
  if (matrix->bytes() != bytes) {
    throw std::invalid_argument("a matrix [" + std::to_string(form.outputs) + ", " +
                                std::to_string(form.inputs) + "] has " +
                                std::to_string(matrix->bytes()) + " bytes, not " +
                                std::to_string(bytes));
  }
  return matrix;
}

MatrixForm Matrix::form() const {
  MatrixForm form{format_, outputs_, inputs_, gated_, type_};
  if (!is_quantised(format_)) return form;
  form.group = column_scales_ ? 0 : quant_.group;
  form.scale_type = quant_.scale_type;
  form.zeros = quant_.zeros;
  form.minimums = quant_.minimums;
  form.nested = quant_.nested;
  return form;
}

void Matrix::check_writable() const {
  if (mapped_) throw std::invalid_argument("a mapped matrix cannot be written");
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

void Matrix::write(int64_t first, int64_t rows, const QuantInput& from) {
  check_writable();
  const bool whole = quant_.column_scales != nullptr;
  const int64_t groups = whole ? 1 : quant_.groups();
  const int64_t scales = quant_.nested ? (inputs_ + quant_nest - 1) / quant_nest : groups;
  const int64_t wide = quant_.nested ? 2 : whole ? 4 : size_of(quant_.scale_type);
  const auto at = [](const auto* rows, int64_t offset) {
    return rows == nullptr ? nullptr : rows + offset;
  };
  each_row(rows, [&](int64_t row) {
    const auto [panel, column] = place_of(first + row);
    quant_.write_column(panel, column,
                        {from.values + row * inputs_, from.scales + row * scales * wide,
                         at(from.zeros, row * groups), at(from.minimums, row * scales * wide),
                         at(from.steps, row * groups), at(from.minimum_steps, row * groups)});
  });
}

void Matrix::write_rounded(int64_t first, const Tensor& weight) {
  check_writable();
  const bool whole = quant_.column_scales != nullptr;
  if ((format_ != Format::int8 && format_ != Format::int4) || quant_.nested || quant_.minimums) {
    throw std::invalid_argument("floats are rounded to int8 or int4");
  }
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
    quant_.write_column(panel, column, {values.data(), scales_here});
  });
}

std::unique_ptr<Matrix> Matrix::pack(std::span<const Tensor> pieces, bool gated) {
  std::vector<const char*> rows;
  for (const Tensor& piece : pieces) {
    if (piece.rank != 2 || (piece.type != DType::f32 && piece.type != DType::bf16)) {
      throw std::invalid_argument("a matrix is packed from two dimensions of float32 or bfloat16");
    }
    if (piece.shape[1] > 1 && piece.stride[1] != 1) {
      throw std::invalid_argument("the rows of a matrix must be contiguous");
    }
    if (piece.type != pieces[0].type || piece.shape[1] != pieces[0].shape[1]) {
      throw std::invalid_argument("the pieces of a matrix have one type and number of inputs");
    }
    const int64_t row_bytes = piece.stride[0] * size_of(piece.type);
    for (int64_t i = 0; i < piece.shape[0]; ++i) rows.push_back(piece.as<char>() + i * row_bytes);
  }
  if (pieces.empty()) throw std::invalid_argument("a matrix is packed from one piece at least");
  const DType type = pieces[0].type;
  const MatrixForm form{type == DType::f32 ? Format::f32 : Format::bf16,
                        static_cast<int64_t>(rows.size()), pieces[0].shape[1], gated, type};
  check(form);
  std::unique_ptr<Matrix> matrix(new Matrix(form));
  shared_pool().run(matrix->panels(), [&](int64_t i) { matrix->pack_panel(rows, i); });
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
// while it is near, and asks for the stretch after it: 64 rows are too many for the hardware to
// prefetch by itself. Fresh memory is zero: columns and inputs that do not exist are left alone.
void Matrix::pack_panel(std::span<const char* const> rows, int64_t panel) {
  constexpr int64_t stretch = 64;
  const int64_t size = size_of(type_);
  char* to = data_.get() + panel * panel_bytes_;
  for (int64_t first = 0; first < inputs_; first += stretch) {
    const int64_t count = std::min(stretch, inputs_ - first);
    for (int64_t column = 0; column < panel_columns; ++column) {
      const int64_t output = output_at(panel, column);
      if (output < 0) continue;
      const char* from = rows[output] + first * size;
      // A step is 4 bytes of a row in both formats.
      const int64_t bytes = count * size;
      char* place = to + first * size * panel_columns + column * 4;
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + bytes + at);
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

void Matrix::copy_row(int64_t output, char* to, float* numbers) const {
  const auto [panel, column] = place_of(output);
  if (is_quantised(format_)) {
    quant_.read_column(panel, column, numbers);
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

void Multiplication::round_row(int64_t row, const char* from) const {
  if (!rounds()) return;
  chosen_isa().quant->round_row(matrix->quant(), from, matrix->type(), row, rounded);
}

int64_t panels_of(int64_t outputs, bool gated) {
  const int64_t columns = gated ? gated_columns : panel_columns;
  return round_up(gated ? outputs / 2 : outputs, columns) / columns;
}

// A slice of a gated panel is one of the gates and one of the values.
ProductCut product_items(int64_t panels, bool gated, int64_t rows, int threads) {
  constexpr int64_t most_percent = 115;  // of the mean that the thread with the most items may have
  const int64_t whole = panels * ((rows + item_rows - 1) / item_rows);
  const int64_t slices = (gated ? gated_columns : panel_columns) / slice_columns;
  const auto most = [&](int64_t items) { return (items + threads - 1) / threads; };
  const bool uneven = 100 * most(whole) * threads > most_percent * whole;
  if (!uneven || most(whole * slices) >= slices * most(whole)) return {1, whole};
  return {slices, whole * slices};
}

void Multiplication::cut(int threads) {
  if (rounds() && chosen_isa().quant->multiply_slice == nullptr) return;
  slices = product_items(matrix->panels(), matrix->gated(), rows, threads).slices;
}

int64_t Multiplication::items() const {
  return matrix->panels() * slices * ((rows + item_rows - 1) / item_rows);
}

// Items of one panel follow each other, so that it is read from memory once, for as many rows as
// stay in a cache meanwhile.
Multiplication::Place Multiplication::place_of(int64_t item) const {
  const int64_t all = (rows + item_rows - 1) / item_rows, columns = matrix->panels() * slices;
  const int64_t bytes = std::max<int64_t>(1, matrix->inputs() * size_of(matrix->type()));  // of a row
  const int64_t most = std::max<int64_t>(1, cached_rows / (item_rows * bytes));
  const int64_t group = item / (columns * most), before = group * most;
  const int64_t blocks = std::min(most, all - before);
  const int64_t at = item - before * columns;
  return {at / blocks / slices, at / blocks % slices, before + at % blocks, at % blocks, blocks};
}

void Multiplication::run(const PanelKernels& kernels, int64_t item) const {
  alignas(64) float sums[item_rows * panel_columns];
  alignas(64) float bias_here[panel_columns] = {};
  const Place place = place_of(item);
  const int64_t first = place.block * item_rows, count = std::min(item_rows, rows - first);
  const int64_t panel = place.panel, slice = slices == 1 ? -1 : place.slice;
  const int64_t full = matrix->gated() ? gated_columns : panel_columns;
  const int64_t half = full / slices, offset = std::max<int64_t>(slice, 0) * half;
  const int64_t start = panel * full + offset;
  const int64_t end = matrix->gated() ? matrix->outputs() / 2 : matrix->outputs();
  const int64_t columns = std::min(half, end - start);
  if (columns <= 0) return;
  multiply(kernels, place, slice, first, count, sums);
  if (slice >= 0 && matrix->gated()) {
    multiply(kernels, place, slice + gated_columns / slice_columns, first, count, sums);
  }
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
  Finish finish{sums + offset, bias == nullptr ? nullptr : bias_here, nullptr, residual.stride,
                out.row(first) + start * size, out.stride, count, columns, limit};
  if (residual.data != nullptr) finish.residual = residual.row(first) + start * size;
  if (activated && matrix->gated()) return kernels.finish_gated(out_type, activation, finish);
  kernels.finish(out_type, finish);
  for (int64_t row = 0; activated && row < count; ++row) {
    char* const at = finish.out + row * finish.out_stride;
    kernels.gelu(out_type, at, at, columns);
  }
  if (!matrix->gated()) return;
  finish.sums += gated_columns;
  if (bias != nullptr) finish.bias += gated_columns;
  if (residual.data != nullptr) finish.residual += end * size;
  finish.out += end * size;
  kernels.finish(out_type, finish);
}

// The sums of a panel, or of one of its slices.
void Multiplication::multiply(const PanelKernels& kernels, const Place& place, int64_t slice,
                              int64_t first, int64_t count, float* sums) const {
  const int64_t panel = place.panel;
  if (!rounds()) {
    Product product{matrix->panel(panel), x.row(first), x.stride, count, matrix->inputs(), sums,
                    slice};
    if (slice < 0 && panel + 1 < matrix->panels()) {
      product.next_bytes = matrix->panel_bytes() / place.blocks;
      product.next = matrix->panel(panel + 1) + place.part * product.next_bytes;
    }
    return kernels.multiply[static_cast<int>(matrix->format())](product);
  }
  const QuantKernels& quant = *chosen_isa().quant;
  if (slice < 0) {
    return quant.multiply(matrix->quant(), panel, rounded, first, count, sums, panel_columns);
  }
  quant.multiply_slice(matrix->quant(), panel, slice, rounded, first, count, sums, panel_columns);
}

int64_t work_of(const Matrix& matrix, int64_t rows) { return matrix.bytes() * ((rows + 5) / 6); }

bool worth_sharing(int64_t work) { return work >= min_shared_work; }

void multiply(const Multiplication& given) {
  constexpr int64_t piece = 4;  // rows that are rounded by one item
  Multiplication call = given;
  const bool share = worth_sharing(work_of(*call.matrix, call.rows));
  if (share) call.cut(shared_pool().threads());
  thread_local Lines<char> memory;
  call.round_into(refit(memory, call.round_bytes()));
  const PanelKernels& kernels = *chosen_isa().panel;
  const int64_t counts[] = {call.rounds() ? (call.rows + piece - 1) / piece : 0, call.items()};
  const auto body = [&](int phase, int64_t item) {
    if (phase == 1) return call.run(kernels, item);
    const int64_t end = std::min(call.rows, (item + 1) * piece);
    for (int64_t row = item * piece; row < end; ++row) call.round_row(row);
  };
  if (share) return shared_pool().run_phases(counts, body);
  for (int phase = 0; phase < 2; ++phase) {
    for (int64_t i = 0; i < counts[phase]; ++i) body(phase, i);
  }
}

void gather(const Matrix& matrix, const int64_t* outputs, int64_t count, Rows to) {
  constexpr int64_t piece = 8;
  thread_local Lines<float> memory;
  const int places = shared_pool().threads();
  float* const numbers = refit(memory, places * matrix.inputs());
  shared_pool().run_places(places, (count + piece - 1) / piece, [&](int place, int64_t item) {
    const int64_t end = std::min(count, (item + 1) * piece);
    for (int64_t i = item * piece; i < end; ++i) {
      matrix.copy_row(outputs[i], to.row(i), numbers + place * matrix.inputs());
    }
  });
}

}  // namespace weft
