// Python binding of what surrounds a forward pass: packing its inputs, choosing tokens.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "bind.hpp"
#include "edits.hpp"
#include "pack.hpp"
#include "sample.hpp"

namespace nb = nanobind;

namespace {

template <typename T, int rank>
using Array = nb::ndarray<T, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;

// Holds on to the arrays that it reads and writes.
class Packer {
 public:
  Packer(Array<int32_t, 2> tokens, std::vector<Array<int32_t, 2>> tables, int64_t block_size)
      : tokens_(tokens), tables_(tables) {
    memory_.tokens = tokens.data();
    memory_.max_rows = static_cast<int64_t>(tokens.shape(0));
    memory_.max_tokens = static_cast<int64_t>(tokens.shape(1));
    memory_.block_size = block_size;
  }

  // int64 [8, capacity], int32 [2, max_rows + 1], and for each group int64 [capacity] and int32
  // [max_rows, max_blocks]; see pack.py.
  void write_to(Array<int64_t, 2> numbers, Array<int32_t, 2> bounds,
                std::vector<Array<int64_t, 1>> slots, std::vector<Array<int32_t, 2>> block_tables) {
    const auto capacity = static_cast<int64_t>(numbers.shape(1));
    bool fits = numbers.shape(0) == 8 && bounds.shape(0) == 2 && capacity >= memory_.max_rows &&
                static_cast<int64_t>(bounds.shape(1)) == memory_.max_rows + 1 &&
                slots.size() == tables_.size() && block_tables.size() == tables_.size();
    for (size_t i = 0; fits && i < tables_.size(); ++i) {
      fits = static_cast<int64_t>(slots[i].shape(0)) == capacity &&
             block_tables[i].shape(0) == tables_[i].shape(0) &&
             block_tables[i].shape(1) == tables_[i].shape(1);
    }
    if (!fits) throw nb::value_error("the memory of a step does not fit the rows");
    numbers_ = numbers;
    bounds_ = bounds;
    slots_ = slots;
    block_tables_ = block_tables;
    memory_.capacity = capacity;
    int64_t** parts[] = {&memory_.input_ids, &memory_.positions,   &memory_.rows,
                         &memory_.starts,    &memory_.counts,      &memory_.sample_rows,
                         &memory_.sample_at, &memory_.sample_lengths};
    for (int i = 0; i < 8; ++i) *parts[i] = numbers.data() + i * capacity;
    memory_.query_start = bounds.data();
    memory_.seq_lens = bounds.data() + memory_.max_rows + 1;
    memory_.groups.clear();
    for (size_t i = 0; i < tables_.size(); ++i) {
      memory_.groups.push_back({tables_[i].data(), static_cast<int64_t>(tables_[i].shape(1)),
                                block_tables[i].data(), slots[i].data()});
    }
  }

  nb::tuple pack(nb::tuple rows, nb::tuple starts, nb::tuple counts, nb::tuple samples,
                 nb::tuple guessed) {
    const size_t size = rows.size();
    if (starts.size() != size || counts.size() != size || samples.size() != size ||
        (guessed.size() != size && guessed.size() != 0) || block_tables_.size() != tables_.size()) {
      throw nb::value_error("the parts of a sub-batch differ in length");
    }
    planned_.clear();
    for (size_t i = 0; i < size; ++i) {
      const auto drafted = guessed.size() == 0 ? 0 : nb::cast<int64_t>(guessed[i]);
      planned_.push_back({nb::cast<int64_t>(rows[i]), nb::cast<int64_t>(starts[i]),
                          nb::cast<int64_t>(counts[i]) + drafted, drafted,
                          nb::cast<bool>(samples[i])});
    }
    const weft::StepSize filled = weft::pack(planned_, memory_);
    return nb::make_tuple(size, filled.tokens, filled.samples, filled.blocks);
  }

  // The tables of what was packed last: int32 [capacity] and [groups, rows]; see pack.hpp.
  int64_t pack_tables(const std::vector<int64_t>& windows, Array<int32_t, 1> blocks,
                      Array<int32_t, 2> starts, int64_t ahead) {
    if (windows.size() != tables_.size() || starts.shape(0) != tables_.size()) {
      throw nb::value_error("windows or places of tables differ from the groups in number");
    }
    return weft::pack_tables(planned_, memory_, windows, ahead,
                             {blocks.data(), static_cast<int64_t>(blocks.shape(0)), starts.data(),
                              static_cast<int64_t>(starts.shape(1))});
  }

