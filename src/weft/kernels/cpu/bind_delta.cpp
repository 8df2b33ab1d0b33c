// Python binding of the gated delta rule. Addresses and views, as in bind_matrix.cpp; the wrapper
// checks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bind.hpp"
#include "bind_states.hpp"
#include "delta.hpp"

namespace nb = nanobind;

namespace {

using weft::Delta;
using weft::Mixer;

std::span<const int32_t> span_of(const Ints& numbers) { return {numbers.data(), numbers.size()}; }

void make(Delta* place, nb::tuple shape, nb::tuple weights, double epsilon, bool sigmoid,
          double floor) {
  const auto size = [&](size_t i) { return nb::cast<int64_t>(shape[i]); };
  const auto weight = [&](size_t i) {
    return reinterpret_cast<const float*>(nb::cast<uintptr_t>(weights[i]));
  };
  new (place) Delta({size(0), size(1), size(2), size(3), size(4), nb::cast<bool>(shape[5]),
                     nb::cast<bool>(shape[6])},
                    {weight(0), weight(1), weight(2), weight(3), static_cast<float>(epsilon), sigmoid,
                     static_cast<float>(floor)});
}

void advance(const Mixer& mixer, uintptr_t matrices, uintptr_t inputs, Ints bounds, Ints reads,
             Ints writes, Ints marks, nb::tuple x, nb::tuple gates, uintptr_t out) {
  const weft::DeltaStates states{reinterpret_cast<float*>(matrices),
                                 reinterpret_cast<float*>(inputs)};
  const weft::DeltaBatch batch = state_batch_of(bounds, reads, writes, marks);
  const weft::Tensor rows = tensor_of("x", x), gate_rows = tensor_of("gates", gates);
  const nb::gil_scoped_release released;
  mixer.advance(states, batch, rows, gate_rows, reinterpret_cast<char*>(out));
}

}  // namespace

weft::DeltaBatch state_batch_of(const Ints& bounds, const Ints& reads, const Ints& writes,
                                const Ints& marks) {
  return {span_of(bounds), span_of(reads), span_of(writes),
          {reinterpret_cast<const weft::DeltaMark*>(marks.data()), marks.size() / 2}};
}

void bind_delta(nb::module_& m) {
  nb::class_<Mixer>(m, "Mixer").def("advance", &advance);
  nb::class_<Delta, Mixer>(m, "Delta").def("__init__", &make);
}
