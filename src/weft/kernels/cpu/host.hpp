// The host worker: computes decode attention for the rows of a mailbox over KV in host memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "mailbox.hpp"
#include "pool.hpp"

namespace weft {

struct HostLayer {
  Tensor k_cache, v_cache;  // [num_blocks, Hkv, block_size, D], as for paged_attention
  int64_t heads = 0, head_size = 0;
  int64_t group = 0;        // of the block tables that it reads
  bool writes = true;       // false: another layer has written the KV that it reads
  float scale = 1.0f;
  int64_t window = 0;
  float softcap = 0.0f;
  std::vector<float> sinks;  // [heads], or empty
};

// Takes all Submitted jobs of one layer into one call of paged attention: those of the layer of the
// oldest job, so that none waits for ever. A job computed twice writes the same bits to the same
// places, so one whose worker died is computed again.
class HostWorker {
 public:
  // Thread i of `threads` stays on cpus[i]; none: they move. Throws std::invalid_argument if layers
  // and mailbox do not fit.
  HostWorker(const Mailbox& mailbox, std::vector<HostLayer> layers, int threads,
             std::vector<int> cpus);

  // Throws std::invalid_argument if the mailbox has another worker.
  void attach();
  // Serves the mailbox, once attached, on the calling thread until `stop`, which any thread may
  // call, and leaves it. Without jobs it sleeps.
  void run();
  void stop();

 private:
  struct Row {
    uint32_t slot;
    int64_t context;
  };

  bool work();
  bool oldest_layer(uint32_t& layer) const;
  void claim_all(uint32_t layer);
  Fault fault_of(uint32_t layer, const Row& row) const;
  void copy_tables(uint32_t layer);
  bool copy_table(const HostLayer& layer, const Row& row, int64_t place);
  void copy_rows(const HostLayer& layer);
  Attention call_of(const HostLayer& layer);
  void show_results(uint32_t layer, Fault fault);
  void finish(uint32_t layer, uint32_t slot, Fault fault);

  Mailbox mailbox_;
  std::vector<HostLayer> layers_;
  std::vector<int> cpus_;
  Pool pool_;
  std::atomic<bool> stopping_{false};
  uint32_t woken_ = 0;  // sleep of the client that has been ended

  // The rows of a call, and copies of what the mailbox says of them: if that changes meanwhile, it
  // does no harm.
  std::vector<Row> rows_;
  int64_t width_ = 0;  // of tables_
  std::vector<char> q_, k_, v_, out_;
  std::vector<int32_t> tables_, query_start_, seq_lens_;
  std::vector<int64_t> slot_mapping_;
};

}  // namespace weft
