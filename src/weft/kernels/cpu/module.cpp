// Python binding. Tensors arrive as (pointer, type code, shape, strides): ten of them come with
// every layer of every step, and this costs a fifth of a DLPack exchange. attention.py makes the
// tuples and keeps the tensors alive during the call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <string>
#include <vector>

#include "attention.hpp"
#include "bind.hpp"
#include "dispatch.hpp"
#include "matrix.hpp"
#include "pool.hpp"
#include "reader.hpp"

namespace nb = nanobind;

weft::Tensor tensor_of(const char* name, nb::tuple view) {
  weft::Tensor tensor;
  const auto shape = nb::cast<nb::tuple>(view[2]), stride = nb::cast<nb::tuple>(view[3]);
  if (shape.size() > weft::Tensor::max_rank) {
    throw nb::value_error((std::string(name) + " has more than 4 dimensions").c_str());
  }
  tensor.name = name;
  tensor.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(view[0]));
  tensor.type = static_cast<weft::DType>(nb::cast<int>(view[1]));
  tensor.rank = static_cast<int>(shape.size());
  for (int i = 0; i < tensor.rank; ++i) {
    tensor.shape[i] = nb::cast<int64_t>(shape[i]);
    tensor.stride[i] = nb::cast<int64_t>(stride[i]);
  }
  return tensor;
}

namespace {

std::optional<weft::Tensor> maybe_tensor_of(const char* name, std::optional<nb::tuple> view) {
  if (!view) return std::nullopt;
  return tensor_of(name, *view);
}

void paged_attention(nb::tuple out, nb::tuple q, std::optional<nb::tuple> k,
                     std::optional<nb::tuple> v, nb::tuple k_cache, nb::tuple v_cache,
                     nb::tuple block_tables, nb::tuple query_start, nb::tuple seq_lens,
                     nb::tuple slot_mapping, int64_t block_size, double scale, int64_t window,
                     double softcap, std::optional<nb::tuple> sinks, bool causal) {
  const weft::Attention call{
      .out = tensor_of("out", out),
      .q = tensor_of("q", q),
      .k = maybe_tensor_of("k", k),
      .v = maybe_tensor_of("v", v),
      .k_cache = tensor_of("k_cache", k_cache),
      .v_cache = tensor_of("v_cache", v_cache),
      .block_tables = tensor_of("block_tables", block_tables),
      .query_start = tensor_of("query_start", query_start),
      .seq_lens = tensor_of("seq_lens", seq_lens),
      .slot_mapping = tensor_of("slot_mapping", slot_mapping),
      .block_size = block_size,
      .window = window,
      .causal = causal,
      .scale = static_cast<float>(scale),
      .softcap = static_cast<float>(softcap),
      .sinks = maybe_tensor_of("sinks", sinks),
  };
  const nb::gil_scoped_release released;
  weft::paged_attention(call);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a process that ends by a signal has no time to tidy up
  m.def("paged_attention", &paged_attention, nb::arg("out"), nb::arg("q"), nb::arg("k").none(),
        nb::arg("v").none(), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("block_tables"),
        nb::arg("query_start"), nb::arg("seq_lens"), nb::arg("slot_mapping"), nb::arg("block_size"),
        nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("sinks").none(),
        nb::arg("causal"));
  m.def("read_all", [](uintptr_t data, int64_t words) {
    return weft::read_all({reinterpret_cast<const uint64_t*>(data), static_cast<size_t>(words)});
  }, nb::arg("data"), nb::arg("words"), nb::call_guard<nb::gil_scoped_release>());
  m.def("multiply_adds", [](int format, int64_t rounds) {
    const auto run = weft::chosen_isa().rate->multiply_adds[format];
    std::atomic<int64_t> operations{0};
    weft::Pool& pool = weft::shared_pool();
    pool.run(pool.threads(), [&](int64_t) { operations += run(rounds); });
    return operations.load();
  }, nb::arg("format"), nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>());
  m.def("meet", [](int phases, int64_t rounds, int64_t work) {
    if (phases < 1 || phases > weft::Pool::max_phases) throw nb::value_error("a job has 1 to 8 phases");
    weft::Pool& pool = weft::shared_pool();
    const std::vector<int64_t> counts(phases, pool.threads());
    const auto add = weft::chosen_isa().rate->multiply_adds[0];
    for (; rounds > 0; --rounds) pool.run_phases(counts, [&](int, int64_t) { add(work); });
  }, nb::arg("phases"), nb::arg("rounds"), nb::arg("work"), nb::call_guard<nb::gil_scoped_release>());
  m.def("threads", &weft::attention_threads);
  m.def("set_threads", &weft::set_attention_threads, nb::arg("threads"),
        nb::arg("cpus"), nb::arg("nodes"), nb::call_guard<nb::gil_scoped_release>());
  m.def("product_items", [](int64_t outputs, bool gated, int64_t rows, int threads) {
    return weft::product_items(weft::panels_of(outputs, gated), gated, rows, threads).items;
  }, nb::arg("outputs"), nb::arg("gated"), nb::arg("rows"), nb::arg("threads"));
  m.def("share_begin", &weft::share_begin, nb::arg("items"), nb::arg("share"), nb::arg("shares"));
  m.def("isa", [] { return weft::chosen_isa().name; });
  m.def("isas", [] {
    nb::list names;
    for (const weft::Isa* isa : weft::runnable_isas()) names.append(isa->name);
    return names;
  });
  m.def("machine_isas", [] {
    nb::list names;
    for (const std::string_view name : weft::machine_isas()) {
      names.append(nb::str(name.data(), name.size()));
    }
    return names;
  });
  m.def("use_isa", [](const std::string& isa) {
    if (weft::choose_isa(isa)) return;
    throw nb::value_error(("this machine cannot run instruction set '" + isa + "'").c_str());
  }, nb::arg("isa"));
  bind_decode(m);
  bind_delta(m);
  bind_expert_server(m);
  bind_host(m);
  bind_matrix(m);
  bind_mixers(m);
  bind_ops(m);
  bind_step(m);
  bind_layer(m);
  bind_stack(m);
}
