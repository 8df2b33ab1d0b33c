// Python binding of stacks of layers. Addresses, as in bind_matrix.cpp; stack.py checks and keeps
// alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bind_states.hpp"
#include "lane.hpp"
#include "stack.hpp"

namespace nb = nanobind;

namespace {

using weft::CarriedRows;
using weft::Lane;
using weft::Stack;

using Numbers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void add_rope(Stack& stack, uintptr_t frequencies, int64_t half, double scale,
              uintptr_t query_scales, int64_t query_scale_count, int64_t query_step) {
  stack.ropes.push_back({reinterpret_cast<const float*>(frequencies), half,
                         static_cast<float>(scale), reinterpret_cast<const float*>(query_scales),
                         query_scale_count, query_step});
}

void add_layer(Stack& stack, const weft::Layer& layer, int64_t rope, int64_t group,
               nb::tuple k_cache, nb::tuple v_cache, double scale, int64_t window,
               double softcap, std::optional<nb::tuple> sinks, bool causal) {
  stack.layers.push_back({&layer, rope, group, tensor_of("k_cache", k_cache),
                          tensor_of("v_cache", v_cache), static_cast<float>(scale), window,
                          static_cast<float>(softcap), std::nullopt, causal});
  if (sinks) stack.layers.back().sinks = tensor_of("sinks", *sinks);
}

void add_recurrent(Stack& stack, const weft::Layer& layer, uintptr_t matrices, uintptr_t inputs,
                   int64_t slots) {
  weft::StackLayer added{};
  added.layer = &layer;
  added.states = {reinterpret_cast<float*>(matrices), reinterpret_cast<float*>(inputs)};
  stack.layers.push_back(added);
  stack.state_slots = slots;
}

std::vector<weft::GroupBatch> batches_of(nb::list groups) {
  std::vector<weft::GroupBatch> batches;
  for (const auto item : groups) {
    const auto views = nb::cast<nb::tuple>(item);
    batches.push_back({tensor_of("block_tables", nb::cast<nb::tuple>(views[0])),
                       tensor_of("query_start", nb::cast<nb::tuple>(views[1])),
                       tensor_of("seq_lens", nb::cast<nb::tuple>(views[2])),
                       tensor_of("slot_mapping", nb::cast<nb::tuple>(views[3])),
                       nb::cast<int64_t>(views[4])});
  }
  return batches;
}

weft::StackTokens tokens_of(uintptr_t ids, uintptr_t positions, int64_t tokens,
                            uintptr_t embedded = 0) {
  return {reinterpret_cast<const int64_t*>(ids), reinterpret_cast<const int64_t*>(positions),
          tokens, reinterpret_cast<const char*>(embedded)};
}

// embedded: 0 for what the stack makes of ids.
void run(const Stack& stack, uintptr_t ids, uintptr_t positions, int64_t tokens, nb::list groups,
         uintptr_t hidden, uintptr_t embedded) {
  const auto batches = batches_of(groups);
  const nb::gil_scoped_release released;
  weft::run_stack(stack, tokens_of(ids, positions, tokens, embedded), batches, nullptr,
                  reinterpret_cast<char*>(hidden));
}

void run_recurrent(const Stack& stack, uintptr_t ids, uintptr_t positions, int64_t tokens,
                   nb::list groups, Ints bounds, Ints reads, Ints writes, Ints marks,
                   uintptr_t hidden) {
  const auto batches = batches_of(groups);
  const weft::DeltaBatch states = state_batch_of(bounds, reads, writes, marks);
  const nb::gil_scoped_release released;
  weft::run_stack(stack, tokens_of(ids, positions, tokens), batches, nullptr,
                  reinterpret_cast<char*>(hidden), &states);
}

int64_t run_carrying(const Stack& stack, uintptr_t ids, uintptr_t positions, int64_t tokens,
                     nb::list groups, uintptr_t hidden, CarriedRows& rows, Numbers begun,
                     Numbers limits, int64_t most) {
  if (most < static_cast<int64_t>(begun.size())) throw nb::value_error("more rows begin than fit");
  if (limits.size() != 0 && limits.size() != stack.layers.size()) {
    throw nb::value_error("each layer needs a limit");
  }
  const auto batches = batches_of(groups);
  const weft::Carry carry{rows, {begun.data(), begun.size()}, {limits.data(), limits.size()}, most};
  const nb::gil_scoped_release released;
  return weft::run_stack(stack, tokens_of(ids, positions, tokens), batches, &carry,
                         reinterpret_cast<char*>(hidden));
}

nb::object taken(const CarriedRows& rows) {
  nb::list found;
  for (const int32_t row : rows.taken) found.append(row);
  return found;
}

void bind_carried(nb::module_& m) {
  nb::class_<CarriedRows>(m, "CarriedRows")
      .def("__init__", [](CarriedRows* self, weft::MailboxClient& client, int64_t slots,
                          uintptr_t residuals, int64_t row_bytes, uintptr_t waits) {
        new (self) CarriedRows(client, slots, reinterpret_cast<char*>(residuals), row_bytes,
                               reinterpret_cast<int32_t*>(waits));
      })
      .def("add_angles", [](CarriedRows& rows, uintptr_t cos, uintptr_t sin, int64_t half) {
        rows.add_angles(reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin),
                        half);
      })
      .def_ro("spent_ns", &CarriedRows::spent_ns)
      .def("taken", &taken)
      .def("clear", [](CarriedRows& rows) { rows.taken.clear(); });
}

