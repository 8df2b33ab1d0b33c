// Python binding of the gated delta rule. Addresses and views, as in bind_matrix.cpp; the wrapper
// checks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bind.hpp"
#include "delta.hpp"

namespace nb = nanobind;

namespace {

using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;

std::span<const int32_t> span_of(const Ints& numbers) { return {numbers.data(), numbers.size()}; }

void advance_delta(nb::tuple shape, nb::tuple weights, double epsilon, bool sigmoid, double floor,
                   uintptr_t matrices, uintptr_t inputs, Ints bounds, Ints reads, Ints writes,
                   Ints marks, nb::tuple x, nb::tuple gates, uintptr_t out) {
  const auto size = [&](size_t i) { return nb::cast<int64_t>(shape[i]); };
  const auto floats = [](uintptr_t address) { return reinterpret_cast<float*>(address); };
  const auto weight = [&](size_t i) { return floats(nb::cast<uintptr_t>(weights[i])); };
  const weft::DeltaShape sizes{size(0), size(1), size(2), size(3), size(4),
                               nb::cast<bool>(shape[5])};
  const weft::DeltaWeights parameters{weight(0), weight(1), weight(2), weight(3),
                                      static_cast<float>(epsilon), sigmoid,
                                      static_cast<float>(floor)};
  const weft::DeltaStates states{floats(matrices), floats(inputs)};
  const weft::DeltaBatch batch{
      span_of(bounds), span_of(reads), span_of(writes),
      {reinterpret_cast<const weft::DeltaMark*>(marks.data()), marks.size() / 2}};
  const weft::Tensor rows = tensor_of("x", x), gate_rows = tensor_of("gates", gates);
  const nb::gil_scoped_release released;
  weft::advance_delta(sizes, parameters, states, batch, rows, gate_rows,
                      reinterpret_cast<char*>(out));
}

}  // namespace

void bind_delta(nb::module_& m) {
  m.def("advance_delta", &advance_delta, nb::arg("shape"), nb::arg("weights"), nb::arg("epsilon"),
        nb::arg("sigmoid"), nb::arg("floor"), nb::arg("matrices"), nb::arg("inputs"),
        nb::arg("bounds"), nb::arg("reads"), nb::arg("writes"), nb::arg("marks"), nb::arg("x"),
        nb::arg("gates"), nb::arg("out"));
}
