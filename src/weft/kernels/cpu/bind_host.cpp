// Python binding of the host worker and its mailbox. host.py checks layers, and keeps memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "courier.hpp"
#include "host.hpp"

namespace nb = nanobind;
using weft::Courier;
using weft::HostLayer;
using weft::HostWorker;
using weft::Mailbox;
using weft::MailboxClient;

namespace {

using Numbers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Orders = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Room = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Array>
auto span_of(const Array& array) { return std::span(array.data(), array.size()); }

std::span<std::byte> memory_at(uintptr_t address, uint64_t bytes) {
  return {reinterpret_cast<std::byte*>(address), bytes};
}

// slots, layers, groups, blocks of a table, numbers of queries and of keys, type code
weft::MailboxSizes sizes_of(const std::vector<uint32_t>& sizes) {
  if (sizes.size() != 7) throw nb::value_error("a mailbox has 7 sizes");
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
}

std::vector<uint64_t> counters_of(const Mailbox& mailbox) {
  std::vector<uint64_t> counters;
  const auto append = [&](auto&... words) {
    (counters.push_back(std::atomic_ref(words).load(std::memory_order_relaxed)), ...);
  };
  auto& [submitted, taken, put_back, aborted] = mailbox.header().client_counters;
  auto& [calls, jobs, failed, busy, round_trip, longest] = mailbox.header().worker_counters;
  append(submitted, taken, put_back, aborted, calls, jobs, failed, busy, round_trip, longest);
  return counters;
}

void states(const Mailbox& mailbox, Room room) {
  for (uint32_t slot = 0; slot < std::min<size_t>(room.size(), mailbox.sizes().slots); ++slot) {
    room.data()[slot] = static_cast<int32_t>(weft::job::look(mailbox.word(slot)).state);
  }
}

uint32_t waiting(const Mailbox& mailbox) {
  uint32_t count = 0;
  for (uint32_t slot = 0; slot < mailbox.sizes().slots; ++slot) {
    const bool submitted = weft::job::look(mailbox.word(slot)).state == weft::job::State::Submitted;
    count += submitted && mailbox.place_of(slot) == 0;
  }
  return count;
}

void begin(MailboxClient& client, Numbers slots, Numbers contexts, nb::list tables,
           std::optional<Numbers> places) {
  std::vector<weft::Tensor> views;
  for (const auto view : tables) {
    views.push_back(tensor_of("block_tables", nb::cast<nb::tuple>(view)));
  }
  client.begin(span_of(slots), span_of(contexts), views,
               places ? span_of(*places) : std::span<const int32_t>());
}

void submit(MailboxClient& client, Numbers slots, uint32_t layer, nb::tuple q,
            std::optional<nb::tuple> k, std::optional<nb::tuple> v) {
  const weft::Tensor queries = tensor_of("q", q);
  std::optional<weft::Tensor> keys, values;
  if (k) keys = tensor_of("k", *k);
  if (v) values = tensor_of("v", *v);
  const nb::gil_scoped_release released;
  client.submit(span_of(slots), layer, queries, keys ? &*keys : nullptr,
                values ? &*values : nullptr);
}

void take(MailboxClient& client, Numbers slots, uint32_t layer, nb::tuple out) {
  const weft::Tensor results = tensor_of("out", out);
  const nb::gil_scoped_release released;
  client.take(span_of(slots), layer, results);
}

std::vector<std::pair<int32_t, uint32_t>> failed(const MailboxClient& client) {
  std::vector<std::pair<int32_t, uint32_t>> found;
  for (const auto& [slot, fault] : client.failed()) {
    found.emplace_back(slot, static_cast<uint32_t>(fault));
  }
  return found;
}

// The claimed slots and their orders; the layer.
std::pair<size_t, uint32_t> claim(Courier& courier, Room slots, Orders orders) {
  uint32_t layer = 0;
  const size_t count = courier.claim(span_of(slots), span_of(orders), layer);
  return {count, layer};
}

std::vector<uint64_t> layout_of(const Mailbox& mailbox) {
  const auto [records, tables, qkv, k, v, qkv_bytes, out, out_bytes] = mailbox.layout();
  return {records, tables, qkv, k, v, qkv_bytes, out, out_bytes};
}

// k_cache, v_cache, heads, head size, group, writes, scale, window, softcap, sinks
HostLayer layer_of(nb::tuple parts) {
  return {.k_cache = tensor_of("k_cache", nb::cast<nb::tuple>(parts[0])),
          .v_cache = tensor_of("v_cache", nb::cast<nb::tuple>(parts[1])),
          .heads = nb::cast<int64_t>(parts[2]),
          .head_size = nb::cast<int64_t>(parts[3]),
          .group = nb::cast<int64_t>(parts[4]),
          .writes = nb::cast<bool>(parts[5]),
          .scale = nb::cast<float>(parts[6]),
          .window = nb::cast<int64_t>(parts[7]),
          .softcap = nb::cast<float>(parts[8]),
          .sinks = nb::cast<std::vector<float>>(parts[9])};
}

}  // namespace

