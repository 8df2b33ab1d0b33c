// The parts of the Python binding; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>

#include "tensor.hpp"

// A tensor from (address, type code, shape, strides).
weft::Tensor tensor_of(const char* name, nanobind::tuple view);

void bind_decode(nanobind::module_& m);
void bind_delta(nanobind::module_& m);
void bind_expert_server(nanobind::module_& m);
void bind_host(nanobind::module_& m);
void bind_layer(nanobind::module_& m);
void bind_matrix(nanobind::module_& m);
void bind_mixers(nanobind::module_& m);
void bind_ops(nanobind::module_& m);
void bind_stack(nanobind::module_& m);
void bind_step(nanobind::module_& m);
