// The port of the resident loop for a CPU: one lane, whose launches use the thread pool.

#include "decode.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"
#include "ops.hpp"
#include "pool.hpp"
#include "sample.hpp"

namespace weft {
namespace {

using resident::End;
using resident::Outlet;
using Clock = std::chrono::steady_clock;

// Memory that a thread keeps from lease to lease.
struct Kept {
  Lines<char> hidden;
  Lines<float> logits;
  std::vector<int32_t> counts;  // [places, vocabulary], zeros between steps
};

Tensor flat(const char* name, void* data, DType type, int64_t count) {
  Tensor view{name, data, type, 1};
  view.shape = {count};
  view.stride = {1};
  return view;
}

// Which slots of recurrent state the rows of a lease read and write, step after step.
class StateTurns {
 public:
  StateTurns(const LeasedStates& given, int64_t count)
      : reads_(count), writes_(count), rows_(count) {
    for (int64_t i = 0; i < count; ++i) {
      Row& row = rows_[i];
      row = {.now = given.now[i], .kept = given.kept[i], .every = given.every[i]};
      const int32_t* const spare = given.spare + i * LeasedStates::most;
      while (row.spares < LeasedStates::most && spare[row.spares] >= 0) {
        row.spare[row.spares] = spare[row.spares];
        ++row.spares;
      }
    }
  }

  // Whether all slots are among so many, and each row has one to write in every step.
  bool fits(int64_t slots) const {
    return std::ranges::all_of(rows_, [slots](const Row& row) {
      const auto there = [slots](int32_t slot) { return slot >= 0 && slot < slots; };
      const int needed = row.every > 0 ? 2 + row.kept : 1 + row.kept;
      return there(row.now) && row.every >= 0 && row.spares >= needed &&
             std::all_of(row.spare, row.spare + row.spares, there);
    });
  }

  DeltaBatch next(std::span<const int32_t> bounds) {
    for (size_t i = 0; i < rows_.size(); ++i) {
      reads_[i] = rows_[i].now;
      writes_[i] = rows_[i].spare[rows_[i].spares - 1];
    }
    return {bounds, reads_, writes_, {}};
  }

  // The step has computed the tokens at these places of their sequences.
  void computed(const int64_t* positions) {
    for (size_t i = 0; i < rows_.size(); ++i) rows_[i].go_on(positions[i] + 1);
  }

 private:
  struct Row {
    int32_t now = -1;
    bool kept = false;
    int64_t every = 0;
    int32_t mark = -1;  // the slot that this lease keeps
    int spares = 0;
    int32_t spare[LeasedStates::most + 1] = {};

    void go_on(int64_t tokens) {
      const int32_t written = spare[--spares];
      if (!kept) spare[spares++] = now;
      now = written;
      kept = every > 0 && tokens % every == 0;
      if (!kept) return;
      if (mark >= 0) spare[spares++] = mark;
      mark = written;
    }
  };

  std::vector<int32_t> reads_, writes_;
  std::vector<Row> rows_;
};

class HostPort {
 public:
  HostPort(const DecodeModel& model, const LeaseTerms& terms, Lease& lease, Kept& kept)
      : model_(model), terms_(terms), lease_(lease), kept_(kept),
        count_(static_cast<int64_t>(terms.rows.size())), ids_(count_), positions_(count_),
        counters_(terms.counters, terms.counters + count_), seq_lens_(count_),
        query_start_(count_ + 1), draws_(count_), finite_(std::make_unique<bool[]>(count_)),
        whole_(std::make_unique<bool[]>(count_)) {
    if (terms.states.now != nullptr) turns_.emplace(terms.states, count_);
    check();
    given_.resize((terms.steps + 1) * count_);
    std::copy_n(terms.given, count_, given_.begin());
    std::fill_n(finite_.get(), count_, true);
    edited_ = std::count(terms.edits.edited, terms.edits.edited + count_, true);
    withheld_ = std::count(terms.withheld, terms.withheld + count_, true);
    out_ids_.reserve(count_);
    out_tokens_.reserve(count_);
    for (int64_t i = 0; i <= count_; ++i) query_start_[i] = static_cast<int32_t>(i);
    gather_tables();
  }

  LeaseResult run() {
    LeaseResult result;
    if (lease_.await(outlet_)) {
      const bool holds_back = outlet_ == nullptr || withheld_ > 0;
      const auto limit = holds_back ? terms_.unpublished_ns - terms_.step_ns : terms_.limit_ns;
      deadline_ = Clock::now() + std::chrono::nanoseconds(limit);
      result.steps = resident::run(rows(), terms_.steps, *this, result.end);
      if (result.end == End::failed) std::fill_n(finite_.get(), count_, true);  // of the step before
    } else {
      result.end = End::asked;
    }
    given_.resize((result.steps + 1) * count_);
    result.given = std::move(given_);
    result.finite.assign(finite_.get(), finite_.get() + count_);
    result.published = outlet_ != nullptr;
    return result;
  }

