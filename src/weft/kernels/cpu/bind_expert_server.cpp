// Python binding of the expert server. Addresses, as in bind_matrix.cpp; expert_server.py checks and
// keeps alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "bind.hpp"
#include "expert_server.hpp"

namespace nb = nanobind;
using weft::Experts;
using weft::ExpertServer;

void bind_expert_server(nb::module_& m) {
  nb::class_<ExpertServer>(m, "ExpertServer")
      .def("__init__",
           [](ExpertServer* self, uintptr_t asked, uintptr_t tokens, nb::tuple x, uintptr_t ids,
              uintptr_t shares, int64_t top_k, uintptr_t answered, uintptr_t out, nb::list layers) {
             std::vector<const Experts*> experts;
             for (const auto layer : layers) experts.push_back(&nb::cast<const Experts&>(layer));
             const weft::ExpertCalls calls{reinterpret_cast<const int64_t*>(asked),
                                           reinterpret_cast<const int32_t*>(tokens),
                                           tensor_of("x", x),
                                           reinterpret_cast<const int64_t*>(ids),
                                           reinterpret_cast<const float*>(shares),
                                           top_k,
                                           reinterpret_cast<int64_t*>(answered),
                                           reinterpret_cast<char*>(out)};
             new (self) ExpertServer(calls, std::move(experts));
           })
      .def("run", &ExpertServer::run, nb::call_guard<nb::gil_scoped_release>())
      .def("wake", &ExpertServer::wake)
      .def("stop", &ExpertServer::stop)
      .def_prop_ro("answers", &ExpertServer::answers)
      .def_prop_ro("rows", &ExpertServer::rows)
      .def_prop_ro("busy_ns", &ExpertServer::busy_ns);
  m.attr("given_up") = ExpertServer::given_up;
}
