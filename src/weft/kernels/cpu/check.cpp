// Checks every shape, stride, dtype and index of a call before anything is computed.

#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>

namespace weft {
namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

std::string text(int64_t number) { return std::to_string(number); }

std::string shape_text(const Tensor& tensor) {
  std::string result = "[";
  for (int i = 0; i < tensor.rank; ++i) {
    if (i > 0) result += ", ";
    result += text(tensor.shape[i]);
  }
  return result + "]";
}

struct Axis {
  const char* name;
  int64_t size;  // -1: any
};

void check_shape(const Tensor& tensor, std::initializer_list<Axis> axes) {
  const bool good = tensor.rank == static_cast<int>(axes.size()) &&
                    std::ranges::equal(axes, std::span(tensor.shape.data(), axes.size()),
                                       [](const Axis& axis, int64_t size) {
                                         return axis.size < 0 || axis.size == size;
                                       });
  if (good) return;
  std::string expected;
  for (const Axis& axis : axes) {
    if (!expected.empty()) expected += ", ";
    expected += axis.name;
    if (axis.size >= 0) expected.append("=").append(text(axis.size));
  }
  fail(std::string(tensor.name) + " has shape " + shape_text(tensor) + ", expected [" + expected +
       "]");
}

void check_floats(const Tensor& tensor) {
  const int last = tensor.rank - 1;
  if (!is_float(tensor.type)) {
    fail(std::string(tensor.name) + " of shape " + shape_text(tensor) +
         " must be float32, bfloat16 or float16");
  }
  if (tensor.shape[last] > 1 && tensor.stride[last] != 1) {
    fail(std::string(tensor.name) + " of shape " + shape_text(tensor) +
         " must be contiguous in its last dimension");
  }
}

Axis row_of(const Tensor& cache, int64_t head_size) {
  if (is_scaled(cache.type)) return {"head_size+4", head_size + 4};
  return {"head_size", head_size};
}

void check_cache(const Tensor& cache) {
  if (!is_scaled(cache.type)) return check_floats(cache);
  if (cache.stride[3] != 1 || (cache.shape[2] > 1 && cache.stride[2] != cache.shape[3])) {
    fail(std::string(cache.name) + " of shape " + shape_text(cache) +
         " must be contiguous in its last two dimensions");
  }
}

void check_indices(const Tensor& tensor, DType type) {
  const int last = tensor.rank - 1;
  if (tensor.type != type) {
    fail(std::string(tensor.name) + " of shape " + shape_text(tensor) + " must be " +
         (type == DType::i32 ? "int32" : "int64"));
  }
  if (tensor.shape[last] > 1 && tensor.stride[last] != 1) {
    fail(std::string(tensor.name) + " of shape " + shape_text(tensor) +
         " must be contiguous in its last dimension");
  }
}

void check_tensors(const Attention& call) {
  check_shape(call.q, {{"tokens", -1}, {"heads", -1}, {"head_size", -1}});
  const int64_t tokens = call.q.shape[0], heads = call.q.shape[1], size = call.q.shape[2];
  const Axis key_row = row_of(call.k_cache, size), value_row = row_of(call.v_cache, size);
  check_shape(call.k_cache,
              {{"blocks", -1}, {"kv_heads", -1}, {"block_size", call.block_size}, key_row});
  const int64_t blocks = call.k_cache.shape[0], kv_heads = call.k_cache.shape[1];
  check_shape(call.v_cache, {{"blocks", blocks},
                             {"kv_heads", kv_heads},
                             {"block_size", call.block_size},
                             value_row});
  check_shape(call.out, {{"tokens", tokens}, {"heads", heads}, {"head_size", size}});
  if (call.block_size < 1 || size < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    fail("q of shape " + shape_text(call.q) + " does not go with k_cache of shape " +
         shape_text(call.k_cache) + ": heads must be a multiple of kv_heads, and no size may be 0");
  }
  if (call.out.type != call.q.type) fail("out must have the type of q");
  if (call.k.has_value() != call.v.has_value()) fail("k and v must both be given, or neither");
  for (const auto* fresh : {&call.k, &call.v}) {
    if (!fresh->has_value()) continue;
    check_shape(**fresh, {{"tokens", tokens}, {"kv_heads", kv_heads}, {"head_size", size}});
    check_floats(**fresh);
  }
  for (const Tensor* tensor : {&call.q, &call.out}) check_floats(*tensor);
  if (call.sinks) {
    check_shape(*call.sinks, {{"heads", heads}});
    check_floats(*call.sinks);
    if (call.sinks->type != DType::f32) fail("sinks must be float32");
  }
  for (const Tensor* tensor : {&call.k_cache, &call.v_cache}) check_cache(*tensor);
}

void check_metadata(const Attention& call) {
  check_shape(call.seq_lens, {{"rows", -1}});
  const int64_t rows = call.seq_lens.shape[0];
  check_shape(call.query_start, {{"rows+1", rows + 1}});
  check_shape(call.block_tables, {{"rows", rows}, {"blocks_per_row", -1}});
  check_shape(call.slot_mapping, {{"tokens", call.q.shape[0]}});
  check_indices(call.seq_lens, DType::i32);
  check_indices(call.query_start, DType::i32);
  check_indices(call.block_tables, DType::i32);
  check_indices(call.slot_mapping, DType::i64);
}

void check_numbers(const Attention& call) {
  if (!std::isfinite(call.scale)) fail("scale must be finite");
  if (call.window < 0) fail("window must be at least 1, or None");
  if (!std::isfinite(call.softcap) || call.softcap < 0) fail("softcap must be positive, or None");
}

// The blocks that row `row`'s queries see, and only those, must exist.
void check_row(const Attention& call, int64_t row) {
  const int32_t* start = call.query_start.as<int32_t>();
  const auto fail_row = [&](const std::string& what) { fail("row " + text(row) + ": " + what); };
  if (start[row + 1] < start[row]) fail_row("query_start decreases");
  const int64_t queries = start[row + 1] - start[row];
  if (queries == 0) return;
  const int64_t context = call.seq_lens.as<int32_t>()[row];
  if (context < queries) {
    fail_row("seq_lens " + text(context) + " is less than its " + text(queries) +
             " query tokens");
  }
  const int64_t blocks = call.block_tables.shape[1];
  if (context > blocks * call.block_size) {
    fail_row("seq_lens " + text(context) + " exceeds the table of " + text(blocks) +
             " blocks of " + text(call.block_size));
  }
  const int64_t oldest = context - queries + 1 - call.window;
  const int64_t first = call.window == 0 || oldest < 0 ? 0 : oldest / call.block_size;
  const int32_t* table = call.block_tables.as<int32_t>() + row * call.block_tables.stride[0];
  for (int64_t i = first; i * call.block_size < context; ++i) {
    if (table[i] < 0 || table[i] >= call.k_cache.shape[0]) {
      fail_row("block_tables entry " + text(i) + " is " + text(table[i]) +
               ", outside k_cache of shape " + shape_text(call.k_cache));
    }
  }
}

void check_rows(const Attention& call) {
  const int64_t rows = call.seq_lens.shape[0];
  const int32_t* start = call.query_start.as<int32_t>();
  if (start[0] != 0 || start[rows] != call.q.shape[0]) {
    fail("query_start must run from 0 to the number of tokens of q of shape " +
         shape_text(call.q) + ", not from " + text(start[0]) + " to " + text(start[rows]));
  }
  for (int64_t row = 0; row < rows; ++row) check_row(call, row);
}

void check_slots(const Attention& call) {
  if (!call.k) return;
  const int64_t* slot_mapping = call.slot_mapping.as<int64_t>();
  const int64_t limit = call.k_cache.shape[0] * call.block_size;
  for (int64_t t = 0; t < call.slot_mapping.shape[0]; ++t) {
    if (slot_mapping[t] < 0 || slot_mapping[t] >= limit) {
      fail("slot_mapping[" + text(t) + "] is " + text(slot_mapping[t]) + ", outside k_cache of shape " +
           shape_text(call.k_cache));
    }
  }
}

}  // namespace

void check(const Attention& call) {
  check_tensors(call);
  check_metadata(call);
  check_numbers(call);
  check_rows(call);
  check_slots(call);
}

}  // namespace weft
