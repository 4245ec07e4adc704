// Blocks of tokens over the ranks of context parallelism, longest first.
// Called by multimodal/attention/share_tokens.py

#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"  // View

namespace braid {

// Puts blocks, longest first, each on the least loaded rank; then exchanges blocks between ranks while the most loaded one gains.
//
// workloads: one per block, not negative; their sum fits. num_ranks: at least 1.
// has_equal_counts: ranks get equally many blocks, or as nearly as possible.
// Returns the rank of every block. O(blocks log blocks + max_exchanges (ranks log ranks + blocks)).
std::vector<std::int32_t> distribute_longest_first(View<std::int64_t> workloads, std::int64_t num_ranks, bool has_equal_counts,
                                                   std::int64_t max_exchanges);

}  // namespace braid
