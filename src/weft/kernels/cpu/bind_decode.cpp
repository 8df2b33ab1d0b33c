// Python binding of the resident loop on a CPU.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "decode.hpp"
#include "ring/wake.hpp"

namespace nb = nanobind;

namespace {

using weft::Lease;

template <typename T, int rank>
using Array = nb::ndarray<T, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Numbers = Array<const T, 1>;

template <typename T>
weft::IdLists lists_of(const Numbers<T>& ids, const Numbers<int64_t>& from, size_t rows) {
  const auto* const bounds = from.data();
  if (from.shape(0) != rows + 1 || bounds[0] != 0 || !std::is_sorted(bounds, bounds + rows + 1) ||
      bounds[rows] != static_cast<int64_t>(ids.shape(0))) {
    throw nb::value_error("lists of ids do not fit their rows");
  }
  return {ids.data(), bounds};
}

// `weft::Edits` of some rows, and what it points to.
class RowEdits {
 public:
  RowEdits(Numbers<bool> edited, Numbers<bool> penalised, Array<const float, 2> penalties,
           Numbers<int64_t> num_prompt, Numbers<int64_t> biased, Numbers<int64_t> biased_from,
           Numbers<float> biases, Numbers<int64_t> delayed, Numbers<int64_t> delayed_from,
           Numbers<int64_t> min_tokens)
      : kept_(edited, penalised, penalties, num_prompt, biased, biased_from, biases, delayed,
              delayed_from, min_tokens),
        rows_(edited.shape(0)) {
    const bool fits = penalised.shape(0) == rows_ && penalties.shape(0) == rows_ &&
                      penalties.shape(1) == weft::penalty_names().size() &&
                      num_prompt.shape(0) == rows_ && biases.shape(0) == biased.shape(0) &&
                      min_tokens.shape(0) == rows_;
    if (!fits) throw nb::value_error("edits differ in their rows");
    native_ = {edited.data(), penalised.data(), penalties.data(), num_prompt.data(),
               lists_of(biased, biased_from, rows_), biases.data(),
               lists_of(delayed, delayed_from, rows_), min_tokens.data()};
  }

  const weft::Edits& native() const { return native_; }
  size_t rows() const { return rows_; }

 private:
  std::tuple<Numbers<bool>, Numbers<bool>, Array<const float, 2>, Numbers<int64_t>,
             Numbers<int64_t>, Numbers<int64_t>, Numbers<float>, Numbers<int64_t>,
             Numbers<int64_t>, Numbers<int64_t>>
      kept_;
  size_t rows_;
  weft::Edits native_;
};

// Calls Python for rows that choose there, and keeps what it raises.
class Caller {
 public:
  Caller(nb::object choose, size_t rows) : choose_(std::move(choose)), rows_(rows) {}

  bool operator()(float* logits, int64_t size, int64_t* tokens, bool* finite) {
    const nb::gil_scoped_acquire acquired;
    try {
      return nb::cast<bool>(choose_(seen<2>(logits, {rows_, static_cast<size_t>(size)}),
                                    seen<1>(tokens, {rows_}), seen<1>(finite, {rows_})));
    } catch (...) {
      raised_ = std::current_exception();
      return false;
    }
  }

  void check() const {
    if (raised_) std::rethrow_exception(raised_);
  }

 private:
  // An array of Python's over numbers of this side, for as long as the call lasts.
  template <int rank, typename T>
  static nb::object seen(T* numbers, const size_t (&shape)[rank]) {
    nb::ndarray<nb::numpy, T, nb::ndim<rank>> array(numbers, rank, shape);
    return nb::cast(array, nb::rv_policy::reference);
  }

