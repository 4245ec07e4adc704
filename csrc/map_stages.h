#pragma once

#include <cstdint>
#include <vector>

#include "simulate_events.h"  // View

namespace braid {

// A chain of pieces and what a stage of pieces [first, end) takes on a number of GPUs: entry (size * num_pieces + first) *
// (num_pieces + 1) + end of each table.
struct StageTables {
    View<std::int64_t> forward, backward;  // ticks of one microbatch
    View<std::int64_t> capacities;         // microbatches in flight that its memory holds; 0: none
    View<std::int64_t> sizes;              // GPUs of each size
    std::int64_t num_pieces;
};

struct StageMapping {
    std::int64_t ticks = -1;  // of a step; -1 where nothing fits
    std::vector<std::int64_t> ends, sizes;  // of the stages in order: the piece after the last one, and the GPUs
};

// Returns the mapping of all pieces to stages on exactly `num_gpus[i]` GPUs with the shortest step of `num_microbatches[i]`
// microbatches under 1F1B, for multimodal/plan/planners/templates/chain.py.
std::vector<StageMapping> map_stages(const StageTables& tables, View<std::int64_t> num_gpus,
                                     View<std::int64_t> num_microbatches);

}  // namespace braid
