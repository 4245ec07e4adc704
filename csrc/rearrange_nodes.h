// The node of each new batch, so that the most that any rank sends to other nodes is little (OrchMLLM, Alg. 3).
// Called by multimodal/balance/rearrange_nodes.py

#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"  // View

namespace braid {

// How far the search goes; a function of counts, never of time, so that every rank finds the same.
struct NodeSearchLimits {
    std::int64_t num_first_swaps;   // chains tried from one state
    std::int64_t max_chain_length;  // swaps in a chain
    std::int64_t max_evaluations;   // swaps evaluated in all
};

// Rank i, on node i / ranks_per_node, holds volumes[e] of new batch batches[e] for e in row_starts[i] .. row_starts[i + 1] - 1
// (batches ascend in a row, volumes are positive, a row's sum fits). As many batches as ranks; the last node may have fewer.
// Returns the node of every batch, as many on each node as it has ranks; never worse than batch j on the node of rank j.
std::vector<std::int64_t> rearrange_nodes(View<std::int64_t> row_starts, View<std::int64_t> batches, View<std::int64_t> volumes,
                                          std::int64_t ranks_per_node, const NodeSearchLimits& limits);

}  // namespace braid
