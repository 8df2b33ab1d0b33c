// The parts of the Python binding; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>

void bind_layer(nanobind::module_& m);
void bind_matrix(nanobind::module_& m);
void bind_step(nanobind::module_& m);
