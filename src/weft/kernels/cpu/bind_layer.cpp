// Python binding of layers and of mixtures of experts. Addresses, as in bind_matrix.cpp; layer.py
// checks and keeps alive.
#include <nanobind/nanobind.h>

#include "bind.hpp"
#include "layer.hpp"

namespace nb = nanobind;
using weft::Experts;
using weft::Latent;
using weft::Layer;
using weft::Matrix;
using weft::Routing;

namespace {

template <typename Part, typename T>
void address(nb::class_<Part>& type, const char* name, const T* Part::* member) {
  type.def_prop_rw(
      name, [member](const Part& part) { return reinterpret_cast<uintptr_t>(part.*member); },
      [member](Part& part, uintptr_t value) { part.*member = reinterpret_cast<const T*>(value); });
}

template <typename Part>
void activation(nb::class_<Part>& type, weft::Activation Part::* member) {
  type.def_prop_rw(
      "activation", [member](const Part& part) { return static_cast<int>(part.*member); },
      [member](Part& part, int value) { part.*member = static_cast<weft::Activation>(value); });
}

void pre(const Layer& layer, uintptr_t residual, int64_t tokens, uintptr_t cos, uintptr_t sin,
         int64_t half, uintptr_t qkv) {
  const nb::gil_scoped_release released;
  weft::layer_pre(layer, reinterpret_cast<const char*>(residual), tokens,
                  reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin), half,
                  reinterpret_cast<char*>(qkv));
}

void post(const Layer& layer, uintptr_t attended, uintptr_t residual, uintptr_t inputs,
          int64_t input_stride, int64_t tokens, uintptr_t out) {
  const weft::Rows input_rows =
      weft::rows_of(reinterpret_cast<const void*>(inputs), input_stride, layer.type());
  const nb::gil_scoped_release released;
  weft::layer_post(layer, reinterpret_cast<const char*>(attended),
                   reinterpret_cast<const char*>(residual), input_rows, tokens,
                   reinterpret_cast<char*>(out));
}

void route(nb::tuple scores, const Routing& routing, uintptr_t ids, uintptr_t shares) {
  const weft::Tensor rows = tensor_of("scores", scores);
  const nb::gil_scoped_release released;
  weft::route(rows, routing, reinterpret_cast<int64_t*>(ids), reinterpret_cast<float*>(shares));
}

void moe(const Experts& experts, nb::tuple x, uintptr_t ids, uintptr_t shares, int64_t top_k,
         uintptr_t out) {
  const weft::Tensor rows = tensor_of("x", x);
  const nb::gil_scoped_release released;
  weft::run_experts(experts,
                    {reinterpret_cast<const int64_t*>(ids), reinterpret_cast<const float*>(shares),
                     rows.shape[0], top_k},
                    weft::rows_of(rows.data, rows.stride[0], rows.type),
                    weft::rows_of(reinterpret_cast<const void*>(out), rows.shape[1], rows.type),
                    [](int64_t) {});
}

void bind_experts(nb::module_& m) {
  nb::class_<Experts> type(m, "Experts");
  const auto add = [](Experts& experts, const Matrix& gate_up, const Matrix& down) {
    experts.gate_up.push_back(&gate_up);
    experts.down.push_back(&down);
  };
  type.def(nb::init<>()).def("add", add, nb::arg("gate_up"), nb::arg("down"));
  activation(type, &Experts::activation);
  type.def_rw("limit", &Experts::limit);
  address(type, "gate_up_bias", &Experts::gate_up_bias);
  address(type, "down_bias", &Experts::down_bias);
  nb::class_<Routing> routing(m, "Routing");
  routing.def(nb::init<>())
      .def_rw("top_k", &Routing::top_k)
      .def_rw("normalise", &Routing::normalise)
      .def_rw("sigmoid", &Routing::sigmoid)
      .def_rw("groups", &Routing::groups)
      .def_rw("top_groups", &Routing::top_groups)
      .def_rw("group_best", &Routing::group_best)
      .def_rw("scale", &Routing::scale);
  address(routing, "bias", &Routing::bias);
  m.def("route", &route, nb::arg("scores"), nb::arg("routing"), nb::arg("ids"), nb::arg("shares"));
  m.def("moe", &moe, nb::arg("experts"), nb::arg("x"), nb::arg("ids"), nb::arg("shares"),
        nb::arg("top_k"), nb::arg("out"));
}

}  // namespace

