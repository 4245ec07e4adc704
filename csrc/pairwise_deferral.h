// Which microbatches run one after the other, and which samples the second takes over (Entrain 4.5.2).
// Reference: multimodal/balance/pairwise_deferral.py

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "unit_loads.h"

namespace braid {

struct Deferral {
    // Microbatches in the order of execution.
    std::vector<std::int64_t> order;
    // (sample, microbatch that its LLM part moves to), the latter numbered as before ordering.
    std::vector<std::pair<std::int64_t, std::int64_t>> deferred;
};

// microbatches: the samples of each, none empty. O(K^2 log(max_subset_sums) + n x max_subset_sums + K^3 log K).
Deferral defer_pairwise(const double* llm, const std::vector<Samples>& microbatches, std::int64_t max_subset_sums);

}  // namespace braid
