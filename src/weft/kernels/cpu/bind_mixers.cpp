// Python binding of gated convolutions and Mamba-2. Addresses, as in bind_matrix.cpp; the wrappers
// check.
#include <nanobind/nanobind.h>

#include "mixers.hpp"

namespace nb = nanobind;

namespace {

using weft::Conv;
using weft::Mamba2;

const float* weight(const nb::tuple& weights, size_t i) {
  return reinterpret_cast<const float*>(nb::cast<uintptr_t>(weights[i]));
}

void make_conv(Conv* place, nb::tuple shape, nb::tuple weights) {
  new (place) Conv({nb::cast<int64_t>(shape[0]), nb::cast<int64_t>(shape[1])},
                   {weight(weights, 0), weight(weights, 1)});
}

void make_mamba2(Mamba2* place, nb::tuple shape, nb::tuple weights, nb::tuple numbers) {
  const auto size = [&](size_t i) { return nb::cast<int64_t>(shape[i]); };
  const auto number = [&](size_t i) { return static_cast<float>(nb::cast<double>(numbers[i])); };
  new (place) Mamba2({size(0), size(1), size(2), size(3), size(4)},
                     {weight(weights, 0), weight(weights, 1), weight(weights, 2),
                      weight(weights, 3), weight(weights, 4), weight(weights, 5), number(0),
                      number(1), number(2)});
}

}  // namespace

void bind_mixers(nb::module_& m) {
  nb::class_<Conv, weft::Mixer>(m, "Conv").def("__init__", &make_conv);
  nb::class_<Mamba2, weft::Mixer>(m, "Mamba2").def("__init__", &make_mamba2);
}
