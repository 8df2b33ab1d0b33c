// Python binding of fused layers. Addresses, as in bind_matrix.cpp; layer.py checks and keeps alive.
#include <nanobind/nanobind.h>

#include "bind.hpp"
#include "layer.hpp"

namespace nb = nanobind;
using weft::Layer;

namespace {

template <typename T>
void address(nb::class_<Layer>& type, const char* name, const T* Layer::* member) {
  type.def_prop_rw(
      name, [member](const Layer& layer) { return reinterpret_cast<uintptr_t>(layer.*member); },
      [member](Layer& layer, uintptr_t value) {
        layer.*member = reinterpret_cast<const T*>(value);
      });
}

void pre(const Layer& layer, uintptr_t residual, int64_t tokens, uintptr_t cos, uintptr_t sin,
         int64_t half, uintptr_t qkv) {
  const nb::gil_scoped_release released;
  weft::layer_pre(layer, reinterpret_cast<const char*>(residual), tokens,
                  reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin), half,
                  reinterpret_cast<char*>(qkv));
}

void post(const Layer& layer, uintptr_t attended, uintptr_t residual, int64_t tokens,
          uintptr_t out) {
  const nb::gil_scoped_release released;
  weft::layer_post(layer, reinterpret_cast<const char*>(attended),
                   reinterpret_cast<const char*>(residual), tokens, reinterpret_cast<char*>(out));
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Layer> type(m, "Layer");
  type.def(nb::init<>())
      .def_rw("qkv", &Layer::qkv)
      .def_rw("output", &Layer::output)
      .def_rw("gate_up", &Layer::gate_up)
      .def_rw("down", &Layer::down)
      .def_rw("heads", &Layer::heads)
      .def_rw("kv_heads", &Layer::kv_heads)
      .def_rw("head_size", &Layer::head_size)
      .def_rw("epsilon", &Layer::epsilon)
      .def_prop_rw(
          "activation", [](const Layer& layer) { return static_cast<int>(layer.activation); },
          [](Layer& layer, int value) { layer.activation = static_cast<weft::Activation>(value); })
      .def("pre", &pre)
      .def("post", &post);
  address(type, "qkv_bias", &Layer::qkv_bias);
  address(type, "output_bias", &Layer::output_bias);
  address(type, "gate_up_bias", &Layer::gate_up_bias);
  address(type, "down_bias", &Layer::down_bias);
  address(type, "input_norm", &Layer::input_norm);
  address(type, "qk_norm", &Layer::qk_norm);
  address(type, "post_attention_norm", &Layer::post_attention_norm);
  address(type, "mlp_norm", &Layer::mlp_norm);
  address(type, "post_mlp_norm", &Layer::post_mlp_norm);
}
