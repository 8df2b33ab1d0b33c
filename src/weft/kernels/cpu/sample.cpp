// The choice of tokens. Weights are exp((logit - largest) / temperature): nothing has to divide them
// by their sum. Sums are in float64, in an order that depends on nothing but the size of a row.

#include "sample.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "dispatch.hpp"
#include "phases.hpp"
#include "pool.hpp"

namespace weft {
namespace {

constexpr int64_t kSortedAtOnce = 4096;  // candidates; more are first cut to those of one bucket
constexpr int kBucketShift = 20;         // buckets by exponent and 3 bits of the mantissa
constexpr int kBuckets = (0x3f800000 >> kBucketShift) + 1;  // weights are at most 1

// The settings of a row, in the order of kernels/reference_sampling.py.
#define WEFT_SETTINGS(X) X(temperature) X(top_k) X(top_p) X(min_p)

struct Settings {
#define WEFT_SETTING(name) double name;
  WEFT_SETTINGS(WEFT_SETTING)
#undef WEFT_SETTING
};

// The weights that are kept: all above `least`, and so many that equal it that they are `count`.
struct Kept {
  float least;
  int64_t count;
};

// What a row of so many logits needs meanwhile.
struct Scratch {
  float* found;     // [size + 1]: each weight is written, then perhaps overwritten
  float* peaks;     // [blocks of kPeakBlock]
  double* sums;     // [blocks of kSumBlock]
  double* masses;   // [kBuckets]
  int64_t* counts;  // [kBuckets]

  static Scratch of(Slices& slices, int64_t size) {
    return {slices.take<float>(size + 1), slices.take<float>((size + kPeakBlock - 1) / kPeakBlock),
            slices.take<double>((size + kSumBlock - 1) / kSumBlock),
            slices.take<double>(kBuckets), slices.take<int64_t>(kBuckets)};
  }
};

class Row {
 public:
  Row(float* weights, int64_t size, const Scratch& scratch)
      : weights_(weights), size_(size), scratch_(scratch), scan_(*chosen_isa().scan) {}

  int64_t draw(double number);
  void filter(const Settings& asked);

 private:
  Kept last_kept(int64_t top_k, double top_p);
  std::span<float> largest(int64_t count);
  std::span<float> at_least(float least);
  std::span<const double> sum_blocks();

