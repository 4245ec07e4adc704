// Longest first onto the least loaded bin, for ranked items: as longest_first_partition, several times as fast on large batches.

#pragma once

#include "ranked_items.h"

namespace braid {

// Writes the bin of each rank and returns the load of the most loaded bin. Padded costs are not looked at; equal loads go by bin
// index.
// num_bins * max_items_per_bin is at least the number of items; the costs' sum is below 2^62.
// O(n) while items are longer than the loads differ, O(n log num_bins) otherwise.
std::int64_t place_longest_first(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin,
                                 std::vector<std::int32_t>& bin_of_rank);

}  // namespace braid
