// Values of the ring as Python has them, and back.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "info.hpp"
#include "log.hpp"
#include "records.hpp"
#include "segment.hpp"

namespace weft::ring {

namespace nb = nanobind;

inline nb::dict info_of(const InfoPage& page) {
  uint64_t values[kInfoFields];
  nb::dict info;
  if (!read_info(page, values)) return info;
  int i = 0;
#define WEFT_RING_FIELD(name) info[#name] = values[i++];
  WEFT_RING_INFO(WEFT_RING_FIELD)
#undef WEFT_RING_FIELD
  return info;
}

// How many entries there were so far, and those that are there of them from `since` on, with their
// numbers. A log that has fewer than `since` is another one: all of it.
template <int Fields, int Entries>
nb::tuple entries_of(const Log<Fields, Entries>& log, uint64_t since) {
  const uint64_t written = load(log.written);
  nb::list entries;
  for (uint64_t n = std::max(since > written ? 0 : since, log.oldest(written)); n < written; ++n) {
    uint64_t values[Fields];
    if (!read_entry(log, n, values)) continue;
    nb::list row;
    for (const uint64_t value : values) row.append(value);
    entries.append(nb::make_tuple(n, row));
  }
  return nb::make_tuple(written, entries);
}

inline nb::tuple python_of(const Scored& scored) {
  nb::list top;
  for (const TopRecord& other : scored.top) top.append(nb::make_tuple(other.token, other.logprob));
  return nb::make_tuple(scored.head.token, scored.head.logprob, scored.head.rank, nb::tuple(top));
}

// None for a token without log probability.
inline nb::list python_of(const std::vector<Scored>& all) {
  nb::list values;
  for (const Scored& scored : all) {
    if (scored.head.num_top == kNoLogprob) {
      values.append(nb::none());
    } else {
      values.append(python_of(scored));
    }
  }
  return values;
}

// From (token, logprob, rank, ((token, logprob), ...)).
inline Scored scored_of(nb::handle value) {
  const auto fields = nb::cast<nb::tuple>(value);
  Scored scored;
  scored.head = {nb::cast<uint32_t>(fields[0]), nb::cast<float>(fields[1]),
                 nb::cast<uint32_t>(fields[2]), 0};
  for (const nb::handle pair : nb::cast<nb::tuple>(fields[3])) {
    const auto other = nb::cast<nb::tuple>(pair);
    scored.top.push_back({nb::cast<uint32_t>(other[0]), nb::cast<float>(other[1])});
  }
  scored.head.num_top = static_cast<uint32_t>(scored.top.size());
  return scored;
}

template <size_t N>
std::string text_of(const char (&text)[N]) {
  return std::string(text, strnlen(text, N));
}

inline nb::object python_of(const Final& final, Reason reason) {
  if (reason == Reason::None) return nb::none();
  const auto bytes = [](const std::string& text) { return nb::bytes(text.data(), text.size()); };
  return nb::make_tuple(static_cast<int>(reason), final.with_token != 0, final.http_status,
                        bytes(text_of(final.code)), bytes(text_of(final.param)),
                        bytes(text_of(final.message)), final.retry_after_s, final.scheduled_ns,
                        final.prefilled_ns);
}

}  // namespace weft::ring
