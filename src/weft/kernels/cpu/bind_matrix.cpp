// Python binding of packed matrices. Memory arrives as addresses: matrix.py checks the tensors and
// keeps them alive during the call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include <vector>

#include "bind.hpp"
#include "heads.hpp"
#include "matrix.hpp"

namespace nb = nanobind;
using weft::Matrix;

namespace {

std::unique_ptr<Matrix> pack(nb::list views, bool gated) {
  std::vector<weft::Tensor> pieces;
  for (nb::handle view : views) pieces.push_back(tensor_of("weight", nb::cast<nb::tuple>(view)));
  const nb::gil_scoped_release released;
  return Matrix::pack(pieces, gated);
}

// The numbers of `form` below, in their order.
weft::MatrixForm form_of(nb::tuple numbers) {
  const auto at = [&](int i) { return nb::cast<int64_t>(nb::int_(numbers[i])); };
  return {static_cast<weft::Format>(at(0)), at(1),      at(2),      at(3) != 0,
          static_cast<weft::DType>(at(4)),  at(5),      static_cast<weft::DType>(at(6)),
          at(7) != 0,                       at(8) != 0, at(9) != 0};
}

std::unique_ptr<Matrix> quantised(nb::tuple form) { return Matrix::quantised(form_of(form)); }

// `owner` is whatever keeps the memory alive; it lives as long as the matrix.
std::unique_ptr<Matrix> mapped(nb::tuple form, uintptr_t data, int64_t bytes, nb::object) {
  return Matrix::mapped(form_of(form), reinterpret_cast<const char*>(data), bytes);
}

nb::tuple form(const Matrix& matrix) {
  const weft::MatrixForm form = matrix.form();
  return nb::make_tuple(static_cast<int>(form.format), form.outputs, form.inputs, form.gated,
                        static_cast<int>(form.type), form.group,
                        static_cast<int>(form.scale_type), form.zeros, form.minimums, form.nested);
}

void write_values(Matrix& matrix, int64_t first, int64_t rows, uintptr_t values, uintptr_t scales,
                  uintptr_t zeros, uintptr_t minimums, uintptr_t steps, uintptr_t minimum_steps) {
  const nb::gil_scoped_release released;
  matrix.write(first, rows,
               {reinterpret_cast<const uint8_t*>(values), reinterpret_cast<const char*>(scales),
                reinterpret_cast<const uint8_t*>(zeros), reinterpret_cast<const char*>(minimums),
                reinterpret_cast<const int8_t*>(steps),
                reinterpret_cast<const int8_t*>(minimum_steps)});
}

void write_rounded(Matrix& matrix, int64_t first, int64_t rows, uintptr_t data, int type,
                   int64_t stride) {
  weft::Tensor weight{"weight", reinterpret_cast<void*>(data), static_cast<weft::DType>(type), 2};
  weight.shape = {rows, matrix.inputs()};
  weight.stride = {stride, 1};
  const nb::gil_scoped_release released;
  matrix.write_rounded(first, weight);
}

void linear(const Matrix& matrix, uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t bias,
            uintptr_t out, int out_type) {
  const auto type = static_cast<weft::DType>(out_type);
  const int64_t x_bytes = x_stride * size_of(matrix.type());
  const nb::gil_scoped_release released;
  weft::multiply({.matrix = &matrix,
                  .bias = reinterpret_cast<const void*>(bias),
                  .x = {reinterpret_cast<char*>(x), x_bytes},
                  .out = {reinterpret_cast<char*>(out), matrix.outputs() * size_of(type)},
                  .rows = rows,
                  .out_type = type});
}

void heads(nb::list matrices, nb::tuple x, uintptr_t out) {
  std::vector<const Matrix*> found;
  for (nb::handle matrix : matrices) found.push_back(nb::cast<const Matrix*>(matrix));
  const weft::Tensor rows = tensor_of("x", x);
  const nb::gil_scoped_release released;
  weft::multiply_heads(found, rows, reinterpret_cast<char*>(out));
}

void gather(const Matrix& matrix, uintptr_t outputs, int64_t count, uintptr_t to) {
  const int64_t bytes = matrix.inputs() * size_of(matrix.type());
  const nb::gil_scoped_release released;
  weft::gather(matrix, reinterpret_cast<const int64_t*>(outputs), count,
               {reinterpret_cast<char*>(to), bytes});
}

}  // namespace

void bind_matrix(nb::module_& m) {
  m.attr("layout_version") = weft::layout_version;
  m.def("heads", &heads, nb::arg("matrices"), nb::arg("x"), nb::arg("out"));
  nb::class_<Matrix>(m, "Matrix")
      .def_static("pack", &pack, nb::arg("pieces"), nb::arg("gated"))
      .def_static("quantised", &quantised, nb::arg("form"))
      .def_static("mapped", &mapped, nb::arg("form"), nb::arg("data"), nb::arg("bytes"),
                  nb::arg("owner"), nb::keep_alive<0, 4>())
      .def_prop_ro("form", &form)
      .def_prop_ro("data",
                   [](const Matrix& matrix) { return reinterpret_cast<uintptr_t>(matrix.data()); })
      .def("write", &write_values, nb::arg("first"), nb::arg("rows"), nb::arg("values"),
           nb::arg("scales"), nb::arg("zeros"), nb::arg("minimums") = 0, nb::arg("steps") = 0,
           nb::arg("minimum_steps") = 0)
      .def("write_rounded", &write_rounded, nb::arg("first"), nb::arg("rows"), nb::arg("data"),
           nb::arg("type"), nb::arg("stride"))
      .def_prop_ro("bytes", &Matrix::bytes)
      .def_prop_ro("format", [](const Matrix& matrix) { return static_cast<int>(matrix.format()); })
      .def("linear", &linear, nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"), nb::arg("bias"),
           nb::arg("out"), nb::arg("out_type"))
      .def("gather", &gather, nb::arg("outputs"), nb::arg("count"), nb::arg("to"));
}