void bind_host(nb::module_& m) {
  nb::class_<Mailbox>(m, "Mailbox")
      .def_static("bytes_of", [](const std::vector<uint32_t>& sizes) {
        return Mailbox::bytes_of(sizes_of(sizes));
      })
      .def_static("format", [](uintptr_t address, uint64_t bytes,
                               const std::vector<uint32_t>& sizes) {
        Mailbox::format(memory_at(address, bytes), sizes_of(sizes));
      })
      .def("__init__", [](Mailbox* self, uintptr_t address, uint64_t bytes) {
        new (self) Mailbox(memory_at(address, bytes));
      })
      .def_prop_ro("worker", [](const Mailbox& mailbox) {
        return weft::ring::load(mailbox.header().worker);
      })
      .def_prop_ro("slots", [](const Mailbox& mailbox) { return mailbox.sizes().slots; })
      .def_prop_ro("type", [](const Mailbox& mailbox) { return mailbox.sizes().type; })
      .def("counters", &counters_of)
      .def("states", &states)
      .def("waiting", &waiting)
      .def("layout", &layout_of)
      .def("reclaim", &Mailbox::reclaim);
  nb::class_<MailboxClient>(m, "MailboxClient")
      .def(nb::init<const Mailbox&>())
      .def("begin", &begin, nb::arg("slots"), nb::arg("contexts"), nb::arg("tables"),
           nb::arg("places").none())
      .def("submit", &submit, nb::arg("slots"), nb::arg("layer"), nb::arg("q"),
           nb::arg("k").none(), nb::arg("v").none())
      .def("done", [](MailboxClient& client, uint32_t layer, Room room) {
        return client.done(layer, span_of(room));
      })
      .def("done_counts", [](const MailboxClient& client, Room room) {
        client.done_counts(span_of(room));
      })
      .def("failed", &failed)
      .def("take", &take)
      .def("release", [](MailboxClient& client, Numbers slots) {
        client.release(span_of(slots));
      })
      .def("put_back", [](MailboxClient& client, Numbers slots) {
        client.put_back(span_of(slots));
      })
      .def("abort", [](MailboxClient& client, Numbers slots) {
        return client.abort(span_of(slots));
      })
      .def("wait", &MailboxClient::wait, nb::call_guard<nb::gil_scoped_release>())
      .def("wait_for_first", &MailboxClient::wait_for_first,
           nb::call_guard<nb::gil_scoped_release>())
      .def("wait_for", [](MailboxClient& client, Numbers slots, int64_t timeout_ns) {
        const nb::gil_scoped_release released;
        return client.wait_for(span_of(slots), timeout_ns);
      });
  nb::class_<Courier>(m, "Courier")
      .def(nb::init<const Mailbox&, uint32_t>())
      .def("claim", &claim)
      .def("holds", &Courier::holds)
      .def("finish", [](Courier& courier, Numbers slots, uint32_t layer) {
        courier.finish(span_of(slots), layer);
      })
      .def("forget", [](Courier& courier, Numbers slots) { courier.forget(span_of(slots)); })
      .def("give_up", &Courier::give_up)
      .def("wait", &Courier::wait, nb::call_guard<nb::gil_scoped_release>())
      .def("wake", &Courier::wake)
      .def_prop_ro("jobs", &Courier::jobs)
      .def_prop_ro("round_trip_ns", &Courier::round_trip_ns);
  nb::class_<HostWorker>(m, "HostWorker")
      .def("__init__", [](HostWorker* self, const Mailbox& mailbox, nb::list layers, int threads,
                          std::vector<int> cpus) {
        std::vector<HostLayer> specs;
        for (const auto layer : layers) specs.push_back(layer_of(nb::cast<nb::tuple>(layer)));
        new (self) HostWorker(mailbox, std::move(specs), threads, std::move(cpus));
      })
      .def("attach", &HostWorker::attach)
      .def("run", &HostWorker::run, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &HostWorker::stop);
}