  // -- the port ---------------------------------------------------------------------------------

  int64_t lane() const { return 0; }
  int64_t lanes() const { return 1; }
  void sync() const {}
  bool any(bool one) const { return one; }

  bool asked() const {
    return lease_.recalled() || (outlet_ != nullptr && outlet_->asked(outlet_->self));
  }
  bool late() const { return Clock::now() >= deadline_; }
  bool pauses() const { return false; }

  void publish(const int64_t* given, int64_t count) {
    if (outlet_ == nullptr) return;
    if (withheld_ == 0) return outlet_->publish(outlet_->self, terms_.ids, given, count);
    out_ids_.clear();
    out_tokens_.clear();
    for (int64_t i = 0; i < count; ++i) {
      if (terms_.withheld[i]) continue;
      out_ids_.push_back(terms_.ids[i]);
      out_tokens_.push_back(given[i]);
    }
    const auto some = static_cast<int64_t>(out_ids_.size());
    if (some > 0) outlet_->publish(outlet_->self, out_ids_.data(), out_tokens_.data(), some);
  }

  bool launch(const resident::Rows& rows, int64_t* given) {
    try {
      const Stack& stack = *model_.stack;
      const DType type = stack.layers.front().layer->type();
      const int64_t width = model_.head->inputs(), vocabulary = model_.head->outputs();
      char* hidden = fit(kept_.hidden, count_ * width * size_of(type));
      float* logits = fit(kept_.logits, count_ * vocabulary);
      DeltaBatch states;
      if (turns_) states = turns_->next(query_start_);
      run_stack(stack, {rows.ids, rows.positions, count_}, batches_, nullptr, hidden,
                turns_ ? &states : nullptr);
      multiply({.matrix = model_.head,
                .bias = nullptr,
                .x = rows_of(hidden, width, type),
                .residual = {},
                .out = rows_of(logits, vocabulary, DType::f32),
                .rows = count_,
                .out_type = DType::f32});
      if (model_.logit_scale != 1.0f) {
        char* const numbers = reinterpret_cast<char*>(logits);
        chosen_isa().panel->scale(DType::f32, model_.logit_scale, numbers, nullptr, numbers,
                                  count_ * vocabulary);
      }
      if (model_.softcap != 0) softcap(logits, count_ * vocabulary, model_.softcap);
      const Choice all{logits, count_, vocabulary, terms_.settings, draws_.data(), given, rows.finite};
      if (!choose(rows, all)) return false;
      if (turns_) turns_->computed(rows.positions);
      return true;
    } catch (const std::exception&) {  // the host computes the step again, and says what it was
      return false;
    }
  }

 private:
  // Changes the logits of rows that want it, and has each token chosen.
  bool choose(const resident::Rows& rows, const Choice& all) {
    uniform(terms_.seeds, rows.counters, count_, draws_.data());
    const Edits& edits = terms_.edits;
    if (edited_ > 0) {
      const int places = shared_pool().threads();
      kept_.counts.resize(std::max<size_t>(kept_.counts.size(), places * all.size));
      shared_pool().run_places(places, count_, [&](int place, int64_t i) {
        if (!edits.edited[i]) return;
        const int64_t row = rows.row[i];
        const KnownTokens known{rows.tokens + row * rows.max_tokens, edits.num_prompt[i],
                                rows.length[row]};
        whole_[i] = edit(edits, i, all.logits + i * all.size, all.size, known, rows.counters[i],
                         kept_.counts.data() + place * all.size);
      });
    }
    const Guests& guests = terms_.guests;
    const auto width = static_cast<int64_t>(settings().size());
    for (int64_t from = 0, to; from < count_; from = to + 1) {  // up to a guest
      to = std::find(guests.guest + from, guests.guest + count_, true) - guests.guest;
      if (to == from) continue;
      sample({all.logits + from * all.size, to - from, all.size, all.settings + from * width,
              all.draws + from, all.tokens + from, all.finite + from});
    }
    for (int64_t i = 0; edited_ > 0 && i < count_; ++i) {
      if (edits.edited[i]) all.finite[i] = whole_[i];
    }
    return !guests.choose || guests.choose(all.logits, all.size, all.tokens, all.finite);
  }

