// The fields of the info page, in their order; layout.py says what they mean.
#pragma once

#if !defined(WEFT_RING_INFO)
#define WEFT_RING_INFO(X)                                                                          \
  X(ready) X(pid) X(started_ns) X(updated_ns) X(max_model_len) X(max_num_seqs)                     \
  X(max_num_batched_tokens) X(vocab_size) X(block_size) X(blocks) X(free_blocks) X(host_blocks)    \
  X(free_host_blocks) X(waiting) X(running) X(paused) X(queued_prompt_tokens) X(requests)          \
  X(finished) X(failed) X(cancelled) X(steps) X(prompt_tokens) X(output_tokens) X(cached_tokens)   \
  X(preemptions) X(blocks_to_host) X(blocks_to_device) X(host_tokens) X(host_queue) X(host_calls)  \
  X(host_jobs) X(host_busy_us) X(host_round_trip_us) X(host_restarts) X(host_slower_permille)      \
  X(host_surplus_us) X(disk_bytes) X(disk_saved) X(disk_lost) X(disk_tokens) X(disk_missing)       \
  X(drafted_tokens) X(accepted_tokens) X(refused) X(demoted) X(hidden_size) X(policy)              \
  X(ttft_us_0) X(tpot_us_0) X(ttft_us_1) X(tpot_us_1) X(ttft_us_2) X(tpot_us_2) X(ttft_us_3)       \
  X(tpot_us_3) X(lost_sequences) X(place_up_0) X(place_blocks_0) X(place_free_blocks_0)            \
  X(place_jobs_0) X(place_round_trip_us_0) X(place_sent_bytes_0) X(place_sessions_0)               \
  X(place_up_1) X(place_blocks_1) X(place_free_blocks_1) X(place_jobs_1) X(place_round_trip_us_1)  \
  X(place_sent_bytes_1) X(place_sessions_1) X(place_up_2) X(place_blocks_2)                        \
  X(place_free_blocks_2) X(place_jobs_2) X(place_round_trip_us_2) X(place_sent_bytes_2)            \
  X(place_sessions_2) X(place_up_3) X(place_blocks_3) X(place_free_blocks_3) X(place_jobs_3)       \
  X(place_round_trip_us_3) X(place_sent_bytes_3) X(place_sessions_3) X(resident_steps) \
  X(split_steps) X(died_ns) X(waiting_0) X(waiting_1) X(waiting_2) X(waiting_3) X(waiting_4)       \
  X(waiting_5) X(waiting_6) X(waiting_7) X(running_0) X(running_1) X(running_2) X(running_3)       \
  X(running_4) X(running_5) X(running_6) X(running_7)
#endif
