// Python binding of gated convolutions and Mamba-2. Addresses and views, as in bind_matrix.cpp; the
// wrappers check.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bind.hpp"
#include "mixers.hpp"

namespace nb = nanobind;

namespace {

using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;

std::span<const int32_t> span_of(const Ints& numbers) { return {numbers.data(), numbers.size()}; }

weft::DeltaBatch batch_of(const Ints& bounds, const Ints& reads, const Ints& writes,
                          const Ints& marks) {
  return {span_of(bounds), span_of(reads), span_of(writes),
          {reinterpret_cast<const weft::DeltaMark*>(marks.data()), marks.size() / 2}};
}

float* floats(uintptr_t address) { return reinterpret_cast<float*>(address); }

float* weight(const nb::tuple& weights, size_t i) {
  return floats(nb::cast<uintptr_t>(weights[i]));
}

void advance_conv(nb::tuple shape, nb::tuple weights, uintptr_t inputs, Ints bounds, Ints reads,
                  Ints writes, Ints marks, nb::tuple x, uintptr_t out) {
  const weft::ConvShape sizes{nb::cast<int64_t>(shape[0]), nb::cast<int64_t>(shape[1])};
  const weft::ConvWeights parameters{weight(weights, 0), weight(weights, 1)};
  const weft::DeltaBatch batch = batch_of(bounds, reads, writes, marks);
  const weft::Tensor rows = tensor_of("x", x);
  const nb::gil_scoped_release released;
  weft::advance_conv(sizes, parameters, floats(inputs), batch, rows, reinterpret_cast<char*>(out));
}

void advance_mamba2(nb::tuple shape, nb::tuple weights, nb::tuple numbers, uintptr_t matrices,
                    uintptr_t inputs, Ints bounds, Ints reads, Ints writes, Ints marks,
                    nb::tuple x, nb::tuple gates, uintptr_t out) {
  const auto size = [&](size_t i) { return nb::cast<int64_t>(shape[i]); };
  const auto number = [&](size_t i) { return static_cast<float>(nb::cast<double>(numbers[i])); };
  const weft::Mamba2Shape sizes{size(0), size(1), size(2), size(3), size(4)};
  const weft::Mamba2Weights parameters{weight(weights, 0), weight(weights, 1), weight(weights, 2),
                                       weight(weights, 3), weight(weights, 4), weight(weights, 5),
                                       number(0), number(1), number(2)};
  const weft::DeltaStates states{floats(matrices), floats(inputs)};
  const weft::DeltaBatch batch = batch_of(bounds, reads, writes, marks);
  const weft::Tensor rows = tensor_of("x", x), gate_rows = tensor_of("gates", gates);
  const nb::gil_scoped_release released;
  weft::advance_mamba2(sizes, parameters, states, batch, rows, gate_rows,
                       reinterpret_cast<char*>(out));
}

}  // namespace

void bind_mixers(nb::module_& m) {
  m.def("advance_conv", &advance_conv, nb::arg("shape"), nb::arg("weights"), nb::arg("inputs"),
        nb::arg("bounds"), nb::arg("reads"), nb::arg("writes"), nb::arg("marks"), nb::arg("x"),
        nb::arg("out"));
  m.def("advance_mamba2", &advance_mamba2, nb::arg("shape"), nb::arg("weights"),
        nb::arg("numbers"), nb::arg("matrices"), nb::arg("inputs"), nb::arg("bounds"),
        nb::arg("reads"), nb::arg("writes"), nb::arg("marks"), nb::arg("x"), nb::arg("gates"),
        nb::arg("out"));
}