  void check() const {
    bool fits = terms_.steps >= 0 && terms_.stop_from.size() == terms_.rows.size() + 1 &&
                !terms_.rows.empty() && model_.groups.size() <= tables_limit;
    for (size_t i = 0; fits && i < terms_.rows.size(); ++i) {
      const int64_t row = terms_.rows[i];
      fits = row >= 0 && row < model_.max_rows && terms_.stop_from[i] >= 0 &&
             terms_.stop_from[i] <= terms_.stop_from[i + 1] &&
             terms_.stop_from[i + 1] <= static_cast<int64_t>(terms_.stop_ids.size());
      if (!fits) break;
      const int64_t end = model_.length[row] + terms_.steps;  // tokens that the row knows then
      fits = model_.length[row] > 0 && end <= model_.max_tokens;
      for (const auto& group : model_.groups) {
        fits &= end - 1 <= group.max_blocks * model_.block_size;
      }
    }
    const int64_t slots = model_.stack->state_slots;
    fits &= turns_ ? turns_->fits(slots) : slots == 0;
    if (!fits) throw std::out_of_range("a lease has rows without room for its steps");
  }

  void gather_tables() {
    int64_t longest = 0;
    for (const int64_t row : terms_.rows) longest = std::max(longest, model_.length[row]);
    const int64_t size = model_.block_size, blocks = (longest + terms_.steps + size - 1) / size;
    for (const auto& group : model_.groups) {
      const int64_t wide = std::min(blocks, group.max_blocks);
      auto& tables = tables_.emplace_back(count_ * wide);
      auto& slots = slots_.emplace_back(count_);
      for (int64_t i = 0; i < count_; ++i) {
        std::copy_n(group.tables + terms_.rows[i] * group.max_blocks, wide,
                    tables.begin() + i * wide);
      }
      groups_.push_back({tables.data(), wide, slots.data(), nullptr});
      Tensor table{"block_tables", tables.data(), DType::i32, 2};
      table.shape = {count_, wide};
      table.stride = {wide, 1};
      batches_.push_back({table, flat("query_start", query_start_.data(), DType::i32, count_ + 1),
                          flat("seq_lens", seq_lens_.data(), DType::i32, count_),
                          flat("slot_mapping", slots.data(), DType::i64, count_), size});
    }
  }

  resident::Rows rows() {
    return {.count = count_,
            .row = terms_.rows.data(),
            .tokens = model_.tokens,
            .max_tokens = model_.max_tokens,
            .length = model_.length,
            .stop_ids = terms_.stop_ids.data(),
            .stop_from = terms_.stop_from.data(),
            .ids = ids_.data(),
            .positions = positions_.data(),
            .counters = counters_.data(),
            .seq_lens = seq_lens_.data(),
            .groups = groups_.data(),
            .num_groups = static_cast<int64_t>(groups_.size()),
            .block_size = model_.block_size,
            .given = given_.data(),
            .finite = finite_.get()};
  }

  static constexpr size_t tables_limit = 1024;

  const DecodeModel& model_;
  const LeaseTerms& terms_;
  Lease& lease_;
  Kept& kept_;
  const int64_t count_;
  int64_t edited_ = 0, withheld_ = 0;  // rows whose logits are changed, and that are not published
  std::vector<uint64_t> out_ids_;      // of those that are
  std::vector<int64_t> out_tokens_;
  const Outlet* outlet_ = nullptr;
  Clock::time_point deadline_;
  std::vector<int64_t> given_, ids_, positions_, counters_;
  std::vector<int32_t> seq_lens_, query_start_;
  std::vector<double> draws_;
  std::optional<StateTurns> turns_;  // of a model with recurrent layers
  std::unique_ptr<bool[]> finite_, whole_;
  std::vector<std::vector<int32_t>> tables_;  // moved, never copied: `groups_` has their addresses
  std::vector<std::vector<int64_t>> slots_;
  std::vector<resident::GroupRows> groups_;
  std::vector<GroupBatch> batches_;
};

LeaseResult unleased(const LeaseTerms& terms) {
  LeaseResult result;
  result.given.assign(terms.given, terms.given + terms.rows.size());
  result.finite.assign(terms.rows.size(), 1);
  result.end = End::failed;
  return result;
}

}  // namespace

LeaseResult decode(const DecodeModel& model, const LeaseTerms& terms, Lease& lease) {
  thread_local Kept kept;
  std::optional<HostPort> port;
  try {
    port.emplace(model, terms, lease, kept);
  } catch (const std::bad_alloc&) {
    return unleased(terms);  // steps that are planned one by one need less
  }
  return port->run();
}

}  // namespace weft