  nb::object choose_;
  size_t rows_;
  std::exception_ptr raised_;
};

// Holds on to the arrays that it reads and writes; stack and head are kept by decode.py.
class DecodeLoop {
 public:
  DecodeLoop(const weft::Stack& stack, const weft::Matrix& head, double logit_scale,
             double softcap, Array<int32_t, 2> tokens, Array<int64_t, 1> length,
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
    model_.logit_scale = static_cast<float>(logit_scale);
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
                Numbers<int64_t> given, const RowEdits& edits, Numbers<bool> guest,
                Numbers<bool> withheld, nb::object choose, Numbers<int32_t> now,
                Array<const int32_t, 2> spare, Numbers<bool> kept, Numbers<int64_t> every,
                int64_t steps, int64_t limit_ns, int64_t unpublished_ns, int64_t step_ns) {
    const size_t count = rows.shape(0);
    const bool fits = ids.shape(0) == count && settings.shape(0) == count &&
                      seeds.shape(0) == count && counters.shape(0) == count &&
                      given.shape(0) == count && stop_from.shape(0) == count + 1 &&
                      edits.rows() == count && guest.shape(0) == count &&
                      withheld.shape(0) == count;
    const bool recurrent = now.shape(0) > 0;
    const size_t with_states = recurrent ? count : 0;
    const bool states_fit = now.shape(0) == with_states && spare.shape(0) == with_states &&
                            spare.shape(1) == weft::LeasedStates::most &&
                            kept.shape(0) == with_states && every.shape(0) == with_states;
    if (!fits || !states_fit) throw nb::value_error("the terms of a lease differ in their rows");
    Caller caller(choose, count);
    weft::Guests guests{guest.data(), nullptr};
    if (!choose.is_none()) guests.choose = std::ref(caller);
    const weft::LeaseTerms terms{.rows = {rows.data(), count},
                                 .ids = ids.data(),
                                 .settings = settings.data(),
                                 .seeds = seeds.data(),
                                 .counters = counters.data(),
                                 .edits = edits.native(),
                                 .guests = guests,
                                 .states = recurrent ? weft::LeasedStates{now.data(), spare.data(),
                                                                          kept.data(), every.data()}
                                                     : weft::LeasedStates{},
                                 .withheld = withheld.data(),
                                 .stop_ids = {stop_ids.data(), stop_ids.shape(0)},
                                 .stop_from = {stop_from.data(), stop_from.shape(0)},
                                 .given = given.data(),
                                 .steps = steps,
                                 .limit_ns = limit_ns,
                                 .unpublished_ns = unpublished_ns,
                                 .step_ns = step_ns};
    weft::LeaseResult result;
    {
      const nb::gil_scoped_release released;
      result = weft::decode(model_, terms, lease);
    }
    caller.check();
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

// An outlet that notes when which tokens were published, for measurements.
class Stamps {
 public:
  Stamps() { notes_.reserve(1 << 16); }

  nb::capsule outlet() { return nb::capsule(&outlet_, weft::resident::kOutlet); }

  nb::list take() {
    nb::list all;
    for (const auto& [at, ids] : notes_) all.append(nb::make_tuple(at, nb::cast(ids)));
    notes_.clear();
    return all;
  }

 private:
  static void note(void* self, const uint64_t* ids, const int64_t*, int64_t count) {
    static_cast<Stamps*>(self)->notes_.emplace_back(weft::ring::now_ns(),
                                                    std::vector(ids, ids + count));
  }

  std::vector<std::pair<int64_t, std::vector<uint64_t>>> notes_;
  const weft::resident::Outlet outlet_{this, [](void*) { return false; }, note};
};

const weft::resident::Outlet* outlet_of(const nb::capsule& capsule) {
  if (!capsule.name() || std::string(capsule.name()) != weft::resident::kOutlet) {
    throw nb::type_error("this is no outlet of a ring");
  }
  return static_cast<const weft::resident::Outlet*>(capsule.data());
}

void grant(Lease& lease, nb::object outlet) {
  lease.grant(outlet.is_none() ? nullptr : outlet_of(nb::cast<nb::capsule>(outlet)));
}

// An outlet for a loop in Python. Holds on to its capsule, but not to what that is of.
class OutletCaller {
 public:
  explicit OutletCaller(nb::capsule capsule) : outlet_(outlet_of(capsule)), capsule_(capsule) {}

  bool asked() const { return outlet_->asked(outlet_->self); }

  void publish(Numbers<uint64_t> ids, Numbers<int64_t> tokens) const {
    if (ids.shape(0) != tokens.shape(0)) throw nb::value_error("each token has one sequence");
    outlet_->publish(outlet_->self, ids.data(), tokens.data(),
                     static_cast<int64_t>(ids.shape(0)));
  }

 private:
  const weft::resident::Outlet* outlet_;
  nb::capsule capsule_;
};

}  // namespace

void bind_decode(nb::module_& m) {
  nb::class_<Lease>(m, "Lease")
      .def(nb::init<>())
      .def("grant", &grant, nb::arg("outlet").none())
      .def("recall", &Lease::recall);
  nb::class_<OutletCaller>(m, "Outlet")
      .def(nb::init<nb::capsule>(), nb::arg("capsule"))
      .def("asked", &OutletCaller::asked)
      .def("publish", &OutletCaller::publish, nb::arg("ids"), nb::arg("tokens"));
  nb::class_<Stamps>(m, "Stamps")
      .def(nb::init<>())
      .def_prop_ro("outlet", &Stamps::outlet)
      .def("take", &Stamps::take);
  nb::class_<RowEdits>(m, "RowEdits")
      .def(nb::init<Numbers<bool>, Numbers<bool>, Array<const float, 2>, Numbers<int64_t>,
                    Numbers<int64_t>, Numbers<int64_t>, Numbers<float>, Numbers<int64_t>,
                    Numbers<int64_t>, Numbers<int64_t>>(),
           nb::arg("edited"), nb::arg("penalised"), nb::arg("penalties"), nb::arg("num_prompt"),
           nb::arg("biased"), nb::arg("biased_from"), nb::arg("biases"), nb::arg("delayed"),
           nb::arg("delayed_from"), nb::arg("min_tokens"));
  nb::class_<DecodeLoop>(m, "DecodeLoop")
      .def(nb::init<const weft::Stack&, const weft::Matrix&, double, double,
                    Array<int32_t, 2>, Array<int64_t, 1>, std::vector<Array<int32_t, 2>>,
                    int64_t>(),
           nb::arg("stack"), nb::arg("head"), nb::arg("logit_scale"), nb::arg("softcap"),
           nb::arg("tokens"), nb::arg("length"), nb::arg("tables"), nb::arg("block_size"))
      .def("run", &DecodeLoop::run, nb::arg("lease"), nb::arg("rows"), nb::arg("ids"),
           nb::arg("settings"), nb::arg("seeds"), nb::arg("counters"), nb::arg("stop_ids"),
           nb::arg("stop_from"), nb::arg("given"), nb::arg("edits"), nb::arg("guest"),
           nb::arg("withheld"), nb::arg("choose").none(), nb::arg("now"), nb::arg("spare"),
           nb::arg("kept"), nb::arg("every"), nb::arg("steps"), nb::arg("limit_ns"),
           nb::arg("unpublished_ns"), nb::arg("step_ns"));
}
