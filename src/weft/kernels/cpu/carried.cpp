// The copies between a pass and what is kept of its piggybacked rows.

#include "carried.hpp"

#include <algorithm>
#include <cstring>

namespace weft {
namespace {

// Adds the time until it goes to a sum.
struct Clock {
  explicit Clock(int64_t& sum) : sum(sum), start(ring::now_ns()) {}
  ~Clock() { sum += ring::now_ns() - start; }
  int64_t& sum;
  const int64_t start;
};

}  // namespace

CarriedRows::CarriedRows(MailboxClient& client, int64_t slots, char* residuals, int64_t row_bytes,
                         int32_t* waits)
    : client_(client), residuals_(residuals), row_bytes_(row_bytes), waits_(waits) {
  taken.reserve(slots);
}

void CarriedRows::add_angles(const float* cos, const float* sin, int64_t half) {
  angles_.push_back({cos, sin, half});
}

void CarriedRows::submit(std::span<const int32_t> rows, uint32_t layer, const char* residuals,
                         const Tensor& q, const Tensor* k, const Tensor* v) {
  const Clock clock(spent_ns);
  client_.submit(rows, layer, q, k, v);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(residuals_ + rows[i] * row_bytes_, residuals + i * row_bytes_, row_bytes_);
    waits_[rows[i]] = static_cast<int32_t>(layer);
  }
  taken.clear();
}

std::span<const int32_t> CarriedRows::take(uint32_t layer, int64_t most, const Tensor& attended,
                                           char* residuals) {
  const Clock clock(spent_ns);
  taken.resize(std::max<int64_t>(most, 0));
  taken.resize(client_.done(layer, taken));
  if (taken.empty()) return taken;
  Tensor rows = attended;
  rows.shape[0] = static_cast<int64_t>(taken.size());
  client_.take(taken, layer, rows);
  for (size_t i = 0; i < taken.size(); ++i) {
    std::memcpy(residuals + i * row_bytes_, residuals_ + taken[i] * row_bytes_, row_bytes_);
  }
  return taken;
}

void CarriedRows::copy_angles(std::span<const int32_t> rows, int64_t rope, float* cos,
                              float* sin) const {
  const Angles& kept = angles_[rope];
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(kept.cos + rows[i] * kept.half, kept.half, cos + i * kept.half);
    std::copy_n(kept.sin + rows[i] * kept.half, kept.half, sin + i * kept.half);
  }
}

}  // namespace weft