  float* const weights_;
  const int64_t size_;
  const Scratch& scratch_;
  const ScanKernels& scan_;
};

std::span<const double> Row::sum_blocks() {
  scan_.sum_blocks(weights_, size_, scratch_.sums);
  return {scratch_.sums, static_cast<size_t>((size_ + kSumBlock - 1) / kSumBlock)};
}

// The index on which a number in [0, 1) falls when every index has its weight.
int64_t Row::draw(double number) {
  const std::span<const double> sums = sum_blocks();
  double total = 0.0;
  for (double sum : sums) total += sum;
  // Below the total, whatever rounding does.
  const double target = std::min(number * total, std::nextafter(total, 0.0));
  double before = 0.0;
  size_t block = 0;
  while (block + 1 < sums.size() && before + sums[block] <= target) before += sums[block++];
  const int64_t from = static_cast<int64_t>(block) * kSumBlock;
  const int64_t to = std::min(from + kSumBlock, size_);
  int64_t last = from;  // with a weight, in case that the block's sum was rounded up
  for (int64_t i = from; i < to; ++i) {
    if (weights_[i] == 0.0f) continue;
    before += weights_[i];
    last = i;
    if (before > target) break;
  }
  return last;
}

// Makes what the filters do not keep 0. The largest weight is 1.
void Row::filter(const Settings& asked) {
  const auto top_k = static_cast<int64_t>(asked.top_k);
  const bool ranked = asked.top_p < 1.0 || (top_k > 0 && top_k < size_);
  const auto limit = static_cast<float>(asked.min_p);
  if (!ranked && limit <= 0.0f) return;
  const Kept kept = ranked ? last_kept(top_k, asked.top_p) : Kept{0.0f, size_};
  scan_.drop(weights_, size_, std::max(kept.least, limit));
  if (!ranked || limit > kept.least) return;
  // Of equally likely tokens the first ones are kept.
  int64_t surplus = -kept.count;
  for (int64_t i = 0; i < size_; ++i) surplus += weights_[i] >= kept.least;
  for (int64_t i = size_ - 1; surplus > 0; --i) {
    if (weights_[i] != kept.least) continue;
    weights_[i] = 0.0f;
    --surplus;
  }
}

// What top-k and top-p keep.
Kept Row::last_kept(int64_t top_k, double top_p) {
  std::span<float> rest;  // candidates for the last one kept
  double total = 0.0;
  if (top_k > 0 && top_k < size_) {
    rest = largest(top_k);
    if (top_p >= 1.0) return {rest.back(), top_k};
    std::sort(rest.begin(), rest.end(), std::greater<>());
    for (float weight : rest) total += weight;
  } else {
    for (double sum : sum_blocks()) total += sum;
    // Tokens below (1 - top_p) / V of the mass are less than 1 - top_p together; half, to be safe.
    const double low = (1.0 - top_p) * total / static_cast<double>(size_) / 2.0;
    rest = at_least(static_cast<float>(low));
  }
  const double share = top_p * total;
  double mass = 0.0;  // of tokens likelier than all of the rest
  int64_t count = 0;
  if (static_cast<int64_t>(rest.size()) > kSortedAtOnce) {
    double* const masses = scratch_.masses;
    int64_t* const counts = scratch_.counts;
    std::fill_n(masses, kBuckets, 0.0);
    std::fill_n(counts, kBuckets, 0);
    const auto bucket_of = [](float x) { return std::bit_cast<uint32_t>(x) >> kBucketShift; };
    for (float weight : rest) {
      masses[bucket_of(weight)] += weight;
      ++counts[bucket_of(weight)];
    }
    int64_t left = static_cast<int64_t>(rest.size());
    uint32_t bucket = kBuckets - 1;
    while (mass + masses[bucket] < share && left > counts[bucket]) {
      mass += masses[bucket];
      count += counts[bucket];
      left -= counts[bucket--];
    }
    const auto others =
        std::ranges::remove_if(rest, [&](float x) { return bucket_of(x) != bucket; });
    rest = rest.first(rest.size() - others.size());
  }
  std::sort(rest.begin(), rest.end(), std::greater<>());
  size_t kept = 0;
  do {
    mass += rest[kept++];
  } while (kept < rest.size() && mass < share);
  return {rest[kept - 1], count + static_cast<int64_t>(kept)};
}

// The `count` largest weights, the smallest of them last.
std::span<float> Row::largest(int64_t count) {
  // So many blocks have a weight that is at least the count-th of their largest ones.
  const int64_t blocks = (size_ + kPeakBlock - 1) / kPeakBlock;
  float least = 0.0f;
  if (count <= blocks) {
    float* const peaks = scratch_.peaks;
    scan_.peaks(weights_, size_, peaks);
    std::nth_element(peaks, peaks + count - 1, peaks + blocks, std::greater<>());
    least = peaks[count - 1];
  }
  const std::span<float> found = at_least(least);
  std::nth_element(found.begin(), found.begin() + count - 1, found.end(), std::greater<>());
  return found.first(count);
}

std::span<float> Row::at_least(float least) {
  const int64_t number = scan_.gather(weights_, size_, least, scratch_.found);
  return {scratch_.found, static_cast<size_t>(number)};
}

}  // namespace

const std::vector<std::string>& settings() {
#define WEFT_SETTING(name) #name,
  static const std::vector<std::string> names{WEFT_SETTINGS(WEFT_SETTING)};
#undef WEFT_SETTING
  return names;
}

void sample(const Choice& choice) {
  thread_local KeptMemory kept;
  thread_local std::vector<Scratch> places;  // of the threads of this call
  places.resize(std::max<size_t>(places.size(), shared_pool().threads()));
  kept.lay_out([&](Slices& slices) {
    for (Scratch& place : places) place = Scratch::of(slices, choice.size);
  });
  const std::span<const Scratch> scratch = places;
  const auto most = static_cast<int>(scratch.size());
  shared_pool().run_places(most, choice.rows, [&](int place, int64_t row) {
    const ScanKernels& scan = *chosen_isa().scan;
    Settings asked;
    std::memcpy(&asked, choice.settings + row * static_cast<int64_t>(settings().size()), sizeof asked);
    float* const logits = choice.logits + row * choice.size;
    const Peak peak = scan.peak(logits, choice.size);
    choice.finite[row] = peak.finite;
    if (!(asked.temperature > 0.0) || !std::isfinite(peak.value)) {
      const int64_t token = scan.find(logits, choice.size, peak.value);
      choice.tokens[row] = token < choice.size ? token : 0;
      return;
    }
    // The smallest temperature overflows nothing: it leaves the likeliest token, or draws among
    // equally likely ones.
    const float temperature =
        std::max(static_cast<float>(asked.temperature), std::numeric_limits<float>::min());
    scan.weigh(logits, choice.size, peak.value, temperature);
    Row weights(logits, choice.size, scratch[place]);
    weights.filter(asked);
    choice.tokens[row] = weights.draw(choice.draws[row]);
  });
}

void uniform(const int64_t* seeds, const int64_t* counters, int64_t count, double* numbers) {
  for (int64_t i = 0; i < count; ++i) {
    const auto seed = static_cast<uint64_t>(seeds[i]), counter = static_cast<uint64_t>(counters[i]);
    uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
      const uint64_t low = c[0] * uint64_t{0xD2511F53}, high = c[2] * uint64_t{0xCD9E8D57};
      const auto upper = static_cast<uint32_t>(high >> 32) ^ c[1] ^ key[0];
      c[2] = static_cast<uint32_t>(low >> 32) ^ c[3] ^ key[1];
      c[0] = upper;
      c[1] = static_cast<uint32_t>(high);
      c[3] = static_cast<uint32_t>(low);
      key[0] += 0x9E3779B9;
      key[1] += 0xBB67AE85;
    }
    const uint64_t mantissa = (uint64_t{c[0]} << 21) ^ (c[1] >> 11);
    numbers[i] = static_cast<double>(mantissa) / 0x1p53;
  }
}

}  // namespace weft
