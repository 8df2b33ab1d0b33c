// Python binding of the small ops. Addresses and views, as in bind_matrix.cpp; the wrappers check.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "bind.hpp"
#include "ops.hpp"

namespace nb = nanobind;

namespace {

void angles(uintptr_t positions, int64_t tokens, uintptr_t frequencies, int64_t half, double scale,
            uintptr_t cos, uintptr_t sin) {
  const nb::gil_scoped_release released;
  const weft::Rope rope{reinterpret_cast<const float*>(frequencies), half,
                        static_cast<float>(scale)};
  weft::compute_angles(reinterpret_cast<const int64_t*>(positions), tokens, rope,
                       reinterpret_cast<float*>(cos), reinterpret_cast<float*>(sin));
}

void normalise(nb::tuple x, std::optional<nb::tuple> weight, bool plus_one, double epsilon,
               bool centred, uintptr_t out) {
  const weft::Tensor rows = tensor_of("x", x);
  weft::Tensor numbers;
  if (weight) numbers = tensor_of("weight", *weight);
  const nb::gil_scoped_release released;
  weft::normalise(rows, weight ? &numbers : nullptr, plus_one, static_cast<float>(epsilon),
                  centred, reinterpret_cast<char*>(out));
}

void square_sums(nb::tuple x, int64_t first, uintptr_t sums) {
  const weft::Tensor heads = tensor_of("x", x);
  const nb::gil_scoped_release released;
  weft::square_sums(heads, first, reinterpret_cast<float*>(sums));
}

void normalise_by(nb::tuple x, int64_t first, uintptr_t sums, nb::tuple weight, bool plus_one,
                  double epsilon, int64_t ranks, uintptr_t out) {
  const weft::Tensor heads = tensor_of("x", x), numbers = tensor_of("weight", weight);
  const nb::gil_scoped_release released;
  weft::normalise_by(heads, first, reinterpret_cast<const float*>(sums), numbers, plus_one,
                     static_cast<float>(epsilon), ranks, reinterpret_cast<char*>(out));
}

void rotate(nb::tuple x, uintptr_t cos, uintptr_t sin, int64_t half, uintptr_t out) {
  const weft::Tensor heads = tensor_of("x", x);
  const nb::gil_scoped_release released;
  weft::rotate(heads, reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin),
               half, reinterpret_cast<char*>(out));
}

void act_mul(nb::tuple gate_up, int activation, float limit, uintptr_t out) {
  const weft::Tensor rows = tensor_of("gate_up", gate_up);
  const nb::gil_scoped_release released;
  weft::act_mul(rows, static_cast<weft::Activation>(activation), limit,
                reinterpret_cast<char*>(out));
}

void activate(nb::tuple x, int activation, uintptr_t numbers, uintptr_t out) {
  const weft::Tensor rows = tensor_of("x", x);
  const nb::gil_scoped_release released;
  weft::activate(rows, static_cast<weft::Activation>(activation),
                 reinterpret_cast<const float*>(numbers), reinterpret_cast<char*>(out));
}

void gate(nb::tuple x, nb::tuple gates, int gating, uintptr_t out) {
  const weft::Tensor heads = tensor_of("x", x), factors = tensor_of("gates", gates);
  const nb::gil_scoped_release released;
  weft::gate(heads, factors, static_cast<weft::Gating>(gating), reinterpret_cast<char*>(out));
}

void gather_rows(nb::tuple table, uintptr_t ids, int64_t tokens, uintptr_t out) {
  const weft::Tensor rows = tensor_of("table", table);
  const nb::gil_scoped_release released;
  weft::gather_rows(rows, reinterpret_cast<const int64_t*>(ids), tokens,
                    reinterpret_cast<char*>(out));
}

void softcap(uintptr_t numbers, int64_t count, double cap) {
  const nb::gil_scoped_release released;
  weft::softcap(reinterpret_cast<float*>(numbers), count, static_cast<float>(cap));
}

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> span_of(const Numbers& numbers) {
  static_assert(sizeof(T) == sizeof(int64_t));
  return {reinterpret_cast<const T*>(numbers.data()), numbers.shape(0)};
}

void copy_blocks(Numbers sources, Numbers targets, int64_t block_bytes, Numbers from, Numbers to) {
  const nb::gil_scoped_release released;
  weft::copy_blocks(span_of<const char*>(sources), span_of<char*>(targets), block_bytes,
                    span_of<int64_t>(from), span_of<int64_t>(to));
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def("angles", &angles);
  m.def("normalise", &normalise, nb::arg("x"), nb::arg("weight").none(), nb::arg("plus_one"),
        nb::arg("epsilon"), nb::arg("centred"), nb::arg("out"));
  m.def("square_sums", &square_sums, nb::arg("x"), nb::arg("first"), nb::arg("sums"));
  m.def("normalise_by", &normalise_by, nb::arg("x"), nb::arg("first"), nb::arg("sums"),
        nb::arg("weight"), nb::arg("plus_one"), nb::arg("epsilon"), nb::arg("ranks"),
        nb::arg("out"));
  m.def("rotate", &rotate, nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("half"),
        nb::arg("out"));
  m.def("act_mul", &act_mul, nb::arg("gate_up"), nb::arg("activation"), nb::arg("limit"),
        nb::arg("out"));
  m.def("activate", &activate, nb::arg("x"), nb::arg("activation"), nb::arg("numbers"),
        nb::arg("out"));
  m.def("gate", &gate, nb::arg("x"), nb::arg("gates"), nb::arg("gating"), nb::arg("out"));
  m.def("gather_rows", &gather_rows, nb::arg("table"), nb::arg("ids"), nb::arg("tokens"),
        nb::arg("out"));
  m.def("copy_blocks", &copy_blocks, nb::arg("sources"), nb::arg("targets"), nb::arg("block_bytes"),
        nb::arg("from_"), nb::arg("to"));
  m.def("softcap", &softcap, nb::arg("numbers"), nb::arg("count"), nb::arg("cap"));
}