void bind_latent(nb::module_& m) {
  nb::class_<Latent> type(m, "Latent");
  type.def(nb::init<>())
      .def_rw("query_up", &Latent::query_up)
      .def_rw("rotated", &Latent::rotated)
      .def_rw("epsilon", &Latent::epsilon)
      .def("add_head", [](Latent& latent, const Matrix& key_up, const Matrix& value_up) {
        latent.key_up.push_back(&key_up);
        latent.value_up.push_back(&value_up);
      });
  address(type, "query_norm", &Latent::query_norm);
  address(type, "row_norm", &Latent::row_norm);
}

void bind_layer(nb::module_& m) {
  bind_experts(m);
  bind_latent(m);
  nb::class_<Layer> type(m, "Layer");
  type.def(nb::init<>())
      .def_rw("latent", &Layer::latent)
      .def_rw("qkv", &Layer::qkv)
      .def_rw("output", &Layer::output)
      .def_rw("output_gate", &Layer::output_gate)
      .def_rw("gate_up", &Layer::gate_up)
      .def_rw("down", &Layer::down)
      .def_rw("heads", &Layer::heads)
      .def_rw("kv_heads", &Layer::kv_heads)
      .def_rw("head_size", &Layer::head_size)
      .def_rw("epsilon", &Layer::epsilon)
      .def_rw("post_epsilon", &Layer::post_epsilon)
      .def_rw("router", &Layer::router)
      .def_rw("experts", &Layer::experts)
      .def_rw("routing", &Layer::routing)
      .def_rw("float_scores", &Layer::float_scores)
      .def_rw("mlp_gate", &Layer::mlp_gate)
      .def_rw("router_factor", &Layer::router_factor)
      .def_rw("input_gate", &Layer::input_gate)
      .def_rw("input_projection", &Layer::input_projection)
      .def_rw("scalar", &Layer::scalar)
      .def_rw("value_is_key", &Layer::value_is_key)
      .def_rw("value_norm", &Layer::value_norm)
      .def_rw("limit", &Layer::limit)
      .def_rw("value_size", &Layer::value_size)
      .def_rw("value_scale", &Layer::value_scale)
      .def_rw("qk_norm_whole", &Layer::qk_norm_whole)
      .def_rw("qk_norm_rotated", &Layer::qk_norm_rotated)
      .def_rw("residual_scale", &Layer::residual_scale)
      .def_rw("centred", &Layer::centred)
      .def_rw("parallel", &Layer::parallel)
      .def_rw("norms_sums", &Layer::norms_sums)
      .def_rw("own_query_angles", &Layer::own_query_angles)
      .def_rw("state_gates", &Layer::state_gates)
      .def_rw("state_gate_up", &Layer::state_gate_up)
      .def_rw("forget_up", &Layer::forget_up)
      .def_rw("mixer_inputs", &Layer::mixer_inputs)
      .def_rw("mixer_gates", &Layer::mixer_gates)
      .def_rw("mixer", &Layer::mixer)
      .def_prop_rw(
          "gating", [](const Layer& layer) { return static_cast<int>(layer.gating); },
          [](Layer& layer, int value) { layer.gating = static_cast<weft::Gating>(value); })
      .def("pre", &pre)
      .def("post", &post);
  activation(type, &Layer::activation);
  address(type, "activation_numbers", &Layer::activation_numbers);
  address(type, "qkv_bias", &Layer::qkv_bias);
  address(type, "output_bias", &Layer::output_bias);
  address(type, "gate_up_bias", &Layer::gate_up_bias);
  address(type, "down_bias", &Layer::down_bias);
  address(type, "router_bias", &Layer::router_bias);
  address(type, "input_norm", &Layer::input_norm);
  address(type, "qk_norm", &Layer::qk_norm);
  address(type, "post_attention_norm", &Layer::post_attention_norm);
  address(type, "post_attention_norm_bias", &Layer::post_attention_norm_bias);
  address(type, "mlp_norm", &Layer::mlp_norm);
  address(type, "post_mlp_norm", &Layer::post_mlp_norm);
  address(type, "post_mlp_norm_bias", &Layer::post_mlp_norm_bias);
  address(type, "expert_scale", &Layer::expert_scale);
  address(type, "router_scale", &Layer::router_scale);
  address(type, "expert_norm", &Layer::expert_norm);
  address(type, "dense_post_norm", &Layer::dense_post_norm);
  address(type, "expert_post_norm", &Layer::expert_post_norm);
  address(type, "post_input_norm", &Layer::post_input_norm);
}
