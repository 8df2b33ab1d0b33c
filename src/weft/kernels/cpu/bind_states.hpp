// Batches of recurrent state in the Python binding.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "delta.hpp"

using Ints = nanobind::ndarray<const int32_t, nanobind::c_contig, nanobind::device::cpu>;

// A batch from dense arrays [R + 1], [R], [R] and [M, 2], which outlive it.
weft::DeltaBatch state_batch_of(const Ints& bounds, const Ints& reads, const Ints& writes,
                                const Ints& marks);