 private:
  weft::StepMemory memory_{};
  std::vector<weft::PlannedRow> planned_;
  Array<int32_t, 2> tokens_;
  std::vector<Array<int32_t, 2>> tables_;
  Array<int64_t, 2> numbers_;
  Array<int32_t, 2> bounds_;
  std::vector<Array<int64_t, 1>> slots_;
  std::vector<Array<int32_t, 2>> block_tables_;
};

void sample(uintptr_t logits, int64_t size, Array<const double, 2> settings,
            Array<const double, 1> draws, Array<int64_t, 1> tokens, Array<bool, 1> finite) {
  const size_t rows = tokens.shape(0);
  if (settings.shape(0) != rows || settings.shape(1) != weft::settings().size() ||
      draws.shape(0) != rows || finite.shape(0) != rows) {
    throw nb::value_error("settings, draws, tokens and finite differ in their rows");
  }
  const weft::Choice choice{reinterpret_cast<float*>(logits), static_cast<int64_t>(rows), size,
                            settings.data(), draws.data(), tokens.data(), finite.data()};
  const nb::gil_scoped_release released;
  weft::sample(choice);
}

void penalise(uintptr_t logits, int64_t size, Array<const int64_t, 1> at,
              Array<const int32_t, 2> tokens, Array<const int64_t, 1> rows,
              Array<const int64_t, 1> lengths, Array<const int64_t, 1> num_prompt,
              Array<const float, 2> penalties) {
  const size_t count = at.shape(0);
  bool fits = rows.shape(0) == count && lengths.shape(0) == count &&
              num_prompt.shape(0) == count && penalties.shape(0) == count &&
              penalties.shape(1) == weft::penalty_names().size();
  for (size_t i = 0; fits && i < count; ++i) {
    fits = rows.data()[i] >= 0 && rows.data()[i] < static_cast<int64_t>(tokens.shape(0)) &&
           num_prompt.data()[i] >= 0 && lengths.data()[i] <= static_cast<int64_t>(tokens.shape(1));
  }
  if (!fits) throw nb::value_error("rows with penalties differ, or have more tokens than there are");
  const nb::gil_scoped_release released;
  thread_local std::vector<int32_t> counts;  // zeros between calls
  counts.resize(std::max<size_t>(counts.size(), size));
  for (size_t i = 0; i < count; ++i) {
    weft::penalise(reinterpret_cast<float*>(logits) + at.data()[i] * size, size,
                   {tokens.data() + rows.data()[i] * static_cast<int64_t>(tokens.shape(1)),
                    num_prompt.data()[i], lengths.data()[i]},
                   penalties.data() + i * penalties.shape(1), counts.data());
  }
}

void uniform(Array<const int64_t, 1> seeds, Array<const int64_t, 1> counters,
             Array<double, 1> numbers) {
  if (seeds.shape(0) != numbers.shape(0) || counters.shape(0) != numbers.shape(0)) {
    throw nb::value_error("seeds, counters and numbers differ in length");
  }
  weft::uniform(seeds.data(), counters.data(), static_cast<int64_t>(numbers.shape(0)),
                numbers.data());
}

}  // namespace

void bind_step(nb::module_& m) {
  nb::class_<Packer>(m, "Packer")
      .def(nb::init<Array<int32_t, 2>, std::vector<Array<int32_t, 2>>, int64_t>(),
           nb::arg("tokens"), nb::arg("tables"), nb::arg("block_size"))
      .def("write_to", &Packer::write_to, nb::arg("numbers"), nb::arg("bounds"), nb::arg("slots"),
           nb::arg("block_tables"))
      .def("pack", &Packer::pack, nb::arg("rows"), nb::arg("starts"), nb::arg("counts"),
           nb::arg("samples"), nb::arg("guessed"))
      .def("pack_tables", &Packer::pack_tables, nb::arg("windows"), nb::arg("blocks"),
           nb::arg("starts"), nb::arg("ahead") = 0);
  m.attr("SETTINGS") = nb::tuple(nb::cast(weft::settings()));
  m.attr("PENALTIES") = nb::tuple(nb::cast(weft::penalty_names()));
  m.def("penalise", &penalise, nb::arg("logits"), nb::arg("size"), nb::arg("at"),
        nb::arg("tokens"), nb::arg("rows"), nb::arg("lengths"), nb::arg("num_prompt"),
        nb::arg("penalties"));
  m.def("sample", &sample, nb::arg("logits"), nb::arg("size"), nb::arg("settings"),
        nb::arg("draws"), nb::arg("tokens"), nb::arg("finite"));
  m.def("uniform", &uniform, nb::arg("seeds"), nb::arg("counters"), nb::arg("numbers"));
}
