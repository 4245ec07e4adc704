// Greedy longest-first partition of items into bins (LPT; Graham 1969). Reference: multimodal/balance/algorithms/post_balance.py

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

// Puts items, longest first, each into the least loaded bin that holds fewer than `max_items_per_bin` items.
//
// costs: one per item, finite and not negative; their sum fits Cost.
// num_bins: at least 1; num_bins * max_items_per_bin is at least the number of items.
// Returns the item indices of each bin in the order of their placement. Equal costs go by item index, equal loads by
// bin index, so the result is a function of the arguments alone. O(n log n + n log num_bins).
template <typename Cost>
std::vector<std::vector<std::int64_t>> partition_longest_first(const std::vector<Cost>& costs, std::int64_t num_bins,
                                                               std::int64_t max_items_per_bin);

}  // namespace braid