// parts: of each its stack, its tokens and its groups.
void begin(Lane& lane, const Stack& stack, uintptr_t ids, uintptr_t positions, int64_t tokens,
           nb::list parts, std::vector<int32_t> rows) {
  std::vector<weft::LanePart> found;
  for (const auto item : parts) {
    const auto part = nb::cast<nb::tuple>(item);
    found.push_back({&nb::cast<const Stack&>(part[0]), nb::cast<int64_t>(part[1]),
                     batches_of(nb::cast<nb::list>(part[2]))});
  }
  const nb::gil_scoped_release released;
  lane.begin(stack, tokens_of(ids, positions, tokens), std::move(found), std::move(rows));
}

void bind_lane(nb::module_& m) {
  nb::class_<Lane>(m, "Lane")
      .def(nb::init<weft::MailboxClient&>(), nb::keep_alive<1, 2>())
      .def("begin", &begin)
      .def("enter", &Lane::enter, nb::call_guard<nb::gil_scoped_release>())
      .def("leave", &Lane::leave, nb::call_guard<nb::gil_scoped_release>())
      .def("fail", [](Lane& lane, const std::vector<int32_t>& rows) { lane.fail(rows); })
      .def("finish", [](const Lane& lane, uintptr_t hidden) {
        const nb::gil_scoped_release released;
        lane.finish(reinterpret_cast<char*>(hidden));
      });
}

void add_inputs(Stack& stack, nb::tuple table, const weft::Matrix& projection, uintptr_t norm,
                int64_t width, double table_scale, double projection_scale, double sum_scale) {
  stack.inputs = {.table = tensor_of("table", table),
                  .projection = &projection,
                  .norm = reinterpret_cast<const float*>(norm),
                  .width = width,
                  .table_scale = static_cast<float>(table_scale),
                  .projection_scale = static_cast<float>(projection_scale),
                  .sum_scale = static_cast<float>(sum_scale)};
}

}  // namespace

void bind_stack(nb::module_& m) {
  bind_carried(m);
  bind_lane(m);
  nb::class_<Stack>(m, "Stack")
      .def(nb::init<>())
      .def_rw("packed", &Stack::packed, nb::arg("packed").none())
      .def_prop_rw(
          "table", [](const Stack& stack) { return reinterpret_cast<uintptr_t>(stack.table.data); },
          [](Stack& stack, nb::tuple view) { stack.table = tensor_of("table", view); })
      .def_rw("embedding_scale", &Stack::embedding_scale)
      .def_prop_rw(
          "final_norm",
          [](const Stack& stack) { return reinterpret_cast<uintptr_t>(stack.final_norm); },
          [](Stack& stack, uintptr_t at) { stack.final_norm = reinterpret_cast<const float*>(at); })
      .def_rw("embedding_norm", &Stack::embedding_norm)
      .def_rw("epsilon", &Stack::epsilon)
      .def_rw("centred", &Stack::centred)
      .def("add_rope", &add_rope)
      .def("add_layer", &add_layer)
      .def("add_inputs", &add_inputs)
      .def("add_recurrent", &add_recurrent)
      .def("run", &run)
      .def("run_recurrent", &run_recurrent)
      .def("run_carrying", &run_carrying);
}
