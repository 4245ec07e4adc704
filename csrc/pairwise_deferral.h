// Which microbatches run as a pair, and which samples the second takes over (Entrain 4.5.2).
//
// Sorted by LLM load, the upper half of the microbatches is overloaded (S_ol), the lower half underloaded (S_ul). For every pair
// (i, j) the samples of i are found whose loads add up closest to (w_i - w_j) / 2 (perhaps none); V_ij is the larger of the two
// loads after that. A matching of S_ol with S_ul is chosen whose largest V_ij is least (the paper's T*) and, since many do that,
// whose loads deviate least from the mean, in squares. Pairs below T* also defer if that evens them out.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "unit_loads.h"

namespace braid {

struct Deferral {
    // An overloaded microbatch and the underloaded one that follows it; of an odd number, one has no partner.
    std::vector<std::vector<std::int64_t>> pairs;
    // (sample, microbatch that its LLM part moves to), the latter numbered as in `pairs`.
    std::vector<std::pair<std::int64_t, std::int64_t>> deferred;
};

// microbatches: the samples of each, none empty. O(K^2 log(max_subset_sums) + n x max_subset_sums + K^3 log K).
Deferral defer_pairwise(const double* llm, const std::vector<Samples>& microbatches, std::int64_t max_subset_sums);

}  // namespace braid
