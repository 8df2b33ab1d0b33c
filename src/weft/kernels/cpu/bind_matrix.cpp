// Python binding of packed matrices. Memory arrives as addresses: matrix.py checks the tensors and
// keeps them alive during the call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include <vector>

#include "bind.hpp"
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

weft::MatrixForm form_of(int format, int64_t outputs, int64_t inputs, bool gated, int type,
                         int64_t group, int scale_type, bool zeros) {
  return {static_cast<weft::Format>(format), outputs, inputs, gated,
          static_cast<weft::DType>(type), group, static_cast<weft::DType>(scale_type), zeros};
}

std::unique_ptr<Matrix> quantised(int format, int64_t outputs, int64_t inputs, bool gated,
                                  int type, int64_t group, int scale_type, bool zeros) {
  return Matrix::quantised(
      form_of(format, outputs, inputs, gated, type, group, scale_type, zeros));
}

// `owner` is whatever keeps the memory alive; it lives as long as the matrix.
std::unique_ptr<Matrix> mapped(int format, int64_t outputs, int64_t inputs, bool gated, int type,
                               int64_t group, int scale_type, bool zeros, uintptr_t data,
                               int64_t bytes, nb::object) {
  return Matrix::mapped(form_of(format, outputs, inputs, gated, type, group, scale_type, zeros),
                        reinterpret_cast<const char*>(data), bytes);
}

nb::tuple form(const Matrix& matrix) {
  const weft::MatrixForm form = matrix.form();
  return nb::make_tuple(static_cast<int>(form.format), form.outputs, form.inputs, form.gated,
                        static_cast<int>(form.type), form.group,
                        static_cast<int>(form.scale_type), form.zeros);
}

void write_values(Matrix& matrix, int64_t first, int64_t rows, uintptr_t values, uintptr_t scales,
                  uintptr_t zeros) {
  const nb::gil_scoped_release released;
  matrix.write(first, rows, reinterpret_cast<const uint8_t*>(values),
               reinterpret_cast<const char*>(scales), reinterpret_cast<const uint8_t*>(zeros));
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

void gather(const Matrix& matrix, uintptr_t outputs, int64_t count, uintptr_t to) {
  const int64_t bytes = matrix.inputs() * size_of(matrix.type());
  const nb::gil_scoped_release released;
  weft::gather(matrix, reinterpret_cast<const int64_t*>(outputs), count,
               {reinterpret_cast<char*>(to), bytes});
}

}  // namespace

void bind_matrix(nb::module_& m) {
  m.attr("layout_version") = weft::layout_version;
  nb::class_<Matrix>(m, "Matrix")
      .def_static("pack", &pack, nb::arg("pieces"), nb::arg("gated"))
      .def_static("quantised", &quantised, nb::arg("format"), nb::arg("outputs"),
                  nb::arg("inputs"), nb::arg("gated"), nb::arg("type"), nb::arg("group"),
                  nb::arg("scale_type"), nb::arg("zeros"))
      .def_static("mapped", &mapped, nb::arg("format"), nb::arg("outputs"), nb::arg("inputs"),
                  nb::arg("gated"), nb::arg("type"), nb::arg("group"), nb::arg("scale_type"),
                  nb::arg("zeros"), nb::arg("data"), nb::arg("bytes"), nb::arg("owner"),
                  nb::keep_alive<0, 11>())
      .def_prop_ro("form", &form)
      .def_prop_ro("data",
                   [](const Matrix& matrix) { return reinterpret_cast<uintptr_t>(matrix.data()); })
      .def("write", &write_values, nb::arg("first"), nb::arg("rows"), nb::arg("values"),
           nb::arg("scales"), nb::arg("zeros"))
      .def("write_rounded", &write_rounded, nb::arg("first"), nb::arg("rows"), nb::arg("data"),
           nb::arg("type"), nb::arg("stride"))
      .def_prop_ro("bytes", &Matrix::bytes)
      .def_prop_ro("format", [](const Matrix& matrix) { return static_cast<int>(matrix.format()); })
      .def("linear", &linear, nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"), nb::arg("bias"),
           nb::arg("out"), nb::arg("out_type"))
      .def("gather", &gather, nb::arg("outputs"), nb::arg("count"), nb::arg("to"));
}
