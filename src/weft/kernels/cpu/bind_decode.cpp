// Python binding of the resident loop on a CPU.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "bind.hpp"
#include "decode.hpp"

namespace nb = nanobind;

namespace {

using weft::Lease;

template <typename T, int rank>
using Array = nb::ndarray<T, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Numbers = Array<const T, 1>;

// Holds on to the arrays that it reads and writes; stack and head are kept by decode.py.
class DecodeLoop {
 public:
  DecodeLoop(const weft::Stack& stack, const weft::Matrix& head, double softcap,
             Array<int32_t, 2> tokens, Array<int64_t, 1> length,
             std::vector<Array<int32_t, 2>> tables, int64_t block_size)
      : tokens_(tokens), length_(length), tables_(std::move(tables)) {
    bool fits = length.shape(0) == tokens.shape(0) && block_size > 0 && !stack.layers.empty();
    for (const auto& table : tables_) {
      fits &= table.shape(0) == tokens.shape(0);
      model_.groups.push_back({table.data(), static_cast<int64_t>(table.shape(1))});
    }
    for (const weft::StackLayer& layer : stack.layers) {
      fits &= layer.group >= 0 && layer.group < static_cast<int64_t>(tables_.size());
    }
    if (!fits) throw nb::value_error("rows, lengths and block tables do not fit each other");
    if (head.inputs() != stack.layers.front().layer->qkv->inputs() ||
        head.type() != stack.layers.front().layer->type()) {
      throw nb::value_error("the output head does not fit the layers");
    }
    model_.stack = &stack;
    model_.head = &head;
    model_.softcap = static_cast<float>(softcap);
    model_.tokens = tokens.data();
    model_.max_rows = static_cast<int64_t>(tokens.shape(0));
    model_.max_tokens = static_cast<int64_t>(tokens.shape(1));
    model_.length = length.data();
    model_.block_size = block_size;
  }

  // Tokens [steps + 1, rows] as lists, whether those of the last step mean something, whether those
  // of the others are published, and why there are no more steps.
  nb::tuple run(Lease& lease, Numbers<int64_t> rows, Numbers<uint64_t> ids,
                Array<const double, 2> settings, Numbers<int64_t> seeds,
                Numbers<int64_t> counters, Numbers<int64_t> stop_ids, Numbers<int64_t> stop_from,
                Numbers<int64_t> given, int64_t steps, int64_t limit_ns, int64_t unpublished_ns) {
    const size_t count = rows.shape(0);
    const bool fits = ids.shape(0) == count && settings.shape(0) == count &&
                      seeds.shape(0) == count && counters.shape(0) == count &&
                      given.shape(0) == count && stop_from.shape(0) == count + 1;
    if (!fits) throw nb::value_error("the terms of a lease differ in their rows");
    const weft::LeaseTerms terms{.rows = {rows.data(), count},
                                 .ids = ids.data(),
                                 .settings = settings.data(),
                                 .seeds = seeds.data(),
                                 .counters = counters.data(),
                                 .stop_ids = {stop_ids.data(), stop_ids.shape(0)},
                                 .stop_from = {stop_from.data(), stop_from.shape(0)},
                                 .given = given.data(),
                                 .steps = steps,
                                 .limit_ns = limit_ns,
                                 .unpublished_ns = unpublished_ns};
    weft::LeaseResult result;
    {
      const nb::gil_scoped_release released;
      result = weft::decode(model_, terms, lease);
    }
    nb::list all, finite;
    auto token = result.given.begin();
    for (int64_t step = 0; step <= result.steps; ++step) {
      nb::list one;
      for (size_t i = 0; i < count; ++i) one.append(*token++);
      all.append(one);
    }
    for (const char good : result.finite) finite.append(good != 0);
    return nb::make_tuple(all, finite, result.published, static_cast<int>(result.end));
  }

 private:
  weft::DecodeModel model_;
  Array<int32_t, 2> tokens_;
  Array<int64_t, 1> length_;
  std::vector<Array<int32_t, 2>> tables_;
};

void grant(Lease& lease, nb::object outlet) {
  if (outlet.is_none()) return lease.grant(nullptr);
  const auto capsule = nb::cast<nb::capsule>(outlet);
  if (!capsule.name() || std::string(capsule.name()) != weft::resident::kOutlet) {
    throw nb::type_error("this is no outlet of a ring");
  }
  lease.grant(static_cast<const weft::resident::Outlet*>(capsule.data()));
}

}  // namespace

void bind_decode(nb::module_& m) {
  nb::class_<Lease>(m, "Lease")
      .def(nb::init<>())
      .def("grant", &grant, nb::arg("outlet").none())
      .def("recall", &Lease::recall);
  nb::class_<DecodeLoop>(m, "DecodeLoop")
      .def(nb::init<const weft::Stack&, const weft::Matrix&, double, Array<int32_t, 2>,
                    Array<int64_t, 1>, std::vector<Array<int32_t, 2>>, int64_t>(),
           nb::arg("stack"), nb::arg("head"), nb::arg("softcap"), nb::arg("tokens"),
           nb::arg("length"), nb::arg("tables"), nb::arg("block_size"))
      .def("run", &DecodeLoop::run);
}
